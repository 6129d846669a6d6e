"""The README of an export: how to run it, in Python."""

from typing import Any

_IMPORTS = {
    "onnx": """import json
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image, ImageOps
""",
    "torch_export": """import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
""",
    "safetensors": """import json
from pathlib import Path

import numpy as np
import torch
import vision
from PIL import Image, ImageOps
from safetensors.torch import load_file
from vision.models.configs import ModelConfig
""",
}

_PREPARE = '''
facts = json.loads(Path("preprocess.json").read_text(encoding="utf-8"))
classes = Path("classes.txt").read_text(encoding="utf-8").splitlines()
height, width = facts["image_size"]


def prepare(path):
    """An image file as the model takes it: float32 (1, channels, height, width)."""
    image = ImageOps.exif_transpose(Image.open(path))
    image = image.convert("RGB" if facts["channels"] == 3 else "L")
    around = int(height / facts["crop_ratio"]), int(width / facts["crop_ratio"])
    if around[0] * image.width >= around[1] * image.height:
        size = max(around[1], around[0] * image.width // image.height), around[0]
    else:
        size = around[1], max(around[0], around[1] * image.height // image.width)
    image = image.resize(size, getattr(Image.Resampling, facts["interpolation"].upper()))
    left, top = round((image.width - width) / 2), round((image.height - height) / 2)
    image = image.crop((left, top, left + width, top + height))
    pixels = np.asarray(image, np.float32).reshape(height, width, -1) / 255
    pixels = (pixels - facts["mean"]) / facts["std"]
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
    config, (height, width), channels=facts["channels"], classes=len(classes)
)
model.load_state_dict(load_file("model.safetensors"))
logits = model.eval()(torch.from_numpy(prepare("photo.jpg"))).detach().numpy()
""",
}

_ANSWER = """chances = np.exp(logits[0] - logits[0].max())
for number in chances.argsort()[::-1][:5]:
    print(f"{chances[number] / chances.sum():.3f}  {classes[number]}")
"""

_FILES = {"onnx": "model.onnx", "torch_export": "model.pt2", "safetensors": "model.safetensors"}
_NEEDS = {
    "onnx": "onnxruntime, numpy and Pillow",
    "torch_export": "torch, numpy and Pillow",
    "safetensors": "this project (`vision`): the file holds weights, not the program",
}


def readme(kind: str, facts: dict[str, Any], difference: float) -> str:
    """Markdown."""
    height, width = facts["preprocess"]["image_size"]
    return f"""# An image classifier ({kind})

{facts["classes"]} classes; images of {height} × {width} pixels; batches of any size.
What it needs to run: {_NEEDS[kind]}.

Written by vision {facts["version"]}. It was run beside the original when written: the largest
difference of a probability was {difference:.1e}.

- `{_FILES[kind]}`: the model
- `model.json`: its settings, such as width and depth
- `preprocess.json`: size, mean, deviation, interpolation and crop ratio of its images
- `classes.txt`: the names of the classes, one in a line, in the order of the logits

```python
{_IMPORTS[kind]}{_PREPARE}{_RUN[kind]}
{_ANSWER}```
"""
