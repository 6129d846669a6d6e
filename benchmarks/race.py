"""Accuracy by CPU time on CIFAR-10, from scratch on one core: this project and its rivals.

    python benchmarks/race.py --data FOLDER --results race.json --figure race.png
    python benchmarks/race.py --ablations --data FOLDER --results ablations.json
    python benchmarks/race.py --quick        # a few steps of each on generated images: does it run?

Every point is a run of its own, since a schedule ends where its run ends: each contender is trained
for several budgets of CPU minutes, in a fresh process with one thread, and is evaluated once at its
end on the 10,000 test images, without flips. The number of epochs that fit a budget follows from a
few steps, or from a contender's points so far; *minutes* is what the run took, training alone, and
*loading* the share of it that went into images. Contenders take turns within a budget and a seed.
All have what makes training on a CPU faster whatever the model: bf16, huge pages, and attention on
the explicit path. Results are appended to a file; points that it has already are not run again, so
that the race can be stopped and continued.

- ViT and Swin with a conv stem: `model=vit_fast recipe=fast`, `model=swin_fast recipe=fast`; ViT
  with plain patches: four blocks behind one convolution without overlap;
- timm's ViT: timm's VisionTransformer of the size of this project's plain one in a loop of timm's
  parts with timm's usual settings for a ViT (AdamW, 5e-4 per 512 images × 2, weight decay 0.05,
  cosine after a warm-up, label smoothing 0.1, random resized crops and flips);
- timm's ResNet-18, and a small CNN for 32 pixels with as many MACs as the ViT with a conv stem:
  both under this project's fast recipe; the ResNet with AdamW, since Muon's products of its wide
  matrices take more than half of every step, which its line with Muon shows.

The rivals are in race_rivals.py. With --ablations the contenders are changes to the first one, each
trained for one epoch; the result is a table. `--contenders NAME ...` runs some of them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

Point = dict[str, Any]
OURS = ("recipe=fast", "loader.workers=0", "device=cpu")
ADAMW = (
    *("optimizer.name=adamw", "optimizer.learning_rate=2e-3", "optimizer.weight_decay=0.05"),
    *("optimizer.rest_learning_rate=null", "optimizer.rest_weight_decay=null"),
    "schedule.end_at=4e-5",
)
CONTENDERS: dict[str, tuple[str, ...]] = {
    "ViT, conv stem": ("model=vit_fast", *OURS),
    "Swin, conv stem": ("model=swin_fast", *OURS),
    "ViT, plain patches": ("model=vit_fast", "model.stem=patch", "model.depth=4", *OURS),
    "small CNN": ("model=timm", "model.name=race_cnn", *OURS),
    "ResNet-18 of timm": ("model=timm", "model.name=resnet18", *OURS, *ADAMW),
    "ResNet-18 of timm, Muon": ("model=timm", "model.name=resnet18", *OURS),
    "timm's ViT and settings": (),
}
TIMM_VIT = "timm's ViT and settings"
COLOURS = ("#1b6ca8", "#2e933c", "#7a5195", "#d1495b", "#e68a00", "#b0a08a", "#6b7280")
"""Of the contenders, as in the other figures."""
ABLATIONS: dict[str, tuple[str, ...]] = {
    "fast recipe": (),
    "AdamW instead of Muon": ADAMW,
    "conv stem without whitening": ("model.stem=conv",),
    "flips at random": ("augment.flip=0.5",),
    "branches that do not start at zero": ("model.initialization=trunc_normal",),
    "rotary positions": ("model.positions=rotary",),
    "qk-norm": ("model.qk_norm=true",),
    "four registers": ("model.registers=4",),
    "average of the weights (EMA 0.99)": ("ema=0.99",),
    "batches of 64": ("batch_size=64",),
    "batches of 256": ("batch_size=256",),
    "no channels_last": ("channels_last=false",),
    "no smooth labels": ("augment.label_smoothing=0",),
    "lower rates in lower layers (0.8)": ("optimizer.layer_decay=0.8",),
    "torch.compile": ("compile=true",),
    "batch norm in the stem": (),
    "three quarters of the tokens": (),
    "24 pixels in the first half": (),
    "lookahead (5 steps, 0.5)": (),
}
"""Changes to the ViT with a conv stem, one at a time; those without settings in race_changes.py."""
MINUTES = (1, 2, 4, 8)
CALIBRATION = 0.05
"""Epochs that tell what an epoch costs."""


def main() -> None:
    arguments = read_arguments()
    if arguments.point:
        print(json.dumps(run_point(json.loads(arguments.point))))
        return
    done: list[Point] = []
    if arguments.results.exists():
        done = json.loads(arguments.results.read_text())
    for seed in range(arguments.seeds):
        for budget in (1,) if arguments.ablations or arguments.quick else arguments.minutes:
            for contender in arguments.contenders:
                key = {"contender": contender, "budget": budget, "seed": seed}
                if any(key.items() <= point.items() for point in done):
                    continue
                epochs = 0.01 if arguments.quick else 1
                if not arguments.ablations and not arguments.quick:
                    epochs = round(budget / cost_of_an_epoch(contender, done, arguments), 3)
                done.append(key | in_a_process(key | {"epochs": epochs}, arguments))
                arguments.results.write_text(json.dumps(done, indent=1))
                print(done[-1], flush=True)
    if arguments.ablations:
        print_table(done)
    if arguments.figure:
        draw(done, arguments.figure)


def cost_of_an_epoch(contender: str, done: list[Point], arguments: argparse.Namespace) -> float:
    """CPU minutes, from the longest run so far, else from a few steps."""
    own = [point for point in done if point["contender"] == contender]
    if not own:
        key = {"contender": contender, "epochs": CALIBRATION, "seed": 0}
        own = [in_a_process(key, arguments)]
    longest = max(own, key=lambda point: point["epochs"])
    return float(longest["minutes"] / longest["epochs"])


def in_a_process(key: Point, arguments: argparse.Namespace) -> Point:
    """Run one point with one thread; its epochs, CPU minutes and accuracy."""
    point = key | {"data": str(arguments.data), "quick": arguments.quick}
    result = subprocess.run(
        [sys.executable, __file__, "--point", json.dumps(point)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "THP_MEM_ALLOC_ENABLE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise SystemExit(f"{key} failed:\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}")
    values: Point = json.loads(result.stdout.splitlines()[-1])
    return {"epochs": key["epochs"]} | values


def run_point(point: Point) -> Point:
    """Train one contender once, in this process."""
    import torch
    from race_rivals import timm_vit  # also registers the small CNN with timm

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as outputs:
        if point["contender"] == TIMM_VIT:
            return timm_vit(point)
        return ours(point, Path(outputs))


def ours(point: Point, outputs: Path) -> Point:
    """A run of this project."""
    from race_changes import CHANGES
    from training_loops import timed_training, training_config

    data = (
        ("data=shapes", "data.image_size=32", "data.train_samples=50000", "data.val_samples=100")
        if point["quick"]
        else ("data=cifar10", f"data.root={point['data']}")
    )
    length = f"{point['epochs']}epochs"
    name = point["contender"]
    words = [
        *(CONTENDERS[name] if name in CONTENDERS else (*OURS, "model=vit_fast", *ABLATIONS[name])),
        *data,
        f"duration={length}",
        f"schedule.warmup={0.15 * point['epochs']}epochs",
        *(f"evaluate_every={length}", f"checkpoint.every={length}"),
        *(f"seed={point['seed']}", f"output={outputs}", "name=run"),
    ]
    config = training_config(words)
    if name in CHANGES:
        CHANGES[name](int(point["epochs"] * (50_000 // config.batch_size)))
    times = timed_training(config)
    lines = (outputs / "run" / "metrics.jsonl").read_text().splitlines()
    evaluations = [event for event in map(json.loads, lines) if event["split"] != "train"]
    # The top-1 is that of the average of the weights, if there is one.
    figures = {"minutes": times.total / 60, "loading": times.data / times.total}
    return figures | {"top1": evaluations[-1]["top1"]}


def print_table(points: list[Point]) -> None:
    """Accuracy and CPU minutes of every change, by accuracy."""
    rows = []
    for name in {point["contender"] for point in points}:
        own = [point for point in points if point["contender"] == name]
        top1, minutes = ([point[key] for point in own] for key in ("top1", "minutes"))
        rows.append((100 * mean(top1), name, mean(minutes), len(own)))
    print("| change | top-1 | CPU minutes | seeds |\n|---|---|---|---|")
    for top1, name, minutes, seeds in sorted(rows, reverse=True):
        print(f"| {name} | {top1:.2f} % | {minutes:.1f} | {seeds} |")


def draw(points: list[Point], file: Path) -> None:
    """Accuracy over CPU minutes, the mean over seeds; this project's models as full lines.

    A contender with a single budget has no line.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    ends = []
    for contender, colour in zip(CONTENDERS, COLOURS, strict=True):
        own = [point for point in points if point["contender"] == contender]
        budgets = sorted({point["budget"] for point in own})
        if len(budgets) < 2:
            continue
        minutes, top1 = (
            [mean([p[key] for p in own if p["budget"] == budget]) for budget in budgets]
            for key in ("minutes", "top1")
        )
        percent = [100 * value for value in top1]
        ours = contender in list(CONTENDERS)[:3]
        axes.plot(
            *(minutes, percent, "-" if ours else "--"),
            color=colour,
            marker="o",
            markersize=4,
            linewidth=2 if ours else 1.3,
        )
        ends.append((percent[-1], minutes[-1], f"{contender}  {percent[-1]:.1f} %", colour, ours))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.set_title("CIFAR-10 from scratch on one CPU core", loc="left", weight="bold")
    axes.set(xscale="log", xlabel="CPU minutes of training", ylabel="top-1 (%)")
    ticks = sorted({point["budget"] for point in points})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(right=1.9 * max(minutes for _, minutes, *_ in ends))
    low, high = axes.get_ylim()
    place = low
    for top1, minutes, text, colour, ours in sorted(ends):
        place = max(top1, place + 0.05 * (high - low))  # names do not cover each other
        axes.annotate(
            *(text, (minutes, place), (7, 0)),
            textcoords="offset points",
            color=colour,
            va="center",
            weight="bold" if ours else "normal",
        )
    figure.savefig(file, dpi=160)


def mean(numbers: list[float]) -> float:
    """The arithmetic mean."""
    return sum(numbers) / len(numbers)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("data/cifar10"))
    parser.add_argument("--results", type=Path, default=Path("race.json"))
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, nargs="*", default=MINUTES)
    parser.add_argument("--contenders", nargs="+", choices=[*CONTENDERS, *ABLATIONS])
    parser.add_argument("--ablations", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.contenders = arguments.contenders or [
        *(ABLATIONS if arguments.ablations else CONTENDERS)
    ]
    return arguments


if __name__ == "__main__":
    main()
