"""What `cost` says against the built model, torch's own counters and well-known figures."""

import json
from typing import Any

import pytest
import torch
from measuring import counted_macs, kept_bytes, macs_of
from model_settings import SMALL_SWIN, SMALL_VIT, model_config, model_names, model_values
from torch import Tensor

from vision.config import ConfigError, parse
from vision.models.build import build_model
from vision.models.configs import ModelConfig
from vision.models.cost.count import AttentionCost, as_dict, cost
from vision.models.layers import Grid

KIB, MIB, GIB = 2**10, 2**20, 2**30


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
    result = cost(config, image)
    attention = result.layers[1].attention
    assert attention is not None
    assert attention.patches == attention.everywhere == entries
    found = attention.bytes("patches")
    assert (found["head"], found["heads"]) == (one, 16 * one)
    total = result.attention_bytes
    assert total is not None
    assert total["patches"] == found["blocks"] == 48 * 16 * one
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


@pytest.mark.parametrize(
    ("name", "size"),
    [("vit_registers", (70, 50)), ("swin_mini", (70, 50)), ("swinv2_mini", (48, 48))],
)
def test_attention_matrices_are_those_that_an_observer_of_the_model_sees(
    name: str, size: Grid
) -> None:
    config = model_config(name)
    model: Any = build_model(config, size).eval()
    seen: list[tuple[int, int]] = []

    def observe(weights: Tensor) -> Tensor:
        seen.append((weights.shape[1], weights[:, 0].numel()))
        return weights

    for module in model.modules():
        if hasattr(module, "observer"):
            module.observer = observe
    with torch.no_grad():
        model(torch.randn(1, 3, *size))
    groups = [row.attention for row in cost(config, size).layers if row.attention is not None]
    assert seen == [(g.heads, g.tokens) for g in groups for _ in range(g.blocks)]


def test_figures_of_a_plain_vit_have_their_closed_forms() -> None:
    embedding, blocks, head = cost(model_config("vit_base"), 224).layers
    cells, patch, c, depth, classes = 14 * 14, 3 * 16 * 16, 768, 12, 1000
    n = cells + 1
    assert embedding.parameters == patch * c + c + c + n * c
    assert embedding.macs == cells * patch * c
    assert blocks.parameters == depth * (12 * c * c + 13 * c)
    assert blocks.macs == depth * (12 * n * c * c + 2 * n * n * c)
    # Per block: input and output of two norms with their statistics, queries, keys, values, the
    # output of attention, the sums of its rows, and the MLP's hidden layer before and after GELU.
    assert blocks.activation_bytes == 4 * depth * (
        4 * n * c + 4 * n + 4 * n * c + 12 * n + 8 * n * c
    )
    assert head.parameters == 2 * c + c * classes + classes
    assert head.macs == c * classes


def test_figures_of_a_plain_swin_have_their_closed_forms() -> None:
    rows = cost(model_config("swin_tiny"), 224).layers
    assert [row.stage for row in rows] == [None, 1, 2, 2, 3, 3, 4, 4, None]
    n, c, window = 56 * 56, 96, 7 * 7
    blocks = [row for row in rows if row.attention is not None]
    mergings = [row for row in rows if row.stage is not None and row.attention is None]
    for stage, depth in enumerate((2, 2, 6, 2)):
        heads = 3 * 2**stage
        assert blocks[stage].macs == depth * (12 * n * c * c + 2 * n * window * c)
        assert blocks[stage].parameters == depth * (12 * c * c + 13 * c + 13 * 13 * heads)
        n, c = n // 4, 2 * c
        if stage < 3:
            assert mergings[stage].macs == n * (2 * c) * c
            assert mergings[stage].parameters == 2 * c * c + 2 * (2 * c)


@pytest.mark.parametrize("name", ["vit_tiny", "vit_registers", "swin_tiny", "swinv2_tiny"])
@pytest.mark.parametrize(("size", "channels"), [((224, 224), 3), ((75, 51), 1)])
def test_macs_are_those_that_torch_counts(name: str, size: Grid, channels: int) -> None:
    config = model_config(name)
    assert cost(config, size, channels).macs == counted_macs(config, size, channels)


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
    operations that are not matrix products.
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
    {"checkpoint_activations": True, "positions": "rotary"},
]
SWIN_CHANGES: list[dict[str, Any]] = [
    {},
    {"positions": "none"},
    {"positions": "absolute", "shift": False},
    {"positions": "none", "attention_dropout": 0.1},
    {"attention_dropout": 0.1, "dropout": 0.1},
    {"drop_path": 0.2, "mlp_ratio": 2.7},
    {"window": [2, 40]},
    {"checkpoint_activations": True},
    {"window": [[2, 3], [4, 4], [5, 1]]},
    {"padding": "attend"},
    {"padding": "attend", "positions": "none"},
]
VARIATIONS = [("vit_mini", SMALL_VIT | changes, (35, 50)) for changes in VIT_CHANGES] + [
    # By default each change in one of both, at a size that needs padding.
    pytest.param(
        name,
        SMALL_SWIN | changes,
        size,
        marks=[pytest.mark.slow] * (size == (32, 32) or first != number % 2),
    )
    for first, name in enumerate(("swin_mini", "swinv2_mini"))
    for number, changes in enumerate(SWIN_CHANGES)
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
    assert result.macs == counted_macs(config, size)
    assert result.activation_bytes == kept_bytes(config, size)


@pytest.mark.parametrize("name", ["vit_plain", "vit_mini", "swin_mini", "swinv2_mini"])
def test_cost_at_another_size_than_trained_is_that_of_the_model_built_for_the_latter(
    name: str,
) -> None:
    config = model_config(name, **(SMALL_VIT if name.startswith("vit") else SMALL_SWIN))
    size, trained = (44, 60), (16, 24)
    result = cost(config, size, trained_size=trained)
    model = build_model(config, trained)
    assert result.parameters == sum(p.numel() for p in model.parameters())
    assert result.macs == counted_macs(config, size, built_for=trained)
    assert result.activation_bytes == kept_bytes(config, size, built_for=trained)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_cost_is_the_same_wherever_it_is_asked_for_and_draws_no_random_numbers(
    context: Any,
) -> None:
    config = model_config("swin_mini", drop_path=0.1, dropout=0.1)
    expected, state = cost(config, 32), torch.get_rng_state()
    with context():
        assert cost(config, 32) == expected
    assert torch.equal(torch.get_rng_state(), state)


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


@pytest.mark.parametrize(
    "name", ["resnet18", "vit_tiny_patch16_224", "convnext_atto", "cait_xxs24_224"]
)
def test_timm_model_is_traced_as_it_would_run(name: str) -> None:
    config = timm_config(name)
    result = cost(config, (64, 96), classes=10)
    model = build_model(config, (64, 96), classes=10)
    assert result.parameters == sum(p.numel() for p in model.parameters())
    assert result.activation_bytes == kept_bytes(config, (64, 96), classes=10)
    assert result.attention_bytes is None
    assert result.macs == macs_of(model, (3, 64, 96))
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
def test_every_model_has_the_parameters_of_the_built_one_and_totals_that_survive_json(
    name: str,
) -> None:
    config, size = model_config(name), (96, 64)
    figures = json.loads(json.dumps(as_dict(cost(config, size, channels=1, classes=10))))
    model = build_model(config, size, channels=1, classes=10, device="meta")
    assert figures["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    for total in ("parameters", "macs", "activation_bytes"):
        assert figures[total] == sum(row[total] for row in figures["layers"]) > 0
    matrices = [row["attention"]["bytes"] for row in figures["layers"] if row["attention"]]
    assert bool(matrices) == (name not in ("timm", "lr_net_mini"))  # neighbours, no matrices
    for kind, total in (figures["attention_bytes"] or {}).items():
        assert total == sum(group[kind]["blocks"] for group in matrices)
