"""From a config to weights: seeds, devices, copies."""

import copy
import io
import pickle
import re
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from model_settings import SMALL_SWIN, SMALL_VIT, model_config, random_images, small_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vision.config import ConfigError
from vision.models.build import build_model
from vision.models.configs import ModelConfig
from vision.models.layers import Derived

SIZE = (36, 28)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit_base", {"registers": 2, "layer_scale": 0.1, "qk_norm": True}),
    "vit sincos2d": ("vit_base", {"positions": "sincos2d"}),
    "vit fourier": ("vit_base", {"positions": "fourier"}),
    "vit rotary": ("vit_base", {"positions": "rotary"}),
    "vit xavier": ("vit_plain", {}),
    "swin": ("swin_tiny", {}),
    "swin absolute": ("swin_tiny", {"positions": "absolute"}),
    "swin_v2": ("swinv2_tiny", {}),
}
ALL = [*FAMILIES, "timm"]


def config_of(family: str) -> ModelConfig:
    if family == "timm":
        return model_config("timm", name="resnet10t")
    name, changes = FAMILIES[family]
    small = SMALL_VIT if family.startswith("vit") else SMALL_SWIN
    return model_config(name, **(small | changes))


def build(family: str, **arguments: Any) -> Any:
    return build_model(config_of(family), SIZE, **({"classes": 5} | arguments))


def redrawn(family: str) -> Any:
    """A model whose derived tensors would be missed."""
    name, changes = FAMILIES[family]
    return small_model(name, SIZE, **changes).eval()


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("family", ALL)
def test_model_of_one_seed_has_one_set_of_weights_whatever_the_global_generator_holds(
    family: str,
) -> None:
    torch.manual_seed(1)
    first = build(family, seed=3).state_dict()
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = build(family, seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    assert same(first, second)
    other = build(family, seed=4).state_dict()
    matrices = [name for name, tensor in first.items() if tensor.ndim > 1 and tensor.std() > 0]
    assert matrices
    assert not any(torch.equal(first[name], other[name]) for name in matrices)


def test_timm_model_has_the_weights_that_timm_draws_from_the_seed() -> None:
    ours = build("timm", seed=3)
    torch.manual_seed(3)
    peer = timm.create_model("resnet10t", num_classes=5)
    assert same({f"model.{n}": t for n, t in peer.state_dict().items()}, ours.state_dict())
    images = random_images(2, 3, *SIZE)
    assert torch.equal(ours.eval()(images), peer.eval()(images))


@pytest.mark.parametrize("family", FAMILIES)
def test_model_built_on_meta_and_initialised_later_is_the_same_model(family: str) -> None:
    direct = build(family, seed=7).eval()
    later = build(family, device="meta").eval()
    assert all(parameter.is_meta for parameter in later.parameters())
    assert later(torch.empty(2, 3, *SIZE, device="meta")).shape == (2, 5)
    later.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in later.parameters():
            parameter.fill_(torch.nan)  # as memory may be
        later.init_weights(torch.Generator().manual_seed(7))
    assert same(direct.state_dict(), later.state_dict())
    images = random_images(2, 3, *SIZE)
    assert torch.equal(direct(images), later(images))


@pytest.mark.parametrize("family", FAMILIES)
def test_model_built_on_meta_and_loaded_later_is_the_same_model(family: str) -> None:
    model = redrawn(family)
    later = build(family, device="meta", classes=7).eval().to_empty(device="cpu")
    later.load_state_dict(model.state_dict(), strict=True)
    images = random_images(2, 3, *SIZE)
    assert torch.equal(model(images), later(images))


@pytest.mark.parametrize("family", FAMILIES)
def test_model_stores_its_parameters_and_nothing_derived(family: str) -> None:
    model = redrawn(family)
    assert any(isinstance(module, Derived) for module in model.modules()) or family == "vit"
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_model_copied_as_a_whole_gives_the_same_logits_on_its_own(family: str, way: str) -> None:
    model = redrawn(family)
    images = random_images(2, 3, *SIZE)
    expected = model(images)
    match way:
        case "deepcopy":
            copied = copy.deepcopy(model)
        case "pickle":
            copied = pickle.loads(pickle.dumps(model))
        case _:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            copied = torch.load(file, weights_only=False)
    assert torch.equal(copied(images), expected)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert torch.equal(model(images), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_model_that_was_in_low_precision_has_exact_derived_tensors_again(family: str) -> None:
    model = redrawn(family)
    state, images = copy.deepcopy(model.state_dict()), random_images(2, 3, *SIZE)
    expected = model(images)
    model.to(torch.bfloat16).to(torch.float32).load_state_dict(state)
    assert torch.equal(model(images), expected)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("family", FAMILIES)
def test_model_under_torch_func_gives_gradients_per_sample(family: str) -> None:
    model = redrawn(family)
    images, labels = random_images(3, 3, *SIZE), torch.arange(3)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, parameters, (image[None],))
        return F.cross_entropy(logits, label[None])

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, images, labels)
    for i in range(3):
        model.zero_grad()
        F.cross_entropy(model(images[i : i + 1]), labels[i : i + 1]).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            apart = (found[name][i] - parameter.grad).norm().item()
            assert apart < 1e-4 * parameter.grad.norm().item() + 1e-6, name


class Operations(TorchDispatchMode):
    """Notes the operations that torch carries out."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_made_without_operations_whose_sums_depend_on_threads(family: str) -> None:
    # The gradient of table[index] is an index_put that adds in another order every time when
    # several threads take part; that of index_select is not.
    model = redrawn(family).train()
    images = random_images(2, 3, *SIZE)
    with Operations() as operations:
        model(images).sum().backward()
    forbidden = {name for name in operations.names if re.match("_?(index_put|scatter|put)", name)}
    assert forbidden == set()
    assert "mm" in operations.names  # the backward pass was seen


# timm's models ----------------------------------------------------------------------------------


def test_timm_model_with_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"model\.name.*'resnet5O'.*Did you mean 'resnet5"):
        build_model(model_config("timm", name="resnet5O"), SIZE)


def test_timm_model_without_stochastic_depth_refuses_a_rate() -> None:
    with pytest.raises(ConfigError, match="vgg11"):
        build_model(model_config("timm", name="vgg11", drop_path=0.1), (64, 64), device="meta")


def test_timm_model_takes_its_drop_path_and_checkpointing() -> None:
    config = model_config(
        "timm", name="vit_tiny_patch16_224", drop_path=0.3, checkpoint_activations=True
    )
    model: Any = build_model(config, (32, 32), classes=5)
    assert model.model.grad_checkpointing
    assert model.model.blocks[-1].drop_path1.drop_prob == pytest.approx(0.3)
    assert model(random_images(2, 3, 32, 32)).shape == (2, 5)
