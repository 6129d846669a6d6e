"""The loops of benchmarks/training.py do the same work, and their times add up."""

from pathlib import Path

import pytest
from task_steps import distillation_step
from timm.utils import AverageMeter
from training import SETTINGS, collect_images, summarise
from training_loops import Setting, Times, our_loop, our_words, timm_loop, training_config

from vision.models.build import build_model

SMALL = Setting(
    "small",
    *(20, False, 32, 8, 2, 1),
    timm_model="test_vit",
    our_model=SETTINGS["mini"].our_model,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    assert collect_images(SMALL, None, tmp_path / "images") == SMALL
    return tmp_path / "images"


def test_loops_take_the_same_steps_and_their_parts_make_up_the_total(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    original = AverageMeter.update

    def count(self: AverageMeter, value: float, n: int = 1) -> None:
        seen.append(n)
        original(self, value, n)

    monkeypatch.setattr(AverageMeter, "update", count)
    theirs = timm_loop(SMALL, root, 0)
    assert seen.count(8) == 2 * SMALL.steps == 8  # loss and accuracy of four batches
    ours = our_loop(SMALL, root, tmp_path, 0, own=True)
    lines = (tmp_path / "run-own-0" / "metrics.jsonl").read_text().splitlines()
    assert sum('"split": "train"' in line for line in lines) == SMALL.steps
    for times in (theirs, ours):
        assert min(times.data, times.step) > 0
        assert times.data + times.step < times.total
    assert ours.apart > 0 == theirs.apart


@pytest.mark.parametrize("name", SETTINGS)
def test_both_rows_of_a_setting_have_one_architecture(tmp_path: Path, name: str) -> None:
    counts = []
    for own in (False, True):
        words = our_words(SETTINGS[name], tmp_path, tmp_path, 0, own)
        model = build_model(training_config(words).model, (64, 64), classes=2, device="meta")
        counts.append(sum(parameter.numel() for parameter in model.parameters()))
    assert counts[0] == counts[1]


def test_summary_is_of_medians_and_of_ratios_within_a_round() -> None:
    rounds = {
        "timm": [Times(4.0, 1.0, 2.0), Times(2.0, 1.0, 0.5), Times(8.0, 2.0, 4.0)],
        "vision": [Times(2.0, 0.5, 1.4), Times(2.0, 0.5, 1.4), Times(2.0, 0.5, 1.4)],
    }
    row = summarise(SMALL, rounds)["loops"]["vision"]
    assert row["images_per_second"] == 32 / 2
    assert (row["least_ratio"], row["ratio_to_timm"], row["most_ratio"]) == (1.0, 2.0, 4.0)
    assert row["share_outside"] == pytest.approx(0.05)


@pytest.mark.slow
def test_step_with_a_teacher_is_measured_beside_its_parts(tmp_path: Path) -> None:
    figure = distillation_step(tmp_path, 2)
    assert set(figure["milliseconds"]) == {"student", "teacher", "distillation"}
    assert min(figure["milliseconds"].values()) > 0
    assert len(figure["ratios"]) == 2 and 0.5 < figure["ratio"] < 2
