"""Image towers of OpenAI's CLIP and of OpenCLIP. Neither is installed: the tower is written down
here with torch's own modules, as both projects describe it.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from foreign_models import assert_equal_function, drawn
from safetensors.torch import save_file
from torch import Tensor, nn

from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.open import open_model

SIZE, OTHER = (32, 32), (48, 40)
WIDTH, PATCH, OUTPUTS = 128, 8, 20


class QuickGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class Layer(nn.Module):
    def __init__(self, heads: int, activation: nn.Module, scale: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, heads, batch_first=True)
        self.mlp = nn.Sequential()
        self.mlp.add_module("c_fc", nn.Linear(WIDTH, 200))
        self.mlp.add_module("gelu", activation)
        self.mlp.add_module("c_proj", nn.Linear(200, WIDTH))
        self.ls_1 = Scale() if scale else nn.Identity()
        self.ls_2 = Scale() if scale else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        x = x + self.ls_1(self.attn(y, y, y, need_weights=False)[0])
        return x + self.ls_2(self.mlp(self.ln_2(x)))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Tower(nn.Module):
    """`visual` of both projects."""

    def __init__(
        self,
        activation: nn.Module | None = None,
        heads: int = 2,
        scale: bool = False,
        average: bool = False,
    ) -> None:
        super().__init__()
        self.average = average
        cells = (SIZE[0] // PATCH) * (SIZE[1] // PATCH)
        self.class_embedding = nn.Parameter(torch.empty(WIDTH))
        self.positional_embedding = nn.Parameter(torch.empty(1 + cells, WIDTH))
        self.proj = nn.Parameter(torch.empty(WIDTH, OUTPUTS))
        self.conv1 = nn.Conv2d(3, WIDTH, PATCH, PATCH, bias=False)
        self.ln_pre, self.ln_post = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.transformer = nn.Module()
        layers = (Layer(heads, activation or nn.GELU(), scale) for _ in range(2))
        self.transformer.resblocks = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        x = self.conv1(images)
        first, cells = self.positional_embedding[:1], self.positional_embedding[1:]
        side = SIZE[0] // PATCH
        if x.shape[-2:] != (side, side):  # as OpenCLIP resizes its table
            grid = cells.T.reshape(1, WIDTH, side, side)
            grid = F.interpolate(grid, x.shape[-2:], mode="bicubic", antialias=True)
            cells = grid.flatten(2)[0].T
        x = x.flatten(2).transpose(1, 2)
        token = self.class_embedding.expand(len(x), 1, -1)
        x = torch.cat([token, x], dim=1) + torch.cat([first, cells])
        x = self.transformer.resblocks(self.ln_pre(x))
        pooled = x[:, 1:].mean(dim=1) if self.average else x[:, 0]
        return self.ln_post(pooled) @ self.proj


def text_tower() -> dict[str, Tensor]:
    return {
        "transformer.resblocks.0.attn.in_proj_weight": torch.ones(24, 8),
        "token_embedding.weight": torch.ones(9, 8),
        "positional_embedding": torch.ones(7, 8),
        "ln_final.weight": torch.ones(8),
        "text_projection": torch.ones(8, OUTPUTS),
        "logit_scale": torch.tensor(4.6),
    }


@pytest.mark.parametrize("prefix", ["", "visual."])
@pytest.mark.parametrize("scale", [False, True])
def test_openclip_computes_the_same(prefix: str, scale: bool, tmp_path: Path) -> None:
    peer = drawn(Tower(scale=scale))

    def stored() -> dict[str, Tensor]:
        tensors = {f"{prefix}{name}": tensor for name, tensor in peer.state_dict().items()}
        return tensors | (text_tower() if prefix else {})

    training = {f"module.{name}": tensor for name, tensor in stored().items()}
    torch.save({"epoch": 3, "state_dict": training}, tmp_path / "weights.pt")
    report = assert_equal_function(
        tmp_path / "weights.pt",
        peer,
        peer,
        SIZE,
        OTHER,
        tensors=stored,
        positions="bicubic_antialias",
    )
    assert report.layout == "CLIP"
    assumed = "\n".join(report.assumed)
    assert "heads=2" in assumed and "model.activation=quick_gelu" in assumed
    if prefix:
        assert report.ignored["token_embedding.weight"] == "belongs to the text tower"


def test_openai_computes_the_same_without_a_word(tmp_path: Path) -> None:
    """Its files hold 16-bit tensors and three numbers that OpenCLIP's do not have."""
    peer = drawn(Tower(QuickGELU())).half()
    tensors = {f"visual.{name}": tensor.clone() for name, tensor in peer.state_dict().items()}
    numbers = {"input_resolution": 32, "context_length": 77, "vocab_size": 49408}
    tensors |= text_tower() | {name: torch.tensor(value) for name, value in numbers.items()}
    torch.save(tensors, tmp_path / "weights.pt")
    peer.float()
    report = assert_equal_function(
        tmp_path / "weights.pt",
        peer,
        peer,
        SIZE,
        tensors=lambda: {f"visual.{name}": tensor for name, tensor in peer.state_dict().items()},
    )
    assert not any("activation" in line for line in report.assumed)


@pytest.mark.parametrize("heads", [1, 4])
def test_other_heads_and_activation_can_be_given(heads: int, tmp_path: Path) -> None:
    peer = drawn(Tower(QuickGELU(), heads))
    torch.save(peer.state_dict(), tmp_path / "weights.pt")
    given: dict[str, Any] = {"heads": heads, "activation": "quick_gelu"}
    report = assert_equal_function(tmp_path / "weights.pt", peer, peer, SIZE, **given)
    assert not any("heads" in line or "activation" in line for line in report.assumed)


@pytest.mark.parametrize("projected", [False, True])
def test_tower_of_timm_computes_the_same(projected: bool, tmp_path: Path) -> None:
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
    trunk = drawn(
        timm.create_model("vit_tiny_patch16_224", num_classes=0, dynamic_img_size=True, **options)
    )
    projection = drawn(nn.Linear(48, OUTPUTS, bias=False))
    peer = nn.ModuleDict({"trunk": trunk, "head": nn.ModuleDict({"proj": projection})})

    def stored() -> dict[str, Tensor]:
        names = {f"visual.{name}": tensor for name, tensor in peer.state_dict().items()}
        kept = {n: t for n, t in names.items() if projected or "head" not in n}
        return kept | {"text.ln_final.weight": torch.ones(8), "logit_scale": torch.tensor(4.6)}

    def outputs(images: Tensor) -> Tensor:
        return projection(trunk(images)) if projected else trunk(images)

    torch.save(stored(), tmp_path / "weights.pt")
    report = assert_equal_function(
        tmp_path / "weights.pt",
        outputs,
        peer,
        SIZE,
        OTHER,
        tensors=stored,
        positions="bicubic_antialias",
        double=1e-6,  # timm resizes its table in 32 bits
        heads=3,
    )
    assert report.ignored["logit_scale"] == "belongs to the text tower"


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (["visual.layer1.0.conv1.weight", "visual.conv1.weight"], "ResNet"),
        (
            [
                "visual.class_embedding",
                "visual.transformer.resblocks.0.attn.in_proj_weight",
                "visual.attn_pool.query",
            ],
            "CoCa",
        ),
    ],
)
def test_other_towers_are_refused_by_name(names: list[str], what: str, tmp_path: Path) -> None:
    torch.save({name: torch.ones(2, 2) for name in names}, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match=what):
        open_model(tmp_path / "weights.pt")


def test_projection_of_several_layers_is_refused(tmp_path: Path) -> None:
    trunk = timm.create_model("vit_tiny_patch16_224", num_classes=0, depth=1)
    tensors = {f"visual.trunk.{name}": tensor for name, tensor in trunk.state_dict().items()}
    tensors["visual.head.mlp.fc1.weight"] = torch.ones(4, 192)
    torch.save(tensors, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match=r"visual\.head\.mlp\.fc1\.weight"):
        open_model(tmp_path / "weights.pt")


def write_config(folder: Path, vision: dict[str, Any], **model: Any) -> None:
    tower = {"image_size": 32, "layers": 2, "width": WIDTH, "patch_size": PATCH} | vision
    images = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "interpolation": "bilinear"}
    text = {"context_length": 77, "width": 8, "heads": 2, "layers": 1}
    values = {"embed_dim": OUTPUTS, "vision_cfg": tower, "text_cfg": text, **model}
    content = {"model_cfg": values, "preprocess_cfg": images}
    (folder / "open_clip_config.json").write_text(json.dumps(content))


@pytest.mark.parametrize("average", [False, True])
def test_config_of_openclip_decides_what_tensors_do_not_show(average: bool, tmp_path: Path) -> None:
    peer = drawn(Tower(QuickGELU(), heads=4, average=average))
    for norm in (m for m in peer.modules() if isinstance(m, nn.LayerNorm)):
        norm.eps = 1e-3
    save_file(peer.state_dict(), tmp_path / "open_clip_model.safetensors")
    # The same repository may describe weights of another layout.
    (tmp_path / "config.json").write_text('{"model_type": "clip", "vision_config": {}}')
    pooling = {"pool_type": "avg", "final_ln_after_pool": True} if average else {}
    tower = {"head_width": 32, "norm_kwargs": {"eps": 1e-3}, **pooling}
    write_config(tmp_path, tower, quick_gelu=True)
    opened = open_model(tmp_path)
    images = torch.randn(2, 3, *SIZE, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(opened.model(images), peer(images), atol=1e-5, rtol=1e-5)
    assert opened.preprocess.mean == (0.1, 0.2, 0.3)
    assert opened.preprocess.interpolation == "bilinear"
    assert not opened.report.warnings
    assert not any("heads" in line or "activation" in line for line in opened.report.assumed)


@pytest.mark.parametrize(
    ("vision", "model", "named"),
    [
        ({"qk_norm": True}, {}, "qk_norm=True"),
        ({"attentional_pool": True}, {}, "attentional_pool=True"),
        ({"pool_type": "none"}, {}, "pool_type='none'"),
        ({"norm_kwargs": {"elementwise_affine": False}}, {}, "norm_kwargs"),
        ({"act_kwargs": {"approximate": "tanh"}}, {}, "act_kwargs"),
        ({}, {"quick_gelu": "maybe"}, "quick_gelu='maybe'"),
        ({}, {"some_switch": 2}, "some_switch=2"),
        ({"timm_model_name": "no_such_model"}, {}, "no_such_model"),
    ],
)
def test_field_of_openclip_that_is_not_understood_is_refused_by_name(
    vision: dict[str, Any], model: dict[str, Any], named: str, tmp_path: Path
) -> None:
    save_file(drawn(Tower()).state_dict(), tmp_path / "open_clip_model.safetensors")
    write_config(tmp_path, vision, **model)
    with pytest.raises(CheckpointError, match=re.escape(named)):
        open_model(tmp_path)


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_tower_of_timm_has_the_pooling_of_its_config(pool: str, tmp_path: Path) -> None:
    """OpenCLIP replaces the pooling of a built model, whose norms stay."""
    trunk = drawn(timm.create_model("test_vit", num_classes=0, img_size=32))
    trunk.reset_classifier(0, pool)
    tensors = {f"visual.trunk.{name}": tensor for name, tensor in trunk.state_dict().items()}
    save_file(tensors, tmp_path / "open_clip_model.safetensors")
    write_config(tmp_path, {"timm_model_name": "test_vit", "timm_pool": pool})
    opened = open_model(tmp_path)
    images = torch.randn(2, 3, *SIZE, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(opened.model(images), trunk(images), atol=1e-5, rtol=1e-5)
