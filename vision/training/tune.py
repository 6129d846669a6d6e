"""The parameters that a run trains; the others stay as they are, to the bit.

A frozen parameter has neither a gradient nor a group or state in the optimiser. Modules that are
frozen as a whole are in evaluation mode: no dropout, no drop path, and batch norms keep their
statistics.
"""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from itertools import accumulate

from vision.config import ConfigError, suggest
from vision.models.layers import Classifier
from vision.models.lora import LoraLinear, add_lora
from vision.models.timm import TimmModel
from vision.training.tasks.configs import (
    TuneAllConfig,
    TuneBitfitConfig,
    TuneConfig,
    TuneHeadConfig,
    TuneLoraConfig,
    TunePartialConfig,
)

BIASES = ("bias", "q_bias", "v_bias")
"""Last parts of the names of biases."""


def freeze(model: Classifier, tune: TuneConfig, seed: int) -> None:
    """Freeze all parameters of a model in training mode but those that `tune` trains and the head.
    Adds the layers of LoRA.
    """
    if isinstance(tune, TuneLoraConfig):
        if isinstance(model, TimmModel):  # some of timm's use weights without calling their layer
            raise ConfigError(
                "tune=lora is for the ViT and Swin models of this project; train a timm model "
                "with tune=all, head, partial or bitfit."
            )
        add_lora(
            model,
            rank=tune.rank,
            alpha=tune.alpha,
            targets=tune.targets,
            dropout=tune.dropout,
            seed=seed,
        )
    # What the model itself keeps fixed (the whitening of a stem) is not trained by any setting.
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    trained = model.head_names() | _trained(model, tune, names)
    for name in names:
        model.get_parameter(name).requires_grad_(name in trained)
    _set_modes(model, tune, trained)


def _set_modes(model: Classifier, tune: TuneConfig, trained: Iterable[str]) -> None:
    """Evaluation mode for modules that are frozen as a whole."""
    match tune:
        case TuneHeadConfig():
            model.eval()
            for head in model.heads():
                head.train()
        case TunePartialConfig():
            for module in model.modules():
                parameters = list(module.parameters())
                if parameters and not any(p.requires_grad for p in parameters):
                    module.eval()
            # The dropout of the model itself is that of the embedding.
            model.training = any(model.layer_of(name) == 0 for name in trained)
        case _:
            pass


def _trained(model: Classifier, tune: TuneConfig, names: list[str]) -> set[str]:
    """The names of the parameters that are trained beside the head."""
    match tune:
        case TuneAllConfig():
            return set(names)
        case TuneLoraConfig():
            layers = [n for n, module in model.named_modules() if isinstance(module, LoraLinear)]
            return {f"{layer}.{part}" for layer in layers for part in ("lora_a", "lora_b")}
        case TuneBitfitConfig():
            return {name for name in names if name.rpartition(".")[2] in BIASES}
        case TunePartialConfig():
            return _last_blocks(model, tune.blocks, names) | _named(tune.parts, names)
        case TuneHeadConfig():
            return set()


def _last_blocks(model: Classifier, blocks: int, names: Iterable[str]) -> set[str]:
    """Parameters of the last blocks and the norm after them, by `layer_of`."""
    if not blocks:
        return set()
    layers = {name: model.layer_of(name) for name in names}
    last = max(layers.values())
    if last == 0:
        raise ConfigError("tune.blocks: the layers of this model are unknown; use tune.parts.")
    if blocks >= last:
        raise ConfigError(
            f"tune.blocks = {blocks}: the model has {last - 1} blocks; use tune=all to train all."
        )
    return {name for name, layer in layers.items() if layer >= last - blocks}


def _named(parts: Iterable[str], names: list[str]) -> set[str]:
    """Parameters whose own names, or those of their modules, match one of the patterns."""
    found = set()
    for part in parts:
        here = {n for n in names if fnmatchcase(n, part) or fnmatchcase(n, f"{part}.*")}
        if not here:
            modules = {m for n in names for m in accumulate(n.split("."), "{}.{}".format)}
            raise ConfigError(
                f"tune.parts: '{part}' matches no part of the model. {suggest(part, modules)[:300]}"
            )
        found |= here
    return found
