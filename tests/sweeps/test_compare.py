"""`vision compare` on folders written by hand, against figures worked out by hand, and on a run
that really was trained and killed.
"""

import csv
import io
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from command_answers import answers
from forked_runs import ForkedTraining
from small_runs import small_config
from small_runs import status as stored_status
from started_runs import wait_for_step

from vision.config import ConfigError
from vision.sweeps.compare import Comparison, compare
from vision.sweeps.compare_report import csv_text, json_text, latex_text, table_text
from vision.sweeps.outcome import find_runs
from vision.training.loop import train

ROOT = Path(__file__).parents[2]
PROBE = (
    "import sys; from vision.cli.app import main; code = main(sys.argv[1:]);"
    "print('LOADED', [m for m in ('torch', 'torchvision', 'timm') if m in sys.modules]);"
    "sys.exit(code)"
)


def write_run(
    folder: Path,
    *settings: str,
    top1: Sequence[float] = (0.5,),
    model: str = "vit_mini",
    status: str = "finished",
    seconds: float = 60.0,
    extra: Sequence[dict[str, Any]] = (),
) -> Path:
    """A run's folder with one evaluation per value of top1, at steps 10, 20, …; the loss is
    1 − top1.
    """
    folder.mkdir(parents=True)
    config = small_config(folder, *settings, model=model)
    (folder / "config.json").write_text(json.dumps(config.model_dump(mode="json")))
    split = "val" if config.ema is None else "val_ema"
    events = [{"step": 5, "split": "train", "loss": 9.0, "top1": 0.99}]
    for number, value in enumerate(top1, 1):
        numbers = {"top1": value, "loss": 1 - value, "top5": min(1.0, value + 0.1)}
        events.append({"step": 10 * number, "split": split, **numbers})
    lines = [json.dumps(event) for event in (*events, *extra)]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    step = 10 * len(top1)
    state = {"status": status, "step": step, "steps": 100, "seconds": seconds, "parameters": 1234}
    (folder / "status.json").write_text(json.dumps(state))
    return folder


def compared(*places: Path, metric: str = "top1", **more: Any) -> Comparison:
    runs, _ = find_runs([str(place) for place in places])
    return compare(runs, metric, more.get("split", "auto"), more.get("select", "best"))


def test_runs_that_differ_only_in_seed_have_mean_and_sample_deviation(tmp_path: Path) -> None:
    for seed, (value, seconds) in enumerate([(0.70, 50.0), (0.80, 60.0), (0.90, 70.0)]):
        write_run(tmp_path / str(seed), f"seed={seed}", top1=[value], seconds=seconds)
    (group,) = compared(tmp_path).groups
    assert group.mean == pytest.approx(0.8)
    assert group.std == pytest.approx(0.1)  # √((0.01 + 0 + 0.01) / 2); /3 would give 0.0816
    assert len(group.values) == 3
    assert group.seconds == pytest.approx(60)
    assert group.parameters == 1234


def test_settings_that_do_not_matter_to_learning_make_no_group(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "seed=0", "loader.workers=0", "output=/x", "name=a")
    write_run(tmp_path / "b", "seed=1", "loader.workers=2", "output=/y", "log.wandb=offline")
    comparison = compared(tmp_path)
    assert len(comparison.groups) == 1 and not comparison.differing


def test_groups_are_ordered_by_the_metric_and_show_only_what_differs(tmp_path: Path) -> None:
    for rate, value in (("0.001", 0.6), ("0.003", 0.8), ("0.01", 0.4)):
        write_run(tmp_path / rate, f"optimizer.learning_rate={rate}", top1=[value])
    comparison = compared(tmp_path)
    assert comparison.differing == ["optimizer.learning_rate"]
    rates = [group.settings["optimizer.learning_rate"] for group in comparison.groups]
    assert rates == [0.003, 0.001, 0.01]
    assert [g.mean for g in compared(tmp_path, metric="loss").groups] == pytest.approx(
        [0.2, 0.4, 0.6]
    )
    assert comparison.groups[0].std is None  # of a single run


def test_best_groups_that_tie_are_all_marked(tmp_path: Path) -> None:
    for width, value in ((16, 0.75), (32, 0.75), (48, 0.5)):
        write_run(tmp_path / str(width), f"model.width={width}", top1=[value])
    comparison = compared(tmp_path)
    assert [g.settings["model.width"] for g in comparison.best()] == [16, 32]
    text = latex_text(comparison)
    assert text.count(r"\textbf{75.00}") == 2 and text.count("textbf") == 2


def test_best_is_the_evaluation_of_the_best_checkpoint_and_last_the_last(tmp_path: Path) -> None:
    # top1 decides; it is best at step 20 and again, no better, at step 30: the first counts.
    extra = [{"step": 30, "split": "val", "top1": 0.8, "loss": 0.05, "top5": 0.99}]
    write_run(tmp_path / "a", top1=[0.5, 0.8], extra=extra)
    assert compared(tmp_path, metric="loss").groups[0].mean == pytest.approx(0.2)
    assert compared(tmp_path, metric="loss", select="last").groups[0].mean == 0.05


def test_best_with_loss_as_the_deciding_metric_takes_the_lowest(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "checkpoint.best=loss", top1=[0.5, 0.8, 0.6])
    assert compared(tmp_path).groups[0].mean == 0.8


def test_averaged_weights_are_taken_where_there_are_some(tmp_path: Path) -> None:
    raw = [{"step": 10, "split": "val", "top1": 0.4, "loss": 0.6}]
    write_run(tmp_path / "a", "ema=0.9", top1=[0.7], extra=raw)
    assert compared(tmp_path).groups[0].mean == 0.7
    assert compared(tmp_path, split="val").groups[0].mean == 0.4


def test_unfinished_run_beside_finished_ones_is_named_and_not_counted(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "seed=0", top1=[0.8])
    write_run(tmp_path / "b", "seed=1", top1=[0.1], status="preempted")
    comparison = compared(tmp_path)
    assert comparison.groups[0].mean == 0.8
    assert any(
        "b (preempted, step 10 of 100)" in n and "not counted" in n for n in comparison.notes
    )
    assert "1 (+1)" in table_text(comparison, to_file=True)


def test_group_without_a_finished_run_shows_its_numbers_with_a_mark_below_others(
    tmp_path: Path,
) -> None:
    write_run(tmp_path / "a", "model.width=16", top1=[0.5])
    write_run(tmp_path / "b", "model.width=32", top1=[0.9], status="failed")
    comparison = compared(tmp_path)
    assert [g.mean for g in comparison.groups] == [0.5, 0.9]
    assert "90.00*" in table_text(comparison, to_file=True)


def test_table_shows_settings_and_folders_as_they_are(tmp_path: Path) -> None:
    write_run(tmp_path / "[b]a", "init='[/b]'", top1=[0.5])
    write_run(tmp_path / "b", "init=':cat:'", top1=[0.9], status="failed")
    text = table_text(compared(tmp_path), to_file=True)
    assert "[/b]" in text and ":cat:" in text


def test_run_without_the_number_is_named(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "seed=0", top1=[0.8])
    write_run(tmp_path / "b", "seed=1", top1=[])
    assert any("without this number" in note and "b" in note for note in compared(tmp_path).notes)


def test_same_seed_twice_is_pointed_out(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b")
    assert any("the same seed 0" in note for note in compared(tmp_path).notes)


def test_models_of_two_kinds_differ_in_one_column_that_stands_for_the_others(
    tmp_path: Path,
) -> None:
    write_run(tmp_path / "a", model="vit_mini", top1=[0.5])
    write_run(tmp_path / "b", model="swin_mini", top1=[0.6])
    comparison = compared(tmp_path)
    assert list(comparison.columns) == ["model.kind"]
    assert set(comparison.differing) == {"model.kind", *comparison.columns["model.kind"]}
    assert "model.window" in comparison.columns["model.kind"]
    table = list(csv.DictReader(io.StringIO(csv_text(comparison))))
    assert [row["model.kind"] for row in table] == ["swin", "vit"]
    assert table[1]["model.window"] == "–"  # a ViT has none


def test_csv_has_the_numbers_with_all_digits(tmp_path: Path) -> None:
    values = [1 / 3, 2 / 7]
    for seed, value in enumerate(values):
        write_run(tmp_path / f"a{seed}", f"seed={seed}", top1=[value])
    write_run(tmp_path / "b", "batch_size=4", top1=[0.1])
    rows = list(csv.DictReader(io.StringIO(csv_text(compared(tmp_path)))))
    assert [row["batch_size"] for row in rows] == ["8", "4"]
    assert float(rows[0]["top1_mean"]) == math.fsum(values) / 2
    assert float(rows[0]["top1_std"]) == pytest.approx(abs(values[0] - values[1]) / math.sqrt(2))
    assert (rows[0]["n"], rows[1]["n"], rows[1]["top1_std"]) == ("2", "1", "")


def test_json_has_every_run(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "seed=3", top1=[0.25])
    answer = json.loads(json_text(compared(tmp_path)))
    (run,) = answer["groups"][0]["runs"]
    assert (run["seed"], run["value"], run["counted"]) == (3, 0.25, True)


def test_latex_escapes_names_and_has_as_many_cells_in_every_row(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "optimizer.learning_rate=0.001", "seed=0", top1=[0.5])
    write_run(tmp_path / "b", "optimizer.learning_rate=0.001", "seed=1", top1=[0.7])
    write_run(tmp_path / "c", "optimizer.learning_rate=0.01", top1=[0.9])
    text = latex_text(compared(tmp_path))
    assert r"learning\_rate & top1 (\%) & n & time & parameters \\" in text
    assert r"0.001 & 60.00 $\pm$ 14.14 & 2 & 1 min 0 s & 1,234 \\" in text
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert {row.count("&") for row in rows} == {5}
    assert r"\begin{tabular}{llrrrr}" in text


def test_half_a_line_at_the_end_is_no_damage_but_one_in_the_middle_is(tmp_path: Path) -> None:
    file = write_run(tmp_path / "a", top1=[0.5, 0.6]) / "metrics.jsonl"
    whole = file.read_text()
    file.write_text(whole + '{"step": 30, "spl')
    assert compared(tmp_path).groups[0].mean == 0.6
    file.write_text('{"step": 1, "spl\n' + whole)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl, line 1"):
        compared(tmp_path)


def test_places_may_be_runs_folders_of_runs_and_patterns(tmp_path: Path) -> None:
    names = ["s/seed=0", "s/seed=1", "other"]
    for name in names:
        write_run(tmp_path / name)
    (tmp_path / "notes.txt").touch()
    found = {tuple(find_runs([f"{tmp_path}/{place}"])[0]) for place in ("s", "s/*", "s/seed=[01]")}
    assert found == {(tmp_path / "s/seed=0", tmp_path / "s/seed=1")}
    runs, without = find_runs([f"{tmp_path}/*", f"{tmp_path}/other"])
    assert sorted(runs) == sorted(tmp_path / name for name in names)
    assert without == [tmp_path / "notes.txt"]


def test_run_that_a_link_leads_to_is_counted_once_under_its_own_name(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "latest").symlink_to("run")
    for places in (["*"], ["latest", "run"], ["run", "latest"], ["."]):
        runs, _ = find_runs([f"{tmp_path}/{place}" for place in places])
        assert runs == [tmp_path / "run"]


MISTAKES = {
    "compare": "vision compare outputs/*",
    "compare nowhere": "'nowhere' does not exist",
    "compare empty": "no run in empty",
    "compare a metric=top11": "no run has 'top11'. Did you mean 'top1'?",
    "compare a split=val_ema": "no run has evaluations of 'val_ema'",
    "compare young": "been evaluated yet",
    "compare a format=word": "format: should be 'table', 'csv', 'latex', 'json' or 'html'",
    "compare a metrik=top1": "metrik: unknown setting. Did you mean 'metric'?",
    "compare a output=a/metrics.jsonl/x": "cannot be written",
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, one that has not been evaluated, and an empty folder."""
    folder = tmp_path_factory.mktemp("places")
    write_run(folder / "a")
    write_run(folder / "young", top1=[])
    (folder / "empty").mkdir()
    return folder


@pytest.mark.parametrize("line", MISTAKES)
def test_compare_with_a_mistake_exits_2_with_one_message_and_without_torch(
    places: Path, line: str
) -> None:
    code, output, error, loaded = answers(places, *MISTAKES)[line]
    assert code == 2
    assert MISTAKES[line] in error and "Traceback" not in error
    assert (output, loaded) == ("", [])


def vision_compare(folder: Path, *words: str) -> tuple[int, str, str]:
    result = subprocess.run(
        [sys.executable, "-c", PROBE, "compare", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    return result.returncode, result.stdout, result.stderr


def test_command_takes_plain_paths_settings_and_an_output_file(tmp_path: Path) -> None:
    write_run(tmp_path / "s" / "seed=0", "seed=0", top1=[0.5])
    write_run(tmp_path / "s" / "seed=1,x=2", "seed=1", top1=[0.7])
    places = ["s/seed=0", "s/seed=1,x=2"]
    code, output, error = vision_compare(tmp_path, *places, "metric=loss", "select=last")
    assert (code, error) == (0, "")
    assert "0.4000 ± 0.1414" in output and output.rstrip().endswith("LOADED []")
    code, output, _ = vision_compare(tmp_path / "s", "seed=0", "runs=[seed=1*]")
    assert code == 2  # Hydra's lists cannot hold a sign of equality; plain words can
    code, output, _ = vision_compare(tmp_path, "runs=[s]", "format=csv", "output=new/x.csv")
    assert code == 0
    assert "0.6" in (tmp_path / "new" / "x.csv").read_text()


def test_killed_run_tells_step_and_time_from_its_newest_checkpoint(tmp_path: Path) -> None:
    settings = ["duration=400steps", "checkpoint.every=1steps", "evaluate_every=2steps"]
    process = ForkedTraining(tmp_path, *settings)
    wait_for_step(tmp_path, 6, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert stored_status(tmp_path)["step"] == 0  # of its start
    comparison = compared(tmp_path)
    (run,) = comparison.groups[0].runs
    assert run.status == "running" and 5 <= run.step < 400 and run.steps == 400
    assert run.seconds is not None and run.seconds > stored_status(tmp_path)["seconds"]
    before = run.seconds
    # Time adds up over a resume.
    settings[0] = f"duration={run.step + 2}steps"
    assert train(small_config(tmp_path, *settings, "allow_changes=true")) == 0
    (run,) = compared(tmp_path).groups[0].runs
    assert run.finished and run.seconds is not None and run.seconds > before
    assert run.parameters == stored_status(tmp_path)["parameters"] > 1000
