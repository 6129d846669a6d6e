"""`vision export`: write a model to a folder, to be run without this project.

The file is read back, run by the library that it is for, and compared with the model on images and
on noise; the export fails if probabilities differ by more than a limit.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vision import __version__
from vision.checkpoints.new_folder import check_new, new_folder
from vision.data.sources.shapes import Shapes
from vision.inference.configs import ExportConfig
from vision.inference.onnx_files import OnnxModel, check_packages, example, write_onnx
from vision.inference.predict import Loaded, beside_checkpoint
from vision.inference.reduced_precision import (
    ExportError,
    Reduced,
    images_to_measure,
    write_reduced,
)
from vision.models.layers import probabilities, static_bias
from vision.terminal import tracked

FILES = {"onnx": "model.onnx", "torch_export": "model.pt2", "safetensors": "model.safetensors"}
BATCHES = (1, 2, 5)
"""Batch sizes that an export is tested with; none of them is the one that it was traced with."""


@dataclass(frozen=True)
class Exported:
    """The file of an export, and its deviation from the model."""

    file: Path
    difference: float
    """Largest difference of a probability."""
    reduced: Reduced | None = None
    """Of a file in fp16 or int8."""


def export(loaded: Loaded, config: ExportConfig) -> Exported:
    """Write the model in a format, with its preprocessing, its classes and a README.

    The folder appears only after the exported model has been run and compared.
    """
    name = config.format if config.precision == "fp32" else f"{config.format}-{config.precision}"
    beside = beside_checkpoint(config.checkpoint, loaded.opened.path)
    folder = config.output or beside / "export" / name
    check_new(folder)
    images = None if config.precision == "fp32" else images_to_measure(loaded, config)
    loaded.model.requires_grad_(False).cpu()
    with new_folder(folder) as part:
        file = part / FILES[config.format]
        run = _write(loaded, config, file)
        difference = largest_difference(loaded, run)
        if not difference <= config.tolerance:
            raise ExportError(
                f"{config.format}: probabilities differ by up to {difference:.2g} from the "
                f"model's, more than tolerance={config.tolerance:g}; nothing was written."
            )
        reduced = None
        if images is not None:
            full = file.rename(part.parent / "fp32.onnx")
            reduced = write_reduced(loaded, config, images, full, part.parent)
            reduced.file.rename(file)
            difference = largest_difference(loaded, OnnxModel(file))
        preprocess = asdict(loaded.preprocess)
        del preprocess["origin"]
        texts = {
            "preprocess.json": json.dumps(preprocess, indent=1),
            "model.json": json.dumps(loaded.opened.config.model_dump(mode="json"), indent=1),
            "classes.txt": "\n".join(loaded.classes) + "\n",
            "README.md": readme(config.format, file.name, loaded, difference, reduced),
        }
        if loaded.opened.multi_label:
            limits = dict(zip(loaded.classes, loaded.opened.thresholds, strict=True))
            texts["thresholds.json"] = json.dumps(limits, indent=1, ensure_ascii=False)
        for name, text in texts.items():
            part.joinpath(name).write_text(text, encoding="utf-8")
        shutil.copymode(part / "README.md", file)  # some libraries write files for the owner only
    return Exported(folder / file.name, difference, reduced)


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


def _onnx(loaded: Loaded, opset: int, file: Path) -> Callable[[Tensor], Tensor]:
    check_packages()
    write_onnx(loaded, opset, file)
    return OnnxModel(file)


def _program(loaded: Loaded, file: Path) -> Callable[[Tensor], Tensor]:
    with static_bias(loaded.model):
        program = torch.export.export(
            loaded.model, (example(loaded),), dynamic_shapes=({0: torch.export.Dim("batch")},)
        )
    torch.export.save(program, file)
    module = torch.export.load(file).module()
    return lambda images: module(images)


def _weights(loaded: Loaded, file: Path) -> Callable[[Tensor], Tensor]:
    from safetensors.torch import load_file, save_file

    save_file({n: t.contiguous() for n, t in loaded.model.state_dict().items()}, file)
    tensors = load_file(file)
    return lambda images: torch.func.functional_call(loaded.model, tensors, (images,))


# The README -------------------------------------------------------------------------------------

_IMPORTS = {
    "onnx": "import onnxruntime",
    "torch_export": "import torch",
    "safetensors": """import torch
import vision
from safetensors.torch import load_file
from vision.models.configs import ModelConfig""",
}

_PREPARE = '''
settings = json.loads(Path("preprocess.json").read_text(encoding="utf-8"))
classes = Path("classes.txt").read_text(encoding="utf-8").splitlines()
height, width = settings["image_size"]


def prepare(path):
    """Return an image file as the model takes it: float32 (1, channels, height, width)."""
    image = ImageOps.exif_transpose(Image.open(path))
    image = image.convert("RGB" if settings["channels"] == 3 else "L")
    around = int(height / settings["crop_ratio"]), int(width / settings["crop_ratio"])
    if around[0] * image.width >= around[1] * image.height:
        size = max(around[1], around[0] * image.width // image.height), around[0]
    else:
        size = around[1], max(around[0], around[1] * image.height // image.width)
    image = image.resize(size, getattr(Image.Resampling, settings["interpolation"].upper()))
    left, top = round((image.width - width) / 2), round((image.height - height) / 2)
    image = image.crop((left, top, left + width, top + height))
    pixels = np.asarray(image, np.float32).reshape(height, width, -1) / 255
    pixels = (pixels - settings["mean"]) / settings["std"]
    return pixels.transpose(2, 0, 1)[None].astype(np.float32)

'''

_RUN = {
    "onnx": """
session = onnxruntime.InferenceSession("model.onnx")
(logits,) = session.run(["logits"], {"images": prepare("photo.jpg")})
""",
    "torch_export": """
module = torch.export.load("model.pt2").module()
logits = module(torch.from_numpy(prepare("photo.jpg"))).detach().numpy()
""",
    "safetensors": """
config = vision.parse(ModelConfig, json.loads(Path("model.json").read_text(encoding="utf-8")))
model = vision.build_model(
    config, (height, width), channels=settings["channels"], classes=len(classes)
)
model.load_state_dict(load_file("model.safetensors"))
logits = model.eval()(torch.from_numpy(prepare("photo.jpg"))).detach().numpy()
""",
}

_ANSWER = """probabilities = np.exp(logits[0] - logits[0].max())
probabilities /= probabilities.sum()
for number in probabilities.argsort()[::-1][:5]:
    print(f"{probabilities[number]:.3f}  {classes[number]}")
"""

_LABELS = """thresholds = json.loads(Path("thresholds.json").read_text(encoding="utf-8"))
probabilities = 1 / (1 + np.exp(-logits[0]))
for number in probabilities.argsort()[::-1]:
    if probabilities[number] >= thresholds[classes[number]]:
        print(f"{probabilities[number]:.3f}  {classes[number]}")
"""
"""Of a model for several labels."""

_NEEDS = {
    "onnx": "onnxruntime, numpy and Pillow",
    "torch_export": "torch, numpy and Pillow",
    "safetensors": "this project (`vision`): the file holds weights, not a program",
}


def readme(kind: str, file: str, loaded: Loaded, difference: float, reduced: Reduced | None) -> str:
    """The README of an export in Markdown, with a script that runs it."""
    height, width = loaded.preprocess.image_size
    several = loaded.opened.multi_label
    more = (
        "\n- `thresholds.json`: the probability from which each class counts as present; an image "
        "may have\n  any number of classes"
        if several
        else ""
    )
    bits = "" if reduced is None else f"\n\n{reduced}."
    return f"""# An image classifier ({kind})

{len(loaded.classes)} classes; images of {height} × {width} pixels; batches of any size.
Requirements: {_NEEDS[kind]}.

Written by vision {__version__}. The export was run beside the original model: probabilities differ
by at most {difference:.1e}.{bits}

- `{file}`: the model
- `model.json`: its settings, such as width and depth
- `preprocess.json`: size, mean, standard deviation, interpolation and crop ratio of its images
- `classes.txt`: the names of the classes, one per line, in the order of the logits{more}

```python
import json
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
{_IMPORTS[kind]}
{_PREPARE}{_RUN[kind]}
{_LABELS if several else _ANSWER}```
"""
