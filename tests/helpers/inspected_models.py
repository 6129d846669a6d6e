"""Small models of this project and of others, and slow, obvious ways to what is tested."""

from collections.abc import Callable
from typing import Any

import timm
import torch
import transformers
from model_settings import random_images, redraw, small_model
from torch import Tensor, nn
from torchvision.models import SwinTransformer, VisionTransformer
from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformerBlockV2

from vision.inspection.capture.capture import capture, evaluating, logits_of
from vision.inspection.capture.captured import Anatomy, Captured, LayerAttention
from vision.inspection.capture.token_layout import Layout, Place
from vision.models.layers import Grid

CLASSES = 7
TIMM_SWIN: dict[str, Any] = {
    "window_size": 4,
    "embed_dim": 24,
    "depths": (2, 2),
    "num_heads": (2, 4),
    "num_classes": CLASSES,
}
HF: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": 64,
    "patch_size": 16,
    "num_labels": CLASSES,
}
HF_SWIN: dict[str, Any] = {
    "image_size": 72,
    "patch_size": 4,
    "embed_dim": 24,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
    "num_labels": CLASSES,
}


def own(name: str, size: Grid, **changes: Any) -> Any:
    return small_model(name, size, **({"classes": CLASSES} | changes)).eval()


def timm_model(name: str, size: Grid, **changes: Any) -> Any:
    model = timm.create_model(name, img_size=size, **({"num_classes": CLASSES} | changes))
    return redraw(model).eval()


def torchvision_swin(version: int) -> Any:
    parts: dict[str, Any] = {}
    if version == 2:
        parts = {"block": SwinTransformerBlockV2, "downsample_layer": PatchMergingV2}
    model = SwinTransformer([4, 4], 24, [2, 2], [2, 4], [4, 4], num_classes=CLASSES, **parts)
    return redraw(model).eval()


def transformers_model(kind: str, settings: dict[str, Any], end: str = "", **changes: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")(**settings, **changes)
    return redraw(getattr(transformers, f"{kind}ForImageClassification{end}")(config)).eval()


OWN: dict[str, tuple[Callable[[], Any], Grid]] = {
    "own vit": (lambda: own("vit_base", (40, 32)), (40, 32)),
    "own vit registers": (lambda: own("vit_base", (40, 32), registers=2), (40, 32)),
    "own vit distilled": (
        lambda: own("vit_base", (40, 32), distillation_token=True, registers=1),
        (40, 32),
    ),
    "own vit class and mean": (
        lambda: own("vit_base", (40, 32), pool="class_token_and_mean"),
        (40, 32),
    ),
    "own vit mean": (
        lambda: own("vit_base", (40, 32), class_token=False, pool="mean", pool_norm="after"),
        (40, 32),
    ),
    "own swin": (lambda: own("swin_tiny", (64, 48)), (64, 48)),
    "own swin padded": (lambda: own("swin_tiny", (36, 28)), (36, 28)),
    "own swin padded, attended": (
        lambda: own("swin_tiny", (36, 28), padding="attend"),
        (36, 28),
    ),
    "own swin v2": (lambda: own("swinv2_tiny", (36, 28)), (36, 28)),
}
PEERS: dict[str, tuple[Callable[[], Any], Grid]] = {
    "timm vit": (lambda: timm_model("vit_tiny_patch16_224", (64, 48), depth=2), (64, 48)),
    "timm deit distilled": (
        lambda: timm_model("deit_tiny_distilled_patch16_224", (64, 48), depth=2),
        (64, 48),
    ),
    "timm dinov2 registers": (
        lambda: timm_model("vit_small_patch14_reg4_dinov2", (56, 70), depth=2),
        (56, 70),
    ),
    "timm eva rotary": (lambda: timm_model("eva02_tiny_patch14_224", (56, 42), depth=2), (56, 42)),
    "timm swin": (
        lambda: timm_model("swin_tiny_patch4_window7_224", (64, 96), **TIMM_SWIN),
        (64, 96),
    ),
    "timm swin padded": (
        lambda: timm_model("swin_tiny_patch4_window7_224", (72, 56), **TIMM_SWIN),
        (72, 56),
    ),
    "timm swin v2": (
        lambda: timm_model("swinv2_tiny_window8_256", (64, 32), **TIMM_SWIN),
        (64, 32),
    ),
    "torchvision vit": (
        lambda: redraw(VisionTransformer(64, 16, 2, 2, 32, 64, num_classes=CLASSES)).eval(),
        (64, 64),
    ),
    "torchvision swin": (lambda: torchvision_swin(1), (64, 96)),
    "torchvision swin padded": (lambda: torchvision_swin(1), (72, 56)),
    "torchvision swin v2": (lambda: torchvision_swin(2), (72, 56)),
    "transformers vit": (lambda: transformers_model("ViT", HF), (64, 64)),
    "transformers deit": (lambda: transformers_model("DeiT", HF), (64, 64)),
    "transformers deit teacher": (
        lambda: transformers_model("DeiT", HF, "WithTeacher"),
        (64, 64),
    ),
    "transformers dinov2 registers": (
        lambda: transformers_model("Dinov2WithRegisters", HF, num_register_tokens=4),
        (64, 48),
    ),
    "transformers swin": (lambda: transformers_model("Swin", HF_SWIN), (72, 72)),
    "transformers swin v2": (lambda: transformers_model("Swinv2", HF_SWIN), (72, 72)),
}
MODELS = OWN | PEERS


def built(name: str, batch: int = 2) -> tuple[nn.Module, Tensor]:
    """A model, and images for it."""
    make, size = MODELS[name]
    return make(), random_images(batch, 3, *size)


def verified(model: nn.Module, images: Tensor, **options: Any) -> Captured:
    """A capture whose logits were compared with those of a plain forward pass."""
    captured = capture(model, images, **options)
    if captured.logits is not None:
        with evaluating(model), torch.no_grad():
            plain = logits_of(model(images))
        assert plain is not None and plain.dtype == captured.logits.dtype
        tolerance = {torch.float32: 1e-4, torch.bfloat16: 5e-2}[plain.dtype]
        size = max(1.0, plain.abs().max().item())
        assert (plain - captured.logits).abs().max().item() <= tolerance * size
    return captured


def dense(layer: LayerAttention, values: Tensor | None = None) -> Tensor:
    """A layer's weights, or values of their shape, as (b h n n); pair by pair for windows."""
    values = layer.weights if values is None else values
    index = layer.layout.index
    if index is None:
        return values
    batch, windows, heads, size, _ = values.shape
    out = values.new_zeros(batch, heads, layer.layout.cells, layer.layout.cells)
    for w in range(windows):
        for i in range(size):
            for j in range(size):
                query, key = int(index[w, i]), int(index[w, j])
                if query >= 0 and key >= 0:
                    out[:, :, query, key] = values[:, w, :, i, j]
    return out


def merge_matrix(merged: Grid, parts: Grid) -> Tensor:
    """Row by row the parts of each merged cell, in equal shares."""
    matrix = torch.zeros(merged[0] * merged[1], parts[0] * parts[1])
    for y in range(parts[0]):
        for x in range(parts[1]):
            matrix[y // 2 * merged[1] + x // 2, y * parts[1] + x] = 1
    return matrix / matrix.sum(dim=1, keepdim=True)


def made_layer(
    weights: Tensor, layout: Layout, number: int = 0, gradient: Tensor | None = None
) -> LayerAttention:
    return LayerAttention(f"layer {number}", number, weights, layout, gradient=gradient)


def reach(layout: Layout, place: Place) -> Tensor:
    """The cells that a query can attend to: (y x), true or false."""
    if layout.index is None:
        return torch.ones(layout.grid, dtype=torch.bool)
    window, slot = layout.slot(layout.query(place))
    cells = torch.zeros(layout.cells, dtype=torch.bool)
    for key, cell in enumerate(layout.index[window].tolist()):
        if cell >= 0:
            cells[cell] = layout.allowed is None or bool(layout.allowed[window, slot, key])
    return cells.view(layout.grid)


def made_capture(layers: list[LayerAttention], tokens: Tensor | None = None) -> Captured:
    """A capture of layers that were made by hand, of a model that pools the mean of its tokens."""
    layout = layers[-1].layout
    return Captured(
        "Made",
        None,
        None,
        layers,
        len(layers),
        tokens,
        layout,
        Anatomy(layout.prefix, layout.stride, "class" if "class" in layout.prefix else "mean"),
    )


def rows_normal(matrix: Tensor) -> Tensor:
    return matrix / matrix.sum(dim=-1, keepdim=True)
