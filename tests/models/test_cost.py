"""What `cost` says against the built model, torch's own counters and well-known figures."""

import json
from typing import Any

import pytest
import torch
from model_settings import SMALL_SWIN, SMALL_VIT, model_config, model_names, model_values
from rich.console import Console
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vision.config import ConfigError, parse
from vision.models.build import build_model
from vision.models.configs import ModelConfig
from vision.models.cost import as_dict, cost, format_bytes, table
from vision.models.cost_layers import AttentionCost
from vision.models.layers import Grid

KIB, MIB, GIB = 2**10, 2**20, 2**30
OWN = [name for name in model_names() if name != "timm"]


def counted_macs(config: ModelConfig, size: Grid, channels: int = 3) -> float:
    """What torch's counter sees in a forward pass, the products of attention included."""
    model = build_model(config, size, channels=channels, device="meta").eval()
    images = torch.empty(1, channels, *size, device="meta")
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(images)
    return counter.get_total_flops() / 2


def kept_bytes(config: ModelConfig, size: Grid, classes: int = 1000) -> int:
    """What one more picture adds to the storages that autograd keeps in training."""
    model = build_model(config, size, classes=classes).train()

    def kept(pictures: int) -> int:
        storages = {p.untyped_storage()._cdata: 0 for p in model.parameters()}
        alive = []

        def pack(tensor: Tensor) -> Tensor:
            alive.append(tensor)
            storage = tensor.untyped_storage()
            storages.setdefault(storage._cdata, storage.nbytes())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(torch.randn(pictures, 3, *size))
        return sum(storages.values())

    return kept(3) - kept(2)


def attention_of(config: ModelConfig, size: int | Grid) -> AttentionCost:
    """The attention of the first blocks."""
    return next(row.attention for row in cost(config, size).layers if row.attention is not None)


def timm_config(architecture: str) -> ModelConfig:
    return parse(ModelConfig, model_values("timm") | {"name": architecture})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("image", "patch", "entries", "one", "all_of_them"),
    [
        (224, 16, 38_416, 150.0625 * KIB, 112.55 * MIB),
        (224, 14, 65_536, 256 * KIB, 192 * MIB),
        (128, 1, 2**28, GIB, 768 * GIB),
    ],
)
def test_attention_matrices_of_patches_alone_are_the_well_known_ones(
    image: int, patch: int, entries: int, one: float, all_of_them: float
) -> None:
    config = model_config("vit_large", patch_size=patch, depth=48, heads=16)
    attention = attention_of(config, image)
    assert attention.patches == attention.everywhere == entries
    assert attention.bytes_of_head(entries) == one
    assert attention.bytes_of_heads(entries) == 16 * one
    total = cost(config, image).attention_bytes
    assert total is not None
    assert total["patches"] == attention.bytes_of_blocks(entries) == 48 * 16 * one
    assert total["patches"] == pytest.approx(all_of_them, rel=1e-3)


def test_attention_matrices_with_class_token_and_registers_grow_by_rows_and_columns() -> None:
    assert attention_of(model_config("vit_base"), 224).tokens == 197**2 == 38_809
    assert attention_of(model_config("vit_base", registers=4), 224).tokens == 201**2
    no_prefix = model_config("vit_base", class_token=False, pool="mean")
    assert attention_of(no_prefix, 224).tokens == 38_416


def test_windowed_attention_on_56_by_56_needs_one_64th_of_global_attention() -> None:
    attention = attention_of(model_config("swin_tiny"), 224)
    assert attention.patches == attention.tokens == 7 * 7 * 56 * 56
    assert attention.everywhere == 56**4 == 9_834_496
    assert attention.everywhere == 64 * attention.patches


@pytest.mark.parametrize(("size", "factor"), [((224, 448), 2), ((448, 448), 4), ((896, 896), 16)])
def test_windowed_attention_grows_with_the_area_and_global_attention_with_its_square(
    size: Grid, factor: int
) -> None:
    config = model_config("swin_tiny")
    small, large = attention_of(config, 224), attention_of(config, size)
    assert large.patches == factor * small.patches
    assert large.everywhere == factor**2 * small.everywhere


def test_windowed_attention_on_a_padded_grid_counts_whole_windows() -> None:
    attention = attention_of(model_config("swin_tiny"), (200, 230))  # 50 × 58 in windows of 7
    assert attention.patches == 49 * 56 * 63
    assert attention.everywhere == (50 * 58) ** 2


@pytest.mark.parametrize("name", OWN)
def test_parameters_of_every_model_are_those_of_the_built_one(name: str) -> None:
    config = model_config(name)
    model = build_model(config, (96, 64), channels=1, classes=10, device="meta")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert cost(config, (96, 64), channels=1, classes=10).parameters == parameters


@pytest.mark.parametrize("name", ["vit_tiny", "vit_registers", "swin_tiny", "swinv2_tiny"])
@pytest.mark.parametrize(("size", "channels"), [((224, 224), 3), ((75, 51), 1)])
def test_macs_are_those_that_torch_counts(name: str, size: Grid, channels: int) -> None:
    config = model_config(name)
    counted = counted_macs(config, size, channels)
    assert cost(config, size, channels).macs == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize(
    ("name", "size", "gmacs"),
    [
        ("vit_tiny", 224, 1.26),
        ("vit_small", 224, 4.61),
        ("vit_base", 224, 17.58),
        ("vit_large", 224, 61.60),
        ("vit_huge", 224, 167.3),
        ("swin_tiny", 224, 4.491),
        ("swin_small", 224, 8.741),
        ("swin_base", 224, 15.431),
        ("swin_large", 224, 34.53),
        ("swinv2_tiny", 256, 5.96),
        ("swinv2_small", 256, 11.58),
        ("swinv2_base", 256, 20.37),
    ],
)
def test_macs_are_within_one_percent_of_published_ones(name: str, size: int, gmacs: float) -> None:
    """Figures of timm's benchmark tables, for Swin of torchvision's `_ops`; timm's also count some
    operations that are no matrix products.
    """
    assert cost(model_config(name), size).macs / 1e9 == pytest.approx(gmacs, rel=0.01)


VIT_CHANGES: list[dict[str, Any]] = [
    {},
    {"registers": 2, "layer_scale": 0.1},
    {"positions": "fourier", "pool": "mean"},
    {"positions": "rotary", "pool": "mean", "pool_norm": "after"},
    {"positions": "rotary", "attention_dropout": 0.1},
    {"qk_norm": True, "pool_norm": "after"},
    {"qk_norm": True, "positions": "rotary", "attention_dropout": 0.1},
    {"class_token": False, "pool": "mean", "positions": "sincos2d", "dropout": 0.1},
    {"class_token_position": False, "attention_dropout": 0.1, "mlp_ratio": 2.7},
    {"positions": "none", "drop_path": 0.1},
    {"drop_path": 0.1, "drop_path_schedule": "uniform"},
]
SWIN_CHANGES: list[dict[str, Any]] = [
    {},
    {"positions": "none"},
    {"positions": "absolute", "shift": False},
    {"positions": "none", "attention_dropout": 0.1},
    {"attention_dropout": 0.1, "dropout": 0.1},
    {"drop_path": 0.2, "mlp_ratio": 2.7},
    {"window": [2, 40]},
]
VARIATIONS = [("vit_mini", SMALL_VIT | changes, (35, 50)) for changes in VIT_CHANGES] + [
    (name, SMALL_SWIN | changes, size)
    for name in ("swin_mini", "swinv2_mini")
    for changes in SWIN_CHANGES
    for size in ((32, 32), (35, 50))
]


@pytest.mark.parametrize(("name", "changes", "size"), VARIATIONS)
def test_every_figure_of_a_variation_is_that_of_the_built_model(
    name: str, changes: dict[str, Any], size: Grid
) -> None:
    config = model_config(name, **changes)
    result = cost(config, size)
    model = build_model(config, size, device="meta")
    assert result.parameters == sum(p.numel() for p in model.parameters())
    assert result.macs == pytest.approx(counted_macs(config, size), rel=0.01)
    assert result.activation_bytes == kept_bytes(config, size)


@pytest.mark.parametrize("name", ["vit_mini", "swin_mini", "swinv2_mini"])
def test_cost_without_a_head_has_the_features_as_output(name: str) -> None:
    config = model_config(name)
    result = cost(config, 32, classes=0)
    with_head = cost(config, 32, classes=10)
    width = result.layers[-1].output[0]
    assert with_head.parameters - result.parameters == 10 * width + 10
    assert with_head.macs - result.macs == 10 * width
    assert result.activation_bytes == kept_bytes(config, (32, 32), classes=0)


@pytest.mark.parametrize("name", ["vit_mini", "swin_mini", "swinv2_mini"])
def test_output_shapes_are_those_of_the_model(name: str) -> None:
    config = model_config(name)
    model = build_model(config, (32, 48), classes=10)
    features = model.forward_features(torch.randn(1, 3, 32, 48))
    rows = cost(config, (32, 48), classes=10).layers
    *grid, width = rows[-2].output
    assert features.shape[1:] == (torch.Size(grid).numel(), width)
    assert rows[-1].output == (10,)


def test_checkpointed_blocks_keep_their_inputs_only() -> None:
    rows = cost(model_config("swin_tiny", checkpoint_activations=True), 224).layers
    kept = [row.activation_bytes for row in rows if row.attention is not None]
    assert kept == [4 * blocks * 56 * 56 * 96 // 2**s for s, blocks in enumerate((2, 2, 6, 2))]


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224", "convnext_atto"])
def test_timm_model_is_traced_as_it_would_run(name: str) -> None:
    config = timm_config(name)
    result = cost(config, (64, 96), classes=10)
    model = build_model(config, (64, 96), classes=10)
    assert result.parameters == sum(p.numel() for p in model.parameters())
    assert result.activation_bytes == kept_bytes(config, (64, 96), classes=10)
    assert result.attention_bytes is None
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.eval()(torch.randn(1, 3, 64, 96))
    assert result.macs == counter.get_total_flops() // 2
    assert all(row.parameters or row.macs or row.activation_bytes for row in result.layers)


def test_timm_vit_and_this_projects_vit_cost_the_same() -> None:
    theirs = cost(timm_config("vit_tiny_patch16_224"), 224)
    ours = cost(model_config("vit_tiny"), 224)
    assert (theirs.parameters, theirs.macs) == (ours.parameters, ours.macs)
    assert theirs.activation_bytes == ours.activation_bytes


@pytest.mark.parametrize(
    "arguments",
    [{"image_size": 0}, {"image_size": (32, -1)}, {"channels": 0}, {"classes": -1}],
)
def test_impossible_geometry_is_an_error_that_names_it(arguments: dict[str, Any]) -> None:
    (name, value), *_ = arguments.items()
    with pytest.raises(ValueError, match=name) as error:
        cost(model_config("vit_mini"), **({"image_size": 32} | arguments))
    assert str(value) in str(error.value)


def test_timm_model_that_cannot_take_the_size_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"inception_v3.*8 × 8"):
        cost(timm_config("inception_v3"), 8)


@pytest.mark.parametrize("name", model_names())
def test_figures_survive_json_and_layers_add_up_to_the_totals(name: str) -> None:
    size = 64 if name == "timm" else 32
    figures = json.loads(json.dumps(as_dict(cost(model_config(name), size))))
    for total in ("parameters", "macs", "activation_bytes"):
        assert figures[total] == sum(row[total] for row in figures["layers"]) > 0
    matrices = [row["attention"]["bytes"] for row in figures["layers"] if row["attention"]]
    assert bool(matrices) == (name != "timm")
    for kind, total in (figures["attention_bytes"] or {}).items():
        assert total == sum(group[kind]["blocks"] for group in matrices)


def printed(name: str, size: int) -> str:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(table(cost(model_config(name), size)))
    return capture.get()


def test_table_of_a_vit_shows_matrices_with_and_without_prefix_tokens() -> None:
    text = printed("vit_base", 224)
    for figure in ("86,567,656", "38,416 = 150 KiB", "38,809 = 152 KiB", "12 heads 1.76 MiB"):
        assert figure in text
    assert "global" not in text  # it would repeat the column of patches alone


def test_table_of_a_swin_shows_windowed_against_global_attention() -> None:
    text = printed("swin_tiny", 224)
    for figure in ("28,288,354", "153,664 = 600 KiB", "9,834,496 = 37.5 MiB", "stage 3: 6 blocks"):
        assert figure in text
    assert "prefix" not in text


def test_table_of_a_timm_model_has_no_attention_columns() -> None:
    text = printed("timm", 224)
    assert "25,557,032" in text
    assert "attention" not in text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (1023, "1023 B"), (153_664, "150 KiB"), (1536, "1.5 KiB"), (768 * GIB, "768 GiB")],
)
def test_bytes_are_written_in_the_largest_unit_that_leaves_one(number: int, text: str) -> None:
    assert format_bytes(number) == text
