"""The optimiser and its parameter groups: learning rates and weight decay by layer.

timm's factory gets these groups as they are and adds none of its own.
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

HYBRID = frozenset({"muon", "nmuon", "adamuon", "nadamuon"})
"""Optimisers with orthogonal updates of hidden matrices, and AdamW for the rest."""

FUSED = (torch.optim.Adam, torch.optim.AdamW)
"""Optimisers with one kernel for all parameters, also for sharded ones."""


def parameter_groups(model: Classifier, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Groups of trainable parameters, by layer and whether they are decayed.

    Each group has its `params`, their `names`, `weight_decay` and `lr_scale`: layer_decay to the
    power of the number of layers between it and the last one. For hybrid optimisers it also has
    `use_fallback`: all but matrices between two hidden layers go to AdamW, embedding and head
    included (Jordan et al., 2024).
    """
    undecayed = model.no_weight_decay()
    layers = {name: model.layer_of(name) for name, _ in model.named_parameters()}
    last = max(layers.values())
    hybrid = config.name in HYBRID
    groups: dict[tuple[int, bool, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
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
    return list(groups.values())


def build_optimizer(
    model: Classifier, config: OptimizerConfig, peak: float | None = None
) -> torch.optim.Optimizer:
    """timm's optimiser of the name `config.name`, for this model's groups.

    `peak` is the highest learning rate of the run, by default `optimizer.learning_rate`: some
    optimisers (adamc, lionc, …) relate weight decay to it.
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
            f"optimizer.name: {config.name} needs second derivatives, which a training step does "
            "not compute; choose another."
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


def _options(config: OptimizerConfig, info: Any) -> dict[str, Any]:
    """The settings that are not null. One that this optimiser does not have is an error, since
    timm's factory would drop it silently.
    """
    own: dict[str, Any] | None = None
    if not isinstance(info.opt_class, str):  # a string: of another package, not imported yet
        signature = inspect.signature(info.opt_class).parameters
        own = {name: parameter.default for name, parameter in signature.items()}
    given = {"betas": config.betas, "eps": config.eps, "momentum": config.momentum}
    options = {name: value for name, value in given.items() if value is not None}
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
