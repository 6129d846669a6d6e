"""The cost of a model whose inside is not known: its parameters, and runs on fake tensors.

Fake tensors have shapes and no contents, so hardly any memory or time is spent, yet every operation
goes the way that it would go on a CPU.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from vision.config import ConfigError
from vision.models.build import build_model
from vision.models.configs import TimmConfig
from vision.models.cost_layers import LayerCost
from vision.models.layers import Grid

OWN = "the model's own"
"""What belongs to no part of a model: tokens, position tables, operations of its `forward`."""


def traced_layers(config: TimmConfig, size: Grid, channels: int, classes: int) -> list[LayerCost]:
    """A row for each part of a timm model, in the order in which it has them."""
    built = build_model(config, size, channels=channels, classes=classes, device="meta")
    model = built.get_submodule("model")
    with FakeTensorMode():
        state = _fake_state(model)
        batches = [torch.empty(pictures, channels, *size) for pictures in (1, 2, 3)]
        try:
            shapes, macs = _forward(model, state, batches[0])
            two, three = (_kept(model, state, images) for images in batches[1:])
        except (RuntimeError, AssertionError, ValueError) as error:
            raise ConfigError(
                f"model.name={config.name}: the model cannot be run on pictures of "
                f"{size[0]} × {size[1]}: {error}"
            ) from error
    parts = {name: _count(part.parameters()) for name, part in model.named_children()}
    rows = [
        LayerCost(
            name=name,
            stage=None,
            output=shapes.get(name, ()),
            parameters=parameters,
            macs=macs.get(name, 0),
            activation_bytes=three.get(name, 0) - two.get(name, 0),
        )
        for name, parameters in [(OWN, _count(model.parameters(recurse=False))), *parts.items()]
    ]
    return [row for row in rows if row.parameters or row.macs or row.activation_bytes]


def _fake_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a model on `meta`, as fake tensors of a CPU."""
    state: dict[str, Tensor] = {
        name: torch.empty(p.shape, dtype=p.dtype, requires_grad=p.requires_grad)
        for name, p in model.named_parameters()
    }
    for name, buffer in model.named_buffers():
        state[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return state


def _forward(
    model: nn.Module, state: dict[str, Tensor], images: Tensor
) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
    """Output shape and MACs of each part."""
    shapes: dict[str, tuple[int, ...]] = {}

    def record(name: str, output: object) -> None:
        if isinstance(output, Tensor):
            shapes[name] = tuple(output.shape[1:])

    hooks = [
        part.register_forward_hook(lambda _, __, output, name=name: record(name, output))
        for name, part in model.named_children()
    ]
    model.eval()
    # The counter knows the products of the plain kernel, whatever kernel a CPU would take.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        functional_call(model, state, (images,))
    for hook in hooks:
        hook.remove()
    macs: dict[str, int] = {}
    counts = {name: sum(flops.values()) // 2 for name, flops in counter.get_flop_counts().items()}
    for name, count in counts.items():
        _, *path = name.split(".")
        # A list of modules is never called itself, so that only its entries are counted.
        if len(path) == 1 or (len(path) == 2 and ".".join(name.split(".")[:2]) not in counts):
            macs[path[0]] = macs.get(path[0], 0) + count
    macs[OWN] = counts["Global"] - sum(macs.values())
    return shapes, macs


def _kept(model: nn.Module, state: dict[str, Tensor], images: Tensor) -> dict[str, int]:
    """Bytes of the storages that autograd keeps, by the part that keeps them first."""
    kept: dict[str, int] = {}
    tracker = ModuleTracker()
    # The tensors themselves are held, so that no storage gets the identity of one that is gone.
    seen = {tensor.untyped_storage()._cdata: tensor for tensor in state.values()}

    def pack(tensor: Tensor) -> Tensor:
        key = tensor.untyped_storage()._cdata
        if key not in seen:
            seen[key] = tensor
            paths = [name.split(".") for name in tracker.parents]
            name = next((path[1] for path in paths if len(path) > 1), OWN)
            kept[name] = kept.get(name, 0) + tensor.untyped_storage().nbytes()
        return tensor

    model.train()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), tracker:
        functional_call(model, state, (images,))
    return kept


def _count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)
