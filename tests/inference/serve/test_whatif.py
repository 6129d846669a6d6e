"""Regions of an image hidden or moved."""

import numpy as np
import pytest

from vision.data.preprocess import Preprocess
from vision.inference.serve.whatif import changed, parse_changes

PREPROCESS = Preprocess((8, 12), 3, (0.2, 0.4, 0.6), (1.0, 1.0, 1.0), "bicubic", 1.0, {})
MEAN = [51, 102, 153]


def image() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (8, 12, 3), dtype=np.uint8)


def test_mask_is_the_mean_colour_within_its_box_only() -> None:
    before = image()
    after = changed(before, parse_changes('[{"kind":"mask","box":[0.5,0,0.5,0.25]}]'), PREPROCESS)
    assert (after[4:, :3] == MEAN).all()
    after[4:, :3] = before[4:, :3]
    assert (after == before).all()


def test_move_puts_pixels_elsewhere_and_leaves_the_mean() -> None:
    before = image()
    move = '[{"kind":"move","box":[0,0,0.25,0.25],"to":[0.75,0.75]}]'
    after = changed(before, parse_changes(move), PREPROCESS)
    assert (after[6:, 9:] == before[:2, :3]).all() and (after[:2, :3] == MEAN).all()
    over = '[{"kind":"move","box":[0,0,0.5,0.5],"to":[0.875,0.875]}]'
    cut = changed(before, parse_changes(over), PREPROCESS)
    assert (cut[7, 10:] == before[0, :2]).all()
    assert (before == image()).all()


@pytest.mark.parametrize(
    "text",
    [
        *("{", '"x"', '[{"kind":"mask"}]', '[{"kind":"mask","box":[0,0,2,1]}]'),
        *('[{"kind":"mask","box":[0,0,1,NaN]}]', '[{"kind":"mask","box":[0,0,1,1],"x":1}]'),
    ],
)
def test_wrong_changes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="changes"):
        parse_changes(text)


def test_no_changes() -> None:
    before = image()
    assert changed(before, parse_changes(""), PREPROCESS) is before
