"""compile=true learns what eager mode learns. Needs a C++ compiler."""

import shutil
from pathlib import Path

import pytest
import torch
from small_runs import metrics, small_config

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
        assert train(config, "x") == 0
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert (graphs > 0) == (name == "compiled")
    for split in ("train", "val", "val_ema"):
        eager, compiled_ = (
            [event["loss"] for event in metrics(tmp_path / name, split)]
            for name in ("eager", "compiled")
        )
        assert compiled_ == pytest.approx(eager, rel=2e-4)
