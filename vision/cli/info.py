"""`vision info`: what a model consists of and costs."""

from collections.abc import Sequence
from typing import Literal

from vision.checkpoints.configs import Renaming
from vision.config import Config, ConfigError, Place, PositiveInt, parse
from vision.data.configs import DataConfig
from vision.models.configs import AutoModelConfig, ModelChoice
from vision.terminal import print_result
from vision.training.configs import TrainConfig


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


def info(config: InfoConfig) -> None:
    """Print layers, parameters, MACs and memory of a model, or of the model of some weights."""
    from vision.models.cost.count import as_dict, cost, table

    if config.init is not None:
        from rich.console import Console

        from vision.checkpoints.open import open_model

        opened = open_model(config.init, model=config.model, rename=config.rename, setting="init")
        result = cost(opened.config, opened.image_size, opened.channels, opened.classes)
        if config.format == "json":
            print_result({"source": str(opened.path), **opened.as_dict(), "cost": as_dict(result)})
        else:
            Console().print(opened.table())  # folds long lines, unlike print_wide
            print_result(table(result))
        return
    from vision.data.sources.build_source import describe

    if isinstance(config.model, AutoModelConfig):
        raise ConfigError(
            "model=auto takes the model from weights: give init=PATH, init=timm:NAME or "
            "init=hf:OWNER/NAME, or name a model (`vision list models`)."
        )
    spec = describe(config.data)
    given = (config.model, spec.image_size, spec.channels, spec.number_of_classes)
    result = cost(*given)
    memory: dict[int, int] = {}
    if config.world is not None:
        from vision.cli.composition import compose
        from vision.training.run.memory import memory_per_rank, rank_table

        values, _ = compose("train", ["precision=bf16", f"parallel={config.parallel}"])
        training = parse(TrainConfig, values)
        memory = memory_per_rank(training, *given, config.world)
    if config.format == "json":
        print_result(as_dict(result) | ({"memory_per_rank": memory} if memory else {}))
        return
    print_result(table(result))
    if config.world is not None:
        print_result(rank_table(memory, training, config.world))


def model_of_weights(words: Sequence[str]) -> list[str]:
    """Describe the model of the weights, unless a model is named."""
    keys = {word.partition("=")[0] for word in words}
    return ["model=auto"] if "init" in keys and "model" not in keys else []
