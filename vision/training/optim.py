"""Which parameters an optimiser changes, how fast, and with how much decay.

The groups are made here; timm's factory is given them as they are and adds none of its own.
"""

import inspect
from typing import Any

import torch
from timm.optim import (  # type: ignore[attr-defined]
    create_optimizer_v2,
    get_optimizer_info,
    list_optimizers,
)
from torch import nn

from vision.config import ConfigError, suggest
from vision.models.layers import Classifier
from vision.models.timm import TimmModel
from vision.training.configs import OptimizerConfig
from vision.training.ema import unwrapped

HYBRID = frozenset({"muon", "nmuon", "adamuon", "nadamuon"})
"""Optimisers that turn hidden matrices into orthogonal updates and leave the rest to AdamW."""

FUSED = (torch.optim.Adam, torch.optim.AdamW)
"""Optimisers with one kernel for all parameters, also of those that are spread over devices."""


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Every trainable parameter in one group, by layer, decayed or not; frozen ones in none.

    Each group has its `params`, their `names`, `weight_decay` and `lr_scale`: layer_decay to the
    number of layers between it and the last one. For hybrid optimisers it also has `use_fallback`:
    whatever is not a matrix between two hidden layers goes to AdamW, embedding and head included
    (Jordan et al., 2024).
    """
    inner = unwrapped(model)
    assert isinstance(inner, Classifier)
    undecayed = inner.no_weight_decay()
    layers = {name: inner.layer_of(name) for name, _ in inner.named_parameters()}
    last = max(layers.values())
    hybrid = config.name in HYBRID
    groups: dict[tuple[int, bool, bool], dict[str, Any]] = {}
    for name, parameter in inner.named_parameters():
        if not parameter.requires_grad:
            continue
        decayed, layer = name not in undecayed, layers[name]
        outermost = last > 0 and layer in (0, last)
        fallback = hybrid and (outermost or not decayed)
        group = groups.setdefault(
            (layer, decayed, fallback),
            {
                "params": [],
                "names": [],
                "weight_decay": config.weight_decay if decayed else 0.0,
                "lr_scale": config.layer_decay ** (last - layer),
                **({"use_fallback": fallback} if hybrid else {}),
            },
        )
        group["params"].append(parameter)
        group["names"].append(name)
    found = list(groups.values())
    _check_complete(inner, found)
    return found


def build_optimizer(
    model: nn.Module, config: OptimizerConfig, peak: float | None = None
) -> torch.optim.Optimizer:
    """The optimiser that timm calls `config.name`, for this model's groups.

    `peak` is the highest learning rate of the run, `optimizer.learning_rate` if it is not scaled:
    some optimisers (adamc, lionc, …) relate weight decay to it.
    """
    known = [str(name) for name in list_optimizers()]
    if config.name not in known:
        raise ConfigError(
            f"optimizer.name: timm has no optimiser '{config.name}'. "
            f"{suggest(config.name.lower(), known)}"
        )
    info = get_optimizer_info(config.name)
    if info.second_order:
        raise ConfigError(
            f"optimizer.name: {config.name} needs second derivatives, which a training step here "
            "does not compute; choose another."
        )
    groups = parameter_groups(model, config)
    if not groups:
        raise ConfigError("every parameter of the model is frozen: there is nothing to train.")
    options = _options(config, info)
    if info.opt_class in FUSED and groups[0]["params"][0].device.type in ("cpu", "cuda", "mps"):
        options["fused"] = True
    peak = config.learning_rate if peak is None else peak
    try:
        optimizer = create_optimizer_v2(
            groups, config.name, lr=peak, weight_decay=config.weight_decay, **options
        )
    except (AssertionError, ImportError, TypeError, ValueError) as error:
        raise ConfigError(f"optimizer: {config.name} cannot be built: {error}") from error
    set_learning_rate(optimizer, peak)
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Give every group its share of the learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["lr_scale"]


def head_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of the classifying layer, which adaptive gradient clipping leaves alone."""
    inner = unwrapped(model)
    head = inner.model.get_classifier() if isinstance(inner, TimmModel) else inner.head
    assert isinstance(head, nn.Module)
    return list(head.parameters())


def _check_complete(model: nn.Module, groups: list[dict[str, Any]]) -> None:
    """Every trainable parameter once: by number, and by identity."""
    trainable = [id(p) for p in model.parameters() if p.requires_grad]
    grouped = [id(p) for group in groups for p in group["params"]]
    assert len(grouped) == len(trainable), (len(grouped), len(trainable))
    assert set(grouped) == set(trainable)
    assert all(len(group["names"]) == len(group["params"]) for group in groups)


def _options(config: OptimizerConfig, info: Any) -> dict[str, Any]:
    """The settings that are not null. One that this optimiser does not have is an error: timm's
    factory would drop it without a word.
    """
    own: dict[str, Any] | None = None
    if not isinstance(info.opt_class, str):  # or else of another package, not imported yet
        signature = inspect.signature(info.opt_class).parameters
        own = {name: parameter.default for name, parameter in signature.items()}
    given = {"betas": config.betas, "eps": config.eps, "momentum": config.momentum}
    options = {name: value for name, value in given.items() if value is not None}
    for name, value in options.items():
        if not getattr(info, f"has_{name}") or (own is not None and name not in own):
            raise ConfigError(
                f"optimizer.{name} = {value}: timm's {config.name} cannot be given this; "
                f"set optimizer.{name}=null."
            )
    if config.betas is not None and info.num_betas != len(config.betas):
        raise ConfigError(
            f"optimizer.betas = {list(config.betas)}: {config.name} has {info.num_betas} of them; "
            "set optimizer.betas=null for its own."
        )
    # timm makes every momentum 0.9 that is not given, also of an optimiser with a value of its own.
    if config.momentum is None and info.has_momentum and own is not None and own["momentum"]:
        options["momentum"] = own["momentum"]
    # Kron draws random numbers: from a state that is saved, or else every process has its own.
    if own is not None and "deterministic" in own:
        options["deterministic"] = True
    return options
