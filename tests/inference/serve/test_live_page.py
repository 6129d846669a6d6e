"""The live page in Chromium, with the server behind it; no request leaves for anywhere else."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import chromium
from served_runs import Server, noise, serving
from untrained_runs import a_run

pytestmark = pytest.mark.browser
EVIL = "<img src=x onerror=document.title='hit'>.png"
SWIN = ("model=swin_mini", "model.width=16", "model.depths=[2,2]", "model.heads=[1,2]")
DROP = """([text, name]) => {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const data = new DataTransfer();
  data.items.add(new File([bytes], name, { type: 'image/png' }));
  return data;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream") as opened:
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def server(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("runs")
    a_run(folder / "vit")
    a_run(folder / "swin", *SWIN, "model.window=3")
    with serving(f"checkpoint=[{folder / 'vit'},{folder / 'swin'}]") as started:
        yield started


class LivePage:
    """The page, what it asked for and complained of."""

    def __init__(self, browser: Any, server: Server, **context: Any) -> None:
        self.context = browser.new_context(accept_downloads=True, **context)
        self.page = self.context.new_page()
        self.server, self.runs, self.problems = server, 0, []
        self.page.on("console", lambda message: self.problems.append(message.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.context.on("request", self._request)
        self.page.goto(server.address)
        self.page.wait_for_selector("html[data-ready]")

    def _request(self, request: Any) -> None:
        if not request.url.startswith((self.server.address, "data:", "blob:")):
            self.problems.append(f"asks for {request.url}")

    def settle(self) -> None:
        """Until the next question is answered."""
        self.runs += 1
        self.page.wait_for_selector(f"html[data-runs='{self.runs}']", timeout=60_000)

    def choose(self, content: bytes, name: str = "photo.png") -> None:
        file = {"name": name, "mimeType": "image/png", "buffer": content}
        self.page.set_input_files("#file", file)
        self.settle()

    def answer(self, model: str = "vit") -> dict[str, Any]:
        found: dict[str, Any] = self.page.evaluate("model => live.answers()[model]", model)
        return found

    def explorer(self, model: str = "vit") -> Any:
        handle = self.page.query_selector(f"iframe[data-model='{model}']")
        return handle.content_frame()

    def click_cell(self, row: float, column: float) -> None:
        box = self.page.locator("#photo").bounding_box()
        self.page.mouse.click(box["x"] + column * box["width"], box["y"] + row * box["height"])


@pytest.fixture
def live(browser: Any, server: Server) -> Iterator[LivePage]:
    opened = LivePage(browser, server, viewport={"width": 1280, "height": 900})
    yield opened
    opened.context.close()
    assert opened.problems == []


def test_photo_prediction_explorer_and_two_models(live: LivePage, server: Server) -> None:
    image = noise(60, 60, seed=1)
    live.choose(image)
    expected = server.post("/predict", image).json()
    assert live.answer()["probability"] == pytest.approx(expected["probability"], abs=1e-5)
    assert live.page.inner_text(".guess .name") == expected["label"]
    frame = live.explorer()
    assert frame.evaluate("api.header.layers.length") == 4
    assert frame.evaluate("api.header.classes[0].name") == expected["label"]
    frame.evaluate("api.set({ method: 'rollout', layer: 1 })")
    live.page.select_option("#second", "swin")
    live.settle()
    assert len(live.page.query_selector_all("iframe")) == 2
    assert live.answer("swin")["label"] == server.post("/predict?model=swin", image).json()["label"]
    assert live.explorer("swin").evaluate("api.header.model") == "Swin"
    assert live.explorer().evaluate("api.state().method") == "rollout"


def test_what_if_a_cell_is_hidden_or_moved(live: LivePage, server: Server) -> None:
    live.choose(noise(60, 60, seed=1))
    before, shown = live.answer(), live.explorer().evaluate("document.images[0].src")
    live.click_cell(0.5, 0.5)
    live.settle()
    hidden = live.answer()
    assert hidden["probability"] != before["probability"]
    assert live.explorer().evaluate("document.images[0].src") != shown
    (change,) = live.page.evaluate("live.changes()")
    assert change["box"] == pytest.approx([1 / 3] * 4)
    assert "was" in live.page.inner_text(".guess .change")
    live.page.click("#undo")
    live.settle()
    assert live.answer() == before
    live.page.click("[data-tool=move]")
    box = live.page.locator("#photo").bounding_box()
    live.page.mouse.move(box["x"] + 10, box["y"] + 10)
    live.page.mouse.down()
    live.page.mouse.move(box["x"] + box["width"] - 10, box["y"] + 10)
    live.page.mouse.up()
    live.settle()
    (move,) = live.page.evaluate("live.changes()")
    assert move["kind"] == "move" and move["to"] == pytest.approx([0, 2 / 3])
    assert live.answer() != before


def test_drop_paste_camera_history_and_export(live: LivePage, tmp_path: Path) -> None:
    page = live.page
    for number, event in enumerate(("drop", "paste")):
        text = base64.b64encode(noise(seed=number)).decode()
        data = page.evaluate_handle(DROP, [text, f"{event}.png"])
        name = "dataTransfer" if event == "drop" else "clipboardData"
        if event == "drop":
            page.dispatch_event("#drop", "drop", {name: data})
        else:
            page.evaluate(
                "data => document.dispatchEvent(new ClipboardEvent('paste', { clipboardData: data,"
                " bubbles: true }))",
                data,
            )
        live.settle()
    page.click("#shoot")
    page.wait_for_selector("#camera[open]")
    page.wait_for_timeout(500)
    page.click("#snap")
    live.settle()
    assert page.inner_text("#file-name") == "camera.jpg"
    thumbs = page.query_selector_all(".thumb")
    assert [each.get_attribute("title") for each in thumbs] == [
        *("camera.jpg", "paste.png", "drop.png")
    ]
    page.click(".thumb[title='drop.png']")
    live.settle()
    assert page.inner_text("#file-name") == "drop.png"
    with page.expect_download() as download:
        page.click(".answer button")
    saved = tmp_path / download.value.suggested_filename
    download.value.save_as(saved)
    assert saved.name == "drop_vit.html"
    alone = live.context.new_page()
    alone.goto(saved.as_uri())
    alone.wait_for_selector("html[data-ready]")
    assert alone.inner_text("#title") == "drop.png"
    alone.close()
    live.problems = [each for each in live.problems if saved.as_uri() not in each]
    with page.expect_download() as drawn:
        live.explorer().click("#save")
    assert drawn.value.suggested_filename.endswith(".png")


def test_steps_follow_a_patch_through_both_models(live: LivePage) -> None:
    live.choose(noise(60, 60, seed=1))
    live.page.select_option("#second", "swin")
    live.settle()
    live.page.click("[data-tool=follow]")
    live.click_cell(0.1, 0.9)
    live.settle()
    lanes = live.page.query_selector_all(".lane")
    assert [lane.query_selector("h2").inner_text() for lane in lanes] == ["vit", "swin"]
    assert "row 0 and column 2" in lanes[0].inner_text()
    lanes[1].query_selector("[data-step=shift-1]").click()
    assert "masked" in lanes[1].inner_text()
    lanes[0].query_selector("[data-step=head]").click()
    assert "probability" in lanes[0].inner_text()


def test_names_are_text_and_a_file_that_is_not_an_image_is_answered(live: LivePage) -> None:
    live.choose(noise(), EVIL)
    assert live.page.inner_text("#file-name") == EVIL
    assert live.page.title() == "vision serve"
    assert live.explorer().inner_text("#title") == EVIL
    assert not live.page.query_selector("img[src=x]")
    live.choose(b"not an image", "text.png")
    assert "not an image" in live.page.inner_text("[role=alert]")
    # The browser itself reports the refusals that the page shows.
    live.problems = [each for each in live.problems if "415" not in each and "decoded" not in each]


@pytest.mark.parametrize(
    ("width", "scheme"), [pytest.param(1280, "dark", marks=pytest.mark.slow), (420, "light")]
)
def test_page_fits_its_width_in_both_themes(
    browser: Any, server: Server, width: int, scheme: str
) -> None:
    size = {"width": width, "height": 900}
    opened = LivePage(browser, server, viewport=size, color_scheme=scheme)
    opened.choose(noise())
    wide = opened.page.evaluate("document.documentElement.scrollWidth")
    assert wide <= width
    assert opened.page.get_attribute("html", "data-theme") == scheme
    assert opened.explorer().evaluate("document.documentElement.dataset.theme") == scheme
    opened.page.click("#theme")
    assert opened.explorer().evaluate("document.documentElement.dataset.theme") != scheme
    opened.context.close()
    assert opened.problems == []
