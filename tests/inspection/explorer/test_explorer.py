"""What a page holds, read without a browser."""

import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from explorer_pages import (
    NAMES,
    decoded,
    explained_model,
    make_page,
    part,
    read_page,
    weights_by_plane,
)
from PIL import Image
from torch import nn

from vision.inspection.capture.capture import Passes, capture
from vision.inspection.capture.captured import CaptureError
from vision.inspection.explorer.pack import LADDER, RowEncoder, pack
from vision.inspection.explorer.page import FINISHED, gather, write_page

KINDS = ["vit", "vit mean", "swin", "swin padded", "swin_v2"]


@pytest.mark.parametrize("kind", KINDS)
def test_page_of_every_family_holds_each_weight_within_a_thousandth(
    kind: str, tmp_path: Path
) -> None:
    path = make_page(kind, tmp_path / "page.html")
    header, stream = read_page(path)
    model, image = explained_model(kind)
    captured = capture(model, image)
    assert len(header["layers"]) == captured.depth
    worst = 0.0
    for packed, layer in zip(header["layers"], captured.layers, strict=True):
        expected = weights_by_plane(layer.weights, layer.layout.index is not None)
        worst = max(worst, float(np.abs(decoded(stream, packed["values"]) - expected).max()))
    assert worst <= 0.001
    assert header["largest_error"] == pytest.approx(worst, abs=1e-6)


@pytest.mark.parametrize("kind", ["swin padded", "swin_v2"])
def test_page_of_windows_places_slots_as_the_model_does(kind: str, tmp_path: Path) -> None:
    header, stream = read_page(make_page(kind, tmp_path / "page.html"))
    model, image = explained_model(kind)
    masked = padded = 0
    for packed, layer in zip(header["layers"], capture(model, image).layers, strict=True):
        place = header["layouts"][packed["layout"]]
        layout = layer.layout
        assert layout.index is not None
        index = part(stream, place["index"]).reshape(layout.index.shape)
        assert np.array_equal(index, layout.index.numpy())
        padded += int((index < 0).sum())
        if layout.allowed is None:
            assert place["allowed"] is None
            continue
        bits = np.unpackbits(part(stream, place["allowed"]), bitorder="little")
        allowed = bits[: layout.allowed.numel()].reshape(layout.allowed.shape)
        assert np.array_equal(allowed.astype(bool), layout.allowed.numpy())
        masked += int((allowed == 0).sum())
    assert masked > 0 and padded > 0


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_of_any_sharpness_decode_to_what_went_in(bits: int) -> None:
    generator = torch.Generator().manual_seed(0)
    sharpness = torch.linspace(0, 40, 301)[:, None]
    values = (torch.randn(301, 53, generator=generator) * sharpness).softmax(-1)
    values[7] = 0  # a row of nothing
    stream = RowEncoder(None)
    tolerance = 0.001 if bits == 8 else 0.02
    rows = stream.add_rows(values.numpy(), bits, tolerance)
    raw = zlib.decompress(stream.finish())
    off = np.abs(decoded(raw, rows) - values.numpy())
    assert off.max() <= tolerance
    assert decoded(raw, rows).sum(axis=1) == pytest.approx(values.sum(1).numpy(), abs=2 * tolerance)
    assert 0 < len(part(raw, rows["corrected"])) < values.numel() / 10
    assert stream.largest_error == pytest.approx(off.max(), abs=1e-6)


def test_rows_of_four_bits_with_a_tower_keep_the_shape_of_the_rest() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(40, 500, generator=generator).softmax(-1)
    values = torch.cat([torch.full((40, 1), 9.0), values], dim=1) / 10  # most on a register
    stream = RowEncoder(None)
    rows = stream.add_rows(values.numpy(), 4, 0.02)
    found = decoded(zlib.decompress(stream.finish()), rows)
    assert found[:, 0] == pytest.approx(0.9)
    assert found.sum(axis=1) == pytest.approx(1, abs=1e-5)
    for one, other in zip(found[:, 1:], values[:, 1:].numpy(), strict=True):
        assert np.corrcoef(one, other)[0, 1] > 0.98


@pytest.mark.parametrize("kind", ["vit with many heads", "swin with many heads"])
def test_ladder_with_less_and_less_room_steps_down_and_stays_within_it(kind: str) -> None:
    model, image = explained_model(kind)
    content = gather(Passes(model, image), names=NAMES, classes=3)
    whole = pack(content, limit=10**9)
    assert whole.rung is LADDER[0]
    rungs = [1]
    limit = len(whole.stream)
    lowest = len(LADDER) - kind.startswith("swin")  # the last pools keys, which windows do not
    while rungs[-1] < lowest:
        packed = pack(content, limit=limit)
        assert len(packed.stream) <= limit
        assert packed.header["rung"]["says"] == packed.rung.says
        rungs.append(packed.rung.number)
        limit = min(limit - 1, int(len(packed.stream) * 0.97))
    assert rungs == sorted(rungs)
    assert len(set(rungs)) >= 4
    with pytest.raises(ValueError, match=r"takes at least .* raise max_megabytes"):
        pack(content, limit=1000)


def test_rung_of_fused_heads_keeps_their_mean_maximum_and_minimum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vision.inspection.explorer.pack.LADDER", LADDER[2:])
    model, image = explained_model("vit")
    content = gather(Passes(model, image), names=NAMES, classes=1)
    packed = pack(content, limit=10**9)
    assert packed.header["fusions"] == ["mean", "max", "min"]
    raw = zlib.decompress(packed.stream)
    for header, layer in zip(packed.header["layers"], content.captured.layers, strict=True):
        heads = layer.weights[0]
        fused = torch.stack([heads.mean(0), heads.amax(0), heads.amin(0)]).reshape(-1, 51)
        assert np.abs(decoded(raw, header["values"]) - fused.numpy()).max() <= 0.001
        rows = heads[:, :3].reshape(-1, 51)
        assert np.abs(decoded(raw, header["head_rows"]) - rows.numpy()).max() <= 0.001


def test_page_is_one_file_that_names_no_address(tmp_path: Path) -> None:
    path = make_page("vit", tmp_path / "deep" / "page.html")
    text = path.read_text()
    assert [file.name for file in path.parent.iterdir()] == ["page.html"]
    assert "http://" not in text and "https://" not in text
    assert "default-src 'none'" in text


def test_names_with_markup_stay_text(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script> & >@@</script>"
    path = make_page(
        "vit",
        tmp_path / "page.html",
        classes=[evil] * 7,
        title=evil,
        subtitle=evil,
        scores={evil: {evil: 1.0}},
    )
    header, _ = read_page(path)
    assert header["classes"][0]["name"] == header["title"] == header["subtitle"] == evil
    assert header["scores"] == {evil: {evil: 1.0}}
    assert "<script>alert" not in path.read_text()


def test_page_stays_within_the_room_it_is_given(tmp_path: Path) -> None:
    whole = make_page("swin", tmp_path / "whole.html")
    limit = whole.stat().st_size / 1e6 - 0.05
    smaller = make_page("swin", tmp_path / "small.html", max_megabytes=limit)
    assert smaller.stat().st_size <= limit * 1e6
    (less, _), (more, _) = read_page(smaller), read_page(whole)
    assert less["rung"]["number"] > more["rung"]["number"]


def test_classes_are_the_most_probable_in_order(tmp_path: Path) -> None:
    header, _ = read_page(make_page("vit", tmp_path / "page.html", top=4))
    model, image = explained_model("vit")
    best = model(image)[0].softmax(0).topk(4)
    assert [entry["number"] for entry in header["classes"]] == best.indices.tolist()
    assert [entry["name"] for entry in header["classes"]] == [NAMES[i] for i in best.indices]
    assert [entry["probability"] for entry in header["classes"]] == pytest.approx(
        best.values.tolist(), abs=1e-6
    )


def test_maps_of_a_class_are_stored_in_one_order(tmp_path: Path) -> None:
    """So that equal pages are equal files, whatever the order of a set in this process."""
    header, _ = read_page(make_page("swin", tmp_path / "page.html"))
    assert [list(entry["maps"]) for entry in header["classes"]] == [list(FINISHED)] * 3


def test_model_without_classes_asked_for_needs_no_names(tmp_path: Path) -> None:
    header, _ = read_page(make_page("vit", tmp_path / "page.html", top=0, classes=None))
    assert header["classes"] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": ["one", "two"]}, r"7 classes, but 2 names"),
        ({"top": -1}, r"0 or more, found -1"),
        ({"max_megabytes": 0}, r"max_megabytes must be above 0"),
        ({"max_megabytes": 0.11}, r"raise max_megabytes"),
        ({"scores": {"rollout": {"energy": float("nan")}}}, r"energy of rollout is nan"),
    ],
)
def test_page_with_a_wrong_setting_says_which(
    options: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        make_page("vit", tmp_path / "page.html", **options)
    assert not list(tmp_path.iterdir())


def test_image_of_other_proportions_is_refused(tmp_path: Path) -> None:
    model, image = explained_model("vit")
    shown = Image.new("RGB", (64, 64))
    with pytest.raises(ValueError, match=r"64 x 64, but the model is given 64 x 48"):
        write_page(model, image, shown, tmp_path / "page.html")


def test_batch_of_images_is_refused(tmp_path: Path) -> None:
    model, image = explained_model("vit")
    with pytest.raises(ValueError, match=r"one image .* found \(2, 3, 48, 64\)"):
        write_page(
            model, image.expand(2, -1, -1, -1), Image.new("RGB", (64, 48)), tmp_path / "page.html"
        )


def test_model_without_attention_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(CaptureError, match="No attention was found"):
        write_page(model, torch.zeros(3, 32, 32), Image.new("RGB", (32, 32)), tmp_path / "p.html")


def test_selection_of_layers_is_refused() -> None:
    model, image = explained_model("vit")
    content = gather(Passes(model, image), names=None, classes=0)
    some = replace(content.captured, layers=content.captured.layers[:1])
    with pytest.raises(ValueError, match="needs all 3 layers"):
        pack(replace(content, captured=some), limit=10**9)
