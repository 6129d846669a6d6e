"""The command line: `vision <command> [setting=value ...]`, its commands, errors and exit codes.

Every command with settings is a Hydra application (see application.py). Hydra is imported for those
alone: help and listings answer faster without it. Torch is imported when a command needs it.
"""

import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from vision.checkpoints.configs import ConvertConfig, SizedConfig
from vision.cli.info import InfoConfig, model_of_weights
from vision.cli.listing import listing, overview
from vision.config import Config, ConfigError, UserError, suggest
from vision.data.configs import ImageNetFamilyConfig
from vision.data.tools.configs import DataCommandConfig, PrepareConfig
from vision.evaluation.configs import AverageConfig, EvalConfig
from vision.inference.configs import ExportConfig, PredictConfig
from vision.inference.publish.configs import PublishConfig
from vision.inference.serve.configs import ServeConfig
from vision.inference.visualize.configs import VisualizeConfig
from vision.sweeps.configs import CompareConfig
from vision.sweeps.outcome import RunPreemptedError
from vision.terminal import print_result
from vision.training.configs import TrainConfig
from vision.training.run.run_folder import PREEMPTED
from vision.training.run.stop import Stopped, interrupts_kept, say_stopped, stopped_at_once

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


@uncollected()
def _info(config: InfoConfig) -> int:
    from vision.cli.info import info

    info(config)
    return 0


def _data(config: DataCommandConfig) -> int:
    if config.check:
        from vision.data.tools.check import report_check

        return report_check(config)
    from vision.data.tools.training_images import draw_training_images

    draw_training_images(config)
    print(f"{config.count} training images are in {config.output}.")
    return 0


def _prepare(config: PrepareConfig) -> int:
    from vision.data.tools.prepare import prepare

    for part in prepare(config):
        print(part.line())
    print(f"Train on them with data=webdataset data.root={config.output}")
    return 0


def _train(config: TrainConfig) -> int:
    from vision.training.loop import train

    return train(config)


def _compare(config: CompareConfig) -> int:
    from vision.sweeps.compare import report_comparison

    report_comparison(config)
    return 0


def _eval(config: EvalConfig) -> int:
    from vision.evaluation.evaluate_checkpoints import Processes, evaluate_checkpoints
    from vision.evaluation.imagenet_family.evaluate_family import evaluate_family
    from vision.training.run.distributed import world

    family = isinstance(config.data, ImageNetFamilyConfig)
    evaluate = evaluate_family if family else evaluate_checkpoints
    with world(config.device) as run:
        report = evaluate(config, Processes(run.device, run.rank, run.size, run.sum))
        if report is not None:
            as_json = config.format == "json"
            print_result(report.as_dict(summary=True) if as_json else report.table())
    return 0


def _average(config: AverageConfig) -> int:
    from vision.evaluation.average import average
    from vision.models.build import pick_device

    result = average(config, pick_device(config.device))
    print_result(result.as_dict() if config.format == "json" else result.table())
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


COMMANDS = {
    "info": Command(
        "show layers, parameters, MACs, memory and attention matrices of a model",
        InfoConfig,
        _info,
        implied=model_of_weights,
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


def main(arguments: Sequence[str] | None = None, home: Path | None = None) -> int:
    """Run a command. The exit code is 2 for a mistake in the settings, 1 for other failures, 75
    after a request to stop and 130 after an interrupt.

    A relative --config-path is below `home`, by default the working directory.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    # torch reads it at its first tensor. Without huge pages, a training on a CPU spends much of its
    # time in the system, on pages of memory that it has just given back.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    try:
        try:
            with interrupts_kept():
                _dispatch(words, home or Path.cwd())
        finally:
            sys.stdout.flush()  # a closed pipe is noticed here, not when Python exits
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of a pipe has closed it, as `head` does
        sys.stdout = None  # or Python would try to flush it at exit
        return 0
    except RunPreemptedError:
        return PREEMPTED
    except Stopped as request:  # while the settings of a training were composed
        say_stopped(str(request))
        return PREEMPTED
    except (UserError, OSError) as error:
        text = _message(error)
        if os.environ.get("HYDRA_FULL_ERROR") == "1" or text is None:
            raise
        if os.environ.get("LOCAL_RANK", "0") != "0":
            # The first process usually prints the same error, and torchrun then ends this one. It
            # gets to print only if the error is its own.
            time.sleep(15)
        if text:
            print(f"error: {text.replace(chr(10), chr(10) + '       ')}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except SystemExit as ended:  # Hydra's own, after --version and the like
        return int(ended.code or 0)


def _message(error: UserError | OSError) -> str | None:
    """What to print instead of a traceback; None for an error that names no file."""
    if isinstance(error, UserError) or error.errno is None:  # raised here, with a message
        return str(error)
    return None if error.filename is None else f"{error.filename}: {error.strerror}."


def run(command: str) -> NoReturn:
    """Run one command with the arguments of the calling script, and exit."""
    sys.exit(main([command, *sys.argv[1:]], home=Path(sys.argv[0]).parent.resolve()))


def _dispatch(words: list[str], home: Path) -> None:
    name, *rest = words or ["--help"]
    if name in ("-sc", "--shell-completion"):
        name, rest = _command_to_complete(), words
    if name in ("-h", "--help", "help"):
        print(overview({name: command.summary for name, command in COMMANDS.items()}))
    elif name == "list":
        print(listing(rest))
    elif name in COMMANDS:
        with stopped_at_once() if name == "train" else nullcontext():
            with uncollected():
                from vision.cli.application import Application, read_options

            options, overrides = read_options(rest, home)
            Application(name, options).run(overrides)
    else:
        raise ConfigError(f"unknown command '{name}'. {suggest(name, [*COMMANDS, 'list'])}")


def _command_to_complete() -> str:
    """The command in the line that a shell completes, taken out of it for Hydra."""
    program, _, rest = os.environ.get("COMP_LINE", "vision train ").lstrip().partition(" ")
    name, space, rest = rest.lstrip().partition(" ")
    if not space:
        print("\n".join(c for c in sorted([*COMMANDS, "list"]) if c.startswith(name)))
        sys.exit()
    os.environ["COMP_LINE"] = f"{program} {rest}"
    return name
