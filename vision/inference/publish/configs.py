"""Settings of `vision publish`. Without torch, so that mistakes are reported at once."""

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, model_validator

from vision.checkpoints.configs import SizedConfig
from vision.config import Amount, OutputFolder, Place
from vision.data.configs import DataConfig, LoaderConfig, Split


def _repository(name: str) -> str:
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        raise ValueError(f"'{name}' is not a repository of the hub; write repository=OWNER/NAME.")
    return name


def _license(name: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name):
        raise ValueError(
            f"'{name}' is not an identifier of the hub, such as apache-2.0, mit or cc-by-4.0."
        )
    return name


class PublishConfig(SizedConfig):
    """Settings of `vision publish`."""

    checkpoint: Place
    """A run's folder, a checkpoint file of any known format, timm:NAME or hf:OWNER/NAME."""
    output: OutputFolder | None
    """New folder; null: publish in the run's folder, beside the file or here."""
    layout: Literal["auto", "timm", "vision"]
    """timm: opened by timm, transformers and this project; vision: by this project, every model;
    auto: timm's if it computes the same."""
    repository: Annotated[str, AfterValidator(_repository)] | None
    """OWNER/NAME on the hub."""
    push: bool
    """Upload the folder to the repository, which is created if it does not exist."""
    private: bool
    """Whether a new repository is private."""
    license: Annotated[str, AfterValidator(_license)] | None
    """Licence of the weights, as an identifier of the hub: apache-2.0, mit, cc-by-4.0, …"""
    evaluate: bool
    """Measure the model for its card, as `vision eval` does; false: a card without results."""
    data: DataConfig | None
    """Images to measure on; null: those of the run."""
    split: Split
    batch_size: Amount
    """Images per forward pass; does not affect the results."""
    device: Literal["auto", "cpu", "cuda", "mps"]
    loader: LoaderConfig

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.push and self.repository is None:
            raise ValueError("push=true needs the repository to upload to: repository=OWNER/NAME.")
        return self
