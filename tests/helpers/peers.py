"""The same weights in this project's models and in those of timm and torchvision."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from model_settings import model_config, random_images, redraw
from torch import Tensor, nn

from vision.models.build import build_model
from vision.models.layers import Classifier, Grid

CLASSES = 11

Translate = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
"""From a peer's tensors by name, parameters or gradients of them, to ours."""

DERIVED = re.compile(r"relative_position_index|relative_coords_table|attn_mask|k_bias")


def from_timm(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """timm's ViT, Eva, Swin and Swin V2 differ from ours in a few names only."""
    names = {
        "patch_embed.norm.": "patch_norm.",
        "head.fc.": "head.",
        "pos_embed": "positions.table",
        "fc_norm.": "norm.",
        "gamma_1": "ls1.gamma",
        "gamma_2": "ls2.gamma",
    }
    return _renamed(tensors, names)


def from_torchvision_vit(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    names = {
        "class_token": "cls_token",
        "conv_proj.": "patch_embed.proj.",
        "encoder.pos_embedding": "positions.table",
        "encoder.layers.encoder_layer_": "blocks.",
        "encoder.ln.": "norm.",
        "ln_": "norm",
        "self_attention.in_proj_": "attn.qkv.",
        "self_attention.out_proj.": "attn.proj.",
        "mlp.0.": "mlp.fc1.",
        "mlp.3.": "mlp.fc2.",
        "heads.head.": "head.",
    }
    return _renamed(tensors, names)


def from_torchvision_swin(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Both versions; V2's key bias, which torchvision stores and never uses, goes."""
    names = {
        "features.0.0.": "patch_embed.proj.",
        "features.0.2.": "patch_norm.",
        "mlp.0.": "mlp.fc1.",
        "mlp.3.": "mlp.fc2.",
    }
    ours = {}
    for name, tensor in _renamed(tensors, names).items():
        name = re.sub(r"^features\.(\d+)\.", _torchvision_stage, name)
        if name.endswith("attn.qkv.bias") and any("logit_scale" in key for key in tensors):
            (
                ours[name.replace("qkv.bias", "q_bias")],
                _,
                ours[name.replace("qkv.bias", "v_bias")],
            ) = tensor.chunk(3)
        else:
            ours[name] = tensor
    return ours


def _torchvision_stage(match: re.Match[str]) -> str:
    """Odd numbers are stages, even ones the mergings before them."""
    stage, blocks = divmod(int(match[1]), 2)
    return f"layers.{stage}.blocks." if blocks else f"layers.{stage}.downsample."


def _renamed(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Tensors under new names, the first that fits; what follows from the geometry is left out."""
    ours = {}
    for name, tensor in tensors.items():
        if DERIVED.search(name):
            continue
        new = name
        for old, replacement in names.items():
            # Whole parts of names only: `norm.` is not the end of `fc_norm.`.
            new = re.sub(rf"(^|(?<=\.)){re.escape(old)}", replacement, new)
        ours[new] = tensor
    return ours


class Difference(NamedTuple):
    """How far two models are apart."""

    logits: float
    """Largest absolute difference."""
    gradients: dict[str, float]
    """Per parameter, the norm of the difference as a share of the norm."""

    @property
    def gradient(self) -> tuple[float, str]:
        """The worst parameter's, and its name."""
        return max((share, name) for name, share in self.gradients.items())


def difference(
    ours: nn.Module, peer: nn.Module, translate: Translate, images: Tensor
) -> Difference:
    """Run both on the same images, and back from the same random weighting of the logits."""
    ours.zero_grad()
    peer.zero_grad()
    logits, expected = ours(images), peer(images)
    assert logits.shape == expected.shape
    assert expected.std() > 0.3, "logits that hardly vary show nothing"
    weighting = random_images(*logits.shape, seed=5)
    (logits * weighting).sum().backward()
    (expected * weighting).sum().backward()
    found = {n: p.grad for n, p in ours.named_parameters() if p.grad is not None}
    wanted = translate({n: p.grad for n, p in peer.named_parameters() if p.grad is not None})
    assert found.keys() == wanted.keys()
    gradients = {}
    for name, gradient in wanted.items():
        apart = (found[name] - gradient).norm()
        # A window of one token has a table whose gradient is exactly zero; it must be so here too.
        gradients[name] = (apart / gradient.norm()).item() if apart > 0 else 0.0
    return Difference((logits - expected).abs().max().item(), gradients)


def counterpart(
    peer: nn.Module,
    size: Grid,
    name: str,
    translate: Translate = from_timm,
    *,
    channels: int = 3,
    clamped: bool = False,
    **changes: Any,
) -> Classifier:
    """Our model with the peer's weights, after those were redrawn. No name may be left over."""
    redraw(peer, clamped=clamped)
    config = model_config(name, **changes)
    ours = build_model(config, size, channels=channels, classes=CLASSES, device="meta")
    ours.to_empty(device="cpu")
    ours.load_state_dict(translate(peer.state_dict()), strict=True)
    return ours


def assert_equal(
    ours: nn.Module,
    peer: nn.Module,
    translate: Translate,
    images: Tensor,
    *,
    logits: float = 1e-5,
    gradients: float = 1e-4,
    modes: tuple[bool, ...] = (True, False),
) -> None:
    """Logits and gradients agree, training and evaluating."""
    for training in modes:
        found = difference(ours.train(training), peer.train(training), translate, images)
        assert found.logits < logits
        assert found.gradient < (gradients,)


def assert_different(
    ours: nn.Module, peer: nn.Module, translate: Translate, images: Tensor
) -> None:
    """Further apart than any rounding: what was taken out of one of them is missed."""
    found = difference(ours, peer, translate, images)
    assert found.logits > 1e-2
    assert found.gradient > (1e-2,)
