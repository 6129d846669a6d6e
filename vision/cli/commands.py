"""The subcommands of `vision`: settings and function of each. Torch is imported when needed."""

import gc
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from vision.checkpoints.configs import ConvertConfig, Renaming, SizedConfig
from vision.config import Config, ConfigError, Place, PositiveInt, parse
from vision.data.configs import DataConfig
from vision.data.tools.configs import DataCommandConfig, PrepareConfig
from vision.evaluation.configs import AverageConfig, EvalConfig
from vision.inference.configs import ExportConfig, PredictConfig
from vision.inference.publish.configs import PublishConfig
from vision.inference.serve.configs import ServeConfig
from vision.inference.visualize.configs import VisualizeConfig
from vision.models.configs import AutoModelConfig, ModelChoice
from vision.sweeps.configs import CompareConfig
from vision.terminal import print_wide
from vision.training.configs import TrainConfig

Choices = dict[str, str]
"""The choice made in each group, such as {"model": "vit_base"}."""


@dataclass(frozen=True)
class Command:
    """A subcommand. Its settings are in the YAML file of the same name."""

    summary: str
    config: type[Config]
    run: Callable[[Any], int]
    """From the config to the exit code."""
    implied: Callable[[Sequence[str]], list[str]] = lambda words: []
    """Overrides that follow from the given ones."""
    paths: str | None = None
    """The setting, a list, that collects words without a name."""


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection: a short command would spend a fifth of its time on scanning the
    modules that it imports.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class InfoConfig(Config):
    """Settings of `vision info`."""

    model: ModelChoice
    data: DataConfig
    init: Place | None
    """Weights to describe instead: a run's folder, a file of any known format, timm:NAME or
    hf:OWNER/NAME. What cannot be inferred from them is given as model.heads=… and so on."""
    rename: Renaming
    """Rules "pattern -> replacement" for the tensor names of init."""
    world: PositiveInt | None
    """Number of GPUs, to also estimate the memory that training takes on each; null: not."""
    parallel: Literal["ddp", "fsdp"]
    """Use of several GPUs, as in `train.py`."""
    format: Literal["table", "json"]
    """A table, or JSON for other programs."""


@uncollected()
def _info(config: InfoConfig) -> int:
    from vision.models.cost.count import as_dict, cost, table

    if config.init is not None:
        from rich.console import Console

        from vision.checkpoints.open import open_model

        opened = open_model(config.init, model=config.model, rename=config.rename, setting="init")
        result = cost(opened.config, opened.image_size, opened.channels, opened.classes)
        if config.format == "json":
            _print({"source": str(opened.path), **opened.as_dict(), "cost": as_dict(result)})
        else:
            Console().print(opened.table())  # folds long lines, unlike print_wide
            _print(table(result))
        return 0
    from vision.data.sources.build_source import describe

    if isinstance(config.model, AutoModelConfig):
        raise ConfigError(
            "model=auto takes the model from weights: give init=PATH, init=timm:NAME or "
            "init=hf:OWNER/NAME, or name a model (`vision list models`)."
        )
    spec = describe(config.data)
    result = cost(config.model, spec.image_size, spec.channels, spec.number_of_classes)
    memory: dict[int, int] = {}
    if config.world is not None:
        from vision.cli.composition import compose
        from vision.training.run.rank_memory import memory_per_rank, rank_table

        values, _ = compose("train", ["precision=bf16", f"parallel={config.parallel}"])
        training = parse(TrainConfig, values)
        size, channels = spec.image_size, spec.channels
        memory = memory_per_rank(
            training, config.model, size, channels, spec.number_of_classes, config.world
        )
    if config.format == "json":
        _print(as_dict(result) | ({"memory_per_rank": memory} if memory else {}))
        return 0
    _print(table(result))
    if config.world is not None:
        _print(rank_table(memory, training, config.world))
    return 0


def _model_of_weights(words: Sequence[str]) -> list[str]:
    """Describe the model of the weights, unless a model is named."""
    keys = {word.partition("=")[0] for word in words}
    return ["model=auto"] if "init" in keys and "model" not in keys else []


def _data(config: DataCommandConfig) -> int:
    if config.check:
        return _check(config)
    from vision.data.tools.training_images import draw_training_images

    draw_training_images(config)
    print(f"{config.count} training images are in {config.output}.")
    return 0


def _check(config: DataCommandConfig) -> int:
    from vision.data.tools.check import check_data
    from vision.data.workers import resolve_workers

    result = check_data(config.data, resolve_workers(config.loader.workers))
    if config.format == "json":
        print(result.to_json())
    else:
        _print(result.table())
        print("\n".join(result.lines()))
    return 0 if result.clean else 1


def _prepare(config: PrepareConfig) -> int:
    from vision.data.tools.prepare import prepare

    for part in prepare(config):
        print(part.line())
    print(f"Train on them with data=webdataset data.root={config.output}")
    return 0


def _train(config: TrainConfig) -> int:
    from vision.training.loop import train

    return train(config, label="")


def _compare(config: CompareConfig) -> int:
    from vision.sweeps.compare import compare
    from vision.sweeps.compare_page import comparison_page
    from vision.sweeps.compare_report import csv_text, json_text, latex_text, table_text
    from vision.sweeps.results import find_runs

    runs, without = find_runs(config.runs)
    for place in without:
        print(f"note: no run was found in {place}.", file=sys.stderr)
    comparison = compare(runs, config.metric, config.split, config.select)
    if config.format == "table":
        text = table_text(comparison, to_file=config.output is not None)
    else:
        texts = {"csv": csv_text, "latex": latex_text, "json": json_text, "html": comparison_page}
        text = texts[config.format](comparison)
    if config.output is None:
        print(text, end="")
        return 0
    config.output.parent.mkdir(parents=True, exist_ok=True)
    config.output.write_text(text, encoding="utf-8")
    print(f"{len(comparison.groups)} rows are in {config.output}.")
    return 0


def _eval(config: EvalConfig) -> int:
    from vision.evaluation.evaluate_checkpoints import Processes, evaluate_checkpoints
    from vision.evaluation.report.eval_report import tables
    from vision.training.run.distributed import world

    with world(config.device) as run:
        report = evaluate_checkpoints(config, Processes(run.device, run.rank, run.size, run.sum))
        if report is not None:
            _print(report.as_dict(summary=True) if config.format == "json" else tables(report))
    return 0


def _average(config: AverageConfig) -> int:
    from vision.evaluation.average import average
    from vision.models.build import pick_device

    result = average(config, pick_device(config.device))
    _print(result.as_dict() if config.format == "json" else result.table())
    return 0


def _convert(config: ConvertConfig) -> int:
    from vision.checkpoints.convert import convert

    result = convert(
        config.source,
        config.format,
        config.output,
        model=config.model,
        weights=config.weights,
        rename=config.rename,
    )
    from vision.checkpoints.open import print_notes

    print_notes(result.notes)
    names = ", ".join(str(file) for file in result.files)
    print(f"{result.tensors} tensors, {result.layout} → {result.format}: {names}")
    return 0


def _load(place: str, config: SizedConfig, device: Literal["auto", "cpu", "cuda", "mps"]) -> Any:
    """Load the model of a checkpoint and print what was assumed about it."""
    from vision.checkpoints.open import print_notes
    from vision.inference.predict import load
    from vision.models.build import pick_device

    loaded = load(
        place,
        model=config.model,
        weights=config.weights,
        rename=config.rename,
        image_size=config.image_size,
        device=pick_device(device),
    )
    print_notes(loaded.opened.notes())
    return loaded


def _predict(config: PredictConfig) -> int:
    from vision.inference.predicted_files import run

    return run(_load(config.checkpoint, config, config.device), config)


def _visualize(config: VisualizeConfig) -> int:
    from vision.inference.visualize.visualize import run

    return run([_load(place, config, config.device) for place in config.checkpoint], config)


def _serve(config: ServeConfig) -> int:
    from vision.inference.serve.serve import check_packages, open_socket, serve

    check_packages()
    with open_socket(config.host, config.port) as listening:
        loaded = [_load(place, config, config.device) for place in config.checkpoint]
        return serve(loaded, listening, config)


def _export(config: ExportConfig) -> int:
    from vision.inference.export import export

    result = export(_load(config.checkpoint, config, "cpu"), config)
    print(f"{result.file}: run and compared with the model,", end=" ")
    print(f"largest difference of a probability {result.difference:.1e}.")
    if result.reduced is not None:
        print(f"{result.reduced}.")
    return 0


def _publish(config: PublishConfig) -> int:
    from vision.cli.publishing import run

    return run(config, lambda: _load(config.checkpoint, config, "cpu"))


def _print(result: Any) -> None:
    """Print a mapping as JSON, anything else with rich."""
    if isinstance(result, dict):
        print(json.dumps(result, indent=1))
    else:
        print_wide(result)


COMMANDS = {
    "info": Command(
        "show layers, parameters, MACs, memory and attention matrices of a model",
        InfoConfig,
        _info,
        implied=_model_of_weights,
    ),
    "data": Command(
        "draw training images as the model sees them, or check all", DataCommandConfig, _data
    ),
    "prepare": Command("write a data set as resized tar shards", PrepareConfig, _prepare),
    "train": Command("train a model, or resume a run", TrainConfig, _train),
    "eval": Command("evaluate checkpoints, alone or side by side", EvalConfig, _eval),
    "average": Command(
        "average the weights of runs: soups, WiSE-FT", AverageConfig, _average, paths="runs"
    ),
    "predict": Command("classify images", PredictConfig, _predict, paths="images"),
    "visualize": Command(
        "draw attention as figures or a page, and score how faithful the maps are",
        VisualizeConfig,
        _visualize,
        paths="images",
    ),
    "serve": Command("answer over HTTP, and on a live page", ServeConfig, _serve),
    "export": Command(
        "export a checkpoint to ONNX, torch.export or safetensors", ExportConfig, _export
    ),
    "publish": Command(
        "write a folder with a model card for the Hugging Face hub, and upload it",
        PublishConfig,
        _publish,
    ),
    "convert": Command("convert weights to the format of another library", ConvertConfig, _convert),
    "compare": Command(
        "compare runs, with mean and deviation over seeds", CompareConfig, _compare, paths="runs"
    ),
}
