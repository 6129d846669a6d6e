"""Three lines from an image to a figure."""

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from explained_models import noise, seen
from PIL import Image

import vision
from vision.data.images.decode import UnreadableImageError
from vision.inspection.explain import explain
from vision.inspection.figures.drawing import Style


def test_show_attention_of_a_pil_image_has_the_numbers_of_its_methods(tmp_path: Path) -> None:
    subject, (pixels,) = seen(), noise()
    drawing = vision.show_attention(subject, Image.fromarray(pixels), style=Style(dpi=40))
    explanation = explain(subject, [pixels])[0]
    assert np.array_equal(drawing.numbers["image"], pixels)
    assert np.array_equal(drawing.numbers["rollout"], explanation.heatmaps[0].values)
    assert Image.open(io.BytesIO(drawing._repr_png_())).format == "PNG"
    written = drawing.save(str(tmp_path / "figure"))
    assert [path.name for path in written] == ["figure.png", "figure.txt"]
    for name, start in (("a.png", b"\x89PNG"), ("b.svg", b"<?xml"), ("c.npz", b"PK")):
        written = drawing.save(tmp_path / name)
        assert [path.name for path in written] == [name, f"{name[0]}.txt"]
        assert written[0].read_bytes().startswith(start)
    written = drawing.save(tmp_path / "d.jpg.png", ("png",))  # a stem, as kinds are given
    assert written[0].name == "d.jpg.png.png"


def test_show_attention_of_a_file_equals_that_of_its_image(tmp_path: Path) -> None:
    subject, (pixels,) = seen("swin_mini"), noise((40, 50))
    Image.fromarray(pixels).save(tmp_path / "a.png")
    shown = [
        vision.show_attention(subject, image, classes=1, style=Style(dpi=40))
        for image in (tmp_path / "a.png", str(tmp_path / "a.png"), Image.fromarray(pixels))
    ]
    for other in shown[1:]:
        assert shown[0].numbers.keys() == other.numbers.keys()
        assert all(np.array_equal(v, other.numbers[k]) for k, v in shown[0].numbers.items())


def test_show_attention_of_what_is_no_image_names_it(tmp_path: Path) -> None:
    (tmp_path / "no.png").write_text("not an image")
    with pytest.raises(UnreadableImageError, match=r"no\.png"):
        vision.show_attention(seen(), tmp_path / "no.png")
    with pytest.raises(FileNotFoundError, match=r"absent\.png"):
        vision.show_attention(seen(), tmp_path / "absent.png")


def test_import_of_vision_loads_neither_torch_nor_figures() -> None:
    code = (
        "import sys, vision; assert 'show_attention' in vision.__all__; "
        "assert not {'torch', 'matplotlib', 'PIL'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
