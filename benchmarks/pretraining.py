"""What pretraining changes, on CIFAR-10 and one core: the runs and figures of docs/lecture.md.

    python benchmarks/pretraining.py --data FOLDER --figures docs/images     # three seeds
    python benchmarks/pretraining.py --data FOLDER --seeds 1 --budget 0.2 --labels 100 500
    python benchmarks/pretraining.py --quick             # a few steps of each: does it run?

*Labels.* A ViT with plain patches gets the labels of 25, 100 or 500 training images per class:
from scratch; after masked pretraining (MAE) on all 50,000 training images without labels; and from
scratch with a teacher, a ResNet-18 that was trained on the very same labels. All three see the same
number of labelled images. Features (of the masked pretraining, and of a model with random weights)
are also measured without fine-tuning: by their nearest neighbours and by a linear probe, both with
all labels.

*Transfer.* The same ViT and the same ResNet-18 are trained on five classes with all their
labels and then get a few labels per class of the other five; and the same without the first step.

All starts of a model have the same settings. Every point is a run of `train.py` or `eval.py` in a
process of its own with one thread, evaluated at its end on the test images. A seed draws the
weights, the order of images and the labels that are kept. Results are appended to a file; points
that it has already are not repeated, and a run that was interrupted is resumed. `--budget`
multiplies the length of masked pretraining, and its square root that of all other runs but probes.
Everything takes an estimated ten hours of one core.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = dict[str, Any]
ROOT = Path(__file__).resolve().parent.parent
CORE = ("recipe=fast", "loader.workers=0")
PLAIN = ("model=vit_fast", "model.stem=patch", "model.depth=4")
RESNET = ("model=timm", "model.name=resnet18")
DECODER = ("task.decoder.width=64", "task.decoder.depth=1", "task.decoder.heads=4")
BATCH = 128
IMAGES = {"masked": 2_000_000, "labels": 100_000, "five": 250_000, "transfer": 60_000}
"""Images seen by runs of each kind at a budget of 1."""
STARTS = {
    "scratch": ("ViT, from scratch", "#7a7a7a"),
    "distilled": ("ViT, distilled from the ResNet-18", "#2e933c"),
    "masked": ("ViT, masked pretraining", "#1b6ca8"),
    "teacher": ("ResNet-18, from scratch", "#d1495b"),
}
COLOURS = {"ViT": "#1b6ca8", "ResNet-18": "#d1495b"}
MODELS = {"ViT": PLAIN, "ResNet-18": RESNET}


@dataclass(frozen=True)
class Point:
    """A run and its place in the figures."""

    name: str
    """Folder of the run, once the seed is added."""
    words: tuple[str, ...]
    place: Record
    """What the figures go by."""
    metric: str = "top1"
    evaluates: bool = False
    """Whether `eval.py` is run, instead of `train.py`."""


def points(arguments: argparse.Namespace, seed: int) -> list[Point]:
    """All runs of a seed: those that others need come before them."""
    runs, views = arguments.runs, arguments.runs / "views"

    def run(name: str) -> str:
        return str(runs / f"{name}-{seed}")

    def length(kind: str) -> tuple[str, ...]:
        scale = arguments.budget if kind == "masked" else arguments.budget**0.5
        images = max(2 * BATCH, round(IMAGES[kind] * scale))
        whole = f"{images}samples"
        ends = (f"duration={whole}", f"evaluate_every={whole}", f"checkpoint.every={whole}")
        if kind == "masked":  # long: what it has done is kept
            ends = (*ends[:2], f"checkpoint.every={max(BATCH, images // 10)}samples")
        if kind in ("labels", "transfer"):
            ends = (*ends, "batch_size=64")
        return (*ends, f"schedule.warmup={round(0.15 * images)}samples")

    cifar10 = ("data=cifar10", f"data.root={arguments.data}")
    few: list[Point] = []
    for labels in arguments.labels:
        own = (*CORE, *cifar10, f"data.samples_per_class={labels}", f"data.seed={seed}")
        own = (*own, *length("labels"))
        taught = ("task=distill", f"task.teacher={run(f'teacher-{labels}')}")
        taught = (*taught, "task.teacher_precision=bf16")
        settings = {
            "masked": (*own, "model=auto", f"init={run('masked')}"),
            "scratch": (*own, *PLAIN),
            "teacher": (*own, *RESNET),
            "distilled": (*own, *PLAIN, *taught),
        }
        few += [
            Point(
                f"{start}-{labels}", words, {"figure": "labels", "start": start, "labels": labels}
            )
            for start, words in settings.items()
        ]
    unlabelled = ("task=masked", *DECODER, "augment.label_smoothing=0")
    masked = Point(
        "masked",
        (*CORE, *cifar10, *PLAIN, *unlabelled, *length("masked")),
        {"figure": "masked"},
        metric="loss",
    )
    return [masked, *few, *features(run, cifar10), *transfers(arguments, run, views, seed, length)]


def features(run: Any, data: tuple[str, ...]) -> list[Point]:
    """Linear probes and nearest neighbours of random and of pretrained features."""
    probe = (
        "recipe=probe",
        *data,
        "loader.workers=0",
        "duration=20epochs",
        "evaluate_every=20epochs",
    )
    starts = {"random": PLAIN, "masked": ("model=auto", f"init={run('masked')}")}
    found = []
    for start, words in starts.items():
        place = {"figure": "features", "start": start}
        found += [
            Point(f"probe-{start}", (*probe, *words), place | {"by": "linear probe"}),
            Point(
                f"neighbours-{start}",
                (f"checkpoint={run(f'probe-{start}')}", "neighbours=20", *data, "resamples=0"),
                place | {"by": "20-NN"},
                metric="neighbours",
                evaluates=True,
            ),
        ]
    return found


def transfers(
    arguments: argparse.Namespace, run: Any, views: Path, seed: int, length: Any
) -> list[Point]:
    """Five classes with all labels, then few labels of the other five."""
    found = []
    data = (*CORE, "data=folder", "data.image_size=32")
    for model, words in MODELS.items():
        first = (*data, f"data.root={views / 'first'}", *words, *length("five"))
        found.append(Point(f"five-{model}", first, {"figure": "five", "model": model}))
        starts = {"scratch": words, "pretrained": ("model=auto", f"init={run(f'five-{model}')}")}
        for labels in arguments.labels:
            kept = (f"data.root={views / 'second'}", f"data.samples_per_class={labels}")
            own = (*data, *kept, f"data.seed={seed}", *length("transfer"))
            for start, more in starts.items():
                place = {"figure": "transfer", "model": model, "start": start, "labels": labels}
                found.append(Point(f"{model}-{start}-{labels}", (*own, *more), place))
    return found


def main() -> None:
    arguments = read_arguments()
    done: list[Record] = []
    if arguments.results.exists():
        done = json.loads(arguments.results.read_text())
    if arguments.quick:
        write_quick_data(arguments.data)
    split_classes(arguments.data, arguments.runs / "views")
    for seed in range(arguments.seeds):
        for point in points(arguments, seed):
            if arguments.only and point.place["figure"] not in arguments.only:
                continue
            key = point.place | {"seed": seed, "budget": arguments.budget}
            if any(key.items() <= record.items() for record in done):
                continue
            done.append(key | in_a_process(point, seed, arguments))
            arguments.results.write_text(json.dumps(done, indent=1) + "\n")
            print(done[-1], flush=True)
    if arguments.figures:
        draw([r for r in done if r["budget"] == arguments.budget], arguments.figures)


def in_a_process(point: Point, seed: int, arguments: argparse.Namespace) -> Record:
    """Run one point with one thread; its result, and the CPU minutes of the whole command."""
    folder = arguments.runs / f"{point.name}-{seed}"
    command = [sys.executable, str(ROOT / ("eval.py" if point.evaluates else "train.py"))]
    words = [*point.words, f"seed={seed}"]
    words += [f"output={folder}"] if point.evaluates else [f"output={arguments.runs}"]
    words += [] if point.evaluates else [f"name={folder.name}"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(
        [*command, *words],
        env=os.environ | {"OMP_NUM_THREADS": "1", "THP_MEM_ALLOC_ENABLE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise SystemExit(
            f"{' '.join(words)} failed:\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}"
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {point.metric: value_of(point, folder), "minutes": round(seconds / 60, 2)}


def value_of(point: Point, folder: Path) -> float:
    """The last result of a run, of its average if it has one."""
    if point.evaluates:
        report = json.loads((folder / "report.json").read_text())
        return float(report["models"][0]["neighbours"]["top1"])
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    events = [event for event in map(json.loads, lines) if event["split"] != "train"]
    return float(events[-1][point.metric])


def split_classes(data: Path, views: Path) -> None:
    """Two folders of links: to the first five classes, and to the other five."""
    if not (data / "train").is_dir():
        raise SystemExit(f"--data {data}: expected the folders train/<class> and val/<class>.")
    names = sorted(folder.name for folder in (data / "train").iterdir() if folder.is_dir())
    half = len(names) // 2
    for view, classes in (("first", names[:half]), ("second", names[half:])):
        for split in ("train", "val"):
            (views / view / split).mkdir(parents=True, exist_ok=True)
            for name in classes:
                link = views / view / split / name
                if not link.is_symlink():
                    link.symlink_to((data / split / name).resolve(), target_is_directory=True)


def write_quick_data(data: Path) -> None:
    """Noise in place of CIFAR-10, to see whether every run works."""
    import numpy as np
    from PIL import Image

    from vision.data.sources.known_sets import CIFAR10

    random = np.random.default_rng(0)
    for split, number in (("train", 30), ("val", 4)):
        for name in CIFAR10:
            folder = data / split / name
            folder.mkdir(parents=True, exist_ok=True)
            for image in range(number):
                pixels = random.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{image}.png")


def draw(records: list[Record], folder: Path) -> None:
    """Two figures: accuracy over labels per class; lines are means, dots are runs."""
    from matplotlib.figure import Figure

    def few(axes: Any, label: str, colour: str, **place: str) -> None:
        own = [r for r in records if place.items() <= r.items()]
        numbers = sorted({r["labels"] for r in own})
        if not numbers:
            return
        values = [[100 * r["top1"] for r in own if r["labels"] == n] for n in numbers]
        scratch = place["start"] == "scratch"
        line, fill = ("--", "white") if scratch else ("-", colour)
        style = {"marker": "o", "markersize": 4, "color": colour, "markerfacecolor": fill}
        axes.plot(numbers, list(map(mean, values)), line, label=label, **style)
        for number, found in zip(numbers, values, strict=True):
            axes.plot([number] * len(found), found, linestyle="none", **style)
        axes.set(xscale="log", xlabel="labels per class", ylabel="top-1 on test images (%)")
        axes.set_ylim(0, 100)
        ticks = sorted({r["labels"] for r in records if "labels" in r})
        axes.set_xticks(ticks, list(map(str, ticks)))
        axes.minorticks_off()

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for start, (name, colour) in STARTS.items():
        few(left, name, colour, figure="labels", start=start)
    bars = [r for r in records if r["figure"] == "features"]
    for row, start in enumerate(("random", "masked")):
        for column, by in enumerate(("20-NN", "linear probe")):
            found = [
                100 * r.get("top1", r.get("neighbours"))
                for r in bars
                if (r["start"], r["by"]) == (start, by)
            ]
            if found:
                at = column + 0.4 * row
                colour = ("#999999", "#1b6ca8")[row]
                right.bar(at, mean(found), 0.38, color=colour, alpha=0.5)
                right.plot([at] * len(found), found, "o", color=colour, markersize=4)
                right.annotate(
                    f"{start}\n{mean(found):.1f} %",
                    (at, mean(found)),
                    ha="center",
                    va="bottom",
                    xytext=(0, 4),
                    textcoords="offset points",
                )
    right.set_xticks([0.2, 1.2], ["20-NN", "linear probe"])
    right.set(ylabel="top-1 of frozen features (%)", ylim=(0, 100))
    finish(figure, (left,), folder / "lecture_pretraining.png")

    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.subplots()
    for model in MODELS:
        for start, name in (("scratch", "from scratch"), ("pretrained", "pretrained")):
            place = {"figure": "transfer", "model": model, "start": start}
            few(axes, f"{model}, {name}", COLOURS[model], **place)
    finish(figure, (axes,), folder / "lecture_transfer.png")


def finish(figure: Any, legends: tuple[Any, ...], file: Path) -> None:
    """Store a figure that has something to show."""
    if not any(axes.has_data() for axes in figure.axes):
        return
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    for axes in legends:
        if axes.has_data():
            axes.legend(fontsize=8)
    figure.savefig(file, dpi=150)


def mean(numbers: list[float]) -> float:
    """The arithmetic mean."""
    return sum(numbers) / len(numbers)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("data/cifar10"))
    parser.add_argument("--runs", type=Path, default=Path("outputs/pretraining"))
    parser.add_argument("--results", type=Path, default=Path("pretraining.json"))
    parser.add_argument("--figures", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=1.0)
    parser.add_argument("--labels", type=int, nargs="+", default=[25, 100, 500])
    parser.add_argument("--only", nargs="+", help="masked, labels, features, five, transfer")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.runs = arguments.runs / "quick"
        arguments.data = arguments.runs / "data"
        arguments.seeds, arguments.budget, arguments.labels = 1, 0.0, [16, 24]
    else:
        arguments.runs = arguments.runs / f"budget-{arguments.budget:g}"
    return arguments


if __name__ == "__main__":
    main()
