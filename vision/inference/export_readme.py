"""The README of an export: how to run it, in Python, without this project."""

from typing import Any

_PREPARE = '''import json

import numpy as np
from PIL import Image

facts = json.load(open("preprocess.json"))
height, width = facts["image_size"]


def prepare(path):
    """A picture file as the model takes it: float32 (1, channels, height, width)."""
    image = Image.open(path).convert("RGB" if facts["channels"] == 3 else "L")
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
    "onnx": """import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
(logits,) = session.run(["logits"], {"images": prepare("photo.jpg")})
""",
    "torch_export": """import torch

module = torch.export.load("model.pt2").module()
logits = module(torch.from_numpy(prepare("photo.jpg"))).detach().numpy()
""",
    "safetensors": """from safetensors.torch import load_file

weights = load_file("model.safetensors")  # names and shapes as in this project's models
""",
}

_ANSWER = """
classes = open("classes.txt").read().splitlines()
print(classes[logits[0].argmax()])
"""


def readme(kind: str, facts: dict[str, Any], difference: float) -> str:
    """Markdown."""
    height, width = facts["preprocess"]["image_size"]
    answer = "" if kind == "safetensors" else _ANSWER
    return f"""# An image classifier ({kind})

{facts["classes"]} classes; pictures of {height} × {width} pixels; batches of any size.

Written by vision {facts["version"]}. It was run beside the original when written: the largest
difference of a probability was {difference:.1e}.

- `{_FILES[kind]}`: the model
- `preprocess.json`: size, mean, deviation, interpolation and crop ratio of its pictures
- `classes.txt`: the names of the classes, one in a line, in the order of the logits

```python
{_PREPARE}

{_RUN[kind]}{answer}```
"""


_FILES = {"onnx": "model.onnx", "torch_export": "model.pt2", "safetensors": "model.safetensors"}
