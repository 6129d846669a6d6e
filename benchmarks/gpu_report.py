"""What a CUDA device says about this project, in one file to send back: `make test-gpu`.

Runs the tests that need a device, then measures training steps beside timm's in fp16 and bf16, a
run that was stopped and resumed, and whether the loader keeps up. Without a device it says so.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
from model_settings import model_config
from small_runs import last_tensors, small_config

from vision.data.batches import build_loader, training_batches
from vision.data.order import BatchOrder
from vision.data.preprocess import resolve_preprocess
from vision.data.sources.build_source import build_source
from vision.models.build import build_model
from vision.training.loop import train

ROOT = Path(__file__).parents[1]
PAIRS = {
    "vit_base": "vit_base_patch16_224",
    "swin_tiny": "swin_tiny_patch4_window7_224",
}
PRECISIONS = {"fp16": torch.float16, "bf16": torch.bfloat16}
BATCH, ROUNDS = 64, 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("gpu_report.json"))
    arguments, more = parser.parse_known_args()
    report: dict[str, Any] = {"versions": _versions()}
    if not torch.cuda.is_available():
        report["device"] = None
        print("There is no CUDA device on this machine: no test was run, nothing was measured.")
    else:
        report["device"] = _device()
        report["tests"] = _tests(more)
        report["steps"] = {
            f"{name} {kind}": _compare(name, other, dtype)
            for name, other in PAIRS.items()
            for kind, dtype in PRECISIONS.items()
        }
        report["resumed_run_has_the_same_bits"] = _resumed()
        report["loader"] = _loader()
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"The report is in {arguments.output}.")
    failed = report["device"] is not None and report["tests"]["failed"]
    return 1 if failed else 0


def _versions() -> dict[str, str | None]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "timm": timm.__version__,
        "platform": platform.platform(),
    }


def _device() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "memory": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "count": torch.cuda.device_count(),
    }


def _tests(more: list[str]) -> dict[str, Any]:
    """The tests that need a device: their numbers, and the names of those that failed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", f"--junitxml={file}", *more]
        code = subprocess.run(command, cwd=ROOT).returncode
        cases = list(ET.parse(file).iter("testcase")) if file.exists() else []
    kinds = {case.get("name", "?"): [part.tag for part in case] for case in cases}
    failed = [name for name, tags in kinds.items() if {"failure", "error"} & set(tags)]
    skipped = [name for name, tags in kinds.items() if "skipped" in tags]
    passed = len(kinds) - len(failed) - len(skipped)
    return {"code": code, "passed": passed, "skipped": skipped, "failed": failed}


def _compare(name: str, other: str, dtype: torch.dtype) -> dict[str, Any]:
    """Milliseconds and peak bytes of a training step, of this project's model and of timm's."""
    ours = build_model(model_config(name), (224, 224), channels=3, classes=1000)
    models = {"vision": ours, "timm": timm.create_model(other)}
    return {who: _measure(model.cuda().train(), dtype) for who, model in models.items()}


def _measure(model: nn.Module, dtype: torch.dtype) -> dict[str, float]:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    images = torch.randn(BATCH, 3, 224, 224, device="cuda")
    labels = torch.zeros(BATCH, dtype=torch.int64, device="cuda")
    times = []
    torch.cuda.reset_peak_memory_stats()
    for number in range(ROUNDS + 5):
        torch.cuda.synchronize()
        before = time.perf_counter()
        with torch.autocast("cuda", dtype):
            logits = model(images)
        scaler.scale(F.cross_entropy(logits.float(), labels)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        if number >= 5:
            times.append(1000 * (time.perf_counter() - before))
    peak = torch.cuda.max_memory_allocated()
    del optimizer
    return {"milliseconds": statistics.median(times), "peak_bytes": peak}


def _resumed() -> bool:
    """Whether a run that ends in the middle and is resumed has the bits of one that did not."""
    with tempfile.TemporaryDirectory() as folder:
        whole, parts = Path(folder) / "whole", Path(folder) / "parts"
        words = ["device=cuda", "deterministic=true", "precision=bf16", "schedule.shape=constant"]
        train(small_config(whole, *words, "duration=12steps"))
        train(small_config(parts, *words, "duration=6steps"))
        status = parts / "run" / "status.json"
        status.write_text(json.dumps(json.loads(status.read_text()) | {"status": "preempted"}))
        train(small_config(parts, *words, "duration=12steps", "allow_changes=true"))
        first, second = last_tensors(whole), last_tensors(parts)
        return all(first[name].equal(second[name]) for name in first)


def _loader(device: str = "cuda") -> dict[str, float | bool]:
    """Images per second of a training run and of its loader alone. A run that is nearly as slow as
    its loader waits for it.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = ["data.image_size=64", "batch_size=64", "duration=40steps", "log.every=10steps"]
        words += ["data.train_samples=4096", "loader.workers=auto", "augment=deit"]
        config = small_config(Path(folder), f"device={device}", *words)
        source = build_source(config.data, "train")
        loader = build_loader(
            source,
            resolve_preprocess(config.preprocess, (64, 64), 3, []),
            config.data,
            config.loader,
            augment=config.augment,
            seed=config.seed,
            processes=1,
            on_cpu=device == "cpu",
            keep=True,
        )
        times = []
        for _ in training_batches(loader, BatchOrder(0, 64), 0, 64 * 50):
            times.append(time.perf_counter())
        alone = 64 * 40 / (times[-1] - times[-41])  # after its workers have started
        train(config)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        speeds = [e["images_per_second"] for e in events if e["split"] == "train"]
    trained = statistics.median(speeds[1:])
    return {"alone": alone, "in_training": trained, "keeps_up": trained < 0.9 * alone}


if __name__ == "__main__":
    sys.exit(main())
