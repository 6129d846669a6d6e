"""The page in a browser: its numbers are Python's, and pointer and keys do what they say."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chromium import chromium
from explorer_pages import explained_model, make_page
from inspected_models import built, reach
from PIL import Image

from vision.inspection.capture.capture import capture
from vision.inspection.capture.captured import Captured
from vision.inspection.explain import LEAST_LIMIT, available_methods
from vision.inspection.explorer.pack import LADDER
from vision.inspection.explorer.page import PAGE_METHODS, write_page
from vision.inspection.methods.attribution import attribute
from vision.inspection.methods.layer_maps import cam_seed, token_gradcam, token_norms
from vision.inspection.methods.rollout import chefer, fused, gradient_rollout, rollout, seed_of

pytestmark = pytest.mark.browser
KINDS = ["vit", "vit mean", "swin", "swin padded", "swin_v2"]
WINDOWED = ["swin", "swin padded", "swin_v2"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started
        started.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


class Opened:
    """A page that is open, and what it asked for and complained of."""

    def __init__(self, browser: Any, path: Path, address: str = "", **context: Any) -> None:
        self.context = browser.new_context(
            **({"viewport": {"width": 1280, "height": 900}} | context)
        )
        self.page = self.context.new_page()
        self.problems: list[str] = []
        self.page.on("console", lambda message: self.problems.append(message.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", self._request)
        self.page.goto(f"{path.as_uri()}{address}")
        self.page.wait_for_selector("html[data-ready]", timeout=20_000)

    def _request(self, request: Any) -> None:
        if not request.url.startswith(("file:", "data:", "blob:")):
            self.problems.append(f"asks for {request.url}")

    def evaluate(self, settings: dict[str, Any], query: dict[str, Any]) -> np.ndarray:
        found = self.page.evaluate("([s, q]) => api.evaluate(s, q)", [settings, query])
        return np.array(found["values"])

    def evaluate_all(self, asked: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[np.ndarray]:
        """The same for many questions at once."""
        found = self.page.evaluate("asked => asked.map(([s, q]) => api.evaluate(s, q))", asked)
        return [np.array(each["values"]) for each in found]

    def state(self) -> dict[str, Any]:
        self.settle()
        found: dict[str, Any] = self.page.evaluate("api.state()")
        return found

    def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        self.page.evaluate(
            "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    def point(self, pixel: tuple[float, float]) -> None:
        self.page.mouse.move(*self.page.evaluate("p => api.pixelOnScreen(p)", list(pixel)))
        self.settle()

    def click(self, pixel: tuple[float, float]) -> None:
        self.page.mouse.click(*self.page.evaluate("p => api.pixelOnScreen(p)", list(pixel)))
        self.settle()

    def readout(self) -> dict[str, str]:
        self.settle()
        rows = self.page.query_selector_all("#readout > div")
        return {
            row.query_selector("dt").inner_text(): row.query_selector("dd").inner_text()
            for row in rows
        }


@pytest.fixture(scope="module")
def opened(browser: Any, folder: Path) -> Iterator[Any]:
    """Pages by kind, each opened once."""
    pages: dict[str, Opened] = {}

    def open_kind(kind: str) -> Opened:
        if kind not in pages:
            path = make_page(kind, folder / f"{kind}.html")
            pages[kind] = Opened(browser, path)
        return pages[kind]

    yield open_kind
    for page in pages.values():
        page.context.close()
        assert page.problems == []


def captured_of(kind: str) -> Captured:
    model, image = explained_model(kind)
    return capture(model, image)


def cell(*at: int) -> dict[str, Any]:
    return {"kind": "cell", "at": list(at)}


def close(found: np.ndarray, expected: torch.Tensor, tolerance: float | None = None) -> None:
    """Equal to a thousandth; where all values are small, to a hundredth of the largest."""
    if tolerance is None:
        tolerance = min(1e-3, 1e-2 * float(expected.abs().max()))
    assert found.shape == tuple(expected.shape)
    assert np.abs(found - expected.numpy()).max() <= tolerance


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("direction", ["row", "column"])
def test_attention_of_every_layer_and_head_equals_python(
    opened: Any, kind: str, direction: str
) -> None:
    asked, expected = [], []
    for layer in captured_of(kind).layers:
        rows, columns = layer.layout.grid
        for at in [(0, 0), (rows - 1, columns - 1), (rows // 2, 1)]:
            # Where all tokens look at one is a row of the transposed weights.
            weights = layer.weights if direction == "row" else layer.weights.transpose(-1, -2)
            for head, values in enumerate(layer.layout.row(weights, at)[0]):
                settings = {"layer": layer.number, "head": head, "direction": direction}
                asked.append((settings, cell(*at)))
                expected.append(values)
    for found, values in zip(opened(kind).evaluate_all(asked), expected, strict=True):
        close(found, values, 1e-3)


def test_attention_of_prefix_tokens_equals_python(opened: Any) -> None:
    for layer in captured_of("vit").layers:
        for token, name in enumerate(["class", "register 1", "register 2"]):
            settings = {"layer": layer.number, "head": 1}
            found = opened("vit").evaluate(settings, {"kind": "prefix", "token": token})
            close(found, layer.row(name)[0, 1])


@pytest.mark.parametrize("kind", ["vit", "vit mean", "swin"])
def test_attention_of_the_pooled_output_equals_python(opened: Any, kind: str) -> None:
    captured = captured_of(kind)
    last = captured.layers[-1]
    seed = seed_of(captured)[0, 0]
    rows = torch.stack([last.row(last.layout.place(t))[0] for t in range(last.layout.tokens)])
    expected = torch.einsum("n,nhm->hm", seed, rows)
    found = opened(kind).evaluate({"layer": last.number, "head": 0}, {"kind": "pool"})
    close(found, expected[0])


SETTINGS: list[dict[str, Any]] = [
    {},
    {"fusion": "max"},
    {"fusion": "min", "residual": 0.2},
    {"residual": "measured"},
    {"residual": 0.0, "start": 1},
]
BY_QUERY = [(at, settings) for at in ("pool", "cell") for settings in SETTINGS] + [
    ("cell", {"start": 1, "end": 1}),
    ("cell", {"end": 1, "fusion": "max"}),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("at", "settings"), BY_QUERY, ids=str)
def test_rollout_with_any_setting_equals_python(
    opened: Any, kind: str, settings: dict[str, Any], at: str
) -> None:
    captured = captured_of(kind)
    end = settings.get("end", captured.depth - 1)
    query: Any = "pool" if at == "pool" else (2, 1)
    expected = rollout(
        captured,
        seed_of(captured, query, layer=end),
        fusion=settings.get("fusion", "mean"),
        residual=settings.get("residual", 0.5),
        start_layer=settings.get("start", 0),
        end_layer=end,
    )[0, 0]
    asked = {"kind": "pool"} if at == "pool" else cell(2, 1)
    found = opened(kind).evaluate({"method": "rollout", **settings}, asked)
    close(found, expected)
    assert found.sum() == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_rollout_with_discarded_weights_equals_python(opened: Any, kind: str) -> None:
    captured = captured_of(kind)
    expected = rollout(captured, seed_of(captured, (1, 1)), discard=0.6)[0, 0]
    found = opened(kind).evaluate({"method": "rollout", "discard": 0.6}, cell(1, 1))
    # 8 bits make equals of neighbours in rank, so which of them goes may differ.
    assert np.abs(found - expected.numpy()).sum() <= 0.02
    plain = rollout(captured, seed_of(captured, (1, 1)))[0, 0]
    assert (plain - expected).abs().sum() > 0.1


@pytest.mark.parametrize("kind", ["vit", "swin padded"])
def test_rollout_without_muted_heads_equals_python(opened: Any, kind: str) -> None:
    captured = captured_of(kind)
    axis = 2 if captured.windowed else 1
    kept = torch.arange(1, captured.layers[1].weights.shape[axis])
    layer = replace(captured.layers[1], weights=captured.layers[1].weights.index_select(axis, kept))
    without = replace(captured, layers=[captured.layers[0], layer, *captured.layers[2:]])
    expected = rollout(without, seed_of(captured))[0, 0]
    found = opened(kind).evaluate({"method": "rollout", "muted": {"1": [0]}}, {"kind": "pool"})
    close(found, expected)
    difference = (rollout(captured, seed_of(captured))[0, 0] - expected).abs().max()
    assert difference > 2 * min(1e-3, 1e-2 * float(expected.max()))


@pytest.mark.parametrize("kind", KINDS)
def test_rollout_of_who_looks_equals_a_column_of_the_whole_product(opened: Any, kind: str) -> None:
    captured = captured_of(kind)
    everyone = torch.eye(captured.layout.tokens)[None]
    whole = rollout(captured, everyone)[0]
    bottom = captured.layers[0].layout
    found = opened(kind).evaluate({"method": "rollout", "direction": "column"}, cell(3, 2))
    close(found, whole[:, bottom.query((3, 2))])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("klass", [0, 2])
def test_class_methods_equal_python(opened: Any, kind: str, klass: int) -> None:
    model, image = explained_model(kind)
    number = int(model(image)[0].argsort(descending=True)[klass])
    captured = capture(model, image, targets=number, gradients=True)
    seed = seed_of(captured)
    page, pool = opened(kind), {"kind": "pool"}
    expected = gradient_rollout(captured, seed, clamp="before", normalize=True)[0, 0]
    close(page.evaluate({"method": "gradient_rollout", "klass": klass}, pool), expected)
    expected = chefer(captured, seed)[0, 0]
    found = page.evaluate({"method": "chefer", "klass": klass}, pool)
    close(found, expected, 1e-2 * float(expected.abs().max()))
    cells = captured.layout.to_grid(token_gradcam(captured.layers[-1])[0]).flatten()
    found = page.evaluate({"method": "token_gradcam", "klass": klass}, pool)
    close(found[len(captured.layout.prefix) :], cells, 1e-5 * float(cells.max()))
    if kind != "vit":
        seed = cam_seed(captured, torch.tensor([number]))
        found = page.evaluate({"method": "cam_rollout", "klass": klass}, pool)
        close(found, rollout(captured, seed)[0, 0])


def test_norms_equal_python(opened: Any) -> None:
    norms = token_norms(captured_of("swin"))[0]
    close(opened("swin").evaluate({"method": "norm"}, {"kind": "pool"}), norms, 1e-4)


@pytest.mark.parametrize("kind", WINDOWED)
def test_windows_masks_and_lineage_equal_python(opened: Any, kind: str) -> None:
    page = opened(kind).page
    captured = captured_of(kind)
    masked = 0
    for layer in captured.layers:
        layout = layer.layout
        for at in [(0, 0), (layout.grid[0] - 1, 2), (2, layout.grid[1] - 1)]:
            for name, cells in (("reach", reach(layout, at)), ("masked", layout.masked(at))):
                expected = cells.nonzero().tolist()
                found = page.evaluate(f"([l, c]) => api.{name}(l, c)", [layer.number, list(at)])
                assert sorted(found) == expected
                masked += len(expected) * (name == "masked")
    assert masked > 0
    pixel = (21, 37)
    stages = {layer.layout.stride: layer.layout for layer in captured.layers}
    expected = [list(layout.cell_at(pixel)) for layout in stages.values()]
    assert page.evaluate("p => api.lineage(p)", list(pixel)) == expected
    assert len(expected) == 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vit", "swin padded"])
@pytest.mark.parametrize("rung", range(2, len(LADDER) + 1))
def test_page_on_a_lower_rung_says_so_and_stays_close(
    browser: Any, folder: Path, kind: str, rung: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vision.inspection.explorer.pack.LADDER", LADDER[rung - 1 :])
    path = make_page(kind, folder / f"{kind} {rung}.html")
    page = Opened(browser, path)
    assert f"Level of detail {rung}" in page.page.inner_text("#rung")
    captured = captured_of(kind)
    expected = rollout(captured, seed_of(captured))[0, 0]
    found = page.evaluate({"method": "rollout"}, {"kind": "pool"})
    if LADDER[rung - 1].pooled and kind == "vit":
        # Cells of 2 x 2 share what they got: compare their sums.
        prefix, grid = len(captured.layout.prefix), captured.layout.grid
        pairs = (grid[0] // 2, 2, grid[1] // 2, 2)
        one, other = (np.array(v)[prefix:].reshape(pairs) for v in (found, expected.numpy()))
        assert np.abs(one.sum((1, 3)) - other.sum((1, 3))).max() < 0.1
    else:
        assert np.abs(found - expected.numpy()).max() < 0.02
    if rung >= 3 and kind == "vit":
        first = captured.layers[0]
        found = page.evaluate({"layer": 0, "head": 2}, {"kind": "prefix", "token": 1})
        close(found, first.row("register 1")[0, 2])
        assert (
            page.page.evaluate("api.evaluate({layer: 0, head: 2}, {kind: 'cell', at: [1, 1]})")
            is None
        )
    for method in ("gradient_rollout", "chefer", "attention"):
        page.page.evaluate("method => api.set({method, klass: 2})", method)
        state = page.state()
        assert state["method"] == (method if rung < 6 else "attention")
        assert state["klass"] == (0 if rung == 5 and method != "attention" else 2)
    page.point((20, 20))
    assert page.problems == []
    page.context.close()


def test_colours_of_a_nearly_uniform_map_end_at_a_multiple_of_uniform(
    browser: Any, folder: Path
) -> None:
    """As in the figures: such a map looks dull, whichever limit is chosen."""
    page = Opened(browser, make_page("vit", folder / "dull.html"))
    captured = captured_of("vit")
    rows = captured.layout.to_grid(fused(captured.layers[-1], "mean")[0, 3:]).reshape(-1, 48)
    flat = int(rows.amax(1).argmin())
    assert float(rows[flat].max()) * 51 < LEAST_LIMIT
    y, x = divmod(flat, 8)
    page.point((8 * y + 4, 8 * x + 4))
    for limit in ("max", "p99"):
        page.page.evaluate("limit => api.set({limit})", limit)
        end = page.page.text_content("#high").split("= ")[1]
        assert end == "2 × uniform" or float(end.split()[0]) == pytest.approx(LEAST_LIMIT, rel=0.01)
    assert page.problems == []
    page.context.close()


def test_pointer_over_a_cell_makes_it_the_query(browser: Any, folder: Path) -> None:
    page = Opened(browser, make_page("vit", folder / "pointer.html"))
    assert page.readout()["Query"] == "pooled output"
    page.point((20, 42))  # patches of 8 pixels
    readout = page.readout()
    assert readout["Query"] == "row 2 · col 5"
    captured = captured_of("vit")
    row = captured.layout.to_grid(fused(captured.layers[-1], "mean")[0, 3 + 2 * 8 + 5])
    y, x = divmod(int(row.argmax()), 8)
    assert readout["Largest"] == f"row {y} · col {x}"
    assert float(readout["Weight"]) == pytest.approx(float(row.max()), rel=0.05)
    assert float(readout["× uniform"]) == pytest.approx(float(row.max()) * 51, rel=0.01)
    far = 8 * float(np.hypot(y - 2, x - 5))
    assert readout["Distance"] == f"{round(far)} px"
    page.page.mouse.move(2, 2)
    assert page.readout()["Query"] == "pooled output"
    assert page.problems == []


def test_clicks_pin_compare_and_let_go(browser: Any, folder: Path) -> None:
    page = Opened(browser, make_page("vit", folder / "clicks.html"))
    page.click((4, 4))
    page.point((28, 28))
    readout = page.readout()
    assert readout["Query"] == "row 0 · col 0" and readout["Cell"] == "row 3 · col 3"
    page.click((28, 28))
    readout = page.readout()
    assert (readout["Query"], readout["Minus"]) == ("row 0 · col 0", "row 3 · col 3")
    captured = captured_of("vit")
    matrix = fused(captured.layers[-1], "mean")[0]
    shown = page.page.evaluate("api.shown()")
    assert shown["signed"]
    close(np.array(shown["cells"]), (matrix[3] - matrix[3 + 3 * 8 + 3])[3:], 2e-3)
    page.click((12, 12))
    assert page.readout()["Query"] == "row 1 · col 1" and page.state()["other"] is None
    page.click((12, 12))
    assert not page.state()["pinned"]
    assert page.problems == []


def test_keys_do_what_the_help_says(browser: Any, folder: Path) -> None:
    page = Opened(browser, make_page("swin", folder / "keys.html"))
    press = page.page.keyboard.press
    first = page.state()
    assert (first["layer"], first["head"], first["method"]) == (6, "fused", "attention")
    press("ArrowRight")
    press("ArrowUp")
    assert (page.state()["head"], page.state()["layer"]) == (0, 5)
    press("m")
    assert page.state()["muted"] == {"5": [0]}
    press("ArrowLeft")
    press("ArrowLeft")
    assert page.state()["head"] == 3  # the last of four, around the end
    for key, name, value in [
        (" ", "overlay", False),
        ("r", "method", "rollout"),
        ("d", "direction", "column"),
        ("c", "klass", 1),
        ("w", "outlines", False),
        ("t", "theme", "dark"),
    ]:
        press(key)
        assert page.state()[name] == value, key
    press("Shift+ArrowDown")
    assert page.state()["pinned"] and page.state()["query"]["kind"] == "pixel"
    before = page.state()["query"]["at"]
    press("Shift+ArrowRight")
    # Who explanations: the query is a cell of the first layer, of 2 pixels.
    assert page.state()["query"]["at"] == [before[0], before[1] + 2]
    press("Escape")
    assert not page.state()["pinned"] and page.state()["query"] == {"kind": "pool"}
    press("?")
    assert page.page.is_visible("#help")
    press("Escape")
    assert not page.page.is_visible("#help")
    assert page.problems == []


def test_small_map_clicked_is_enlarged_and_with_shift_muted(browser: Any, folder: Path) -> None:
    page = Opened(browser, make_page("swin", folder / "tiles.html"))
    x, y = page.page.evaluate("api.tileOnScreen(1, 1)")
    page.page.mouse.click(x, y)
    assert (page.state()["layer"], page.state()["head"]) == (1, 1)
    page.page.keyboard.down("Shift")
    page.page.mouse.click(x, y)
    page.page.keyboard.up("Shift")
    assert page.state()["muted"] == {"1": [1]}


def test_sliders_change_the_rollout_that_is_shown(browser: Any, folder: Path) -> None:
    page = Opened(browser, make_page("vit", folder / "sliders.html"), "#m=rollout")
    captured = captured_of("vit")
    for name, value, options in [
        ("residual", "0.2", {"residual": 0.2}),
        ("start", "1", {"residual": 0.2, "start_layer": 1}),
    ]:
        page.page.fill(f"#set-{name}", value)
        page.settle()
        expected = rollout(captured, seed_of(captured), **options)[0, 0, 3:]
        close(np.array(page.page.evaluate("api.shown()")["cells"]), expected)
    page.page.fill("#set-mass", "0.5")
    page.settle()
    shown = page.page.evaluate("api.shown()")
    cells = np.array(shown["cells"])
    kept = np.array(shown["kept"], dtype=bool)
    share = cells[kept].sum() / cells.sum()
    assert share >= 0.5 > share - cells[kept].min() / cells.sum()


def test_view_in_the_address_comes_back(browser: Any, folder: Path) -> None:
    path = make_page("swin", folder / "address.html")
    page = Opened(browser, path)
    page.click((20, 30))
    page.click((10, 12))
    page.page.evaluate(
        "api.set({fusion: 'max', muted: {2: [1]}, opacity: 0.4, residual: 'measured'})"
    )
    page.page.wait_for_url(lambda url: "u=" in url)
    state, address = page.state(), page.page.evaluate("location.hash")
    again = Opened(browser, path, address)
    assert again.state() == state
    assert state["other"] is not None and state["pinned"]
    assert page.problems == again.problems == []


@pytest.mark.parametrize(
    "address", ["#m=nothing&l=99&h=77&q=900,900&e=-4&s=2&r=x&u=9:9;1", "#%%%", "#l=NaN&h=-1&h=x"]
)
def test_address_that_does_not_fit_opens_all_the_same(
    browser: Any, folder: Path, address: str
) -> None:
    page = Opened(browser, make_page("vit", folder / "address.html"), address)
    state = page.state()
    assert state["method"] == "attention" and 0 <= state["layer"] <= 2
    page.point((20, 20))
    assert page.problems == []


def test_saved_image_is_a_png_with_colours(browser: Any, folder: Path, tmp_path: Path) -> None:
    page = Opened(browser, make_page("vit", folder / "save.html"))
    with page.page.expect_download() as download:
        page.page.keyboard.press("s")
    download.value.save_as(tmp_path / "view.png")
    with Image.open(tmp_path / "view.png") as image:
        assert image.format == "PNG" and min(image.size) > 300
        assert len(image.convert("RGB").getcolors(1 << 20) or []) > 200


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vit", "swin padded"])
@pytest.mark.parametrize("width", [1024, 1600])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_page_at_any_width_and_theme_fits_and_draws(
    browser: Any, folder: Path, kind: str, width: int, theme: str
) -> None:
    path = make_page(kind, folder / f"{kind} look.html")
    page = Opened(browser, path, viewport={"width": width, "height": 900}, color_scheme=theme)
    inside = page.page.evaluate(
        "() => [document.documentElement.scrollWidth, innerWidth,"
        " document.documentElement.dataset.theme]"
    )
    assert inside == [width, width, theme]
    for name in ("image", "tiles", "scale"):
        colours = page.page.evaluate(
            """name => { const canvas = document.getElementById(name);
            const { width, height } = canvas;
            const { data } = canvas.getContext('2d').getImageData(0, 0, width, height);
            return new Set(new Uint32Array(data.buffer)).size; }""",
            name,
        )
        assert colours > 20, name
    cut = page.page.evaluate(
        """() => [...document.querySelectorAll('aside *, header *, .readout *')].filter(node =>
          node.getBoundingClientRect().right > node.closest('aside, header, .look')
            .getBoundingClientRect().right + 0.5).map(node => node.outerHTML.slice(0, 80))"""
    )
    assert cut == []
    page.page.click("#tab-methods")
    page.settle()
    assert page.page.inner_text("#methods").count("Show it") >= 5
    assert page.problems == []


def test_everything_that_can_be_operated_has_a_name(browser: Any, folder: Path) -> None:
    page = Opened(browser, make_page("swin", folder / "names.html"))
    nameless = page.page.evaluate(
        """() => [...document.querySelectorAll('button, input, select, canvas')].filter(node =>
          !(node.getAttribute('aria-label') || node.textContent.trim()
            || (node.labels && node.labels[0] && node.labels[0].textContent.trim())))
          .map(node => node.outerHTML.slice(0, 80))"""
    )
    assert nameless == []


def test_scores_are_shown_with_their_baselines(browser: Any, folder: Path) -> None:
    scores = {"random": {"energy": 8.0}, "rollout": {"energy": 41.3, "pointing": 100.0}}
    path = make_page("vit", folder / "scores.html", scores=scores, scores_note="So it is.")
    page = Opened(browser, path, "#i=methods")
    assert table_of(page) == [
        ["Method", "energy ↑", "pointing ↑"],
        ["Rollout", "41.3", "100"],
        ["random (baseline)", "8", "–"],
    ]
    assert page.page.inner_text("#scores-note") == "So it is."
    said = page.page.eval_on_selector("#methods details", "node => node.textContent")
    assert "the share of the map that lies on the object" in said
    assert page.problems == []


@pytest.mark.parametrize("kind", ["vit", "swin"])
def test_page_shows_the_texts_of_the_specs(opened: Any, kind: str) -> None:
    page = opened(kind).page
    model, image = explained_model(kind)
    plain = capture(model, image)
    choices = available_methods([str(choice) for choice in PAGE_METHODS], plain)
    missing = [choice for choice in PAGE_METHODS if choice not in choices]
    options = page.eval_on_selector_all("#method option", "all => all.map(o => o.textContent)")
    assert options == [choice.title for choice in choices]
    cards = page.eval_on_selector_all(
        "#methods .card", "all => all.map(c => [...c.children].map(x => x.textContent))"
    )
    for card, choice in zip(cards, choices, strict=True):
        spec = choice.spec
        assert card[:4] == [choice.title, spec.formula, spec.notes, spec.reference]
    whole = page.evaluate("() => document.querySelector('#methods').textContent")
    assert all(choice.title in whole for choice in missing) and (kind != "vit" or missing)
    for choice in choices:
        page.evaluate("method => api.set({method})", choice.name)
        opened(kind).settle()
        assert page.inner_text("#what") == choice.title
        explained = not page.is_visible("#classes + p")
        assert explained == choice.spec.for_class


def test_page_without_scores_says_why(browser: Any, folder: Path) -> None:
    path = make_page("vit", folder / "unscored.html", scores_note="There is no mask.")
    page = Opened(browser, path, "#i=methods")
    assert table_of(page) == []
    text = page.page.inner_text("#methods")
    assert "No method was scored on this image." in text and "There is no mask." in text


def table_of(page: Opened) -> list[list[str]]:
    found: list[list[str]] = page.page.eval_on_selector_all(
        "#methods tr", "rows => rows.map(row => [...row.children].map(c => c.textContent))"
    )
    return found


FOREIGN = ["timm swin padded", "torchvision swin v2", "transformers dinov2 registers"]


@pytest.mark.parametrize(
    "name", [FOREIGN[0], *(pytest.param(name, marks=pytest.mark.slow) for name in FOREIGN[1:])]
)
def test_page_of_a_model_of_another_library_equals_python(
    browser: Any, folder: Path, name: str
) -> None:
    model, image = built(name, batch=1)
    shown = Image.new("RGB", (image.shape[-1], image.shape[-2]))
    path = folder / f"{name}.html"
    write_page(model, image, shown, path)
    page = Opened(browser, path)
    captured = capture(model, image)
    shown = page.page.eval_on_selector_all("#method option", "all => all.map(o => o.value)")
    asked = available_methods([str(choice) for choice in PAGE_METHODS], captured)
    assert shown == [choice.name for choice in asked]
    for choice in asked:
        found = page.evaluate({"method": choice.name}, {"kind": "pool"})
        maps = attribute(model, image, choice.name, **choice.options)
        # The page shows what speaks for a class; Python also has what speaks against it.
        expected = maps.values[0].clamp_min(0).flatten().detach()
        close(found[-len(expected) :], expected, 1e-2 * float(expected.max()))
    layer = captured.layers[-1]
    found = page.evaluate({"layer": layer.number, "head": 1}, cell(1, 2))
    close(found, layer.row((1, 2))[0, 1])
    assert page.problems == []
    page.context.close()
