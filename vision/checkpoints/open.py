"""Open a model: the only way from a checkpoint to a model.

    place → file → named tensors → our names → config → model with weights → report

A place is a run's folder, a checkpoint file or folder of any known format, `timm:NAME` or
`hf:OWNER/NAME`. A file that cannot be opened as the model that its authors ran is refused, or the
report says what differs.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from vision.checkpoints.configs import WhichWeights
from vision.checkpoints.describe import Description, Place, check_given, describe, read_weights
from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.fit.assign import Positions, Windows, project_of, put
from vision.checkpoints.fit.tensors import Fitting, NewHead
from vision.checkpoints.load_report import LoadReport
from vision.checkpoints.metadata import StoredWeights
from vision.checkpoints.native.run_record import RunRecord
from vision.config import ConfigError, Size, pair
from vision.data.configs import PreprocessConfig
from vision.data.preprocess import Preprocess, resolve_preprocess
from vision.data.sources.wordnet import imagenet_synsets, readable_names
from vision.models.build import build_model
from vision.models.configs import AnySwinConfig, AutoModelConfig, ModelChoice, TimmConfig
from vision.models.layers import Classifier, Grid
from vision.models.windows import pin_windows
from vision.terminal import plain

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class OpenedModel(Description):
    """A model, and everything that is known about it."""

    model: Classifier
    """In evaluation mode."""
    image_size: Grid
    """Size of the images that the model is for."""
    path: Path
    """The file."""
    tensors: Mapping[str, Tensor]
    """The weights in the types of the file, under our names, as they were fitted to the model."""
    report: LoadReport
    """What became of each tensor."""
    decoder: Mapping[str, Tensor] = field(default_factory=dict)
    """What masked pretraining has beside the model, by the names of `models/reconstruction.py`."""
    resized_as: str = "vision"
    """The project in whose way tables of positions are fitted to another grid."""
    weights: Literal["raw", "ema"] = "raw"
    record: RunRecord | None = None
    """Of a run of this project."""

    @property
    def preprocess(self) -> Preprocess:
        """How images become the model's numbers, as the weights were trained."""
        auto = PreprocessConfig(mean="auto", std="auto", interpolation="auto", crop_ratio="auto")
        return resolve_preprocess(auto, self.image_size, self.channels, self.known)

    @property
    def names(self) -> tuple[str, ...] | None:
        """Names of the classes; a thousand without names are assumed to be those of ImageNet."""
        if self.class_names is None and self.classes == 1000:
            return readable_names(imagenet_synsets())
        return self.class_names

    def check_head(self) -> None:
        """Raise a ConfigError for a model without a head."""
        if not self.classes:
            raise ConfigError(
                f"checkpoint: {self.path} has no head and cannot predict classes. Train a head: "
                f"python train.py recipe=probe model=auto init={self.path} data=…; evaluate the "
                f"features by their nearest neighbours: python eval.py checkpoint={self.path} "
                "neighbours=20 data=…; or use them in Python: vision.load(…).features(images)."
            )

    @property
    def multi_label(self) -> bool:
        """Whether an image may have any number of the classes."""
        return self.model.activation == "sigmoid"

    @property
    def thresholds(self) -> tuple[float, ...]:
        """The probability from which each class counts as present, for several labels."""
        chosen = () if self.record is None else self.record.thresholds
        return chosen or (0.5,) * self.classes

    def notes(self) -> list[str]:
        """How the model may differ from what its authors ran: what was assumed, and what was
        resized.
        """
        report = self.report
        resized = [f"{name} was resized: {how}" for name, how in report.resized.items()]
        more = [f"{len(resized) - 3} more tensors were resized"] if len(resized) > 3 else []
        layout = [] if self.record is not None else [f"weights in the layout of {report.layout}"]
        assumed = [f"assumed {line}" for line in report.assumed]
        return [*layout, *assumed, *report.warnings, *resized[:3], *more]

    def table(self) -> "Table":
        """The model and its settings, for a terminal."""
        height, width = self.trained_size
        names = ", ".join(self.class_names[:3]) + " …" if self.class_names else "without names"
        settings = self.config.model_dump(mode="json", exclude={"kind"})
        preprocess = self.preprocess
        rows = [
            ("file", str(self.path)),
            ("layout", self.report.layout),
            ("integrity", self.report.integrity),
            ("model", f"{self.config.kind}, {height} × {width} px, {self.channels} channels"),
            ("settings", ", ".join(f"{key} {value}" for key, value in settings.items())),
            ("classes", f"{self.classes} ({names})" if self.classes else "none: no head"),
            *([("labels", "any number of classes per image")] if self.multi_label else []),
            *((n, f"{getattr(preprocess, n)} ({o})") for n, o in preprocess.origin.items()),
            *(("assumed", line) for line in self.report.assumed),
            *(("warning", line) for line in self.report.warnings),
        ]
        return _two_columns(rows)

    def as_dict(self) -> dict[str, Any]:
        """The model and its settings as plain mappings and lists, for JSON."""
        origin, values = self.known[0] if self.known else ("", {})
        return {
            "config": self.config.model_dump(mode="json"),
            "image_size": list(self.trained_size),
            "channels": self.channels,
            "classes": self.classes,
            "multi_label": self.multi_label,
            "class_names": None if self.class_names is None else list(self.class_names),
            "preprocess": dict(values),
            "preprocess_origin": origin,
            "layout": self.report.layout,
            "assumed": list(self.report.assumed),
            "warnings": list(self.report.warnings),
        }


def open_model(
    place: Place,
    *,
    model: ModelChoice | None = None,
    weights: WhichWeights = "auto",
    rename: Sequence[tuple[str, str]] = (),
    image_size: Size | None = None,
    channels: int | None = None,
    classes: int | None = None,
    class_names: tuple[str, ...] | None = None,
    resize_positions: Positions = "auto",
    resize_windows: Windows = "auto",
    device: torch.device | str = "cpu",
    seed: int = 0,
    setting: str = "checkpoint",
    **given: Any,
) -> OpenedModel:
    """The model of a place, with its weights.

    `model`: the config that it must have; None or auto: what the place says, with the settings that
    are `given` in its stead. `image_size`, `channels` and `classes`: what the model is for; None:
    as the weights were trained. A head for other classes is drawn from `seed`: for another number
    of them or, with `class_names`, in place of the head of a run of this project whose classes have
    other names. `resize_positions` and `resize_windows`: how tables are fitted to another grid.
    `setting`: the setting that gave the place.
    """
    if isinstance(model, AutoModelConfig):
        given, model = model.given() | given, None
    check_given(given)
    stored = read_weights(place, weights, rename, setting, timm=isinstance(model, TimmConfig))
    try:
        found = describe(stored, model, given)
    except (CheckpointError, ConfigError) as error:
        raise type(error)(f"{stored.path}: {error}") from error
    size = found.trained_size if image_size is None else pair(image_size)
    channels = found.channels if channels is None else channels
    config = found.config
    if isinstance(config, AnySwinConfig) and not found.other_windows:
        config = pin_windows(config, found.trained_size, size)
    wanted = found.classes if classes is None else classes
    renamed = class_names is not None and _trained_here(stored) and found.class_names != class_names
    same_classes = wanted == found.classes and not renamed
    own_head = same_classes and not isinstance(config, TimmConfig)
    try:
        built = build_model(
            config,
            size,
            channels=channels,
            classes=wanted,
            seed=seed,
            # No memory is taken for what the file replaces. timm's models have buffers, which do
            # not come back from there.
            device="meta" if own_head else "cpu",
        )
    except ConfigError as error:
        if image_size is not None:
            raise
        raise CheckpointError(f"{stored.path}: {error}") from error  # the size is the file's own
    new_head: NewHead = "never" if classes is None else "other_classes" if renamed else "auto"
    try:
        fitting = put(
            built,
            stored,
            trained_size=found.trained_size,
            positions=resize_positions,
            windows=resize_windows,
            new_head=new_head,
        )
    except CheckpointError as error:
        if model is None:
            raise
        raise ConfigError(f"model: {error} model=auto takes the model of the weights.") from error
    if stored.record is not None and stored.record.multi_label and same_classes:
        built.activation = "sigmoid"
    if not any(parameter.is_meta for parameter in built.parameters()):
        built = built.to(device)
    names = found.class_names if same_classes else None
    found = replace(found, config=config, channels=channels, classes=wanted, class_names=names)
    return OpenedModel(
        **vars(found),
        model=built.eval(),
        image_size=size,
        path=stored.path,
        tensors=fitting.tensors,
        report=_report(stored, fitting, found.assumed),
        decoder=stored.converted.decoder,
        resized_as=project_of(stored) or "vision",
        weights="ema" if stored.averaged else "raw",
        record=stored.record,
    )


def _trained_here(stored: StoredWeights) -> bool:
    """Whether the names of the classes are those of the data, not another project's."""
    origin = None if stored.record is None else stored.record.origin
    return stored.record is not None and (origin is None or origin.layout == "vision")


def _two_columns(rows: Iterable[tuple[str, str]]) -> "Table":
    """Words and sentences for a terminal; a word that is repeated is shown once."""
    from rich.table import Table

    result = Table.grid(padding=(0, 2))
    result.add_column()
    result.add_column(overflow="fold")
    previous = ""
    for word, sentence in rows:
        result.add_row("" if word == previous else word, plain(sentence))
        previous = word
    return result


def print_notes(lines: Iterable[str]) -> None:
    """Print notes on standard error, before any results."""
    for line in lines:
        print(f"note: {line}", file=sys.stderr)


def load_weights(
    model: Classifier,
    place: Place,
    *,
    weights: WhichWeights = "auto",
    rename: Sequence[tuple[str, str]] = (),
    positions: Positions = "auto",
    windows: Windows = "auto",
    new_head: NewHead = "auto",
    trained_size: Size | None = None,
) -> LoadReport:
    """Put the weights of a place into a model that is there already. Only a head may be missing."""
    stored = read_weights(place, weights, rename, model=model)
    fitting = put(
        model,
        stored,
        trained_size=None if trained_size is None else pair(trained_size),
        positions=positions,
        windows=windows,
        new_head=new_head,
    )
    return _report(stored, fitting, ())


def _report(stored: StoredWeights, fitting: Fitting, assumed: tuple[str, ...]) -> LoadReport:
    converted = stored.converted.changed
    done = {*fitting.resized, *converted}
    return LoadReport(
        source=str(stored.path),
        layout=stored.layout or "timm",
        path_taken=stored.path_taken,
        loaded=tuple(name for name in fitting.tensors if name not in done),
        converted={n: how for n, how in converted.items() if n in fitting.tensors},
        resized=fitting.resized,
        new=fitting.new,
        ignored=stored.converted.ignored | fitting.ignored,
        left=stored.left,
        assumed=assumed,
        integrity=stored.integrity,
        warnings=tuple(fitting.warnings),
    )
