"""The documentation site: built as `make docs` builds it, and clicked through in Chromium."""

import re
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import build_site
import pytest
import reference
from chromium import chromium

from vision.cli.app import COMMANDS
from vision.config import Config, config_classes


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    build_site.build(folder)
    return folder


def fields(config: type[Config], prefix: str = "") -> Iterator[str]:
    """Every path below a config class."""
    for name, field in config.model_fields.items():
        inner = config_classes(field.annotation)
        if not inner and name != "kind":
            yield f"{prefix}{name}"
        for each in inner:
            yield from fields(each, f"{prefix}{name}.")


def test_reference_has_every_setting_of_every_command_with_its_meaning(built: Path) -> None:
    found = {path.stem: path.read_text() for path in (built / "pages/reference").glob("*.md")}
    shared = "".join(found[reference.group_file(group)] for group in reference.KINDS)
    for name, command in COMMANDS.items():
        missing = [
            path
            for path in fields(command.config)
            if f"`{path}`" not in found[name] and f"`{path}`" not in shared
        ]
        assert not missing, f"{name}: {missing}"
    assert "Peak learning rate, for a global batch" in found["train"]
    assert "| `port` | `8000` | integer from 0 to 65,535 | 0: any free port" in found["serve"]
    assert "| `batch_size` | `128` |" in found["train"]


def test_every_page_has_its_place_and_every_link_leads_to_a_page(built: Path) -> None:
    site, pages = built / "site", build_site.pages()
    listed = str(build_site.yaml.safe_load((built / "mkdocs.yml").read_text())["nav"])
    assert [name for name in pages if f"'{name}'" not in listed] == []
    for name in pages:
        page = site / Path(name).with_suffix(".html")
        for target in re.findall(r'(?:href|src)="([^"#:]+)[#"]', page.read_text()):
            assert (page.parent / target).exists(), f"{name}: {target}"


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        ("index.md", "[a](docs/data.md#x)", "[a](data.md#x)"),
        ("index.md", "![a](docs/images/a.png)", "![a](images/a.png)"),
        ("index.md", "[a](CHANGELOG.md)", "[a](changes.md)"),
        ("results.md", "[a](../benchmarks/README.md)", "[a](benchmarks.md)"),
        ("decisions/0003-settings.md", "[a](../hydra.md)", "[a](../hydra.md)"),
        ("start.md", "[a](../slurm/job.sh)", "a (`slurm/job.sh`)"),
        ("start.md", "[a](https://arxiv.org/abs/1)", "[a](https://arxiv.org/abs/1)"),
    ],
)
def test_links_between_files_become_links_between_pages(
    page: str, text: str, expected: str
) -> None:
    assert build_site.linked(page, text) == expected


def test_broken_link_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_site, "pages", lambda: {"index.md": "# A\n\n[b](nowhere.md)\n"})
    monkeypatch.setattr(build_site, "navigation", lambda listed, found: ["index.md"])
    with pytest.raises(build_site.subprocess.CalledProcessError):
        build_site.build(tmp_path)


class QuietHandler(SimpleHTTPRequestHandler):
    """Without a line for each request."""

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address(built: Path) -> Iterator[str]:
    handler = partial(QuietHandler, directory=str(built / "site"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.browser
@pytest.mark.parametrize(
    ("width", "scheme"), [pytest.param(1280, "dark", marks=pytest.mark.slow), (400, "light")]
)
def test_site_is_clicked_through_and_no_request_leaves(
    address: str, width: int, scheme: str
) -> None:
    problems: list[str] = []

    def note(request: Any) -> None:
        if not request.url.startswith((address, "data:", "blob:")):
            problems.append(f"asks for {request.url}")

    with chromium() as browser:
        size = {"width": width, "height": 900}
        context = browser.new_context(viewport=size, color_scheme=scheme)
        context.on("request", note)
        page = context.new_page()
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        for name in ("index", "start", "reference/train", "attention", "decisions/0007-muon"):
            page.goto(f"{address}{name}.html", wait_until="networkidle")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
            broken = "[...document.images].filter(i => !i.naturalWidth).map(i => i.src)"
            assert page.evaluate(broken) == []
        background = "getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]"
        assert (int(page.evaluate(background)) < 100) == (scheme == "dark")
        page.goto(f"{address}start.html")
        page.click("article a[href='serve.html']")
        page.wait_for_url("**/serve.html")
        page.keyboard.press("Control+k")
        page.keyboard.type("orthogonalises")
        page.wait_for_selector("a[href*='muon']:visible, a[href*='scratch']:visible")
        browser.close()
    assert problems == []
