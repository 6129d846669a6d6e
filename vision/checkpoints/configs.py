"""Settings of commands that open a checkpoint. Free of torch: a typo is answered at once."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from vision.config import Config, OutputPath, Place, Size
from vision.models.configs import ModelChoice


def _rule(value: Any) -> Any:
    """A rule in one string, "pattern -> replacement", as the pair that it stands for."""
    if isinstance(value, str):
        pattern, arrow, replacement = value.partition("->")
        if not arrow or not pattern.strip():
            raise ValueError(f"expected 'pattern -> replacement', found '{value}'.")
        return pattern.strip(), replacement.strip()
    return tuple(value) if isinstance(value, list) else value


Renaming = tuple[Annotated[tuple[str, str], BeforeValidator(_rule)], ...]
"""Rules for names of tensors: regular expressions and replacements as in `re.sub`, each a pair or
"pattern -> replacement".
"""


WhichWeights = Literal["auto", "raw", "ema"]
"""The weights as trained, or their average; auto: the average if there is one."""
Format = Literal["timm", "torchvision", "huggingface", "official", "mae", "vision"]
"""Layouts that `vision convert` writes."""


class OpenConfig(Config):
    """Settings of every command that opens a checkpoint."""

    weights: WhichWeights
    """The weights as trained, or their average; auto: the average if there is one."""
    model: ModelChoice
    """auto: the model that the weights belong to; what they do not show is given as
    model.heads=…, model.norm_eps=… and so on; model=timm model.name=… opens weights of timm."""
    rename: Renaming
    """Rules "pattern -> replacement" for the names of tensors, applied before the layout is
    recognised."""


class SizedConfig(OpenConfig):
    """The same, for images of any size."""

    image_size: Size | None
    """Size of the images that the model sees; null: the one that it was trained with."""


class ConvertConfig(OpenConfig):
    """Weights of any known format, written as another library reads them."""

    source: Place
    """A run's folder, a checkpoint file of any known format, or timm:… or hf:… names."""
    format: Format
    output: OutputPath
    """A new folder (timm, huggingface) or a new file (the others)."""
