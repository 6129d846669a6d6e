"""Checks of a sweep before Hydra makes a folder: settings are parsed, runs are decided on. Also the
names of the runs' folders, and the jobs as launchers and sweepers get them.
"""

import atexit
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import setup_globals
from hydra.types import HydraContext
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict, read_write

from vision.cli.app import Command
from vision.cli.composition import Composer, Jobs, check_settings, expand, plain
from vision.config import ConfigError
from vision.sweeps.cluster import cluster_settings, refuse_if_queued
from vision.training.configs import TrainConfig
from vision.training.run.lock import refuse_if_locked
from vision.training.run.run_folder import Run
from vision.training.run.run_settings import auto_folder

LONGEST_NAME = 150
"""Characters in a folder's name; file systems allow 255 bytes."""


def check_sweep(
    command: Command, composer: Composer, example: DictConfig, overrides: Sequence[Override]
) -> dict[str, Any]:
    """Parse the settings of all jobs that are known beforehand, and decide on their runs.

    `example` has the settings of one job. Returns Hydra's settings for the sweep.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "a sweep starts its own processes: start it without torchrun. For several processes "
            "per run: hydra/launcher=submitit_local hydra.launcher.tasks_per_node=2."
        )
    hydra = example.hydra
    known = hydra.runtime.choices["hydra/sweeper"] == "basic"
    params = OmegaConf.select(hydra, "sweeper.params") or {}
    in_yaml = composer.read([f"{key}={value}" for key, value in params.items()])[0]
    jobs = expand([*in_yaml, *overrides], known)
    points = check_jobs(command, composer, jobs.words)
    exclude = "hydra.job.config.override_dirname.exclude_keys"
    excluded = [*OmegaConf.select(example, exclude), *jobs.fixed]
    settings: dict[str, Any] = {
        exclude: [key for key in excluded if not key.startswith("hydra")],
        **cluster_settings(hydra.runtime.choices["hydra/launcher"], jobs.fixed),
    }
    if hydra.sweep.dir == "auto":
        settings["hydra.sweep.dir"] = _sweep_folder(command, composer, jobs)
    if command.config is TrainConfig and known:
        _check_runs(points, settings)
    if hydra.runtime.choices["hydra/launcher"] == "submitit_slurm":
        refuse_if_queued(Path(settings.get("hydra.sweep.dir", hydra.sweep.dir)))
    return settings


@dataclass(frozen=True)
class Point:
    """One job of a sweep."""

    composed: DictConfig
    config: Any


def check_jobs(command: Command, composer: Composer, jobs: Sequence[Sequence[str]]) -> list[Point]:
    """The jobs of a sweep, given as words, with their parsed configs; refused if one of them has a
    mistake.
    """
    points, mistakes = [], dict[str, list[str]]()
    for words, own in zip(jobs, differences(jobs), strict=True):
        try:
            composed = composer.compose(words)
            points.append(Point(composed, check_settings(command, composed)))
        except ConfigError as error:
            mistakes.setdefault(str(error), []).append(" ".join(own))
    if mistakes:
        raise ConfigError(
            "\n".join(
                text
                if len(found) == len(jobs)
                else f"in {len(found)} of {len(jobs)} jobs, such as {found[0]}:\n{text}"
                for text, found in mistakes.items()
            )
        )
    return points


def _check_runs(points: Sequence[Point], settings: Mapping[str, Any]) -> None:
    """Refuse equal points, runs that were started with other settings, and runs in progress."""
    folders, mistakes = Counter[Path](), []
    for number, point in enumerate(points):
        config = point.composed
        for key, value in {**settings, "hydra.job.num": number, "hydra.job.id": number}.items():
            OmegaConf.update(config, key, value)
        run = Run(Path(config.hydra.sweep.dir) / config.hydra.sweep.subdir)
        folders[run.folder] += 1
        try:
            if run.decision(point.config) != "finished":
                refuse_if_locked(run)
        except ConfigError as error:
            mistakes.append(str(error))
    twice = [str(folder) for folder, n in folders.items() if n > 1]
    if twice:
        mistakes.insert(0, f"two runs of the sweep are the same: {', '.join(twice)}.")
    if mistakes:
        raise ConfigError("\n".join(mistakes))


def _sweep_folder(command: Command, composer: Composer, jobs: Jobs) -> str:
    """Folder of a sweep; its name follows from the settings with one value, so that further values
    of a swept setting join the same sweep.
    """
    if command.config is not TrainConfig:  # which is to leave nothing behind
        folder = tempfile.mkdtemp(prefix="vision-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return folder
    if "name" in jobs.swept:
        raise ConfigError("name: the name is the sweep's; give it one value.")
    values, chosen = plain(composer.compose(list(jobs.fixed.values())), complete=False)
    sweep = Path(values["output"], values["name"])
    if values["name"] == "auto":
        sweep = auto_folder(sweep.parent, values, chosen, jobs.swept)
    if Run(sweep).status():
        raise ConfigError(f"name: {sweep} is a single run; choose another name.")
    return str(sweep)


def differences(jobs: Sequence[Sequence[str]]) -> list[list[str]]:
    """The words of each job that not all jobs have."""
    common = set[str].intersection(*map(set, jobs))
    return [[word for word in job if word not in common] for job in jobs]


def _point_name(sweep: str, words: ListConfig, fixed: Sequence[str]) -> str:
    """Resolve ${point_name:folder of the sweep,words of a job,settings with one value}."""
    texts = OmegaConf.to_container(words, resolve=False)  # with references such as ${seed}
    assert isinstance(texts, list)
    overrides = OverridesParser.create().parse_overrides(list(map(str, texts)))
    swept = {o.key_or_group: o.value() for o in overrides if o.key_or_group not in fixed}
    return point_folder(Path(sweep), swept)


def point_folder(sweep: Path, swept: Mapping[str, Any]) -> str:
    """Name of the folder of a point within the sweep's; that of an earlier version if it exists."""
    former = point_name(swept, between=",", equals="=")
    return former if (sweep / former).is_dir() else point_name(swept)


def point_name(swept: Mapping[str, Any], between: str = "__", equals: str = "-") -> str:
    """`optimizer.learning_rate-0.001__seed-0`: the same for the same values in any order and
    notation, and different for different values. A value with characters that are awkward in a
    file name gets a digest.
    """
    pairs = [
        f"{key.replace('/', '.')}{equals}{_shown(swept[key], between)}" for key in sorted(swept)
    ]
    name = between.join(pairs) or "run"
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 7]}-{_digest(name)}"


def _shown(value: Any, between: str) -> str:
    text = json.dumps(value, separators=(",", ":"))
    if isinstance(value, str):
        try:
            json.loads(value)  # the text "3" must not be taken for the number 3
        except ValueError:
            text = value
    if re.fullmatch(r"[\w.+-]+", text, flags=re.ASCII) and between not in text:
        return text
    safe = re.sub(r"[^\w.+-]+|__+", "-", text, flags=re.ASCII).strip("-")
    return "-".join(filter(None, [safe, _digest(text)]))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]


# Every process that runs jobs imports this module, along with the function of the job.
OmegaConf.register_new_resolver("point_name", _point_name, replace=True)


@dataclass(frozen=True)
class SweepJob:
    """A job of a sweep, composed within Hydra."""

    overrides: list[str]
    config: DictConfig
    """The settings of the command, and those of Hydra as `hydra`."""
    settings: dict[str, Any]
    """The settings of the command, resolved."""
    folder: Path


def compose_jobs(
    context: HydraContext, config: DictConfig, batch: Sequence[Sequence[str]], first: int
) -> list[SweepJob]:
    """Compose the settings of every job, numbered from `first`, for a launcher or a sweeper."""
    setup_globals()
    jobs = []
    for number, overrides in enumerate(batch, first):
        job = context.config_loader.load_sweep_config(config, list(overrides))
        with open_dict(job):
            job.hydra.job.id = job.hydra.job.num = number
        HydraConfig.instance().set_config(job)  # for references such as ${hydra:job.num}
        sweep = job.hydra.sweep
        with read_write(job.hydra):
            sweep.subdir = str(sweep.subdir)
        folder = Path(sweep.dir, sweep.subdir)
        jobs.append(SweepJob(list(overrides), job, plain(job)[0], folder))
    return jobs
