"""Training from Python: `vision.train`.

The settings are those of the command line, composed and checked in the same way, and the run is the
same: name, folder, numbers, and weights to the bit. What only Hydra writes, `.hydra/` and sweeps,
is left to the command line.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vision.cli.app import COMMANDS, Choices
from vision.cli.composition import checked, composer, plain, quoted
from vision.config import ConfigError
from vision.data.configs import PythonDataConfig
from vision.sweeps.outcome import RunPreemptedError, evaluations, numbers_of
from vision.training.configs import TrainConfig
from vision.training.run.run_folder import PREEMPTED, Run, find_run
from vision.training.run.run_settings import flat

if TYPE_CHECKING:
    from vision.data.given import Dataset, GivenImages
    from vision.inference.predict import Loaded


@dataclass(frozen=True)
class TrainResult:
    """The result of `vision.train`."""

    folder: Path
    """The run's folder, which every command takes: `python eval.py checkpoint=FOLDER`."""
    config: TrainConfig
    """The settings that ran."""
    metrics: Mapping[str, float]
    """Numbers of the best checkpoint on the validation images, such as `top1` and `loss`; of the
    averaged weights if the run has any (`ema`). Empty if the run was never evaluated.
    """

    @cached_property
    def model(self) -> "Loaded":
        """The model of the best checkpoint, on the CPU: `vision.load(folder)`."""
        from vision.inference.predict import load

        return load(self.folder)

    @property
    def history(self) -> list[dict[str, Any]]:
        """Every logged number: step, split (train, val, val_ema) and the numbers themselves."""
        return Run(self.folder).events()

    def __repr__(self) -> str:
        """The folder and the numbers."""
        numbers = ", ".join(
            f"{name} {value:.4f}"
            for name, value in self.metrics.items()
            if isinstance(value, float)
        )
        return f"TrainResult({self.folder}: {numbers or 'never evaluated'})"


def train(
    settings: TrainConfig | Mapping[str, Any] | Sequence[str] = (),
    dataset: "Dataset | None" = None,
    *,
    validation: "Dataset | None" = None,
    classes: Sequence[str] | None = None,
) -> TrainResult:
    """Train a model, or resume the run with these settings and data, as `python train.py` does.

    `settings` are those of the command line: a list of words such as `["model=vit_mini",
    "duration=3epochs"]`, the same as a mapping, `{"model": "vit_mini", "optimizer.learning_rate":
    1e-3}`, or a parsed `TrainConfig`. Mistakes raise a `ConfigError` that lists all of them.

    `dataset` gives images in place of `data=…`: a `torch.utils.data.Dataset` or a list of (image,
    label). An image is a path, the bytes of a file, a Pillow image, or a uint8 array or tensor
    (either order of axes), without augmentation and normalisation, which are settings here; a label
    is an int from 0. `validation` are the images to evaluate on; without them, `data.val_fraction`
    takes a share of `dataset`. `classes` names the classes; by default `dataset.classes`, or else
    their numbers.

    A finished run is not trained again. Raises `RunPreemptedError` if a signal or Ctrl-C stopped
    the run, which is saved then: the same call resumes it.
    """
    # torch reads it at its first tensor, as for the command line: see `main` in app.py.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if dataset is None and (validation is not None or classes is not None):
        named = "validation" if validation is not None else "classes"
        raise ConfigError(f"{named}: only for images that are given as dataset=….")
    if isinstance(settings, TrainConfig):
        config = settings
        chosen: Choices = {"model": config.model.kind, "data": config.data.kind}
    else:
        config, chosen = _composed(_words(settings, dataset is not None))
    given = None
    if dataset is not None:
        config, given = _given(config, dataset, validation, classes)
    run = find_run(config, chosen)
    config = config.model_copy(update={"output": str(run.folder.parent), "name": run.folder.name})
    return _trained(config, run, given)


def _words(settings: Mapping[str, Any] | Sequence[str], given: bool) -> list[str]:
    """Settings as words of the command line; with images that are given, data=python among them."""
    if isinstance(settings, str):
        words = [settings]
    elif isinstance(settings, Mapping):
        words = [f"{key}={quoted(value)}" for key, value in flat(settings).items()]
    else:
        words = list(settings)
    odd = [word for word in words if not isinstance(word, str)]
    if odd:
        raise ConfigError(f"{odd[0]!r:.60}: settings are words, such as 'seed=1', or a mapping.")
    if hydras := [word for word in words if word.lstrip("+~").startswith("hydra")]:
        raise ConfigError(f"{hydras[0]}: settings of Hydra are for the command line.")
    chosen = [word for word in words if word.partition("=")[0] == "data"]
    if given and chosen and chosen != ["data=python"]:
        raise ConfigError(
            f"{chosen[0]}: the images are given as dataset=…; leave out one of both. Other "
            "settings of the data can be given, such as data.val_fraction=0.1."
        )
    return [*words, "data=python"] if given and not chosen else words


def _composed(words: Sequence[str]) -> tuple[TrainConfig, Choices]:
    """The config that words make, and the choice in each group; or an error with all mistakes."""
    with composer("train") as yaml:
        _, composed, mistakes = yaml.compose_usable(words)
        mistakes += [
            f"{override.input_line}: a run takes one value; call vision.train for each."
            for override in yaml.read(words)[0]
            if override.is_sweep_override()
        ]
        try:
            values, chosen = plain(composed)
            config: TrainConfig = checked(COMMANDS["train"], values, chosen)
        except ConfigError as error:
            mistakes.append(str(error))
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return config, chosen


def _given(
    config: TrainConfig,
    dataset: "Dataset",
    validation: "Dataset | None",
    classes: Sequence[str] | None,
) -> "tuple[TrainConfig, GivenImages]":
    """The settings with the name of the images that a program gives, and the images, checked."""
    from vision.data.given import given_images

    data = config.data
    if not isinstance(data, PythonDataConfig):
        raise ConfigError(
            f"data.kind = {data.kind}, but the images are given as dataset=…; leave out one "
            "of both."
        )
    if validation is None and data.val_fraction is None:
        raise ConfigError(
            "validation: no images to evaluate on. Give them as validation=…, or set "
            "data.val_fraction, such as 0.1, to take them from dataset."
        )
    given = given_images(dataset, validation, classes, data.channels)
    if data.fingerprint not in ("auto", given.fingerprint):
        raise ConfigError(
            f"data.fingerprint = {data.fingerprint}, but that of the given images is "
            f"{given.fingerprint}: they are others than those of these settings. With "
            "data.fingerprint=auto they make another run."
        )
    label = given.label if data.label == "auto" else data.label
    named = data.model_copy(update={"label": label, "fingerprint": given.fingerprint})
    return config.model_copy(update={"data": named}), given


def _trained(config: TrainConfig, run: Run, given: "GivenImages | None") -> TrainResult:
    """Train, and read the result; torch's global generator stays as it is."""
    import torch

    from vision.training.loop import train as run_training

    state = torch.random.get_rng_state()
    try:
        code = run_training(config, given)
    finally:
        torch.random.set_rng_state(state)
    if code == PREEMPTED:
        raise RunPreemptedError(f"{run.folder} was stopped and saved; the same call resumes it.")
    found = numbers_of(evaluations(run), config.checkpoint.best, config.ema is not None)
    numbers = {name: value for name, value in found.items() if name not in ("step", "split")}
    return TrainResult(run.folder, config, numbers)
