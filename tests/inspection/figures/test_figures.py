"""Figures: the numbers in them are those of the methods, whatever the format."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from explained_models import noise, seen
from matplotlib.image import AxesImage
from PIL import Image

from vision.config import ConfigError
from vision.inspection.capture.capture import capture
from vision.inspection.capture.captured import Captured
from vision.inspection.explain import as_batch, every_method, explain
from vision.inspection.figures.diagnostics import diagnostics, gather_heads, heads_figure
from vision.inspection.figures.drawing import Drawing, Style, colour_limit
from vision.inspection.figures.filmstrip import comparison, film_strip
from vision.inspection.figures.raw_attention import (
    heads_sheet,
    microscope,
    nine_places,
    queries_sheet,
)
from vision.inspection.figures.sheet import overlay_sheet
from vision.inspection.methods.attribution import attribute
from vision.inspection.methods.rollout import seed_of
from vision.inspection.methods.spec import parse_methods
from vision.training.run.drawn_attention import check_attention, draw_attention

CHOICES = parse_methods(["rollout", "chefer", "attention:layer:0:head:1"])
SMALL = Style(dpi=40)


def captures(subject: Any, *batches: Any) -> list[Captured]:
    return [capture(subject.model, as_batch(subject, pixels)) for pixels in batches]


def texts(drawing: Drawing) -> str:
    return " ".join(t.get_text() for t in drawing.figure.findobj(lambda o: hasattr(o, "get_text")))


def test_look_at_gives_the_values_of_each_method_for_each_class() -> None:
    subject, pixels = seen(), noise(number=2)
    images = as_batch(subject, pixels)
    explanations = explain(subject, pixels, CHOICES, classes=[2, 5])
    for method, options in (("rollout", {}), ("attention", {"layer": 0, "head": 1})):
        expected = attribute(subject.model, images, method, **options).times_uniform()
        for i, explanation in enumerate(explanations):
            (heatmap,) = [p for p in explanation.heatmaps if p.choice.name == method]
            assert torch.allclose(torch.from_numpy(heatmap.values), expected[i], atol=1e-5)
    for rank, target in enumerate((2, 5)):
        maps = attribute(subject.model, images, "chefer", target=target)
        for i, explanation in enumerate(explanations):
            heatmap = explanation.heatmaps_of(CHOICES[1])[rank]
            assert heatmap.explained is not None and heatmap.explained.number == target
            assert torch.allclose(
                torch.from_numpy(heatmap.values), maps.times_uniform()[i], rtol=1e-3, atol=1e-4
            )


def test_look_at_answers_are_the_models_probabilities() -> None:
    subject, pixels = seen(), noise()
    with torch.no_grad():
        shares = subject.model(as_batch(subject, pixels)).softmax(1)[0]
    answers = explain(subject, pixels, CHOICES)[0].top
    assert [a.number for a in answers] == shares.topk(5).indices.tolist()
    assert [a.probability for a in answers] == pytest.approx(shares.topk(5).values.tolist())


def test_model_without_a_head_has_no_classes_and_no_methods_for_them() -> None:
    subject = seen()
    subject.model.head = torch.nn.Identity()
    headless = type(subject)(subject.model, (), subject.preprocess)
    explanation = explain(headless, noise())[0]
    assert explanation.top == ()
    assert [str(p.choice) for p in explanation.heatmaps] == ["rollout", "attention", "norm"]
    with pytest.raises(ConfigError, match=r"chefer is not available .*no logits"):
        explain(headless, noise(), CHOICES)
    assert "has no classes" in overlay_sheet([explanation], style=SMALL).caption.shows


@pytest.mark.parametrize("name", ["vit_mini", "swin_mini"])
def test_sheet_stores_the_values_that_it_draws(name: str, tmp_path: Path) -> None:
    explanation = explain(seen(name), noise(), CHOICES, classes=2, interpolation="nearest")[0]
    drawing = overlay_sheet([explanation], style=SMALL)
    written = drawing.save(tmp_path / "a.sheet", ("png", "svg", "pdf", "npz"))
    assert [p.suffix for p in written] == [".png", ".svg", ".pdf", ".npz", ".txt"]
    stored = np.load(tmp_path / "a.sheet.npz")
    assert (stored["rollout"] == explanation.heatmaps_of(CHOICES[0])[0].values).all()
    assert len([n for n in stored if n.startswith("chefer_class")]) == 2
    assert Image.open(tmp_path / "a.sheet.png").width > 100
    assert f"max {explanation.heatmaps_of(CHOICES[0])[0].values.max():.3g} ×" in texts(drawing)


def test_sheet_of_two_models_has_one_scale_for_each_method() -> None:
    explanations = [
        explain(seen(n), noise(), CHOICES, classes=1)[0] for n in ("vit_mini", "swin_mini")
    ]
    limits = [
        colour_limit([explanation.heatmaps_of(r)[0].values for explanation in explanations], 100)[0]
        for r in CHOICES
    ]
    drawing = overlay_sheet(explanations, style=Style(dpi=40, percentile=100))
    bars = [a for a in drawing.figure.axes if a.get_xlabel() == "× uniform"]
    assert [bar.get_xlim()[1] for bar in bars] == pytest.approx(limits)


def test_colours_of_a_nearly_uniform_map_stay_dull() -> None:
    assert colour_limit([np.full((3, 3), 1.01)], 100) == (2.0, False)
    assert colour_limit([np.array([0.0, 8.0])], 50) == (4.0, True)


def test_paper_style_has_its_width_text_as_text_and_no_title() -> None:
    explanation = explain(seen(), noise(), CHOICES, classes=1)[0]
    drawing = overlay_sheet([explanation], style=Style(paper=True, width=3.3), title="a title")
    svg = drawing.encoded("svg").decode()
    assert float(svg.split('width="')[1].split("pt")[0]) == pytest.approx(3.3 * 72)
    assert "<text" in svg and "Rollout" in svg
    assert "a title" not in svg
    assert b"/Type3" not in drawing.encoded("pdf")


def test_figure_is_written_the_same_twice() -> None:
    explanation = explain(seen(), noise(), CHOICES, classes=1)[0]
    for kind in ("png", "svg", "pdf", "npz"):
        first, second = (overlay_sheet([explanation], style=SMALL).encoded(kind) for _ in range(2))  # type: ignore[arg-type]
        if kind != "npz":  # a zip holds times
            assert first == second, kind


def test_broken_write_leaves_neither_figure_nor_caption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    explanation = explain(seen(), noise(), CHOICES, classes=1)[0]
    drawing = overlay_sheet([explanation], style=SMALL)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vision.inspection.figures.drawing.write_all", full)
    with pytest.raises(OSError, match="No space"):
        drawing.save(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["vit_mini", "swin_mini", "swinv2_mini"])
def test_heads_sheet_has_every_head_of_every_layer(name: str) -> None:
    subject, pixels = seen(name), noise()
    captured = capture(subject.model, as_batch(subject, pixels))
    drawing = heads_sheet(captured, pixels[0], style=SMALL)
    for layer in captured.layers:
        values = drawing.numbers[f"layer{layer.number}"]
        assert len(values) == layer.weights.shape[layer.head_axis]
        mean = attribute(captured, None, "attention", layer=layer.number, head=1)
        expected = mean.values[0] * layer.layout.tokens
        assert torch.allclose(torch.from_numpy(values[1]), expected, atol=1e-4)


def test_queries_sheet_shows_rows_of_the_asking_cells() -> None:
    subject, pixels = seen(), noise()
    captured = capture(subject.model, as_batch(subject, pixels))
    places = nine_places((32, 32))[:2]
    numbers = queries_sheet(captured, pixels[0], places, style=SMALL).numbers
    layer = captured.layers[1]
    row = layer.row(layer.layout.cell_at(places[1]))[0].mean(0)
    expected = layer.layout.to_grid(row) * layer.layout.tokens
    assert torch.allclose(torch.from_numpy(numbers["query1_layer1"]), expected, atol=1e-5)


def test_microscope_outlines_windows_and_hatches_what_is_masked() -> None:
    subject, pixels = seen("swin_mini"), noise()
    captured = capture(subject.model, as_batch(subject, pixels))
    drawing = microscope(captured, pixels[0], (1, 1), style=SMALL)
    shifted = next(i for i, la in enumerate(captured.layers) if any(la.layout.shift or ()))
    layout = captured.layers[shifted].layout
    patches = drawing.figure.axes[shifted].patches
    hatched = [p for p in patches if p.get_hatch()]
    assert len(hatched) == int(layout.masked(layout.cell_at((1, 1))).sum()) > 0
    lines = [p for p in patches if not p.get_hatch()]
    assert len(lines) == len(layout.outlines()) + 1  # and the query
    for layer in captured.layers:  # all attention stays in the image: windows fit it
        values = drawing.numbers[f"layer{layer.number}"]
        cell = layer.layout.cell_at((1, 1))
        assert values.sum() / layer.layout.keys(cell) == pytest.approx(1, abs=1e-4)


def test_film_strip_ends_with_the_rollout() -> None:
    subject, pixels = seen("swin_mini"), noise()
    captured = capture(subject.model, as_batch(subject, pixels))
    drawing = film_strip(captured, pixels[0], seed_of(captured), query="pool", style=SMALL)
    expected = attribute(captured, None, "rollout").times_uniform()[0]
    assert torch.allclose(torch.from_numpy(drawing.numbers["into_layer0"]), expected, atol=1e-4)
    assert len(drawing.numbers) == captured.depth + 1


@pytest.mark.parametrize("name", ["vit_mini", "swin_mini"])
def test_comparison_shows_every_method_and_its_scores(name: str) -> None:
    subject, pixels = seen(name), noise()
    captured = capture(subject.model, as_batch(subject, pixels), reduce="mean")
    explanation = explain(subject, pixels, every_method(captured), classes=1)[0]
    scores = {"rollout": {"pointing": 73.0}}
    drawing = comparison(explanation, captured, scores=scores, style=SMALL)
    assert "pointing 73" in texts(drawing)
    assert {"rollout", "chefer", "token_norms", "feature_pca"} <= set(drawing.numbers)
    assert ("cam_rollout" in drawing.numbers) == (name == "swin_mini")


@pytest.mark.parametrize("name", ["vit_mini", "swin_mini", "swinv2_mini"])
def test_diagnostics_have_a_dot_for_each_head(name: str) -> None:
    subject = seen(name)
    heads = gather_heads(subject.model, captures(subject, noise(number=2)))
    drawing = diagnostics(subject.model, heads, name=name, style=SMALL)
    number = sum(len(layer) for layer in heads.values["distance"])
    assert len(heads.table()) == number
    scatter = drawing.figure.axes[2].collections
    assert sum(len(c.get_offsets()) for c in scatter) == number


def test_head_statistics_do_not_depend_on_batches() -> None:
    subject, pixels = seen(), noise(number=4)
    whole = gather_heads(subject.model, captures(subject, pixels))
    parts = gather_heads(subject.model, captures(subject, pixels[:3], pixels[3:]))
    for one, other in zip(whole.values["entropy"], parts.values["entropy"], strict=True):
        assert np.allclose(one, other, atol=1e-6)
    assert parts.images == 4
    with pytest.raises(ValueError, match="No images"):
        gather_heads(subject.model, [])


def test_rectangular_images_keep_their_shape() -> None:
    subject, pixels = seen("swin_mini", (24, 40)), noise((24, 40))
    explanation = explain(subject, pixels, CHOICES[:1])[0]
    assert explanation.heatmaps[0].pixels.shape == (24, 40)
    drawing = overlay_sheet([explanation], style=SMALL)
    shown = [o for o in drawing.figure.axes[0].get_children() if isinstance(o, AxesImage)]
    assert shown[0].get_array().shape == (24, 40, 3)  # type: ignore[union-attr]


def test_draw_attention_writes_figures_and_replaces_later_lines(tmp_path: Path) -> None:
    subject = seen()
    images = torch.from_numpy(np.stack(noise(number=3))).movedim(-1, 1)
    for step in (10, 20, 20):
        found = draw_attention(
            subject.model, images, subject.classes, subject.preprocess, tmp_path, step
        )
    assert set(found) == {"overlays", "heads"} and found["heads"].mode == "RGB"
    names = {path.name for path in (tmp_path / "attention").iterdir()}
    assert {"step_00000010.png", "heads_00000020.png", "heads.jsonl"} <= names
    lines = [json.loads(x) for x in (tmp_path / "attention/heads.jsonl").read_text().splitlines()]
    heads = 3 * 3
    assert [line["step"] for line in lines] == [10] * heads + [20] * heads


def test_draw_attention_of_a_compiled_model_runs_it_uncompiled(tmp_path: Path) -> None:
    subject = seen()
    subject.model.compile(backend="eager")
    images = torch.from_numpy(np.stack(noise())).movedim(-1, 1)
    draw_attention(subject.model, images, subject.classes, subject.preprocess, tmp_path, 1)
    assert subject.model._compiled_call_impl is not None


def test_check_attention_of_a_convolutional_network_says_what_to_do() -> None:
    import timm

    resnet = timm.create_model("resnet18", num_classes=7)
    with pytest.raises(ConfigError, match=r"attention_every: No attention.*attention_every=null"):
        check_attention(resnet, seen().preprocess)


def test_drawing_shows_itself_in_a_notebook() -> None:
    explanation = explain(seen(), noise(), CHOICES[:1])[0]
    image = Image.open(io.BytesIO(overlay_sheet([explanation], style=SMALL)._repr_png_()))
    assert image.format == "PNG"


def test_heads_figure_of_training_has_three_panels() -> None:
    subject = seen()
    heads = gather_heads(subject.model, captures(subject, noise()))
    assert len(heads_figure(heads, name="step 3", style=SMALL).figure.axes) == 3
