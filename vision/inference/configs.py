"""Settings of `vision predict` and `vision export`, without torch."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from vision.checkpoints.configs import SizedConfig
from vision.config import Amount, OutputFile, OutputFolder, Place, several

Places = Annotated[tuple[Place, ...], BeforeValidator(several)]
"""One path or several."""

Device = Literal["auto", "cpu", "cuda", "mps"]


class PredictConfig(SizedConfig):
    """Settings of `vision predict`."""

    checkpoint: Place
    """A run's folder, a checkpoint file of any known format, timm:NAME or hf:OWNER/NAME."""
    images: Places
    """Files, folders, patterns with *, or - for a list on standard input; also as plain words."""
    top: Amount
    """Number of classes listed per image."""
    batch_size: Amount
    format: Literal["auto", "table", "jsonl", "csv"]
    """auto: a table on a terminal, CSV in a .csv file, else JSON lines."""
    output: OutputFile | None
    """File to write instead of printing."""
    attention: bool
    """Save a figure of the attention beside each image."""
    device: Device


class ExportConfig(SizedConfig):
    """Settings of `vision export`."""

    checkpoint: Place
    format: Literal["onnx", "torch_export", "safetensors"]
    output: OutputFolder | None
    """New folder; null: export/<format> in the run's folder, beside the file or here."""
    opset: Annotated[int, Field(ge=18, le=1000)]
    """Version of the ONNX operators; torch writes 18 or later."""
    tolerance: Annotated[float, Field(gt=0)]
    """Largest accepted difference between probabilities of the export and of the model."""
