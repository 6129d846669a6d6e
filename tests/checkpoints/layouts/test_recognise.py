"""Tables of positions, resized as the project of each layout resizes them."""

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import transformers
from model_settings import random_images
from scipy.ndimage import zoom
from timm.layers import resample_abs_pos_embed
from torch import Tensor
from torchvision.models.vision_transformer import interpolate_embeddings
from transformers.models.vit.modeling_vit import ViTEmbeddings

from vision.checkpoints.fit.tensors import resize_positions
from vision.checkpoints.layouts.recognise import Layout, resizing

OLD, NEW, WIDTH = 6, 9, 8
Project = Callable[[Tensor], Tensor]


def by_timm(table: Tensor) -> Tensor:
    return resample_abs_pos_embed(table, [NEW, NEW], [OLD, OLD], num_prefix_tokens=1)


def by_torchvision(table: Tensor) -> Tensor:
    state = OrderedDict({"encoder.pos_embedding": table})
    return interpolate_embeddings(8 * NEW, 8, state)["encoder.pos_embedding"]


def by_transformers(table: Tensor) -> Tensor:
    config = transformers.ViTConfig(hidden_size=WIDTH, image_size=8 * OLD, patch_size=8)
    embeddings = ViTEmbeddings(config)
    embeddings.position_embeddings = torch.nn.Parameter(table)
    tokens = torch.zeros(1, NEW * NEW + 1, WIDTH)
    return embeddings.interpolate_pos_encoding(tokens, 8 * NEW, 8 * NEW).detach()


def by_google(table: Tensor) -> Tensor:
    grid = table[0, 1:].view(OLD, OLD, WIDTH).numpy()
    cells = torch.from_numpy(zoom(grid, (NEW / OLD, NEW / OLD, 1), order=1))
    return torch.cat([table[:, :1], cells.reshape(1, NEW * NEW, WIDTH)], dim=1)


def by_call(**options: object) -> Project:
    """DeiT, MAE, mmpretrain, the official Swin code and DINO call torch themselves."""

    def resized(table: Tensor) -> Tensor:
        grid = table[:, 1:].reshape(1, OLD, OLD, WIDTH).permute(0, 3, 1, 2)
        cells = F.interpolate(grid, mode="bicubic", **options)  # type: ignore[arg-type]
        return torch.cat([table[:, :1], cells.flatten(2).mT], dim=1)

    return resized


PLAIN = by_call(size=(NEW, NEW), align_corners=False)
PROJECTS: dict[str, tuple[Layout, list[str], Project]] = {
    "timm": ("timm ViT", [], by_timm),
    "torchvision": ("torchvision ViT", [], by_torchvision),
    "Hugging Face": ("Hugging Face", [], by_transformers),
    "DeiT": ("DeiT", [], PLAIN),
    "MAE": ("MAE", [], PLAIN),
    "mmpretrain": ("mmpretrain", [], PLAIN),
    "official Swin": ("official Swin", [], PLAIN),
    "DINO": ("DINO", ["mask_token"], by_call(scale_factor=((NEW + 0.1) / OLD,) * 2)),
    "DINOv2 with registers": (
        "DINO",
        ["mask_token", "register_tokens"],
        by_call(size=(NEW, NEW), antialias=True),
    ),
    "Google": ("Google npz", [], by_google),
}


@pytest.mark.parametrize("project", PROJECTS)
def test_table_of_a_layout_is_resized_as_its_project_does(project: str) -> None:
    layout, names, resize = PROJECTS[project]
    table = random_images(1, OLD * OLD + 1, WIDTH)
    method, _ = resizing(layout, names)
    found = resize_positions(table, 1, (OLD, OLD), (NEW, NEW), method)
    torch.testing.assert_close(found, resize(table), atol=2e-6, rtol=1e-5)
