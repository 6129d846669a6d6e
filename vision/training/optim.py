"""The optimiser and its parameter groups: learning rates and weight decay by layer.

Muon is this project's own. timm's factory builds all others; it gets these groups as they are and
adds none of its own.
"""

import inspect
from typing import Any

import torch
from timm.optim import (  # type: ignore[attr-defined]
    create_optimizer_v2,
    get_optimizer_info,
    list_optimizers,
)

from vision.config import ConfigError, suggest
from vision.models.layers import Classifier
from vision.training.configs import OptimizerConfig
from vision.training.muon import MuonAdamW

HYBRID = frozenset({"nmuon", "adamuon", "nadamuon"})
"""timm's optimisers with orthogonal updates of hidden matrices, and AdamW for the rest."""

FUSED = (torch.optim.Adam, torch.optim.AdamW)
"""Optimisers with one kernel for all parameters, also for sharded ones."""


def parameter_groups(model: Classifier, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Groups of trainable parameters, by layer, update and whether they are decayed.

    Each group has its `params`, their `names`, `weight_decay` and `lr_scale`: layer_decay to the
    power of the number of layers between it and the last one. For muon it also has `matrices`, 0 in
    the groups that are left to AdamW (`rest_learning_rate` is in their `lr_scale`); for timm's
    hybrids `use_fallback`, for all but matrices between two hidden layers.
    """
    undecayed = model.no_weight_decay()
    matrices = model.hidden_matrices() if config.name == "muon" else {}
    layers = {name: model.layer_of(name) for name, _ in model.named_parameters()}
    last = max(layers.values())
    groups: dict[tuple[int, ...], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        decayed, layer = name not in undecayed, layers[name]
        weight_decay, scale = config.weight_decay, config.layer_decay ** (last - layer)
        kind: dict[str, int] = {}
        if config.name == "muon":
            kind = {"matrices": matrices.get(name, 0)}
            if name not in matrices:
                scale *= (config.rest_learning_rate or config.learning_rate) / config.learning_rate
                if config.rest_weight_decay is not None:
                    weight_decay = config.rest_weight_decay
        elif config.name in HYBRID:
            kind = {"use_fallback": (last > 0 and layer in (0, last)) or not decayed}
        group = groups.setdefault(
            (layer, decayed, *kind.values()),
            {
                "params": [],
                "names": [],
                "weight_decay": weight_decay if decayed else 0.0,
                "lr_scale": scale,
                **kind,
            },
        )
        group["params"].append(parameter)
        group["names"].append(name)
    return list(groups.values())


def build_optimizer(
    model: Classifier, config: OptimizerConfig, peak: float | None = None, bfloat16: bool = False
) -> torch.optim.Optimizer:
    """The optimiser of the name `config.name`, for this model's groups.

    `peak` is the highest learning rate of the run, by default `optimizer.learning_rate`: some
    optimisers (adamc, lionc, …) relate weight decay to it. In a run with precision=bf16, whose
    gradients have no more digits, Muon multiplies its matrices in `bfloat16`, too.
    """
    groups = parameter_groups(model, config)
    if not groups:
        raise ConfigError("every parameter of the model is frozen: there is nothing to train.")
    peak = config.learning_rate if peak is None else peak
    optimizer: torch.optim.Optimizer
    if config.name == "muon":
        optimizer = MuonAdamW(groups, peak, **_given(config), bfloat16=bfloat16)
    else:
        optimizer = _timm_optimizer(groups, config, peak)
    set_learning_rate(optimizer, peak)
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Give every group its share of the learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["lr_scale"]


def _timm_optimizer(
    groups: list[dict[str, Any]], config: OptimizerConfig, peak: float
) -> torch.optim.Optimizer:
    """timm's optimiser of the name `config.name`."""
    known = [str(name) for name in list_optimizers()]
    if config.name not in known:
        raise ConfigError(
            f"optimizer.name: timm has no optimiser '{config.name}'. "
            f"{suggest(config.name.lower(), known)}"
        )
    info = get_optimizer_info(config.name)
    if info.second_order:
        raise ConfigError(
            f"optimizer.name: {config.name} needs second derivatives, which a training step does "
            "not compute; choose another."
        )
    options = _options(config, info)
    if info.opt_class in FUSED and groups[0]["params"][0].device.type in ("cpu", "cuda", "mps"):
        options["fused"] = True
    try:
        return create_optimizer_v2(
            groups, config.name, lr=peak, weight_decay=config.weight_decay, **options
        )
    except (AssertionError, ImportError, TypeError, ValueError) as error:
        raise ConfigError(f"optimizer: {config.name} cannot be built: {error}") from error


def _given(config: OptimizerConfig) -> dict[str, Any]:
    """The settings that are not null; null is the optimiser's own value."""
    given = {"betas": config.betas, "eps": config.eps, "momentum": config.momentum}
    return {name: value for name, value in given.items() if value is not None}


def _options(config: OptimizerConfig, info: Any) -> dict[str, Any]:
    """The settings that are not null. One that this optimiser of timm does not have is an error,
    since timm's factory would drop it silently.
    """
    own: dict[str, Any] | None = None
    if not isinstance(info.opt_class, str):  # a string: of another package, not imported yet
        signature = inspect.signature(info.opt_class).parameters
        own = {name: parameter.default for name, parameter in signature.items()}
    options = _given(config)
    for name, value in options.items():
        if not getattr(info, f"has_{name}") or (own is not None and name not in own):
            raise ConfigError(
                f"optimizer.{name} = {value}: timm's {config.name} does not have this setting; "
                f"use optimizer.{name}=null."
            )
    if config.betas is not None and info.num_betas != len(config.betas):
        raise ConfigError(
            f"optimizer.betas = {list(config.betas)}: {config.name} has {info.num_betas} of them; "
            "use optimizer.betas=null for its own."
        )
    # timm sets a missing momentum to 0.9, even if the optimiser has a default of its own.
    if config.momentum is None and info.has_momentum and own is not None and own["momentum"]:
        options["momentum"] = own["momentum"]
    # Kron draws random numbers: with this from a state that is saved and equal in all processes.
    if own is not None and "deterministic" in own:
        options["deterministic"] = True
    return options
