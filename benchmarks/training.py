"""Images per second of a whole training loop: this project's, and one of timm's public parts.

    python benchmarks/training.py [--settings photos small mini] --output FILE.json
    python benchmarks/training.py --tasks distill masked

Both loops read the same files, decode and crop them, normalise, go forward and backward, clip the
gradients, step AdamW along a cosine and log means. They take turns within each round, in one
process with one thread and no workers, so that its CPU time is all the work that was done; what is
shown are medians over rounds. Evaluation and checkpoints are in neither: this project's are timed
apart and taken out.

timm's loop is written here after its train.py, from what timm offers as a library: `create_loader`,
`create_optimizer_v2`, `CosineLRScheduler`, `dispatch_clip_grad`, `AverageMeter`, `accuracy`.

`--tasks` measures steps of other tasks instead, beside their parts or a supervised step
(`task_steps.py`, `masked_step.py`).
"""

import argparse
import json
import platform
import shutil
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import PIL
import timm
import torch
from data import generated_photo
from masked_step import masked_step
from task_steps import distillation_step
from training_loops import CLASSES, Setting, Times, our_loop, timm_loop

TIMM_LOOP, OUR_LOOP, OUR_MODEL = "timm", "vision", "vision, its own ViT"
RATIO_BAR, SHARE_BAR = 1.0, 0.03

SETTINGS = {
    "photos": Setting("ViT-Ti/16, 224 px from JPEG photos, batch 32", 96, True, 224, 32, 1, 1),
    "small": Setting("ViT-Ti/16, 64 px from PNG, batch 64", 1024, False, 64, 64, 1, 4),
    "mini": Setting(
        "a ViT/16 of 0.3 M parameters, 64 px from PNG, batch 64",
        *(2048, False, 64, 64, 1, 4),
        timm_model="test_vit",
        our_model=(
            "model=vit_mini",
            *("model.patch_size=16", "model.width=64", "model.depth=6", "model.heads=2"),
            "model.mlp_ratio=3",
        ),
    ),
}
"""The smaller the model, the more everything around it costs."""

TASKS = {"distill": distillation_step, "masked": masked_step}

Loop = Callable[[int], Times]
"""Trains once, in the round of this number."""


def main() -> None:
    arguments = read_arguments()
    torch.set_num_threads(1)
    report: dict[str, Any] = {"rounds": arguments.rounds, "machine": machine(), "results": {}}
    if arguments.tasks:
        with tempfile.TemporaryDirectory() as temporary:
            report["tasks"] = {
                name: TASKS[name](Path(temporary), 4 * arguments.rounds) for name in arguments.tasks
            }
        arguments.settings = []
    for name in arguments.settings:
        setting = SETTINGS[name]
        if arguments.quick:
            setting = replace(setting, images=2 * setting.batch)
        with tempfile.TemporaryDirectory() as temporary:
            root = Path(temporary) / "images"
            setting = collect_images(setting, arguments.folder, root)
            loops: dict[str, Loop] = {
                TIMM_LOOP: partial(timm_loop, setting, root),
                OUR_LOOP: partial(our_loop, setting, root, Path(temporary), own=False),
                OUR_MODEL: partial(our_loop, setting, root, Path(temporary), own=True),
            }
            rounds = measure(loops, arguments.rounds)
        report["results"][name] = summarise(setting, rounds)
    print_table(report)
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[])
    parser.add_argument("--folder", type=Path, help="images to use, at any depth, for all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two steps, one round: does it run?")
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds}: at least one round is needed.")
    if arguments.quick:
        arguments.rounds = 1
    return arguments


# Data -------------------------------------------------------------------------------------------


def collect_images(setting: Setting, folder: Path | None, root: Path) -> Setting:
    """Copy or make images as train/<class>/<file> and a few as val/<class>/<file>.

    Returns the setting with the number of images that there are.
    """
    for split in ("train", "val"):
        for name in CLASSES:
            (root / split / name).mkdir(parents=True)
    if folder is None:
        for number in range(setting.images):
            path = root / "train" / CLASSES[number % 2] / f"{number:05}"
            save_generated(number, setting, path)
    else:
        files = sorted(
            p for p in folder.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg", ".png")
        )
        if len(files) < 2 * setting.batch:
            raise SystemExit(
                f"--folder {folder}: found {len(files)} JPEG and PNG files; at least two batches "
                f"of {setting.batch} are needed."
            )
        setting = replace(setting, images=min(len(files), setting.images))
        for number, file in enumerate(files[: setting.images]):
            target = root / "train" / CLASSES[number % 2] / f"{number:05}{file.suffix.lower()}"
            shutil.copy(file, target)
    for name in CLASSES:
        first = min((root / "train" / name).iterdir())
        shutil.copy(first, root / "val" / name / first.name)
    return setting


def save_generated(number: int, setting: Setting, path: Path) -> None:
    """Noise at all scales, as in photographs: a JPEG of ImageNet's size or a small PNG."""
    image = generated_photo(number)
    if setting.photo:
        image.save(path.with_suffix(".jpg"), quality=92)
    else:
        image.resize((setting.size, setting.size)).save(path.with_suffix(".png"))


# Measuring --------------------------------------------------------------------------------------


def measure(loops: dict[str, Loop], rounds: int) -> dict[str, list[Times]]:
    """Times of all loops; who comes first in a round changes. A first round warms up."""
    found: dict[str, list[Times]] = {name: [] for name in loops}
    names = list(loops)
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            times = loops[name](turn)
            if turn:
                found[name].append(times)
    return found


def summarise(setting: Setting, rounds: dict[str, list[Times]]) -> dict[str, Any]:
    """Medians; ratios are those within a round."""
    images = setting.steps * setting.batch
    rows = {}
    for name, found in rounds.items():
        ratios = [a.total / b.total for a, b in zip(rounds[TIMM_LOOP], found, strict=True)]
        rows[name] = {
            "images_per_second": statistics.median(images / t.total for t in found),
            "ratio_to_timm": statistics.median(ratios),
            "least_ratio": min(ratios),
            "most_ratio": max(ratios),
            "share_of_data": statistics.median(t.data / t.total for t in found),
            "share_outside": statistics.median(t.outside for t in found),
            "step_milliseconds": statistics.median(t.step / setting.steps * 1e3 for t in found),
            "rounds": [asdict(t) for t in found],
        }
    return {"setting": asdict(setting), "steps": setting.steps, "loops": rows}


def machine() -> dict[str, str]:
    """What the figures are of."""
    versions = {module.__name__: module.__version__ for module in (torch, timm, PIL)}
    return {
        "processor": platform.processor() or platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        **versions,
    }


def print_table(report: dict[str, Any]) -> None:
    """The same as the JSON, for people."""
    print(", ".join(f"{name} {value}" for name, value in report["machine"].items()))
    for name, figure in report.get("tasks", {}).items():
        parts = ", ".join(f"{part} {ms:.1f} ms" for part, ms in figure["milliseconds"].items())
        print(f"\n{name}: {figure['title']}\n{parts}")
        least, most = min(figure["ratios"]), max(figure["ratios"])
        print(f"ratio **{figure['ratio']:.3f}** ({least:.2f} – {most:.2f}), ≤ {figure['bar']}")
    for result in report["results"].values():
        print(
            f"\n{result['setting']['title']}, {result['steps']} steps, {report['rounds']} rounds\n"
        )
        print("| loop | images/s | ÷ timm (least – most) | bar | data | outside | bar |")
        print("|---|---|---|---|---|---|---|")
        for name, row in result["loops"].items():
            ours = name != TIMM_LOOP
            print(
                f"| {name} | {row['images_per_second']:.1f} | **{row['ratio_to_timm']:.2f}** "
                f"({row['least_ratio']:.2f} – {row['most_ratio']:.2f}) "
                f"| {f'≥ {RATIO_BAR}' if ours else ''} | {row['share_of_data']:.1%} "
                f"| {row['share_outside']:.1%} | {f'≤ {SHARE_BAR:.0%}' if ours else ''} |"
            )


if __name__ == "__main__":
    main()
