"""Every ViT and Swin of timm opens as the model that it is, or is refused: `timm_sweep.py`."""

import pytest
from timm_sweep import FAMILIES, architectures, family, sweep

QUICK = ["vit_tiny_patch16_224", "vit_tiny_patch16_dinov3_qkvb", "eva02_tiny_patch14_224"]


def test_sweep_covers_every_family() -> None:
    found = {family(name) for name in architectures([])}
    assert found == {title for _, title in FAMILIES}


def test_small_models_are_equal_with_and_without_a_config() -> None:
    rows = list(sweep(QUICK))
    assert [row.name for row in rows] == sorted(QUICK)
    assert {row.folder.word for row in rows} == {row.bare.word for row in rows} == {"equal"}


@pytest.mark.slow
def test_no_architecture_of_timm_opens_as_something_else() -> None:
    rows = list(sweep([]))
    assert len(rows) > 300
    wrong = [row for row in rows if "wrong" in (row.folder.word, row.bare.word)]
    assert not wrong
