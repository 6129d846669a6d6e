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
from small_tasks import DISTILLED, a_teacher
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
from vision.models.layers import Derived
from vision.training.configs import TrainConfig
from vision.training.elastic import VirtualRanks
from vision.training.optim import build_optimizer, set_learning_rate
from vision.training.run.distributed import World
from vision.training.run.run_folder import Run
from vision.training.run.stop import StopRequest
from vision.training.state import TrainState, start_average
from vision.training.step import empty_sums, forward_backward, update
from vision.training.tasks.classification import ClassBalance, loss_and_sums
from vision.training.tasks.probe import Features
from vision.training.tasks.task import TrainingData, seen_by_task, select_task, with_parts
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
    "focal": ["loss.kind=focal", "flip_test=true"],
}
STEP = Counter({"step.py: <lambda>": 2})
"""Waits in a step of two parts: whether each loss is finite. On CUDA the flag is copied while the
backward pass runs, and the host waits for the flag alone (`_copy_to_host`)."""
EVALUATION = Counter({"metrics.py: results": 1})
"""Waits in an evaluation: one, at its end, for the sums."""
NORMALIZER = Counter({"preprocess.py: <genexpr>": 2})
"""Waits before the first batch: mean and deviation go to the device."""
SQUARES = "task.mask_size=8"
TWO = ["task=multi_label", "data=shapes_two"]
MASKED = Counter({"masked.py: evaluate": 1})
SEVERAL = Counter({"evaluate.py: predict": 2})
"""Several labels are measured on the host: it waits for the logits of each of two batches."""
TASKS = {
    "mae": ("vit_mini", ["task=masked", "task.decoder.depth=1"], MASKED),
    "simmim": ("vit_mini", ["task=masked", "task.method=simmim", SQUARES], MASKED),
    "simmim swin": ("swin_mini", ["task=masked", SQUARES], MASKED),
    "several labels": ("vit_mini", [*TWO, *MIXED], SEVERAL + NORMALIZER),
    "asymmetric": ("swinv2_mini", [*TWO, "task.loss=asymmetric"], SEVERAL + NORMALIZER),
    "distill": ("vit_mini", ["task=distill", *MIXED], EVALUATION + NORMALIZER),
    "distill soft": (
        *("vit_mini", ["task=distill", "task.loss=soft", *DISTILLED], EVALUATION + NORMALIZER),
    ),
}
"""By name: a model, words, and the waits of an evaluation of two batches."""
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
    train, val = (seen_by_task(config, source) for source in (train, val))
    classes = len(train.classes)
    network = build_model(config.model, (32, 32), channels=3, classes=classes, device="meta")
    network = with_parts(config, network, preprocess).train()
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


@pytest.mark.parametrize("name", TASKS)
def test_step_and_evaluation_of_every_task_wait_where_they_say(tmp_path: Path, name: str) -> None:
    model, words, waits = TASKS[name]
    if "task=distill" in words:
        words = [*words, f"task.teacher={a_teacher(tmp_path)}"]
    task, state = run_on_meta(tmp_path, model, words)
    first = batch(4)
    if "task=multi_label" in words:
        first = first._replace(labels=torch.zeros(4, len(task.classes), dtype=torch.int8))
    check_steps(task, state, first)
    task.val_loader.batches = lambda requests: iter([first, first._replace(ids=first.ids + 4)])
    with OnMeta() as mode:
        task.evaluate(4)
    assert Counter(mode.waits) == waits


def check_steps(task: Any, state: TrainState, part: Batch | None = None) -> None:
    """Take two steps of two parts each: the first one also makes the optimiser's state."""
    part = part or batch(4)
    for _ in range(2):
        with OnMeta() as mode:
            take_step(task, state, task.config, [part, part])
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


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", ["vit_tiny", "swin_tiny", "swinv2_tiny"])
def test_capture_waits_for_its_own_checks(name: str, gradients: bool) -> None:
    model = small_model(name, (32, 32)).to(META).eval()
    images, target = torch.zeros(2, 3, 32, 32, device=META), 0 if gradients else None
    with OnMeta(answer=0) as mode:
        captured = capture(model, images, targets=target, gradients=gradients)
    assert captured.logits is not None and captured.logits.device == META
    layers = captured.depth
    given = Counter({"capture.py: chosen_classes": 2} if gradients else {})
    assert Counter(mode.waits) == given + Counter(
        {"recording.py: _check_rows": layers, "recording.py: check_output": 2 * layers}
    )


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


def onto_fake_cuda(model: nn.Module) -> None:
    """Exchange all tensors of a model, which `to` cannot do with fake parameters."""
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for key, tensor in held.items():
                if tensor is not None:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                    held[key] = nn.Parameter(fake) if held is module._parameters else fake
        if isinstance(module, Derived):
            module.to("cuda")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_forward_pass_and_update_on_a_fake_cuda_device_have_the_types_of_autocast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    config = small_config(tmp_path, "optimizer.clip=norm", "ema=0.9", model=name)
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
        onto_fake_cuda(model)
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.register_forward_hook(lambda m, x, y: norms.add(y.dtype))
        logits = model(torch.zeros(2, 3, 32, 32))
        targets = soft_targets(torch.zeros(2, dtype=torch.int64), 4, Mix(0.5), 0.1)
        loss, sums = loss_and_sums(logits, targets, config.loss, ClassBalance())
        scaler = torch.amp.GradScaler("cuda", enabled=False)
        optimizer = build_optimizer(model, config.optimizer)
        set_learning_rate(optimizer, 0.1)
        average = start_average(model)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        update(TrainState(model, optimizer, scaler, average, sums), config)
        moments = [t for s in optimizer.state.values() for t in s.values() if t.ndim]
    assert logits.device.type == "cuda" and logits.dtype == dtype
    assert loss.dtype == sums.dtype == torch.float32 and sums.device.type == "cuda"
    assert norms <= {torch.float32}  # as autocast computes them on CUDA
    assert set(attention) <= {dtype}
    if name != "timm":
        assert norms and len(attention) == (2 if name == "vit_mini" else 4)
    held = [*model.parameters(), *average.values(), *moments]
    assert moments and {t.device.type for t in held} == {"cuda"}
    assert {t.dtype for t in held if t.is_floating_point()} == {torch.float32}
