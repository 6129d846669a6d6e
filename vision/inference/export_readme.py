"""The README of an export, with a script that runs it."""

from vision import __version__
from vision.inference.predict import Loaded
from vision.inference.reduced_precision import Reduced

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


def readme(
    kind: str, file: str, loaded: Loaded, difference: float, reduced: Reduced | None = None
) -> str:
    """The README of an export in Markdown."""
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
