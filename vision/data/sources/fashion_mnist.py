"""Fashion-MNIST (Xiao et al., 2017), read from the four files that its authors distribute."""

import gzip
import struct
import zlib
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vision.config import ConfigError
from vision.data.configs import Split
from vision.data.sources.known_sets import FASHION_MNIST
from vision.data.sources.source import ArraySource

_PREFIXES: dict[Split, str] = {"train": "train", "test": "t10k"}
_UNSIGNED_BYTES = 0x08


def read_fashion_mnist(root: Path, split: Split) -> ArraySource:
    """Read one of the two splits of the set: train or test."""
    prefix = _PREFIXES[split]
    names = f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"
    images_path, labels_path = (_find(root, name) for name in names)
    if images_path is None or labels_path is None:
        raise ConfigError(
            f"data.root: {' and '.join(names)} (.gz) not found in {root}. Put "
            "the four *-ubyte.gz files of github.com/zalandoresearch/fashion-mnist (folder "
            "data/fashion) there, or install Debian's package dataset-fashion-mnist and set "
            "data.root=/usr/share/datasets/fashion-mnist."
        )
    images, labels = _read_idx(images_path, 3), _read_idx(labels_path, 1)
    if len(images) != len(labels) or labels.max(initial=0) >= len(FASHION_MNIST):
        raise OSError(
            f"{images_path} and {labels_path} do not belong together: {len(images)} images, "
            f"{len(labels)} labels up to {labels.max(initial=0)}."
        )
    origin, pixels = str(images_path), images[..., None]
    return ArraySource(labels.astype(np.int64), FASHION_MNIST, 1, origin, pixels)


def _find(root: Path, name: str) -> Path | None:
    """Return the path of the file, compressed or not; None if there is neither."""
    return next((p for p in (root / f"{name}.gz", root / name) if p.is_file()), None)


def _read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Read an array in LeCun's IDX format: 0, 0, type, number of dimensions, lengths, data."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        header = struct.unpack_from(f">HBB{dimensions}I", content)
    except (struct.error, zlib.error, gzip.BadGzipFile, EOFError) as error:
        raise OSError(f"{path} is damaged: {error}. Fetch it again.") from error
    shape = header[3:]
    start = 4 + 4 * dimensions
    if header[:3] != (0, _UNSIGNED_BYTES, dimensions) or len(content) != start + prod(shape):
        raise OSError(
            f"{path} is damaged: expected bytes in {dimensions} dimensions, found the header "
            f"{header} and {len(content) - start} bytes of data. Fetch it again."
        )
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)
