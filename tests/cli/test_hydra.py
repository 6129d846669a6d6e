"""Every option and setting of Hydra, as its manual says: the table of docs/hydra.md. Training is
stood in for by a function that notes its settings and finishes at once, unless a test says more.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from command_answers import answers
from noted_calls import NoteCalls
from omegaconf import OmegaConf

from vision.cli.app import main
from vision.cli.application import OPTIONS
from vision.cli.listing import CONFIGS
from vision.config import ConfigError
from vision.training.configs import TrainConfig
from vision.training.run.run_folder import PREEMPTED, Run

ROOT = Path(__file__).parents[2]
NOTE = "+hydra.callbacks.note._target_=noted_calls.NoteCalls"
Trained = list[tuple[TrainConfig, Path]]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    for notes in (NoteCalls.calls, NoteCalls.folders, NoteCalls.returned):
        notes.clear()  # type: ignore[attr-defined]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trained:
    """The settings and working directory of every training."""
    calls: Trained = []

    def train(config: TrainConfig) -> int:
        run = Run(Path(config.output) / config.name)
        if run.decision(config) == "finished":
            return 0
        calls.append((config, Path.cwd()))
        run.write("config.json", config.model_dump(mode="json"))
        numbers = {"step": 1, "split": "val", "loss": 2.5, "top1": config.seed / 4}
        run.metrics.write_text(json.dumps(numbers) + "\n")
        run.write("status.json", {"status": "finished", "step": 1})
        return 0

    monkeypatch.setattr("vision.training.loop.train", train)
    return calls


def folders(place: Path = Path()) -> list[str]:
    return sorted(path.name for path in place.iterdir() if not path.is_symlink())


# Options


def test_options_are_those_of_hydra(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--hydra-help"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("--")]
    listed = {line.partition(" :")[0].replace(",", " ") for line in lines}
    assert listed == set(OPTIONS)


def test_run_is_the_default(trained: Trained) -> None:
    assert main(["train", "--run", "name=a"]) == main(["train", "-r", "name=b"]) == 0
    assert main(["train", "name=c"]) == 0
    assert [config.name for config, _ in trained] == ["a", "b", "c"]


@pytest.mark.parametrize("option", ["-m", "--multirun"])
def test_multirun_of_a_command_prints_its_results_alone_and_leaves_nothing_behind(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", option, "model=vit_tiny,vit_small", "format=json"]) == 0
    first, second = capsys.readouterr().out.split("\n}\n{\n")
    assert '"parameters": 5717416' in first and '"parameters": 22050664' in second
    assert folders() == []


def own_configs(folder: Path) -> Path:
    """A folder with a choice of a model and a configuration of its own."""
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "own.yaml").write_text("defaults: [vit_tiny, _self_]\ndepth: 3\n")
    (folder / "mine.yaml").write_text("defaults: [info, _self_, override model: own]\n")
    return folder


@pytest.mark.parametrize("option", ["-cd", "--config-dir"])
def test_config_dir_adds_a_folder(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    own_configs(Path("more"))
    assert main(["info", option, "more", "model=own", "--cfg", "job", "-p", "model.depth"]) == 0
    assert capsys.readouterr().out == "3\n"


@pytest.mark.parametrize("option", ["-cd", "-cp"])
def test_yaml_that_is_not_a_regular_file_is_refused_by_name(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own_configs(Path("more"))
    os.mkfifo("more/model/pipe.yaml")
    assert main(["info", option, "more", "model=pipe"]) == 2
    assert "pipe.yaml is not a regular file" in capsys.readouterr().err
    Path("more/model/pipe.yaml").unlink()
    Path("more/endless.yaml").symlink_to("/dev/zero")
    assert main(["info", option, "more", "model=own"]) == 2
    assert "endless.yaml is not a regular file" in capsys.readouterr().err


def test_settings_may_refer_to_those_of_hydra(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=vit_tiny", "data=folder", "data.root=${hydra:runtime.cwd}/${hydra:job.name}"]
    assert main(["train", *words]) == 2
    assert f"the folder {Path.cwd()}/train does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["-cn", "--config-name"])
def test_config_name_takes_another_file_with_the_same_strictness(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["info", "-cd", str(own_configs(Path("more"))), option, "mine"]
    assert main([*words, "--cfg", "job", "-p", "model.depth"]) == 0
    assert capsys.readouterr().out == "3\n"
    assert main([*words, "model.dpeth=6"]) == 2
    assert "Did you mean 'model.depth'?" in capsys.readouterr().err
    assert main([*words, "format=xml"]) == 2
    assert "format: should be 'table' or 'json'" in capsys.readouterr().err
    assert main([*words, "--help"]) == 0
    assert "model.depth=3" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["-cp", "--config-path"])
def test_config_path_takes_another_folder_relative_to_the_call(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(CONFIGS, "other")
    file = Path("other/model/vit_tiny.yaml")
    file.write_text(file.read_text() + "depth: 5\n")
    words = ["info", option, "other", "model=vit_tiny"]
    assert main([*words, "--cfg", "job", "-p", "model.depth"]) == 0
    assert capsys.readouterr().out == "5\n"
    assert main([*words, "epochs=3"]) == 2


def test_cfg_shows_settings_of_the_job_of_hydra_or_all(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {}
    for what in ("job", "hydra", "all"):
        assert main(["info", "--cfg", what, "model=vit_tiny"]) == 0
        shown[what] = OmegaConf.to_container(OmegaConf.create(capsys.readouterr().out))
    assert {"model", "data", "format"} <= shown["job"].keys()  # type: ignore[union-attr]
    assert list(shown["hydra"]) == ["hydra"]
    assert shown["all"].keys() == {*shown["job"], "hydra"}  # type: ignore[union-attr]


def test_package_and_resolve(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["-c", "hydra", "-p", "hydra.job.env_set"]
    words = ["predict", "+hydra.job.env_set.OF=${hydra.job.name}", *options]
    assert main(words) == 0
    assert "OF: ${hydra.job.name}" in capsys.readouterr().out
    assert main([*words, "--resolve"]) == 0
    assert "OF: predict" in capsys.readouterr().out


INFO = {
    "info --info searchpath": str(CONFIGS),
    "info --info defaults": "model/vit_base",
    "info --info defaults-tree": "model: vit_base",
    "info --info config": "format: table",
    "info --info plugins": "BasicSweeper",
    "info --info all": "Installed Hydra Plugins",
}


@pytest.mark.parametrize("line", INFO)
def test_info(line: str) -> None:
    code, output, error, _ = answers(ROOT, *INFO)[line]
    assert code == 0, error
    assert INFO[line] in output


@pytest.mark.parametrize(
    "option",
    ["--info", *(pytest.param(o, marks=pytest.mark.slow) for o in ("--hydra-help", "--cfg=hydra"))],
)
def test_reader_that_closes_the_pipe_early_is_no_error(option: str) -> None:
    ended = subprocess.run(
        f"set -o pipefail; {sys.executable} -m vision train {option} | head -1",
        executable="/bin/bash",
        shell=True,
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--version"]) == 0
    assert capsys.readouterr().out.startswith("Hydra 1.3")


def test_experimental_rerun(trained: Trained) -> None:
    pickles = "+hydra.callbacks.p._target_=hydra.experimental.callbacks.PickleJobInfoCallback"
    assert main(["train", "name=a", "seed=3", pickles]) == 0
    shutil.rmtree("kept", ignore_errors=True)
    Path("outputs/a/.hydra/config.pickle").rename("config.pickle")
    shutil.rmtree("outputs/a")
    with pytest.warns(UserWarning, match="rerun"):
        assert main(["train", "--experimental-rerun", "config.pickle"]) == 0
    assert [(c.output, c.name, c.seed) for c, _ in trained] == [("outputs", "a", 3)] * 2


def completions(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *before: str
) -> list[str]:
    monkeypatch.setenv("COMP_LINE", line)
    assert main([*before, "-sc", "query=bash"]) == 0
    return capsys.readouterr().out.split()


def test_completion_of_groups_choices_and_keys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "train" in completions("vision ", monkeypatch, capsys)
    assert completions("vision tr", monkeypatch, capsys) == ["train"]
    for begin, before in (("vision train ", []), ("python train.py ", ["train"])):
        answers = {
            "mod": ["model."],
            "model=vit_t": ["model=vit_tiny"],
            "model=swin_tiny model.win": ["model.window="],
            "optimizer.le": ["optimizer.learning_rate="],
            "hydra/launcher=ba": ["hydra/launcher=basic"],
        }
        for typed, expected in answers.items():
            found = completions(begin + typed, monkeypatch, capsys, *before)
            assert set(expected) <= set(found), typed


def test_completion_is_installed_by_what_bash_can_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-sc", "install=bash"]) == 0
    script = capsys.readouterr().out
    assert "complete " in script
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


# Settings


def test_run_dir_is_the_folder_of_the_run(trained: Trained) -> None:
    assert main(["train", "hydra.run.dir=here/it/is", "seed=1"]) == 0
    assert folders(Path("here/it/is")) == [".hydra", "config.json", "metrics.jsonl", "status.json"]
    assert folders(Path("here/it/is/.hydra")) == ["config.yaml", "hydra.yaml", "overrides.yaml"]
    assert OmegaConf.load("here/it/is/.hydra/overrides.yaml") == ["seed=1"]
    assert folders() == ["here"]
    assert main(["train", "hydra.run.dir=here/it/is", "seed=1"]) == 0
    assert len(trained) == 1  # finished before


def test_folder_of_a_run_is_named_by_its_settings_and_found_again(trained: Trained) -> None:
    assert main(["train", "seed=1"]) == main(["train", "seed=1", "device=cpu"]) == 0
    assert len(trained) == 1
    (name,) = folders(Path("outputs"))
    assert name.startswith("vit_mini-shapes-")
    assert main(["train", "seed=2"]) == 0
    assert len(folders(Path("outputs"))) == 2


def test_run_is_named_by_its_weights_and_the_folder_of_its_images(
    trained: Trained, tmp_path: Path
) -> None:
    (tmp_path / "flowers" / "rose").mkdir(parents=True)
    given = ["train", "model=auto", "init=w/dinov2_vits14_pretrain.pth", "data=folder"]
    given.append(f"data.root={tmp_path / 'flowers'}")
    assert main(given) == 0
    (name,) = folders(Path("outputs"))
    label, _, digest = name.rpartition("-")
    assert label == "dinov2_vits14-flowers" and len(digest) == 6
    Path("outputs", name).rename(Path("outputs", f"auto-folder-{digest}"))  # an earlier version's
    assert main(given) == 0
    assert len(trained) == 1 and folders(Path("outputs")) == [f"auto-folder-{digest}"]


@pytest.mark.parametrize(
    ("words", "label"),
    [
        (["model=timm", "model.name=resnet18"], "resnet18-shapes"),
        (["model=auto", "init=timm:vit_small_patch14_dinov2.lvd142m"], "vit_small_patch14_dinov2-"),
        (["model=auto", "init=hf:facebook/dinov2-small"], "dinov2-small-shapes"),
        (["data=torchvision", "data.name=Flowers102", "data.root=x"], "vit_mini-Flowers102"),
        (["data=huggingface", "data.path=ufldl-stanford/svhn"], "vit_mini-svhn"),
    ],
)
def test_name_of_a_run_says_what_ran(trained: Trained, words: list[str], label: str) -> None:
    assert main(["train", *words]) == 0
    assert folders(Path("outputs"))[0].startswith(label)


def test_refused_run_keeps_its_files_as_they_are(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "name=a"]) == 0
    before = {file: file.read_bytes() for file in Path("outputs").rglob("*") if file.is_file()}
    assert main(["train", "name=a", "seed=1"]) == 2
    assert "seed: 0 → 1" in capsys.readouterr().err
    assert main(["train", "name=a", "on_existing=refuse"]) == 2
    assert main(["train", "name=a", "device=cpu"]) == 0  # finished
    files = {file: file.read_bytes() for file in Path("outputs").rglob("*") if file.is_file()}
    assert files == before


@pytest.fixture
def in_progress(trained: Trained) -> Iterator[dict[Path, bytes]]:
    """The files of the runs of outputs/s; another process holds the lock of the first."""
    assert main(["train", "-m", "hydra/launcher=basic", "seed=1,2", "name=s"]) == 0
    for seed in (1, 2):
        Run(Path(f"outputs/s/seed-{seed}")).write("status.json", {"status": "running", "step": 1})
    lock = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX);"
    holder = subprocess.Popen(
        [sys.executable, "-c", f"{lock} print(flush=True); input()", "outputs/s/seed-1/.lock"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdin is not None and holder.stdout is not None
    holder.stdout.readline()
    trained.clear()
    yield {file: file.read_bytes() for file in Path("outputs").rglob("*") if file.is_file()}
    holder.communicate()


@pytest.mark.parametrize(
    "words",
    [
        ["hydra.run.dir=outputs/s/seed-1", "seed=1", "device=cpu"],
        ["-m", "hydra/launcher=basic", "name=s", "seed=1,2", "device=cpu"],
        ["-m", "hydra/launcher=local", "name=s", "seed=1,2", "device=cpu"],
    ],
    ids=["run", "sweep", "local"],
)
def test_run_in_progress_keeps_its_files_as_they_are(
    words: list[str],
    in_progress: dict[Path, bytes],
    trained: Trained,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", *words]) == 2
    message = capsys.readouterr().err
    assert "outputs/s/seed-1 is being trained" in message and "seed-2" not in message
    assert trained == []
    files = {file: file.read_bytes() for file in Path("outputs").rglob("*") if file.is_file()}
    assert files == in_progress


@pytest.mark.parametrize("variable", ["RANK", "LOCAL_RANK"])
def test_further_processes_write_neither_settings_nor_log(
    trained: Trained, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    assert main(["train", "name=a", "hydra/job_logging=default"]) == 0
    assert folders(Path("outputs/a")) == ["config.json", "metrics.jsonl", "status.json"]


def test_sweep_of_training(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["train", "-m", "hydra/launcher=basic", "seed=1,2", "optimizer.learning_rate=1e-3,0.1"]
    assert main([*words, "name=s", "duration=3epochs"]) == 0
    points = [
        f"optimizer.learning_rate-{lr}__seed-{seed}" for lr in ("0.001", "0.1") for seed in (1, 2)
    ]
    assert folders(Path("outputs/s")) == ["multirun.yaml", *points]
    for point in points:
        assert len(folders(Path("outputs/s") / point / ".hydra")) == 3
    assert [c.seed for c, _ in trained] == [1, 1, 2, 2]
    assert main([*words, "name=s", "duration=3epochs"]) == 0
    assert len(trained) == 4  # all finished


def test_sweep_finds_folders_of_earlier_versions(trained: Trained) -> None:
    former = "optimizer.learning_rate=0.001,seed=1"
    Path("outputs/s", former).mkdir(parents=True)
    words = ["train", "-m", "hydra/launcher=basic", "seed=1,2", "optimizer.learning_rate=1e-3,"]
    words[-1] = "optimizer.learning_rate=choice(1e-3)"
    assert main([*words, "name=s"]) == 0
    new = "optimizer.learning_rate-0.001__seed-2"
    assert folders(Path("outputs/s")) == sorted(["multirun.yaml", former, new])
    assert main(["train", f"init=outputs/s/{former}", "--cfg", "job"]) == 0


def test_sweep_dir_and_subdir(trained: Trained) -> None:
    words = ["train", "-m", "hydra/launcher=basic", "seed=1,2", "hydra.sweep.dir=a/b"]
    assert main([*words, "hydra.sweep.subdir=number-${hydra.job.num}"]) == 0
    assert folders(Path("a/b")) == ["multirun.yaml", "number-0", "number-1"]
    assert folders() == ["a"]


def test_mode_multirun_is_the_option_multirun(trained: Trained) -> None:
    assert main(["train", "hydra.mode=MULTIRUN", "hydra/launcher=basic", "seed=1,2"]) == 0
    assert len(trained) == 2


def test_job_returns_its_objective_also_if_it_was_finished(trained: Trained) -> None:
    words = ["train", "name=a", "seed=3", "checkpoint.best=top1"]
    assert main([*words, NOTE]) == main([*words, NOTE]) == 0
    assert len(trained) == 1
    assert main([*words, NOTE, "objective=[val/loss,val/top1]"]) == 0
    assert NoteCalls.returned == [0.75, 0.75, (2.5, 0.75)]


def test_callbacks(trained: Trained) -> None:
    assert main(["train", NOTE]) == 0
    assert NoteCalls.calls == ["run_start", "job_start", "job_end"]
    NoteCalls.calls.clear()
    assert main(["train", NOTE, "epochs=5"]) == 2
    assert NoteCalls.calls == []


def test_job_changes_the_folder_but_relative_paths_mean_that_of_the_call(
    trained: Trained, tmp_path: Path
) -> None:
    assert main(["train", "name=a", "hydra.job.chdir=true", NOTE, "hydra/job_logging=own"]) == 2
    assert main(["train", "name=a", "hydra.job.chdir=true", NOTE]) == 0
    assert NoteCalls.folders == [tmp_path / "outputs" / "a"]
    assert [folder for _, folder in trained] == [tmp_path]
    assert Path.cwd() == tmp_path
    assert main(["info", "model=vit_tiny", "hydra.job.chdir=true", "hydra.run.dir=x"]) == 0


def test_environment_of_the_job(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    write = Run.write

    def store(self: Run, name: str, values: Mapping[str, object]) -> None:
        seen.append(os.environ.get("OF_THE_JOB"))
        write(self, name, values)

    monkeypatch.setattr(Run, "write", store)
    assert main(["train", "+hydra.job.env_set.OF_THE_JOB=yes"]) == 0
    assert set(seen) == {"yes"}
    assert "OF_THE_JOB" not in os.environ


def test_job_name_and_output_subdir(trained: Trained) -> None:
    words = ["hydra.job.name=mine", "hydra/job_logging=default", "hydra.output_subdir=settings"]
    assert main(["train", "name=a", *words]) == 0
    assert {"settings", "mine.log"} <= set(folders(Path("outputs/a")))
    assert ".hydra" not in folders(Path("outputs/a"))


def run_process(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "vision", *words], capture_output=True, text=True, env=os.environ
    )


def test_verbose_shows_log_lines_on_stderr_and_results_alone_on_stdout() -> None:
    result = run_process("info", "model=vit_tiny", "format=json", "hydra.verbose=true")
    assert result.returncode == 0
    assert "[HYDRA] Config search path" in result.stderr
    assert json.loads(result.stdout)["parameters"] == 5_717_416
    assert folders() == []


def test_job_logging_can_be_hydras_own(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=vit_tiny", "format=json", "hydra/job_logging=default", "hydra.run.dir=x"]
    assert main(["info", *words]) == 0
    assert json.loads(capsys.readouterr().out)
    assert folders(Path("x")) == ["info.log"]


HUB_WARNING = """
import logging.config, sys
from omegaconf import OmegaConf
from huggingface_hub.utils import logging as hub
hub.get_logger("huggingface_hub.utils._http").warning("no network")  # its own handler
logging.config.dictConfig(OmegaConf.to_container(OmegaConf.load(sys.argv[1])))
hub.get_logger("huggingface_hub.utils._http").warning("unreachable")
logging.getLogger("other").warning("of another")
"""


def test_warning_of_the_hub_is_printed_once() -> None:
    path = CONFIGS / "hydra/job_logging/stderr.yaml"
    command = [sys.executable, "-c", HUB_WARNING, str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert text.count("unreachable") == 1 and text.count("of another") == 1


def test_searchpath_setting(capsys: pytest.CaptureFixture[str]) -> None:
    own = own_configs(Path("more")).resolve()
    words = ["info", f"hydra.searchpath=[file://{own}]", "model=own"]
    assert main([*words, "--cfg", "job", "-p", "model.depth"]) == 0
    assert capsys.readouterr().out == "3\n"


# Errors and exit codes


def failing(error: BaseException | int) -> Callable[[TrainConfig], int]:
    def train(config: TrainConfig) -> int:
        if isinstance(error, int):
            return error
        raise error

    return train


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ConfigError("first line\nsecond"), 2, "error: first line\n       second\n"),
        (PREEMPTED, PREEMPTED, ""),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (BrokenPipeError(), 0, ""),
    ],
)
def test_error_of_a_job_is_worded_once(
    error: BaseException | int,
    code: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("vision.training.loop.train", failing(error))
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # closed after a broken pipe
    assert main(["train", "name=a"]) == code
    assert capsys.readouterr().err == text


def test_run_that_fails_before_it_starts_leaves_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vision.training.loop.train", failing(ConfigError("no such data")))
    assert main(["train", "name=a"]) == 2
    assert folders(Path("outputs")) == []
    Path("outputs/a").mkdir()
    Path("outputs/a/.lock").touch()  # another process is about to start this run
    assert main(["train", "name=a"]) == 2
    assert folders(Path("outputs/a")) == [".hydra", ".lock"]


def test_error_that_nobody_foresaw_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vision.training.loop.train", failing(RuntimeError("a fault")))
    with pytest.raises(RuntimeError, match="a fault"):
        main(["train", "name=a"])


def test_sweep_with_a_failed_job_ends_with_code_1_after_the_others(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from vision.training import loop

    finish = loop.train

    def train(config: TrainConfig) -> int:
        if config.seed == 1:
            raise ConfigError("not with this seed")
        return finish(config)

    monkeypatch.setattr(loop, "train", train)
    assert main(["train", "-m", "hydra/launcher=basic", "seed=1,2"]) == 1
    assert [config.seed for config, _ in trained] == [2]
    message = "error: seed-1: not with this seed"
    assert capsys.readouterr().err.splitlines()[-1] == message


@pytest.mark.parametrize("parallel", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_error_of_a_job_of_the_default_launcher_is_worded_once(parallel: int) -> None:
    words = ["compare", "-m", "hydra/launcher=local", f"hydra.launcher.parallel={parallel}"]
    result = run_process(*words, "runs=[nowhere],[elsewhere]")
    assert result.returncode == 1
    assert result.stderr.count("'nowhere' does not exist") == 1
    assert "Error executing job" not in result.stderr


def test_folder_that_cannot_be_made_is_named(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").write_text("")
    assert main(["train", "output=file/below"]) == 2
    assert "file/below" in capsys.readouterr().err


def test_every_test_that_the_documentation_names_exists() -> None:
    text = (ROOT / "docs" / "hydra.md").read_text()
    names = set(re.findall(r"`(?:tests/\w+/)?(test_\w+)(…|\.py)?`", text))
    files = [
        file for folder in ("cli", "sweeps") for file in (ROOT / "tests" / folder).glob("*.py")
    ]
    tests = [name for file in files for name in re.findall(r"^def (\w+)", file.read_text(), re.M)]
    assert len(names) > 20
    for name, end in names:
        found = [f.stem for f in files] if end == ".py" else tests
        assert any(f == name or (end == "…" and f.startswith(name)) for f in found), name
