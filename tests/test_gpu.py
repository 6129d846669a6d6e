"""What can only be seen on a CUDA device: `make test-gpu`."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from model_settings import small_model
from small_runs import last_tensors, metrics, small_config, words

from vision.models.layers import static_bias
from vision.training.loop import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

FAMILIES = ["vit_tiny", "swin_tiny", "swinv2_tiny"]


@pytest.mark.parametrize("name", FAMILIES)
def test_model_on_cuda_equals_cpu_in_logits_and_gradients(name: str) -> None:
    model, images = small_model(name, (64, 48)), torch.randn(4, 3, 64, 48)
    results = []
    for device in ("cpu", "cuda"):
        model = model.to(device)
        model.zero_grad()
        logits = model(images.to(device))
        logits.square().mean().backward()
        gradients = {n: p.grad.cpu() for n, p in model.named_parameters()}
        results.append((logits.detach().cpu(), gradients))
    (logits, gradients), (cuda_logits, cuda_gradients) = results
    torch.testing.assert_close(cuda_logits, logits, rtol=1e-3, atol=1e-4)
    for key, gradient in gradients.items():
        error = (cuda_gradients[key] - gradient).norm() / gradient.norm().clamp_min(1e-8)
        assert error < 1e-2, key


@pytest.mark.parametrize("name", FAMILIES)
def test_model_with_static_bias_on_cuda_equals_without(name: str) -> None:
    model, images = small_model(name, (64, 48)).cuda().eval(), torch.randn(4, 3, 64, 48).cuda()
    with torch.no_grad():
        plain = model(images)
        with static_bias(model):
            torch.testing.assert_close(model(images), plain)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_training_on_cuda_follows_the_cpu(tmp_path: Path, precision: str) -> None:
    for device, kind in (("cpu", "fp32"), ("cuda", precision)):
        config = small_config(tmp_path / device, f"device={device}", f"precision={kind}")
        assert train(config) == 0
    losses = [[e["loss"] for e in metrics(tmp_path / d)] for d in ("cpu", "cuda")]
    assert losses[1] == pytest.approx(losses[0], abs=0.05)


def test_deterministic_training_on_cuda_repeats_to_the_bit(tmp_path: Path) -> None:
    for name in ("first", "second"):
        config = small_config(tmp_path / name, "device=cuda", "deterministic=true")
        assert train(config) == 0
    first, second = last_tensors(tmp_path / "first"), last_tensors(tmp_path / "second")
    assert all(first[name].equal(second[name]) for name in first)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is only one CUDA device")
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_gpus_over_nccl_learn_what_one_learns(tmp_path: Path, parallel: str) -> None:
    assert train(small_config(tmp_path / "one", "device=cuda")) == 0
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    arguments = words(tmp_path / "two", "device=cuda", f"parallel={parallel}")
    root = Path(__file__).parents[1]
    subprocess.run([*launcher, "train.py", *arguments], check=True, cwd=root)
    losses = [[e["loss"] for e in metrics(tmp_path / name)] for name in ("one", "two")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
