"""The code for GPUs, as far as it can be checked without one; the rest is in test_gpu.py.

On `meta`: nothing of a training step or an evaluation stays on the CPU, and only the functions that
are listed here wait for the device. On fake CUDA tensors: autocast computes in the right types.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from model_settings import small_model
from on_meta import META, OnMeta
from small_runs import small_config
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from vision.data.batches import Batch
from vision.data.images.mixing import Mix, soft_targets
from vision.data.order import BatchOrder
from vision.data.preprocess import resolve_preprocess
from vision.data.sources.build_source import build_source
from vision.inspection.capture.capture import capture
from vision.models.build import build_model
from vision.models.configs import AutoModelConfig
from vision.training.configs import TrainConfig
from vision.training.elastic import VirtualRanks
from vision.training.optim import build_optimizer, set_learning_rate
from vision.training.run.distributed import World
from vision.training.run.run_folder import Run
from vision.training.run.stop import StopRequest
from vision.training.state import TrainState, start_average
from vision.training.step import empty_sums, forward_backward, update
from vision.training.tasks.class_balance import ClassBalance
from vision.training.tasks.classification import loss_and_sums
from vision.training.tasks.probe import Features
from vision.training.tasks.task import TrainingData, select_task
from vision.training.tune import freeze

MODELS = ["vit_mini", "swin_mini", "swinv2_mini", "timm"]
MIXED = ["augment=deit", "ema=0.9", "optimizer.clip=norm"]
STEPS = {
    "adamw": MIXED,
    "muon": [*MIXED, "optimizer.name=muon"],
    "agc": ["optimizer.clip=agc", "loss.kind=bce"],
    "value": ["optimizer.clip=value", "channels_last=true"],
    "elastic": [*MIXED, "elastic=2"],
    "lora": ["tune=lora"],
}
STEP = Counter({"step.py: <lambda>": 2})
"""Waits in a step of two parts: whether each loss is finite. On CUDA the flag is copied while the
backward pass runs, and the host waits for the flag alone (`_copy_to_host`)."""
EVALUATION = Counter({"metrics.py: results": 1})
"""Waits in an evaluation: one, at its end, for the sums."""
NORMALIZER = Counter({"preprocess.py: <genexpr>": 2})
"""Waits before the first batch: mean and deviation go to the device."""
CAPTURE = {
    "recording.py: _check_rows",
    "recording.py: check_output",
}
"""Functions that wait in a capture: the checks that its attention is that of the model."""


def run_on_meta(folder: Path, model: str, words: list[str]) -> tuple[Any, TrainState]:
    """A task and the state of a run whose model is on `meta`."""
    config = small_config(folder, *words, model=model)
    train, val = (build_source(config.data, split) for split in ("train", "val"))
    preprocess = resolve_preprocess(config.preprocess, (32, 32), 3, [])
    assert not isinstance(config.model, AutoModelConfig)
    classes = len(train.classes)
    network = build_model(config.model, (32, 32), channels=3, classes=classes, device="meta")
    network.train()
    freeze(network, config.tune, 0)
    parts = (config, TrainingData(train, val, preprocess), network, Run(folder))
    task = select_task(*parts, World(0, 1, META), StopRequest())
    average = start_average(network) if config.ema is not None else None
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    optimizer = build_optimizer(task.model, config.optimizer)
    return task, TrainState(task.model, optimizer, scaler, average, empty_sums(task))


def batch(count: int) -> Batch:
    """Images in pinned memory, as far as this machine has such a thing."""
    numbers = torch.arange(count)
    images = torch.zeros(count, 3, 32, 32, dtype=torch.uint8)
    return Batch(images, numbers % 4, numbers, torch.zeros_like(numbers), epoch=0, failures=())


def take_step(task: Any, state: TrainState, config: TrainConfig, parts: list[Any]) -> None:
    module = task.module if config.elastic is None else VirtualRanks(task.module, task.world, 2)
    set_learning_rate(state.optimizer, 0.1)
    sums, finite = forward_backward(task, module, parts, state.scaler, state.step)
    assert finite
    update(state, config)
    state.sums += sums


@pytest.mark.parametrize("model", MODELS)
def test_step_and_evaluation_of_every_family_wait_where_they_say(
    tmp_path: Path, model: str
) -> None:
    task, state = run_on_meta(tmp_path, model, MIXED)
    check_steps(task, state)
    task.val_loader.batches = lambda requests: iter([batch(4), batch(4)])
    with OnMeta() as mode:
        task.evaluate(4)
    assert Counter(mode.waits) == EVALUATION + NORMALIZER


@pytest.mark.parametrize("kind", STEPS)
def test_every_kind_of_step_waits_where_it_says(tmp_path: Path, kind: str) -> None:
    check_steps(*run_on_meta(tmp_path, "vit_mini", STEPS[kind]))


def check_steps(task: Any, state: TrainState) -> None:
    """Take two steps of two parts each: the first one also makes the optimiser's state."""
    for _ in range(2):
        with OnMeta() as mode:
            take_step(task, state, task.config, [batch(4), batch(4)])
        state.step += 1
        assert Counter(mode.waits) == STEP


def test_step_and_evaluation_of_a_probe_wait_where_they_say(tmp_path: Path) -> None:
    words = ["tune=head", "tune.cache=true", "augment=none"]
    task, state = run_on_meta(tmp_path, "vit_mini", words)
    rows = np.zeros((40, 16), np.float32)
    task.features = {split: Features(rows, []) for split in ("train", "val")}
    parts = list(islice(task.training_batches(BatchOrder(0, 8), 0, 16), 2))
    with OnMeta() as mode:
        take_step(task, state, task.config, parts)
    # Rows of a memory map: they are not pinned, so that a copy to the device is one that waits.
    assert Counter(mode.waits) == STEP + Counter({"probe.py: loss": 4})
    with OnMeta() as mode:
        task.evaluate(24)
    assert Counter(mode.waits) == EVALUATION + Counter({"probe.py: evaluate": 3})


def test_capture_waits_for_its_own_checks() -> None:
    """Of a ViT: the places of a Swin's windows in the image depend on contents."""
    model = small_model("vit_tiny", (32, 32)).to(META).eval()
    with OnMeta(answer=0) as mode:
        captured = capture(model, torch.zeros(2, 3, 32, 32, device=META))
    assert captured.logits is not None and captured.logits.device == META
    assert set(mode.waits) <= CAPTURE, Counter(mode.waits)


@contextmanager
def fake_cuda(dtype: torch.dtype) -> Iterator[None]:
    """Within, tensors may be on a CUDA device that is not there, under autocast."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    with FakeTensorMode(), torch.device("cuda"):
        # torch.autocast would disable itself without a device.
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", dtype)
        try:
            yield
        finally:
            torch.clear_autocast_cache()
            torch.set_autocast_enabled("cuda", before[0])
            torch.set_autocast_dtype("cuda", before[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["vit_mini", "timm"])
def test_forward_pass_on_a_fake_cuda_device_computes_in_the_types_of_autocast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    config = small_config(tmp_path, model=name)
    attention: list[torch.dtype] = []
    fused = F.scaled_dot_product_attention

    def noted(query: Tensor, *others: Any, **more: Any) -> Tensor:
        output = fused(query, *others, **more)
        attention.append(output.dtype)
        return output

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    norms: set[torch.dtype] = set()
    assert not isinstance(config.model, AutoModelConfig)
    model = build_model(config.model, (32, 32), channels=3, classes=4, device="meta").train()
    with fake_cuda(dtype):
        for module in model.modules():  # `to` cannot exchange fake parameters
            for held in (module._parameters, module._buffers):
                for key, tensor in held.items():
                    if tensor is not None:
                        fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                        held[key] = nn.Parameter(fake) if held is module._parameters else fake
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.register_forward_hook(lambda m, x, y: norms.add(y.dtype))
        images = torch.zeros(2, 3, 32, 32)
        logits = model(images)
        targets = soft_targets(torch.zeros(2, dtype=torch.int64), 4, Mix(0.5), 0.1)
        loss, sums = loss_and_sums(logits, targets, config.loss, ClassBalance())
    assert logits.device.type == "cuda" and logits.dtype == dtype
    assert loss.dtype == sums.dtype == torch.float32 and sums.device.type == "cuda"
    assert norms <= {torch.float32}  # as autocast computes them on CUDA
    assert set(attention) <= {dtype}
    if name == "vit_mini":
        assert len(attention) == 2 and norms
