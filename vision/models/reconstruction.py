"""Masked pretraining: an encoder, and MAE's decoder or SimMIM's layer that predicts hidden pixels.

The encoder is a model of this project without a head; it is all that is kept for later. Predictions
are images: (b channels height width), the pixels of an image as it enters the encoder, or each
patch of them normalised.

Axes: b batch · n cells of the encoder's output, row by row · k visible cells · c width · y, x rows
and columns of a grid · p, q rows and columns of pixels in a cell.
"""

import math
from typing import Any, NamedTuple

import torch
from einops import rearrange, reduce, repeat
from torch import Tensor, nn

from vision.config import pair
from vision.models.configs import ViTConfig
from vision.models.layers import Classifier, Grid, init_norms, run_block, trunc_normal
from vision.models.positions.added import SinCos2d
from vision.models.stems import HiddenCells
from vision.models.swin import Swin
from vision.models.vit import HEAD, Block, ViT


class DecoderShape(NamedTuple):
    """Size of MAE's decoder."""

    width: int
    depth: int
    heads: int


class MaskedModel(Classifier):
    """An encoder and the prediction of what is hidden from it."""

    encoder: ViT | Swin
    undecayed = ViT.undecayed | Swin.undecayed | {"logit_scale", "cpb_mlp", "mask_token"}

    def __init__(self, encoder: ViT | Swin, normalize: bool) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Identity()
        self.normalize = normalize
        """Whether targets are patches of mean 0 and variance 1, as in MAE."""
        self.patch = stride(encoder)
        """Pixels of a patch that one output of the encoder predicts."""
        for name, parameter in encoder.named_parameters():
            if name.split(".")[0] in HEAD and not name.startswith("norm."):
                parameter.requires_grad_(False)  # pooling: no loss reaches it

    def forward(  # type: ignore[override] # there are no heads to take apart
        self, images: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Images (b channels height width) and a mask (b y x) of hidden tokens of the encoder's
        first grid → predicted images; without a mask the encoder's pooled features.
        """
        return self.encoder(images) if mask is None else self.predict(images, mask)

    def predict(self, images: Tensor, mask: Tensor) -> Tensor:
        """Predicted images, of hidden and visible cells alike."""
        raise NotImplementedError

    def errors(self, predicted: Tensor, target: Tensor) -> Tensor:
        """The error of each pixel."""
        raise NotImplementedError

    def losses(self, predicted: Tensor, images: Tensor, mask: Tensor) -> Tensor:
        """The mean error of each image's hidden pixels (b,), in full precision."""
        errors = self.errors(predicted.float(), self.targets(images.float()))
        errors = errors.mean(1)
        p, q = (size // cells for size, cells in zip(errors.shape[1:], mask.shape[1:], strict=True))
        cells = reduce(errors, "b (y p) (x q) -> b y x", "mean", p=p, q=q)
        hidden = mask.to(cells.dtype)
        return (cells * hidden).sum((1, 2)) / hidden.sum((1, 2))

    def targets(self, images: Tensor) -> Tensor:
        """What is predicted: the images, each patch normalised where `normalize` says so."""
        if not self.normalize:
            return images
        mean, deviation = self.patch_statistics(images)
        return (images - mean) / deviation

    def patch_statistics(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation of each patch over its pixels and channels, for every pixel of it."""
        p, q = self.patch
        patches = rearrange(images, "b c (y p) (x q) -> b y x (p q c)", p=p, q=q)
        mean = patches.mean(-1)
        deviation = (patches.var(-1) + 1e-6).sqrt()
        return self._by_pixel(mean), self._by_pixel(deviation)

    def _by_pixel(self, values: Tensor) -> Tensor:
        return repeat(values, "b y x -> b 1 (y p) (x q)", p=self.patch[0], q=self.patch[1])

    def layer_of(self, parameter: str) -> int:
        """The encoder's layers; what predicts is as deep as its last one."""
        part, _, rest = parameter.partition(".")
        return self.encoder.layer_of(rest if part == "encoder" else "norm.weight")

    def hidden_matrices(self) -> dict[str, int]:
        """Those of the encoder and of the decoder's blocks."""
        own = {f"encoder.{name}": n for name, n in self.encoder.hidden_matrices().items()}
        every = super().hidden_matrices().items()
        return own | {name: number for name, number in every if name.startswith("decoder.")}


class MaskedAutoencoder(MaskedModel):
    """MAE (He et al., CVPR 2022): the encoder sees visible patches alone; a light decoder, which
    gets a token for each hidden one, predicts pixels. The loss is the squared error.
    """

    encoder: ViT

    def __init__(
        self, encoder: ViT, shape: DecoderShape, hidden: int, channels: int, normalize: bool
    ) -> None:
        super().__init__(encoder, normalize)
        self.visible = math.prod(encoder.grid) - hidden
        """Patches of each image that the encoder sees."""
        width, eps = encoder.config.width, encoder.config.norm_eps
        config = _decoder_config(encoder.config, shape)
        self.recompute = encoder.config.checkpoint_activations
        self.mask_token = nn.Parameter(torch.empty(1, 1, shape.width))
        self.embed = nn.Linear(width, shape.width)
        self.positions = SinCos2d(encoder.grid, shape.width, open_end=True)
        self.decoder: Any = nn.ModuleList(
            Block(config, encoder.grid, drop_path=0.0) for _ in range(shape.depth)
        )
        self.norm = nn.LayerNorm(shape.width, eps=eps)
        self.pred = nn.Linear(shape.width, channels * math.prod(self.patch))

    def predict(self, images: Tensor, mask: Tensor) -> Tensor:
        """Predicted images; every mask of a batch hides the same number of patches."""
        cells, prefix = mask.shape[1] * mask.shape[2], self.encoder.prefix
        # Visible patches come first, in their order.
        kept = mask.flatten(1).byte().argsort(dim=1, stable=True)[:, : self.visible]
        x = self.embed(self.encoder.forward_visible(images, kept))
        tokens = self.mask_token.to(x.dtype).expand(len(x), cells, -1)
        index = repeat(kept, "b k -> b k c", c=x.shape[-1])
        patches = tokens.scatter(1, index, x[:, prefix:]) + self.positions(self.encoder.grid)
        x = torch.cat([x[:, :prefix].to(patches.dtype), patches], dim=1)
        for block in self.decoder:
            x = run_block(block, x, self.encoder.grid, None, None, recompute=self.recompute)
        x = self.pred(self.norm(x[:, prefix:]))
        y, p, q = mask.shape[1], *self.patch
        return rearrange(x, "b (y x) (p q c) -> b c (y p) (x q)", y=y, p=p, q=q)

    def errors(self, predicted: Tensor, target: Tensor) -> Tensor:
        """Squared errors."""
        return (predicted - target).square()

    def init_weights(self, generator: torch.Generator) -> None:
        """As in the official code; the encoder has its weights."""
        for part in (self.embed, self.decoder, self.norm, self.pred):
            init_norms(part)
            for module in part.modules():
                if isinstance(module, nn.Linear):
                    nn.init.xavier_uniform_(module.weight, generator=generator)
                    nn.init.zeros_(module.bias)
        nn.init.normal_(self.mask_token, std=0.02, generator=generator)


class SimMIM(MaskedModel):
    """SimMIM (Xie et al., CVPR 2022): a token stands for each hidden patch in the encoder's input,
    and a linear layer predicts pixels from its output. The loss is the absolute error.
    """

    def __init__(self, encoder: ViT | Swin, channels: int, normalize: bool) -> None:
        super().__init__(encoder, normalize)
        self.mask_token = nn.Parameter(torch.empty(1, 1, encoder.config.width))
        merged = stride(encoder)[0] // pair(encoder.config.patch_size)[0]
        self.pred = nn.Linear(merged * encoder.config.width, channels * math.prod(self.patch))

    def predict(self, images: Tensor, mask: Tensor) -> Tensor:
        """Predicted images."""
        encoder = self.encoder
        x = encoder.forward_features(images, HiddenCells(mask, self.mask_token.flatten()))
        if isinstance(encoder, ViT):
            x = encoder.norm(x) if encoder.config.pool_norm == "after" else x
            x = x[:, encoder.prefix :]
        p, q = self.patch
        return rearrange(
            self.pred(x), "b (y x) (c p q) -> b c (y p) (x q)", y=images.shape[2] // p, p=p, q=q
        )

    def errors(self, predicted: Tensor, target: Tensor) -> Tensor:
        """Absolute errors."""
        return (predicted - target).abs()

    def init_weights(self, generator: torch.Generator) -> None:
        """As in the official code; the encoder has its weights."""
        trunc_normal(self.mask_token, 0.02, generator)
        trunc_normal(self.pred.weight, 0.02, generator)
        nn.init.zeros_(self.pred.bias)


def stride(encoder: ViT | Swin) -> Grid:
    """Pixels along a cell of the encoder's last grid."""
    height, width = pair(encoder.config.patch_size)
    merged = 1 if isinstance(encoder, ViT) else 2 ** (len(encoder.config.depths) - 1)
    return height * merged, width * merged


def _decoder_config(config: ViTConfig, shape: DecoderShape) -> ViTConfig:
    """Plain blocks of the decoder's size, as in the official code."""
    return config.model_copy(
        update={
            "width": shape.width,
            "heads": shape.heads,
            "head_width": None,
            "mlp_ratio": 4.0,
            "mlp": "plain",
            "mlp_norm": False,
            "activation": "gelu",
            "qkv_bias": "qkv",
            "qk_norm": False,
            "attention_norm": False,
            "relative_bias": "none",
            "layer_scale": None,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        }
    )
