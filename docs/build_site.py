"""The documentation site: `make docs`.

    python docs/build_site.py                 # into build/site

The pages are those of docs/. The README is the first; changes, contributing, benchmarks and
examples are files of the repository; the reference is made from the config classes (reference.py),
the list of names from the package. All are gathered in build/pages, where links between files of
the repository become links between pages, and Zensical makes the site of them.
"""

import ast
import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath
from posixpath import relpath
from typing import Any

import reference
import yaml

import vision

ROOT = Path(__file__).parent.parent
ELSEWHERE = {
    "README.md": "index.md",
    "examples/README.md": "examples.md",
    "benchmarks/README.md": "benchmarks.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting.md",
}
"""Files of the repository that are pages, and the names of these."""
SHOWN = (".md", ".png")
"""What a link may lead to on the site; other files are in the repository only."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def pages() -> dict[str, str]:
    """Markdown of all pages by name."""
    docs = ROOT / "docs"
    found = {str(path.relative_to(docs)): path.read_text() for path in docs.rglob("*.md")}
    found |= {page: (ROOT / source).read_text() for source, page in ELSEWHERE.items()}
    found["python.md"] += names()
    found = {name: linked(name, text) for name, text in found.items()}
    return found | {f"reference/{name}": text for name, text in reference.pages().items()}


def navigation(listed: list[Any], found: dict[str, str]) -> list[Any]:
    """The listed pages, then the reference, the decisions, and what is in no section."""
    known = str(listed)
    made = [name for name in found if name.startswith("reference/")]
    decisions = sorted(name for name in found if name.startswith("decisions/"))
    others = [name for name in found if "/" not in name and f"'{name}'" not in known]
    return [*listed, {"Reference": made}, {"Decisions": decisions}, {"Project": others}]


def linked(name: str, markdown: str) -> str:
    """A page with links to other pages instead of files of the repository."""
    source = next((file for file, page in ELSEWHERE.items() if page == name), f"docs/{name}")

    def pointed(match: re.Match[str]) -> str:
        mark, text, target, place = match.groups(default="")
        if ":" in target:
            return match[0]
        file = relpath(str(PurePosixPath(source).parent / target), ".")
        page = ELSEWHERE.get(file, file.removeprefix("docs/"))
        if file == "docs/decisions":
            page = "decisions/0001-window-order.md"
        elif (not file.startswith("docs/") and file not in ELSEWHERE) or not page.endswith(SHOWN):
            return text if f"`{file}`" == text else f"{text} (`{file}`)"
        return f"{mark}[{text}]({relpath(page, str(PurePosixPath(name).parent))}{place})"

    return LINK.sub(pointed, markdown)


def names() -> str:
    """Public names of the package with definition and docstring, read without importing torch."""
    lines = ["", "## Every name", ""]
    for name, module in sorted(vision._HOMES.items()):
        text = (ROOT / f"{module.replace('.', '/')}.py").read_text()
        tree = ast.parse(text)
        node: Any = next(n for n in tree.body if getattr(n, "name", None) == name)
        written = text.splitlines()[node.lineno - 1 : node.body[0].lineno - 1]
        about = inspect.cleandoc(ast.get_docstring(node) or "")
        lines += [f"### vision.{name}", "", "```python", *written, "```", "", about, ""]
    return "\n".join(lines)


def build(folder: Path) -> None:
    """Gather the pages and make the site in a folder; a broken link is an error."""
    gathered = folder / "pages"
    for old in (gathered, folder / "site"):
        shutil.rmtree(old, ignore_errors=True)
    shutil.copytree(ROOT / "docs/images", gathered / "images")
    shutil.copy(ROOT / "docs/site.css", gathered)
    found = pages()
    for name, text in found.items():
        (gathered / name).parent.mkdir(parents=True, exist_ok=True)
        (gathered / name).write_text(text)
    config = yaml.safe_load((ROOT / "docs/mkdocs.yml").read_text())
    config |= {"docs_dir": "pages", "site_dir": "site", "nav": navigation(config["nav"], found)}
    settings = folder / "mkdocs.yml"
    settings.write_text(yaml.safe_dump(config, sort_keys=False))
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    subprocess.run([*command, "--config-file", str(settings)], check=True)
    print(f"The site is in {folder / 'site'}: open index.html there.")


if __name__ == "__main__":
    build(ROOT / "build")
