"""The lecture's ladder: every model trains for two steps at the size that its experiment names."""

import json
from pathlib import Path

import pytest

from vision.cli.app import main
from vision.cli.listing import CONFIGS

LADDER = sorted(file.stem for file in (CONFIGS / "experiment" / "lecture" / "ladder").glob("*"))
CHEAP = "vit"


def test_ladder_has_the_models_of_the_lecture() -> None:
    assert {"resnet", "botnet", "lr_net", "halonet", "vit_pixel", "vit"} <= set(LADDER)
    assert {"mvit_v2", "swin", "swin_v2"} <= set(LADDER)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == CHEAP else pytest.mark.slow) for name in LADDER],
)
def test_model_of_the_ladder_trains_for_two_steps(name: str, tmp_path: Path) -> None:
    words = [
        *(f"experiment=lecture/ladder/{name}", "name=run", f"output={tmp_path}", "device=cpu"),
        *("loader.workers=0", "batch_size=2", "duration=4samples", "schedule.warmup=2samples"),
        *("evaluate_every=4samples", "checkpoint.every=4samples", "data.train_samples=4"),
        *("data.val_samples=2", "log.curves=false"),
    ]
    assert main(["train", *words]) == 0
    assert json.loads((tmp_path / "run" / "status.json").read_text())["status"] == "finished"
    events = [json.loads(s) for s in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert events[-1]["step"] == 2
