"""Which parameters a run trains; the others stay as they are, to the bit.

A frozen parameter needs no gradient, is in no group of the optimiser and has no state there. Parts
of the model that are frozen as a whole work as in evaluation: no dropout, no drop path, and batch
norms with the statistics that they came with.
"""

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

from vision.config import ConfigError, suggest
from vision.models.layers import Classifier
from vision.models.lora import LoraLinear, add_lora
from vision.models.timm import TimmModel
from vision.training.configs import (
    TuneAllConfig,
    TuneBitfitConfig,
    TuneConfig,
    TuneHeadConfig,
    TuneLoraConfig,
    TunePartialConfig,
)

BIASES = ("bias", "q_bias", "v_bias")
"""How biases are called, last in a name."""


def freeze(model: Classifier, tune: TuneConfig, seed: int) -> None:
    """Leave trainable what `tune` says, and the head in any case; LoRA adds its layers here."""
    if isinstance(tune, TuneAllConfig):
        return
    if isinstance(tune, TuneLoraConfig):
        if isinstance(model, TimmModel):  # some of timm's use weights without calling their layer
            raise ConfigError(
                "tune=lora is for the ViT and Swin models of this project; a timm model can be "
                "trained with tune=all, head, partial or bitfit."
            )
        add_lora(
            model,
            rank=tune.rank,
            alpha=tune.alpha,
            targets=tune.targets,
            dropout=tune.dropout,
            seed=seed,
        )
    names = [name for name, _ in model.named_parameters()]
    trained = model.head_names() | _trained(model, tune, names)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)


def set_modes(model: Classifier, tune: TuneConfig) -> None:
    """Training mode where something is trained, evaluation mode in what is frozen as a whole."""
    model.train()
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
            # What the model itself drops out is the embedding.
            embedding = (n for n, p in model.named_parameters() if p.requires_grad)
            model.training = any(model.layer_of(name) == 0 for name in embedding)
        case _:
            pass


def counts(model: nn.Module) -> tuple[int, int]:
    """How many numbers are trained, and how many there are."""
    numbers = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(n for n, trained in numbers if trained), sum(n for n, _ in numbers)


def _trained(model: Classifier, tune: TuneConfig, names: list[str]) -> set[str]:
    """The parameters that are trained beside the head."""
    match tune:
        case TuneLoraConfig():
            layers = [n for n, module in model.named_modules() if isinstance(module, LoraLinear)]
            return {f"{layer}.{part}" for layer in layers for part in ("lora_a", "lora_b")}
        case TuneBitfitConfig():
            return {name for name in names if name.rpartition(".")[2] in BIASES}
        case TunePartialConfig():
            return _last_blocks(model, tune.blocks, names) | _named(tune.parts, names)
        case _:
            return set()


def _last_blocks(model: Classifier, blocks: int, names: Iterable[str]) -> set[str]:
    """The last blocks and the norm after them, by the table of layers; none of them for 0."""
    if not blocks:
        return set()
    layers = {name: model.layer_of(name) for name in names}
    last = max(layers.values())
    if last == 0:
        raise ConfigError("tune.blocks: this model has no table of layers; name tune.parts.")
    if blocks >= last:
        raise ConfigError(
            f"tune.blocks = {blocks}: the model has {last - 1} blocks; tune=all trains all of it."
        )
    return {name for name, layer in layers.items() if layer >= last - blocks}


def _named(parts: Iterable[str], names: list[str]) -> set[str]:
    """The parameters that patterns name: themselves, or the modules that they are in."""
    found = set()
    for part in parts:
        here = {n for n in names if fnmatchcase(n, part) or fnmatchcase(n, f"{part}.*")}
        if not here:
            modules = {n[: i or None] for n in names for i in _ends(n)}
            raise ConfigError(
                f"tune.parts: the model has nothing called '{part}'. {suggest(part, modules)[:300]}"
            )
        found |= here
    return found


def _ends(name: str) -> list[int]:
    """Where the names of the modules of a parameter end."""
    return [i for i, letter in enumerate(name) if letter == "."] + [len(name)]
