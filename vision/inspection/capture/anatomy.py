"""The parts of a model beside its attention: prefix tokens, patches, final norm, pooling, head."""

from typing import Any

from torch import nn

from vision.inspection.capture.captured import Anatomy, CaptureError, Pool
from vision.models.layers import Grid
from vision.models.lr_net import LRNet
from vision.models.swin import Swin
from vision.models.vit import ViT

HEADS = ("head", "heads", "classifier", "fc")
"""Names of the layers that map features to classes."""


def own_model(model: nn.Module) -> ViT | Swin | None:
    """The model of this project in a module, which may be a wrapper around it."""
    return next((m for m in model.modules() if isinstance(m, ViT | Swin)), None)


def anatomy_of(model: nn.Module) -> Anatomy:
    """The anatomy of any model that attention can be captured from."""
    own = own_model(model)
    if isinstance(own, ViT):
        return _own_vit(own)
    if isinstance(own, Swin):
        patch = own.patch_embed.patch
        return Anatomy((), patch, "mean", own.norm, _linear(own.head), last=own.norm)
    if any(isinstance(module, LRNet) for module in model.modules()):
        raise CaptureError(
            "An LR-Net has no attention between tokens: each pixel attends to its own "
            "neighbourhood, which no attention method follows. Choose a ViT or a Swin "
            "(model=vit_mini, model=swin_mini)."
        )
    inner: Any = _unwrapped(model)
    patch = patch_of(model)
    match type(inner).__module__.split(".")[0]:
        case "timm":
            return _timm(inner, patch)
        case "torchvision":
            return _torchvision(inner, patch)
        case "transformers":
            return _transformers(inner, patch)
        case _:
            return Anatomy(_prefix(inner), patch)


def has_head(model: nn.Module) -> bool:
    """Whether a model ends in classes: False where its head was left out and features come out."""
    inner: Any = own_model(model) or _unwrapped(model)
    inside = {id(parameter) for parameter in inner.parameters()}
    if any(id(parameter) not in inside for parameter in model.parameters()):
        return True  # layers of a wrapper make something of the features
    if getattr(inner, "num_classes", None) == 0:
        return False
    found = [getattr(inner, name, None) for name in HEADS]
    heads = [head for head in found if isinstance(head, nn.Module)]
    return not heads or any(True for head in heads for _ in head.parameters())


def is_swin(model: nn.Module) -> bool:
    """Whether a model has windows that shift."""
    return any(hasattr(m, "shift_size") or isinstance(m, Swin) for m in model.modules())


def patch_of(model: nn.Module) -> Grid:
    """The stride of the first convolution, which embeds the patches."""
    conv = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    if conv is None:
        raise CaptureError(
            f"{type(model).__name__} has no convolution that embeds patches: where its tokens lie "
            "in the image is not known."
        )
    return int(conv.stride[0]), int(conv.stride[1])


def _own_vit(model: ViT) -> Anatomy:
    config = model.config
    prefix = prefix_names(
        class_token=config.class_token,
        distillation=config.distillation_token,
        registers=config.registers,
    )
    names = {"class_token": "class", "class_token_and_mean": "class and mean"}
    names |= {"mean": "mean", "attention": "attention"}
    pool: Any = names.get(config.pool, "other")
    if config.distillation_token:
        pool = "class and distillation"
    # Layers between pooling and head leave no exact split of a logit over tokens.
    between = model.representation is not None or model.projection is not None
    head = None if between else _linear(model.head)
    after, patch = config.pool_norm == "after", model.patch_embed.patch
    return Anatomy(prefix, patch, pool, model.norm, head, after, model.blocks[-1], "output")


def _unwrapped(model: nn.Module) -> nn.Module:
    """The first module, from the outside in, that one of the known libraries made."""
    for module in model.modules():
        if type(module).__module__.split(".")[0] in ("timm", "torchvision", "transformers"):
            return module
    return model


def _timm(model: Any, patch: Grid) -> Anatomy:
    if is_swin(model):
        pool: Pool = "mean" if model.head.global_pool.pool_type == "avg" else "other"
        return Anatomy((), patch, pool, model.norm, _linear(model.head.fc), last=model.norm)
    norm = getattr(model, "norm", None)
    after = getattr(model, "fc_norm", None)
    norm_after = after is not None and not isinstance(after, nn.Identity)
    pools: dict[str, Pool] = {"token": "class", "avg": "mean"}
    pool = pools.get(getattr(model, "global_pool", ""), "other")
    if hasattr(model, "head_dist"):
        pool = "class and distillation"
    if norm_after and norm is not None and not isinstance(norm, nn.Identity):
        pool = "other"  # two norms: no exact split over tokens
    head = _linear(getattr(model, "head", None))
    last_norm = after if norm_after else norm
    return Anatomy(_prefix(model), patch, pool, last_norm, head, norm_after, norm)


def _torchvision(model: Any, patch: Grid) -> Anatomy:
    if is_swin(model):
        return Anatomy((), patch, "mean", model.norm, _linear(model.head), last=model.norm)
    if not hasattr(model, "encoder"):
        return Anatomy((), patch)
    norm, head = model.encoder.ln, _linear(getattr(model.heads, "head", None))
    return Anatomy(("class",), patch, "class", norm, head, last=norm)


def _transformers(model: Any, patch: Grid) -> Anatomy:
    base = getattr(model, getattr(model, "base_model_prefix", ""), model)
    norm = getattr(base, "layernorm", None)
    head = _linear(getattr(model, "classifier", None))
    if is_swin(model):
        return Anatomy((), patch, "mean", norm, head, last=norm)
    embeddings = getattr(base, "embeddings", None)
    registers = getattr(embeddings, "register_tokens", None)
    prefix = prefix_names(
        class_token=getattr(embeddings, "cls_token", None) is not None,
        distillation=getattr(embeddings, "distillation_token", None) is not None,
        registers=0 if registers is None else registers.shape[1],
    )
    pool: Pool = "class" if "class" in prefix else "other"
    if hasattr(model, "distillation_classifier"):
        pool = "class and distillation"
    elif head is not None and norm is not None and head.in_features == 2 * norm.weight.numel():
        pool = "class and mean"  # DINOv2 puts both side by side
    return Anatomy(prefix, patch, pool, norm, head, last=norm)


def prefix_names(*, class_token: bool, distillation: bool, registers: int) -> tuple[str, ...]:
    """The names of prefix tokens, in the order that all models share."""
    names = ["class"] * class_token + ["distillation"] * distillation
    return (*names, *(f"register {i + 1}" for i in range(registers)))


def _prefix(model: Any) -> tuple[str, ...]:
    """As timm's ViTs, and what is built like them, name their tokens."""
    class_token = getattr(model, "cls_token", None) is not None
    distillation = getattr(model, "dist_token", None) is not None
    number = int(getattr(model, "num_prefix_tokens", int(class_token) + int(distillation)))
    return prefix_names(
        class_token=class_token,
        distillation=distillation,
        registers=number - int(class_token) - int(distillation),
    )


def _linear(module: Any) -> nn.Linear | None:
    return module if isinstance(module, nn.Linear) else None
