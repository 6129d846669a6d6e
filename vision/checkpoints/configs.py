"""What reading and converting weights can be told. Free of torch, so that a typo is answered at
once.
"""

from pathlib import Path
from typing import Any, Literal

from vision.config import Config, PositiveInt, Size


class UntoldConfig(Config):
    """What a file of weights may not tell of its model."""

    heads: PositiveInt | tuple[PositiveInt, ...] | None
    """What the file may not tell of its model; so with window and pretrained_window."""
    window: Size | None
    pretrained_window: tuple[PositiveInt, ...] | None

    @property
    def untold(self) -> dict[str, Any]:
        """Those of the settings that are given."""
        values = {name: getattr(self, name) for name in UntoldConfig.model_fields}
        return {name: value for name, value in values.items() if value is not None}


class ConvertConfig(UntoldConfig):
    """Weights of any known format, written as another library reads them."""

    source: str
    """A run's folder, a checkpoint file of any known format, or timm:… or hf:… names."""
    format: Literal["timm", "torchvision", "huggingface", "official", "vision"]
    output: Path
    """A new folder (timm, huggingface) or a new file (the others)."""
    weights: Literal["auto", "raw", "ema"]
    trained_size: Size | None
    """Size of the pictures that the weights were trained on, where their grid was not square."""
