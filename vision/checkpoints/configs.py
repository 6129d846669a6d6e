"""What a conversion can be told. Free of torch, so that a typo is answered at once."""

from pathlib import Path
from typing import Literal

from vision.config import Config, PositiveInt, Size


class ConvertConfig(Config):
    """Weights of any known format, written as another library reads them."""

    source: str
    """A run's folder, a checkpoint file of any known format, or timm:… or hf:… names."""
    format: Literal["timm", "torchvision", "huggingface", "official", "vision"]
    output: Path
    """A new folder (timm, huggingface) or a new file (the others)."""
    weights: Literal["auto", "raw", "ema"]
    heads: PositiveInt | tuple[PositiveInt, ...] | None
    """What the file may not tell of its model; so with the settings below."""
    window: Size | None
    pretrained_window: tuple[PositiveInt, ...] | None
    trained_size: Size | None
    """Size of the pictures that the weights were trained on, where their grid was not square."""
