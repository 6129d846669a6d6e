"""The cost of a model on a terminal."""

import pytest
from model_settings import model_config
from rich.console import Console

from vision.models.cost.count import cost, format_bytes, table

GIB = 2**30


def printed(name: str, size: int) -> str:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(table(cost(model_config(name), size)))
    return capture.get()


def test_table_of_a_vit_shows_matrices_with_and_without_prefix_tokens() -> None:
    text = printed("vit_base", 224)
    for figure in ("86,567,656", "38,416 = 150 KiB", "38,809 = 152 KiB", "12 heads 1.76 MiB"):
        assert figure in text
    assert "global" not in text  # it would repeat the column of patches alone


def test_table_of_a_swin_shows_windowed_against_global_attention() -> None:
    text = printed("swin_tiny", 224)
    for figure in ("28,288,354", "153,664 = 600 KiB", "9,834,496 = 37.5 MiB", "stage 3: 6 blocks"):
        assert figure in text
    assert "prefix" not in text


def test_table_of_a_timm_model_has_no_attention_columns() -> None:
    text = printed("timm", 224)
    assert "25,557,032" in text
    assert "attention" not in text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (1023, "1023 B"), (153_664, "150 KiB"), (1536, "1.5 KiB"), (768 * GIB, "768 GiB")],
)
def test_bytes_are_written_in_the_largest_unit_that_leaves_one(number: int, text: str) -> None:
    assert format_bytes(number) == text
