"""The record of a run's checkpoint, typed and checked: everything that opening its model needs.

This is the one place that knows the names of the record's fields. A checkpoint with correct
checksums may still hold an invalid record, from another program or a hostile author, which asks for
images of a billion pixels. Building such a model takes hours and all memory, even without weights,
so the record's numbers are compared with the shapes of the tensors first.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, FailFast, Field, FiniteFloat, model_validator

from vision.checkpoints.errors import OLDER, CheckpointError
from vision.config import (
    Config,
    ConfigError,
    Count,
    PositiveInt,
    Probability,
    abridged,
    pair,
    parse,
)
from vision.data.configs import DataConfig, Interpolation
from vision.models.attention import width_of_head
from vision.models.build import largest_table, number_of_patches
from vision.models.configs import (
    AnySwinConfig,
    LRNetConfig,
    ModelConfig,
    OwnModelConfig,
    TimmConfig,
    ViTConfig,
)
from vision.models.lora import unmergeable
from vision.models.stems import halvings

_SECTION_LIMIT = 2**16
"""Characters of JSON. The settings of a model or a data set take about a thousand."""
_SHOWN_LINES = 4
_Patched = ViTConfig | AnySwinConfig

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
    mistakes = " ".join(
        abridged(line.removeprefix("the config: ")) for line in lines[:_SHOWN_LINES]
    )
    more = f" And {len(lines) - _SHOWN_LINES} more." if len(lines) > _SHOWN_LINES else ""
    raise CheckpointError(f"{path} has a record that cannot be used. {mistakes}{more} {OLDER}")


# Comparison with the tensors ----------------------------------------------------------------------

Shapes = Mapping[str, Sequence[int]]
_LARGEST = 2**29
"""Numbers of a table that a model derives from the size of its images. A Swin V2 with a window of
48 at 1536 × 1536 pixels, larger than any published one, has two thirds of it.
"""
_BLOCK = re.compile(r"(?:layers\.(\d+)\.)?blocks\.(\d+)\.")


def check_sizes(record: RunRecord, shapes: Shapes, path: Path) -> None:
    """Refuse a record that contradicts the tensors beside it, before a model is built from it.

    `shapes` are those of the model's tensors by their plain names, before LoRA's additions are
    merged. Only what decides time and memory is compared; whether every tensor fits is seen when
    they are loaded.
    """
    for problem in _problems(record, shapes):
        raise CheckpointError(f"{path} {problem} {OLDER}")


def _problems(record: RunRecord, shapes: Shapes) -> Iterator[str]:
    """The contradictions, each as the end of a sentence about the file."""
    size = record.preprocess.image_size
    if isinstance(record.model, TimmConfig):
        from vision.checkpoints.fit.timm_weights import table_numbers  # timm is slow to load

        there = sum(math.prod(shape) for shape in shapes.values())
        try:
            numbers = table_numbers(record.model, size, record.channels, len(record.classes), there)
        except ValueError as error:
            yield str(error)
            return
    else:
        for field, recorded, found in _Comparison(record, record.model, shapes).numbers():
            if recorded != found:
                said, seen = (abridged(str(value), 60) for value in (recorded, found))
                yield (
                    f"contradicts itself: its record says {field} = {said}, its tensors say {seen}."
                )
        numbers = largest_table(record.model, size)
    if numbers > _LARGEST:
        yield (
            f"has an invalid record: images of {list(size)} pixels would need tables of {numbers} "
            f"numbers; at most {_LARGEST} are possible."
        )
    if isinstance(tune := record.config.tune, LoraRecord):
        if not any(name.endswith(".lora_a") for name in shapes):
            yield "is of a run with tune=lora, but has no additions (lora_a)."
        if (layer := unmergeable(shapes, tune.targets)) is not None:
            yield (
                f"has additions to '{layer[:100]}' that do not fit its weight and "
                f"tune.targets = {list(tune.targets)}."
            )


Number = tuple[str, Any, Any]
"""A field of the record, its value there, and the value that the tensors have."""


@dataclass(frozen=True)
class _Comparison:
    """The numbers of a record that are seen in shapes."""

    record: RunRecord
    config: OwnModelConfig
    shapes: Shapes

    def numbers(self) -> Iterator[Number]:
        """All of them."""
        config = self.config
        yield "the number of classes", len(self.record.classes), self.axis("head.weight", 0)
        if isinstance(config, ViTConfig):
            yield from self.stem(config)
            yield from self.vit(config)
            return
        if isinstance(config, LRNetConfig):
            block, outer = "layers.0.blocks.0", config.width * config.expansion
            groups = config.width // config.share
            yield "channels", self.record.channels, self.axis("stem.proj.weight", 1)
            yield "model.width", config.width, self.axis("stem.proj.weight", 0)
            yield "model.expansion · width", outer, self.axis(f"{block}.expand.weight", 0)
            yield "width / model.share", groups, self.axis(f"{block}.relation.key.weight", 0)
        else:
            yield from self.stem(config)
        yield "model.depths", list(config.depths), self.depths()
        if not isinstance(config, LRNetConfig):
            for stage in range(len(config.depths)):
                width = config.width * 2**stage
                yield self.hidden(width, config.mlp_ratio, f"layers.{stage}.blocks.0")
            if config.positions == "absolute":
                cells = number_of_patches(config, self.record.preprocess.image_size)
                yield "the cells of the grid", cells, self.axis("absolute_pos_embed", 1)

    def vit(self, config: ViTConfig) -> Iterator[Number]:
        """Those of a ViT behind its stem."""
        yield "model.depth", config.depth, sum(self.depths())
        yield "model.registers", config.registers, self.axis("reg_token", 1)
        yield self.hidden(config.width, config.mlp_ratio, "blocks.0")
        heads = config.heads * width_of_head(config)
        yield "model.heads · head_width", heads, self.axis("blocks.0.attn.proj.weight", 1)
        if config.positions in ("learned", "learned_rotary"):
            tokens = int(config.class_token) + int(config.distillation_token)
            rows = number_of_patches(config, self.record.preprocess.image_size)
            rows += tokens if config.class_token_position else 0
            yield "the rows of positions.table", rows, self.axis("positions.table", 1)
        if config.pool == "attention":
            yield self.hidden(config.width, config.pool_mlp_ratio or config.mlp_ratio, "pooling")
        for field in ("representation", "projection"):
            width = getattr(config, field) or 0
            yield f"model.{field}", width, self.axis(f"{field}.weight", 0)

    def stem(self, config: _Patched) -> Iterator[Number]:
        """Channels, width and patch."""
        patch, channels = pair(config.patch_size), self.record.channels
        if config.stem in ("conv", "conv_whitened"):
            first = "whitening" if config.stem == "conv_whitened" else "convs.0"
            steps = len(halvings(patch))
            norms = [name for name in self.shapes if name.startswith("patch_embed.norms.")]
            yield "channels", channels, self.axis(f"patch_embed.{first}.weight", 1)
            yield "the norms of the stem", 2 * steps, len(norms)
            last = f"patch_embed.norms.{steps - 1}.weight"
            yield "model.width", config.width, self.axis(last, 0)
            return
        embedding = tuple(self.shapes.get("patch_embed.proj.weight", ()))
        yield "the axes of patch_embed.proj.weight", 4, len(embedding)
        yield "model.width", config.width, embedding[0]
        yield "channels", channels, embedding[1]
        yield "model.patch_size", patch, embedding[2:]

    def hidden(self, width: int, ratio: float, block: str) -> Number:
        """The hidden width of the MLP of a block or of the pooling."""
        hidden = int(min(width * ratio, 2**62))  # the ratio may be infinite
        return "model.mlp_ratio · width", hidden, self.axis(f"{block}.mlp.fc2.weight", 1)

    def depths(self) -> list[int]:
        """The number of blocks of each stage; a ViT has one."""
        found: defaultdict[int, set[str]] = defaultdict(set)
        for name in self.shapes:
            if match := _BLOCK.match(name):
                found[int(match[1] or 0)].add(match[2])
        return [len(found[stage]) for stage in sorted(found)]

    def axis(self, name: str, axis: int) -> int:
        """The length of a tensor's axis; 0 for a tensor that is not there."""
        shape = self.shapes.get(name, ())
        return shape[axis] if axis < len(shape) else 0
