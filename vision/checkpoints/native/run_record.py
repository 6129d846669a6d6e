"""The record of a run's checkpoint, typed and checked: everything that opening its model needs.

This is the one place that knows the names of the record's fields. A checkpoint with correct
checksums may still hold an invalid record, from another program or a hostile author: what
is here has been checked; record_sizes.py compares its numbers with the shapes of its tensors.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, FailFast, Field, FiniteFloat, model_validator

from vision.checkpoints.errors import OLDER, CheckpointError
from vision.config import Config, ConfigError, Count, PositiveInt, Probability, parse
from vision.data.configs import DataConfig, Interpolation
from vision.models.configs import ModelConfig

_SECTION_LIMIT = 2**16
"""Characters of JSON. The settings of a model or a data set take about a thousand."""
_SHOWN_LINES = 4
_SHOWN_CHARACTERS = 300

_Side = Annotated[int, Field(ge=1, le=2**20)]
"""Pixels along an image."""


class _RecordPart(Config):
    """A part of the record. It may hold more than what is described here."""

    model_config = ConfigDict(extra="ignore")


class TuneRecord(_RecordPart):
    """What a run trained: the weights are the model's own, whatever part of them was trained."""

    kind: Literal["all", "head", "partial", "bitfit"]


class LoraRecord(_RecordPart):
    """What a LoRA run trained: the weights have additions that must be merged into them."""

    kind: Literal["lora"]
    alpha: Annotated[FiniteFloat, Field(gt=0)]
    targets: Annotated[
        tuple[Literal["q", "k", "v", "proj", "fc1", "fc2"], ...], Field(min_length=1, max_length=6)
    ]


class TaskRecord(_RecordPart):
    """What a run minimised. Masked pretraining stores the model as the part `encoder`."""

    kind: str = "classify"


class SettingsRecord(_RecordPart):
    """The settings that the run was started with. A converted file has none of these."""

    task: TaskRecord = TaskRecord()
    data: DataConfig | None = None
    """The data that the run was trained on."""
    init: str | None = None
    """The weights that the run started from."""
    tune: Annotated[TuneRecord | LoraRecord, Field(discriminator="kind")] = TuneRecord(kind="all")


class PreprocessRecord(_RecordPart):
    """How pixels became the model's numbers."""

    image_size: tuple[_Side, _Side]
    """Height and width."""
    mean: Annotated[tuple[FiniteFloat, ...], FailFast()]
    std: Annotated[tuple[Annotated[FiniteFloat, Field(gt=0)], ...], FailFast()]
    interpolation: Interpolation
    crop_ratio: Annotated[float, Field(gt=0, le=1)]
    origin: dict[str, str] = Field(default_factory=dict)
    """Who decided each value. A converted file does not have it."""


class OriginRecord(_RecordPart):
    """Where the weights of a converted file came from."""

    layout: str
    """The project whose layout they had, which also decides how their tables are resized."""


class RunRecord(_RecordPart):
    """The record of a run, or of a file that was converted to this project's format."""

    step: Count
    config: SettingsRecord
    model: ModelConfig
    """The model whose weights these are, without any auto."""
    classes: Annotated[tuple[str, ...], FailFast()]
    """Names, in the order of the logits. Empty: the model has no head."""
    channels: PositiveInt
    preprocess: PreprocessRecord
    origin: OriginRecord | None = None
    """Of a converted file."""
    thresholds: Annotated[tuple[Probability, ...], FailFast()] = ()
    """Of each class of a model for several labels: the best ones on the validation images. Empty
    where these weights were not evaluated."""
    load_report: dict[str, Any] | None = None
    """The outcome of loading the weights that the run started from."""

    @property
    def multi_label(self) -> bool:
        """Whether the model was trained on images with several labels."""
        return self.config.task.kind == "multi_label"

    @model_validator(mode="after")
    def _check(self) -> "RunRecord":
        if self.thresholds and len(self.thresholds) != len(self.classes):
            raise ValueError(
                f"thresholds has {len(self.thresholds)} numbers for {len(self.classes)} classes."
            )
        for name in ("mean", "std"):
            count = len(getattr(self.preprocess, name))
            if count != self.channels:
                raise ValueError(
                    f"preprocess.{name} has {count} numbers, but channels = {self.channels}."
                )
        return self


def run_record(record: Mapping[str, Any], path: Path) -> RunRecord:
    """The record that the file at `path` holds, checked. Raises a CheckpointError that names the
    field, what was found there and what is expected.
    """
    values = {name: value for name, value in record.items() if name in RunRecord.model_fields}
    settings = values.get("config")
    if isinstance(settings, Mapping):
        known = SettingsRecord.model_fields
        values["config"] = {name: value for name, value in settings.items() if name in known}
        if "model" in settings:  # a converted file has its model only there
            values.setdefault("model", settings["model"])
    try:
        for name in ("config", "model", "preprocess"):
            size = len(json.dumps(values.get(name)))
            if size > _SECTION_LIMIT:
                raise ConfigError(f"{name}: {size} characters; {_SECTION_LIMIT} are possible.")
        return parse(RunRecord, values)
    except (ConfigError, RecursionError) as error:
        lines = str(error).splitlines()
    raise CheckpointError(f"{path} has a record that cannot be used. {_shortened(lines)} {OLDER}")


def _shortened(lines: list[str]) -> str:
    """The first mistakes. A record may hold millions, and values of any length."""
    shown = [
        line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]} …"
        for line in (line.removeprefix("the config: ") for line in lines[:_SHOWN_LINES])
    ]
    more = len(lines) - _SHOWN_LINES
    return " ".join([*shown, *([f"And {more} more."] if more > 0 else [])])
