"""What prediction and export can be told. Free of torch, so that a typo is answered at once."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from vision.checkpoints.configs import SizedConfig
from vision.config import PositiveInt, several

Places = Annotated[tuple[str, ...], BeforeValidator(several)]
"""One path or several."""

Device = Literal["auto", "cpu", "cuda", "mps"]


class PredictConfig(SizedConfig):
    """Images to name, by the model of a checkpoint."""

    checkpoint: str
    """A run's folder, a checkpoint file of any known format, or timm:… or hf:… names."""
    images: Places
    """Files, folders, patterns with *, or - for a list on standard input; also as plain words."""
    top: PositiveInt
    """So many classes of each image are named."""
    batch_size: PositiveInt
    format: Literal["auto", "table", "jsonl", "csv"]
    """auto: a table on a terminal, JSON lines in a pipe or a file."""
    output: Path | None
    """File to write instead of printing."""
    attention: bool
    """Save an image of where the model looks beside each image."""
    device: Device


class ExportConfig(SizedConfig):
    """A checkpoint as something that runs without this project."""

    checkpoint: str
    format: Literal["onnx", "torch_export", "safetensors"]
    output: Path | None
    """Folder to write; null: export/<format> in the run's folder, beside the file, or here."""
    opset: Annotated[int, Field(ge=18)]
    """Of ONNX; older ones torch does not write."""
    tolerance: Annotated[float, Field(gt=0)]
    """Largest difference of a probability between the export and this model; past it, no export."""
