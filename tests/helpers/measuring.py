"""Cost of real models on real tensors, measured by torch's own means."""

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vision.models.build import build_model
from vision.models.configs import ModelConfig
from vision.models.layers import Grid


def counted_macs(
    config: ModelConfig, size: Grid, channels: int = 3, built_for: Grid | None = None
) -> int:
    """MACs of one image as torch counts them, on the real model."""
    model = build_model(config, built_for or size, channels=channels)
    return macs_of(model, (channels, *size))


def macs_of(model: nn.Module, image: tuple[int, ...]) -> int:
    """What torch's counter sees in a forward pass, the products of attention included."""
    model.eval().requires_grad_(False)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.randn(1, *image))
    return counter.get_total_flops() // 2


def kept_bytes(
    config: ModelConfig, size: Grid, classes: int = 1000, built_for: Grid | None = None
) -> int:
    """What one more image adds to the storages that autograd keeps, on the real model."""
    return kept_by(build_model(config, built_for or size, classes=classes), (3, *size))


def kept_by(model: nn.Module, image: tuple[int, ...]) -> int:
    """The same for any model."""
    model.train()

    def kept(images: int) -> int:
        storages = {p.untyped_storage()._cdata: 0 for p in model.parameters()}
        alive = []

        def pack(tensor: Tensor) -> Tensor:
            alive.append(tensor)
            storage = tensor.untyped_storage()
            storages.setdefault(storage._cdata, storage.nbytes())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(torch.randn(images, *image))
        return sum(storages.values())

    return kept(3) - kept(2)
