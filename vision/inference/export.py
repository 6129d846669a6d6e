"""`vision export`: a model in a folder of its own, to be run without this project.

What is written is read back, run by the library that will run it, and compared with the model on
images and on noise; the export fails if the probabilities differ by more than a limit.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor, nn

from vision import __version__
from vision.config import ConfigError, UserError
from vision.data.preprocess import normalizer
from vision.data.sources.shapes import Shapes
from vision.evaluation.configs import HUBS
from vision.inference.configs import ExportConfig
from vision.inference.export_readme import readme
from vision.inference.load import Loaded
from vision.models.layers import static_bias

if TYPE_CHECKING:
    from onnxruntime import InferenceSession  # type: ignore[import-untyped]

FILES = {"onnx": "model.onnx", "torch_export": "model.pt2", "safetensors": "model.safetensors"}
BATCHES = (1, 2, 5)
"""Sizes of the batches that an export is tried with; none of them is the one that it was made with.
"""
MADE_WITH = 3


class ExportError(UserError):
    """An export that does not do what the model does."""


@dataclass(frozen=True)
class Exported:
    """What was written, and how far it is from the model."""

    folder: Path
    file: Path
    difference: float
    """Largest difference of a probability."""


def export(loaded: Loaded, config: ExportConfig) -> Exported:
    """Write the model in a format, with preprocessing, classes and a README; checked by running it.

    The folder appears when everything in it was found to be right, and not before.
    """
    folder = config.output or _default_folder(config.checkpoint, loaded.source) / config.format
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"output: {folder} is there already; remove it or choose another.")
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
        facts = describe(loaded)
        _write_facts(part, loaded, facts)
        part.joinpath("README.md").write_text(
            readme(config.format, facts, difference), encoding="utf-8"
        )
        for written in part.iterdir():  # some libraries write files that only their owner can read
            shutil.copymode(part / "README.md", written)
        part.rename(folder)
    return Exported(folder, folder / FILES[config.format], difference)


def _write_facts(part: Path, loaded: Loaded, facts: Mapping[str, Any]) -> None:
    """What the README reads beside the model."""
    for name in ("preprocess", "model"):
        text = json.dumps(facts[name], indent=1)
        part.joinpath(f"{name}.json").write_text(text, encoding="utf-8")
    part.joinpath("classes.txt").write_text("\n".join(loaded.classes) + "\n", encoding="utf-8")


def describe(loaded: Loaded) -> dict[str, Any]:
    """What whoever runs the model must know."""
    values = asdict(loaded.preprocess)
    values.pop("origin")
    config: Any = loaded.model.config
    return {
        "preprocess": values,
        "model": config.model_dump(mode="json"),
        "classes": len(loaded.classes),
        "version": __version__,
    }


def largest_difference(loaded: Loaded, run: Callable[[Tensor], Tensor]) -> float:
    """Between the probabilities of the model and of what was written, over batches of all sizes."""
    largest = 0.0
    with torch.no_grad(), static_bias(loaded.model):
        for images in _inputs(loaded):
            expected = loaded.model(images).double().softmax(dim=1)
            found = run(images).double().softmax(dim=1)
            if found.shape != expected.shape:
                raise ExportError(
                    f"the export gives {tuple(found.shape)}, not {tuple(expected.shape)}."
                )
            gap = (found - expected).abs().max().item()
            largest = max(largest, gap) if gap == gap else float("nan")
            if gap != gap:
                break
    return largest


def _inputs(loaded: Loaded) -> Iterator[Tensor]:
    """Normalised batches of several sizes: images of the embedded data set, and one of noise with
    a plain area.
    """
    preprocess = loaded.preprocess
    generator = torch.Generator().manual_seed(0)
    normalize = normalizer(preprocess, torch.device("cpu"))
    drawn = Shapes((64, 64), 0, "test", max(BATCHES))
    pixels = [torch.from_numpy(np.array(loaded.pixels(drawn.read(i)))) for i in range(len(drawn))]
    for size in BATCHES:
        images = rearrange(torch.stack(pixels[:size]), "b h w c -> b c h w")
        if size > 1:
            images[0] = torch.randint(256, images.shape[1:], generator=generator, dtype=torch.uint8)
            images[0, :, : images.shape[2] // 2] = 255
        yield normalize(images)


def _write(loaded: Loaded, config: ExportConfig, file: Path) -> Callable[[Tensor], Tensor]:
    """Write the file; returns a function that runs what the file holds."""
    match config.format:
        case "onnx":
            return _onnx(loaded, config.opset, file)
        case "torch_export":
            return _program(loaded, file)
        case "safetensors":
            return _weights(loaded, file)


def _example(loaded: Loaded) -> Tensor:
    preprocess = loaded.preprocess
    return torch.zeros(MADE_WITH, preprocess.channels, *preprocess.image_size)


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
    if written != opset:  # torch goes on with what it could do, and only logs that
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
    model: nn.Module = loaded.model
    return lambda images: torch.func.functional_call(model, tensors, (images,))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's own progress, which goes to the terminal."""
    import logging
    import warnings

    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            for logger, level in zip(loggers, before, strict=True):
                logger.setLevel(level)


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A folder beside the one that is to be written, so that it can take its place at once."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(prefix=".export-", dir=folder.parent)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"output: {folder} cannot be written: {reason}.") from error
    with scratch as name:
        part = Path(name) / "export"  # unlike what is around it, readable as usual
        part.mkdir()
        yield part


def _default_folder(checkpoint: str, source: Path) -> Path:
    """`export` in the folder of the run, beside the file, or here for weights by name."""
    if checkpoint.startswith(HUBS):
        return Path("export")
    parent = source.parent
    return (parent.parent if parent.name == "checkpoints" else parent) / "export"
