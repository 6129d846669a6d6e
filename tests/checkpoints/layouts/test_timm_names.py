"""Families of ViTs in timm's names: the same function at two image sizes, in 32 and in 64 bits."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from foreign_models import CLASSES, assert_equal_function, drawn
from safetensors.torch import save_file
from torch import Tensor, nn

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.open import open_model
from vision.config import ConfigError

SIZE, OTHER = (32, 32), (48, 40)
SMALL: dict[str, Any] = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 192,
    "num_heads": 3,
    "depth": 2,
    "num_classes": CLASSES,
}
DINOV3 = {"embed_dim": 128, "num_heads": 2}
EVA: dict[str, dict[str, Any]] = {
    "vit_small_patch16_dinov3": DINOV3,
    "vit_small_patch16_dinov3_qkvb": DINOV3,
    "vit_small_plus_patch16_dinov3": DINOV3,
    "vit_7b_patch16_dinov3": DINOV3 | {"global_pool": "token"},
    "vit_small_patch16_rope_224": {},
    "vit_small_patch16_rope_ape_224": {},
    "vit_small_patch16_rope_mixed_224": {},
    "vit_small_patch16_rope_mixed_ape_224": {},
    "vit_base_patch16_rope_reg1_gap_256": {},
    "vit_mediumd_patch16_rope_reg1_gap_256": {},
    "eva_giant_patch14_224": {},
    "eva_giant_patch14_clip_224": {},
    "eva02_tiny_patch14_224": {},
    "eva02_base_patch14_224": {},
    "eva02_base_patch16_clip_224": {},
    "eva02_enormous_patch14_clip_224": {},
    "vit_pe_core_base_patch16_224": {"ref_feat_shape": (4, 4)},
    "vit_pe_core_gigantic_patch14_448": {"ref_feat_shape": (4, 4)},
    "vit_pe_lang_large_patch14_448": {"ref_feat_shape": (4, 4)},
    "vit_pe_spatial_tiny_patch16_512": {"ref_feat_shape": (4, 4)},
}
VIT: dict[str, dict[str, Any]] = {
    "vit_base_patch16_clip_224": {},
    "vit_base_patch16_clip_quickgelu_224": {},
    "vit_base_patch16_siglip_224": {},
    "vit_base_patch32_siglip_256": {},
    "vit_base_patch16_siglip_gap_224": {},
    "vit_so150m_patch16_reg4_map_256": {},
    "vit_medium_patch16_gap_240": {},
    "vit_base_patch16_rpn_224": {},
    "vit_giant_patch14_reg4_dinov2": {},
    "flexivit_small": {},
    "beit3_base_patch16_224": {},
    "vit_intern300m_patch14_448": {},
    "deit_small_distilled_patch16_224": {},
    "vit_base_patch16_224": {"global_pool": "avg", "fc_norm": False},
}
OTHERS: dict[str, dict[str, Any]] = {
    "beit_base_patch16_224": {},
    "beitv2_base_patch16_224": {"use_rel_pos_bias": False, "use_shared_rel_pos_bias": True},
    "naflexvit_base_patch16_gap": {"pos_embed_grid_size": (4, 4)},
    "naflexvit_base_patch16_map": {"pos_embed_grid_size": (4, 4), "embed_proj_type": "conv"},
}
FAMILIES = EVA | VIT | OTHERS


def built(name: str) -> Any:
    """timm's model, small."""
    return drawn(timm.create_model(name, **(SMALL | FAMILIES[name])))


def written(name: str, peer: nn.Module, folder: Path) -> Path:
    """A folder as timm's `save_for_hf` writes it."""
    arguments = {k: v for k, v in (SMALL | FAMILIES[name]).items() if k != "num_classes"}
    save_file(
        {n: t.contiguous() for n, t in peer.state_dict().items()}, folder / "model.safetensors"
    )
    config = {
        "architecture": name,
        "num_classes": CLASSES,
        "global_pool": peer.global_pool,
        "model_args": arguments,
        "pretrained_cfg": {"input_size": [3, 32, 32], "mean": [0.1, 0.2, 0.3], "std": [1, 1, 1]},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def at_size(peer: Any, images: Tensor) -> Tensor:
    """The peer for images of any size and type. timm resizes its tables in 32 bits even in a model
    of 64, so here they are resized by the same call.
    """
    twin, size = copy.deepcopy(peer), tuple(images.shape[-2:])
    if hasattr(twin, "embeds") or twin.patch_embed.img_size in (None, size):
        return _rotated(twin, images)
    grid, cells = twin.patch_embed.grid_size, twin.patch_embed.num_patches
    table = None if twin.pos_embed is None else twin.pos_embed.detach().clone()
    twin.float().set_input_size(size)
    if table is not None:
        rows = table.shape[1] - cells
        image = table[:, rows:].unflatten(1, grid).permute(0, 3, 1, 2)
        new = twin.patch_embed.grid_size
        image = F.interpolate(image, new, mode="bicubic", antialias=True).flatten(2)
        twin = twin.to(images.dtype)
        twin.pos_embed = nn.Parameter(torch.cat([table[:, :rows], image.mT], dim=1))
    return _rotated(twin, images)


def _rotated(twin: Any, images: Tensor) -> Tensor:
    twin = twin.to(images.dtype).eval()
    rope = getattr(twin, "rope", None)
    if hasattr(rope, "periods"):
        rope.init_non_persistent_buffers()  # angles in the model's own type, as here
    if hasattr(rope, "t_x"):  # always multiplied with frequencies in 32 bits
        rope.t_x, rope.t_y = rope.t_x.float(), rope.t_y.float()
    return twin(images)


@pytest.mark.parametrize("name", EVA | VIT)
def test_vit_of_timm_with_a_config_computes_the_same_at_any_size(name: str, tmp_path: Path) -> None:
    peer = built(name)
    report = assert_equal_function(
        written(name, peer, tmp_path),
        lambda images: at_size(peer, images),
        peer,
        SIZE,
        OTHER,
        positions="bicubic_antialias",
    )
    assert not report.assumed


@pytest.mark.parametrize("name", OTHERS)
def test_beit_and_naflexvit_with_a_config_compute_the_same(name: str, tmp_path: Path) -> None:
    peer = built(name)
    other = (48, 48) if name.startswith("naflex") else None
    path = written(name, peer, tmp_path)
    found = open_model(path)
    assert found.image_size == SIZE
    for size in filter(None, (SIZE, other)):
        images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            expected, own = peer(images), found.model(images)
        assert (own - expected).abs().max() <= 1e-4 * expected.std()


@pytest.mark.parametrize("shared", [False, True])
def test_beit_at_another_size_has_the_tables_that_timm_resizes(shared: bool) -> None:
    options = SMALL | {"use_rel_pos_bias": not shared, "use_shared_rel_pos_bias": shared}
    peer = drawn(timm.create_model("beit_base_patch16_224", **options))
    larger = timm.create_model("beit_base_patch16_224", **(options | {"img_size": 48}))
    from timm.models.beit import checkpoint_filter_fn

    tensors = {name: tensor.clone() for name, tensor in peer.state_dict().items()}
    larger.load_state_dict(checkpoint_filter_fn(dict(tensors), larger))
    opened = open_model(tensors, image_size=48)
    images = torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, found = larger.eval()(images), opened.model(images)
    assert (found - expected).abs().max() <= 1e-4 * expected.std()
    assert any("relative.table" in name for name in opened.report.resized)


ASSUMED = {
    "vit_small_patch16_dinov3": ("rotary=dinov3", "norm_eps=1e-05", "heads=2"),
    "vit_small_patch16_rope_224": ("rotary=axial",),
    "vit_base_patch16_rope_reg1_gap_256": ("rotary=eva", "rotary_grid=16"),
    "eva02_tiny_patch14_224": ("rotary=eva", "rotary_grid=16", "positions=learned_rotary"),
    "vit_pe_core_base_patch16_224": ("rotary=pe", "rotary_grid=4", "pool_heads=8"),
    "vit_base_patch16_clip_224": ("norm_eps=1e-05", "activation=gelu"),
    "vit_base_patch16_siglip_224": ("activation=gelu",),
}


@pytest.mark.parametrize("name", ASSUMED)
def test_bare_tensors_of_a_family_open_with_its_settings_listed(name: str) -> None:
    peer = built(name)
    tensors = {n: t.clone() for n, t in peer.state_dict().items()}
    opened = open_model(tensors, trained_size=32)
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, own = peer(images), opened.model(images)
    assert (own - expected).abs().max() <= 1e-4 * expected.std()
    listed = " ".join(opened.report.assumed)
    for setting in ASSUMED[name]:
        assert setting in listed


def test_deit_iii_and_rope_with_a_table_are_asked_for() -> None:
    name = "vit_small_patch16_rope_ape_224"
    tensors = {n: t.clone() for n, t in built(name).state_dict().items()}
    with pytest.raises(ConfigError) as error:
        open_model(tensors, heads=3)
    for way in ("model.positions=learned ", "model.positions=learned_rotary model.rotary=axial"):
        assert way in str(error.value)
    found = open_model(tensors, heads=3, positions="learned_rotary", rotary="axial").config
    assert found.turns and found.rotary == "axial"  # type: ignore[union-attr]


def test_wrapped_deit_iii_is_assumed(tmp_path: Path) -> None:
    name = "vit_small_patch16_rope_ape_224"  # the same tensors
    torch.save({"model": built(name).state_dict()}, tmp_path / "weights.pth")
    found = open_model(tmp_path / "weights.pth", heads=3)
    assert found.config.positions == "learned"  # type: ignore[union-attr]
    assert any("positions=learned" in line and "DeiT-III" in line for line in found.report.assumed)


@pytest.mark.parametrize("name", ["aimv2_large_patch14_224", "vit_base_patch16_xp_224"])
def test_bare_tensors_of_another_network_are_refused_with_a_remedy(name: str) -> None:
    options = {"embed_dim": 192, "num_heads": 3, "depth": 2, "img_size": 32, "patch_size": 8}
    tensors = timm.create_model(name, **options).state_dict()
    with pytest.raises(CheckpointError, match=r"model=timm model\.name="):
        open_model(tensors, heads=3)


def test_attention_pooling_of_a_class_token_is_asked_for() -> None:
    options = SMALL | {"global_pool": "map", "pool_include_prefix": True}
    peer = drawn(timm.create_model("vit_base_patch16_224", **options))
    tensors = {name: tensor.clone() for name, tensor in peer.state_dict().items()}
    with pytest.raises(ConfigError, match=r"model\.pool=attention.*model=timm model\.name="):
        open_model(tensors)
    model = open_model(tensors, pool="attention").model
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, found = peer(images), model(images)
    assert (found - expected).abs().max() <= 1e-4 * expected.std()


def test_images_that_are_not_whole_patches_are_cut_as_timm_cuts_them(tmp_path: Path) -> None:
    name = "vit_base_patch16_siglip_224"
    options = SMALL | {"img_size": 37}
    peer = drawn(timm.create_model(name, **options))
    save_file(peer.state_dict(), tmp_path / "model.safetensors")
    config = {"architecture": name, "model_args": options}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = open_model(tmp_path)
    assert found.image_size == (32, 32)
    assert any("37" in line for line in found.report.warnings)
    images = torch.randn(2, 3, 37, 37, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, own = peer(images), found.model(images[..., :32, :32])
    assert (own - expected).abs().max() <= 1e-4 * expected.std()


def test_report_says_that_a_naflexvit_may_resize_positions_otherwise(tmp_path: Path) -> None:
    name = "naflexvit_base_patch16_gap"
    peer = built(name)
    config = written(name, peer, tmp_path) / "config.json"
    assert not open_model(tmp_path).report.warnings
    config.write_text(config.read_text().replace(name, "naflexvit_base_patch16_par_gap"))
    described = open_model(tmp_path).report
    assert any("aspect ratio" in line for line in described.warnings)
    alone = open_model(dict(peer.state_dict()), heads=2).report
    assert any("aspect ratio" in line for line in alone.assumed)


def test_projection_that_is_fused_and_split_is_refused() -> None:
    tensors = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1).state_dict()
    parts = tensors["blocks.0.attn.qkv.weight"].chunk(3)
    split = {f"blocks.0.attn.{n}_proj.weight": t for n, t in zip("qkv", parts, strict=True)}
    with pytest.raises(CheckpointError, match=r"'blocks\.0\.attn\.qkv\.weight' twice"):
        open_model(tensors | split)
