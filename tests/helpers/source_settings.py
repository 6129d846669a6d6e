"""Configs and small image files for the tests of the data sources."""

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from vision.config import parse
from vision.data.configs import DataConfig

YAML = Path(__file__).parents[2] / "configs" / "data"


def data_config(choice: str, **changes: Any) -> Any:
    """The config of configs/data/<choice>.yaml with some values changed."""
    values = yaml.safe_load((YAML / f"{choice}.yaml").read_text(encoding="utf-8"))
    assert set(changes) <= set(values)
    return parse(DataConfig, values | changes)


def image_bytes(shade: int, size: tuple[int, int] = (8, 6), kind: str = "PNG") -> bytes:
    """A file of one colour."""
    buffer = io.BytesIO()
    Image.new("RGB", size, (shade % 256, shade // 256 % 256, 0)).save(buffer, kind)
    return buffer.getvalue()


def make_folder(root: Path, counts: dict[str, int], first: int = 0) -> None:
    """A folder per class with so many images, all different."""
    shade = first
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            (root / name / f"{number:04d}.png").write_bytes(image_bytes(shade))
            shade += 1


def make_tar(path: Path, members: dict[str, bytes]) -> None:
    """A tar file with these members."""
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def shade_of(content: bytes) -> int:
    """The number that `image_bytes` was given."""
    red, green, _ = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))[0, 0].tolist()
    return int(red) + 256 * int(green)
