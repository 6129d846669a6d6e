"""Evaluation of whole models: the same numbers however the images are divided."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_dir
from model_settings import CONFIGS, small_model
from omegaconf import OmegaConf
from torch import Tensor, nn

from vision.config import parse
from vision.data.batches import Batch, Loader, Pipeline, evaluation_batches
from vision.data.configs import LoaderConfig, PreprocessConfig
from vision.data.preprocess import Preprocess, normalizer, resolve_preprocess
from vision.data.sources.source import StoredImage
from vision.evaluation.evaluate import evaluate, evaluation_mode

CPU = torch.device("cpu")
SAMPLES, CLASSES = 43, 7
FAMILIES = ["vit_tiny", "swin_tiny", "swinv2_tiny"]


class Images:
    """Random images of random classes, the last one unreadable if so wished."""

    def __init__(self, broken: bool = False) -> None:
        self.classes = tuple("abcdefg")
        self.channels = 3
        self.labels = np.random.default_rng(2).integers(0, CLASSES, SAMPLES)
        self.broken = broken

    def __len__(self) -> int:
        return SAMPLES

    def name(self, index: int) -> str:
        return f"{index}.png"

    def read(self, index: int) -> StoredImage:
        if self.broken and index == SAMPLES - 1:
            return b"not an image"
        return np.random.default_rng(index).integers(0, 256, (32, 32, 3), dtype=np.uint8)


@cache
def settings(group: str, name: str) -> Any:
    with initialize_config_dir(str(CONFIGS), version_base=None):
        composed = OmegaConf.to_container(compose(f"{group}/{name}"))
    assert isinstance(composed, dict)
    return composed[group]


@cache
def preprocess() -> Preprocess:
    """Images as they are: nothing is resized or cut."""
    values = settings("preprocess", "auto") | {"crop_ratio": 1.0}
    return resolve_preprocess(parse(PreprocessConfig, values), 32, 3)


def loader(workers: int = 0, broken: bool = False) -> Loader:
    pipeline = Pipeline(Images(broken), preprocess(), None, 0, 10**6, "skip" if broken else "raise")
    config = parse(LoaderConfig, settings("loader", "default"))
    return Loader(pipeline, config, workers, max_error_share=0.5)


def run(
    model: nn.Module, batches: Any, precision: Any = "fp32", **options: Any
) -> dict[str, float]:
    return evaluate(model, batches, preprocess(), CLASSES, CPU, precision, **options)


def plain_logits(model: nn.Module, mirrored: bool = False) -> tuple[Tensor, Tensor]:
    """Logits and labels of all images, by nothing of the code under test."""
    images = torch.from_numpy(np.stack([np.asarray(Images().read(i)) for i in range(SAMPLES)]))
    mean, std = torch.tensor(preprocess().mean), torch.tensor(preprocess().std)
    numbers = ((images / 255 - mean) / std).permute(0, 3, 1, 2)
    numbers = numbers.flip(3) if mirrored else numbers
    with torch.no_grad():
        return model.eval()(numbers), torch.from_numpy(Images().labels)


@pytest.mark.parametrize("family", FAMILIES)
def test_evaluation_equals_a_plain_pass_over_all_images(family: str) -> None:
    model = small_model(family, (32, 32))
    logits, labels = plain_logits(model)
    found = run(model, evaluation_batches(loader(), 16))
    assert found["samples"] == SAMPLES
    assert found["top1"] == (logits.argmax(1) == labels).double().mean().item()
    five = (logits.topk(5).indices == labels[:, None]).any(1)
    assert found["top5"] == pytest.approx(five.double().mean().item(), rel=1e-12)
    assert found["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-6)
    assert 0 < found["top1"] < found["top5"] < 1


@pytest.mark.parametrize(
    ("family", "divisions"),
    [("vit_tiny", [(1, 1), (7, 2), (64, 3)]), ("swinv2_tiny", [(7, 1), (64, 1), (1, 4)])],
)
def test_evaluation_is_the_same_for_any_batch_size_and_ranks(
    family: str, divisions: list[tuple[int, int]]
) -> None:
    model = small_model(family, (32, 32))
    reference = run(model, evaluation_batches(loader(), SAMPLES))
    for batch_size, ranks in divisions:
        found = run_ranks(model, batch_size, ranks)
        assert found == pytest.approx(reference, rel=1e-6), (batch_size, ranks)
        for name in ("top1", "top5", "samples"):
            assert found[name] == reference[name], (name, batch_size, ranks)


@pytest.mark.parametrize("family", ["vit_tiny", "swin_tiny"])
def test_flips_at_test_time_are_beside_the_usual_numbers_and_equal_a_plain_loop(
    family: str,
) -> None:
    model = small_model(family, (32, 32))
    logits, labels = plain_logits(model)
    mean = (logits.softmax(1) + plain_logits(model, mirrored=True)[0].softmax(1)) / 2
    usual = run(model, evaluation_batches(loader(), 16))
    passes: list[int] = []
    handle = model.register_forward_hook(lambda _, inputs, __: passes.append(len(inputs[0])))
    found = run(model, evaluation_batches(loader(), 16), flip_test=True)
    handle.remove()
    assert passes == [16, 16, 16, 16, 11, 11]
    assert {name: found[name] for name in usual} == usual
    assert found.keys() - usual.keys() == {f"{name}_flipped" for name in usual} - {
        "samples_flipped"
    }
    assert found["top1_flipped"] == (mean.argmax(1) == labels).double().mean().item()
    loss = F.nll_loss(mean.log(), labels).item()
    assert found["loss_flipped"] == pytest.approx(loss, rel=1e-6)
    assert found["loss_flipped"] != pytest.approx(found["loss"], rel=1e-4)
    for ranks in (2, 4):
        divided = run_ranks(model, 7, ranks, flip_test=True)
        assert divided == pytest.approx(found, rel=1e-6)
        assert divided["top1_flipped"] == found["top1_flipped"]


def run_ranks(model: nn.Module, batch_size: int, ranks: int, **options: Any) -> dict[str, float]:
    """Several processes one after the other: each adds its sums, the last one sees them all."""
    kept: list[Tensor] = []

    def reduce(sums: Tensor) -> Tensor:
        kept.append(sums)
        return torch.stack(kept).sum(0)

    source, found = loader(), {}
    for rank in range(ranks):
        batches = evaluation_batches(source, batch_size, rank, ranks)
        found = run(model, batches, reduce=reduce, **options)
    assert len(kept) == ranks  # one exchange in each
    return found


def test_evaluation_is_the_same_for_any_number_of_workers() -> None:
    model = small_model("vit_tiny", (32, 32))
    alone = run(model, evaluation_batches(loader(workers=0), 16))
    assert run(model, evaluation_batches(loader(workers=2), 16)) == alone


def test_image_that_cannot_be_read_is_not_counted() -> None:
    model = small_model("vit_tiny", (32, 32))
    found = run(model, evaluation_batches(loader(broken=True), 16))
    logits, labels = plain_logits(model)
    assert found["samples"] == SAMPLES - 1
    assert found["top1"] == pytest.approx((logits.argmax(1) == labels)[:-1].double().mean().item())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_evaluation_in_16_bits_is_near_full_precision(family: str, precision: str) -> None:
    model = small_model(family, (32, 32))
    seen: list[torch.dtype] = []
    hook = model.head.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    narrow = run(model, evaluation_batches(loader(), 32), precision)
    hook.remove()
    assert set(seen) == {torch.bfloat16 if precision == "bf16" else torch.float16}
    full = run(model, evaluation_batches(loader(), 32))
    assert narrow["loss"] == pytest.approx(full["loss"], rel=0.02)
    assert narrow["loss"] != full["loss"]


def test_model_is_afterwards_in_the_modes_that_it_was_in() -> None:
    model = small_model("swin_tiny", (32, 32), dropout=0.5).train()
    model.patch_norm.eval()  # as a frozen part may be
    before = {name: module.training for name, module in model.named_modules()}
    seen: list[bool] = []
    hook = model.register_forward_pre_hook(lambda module, _: seen.append(module.training))
    first = run(model, evaluation_batches(loader(), 32))
    assert first == run(model, evaluation_batches(loader(), 32))  # no dropout
    hook.remove()
    assert not any(seen)
    assert {name: module.training for name, module in model.named_modules()} == before
    assert all(parameter.grad is None for parameter in model.parameters())


def test_model_is_restored_after_an_exception() -> None:
    model = small_model("swin_tiny", (32, 32)).train()

    def broken() -> Iterator[Batch]:
        yield from evaluation_batches(loader(), 32)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        run(model, broken())
    assert all(module.training for module in model.modules())
    assert model.layers[0].blocks[0].attn.held is None  # type: ignore[union-attr, index]


def test_static_biases_serve_every_batch_of_an_evaluation() -> None:
    model = small_model("swin_tiny", (32, 32))
    calls: list[int] = []
    attention = model.layers[0].blocks[0].attn  # type: ignore[union-attr, index]
    original = attention.position_bias
    attention.position_bias = lambda: (calls.append(1), original())[1]
    run(model, evaluation_batches(loader(), 7))
    assert len(calls) == 1


def test_weights_changed_between_evaluations_are_seen() -> None:
    model = small_model("swin_tiny", (32, 32))
    first = run(model, evaluation_batches(loader(), 32))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("relative_position_bias_table"):
                parameter.neg_()
    assert run(model, evaluation_batches(loader(), 32))["loss"] != first["loss"]


def test_channels_last_gives_the_same_numbers() -> None:
    model = small_model("vit_tiny", (32, 32))
    plain = run(model, evaluation_batches(loader(), 32))
    model = model.to(memory_format=torch.channels_last)
    seen: list[bool] = []
    model.register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0].is_contiguous(memory_format=torch.channels_last))
    )
    found = run(model, evaluation_batches(loader(), 32), channels_last=True)
    assert all(seen) and found == pytest.approx(plain, rel=1e-6)


@pytest.mark.slow
def test_compiled_model_gives_the_same_numbers() -> None:
    model = small_model("vit_tiny", (32, 32), depth=1).train()
    plain = run(model, evaluation_batches(loader(), 32))
    compiled: Any = torch.compile(model, backend="eager")
    assert run(compiled, evaluation_batches(loader(), 32)) == pytest.approx(plain, rel=1e-6)
    assert compiled.training and model.training


def test_model_of_another_number_of_classes_is_refused() -> None:
    model = small_model("vit_tiny", (32, 32), classes=9)
    with pytest.raises(ValueError, match="9 logits, but the data has 7 classes"):
        run(model, evaluation_batches(loader(), 32))


def test_evaluation_without_batches_is_refused() -> None:
    with pytest.raises(ValueError, match="no images to evaluate"):
        run(small_model("vit_tiny", (32, 32)), [])


def test_normalisation_is_the_one_of_training() -> None:
    seen: list[Tensor] = []
    model = small_model("vit_tiny", (32, 32))
    model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    batches = list(evaluation_batches(loader(), 32))
    run(model, batches)
    normalize = normalizer(preprocess(), CPU)
    assert all(
        torch.equal(given, normalize(batch.images))
        for given, batch in zip(seen, batches, strict=True)
    )


def test_evaluation_mode_has_no_gradients_and_restores_the_mode_of_every_module() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout())
    model[0].eval()
    with evaluation_mode(model):
        assert not model(torch.ones(1, 2)).requires_grad
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, False, True]
    assert model(torch.ones(1, 2)).requires_grad
