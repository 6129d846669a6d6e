"""compile=true learns what eager mode learns. Needs a C++ compiler."""

import shutil
from pathlib import Path

import pytest
import torch
from small_runs import last_tensors, metrics, small_config
from started_runs import torchrun

from vision.training.loop import train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler"),
]


@pytest.mark.parametrize("model", ["vit_mini", "swin_mini", "swinv2_mini"])
def test_train_compiled_has_the_losses_of_eager_mode(tmp_path: Path, model: str) -> None:
    settings = ["duration=8steps", "evaluate_every=4steps", "ema=0.9"]
    for name, compiled in (("eager", "false"), ("compiled", "true")):
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        config = small_config(tmp_path / name, *settings, f"compile={compiled}", model=model)
        assert train(config) == 0
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert (graphs > 0) == (name == "compiled")
    for split in ("train", "val", "val_ema"):
        eager, compiled_ = (
            [event["loss"] for event in metrics(tmp_path / name, split)]
            for name in ("eager", "compiled")
        )
        assert compiled_ == pytest.approx(eager, rel=2e-4)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_compiled_learn_what_one_learns(tmp_path: Path, parallel: str) -> None:
    settings = ["duration=6steps", "max_batch_per_device=4", f"parallel={parallel}"]
    assert train(small_config(tmp_path / "one", *settings, model="swin_mini")) == 0
    process = torchrun(tmp_path / "two", *settings, "compile=true", model="swin_mini")
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    one, two = last_tensors(tmp_path / "one"), last_tensors(tmp_path / "two")
    for name in one:
        assert two[name].float().allclose(one[name].float(), rtol=1e-3, atol=1e-5), name
