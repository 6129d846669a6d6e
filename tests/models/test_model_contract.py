"""What every model of configs/model must do. A new YAML there is tested here without another line.

Models are made narrow and shallow, every other setting as it is; those that are then the same model
are tested once, under the names of all.
"""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_settings import model_config, model_names, model_values, random_images, shrink
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from vision.config import parse
from vision.models.build import build_model
from vision.models.configs import ModelConfig, TimmConfig
from vision.models.layers import Classifier, Grid
from vision.models.lr_net import LRNet
from vision.models.swin import Swin
from vision.models.swin_v2 import SwinV2
from vision.models.vit import ViT

FAMILIES: dict[str, Any] = {"vit": ViT, "swin": Swin, "swin_v2": SwinV2, "lr_net": LRNet}
TIMM = ["resnet10t", "test_vit"]
"""Small models of timm's, in place of the one in timm.yaml."""


def small_configs() -> dict[str, ModelConfig]:
    """Every model once, made small."""
    names: dict[ModelConfig, list[str]] = {}
    for name in model_names():
        values = model_values(name)
        variants = [values | {"name": n} for n in TIMM] if values["kind"] == "timm" else [values]
        for variant in variants:
            config: Any = parse(ModelConfig, shrink(variant))  # type: ignore[arg-type]
            names.setdefault(config, []).append(variant.get("name", name))
    return {"+".join(same): config for config, same in names.items()}


def choices(config: ModelConfig) -> tuple[Any, ...]:
    """What makes it another model than a size, or another name of timm's, does."""
    values = config.model_dump(exclude={"name"}).values()
    return tuple(value for value in values if isinstance(value, str | bool | None))


SMALL = small_configs()
DISTINCT = {choices(config): (name, config) for name, config in reversed(SMALL.items())}
"""The first model of each kind: those of the same choices take the same way through a compiler."""


def parametrized(configs: Iterable[tuple[str, ModelConfig]]) -> pytest.MarkDecorator:
    names, values = zip(*configs, strict=True)
    return pytest.mark.parametrize("config", values, ids=names)


FIRST = {c.kind: name for name, c in reversed(list(DISTINCT.values())) if c.kind in FAMILIES}
"""The first model of each family."""

every_model = parametrized(SMALL.items())
every_kind = parametrized(DISTINCT.values())
every_other = parametrized(item for item in SMALL.items() if item not in DISTINCT.values())
every_family = parametrized((name, SMALL[name]) for name in FIRST.values())
training_and_evaluating = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


def size_for(config: ModelConfig) -> Grid:
    """Small images of odd sides, smaller ones where every pixel is a token. Not all of timm's
    models can have odd sides.
    """
    if isinstance(config, TimmConfig):
        return (48, 32)
    return (13, 10) if getattr(config, "patch_size", None) == 1 else (45, 35)


def build(config: ModelConfig, **arguments: Any) -> Classifier:
    return build_model(config, size_for(config), **({"classes": 5} | arguments))


def images_for(config: ModelConfig, batch: int = 2, channels: int = 3) -> Tensor:
    return random_images(batch, channels, *size_for(config))


def test_configs_hold_the_models_that_are_known() -> None:
    names = set(model_names())
    assert len(names) >= 20
    assert {"vit_base", "swin_tiny", "swinv2_tiny", "timm"} <= names
    assert {name for same in SMALL for name in same.split("+")} >= names - {"timm"}


@pytest.mark.parametrize("name", model_names())
def test_model_of_full_size_is_built_on_meta(name: str) -> None:
    size = (32, 32) if name == "vit_pixel" else (224, 224)
    model = build_model(model_config(name), size, classes=10, device="meta")
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    if name != "timm":
        assert model(torch.empty(2, 3, *size, device="meta")).shape == (2, 10)


@every_model
@pytest.mark.parametrize("batch", [1, 3])
def test_model_at_an_odd_rectangular_size_gives_finite_logits(
    config: ModelConfig, batch: int
) -> None:
    model = build(config).eval()
    images = images_for(config, batch)
    features = model.forward_features(images)
    logits = model.forward_head(features)
    assert logits.shape == (batch, 5)
    assert logits.isfinite().all()
    assert torch.equal(model(images), logits)


@every_model
@pytest.mark.parametrize("channels", [1, 4])
def test_model_of_other_channels_gives_logits(config: ModelConfig, channels: int) -> None:
    model = build(config, channels=channels).eval()
    assert model(images_for(config, channels=channels)).shape == (2, 5)


@every_model
def test_model_without_classes_gives_the_features_under_its_head(config: ModelConfig) -> None:
    model, headed = build(config, classes=0).eval(), build(config).eval()
    features = model(images_for(config))
    assert features.ndim == 2
    heads = [name for name, p in headed.named_parameters() if p.shape == (5, features.shape[1])]
    names = {name for name, _ in headed.named_parameters()}
    assert {name for name, _ in model.named_parameters()} < names
    assert len(heads) == 1
    headed.load_state_dict(model.state_dict(), strict=False)
    head = heads[0].removesuffix(".weight")
    weight, bias = (headed.get_parameter(f"{head}.{part}") for part in ("weight", "bias"))
    assert torch.allclose(headed(images_for(config)), F.linear(features, weight, bias), atol=1e-5)


@every_model
def test_model_tells_an_optimiser_what_it_must_know(config: ModelConfig) -> None:
    model = build(config, device="meta")
    names = {name for name, _ in model.named_parameters()}
    spared = model.no_weight_decay()
    assert spared <= names
    assert {n for n, p in model.named_parameters() if p.ndim <= 1} <= spared
    assert names - spared
    layers = {name: model.layer_of(name) for name in names}
    last = max(layers.values())
    assert set(layers.values()) == set(range(last + 1))
    assert last >= 2
    heads = {n for n, p in model.named_parameters() if p.shape[0] == 5}
    assert {layers[name] for name in heads} == {last}


@every_model
def test_model_of_one_seed_is_one_model(config: ModelConfig) -> None:
    first, second = build(config, seed=1).state_dict(), build(config, seed=1).state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def assert_learns_a_batch_by_heart(config: ModelConfig) -> None:
    model = build(config).train()
    labels = torch.tensor([0, 1, 2, 3])
    brightness = labels.view(4, 1, 1, 1) - 1.5
    images = 0.3 * images_for(config, 4) + brightness
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
    losses = []
    for _ in range(12):
        loss = F.cross_entropy(model(images), labels)
        optimiser.zero_grad()
        loss.backward()
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0], losses


@every_kind
def test_model_learns_a_batch_by_heart(config: ModelConfig) -> None:
    assert_learns_a_batch_by_heart(config)


@pytest.mark.slow
@every_other
def test_model_of_another_size_learns_a_batch_by_heart(config: ModelConfig) -> None:
    assert_learns_a_batch_by_heart(config)


@every_kind
def test_model_runs_on_fake_tensors(config: Any) -> None:
    """Forward and backward, built as usual or among fake tensors from the start."""
    if isinstance(config, TimmConfig):
        pytest.skip("timm's models are timm's")
    built, family = build(config), FAMILIES[config.kind]
    for size in (size_for(config), (26, 39)):
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert built(torch.empty(2, 3, *size)).shape == (2, 5)
        with FakeTensorMode():
            model = family(config, size_for(config), 3, 5)
            model(torch.empty(2, 3, *size)).sum().backward()
            assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def assert_compiled_is_equal(config: ModelConfig, training: bool, backend: str) -> None:
    """As one graph, the same logits or gradients."""
    model = build(config).train(training)
    images, weighting = images_for(config), random_images(2, 5, seed=3)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    if not training:
        with torch.no_grad():
            assert torch.allclose(compiled(images), model(images), atol=1e-5)
        return
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad((compiled(images) * weighting).sum(), [*parameters.values()])
    wanted = torch.autograd.grad((model(images) * weighting).sum(), [*parameters.values()])
    for name, a, b in zip(parameters, found, wanted, strict=True):
        assert (a - b).norm().item() <= 1e-4 * b.norm().item() + 1e-5, name


@every_family
def test_model_compiled_as_one_graph_learns_the_same(config: ModelConfig) -> None:
    assert_compiled_is_equal(config, True, "aot_eager")


@pytest.mark.slow
@every_kind
@training_and_evaluating
def test_model_compiled_as_one_graph_gives_the_same_results(
    config: ModelConfig, training: bool
) -> None:
    assert_compiled_is_equal(config, training, "aot_eager")


@pytest.mark.slow
@every_kind
@training_and_evaluating
def test_model_compiled_by_inductor_gives_the_same_results(
    config: ModelConfig, training: bool
) -> None:
    assert_compiled_is_equal(config, training, "inductor")


def assert_exported_is_equal(config: ModelConfig, training: bool) -> None:
    """With any batch size, the same logits."""
    model = build(config).train(training)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (images_for(config),), dynamic_shapes=({0: batch},))
    exported = program.module()
    for size in (2, 5) if training else (1, 2, 5):  # a batch norm cannot learn from one image
        images = images_for(config, size)
        with torch.no_grad():
            assert torch.allclose(exported(images), model(images), atol=1e-5)


@every_family
def test_model_exported_with_any_batch_size_is_evaluated_the_same(config: ModelConfig) -> None:
    assert_exported_is_equal(config, False)


@pytest.mark.slow
@every_kind
@training_and_evaluating
def test_model_exported_with_any_batch_size_gives_the_same_logits(
    config: ModelConfig, training: bool
) -> None:
    assert_exported_is_equal(config, training)


@pytest.mark.slow
@every_other
@training_and_evaluating
def test_model_of_another_size_compiles_and_exports_too(
    config: ModelConfig, training: bool
) -> None:
    assert_compiled_is_equal(config, training, "aot_eager")
    assert_exported_is_equal(config, training)


slow = pytest.mark.slow


@pytest.mark.parametrize("training", [True, pytest.param(False, marks=slow)], ids=["train", "eval"])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param("vit_base", {"positions": "rotary"}, id="rotary", marks=slow),
        pytest.param("vit_base", {"positions": "fourier"}, id="fourier", marks=slow),
        pytest.param("vit_base", {"checkpoint_activations": True}, id="recomputed vit", marks=slow),
        pytest.param(
            "swin_tiny", {"checkpoint_activations": True}, id="recomputed swin", marks=slow
        ),
        pytest.param("swin_tiny", {"positions": "absolute"}, id="absolute swin", marks=slow),
        pytest.param("swinv2_tiny", {"positions": "none", "shift": False}, id="bare", marks=slow),
        pytest.param(
            "swin_tiny",
            {"padding": "attend", "window": [[4, 4], [3, 5], [2, 2], [2, 2]]},
            id="attended swin, windows of each stage",
        ),
        pytest.param("swinv2_tiny", {"padding": "attend"}, id="attended swin_v2", marks=slow),
    ],
)
def test_model_of_a_choice_without_a_yaml_compiles_and_exports(
    name: str, changes: dict[str, Any], training: bool
) -> None:
    config: Any = parse(ModelConfig, shrink(model_values(name, **changes)))  # type: ignore[arg-type]
    assert_compiled_is_equal(config, training, "aot_eager")
    assert_exported_is_equal(config, training)


@pytest.mark.slow
@every_kind
def test_model_compiled_for_one_size_is_compiled_again_for_another(config: ModelConfig) -> None:
    model = build(config).eval()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for size in (size_for(config), (61, 20)):
            images = random_images(2, 3, *size)
            assert torch.allclose(compiled(images), model(images), atol=1e-5)
