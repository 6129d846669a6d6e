"""Settings of `vision predict` and `vision export`, without torch."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from vision.checkpoints.configs import SizedConfig
from vision.config import Amount, OutputFile, OutputFolder, Place, Probability, several
from vision.data.configs import DataConfig, LoaderConfig, Split

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
    """New folder; null: export/<format> in the run's folder, beside the file or here (onnx-int8
    for format=onnx precision=int8)."""
    precision: Literal["fp32", "fp16", "int8"]
    """Numbers of an ONNX file: fp16 for GPUs, int8 for CPUs. Their accuracy is measured before the
    file is written."""
    opset: Annotated[int, Field(ge=18, le=1000)]
    """Version of the ONNX operators; torch writes 18 or later."""
    tolerance: Annotated[float, Field(gt=0)]
    """Largest accepted difference between probabilities of the export in fp32 and of the model."""
    max_accuracy_loss: Probability
    """Largest accepted loss of accuracy by fp16 or int8: top-1, or mAP of several labels; 0.005 is
    half a point."""
    calibration_images: Amount
    """Number of training images that show int8 the range of activations."""
    data: DataConfig | None
    """Images that the loss is measured on, and calibration images; null: those of the run."""
    split: Split
    """Split that the loss is measured on."""
    batch_size: Amount
    """Images per forward pass of this measurement."""
    loader: LoaderConfig

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.precision != "fp32" and self.format != "onnx":
            raise ValueError(
                f"precision={self.precision} is for format=onnx; format={self.format} keeps the "
                "weights as they are (precision=fp32)."
            )
        return self
