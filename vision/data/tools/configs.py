"""Settings of `vision data` and `vision prepare`, without torch."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from vision.config import Amount, Config, OutputFile, OutputFolder, Seed, Side, Workers
from vision.data.configs import AugmentConfig, DataConfig, LoaderConfig, PreprocessConfig


class PrepareConfig(Config):
    """Settings of `vision prepare`, which writes a data set as tar shards of smaller images."""

    data: DataConfig
    output: OutputFolder
    short_side: Side | None
    """Largest short side; larger images are shrunk to it. null: keep every file unchanged."""
    image_format: Literal["jpeg", "webp", "png"]
    """Format of images that are shrunk, or that are not files."""
    quality: Annotated[int, Field(ge=1, le=100)]
    """Quality of JPEG and WebP."""
    shard_size: Amount
    """Size of a shard in megabytes (10⁶ bytes)."""
    workers: Workers
    """Number of processes that read and encode; 0: the main process."""


def _check_suffix(path: Path) -> Path:
    known = (".png", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".bmp", ".gif", ".pdf")
    if path.suffix.lower() not in known:
        raise ValueError(f"'{path}' is not the name of an image; it ends in {', '.join(known)}.")
    return path


class DataCommandConfig(Config):
    """Settings of `vision data`: show training images as the model sees them, or check all."""

    data: DataConfig
    augment: AugmentConfig
    preprocess: PreprocessConfig
    loader: LoaderConfig
    seed: Seed
    count: Amount
    """Number of images shown."""
    output: Annotated[OutputFile, AfterValidator(_check_suffix)]
    """Image file to write."""
    check: bool
    """Instead, read every image once and report counts, sizes, unreadable files and duplicates."""
    format: Literal["table", "json"]
    """Format of the report."""
