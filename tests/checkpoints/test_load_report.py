"""The load report as text and plain data."""

import json

from vision.checkpoints.load_report import LoadReport

REPORT = LoadReport(
    source="weights.pth",
    layout="timm ViT",
    path_taken=("state_dict_ema", "module."),
    integrity="no checksums in this format",
    loaded=("norm.weight", "norm.bias"),
    resized={"positions.table": "14 × 14 → 24 × 24 cells, bicubic_antialias"},
    new={"head.weight": "the classes differ", "head.bias": "the classes differ"},
    ignored={f"layers.{i}.attn_mask": "follows from the grid" for i in range(5)},
    left={"optimizer": 120},
    assumed=("heads=12: as in published ViTs of width 768",),
    warnings=("something to know",),
)


def test_report_as_text_says_everything_once_per_reason() -> None:
    lines = REPORT.lines()
    text = "\n".join(lines)
    for part in (
        "weights.pth",
        "timm ViT, inside state_dict_ema → module.",
        "integrity no checksums in this format",
        "2 tensors as they are",
        "positions.table: 14 × 14 → 24 × 24",
        "head.weight, head.bias: the classes differ",
        "and 2 more: follows from the grid",
        "optimizer: 120 tensors",
        "heads=12",
        "something to know",
    ):
        assert part in text
    assert len([line for line in lines if line.startswith("ignored")]) == 1


def test_report_as_plain_data_passes_through_json() -> None:
    stored = json.loads(json.dumps(REPORT.as_dict()))
    assert stored == REPORT.as_dict()
    assert stored["left"] == {"optimizer": 120}
