"""`vision export`: write a model to a folder, to be run without this project.

The file is read back, run by the library that it is for, and compared with the model on images and
on noise; the export fails if probabilities differ by more than a limit.
"""

import json
import logging
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vision.config import ConfigError, UserError
from vision.data.sources.shapes import Shapes
from vision.inference.configs import ExportConfig
from vision.inference.export_readme import readme
from vision.inference.predict import Loaded, beside_checkpoint
from vision.models.layers import probabilities, static_bias
from vision.terminal import tracked

if TYPE_CHECKING:
    from onnxruntime import InferenceSession  # type: ignore[import-untyped]

FILES = {"onnx": "model.onnx", "torch_export": "model.pt2", "safetensors": "model.safetensors"}
BATCHES = (1, 2, 5)
"""Batch sizes that an export is tested with; none of them is the one that it was traced with."""
TRACED_BATCH = 3


class ExportError(UserError):
    """An export whose outputs differ from those of the model."""


@dataclass(frozen=True)
class Exported:
    """The file of an export, and its deviation from the model."""

    file: Path
    difference: float
    """Largest difference of a probability."""


def export(loaded: Loaded, config: ExportConfig) -> Exported:
    """Write the model in a format, with its preprocessing, its classes and a README.

    The folder appears only after the exported model has been run and compared.
    """
    folder = config.output or (
        beside_checkpoint(config.checkpoint, loaded.opened.path) / "export" / config.format
    )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"output: {folder} already exists; remove it or choose another.")
    loaded.model.requires_grad_(False).cpu()
    with _scratch(folder) as part:
        file = part / FILES[config.format]
        run = _write(loaded, config, file)
        difference = largest_difference(loaded, run)
        if not difference <= config.tolerance:
            raise ExportError(
                f"{config.format}: probabilities differ by up to {difference:.2g} from the "
                f"model's, more than tolerance={config.tolerance:g}; nothing was written."
            )
        preprocess = asdict(loaded.preprocess)
        del preprocess["origin"]
        texts = {
            "preprocess.json": json.dumps(preprocess, indent=1),
            "model.json": json.dumps(loaded.opened.config.model_dump(mode="json"), indent=1),
            "classes.txt": "\n".join(loaded.classes) + "\n",
            "README.md": readme(config.format, file.name, loaded, difference),
        }
        if loaded.opened.multi_label:
            limits = dict(zip(loaded.classes, loaded.opened.thresholds, strict=True))
            texts["thresholds.json"] = json.dumps(limits, indent=1, ensure_ascii=False)
        for name, text in texts.items():
            part.joinpath(name).write_text(text, encoding="utf-8")
        shutil.copymode(part / "README.md", file)  # some libraries write files for the owner only
        part.rename(folder)
    return Exported(folder / file.name, difference)


def largest_difference(loaded: Loaded, run: Callable[[Tensor], Tensor]) -> float:
    """Largest difference between the probabilities of the model and of the export; NaN if one is
    NaN.
    """
    gaps = []
    with torch.no_grad(), static_bias(loaded.model):
        for images in tracked(_inputs(loaded), "comparing", len(BATCHES)):
            activation = loaded.model.activation
            expected = probabilities(loaded.model(images).double(), activation)
            found = probabilities(run(images).double(), activation)
            if found.shape != expected.shape:
                raise ExportError(
                    f"the export gives {tuple(found.shape)}, not {tuple(expected.shape)}."
                )
            gaps.append((found - expected).abs().max())
    return float(torch.stack(gaps).max())


def _inputs(loaded: Loaded) -> Iterator[Tensor]:
    """Normalised batches of several sizes: images of the embedded data set, one of them replaced
    by noise with a plain area.
    """
    generator = np.random.default_rng(0)
    drawn = Shapes((64, 64), 0, "test", max(BATCHES))
    for size in BATCHES:
        pixels = [loaded.pixels(drawn.read(i)) for i in range(size)]
        if size > 1:
            pixels[0] = generator.integers(256, size=pixels[0].shape, dtype=np.uint8)
            pixels[0][: len(pixels[0]) // 2] = 255
        yield loaded.batch(pixels)


def _write(loaded: Loaded, config: ExportConfig, file: Path) -> Callable[[Tensor], Tensor]:
    """Write the file; returns a function that runs the model in the file."""
    match config.format:
        case "onnx":
            return _onnx(loaded, config.opset, file)
        case "torch_export":
            return _program(loaded, file)
        case "safetensors":
            return _weights(loaded, file)


def _example(loaded: Loaded) -> Tensor:
    preprocess = loaded.preprocess
    return torch.zeros(TRACED_BATCH, preprocess.channels, *preprocess.image_size)


def _onnx(loaded: Loaded, opset: int, file: Path) -> Callable[[Tensor], Tensor]:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401 (torch.onnx needs it)
    except ImportError as error:
        raise ConfigError(
            f"format=onnx needs the package {error.name}: pip install 'vit-swin[export]'."
        ) from error
    with static_bias(loaded.model), _quiet():
        program = torch.onnx.export(
            loaded.model,
            (_example(loaded),),
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
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session: InferenceSession = onnxruntime.InferenceSession(
        file, options, providers=["CPUExecutionProvider"]
    )
    return lambda images: torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])


def _program(loaded: Loaded, file: Path) -> Callable[[Tensor], Tensor]:
    with static_bias(loaded.model):
        program = torch.export.export(
            loaded.model, (_example(loaded),), dynamic_shapes=({0: torch.export.Dim("batch")},)
        )
    torch.export.save(program, file)
    module = torch.export.load(file).module()
    return lambda images: module(images)


def _weights(loaded: Loaded, file: Path) -> Callable[[Tensor], Tensor]:
    from safetensors.torch import load_file, save_file

    save_file({n: t.contiguous() for n, t in loaded.model.state_dict().items()}, file)
    tensors = load_file(file)
    return lambda images: torch.func.functional_call(loaded.model, tensors, (images,))


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporter's own messages."""
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(logging.NOTSET)


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A temporary folder beside the final one, which a renaming puts in place."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(prefix=".export-", dir=folder.parent)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"output: {folder} cannot be written: {reason}.") from error
    with scratch as name:
        part = Path(name) / "export"  # with the usual permissions, unlike its parent
        part.mkdir()
        yield part
