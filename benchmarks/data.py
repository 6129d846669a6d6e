"""Images per second and core: this project's loader, timm's and torchvision's reference pipeline.

    python benchmarks/data.py --photos FOLDER --output FILE.json

Every pipeline reads the same JPEG files (already in the system's cache), decodes, transforms and
collates them in one process with one thread; the time is that process's CPU time. Pipelines take
turns within each round; what is shown are medians over the rounds. A pipeline ends where its worker
processes would end: with uint8 batches for this project and timm (both normalise on the device),
with normalised float batches for torchvision's. Erasing is part of this project's workers and of
torchvision's; timm's is done on the device and costs it nothing here.

Without --photos, generated images of about ImageNet's sizes in pixels and bytes are used.
"""

import argparse
import json
import math
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import simplejpeg
import timm
import torch
import torchvision
import yaml
from PIL import Image
from timm.data import ImageDataset, create_loader
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from vision.config import parse
from vision.data.batches import Loader, Pipeline, evaluation_batches, training_batches
from vision.data.configs import (
    AugmentConfig,
    FolderConfig,
    LoaderConfig,
    PreprocessConfig,
    ShardsConfig,
)
from vision.data.order import BatchOrder
from vision.data.preprocess import resolve_preprocess
from vision.data.sources.build_source import build_source
from vision.data.sources.source import Source
from vision.data.tools.configs import PrepareConfig
from vision.data.tools.prepare import prepare_split

SIZE, BATCH = 224, 32
POLICY, ERASE = "rand-m9-mstd0.5-inc1", 0.25
CONFIGS = Path(__file__).parents[1] / "configs"
BARS = {"a": 1.7, "b": 1.3, "c": 1.8, "d": 3.0}
TITLES = {
    "a": "random resized crop + flip",
    "b": "(a) + RandAugment + erasing",
    "c": "evaluation: resize, centre crop",
    "d": "(a) from prepared shards; the others from the original files",
}

Pass = Callable[[], int]
"""Goes through all images once; returns their number."""


def main() -> None:
    arguments = read_arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary) / "photos"
        collect_photos(arguments.photos, root)
        source = build_source(folder_config(root), "train")
        shards = prepare_shards(source, Path(temporary) / "shards")
        cases = build_cases(root, source, shards)
        report = {
            "photos": describe(source),
            "shards": describe(shards),
            "rounds": arguments.rounds,
            "machine": machine(),
            "results": measure(cases, arguments.rounds),
        }
    print_table(report)
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--photos", type=Path, help="a folder with JPEG files, at any depth")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    return parser.parse_args()


# Data -------------------------------------------------------------------------------------------


def collect_photos(photos: Path | None, root: Path) -> None:
    """Copy or make the images as train/<class>/<file>, the layout that all three can read."""
    for name in ("one", "other"):
        (root / "train" / name).mkdir(parents=True)
    if photos is None:
        for number in range(128):
            image = generated_photo(number)
            path = root / "train" / ("one", "other")[number % 2] / f"{number:03}.jpg"
            image.save(path, quality=92, subsampling="4:2:0" if number % 3 == 0 else "4:4:4")
        return
    files = sorted(p for p in photos.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg"))
    if len(files) < 2:
        raise SystemExit(
            f"--photos {photos}: found {len(files)} JPEG files; at least 2 are needed."
        )
    for number, file in enumerate(files):
        shutil.copy(file, root / "train" / ("one", "other")[number % 2] / file.name)


def generated_photo(number: int) -> Image.Image:
    """Noise at all scales, stronger at the coarse ones, as in photographs; about 110 kB as JPEG."""
    random = np.random.default_rng(number)
    height, width = (375, 500) if number % 4 else (500, 375)
    pixels = np.full((height, width, 3), 128.0)
    for octave in range(1, 9):
        shape = (height // 2**octave + 2, width // 2**octave + 2, 3)
        noise = random.integers(0, 256, shape, dtype=np.uint8)
        layer = Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)
        pixels += (np.asarray(layer, float) - 128) * 0.11 * octave**0.8
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def prepare_shards(source: Source, output: Path) -> Source:
    settings = {
        "data": read_config("data/shapes"),  # not read: the source is given
        "output": str(output),
        "short_side": 256,
        "image_format": "jpeg",
        "quality": 90,
        "shard_size": 100,
        "workers": 0,
    }
    prepare_split(source, "train", parse(PrepareConfig, settings))
    values = read_config("data/webdataset")
    config = parse(ShardsConfig, {**values, "root": str(output), "val": None})
    return build_source(config, "train")


def describe(source: Source) -> dict[str, Any]:
    sizes = []
    for index in range(len(source)):
        content = source.read(index)
        assert isinstance(content, bytes)
        height, width, *_ = simplejpeg.decode_jpeg_header(content)
        sizes.append((height, width, len(content)))
    height, width, length = (statistics.median(column) for column in zip(*sizes, strict=True))
    return {"number": len(source), "height": height, "width": width, "kilobytes": length / 1000}


def machine() -> dict[str, str]:
    versions = {
        module.__name__: module.__version__ for module in (torch, torchvision, timm, PIL, np)
    }
    return {
        "processor": platform.processor() or platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        **versions,
    }


# Pipelines --------------------------------------------------------------------------------------


def build_cases(root: Path, source: Source, shards: Source) -> dict[str, dict[str, Pass]]:
    plain = {
        "timm": timm_pass(root, is_training=True),
        "torchvision": torchvision_pass(root, torchvision_training(augment=False)),
    }
    return {
        "a": {"vision": our_pass(source, "a"), **plain},
        "b": {
            "vision": our_pass(source, "b"),
            "timm": timm_pass(root, is_training=True, auto_augment=POLICY),
            "torchvision": torchvision_pass(root, torchvision_training(augment=True)),
        },
        "c": {
            "vision": our_pass(source, "c"),
            "timm": timm_pass(root, is_training=False),
            "torchvision": torchvision_pass(root, torchvision_evaluation()),
        },
        "d": {"vision": our_pass(shards, "a"), **plain},
    }


def our_pass(source: Source, case: str) -> Pass:
    preprocess = resolve_preprocess(
        parse(PreprocessConfig, read_config("preprocess/auto")), SIZE, 3
    )
    augment = None
    if case != "c":
        changes = {"policy": f"timm:{POLICY}", "erase": ERASE} if case == "b" else {}
        augment = parse(AugmentConfig, {**read_config("augment/inception"), **changes})
    pipeline = Pipeline(source, preprocess, augment, seed=0, max_pixels=10**8, on_error="raise")
    config = parse(LoaderConfig, read_config("loader/default"))
    loader = Loader(pipeline, config, workers=0)
    if augment is None:
        return lambda: count(evaluation_batches(loader, BATCH))
    plan = BatchOrder(seed=0, batch_size=BATCH)
    epoch = len(source) // BATCH * BATCH
    passes = iter(range(10**6))

    def run() -> int:
        start = next(passes) * epoch
        return count(training_batches(loader, plan, start, start + epoch))

    return run


def timm_pass(root: Path, is_training: bool, auto_augment: str | None = None) -> Pass:
    loader = create_loader(
        ImageDataset(str(root / "train")),
        input_size=(3, SIZE, SIZE),
        batch_size=BATCH,
        is_training=is_training,
        no_aug=False,
        color_jitter=None,
        auto_augment=auto_augment,
        interpolation="bicubic",
        crop_pct=0.875,
        num_workers=0,
        persistent_workers=False,
        device=torch.device("cpu"),
    )
    # The outer loader normalises and erases on the device; the inner one makes uint8 batches.
    return lambda: count(loader.loader)


def torchvision_pass(root: Path, transform: Callable[[Any], Any]) -> Pass:
    loader = DataLoader(
        ImageFolder(str(root / "train"), transform), BATCH, shuffle=True, drop_last=True
    )
    return lambda: count(loader)


def torchvision_training(augment: bool) -> v2.Compose:
    """As in torchvision's references/classification, with the interpolation of the others."""
    interpolation = v2.InterpolationMode.BICUBIC
    parts: list[Any] = [
        v2.RandomResizedCrop(SIZE, interpolation=interpolation, antialias=True),
        v2.RandomHorizontalFlip(),
    ]
    if augment:
        parts.append(v2.RandAugment(interpolation=interpolation, magnitude=9))
    parts += torchvision_numbers()
    if augment:
        parts.append(v2.RandomErasing(ERASE))
    return v2.Compose(parts)


def torchvision_evaluation() -> v2.Compose:
    resize = v2.Resize(math.floor(SIZE / 0.875), v2.InterpolationMode.BICUBIC)
    return v2.Compose([resize, v2.CenterCrop(SIZE), *torchvision_numbers()])


def torchvision_numbers() -> list[Any]:
    normalize = v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    return [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), normalize]


def count(batches: Iterable[Any]) -> int:
    return sum(len(batch[0]) for batch in batches)


def folder_config(root: Path) -> FolderConfig:
    return parse(FolderConfig, {**read_config("data/folder"), "root": str(root)})


def read_config(name: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    return values


# Measuring --------------------------------------------------------------------------------------


def measure(cases: dict[str, dict[str, Pass]], rounds: int) -> dict[str, dict[str, Any]]:
    """Medians of images per second, and of the ratios to timm within a round."""
    for pipelines in cases.values():
        for run in pipelines.values():
            run()  # opens files, fills caches
    rates: dict[str, dict[str, list[float]]] = {
        case: {name: [] for name in pipelines} for case, pipelines in cases.items()
    }
    for _ in range(rounds):
        for case, pipelines in cases.items():
            for name, run in pipelines.items():
                start = time.process_time()
                number = run()
                rates[case][name].append(number / (time.process_time() - start))
    return {case: summarise(case, measured) for case, measured in rates.items()}


def summarise(case: str, rates: dict[str, list[float]]) -> dict[str, Any]:
    ratios = {
        f"ratio_to_{peer}": [
            ours / theirs for ours, theirs in zip(rates["vision"], rates[peer], strict=True)
        ]
        for peer in ("timm", "torchvision")
    }
    return {
        "title": TITLES[case],
        "bar": BARS[case],
        **{name: statistics.median(values) for name, values in rates.items()},
        **{name: statistics.median(values) for name, values in ratios.items()},
        "spread_of_ratio_to_timm": [min(ratios["ratio_to_timm"]), max(ratios["ratio_to_timm"])],
    }


def print_table(report: dict[str, Any]) -> None:
    for name in ("photos", "shards"):
        print(f"{name}: " + ", ".join(f"{k} {v:.4g}" for k, v in report[name].items()))
    print(", ".join(f"{name} {value}" for name, value in report["machine"].items()))
    print("Images per second and core\n")
    print(
        "|   | case | vision | timm | torchvision | ÷ timm (least – most) | bar | ÷ torchvision |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for case, row in report["results"].items():
        low, high = row["spread_of_ratio_to_timm"]
        print(
            f"| {case} | {row['title']} | {row['vision']:.0f} | {row['timm']:.0f} "
            f"| {row['torchvision']:.0f} | **{row['ratio_to_timm']:.2f}** ({low:.2f} – {high:.2f}) "
            f"| ≥ {row['bar']} | {row['ratio_to_torchvision']:.2f} |"
        )


if __name__ == "__main__":
    main()
