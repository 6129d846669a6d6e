"""ImageNet's other test sets as folders of a few small images, structured as the originals."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

SYNSETS = ("n01440764", "n01498041", "n02086240", "n15075141")
"""Tench, stingray, Shih-Tzu and toilet tissue: classes 0, 6, 155 and 999."""
CLASSES = (0, 6, 155, 999)
SIDE = 32


def write_image(path: Path, seed: int) -> None:
    """An image of random pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, format="PNG")


def write_class_folders(folder: Path, names: tuple[str, ...], images: int = 2) -> None:
    """Folders of a few images each."""
    for row, name in enumerate(names):
        for number in range(images):
            seed = sum(map(ord, folder.name)) + 10 * row + number
            write_image(folder / name / f"{number}.png", seed)


def write_val(root: Path, real: list[list[int]]) -> None:
    """Validation images, whose names do not follow the order of the classes, and real.json."""
    for number in range(len(real)):
        synset = SYNSETS[(7 * number + 1) % len(SYNSETS)]
        write_image(root / "val" / synset / f"ILSVRC2012_val_{number + 1:08d}.JPEG", number)
    (root / "real.json").write_text(json.dumps(real))


def write_family(root: Path, severities: tuple[int, ...] = (1, 5)) -> None:
    """Every set: C with two corruptions, one of them in a folder of its kind."""
    write_val(root, [[0], [6, 0], [], [155], [999], [6], [], [1, 2, 155]])
    write_class_folders(root / "imagenetv2-matched-frequency-format-val", tuple(map(str, CLASSES)))
    write_class_folders(root / "imagenetv2-threshold0.7-format-val", ("10", "9"))
    write_class_folders(root / "imagenetv2-top-images-format-val", ("0", "155"))
    write_class_folders(root / "imagenet-a", SYNSETS[1:3])
    write_class_folders(root / "imagenet-r", SYNSETS[:3])
    write_class_folders(root / "sketch", SYNSETS)
    for severity in severities:
        write_class_folders(root / "imagenet-c" / "gaussian_noise" / str(severity), SYNSETS)
        write_class_folders(root / "imagenet-c" / "blur" / "zoom_blur" / str(severity), SYNSETS)
