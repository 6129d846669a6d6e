"""docs/extend.md as a reader would follow it: its blocks applied to a copy of the project, which
then describes, trains, resumes, captures and exports the extended model.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^`([^`\n]+)`( \(new\))?\n\n```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
"""A file's name on a line of its own, then a diff, or the contents of a new file."""
BOTH = ["model=vit_max", "model.positions=centre"]
SMALL = ["data.train_samples=64", "data.val_samples=16", "loader.workers=0", "device=cpu"]


def apply(page: str, project: Path) -> set[str]:
    """Apply every block of a page to a project, and return the files that it names."""
    named = set()
    for name, new, kind, text in BLOCK.findall(page):
        file = project / name
        assert file.exists() != bool(new), name
        if kind == "diff":
            lines = [(line[:1], line[1:]) for line in text.splitlines(keepends=True)]
            before = "".join(line for sign, line in lines if sign != "+")
            after = "".join(line for sign, line in lines if sign != "-")
            assert file.read_text().count(before) == 1, f"{name}: not once in the file:\n{before}"
            text = file.read_text().replace(before, after)
        file.write_text(text)
        named.add(name)
    assert page.count("```") == 2 * len(BLOCK.findall(page)), "a block without a file's name"
    return named


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with every extension of the page."""
    copy = tmp_path_factory.mktemp("extended")
    for folder in ("vision", "configs", "hydra_plugins"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("train.py", "eval.py", "pyproject.toml"):
        shutil.copy(ROOT / file, copy)
    named = apply((ROOT / "docs/extend.md").read_text(), copy)
    assert len(named) >= 7
    return copy


COMMANDS = """
import json, sys
from vision.cli.app import main
for words in json.loads(sys.argv[1]):
    assert main(words) == 0, words
"""


def run(project: Path, *commands: list[str]) -> str:
    """What commands of the copy print, one after the other in a process."""
    return run_program(project, COMMANDS, json.dumps(commands))


def run_program(project: Path, program: str, argument: str) -> str:
    """What a program prints that imports the copy."""
    done = subprocess.run(
        [sys.executable, "-c", program, argument],
        cwd=project,
        env=os.environ | {"PYTHONPATH": str(project), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


CAPTURE = """
import sys, torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
import vision
from vision.inspection.methods.attribution import attribute, methods_of
from vision.models.configs import ModelConfig

assert vision.__file__.startswith(sys.argv[1]), vision.__file__
images = torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(0))
with initialize_config_dir(sys.argv[1] + "/configs", version_base=None):
    for name in ("vit_max", "vit_centre", "swin_mini"):
        values = OmegaConf.to_container(compose(f"model/{name}"))["model"]
        model = vision.build_model(vision.parse(ModelConfig, values), (48, 48), classes=5).eval()
        assert methods_of(model)["received"] is None
        found = attribute(model, images, "received", layer=0)
        whole = found.values.sum((1, 2)) + sum(found.prefix.values(), torch.zeros(2))
        assert found.values.shape[0] == 2 and found.values.std() > 0
        torch.testing.assert_close(whole, torch.ones(2))
"""


def test_attention_of_extended_models_is_captured(project: Path) -> None:
    run_program(project, CAPTURE, str(project))


def test_extended_model_is_described_trains_resumes_and_is_exported(project: Path) -> None:
    words = ["train", *BOTH, *SMALL, "batch_size=32", "log.every=1steps", "name=extended"]
    assert "4 blocks" in run(project, ["info", *BOTH], [*words, "duration=2steps"])
    status = project / "outputs/extended/status.json"
    status.write_text(json.dumps(json.loads(status.read_text()) | {"status": "preempted"}))
    export = ["export", "checkpoint=outputs/extended", "format=torch_export"]
    run(project, [*words, "duration=3steps", "allow_changes=true"], export)
    metrics = (project / "outputs/extended/metrics.jsonl").read_text().splitlines()
    lines = [line for line in map(json.loads, metrics) if line["split"] == "train"]
    assert [line["step"] for line in lines] == [1, 2, 3]


CONVERT = """
from vision.cli.app import main

for run in ("vit_max", "vit_centre"):
    for library in ("timm", "huggingface", "torchvision"):
        code = main(["convert", f"source=outputs/{run}", f"format={library}", "output=converted"])
        print(run, library, code)
"""


def test_other_libraries_are_said_not_to_have_an_extension(project: Path) -> None:
    few = [*SMALL, "batch_size=32", "duration=2steps"]
    names = ("vit_max", "vit_centre")
    run(project, *(["train", f"model={name}", *few, f"name={name}"] for name in names))
    text = run_program(project, CONVERT, "")
    for name, setting in (("vit_max", "pool=max"), ("vit_centre", "positions=centre")):
        for library in ("timm", "huggingface", "torchvision"):
            assert f"{name} {library} 2" in text
            assert setting in text
    assert text.count("cannot express this model") == 6
