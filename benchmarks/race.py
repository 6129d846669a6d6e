"""Accuracy by CPU time on CIFAR-10, from scratch on one core: this project and its rivals.

    python benchmarks/race.py --data FOLDER --results race.json --figure race.png
    python benchmarks/race.py --ablations --data FOLDER --results ablations.json
    python benchmarks/race.py --quick        # a few steps of each on generated images: does it run?

Every point is a run of its own, since a schedule ends where its run ends: each contender is trained
for several durations, in a fresh process with one thread, and is evaluated once at its end on the
10,000 test images, without flips. *minutes* is the CPU time of training alone. Contenders take
turns within a duration and a seed. All have what makes training on a CPU faster whatever the model:
bf16, huge pages, and attention on the explicit path. Results are appended to a file; points that it
has already are not run again, so that the race can be stopped and continued.

- vision, conv stem: `model=vit_fast recipe=fast`; vision, plain patches: the same with one
  convolution without overlap; vision, Swin: `model=swin_fast recipe=fast`;
- timm's ViT: timm's VisionTransformer of the size of this project's plain one in a loop of timm's
  parts with timm's usual settings for a ViT (AdamW, 5e-4 per 512 images × 2, weight decay 0.05,
  cosine after a warm-up, label smoothing 0.1, random resized crops and flips);
- timm's ResNet-18, and a small CNN for 32 pixels with as many MACs as the ViT with a conv stem:
  both under this project's fast recipe, the ResNet also with AdamW.

With --ablations the contenders are changes to the first one, each trained for one epoch; the result
is a table.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
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
    "vision, ViT with a conv stem": ("model=vit_fast", *OURS),
    "vision, ViT with plain patches": (
        *("model=vit_fast", "model.stem=patch", "model.depth=4"),
        *OURS,
    ),
    "vision, Swin": ("model=swin_fast", *OURS),
    "timm's ViT, timm's settings": (),
    "timm's ResNet-18, fast recipe": ("model=timm", "model.name=resnet18", *OURS),
    "timm's ResNet-18, AdamW": ("model=timm", "model.name=resnet18", *OURS, *ADAMW),
    "small CNN, fast recipe": ("model=timm", "model.name=race_cnn", *OURS),
}
TIMM_VIT = "timm's ViT, timm's settings"
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
    "batch norm in the stem": (),
}
"""Changes to the ViT with a conv stem, one at a time."""
EPOCHS = (0.5, 1, 2, 4, 8)


def main() -> None:
    arguments = read_arguments()
    if arguments.point:
        print(json.dumps(run_point(json.loads(arguments.point))))
        return
    done: list[Point] = []
    if arguments.results.exists():
        done = json.loads(arguments.results.read_text())
    for seed in range(arguments.seeds):
        for epochs in (0.01,) if arguments.quick else arguments.epochs:
            for contender in ABLATIONS if arguments.ablations else arguments.contenders:
                key = {"contender": contender, "epochs": epochs, "seed": seed}
                if any(key.items() <= point.items() for point in done):
                    continue
                done.append(key | in_a_process(key, arguments))
                arguments.results.write_text(json.dumps(done, indent=1))
                print(done[-1], flush=True)
    if arguments.ablations:
        print_table(done)
    if arguments.figure:
        draw(done, arguments.figure)


def in_a_process(key: Point, arguments: argparse.Namespace) -> Point:
    """Run one point with one thread; its CPU minutes and accuracy."""
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
    return values


def run_point(point: Point) -> Point:
    """Train one contender once, in this process."""
    import torch

    torch.set_num_threads(1)
    register_cnn()
    with tempfile.TemporaryDirectory() as outputs:
        if point["contender"] == TIMM_VIT:
            return timm_vit(point)
        return ours(point, Path(outputs))


def ours(point: Point, outputs: Path) -> Point:
    """A run of this project."""
    from training_loops import timed_training, training_config

    data = (
        ("data=shapes", "data.image_size=32", "data.train_samples=50000", "data.val_samples=100")
        if point["quick"]
        else ("data=cifar10", f"data.root={point['data']}")
    )
    length = f"{point['epochs']}epochs"
    name = point["contender"]
    if name == "batch norm in the stem":
        use_batch_norm()
    words = [
        *(CONTENDERS[name] if name in CONTENDERS else (*OURS, "model=vit_fast", *ABLATIONS[name])),
        *data,
        f"duration={length}",
        f"schedule.warmup={0.15 * point['epochs']}epochs",
        *(f"evaluate_every={length}", f"checkpoint.every={length}"),
        *(f"seed={point['seed']}", f"output={outputs}", "name=run"),
    ]
    times = timed_training(training_config(words))
    lines = (outputs / "run" / "metrics.jsonl").read_text().splitlines()
    evaluations = [event for event in map(json.loads, lines) if event["split"] != "train"]
    return {"minutes": times.total / 60, "top1": evaluations[-1]["top1"]}  # of the average, if any


def use_batch_norm() -> None:
    """Give stems batch norm, which this project does not have: it depends on the micro-batch."""
    from torch import Tensor, nn

    from vision.models.stems import ConvStem

    class LastAxisBatchNorm(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:  # (b y x c)
            return super().forward(x.flatten(0, 2)).view_as(x)

    original, draw_weights = ConvStem.__init__, ConvStem.init_weights

    def build(stem: Any, *given: Any) -> None:
        original(stem, *given)
        widths = [norm.normalized_shape[0] for norm in stem.norms]
        stem.norms = nn.ModuleList(map(LastAxisBatchNorm, widths))

    def init_weights(stem: Any, *given: Any) -> None:
        draw_weights(stem, *given)
        for norm in stem.norms:
            norm.reset_parameters()

    ConvStem.__init__, ConvStem.init_weights = build, init_weights  # type: ignore[method-assign]


def timm_vit(point: Point) -> Point:
    """timm's ViT in a loop of timm's parts, with the settings of its training scripts for ViTs."""
    import torch
    import torch.nn.functional as F
    from timm.data import create_transform
    from timm.layers import set_fused_attn
    from timm.models import VisionTransformer
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler
    from torch.utils.data import DataLoader

    torch.manual_seed(point["seed"])
    set_fused_attn(False)  # faster in bf16 on a CPU
    train, test = cifar10(point)
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    train.transform = create_transform(32, is_training=True, scale=(0.5, 1), mean=mean, std=std)
    test.transform = create_transform(32, crop_pct=1.0, mean=mean, std=std)
    batch = 128
    model = VisionTransformer(
        img_size=32, patch_size=4, embed_dim=128, depth=4, num_heads=4, num_classes=10
    )
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05)
    steps = max(2, int(point["epochs"] * len(train) / batch))
    scheduler = CosineLRScheduler(
        optimizer, steps, lr_min=1e-5, warmup_t=max(1, steps // 10), t_in_epochs=False
    )
    done, before = 0, time.process_time()
    while done < steps:
        for images, labels in DataLoader(train, batch, shuffle=True, drop_last=True):
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(images)
            F.cross_entropy(logits.float(), labels, label_smoothing=0.1).backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            scheduler.step_update(done)
            if done == steps:
                break
    minutes = (time.process_time() - before) / 60
    model.eval()
    right = 0
    with torch.no_grad():
        for images, labels in DataLoader(test, 500):
            right += int((model(images).argmax(1) == labels).sum())
    return {"minutes": minutes, "top1": right / len(test)}


def cifar10(point: Point) -> tuple[Any, Any]:
    """The images for timm's loop."""
    from torchvision.datasets import CIFAR10, FakeData, ImageFolder

    if point["quick"]:
        return FakeData(1000, (3, 32, 32)), FakeData(100, (3, 32, 32))
    root = Path(point["data"])
    if (root / "train").is_dir():
        return ImageFolder(root / "train"), ImageFolder(root / "val")
    return CIFAR10(root, train=True), CIFAR10(root, train=False)


def register_cnn() -> None:
    """A small convolutional network for 32 pixels, as a model of timm: `race_cnn`."""
    from timm.models import register_model
    from torch import Tensor, nn

    class RaceCnn(nn.Module):
        """3 × 3 convolutions with batch norm in three stages (60 M MACs, 0.45 M parameters)."""

        def __init__(self, num_classes: int = 10, in_chans: int = 3, **_: Any) -> None:
            super().__init__()
            widths = (in_chans, 40, 40, 80, 80, 160, 160)
            layers: list[nn.Module] = []
            for stage in range(3):
                for before, after in zip(
                    widths[2 * stage :], widths[2 * stage + 1 :][:2], strict=False
                ):
                    layers += [
                        nn.Conv2d(before, after, 3, padding=1, bias=False),
                        nn.BatchNorm2d(after),
                        nn.GELU(),
                    ]
                layers.append(nn.MaxPool2d(2))
            self.body = nn.Sequential(*layers)
            self.num_features, self.num_classes = widths[-1], num_classes
            self.head = nn.Linear(widths[-1], num_classes)

        def get_classifier(self) -> nn.Module:
            return self.head

        def forward_features(self, x: Tensor) -> Tensor:
            return self.body(x)

        def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
            x = x.mean((2, 3))
            return x if pre_logits else self.head(x)

        def forward(self, x: Tensor) -> Tensor:
            return self.forward_head(self.forward_features(x))

    def race_cnn(pretrained: bool = False, **options: Any) -> RaceCnn:
        return RaceCnn(**options)

    race_cnn.__module__ = __name__
    register_model(race_cnn)


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
    """Accuracy over CPU minutes, the mean over seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for contender in CONTENDERS:
        own = [point for point in points if point["contender"] == contender]
        if not own:
            continue
        lengths = sorted({point["epochs"] for point in own})
        means = [
            [mean([p[key] for p in own if p["epochs"] == length]) for length in lengths]
            for key in ("minutes", "top1")
        ]
        style = "-" if contender.startswith("vision") else "--"
        axes.plot(means[0], [100 * top1 for top1 in means[1]], style, marker="o", label=contender)
    axes.set(xscale="log", xlabel="CPU minutes of one core", ylabel="top-1 on CIFAR-10, %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(file, dpi=120)


def mean(numbers: list[float]) -> float:
    """The arithmetic mean."""
    return sum(numbers) / len(numbers)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("data/cifar10"))
    parser.add_argument("--results", type=Path, default=Path("race.json"))
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float, nargs="+")
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--ablations", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.epochs = arguments.epochs or ((1,) if arguments.ablations else EPOCHS)
    return arguments


if __name__ == "__main__":
    main()
