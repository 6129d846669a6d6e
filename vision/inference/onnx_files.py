"""ONNX files of a model in fp32, fp16 and int8, and how onnxruntime runs them on a CPU."""

import copy
import logging
import statistics
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vision.config import ConfigError
from vision.inference.predict import Loaded
from vision.models.layers import Classifier, static_bias

if TYPE_CHECKING:
    from onnxruntime import InferenceSession  # type: ignore[import-untyped]

TRACED_BATCH = 3
_LAYERS = ["MatMul", "Gemm", "Conv"]
"""Operators whose weights become int8. Products of two activations, as in attention, stay as they
are: they have few operations, and int8 would cost accuracy."""
_WARM_UP, _ROUNDS = 2, 7


def example(loaded: Loaded) -> Tensor:
    """A batch to trace a model with."""
    preprocess = loaded.preprocess
    return torch.zeros(TRACED_BATCH, preprocess.channels, *preprocess.image_size)


def check_packages() -> None:
    """Raise a ConfigError that names a missing package."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401 (torch.onnx needs it)
    except ImportError as error:
        raise ConfigError(
            f"format=onnx needs the package {error.name}: pip install 'vit-swin[export]'."
        ) from error


class OnnxModel(nn.Module):
    """An ONNX file as a module, run by onnxruntime on the CPU. `threads` = 0: one for each core."""

    def __init__(self, file: Path, threads: int = 0) -> None:
        import onnxruntime

        super().__init__()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 3
        self.session: InferenceSession = onnxruntime.InferenceSession(
            file, options, providers=["CPUExecutionProvider"]
        )

    def forward(self, images: Tensor) -> Tensor:
        """Images (b c h w) → logits (b classes)"""
        return torch.from_numpy(self.session.run(["logits"], {"images": images.numpy()})[0])


class _Half(nn.Module):
    """A copy of a model that computes in fp16; images and logits are in fp32 as before."""

    def __init__(self, model: Classifier) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).half()

    def forward(self, images: Tensor) -> Tensor:
        """Images (b c h w) → logits (b classes)"""
        return self.model(images.half()).float()


def write_onnx(loaded: Loaded, opset: int, file: Path, half: bool = False) -> None:
    """Write the model, in fp16 with `half`, for batches of any size."""
    model = _Half(loaded.model) if half else loaded.model
    with static_bias(model), _quiet():
        program = torch.onnx.export(
            model,
            (example(loaded),),
            dynamo=True,
            opset_version=opset,
            input_names=["images"],
            output_names=["logits"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            verbose=False,
        )
    assert program is not None
    written = program.model.opset_imports[""]
    if written != opset:  # torch falls back to another version and only logs that
        raise ConfigError(f"opset: torch cannot write {opset}, only {written}; opset=20 is usual.")
    program.save(file, external_data=False)


def write_int8(source: Path, batches: Iterable[Tensor], folder: Path) -> dict[str, Path]:
    """Write an ONNX file with weights in int8, in two ways: with ranges of activations that every
    image determines for itself (dynamic), and with ranges from calibration batches (static).

    Weights have 7 of the 8 bits and a scale for each output channel: with 8 bits, processors
    without VNNI instructions would overflow, and the answers would depend on the processor.
    """
    import onnx
    from onnxruntime.quantization import (  # type: ignore[import-untyped]
        DynamicQuantConfig,
        QuantFormat,
        QuantType,
        StaticQuantConfig,
        quantize,
    )

    shared: dict[str, Any] = {
        "weight_type": QuantType.QInt8,
        "per_channel": True,
        "reduce_range": True,
        "extra_options": {"MatMulConstBOnly": True},
    }
    # A dynamic convolution is slower than one in fp32.
    dynamic = DynamicQuantConfig(op_types_to_quantize=_LAYERS[:2], **shared)
    static = StaticQuantConfig(
        _reader(batches),
        quant_format=QuantFormat.QDQ,
        activation_type=QuantType.QUInt8,
        op_types_to_quantize=_LAYERS,
        **shared,
    )
    written = {}
    for way, config in (("dynamic", dynamic), ("static", static)):
        model = onnx.load(source)
        del model.graph.value_info[:]  # transposing a weight would contradict the shapes in it
        written[way] = folder / f"{way}.onnx"
        with _quiet():
            quantize(model, written[way], config)
    return written


def _reader(batches: Iterable[Tensor]) -> Any:
    """Batches as onnxruntime's calibration asks for them."""
    from onnxruntime.quantization import CalibrationDataReader

    class _Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.batches = iter(batches)

        def get_next(self) -> dict[str, Any] | None:
            """The next batch; None after the last one."""
            batch = next(self.batches, None)
            return None if batch is None else {"images": batch.numpy()}

    return _Reader()


def speed_ratios(files: Mapping[str, Path], baseline: str, image: Tensor) -> dict[str, float]:
    """How many times as fast as the `baseline` each file is: CPU time of one image (1 c h w) with
    one thread, median of ratios within interleaved rounds.
    """
    models = {name: OnnxModel(file, threads=1) for name, file in files.items()}
    for model in models.values():
        for _ in range(_WARM_UP):
            model(image)
    rounds = []
    for _ in range(_ROUNDS):
        seconds = {}
        for name, model in models.items():
            start = time.process_time()
            model(image)
            seconds[name] = time.process_time() - start
        rounds.append(seconds)
    return {name: statistics.median(r[baseline] / r[name] for r in rounds) for name in models}


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporter's own messages."""
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(logging.NOTSET)
