"""Rivals of this project in `race.py`: timm's ViT in a loop of timm's parts, and a small CNN."""

import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timm.data import create_transform
from timm.layers import set_fused_attn
from timm.models import VisionTransformer, register_model
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision.datasets import CIFAR10, FakeData, ImageFolder

Point = dict[str, Any]


def timm_vit(point: Point) -> Point:
    """timm's ViT in a loop of timm's parts, with the settings of its training scripts for ViTs."""
    torch.manual_seed(point["seed"])
    set_fused_attn(False)  # faster in bf16 on a CPU
    train, test = cifar10(point)
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    train.transform = create_transform(
        32, is_training=True, scale=(0.5, 1), color_jitter=None, mean=mean, std=std
    )
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
    if point["quick"]:
        return FakeData(1000, (3, 32, 32)), FakeData(100, (3, 32, 32))
    root = Path(point["data"])
    if (root / "train").is_dir():
        return ImageFolder(root / "train"), ImageFolder(root / "val")
    return CIFAR10(root, train=True), CIFAR10(root, train=False)


class RaceCnn(nn.Module):
    """3 × 3 convolutions in three stages of two, with max pooling and batch norm as in airbench
    (Jordan, arXiv 2404.00498): 74 M MACs, as the ViT with a conv stem has, and 0.46 M parameters.
    """

    def __init__(self, num_classes: int = 10, in_chans: int = 3, **_: Any) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = in_chans
        for width in (48, 96, 144):
            for pool in (1, 2):
                conv = nn.Conv2d(before, width, 3, padding=1, bias=False)
                layers += [conv, nn.MaxPool2d(pool), nn.BatchNorm2d(width), nn.GELU()]
                before = width
        self.body = nn.Sequential(*layers)
        self.num_features, self.num_classes = before, num_classes
        self.head = nn.Linear(before, num_classes)

    def get_classifier(self) -> nn.Module:
        return self.head

    def forward_features(self, x: Tensor) -> Tensor:
        return self.body(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = x.mean((2, 3))
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


@register_model
def race_cnn(pretrained: bool = False, **options: Any) -> RaceCnn:
    """A small convolutional network for 32 pixels, as a model of timm."""
    return RaceCnn(**options)
