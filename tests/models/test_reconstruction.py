"""MAE and SimMIM compute what transformers computes, from the same weights and masks."""

import math
from typing import Any

import pytest
import torch
from model_settings import model_config
from torch import Tensor
from transformers import (
    SwinConfig,
    SwinForMaskedImageModeling,
    Swinv2Config,
    Swinv2ForMaskedImageModeling,
    ViTConfig,
    ViTForMaskedImageModeling,
    ViTMAEConfig,
    ViTMAEForPreTraining,
)

from vision.checkpoints.open import load_weights
from vision.models.build import build_model
from vision.models.reconstruction import DecoderShape, MaskedAutoencoder, MaskedModel, SimMIM
from vision.models.swin import Swin
from vision.models.vit import ViT

SIZE, HIDDEN = 24, 5
BLOCK = {
    "norm1": "layernorm_before",
    "attn.proj": "attention.o_proj",
    "norm2": "layernorm_after",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": SIZE,
    "patch_size": 8,
    "layer_norm_eps": 1e-6,
}
SWIN = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [1, 2],
    "window_size": 4,
    "encoder_stride": 4,
}


def drawn(model: Any) -> Any:
    """A model whose every parameter is random: zeros and ones would hide a mistake."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.2, generator=generator)
    return model.eval()


def drawn_masks(images: int, cells: int, hidden: int) -> Tensor:
    order = torch.rand(images, cells * cells, generator=torch.Generator().manual_seed(1)).argsort(1)
    return (order < hidden).reshape(images, cells, cells)


def joined(state: dict[str, Tensor], block: str, leaf: str) -> Tensor:
    return torch.cat([state[f"{block}.attention.{part}_proj.{leaf}"] for part in "qkv"])


def images_of(size: int) -> Tensor:
    return torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(2))


def official_positions(cells: int) -> Tensor:
    """MAE's table of width 8, number by number: a class token of zeros, then cells row by row."""
    rows = [[0.0] * 8]
    for y in range(cells):
        for x in range(cells):
            angles = [place / 10_000 ** (k / 2) for place in (x, y) for k in range(2)]
            waves = (math.sin, math.cos)
            halves = (angles[:2], angles[2:])
            rows.append([wave(angle) for half in halves for wave in waves for angle in half])
    return torch.tensor([rows])


def put_linear(model: MaskedModel, name: str, state: dict[str, Tensor], theirs: str) -> None:
    module = model.get_submodule(name)
    for leaf in ("weight", "bias"):
        own = getattr(module, leaf).data
        own.copy_(state[f"{theirs}.{leaf}"].reshape(own.shape))  # a 1 × 1 convolution is linear


@pytest.mark.parametrize("normalize", [True, False])
@torch.no_grad()
def test_mae_is_that_of_transformers(normalize: bool) -> None:
    decoder = {
        "decoder_hidden_size": 8,
        "decoder_num_hidden_layers": 2,
        "decoder_num_attention_heads": 2,
        "decoder_intermediate_size": 32,
    }
    settings = ViTMAEConfig(**VIT, **decoder, mask_ratio=HIDDEN / 9, norm_pix_loss=normalize)
    theirs = drawn(ViTMAEForPreTraining(settings))
    # Some versions of transformers leave the decoder's positions at zero until weights are loaded.
    theirs.decoder.decoder_pos_embed.copy_(official_positions(SIZE // 8))
    state = theirs.state_dict()
    config = model_config("vit_mini", patch_size=8, width=16, depth=2, heads=2)
    encoder = build_model(config, (SIZE, SIZE), classes=0)
    assert isinstance(encoder, ViT)
    load_weights(encoder, {n: t for n, t in state.items() if n.startswith("vit.")})
    model = MaskedAutoencoder(encoder, DecoderShape(8, 2, 2), HIDDEN, 3, normalize).eval()
    model.mask_token.copy_(state["decoder.mask_token"])
    for ours, name in {"embed": "embed", "norm": "norm", "pred": "pred"}.items():
        put_linear(model, ours, state, f"decoder.decoder_{name}")
    for number, block in enumerate(model.decoder):
        their = f"decoder.decoder_layers.{number}"
        for ours, name in BLOCK.items():
            put_linear(model, f"decoder.{number}.{ours}", state, f"{their}.{name}")
        for leaf in ("weight", "bias"):
            getattr(block.attn.qkv, leaf).copy_(joined(state, their, leaf))
    images, masks = images_of(SIZE), drawn_masks(3, SIZE // 8, HIDDEN)
    expected = theirs(images, noise=masks.flatten(1) + torch.arange(9) / 100)
    assert torch.equal(expected.mask.bool(), masks.flatten(1))
    predicted = model(images, masks)
    torch.testing.assert_close(predicted, theirs.unpatchify(expected.logits), atol=1e-5, rtol=1e-5)
    loss = model.losses(predicted, images, masks).mean()
    torch.testing.assert_close(loss, expected.loss, atol=1e-5, rtol=1e-5)


def simmim_of(name: str) -> tuple[Any, MaskedModel]:
    """The model of transformers, and ours with its weights."""
    if name == "vit":
        theirs = drawn(ViTForMaskedImageModeling(ViTConfig(**VIT, encoder_stride=8)))
        config, size = model_config("vit_mini", patch_size=8, width=16, depth=2, heads=2), SIZE
    else:
        family = {
            "swin": (SwinConfig, SwinForMaskedImageModeling, "swin_mini"),
            "swinv2": (Swinv2Config, Swinv2ForMaskedImageModeling, "swinv2_mini"),
        }
        settings, modeling, ours = family[name]
        theirs, size = drawn(modeling(settings(**SWIN))), SWIN["image_size"]
        shape = {"width": 16, "depths": (2, 2), "heads": (1, 2), "window": 4}
        config = model_config(ours, patch_size=2, **shape)
    encoder = build_model(config, (size, size), classes=0)
    assert isinstance(encoder, ViT | Swin)
    state = theirs.state_dict()
    parts = {n: t for n, t in state.items() if not n.startswith("decoder.")}
    load_weights(encoder, parts, trained_size=size)
    model = SimMIM(encoder, 3, normalize=False).eval()
    (token,) = (tensor for n, tensor in state.items() if n.endswith("mask_token"))
    model.mask_token.data.copy_(token)
    put_linear(model, "pred", state, "decoder.0")
    return theirs, model


@pytest.mark.parametrize("name", ["vit", "swin", "swinv2"])
@torch.no_grad()
def test_simmim_is_that_of_transformers(name: str) -> None:
    theirs, model = simmim_of(name)
    size, (cells, _) = theirs.config.image_size, model.encoder.grid
    images, masks = images_of(size), drawn_masks(3, cells, cells * cells * 3 // 5)
    expected = theirs(images, bool_masked_pos=masks.flatten(1))
    predicted = model(images, masks)
    torch.testing.assert_close(predicted, expected.reconstruction, atol=1e-5, rtol=1e-5)
    loss = model.losses(predicted, images, masks).mean()
    torch.testing.assert_close(loss, expected.loss, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_mae_does_not_see_what_is_hidden() -> None:
    config = model_config("vit_mini", positions="rotary", registers=2, rotary="mixed", width=16)
    encoder = build_model(config, (32, 32), classes=0)
    assert isinstance(encoder, ViT)
    model = MaskedAutoencoder(encoder, DecoderShape(8, 1, 2), 12, 3, normalize=True).eval()
    model.init_weights(torch.Generator().manual_seed(0))
    images, masks = images_of(32), drawn_masks(3, 4, 12)
    pixels = masks.repeat_interleave(8, 1).repeat_interleave(8, 2)[:, None]
    torch.testing.assert_close(model(images, masks), model(torch.where(pixels, 9.0, images), masks))
    # With everything visible, the tokens are those of a whole image.
    everything = torch.arange(16).expand(3, -1)
    whole = encoder.forward_features(images)
    torch.testing.assert_close(encoder.forward_visible(images, everything), whole)
    some = torch.tensor([[0, 5, 6], [1, 2, 3], [9, 12, 15]])
    turned = encoder.forward_visible(images.flip(0), some.flip(0)).flip(0)
    torch.testing.assert_close(encoder.forward_visible(images, some), turned)
