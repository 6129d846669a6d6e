"""Count the costs of all models of configs/model anew:

python tests/helpers/model_costs.py > vision/cli/model_costs.json
"""

import json

from vision.cli.composition import compose
from vision.cli.listing import choices
from vision.config import parse
from vision.models.cost.count import cost
from vision.training.configs import TrainConfig

SMALL = {"mini": 48, "fast": 32, "pixel": 32}
"""Models for small images, by the end of their names."""


def image_size(name: str) -> int:
    """The size of images that a model is made for."""
    if name == "swinv2_large":
        return 192
    usual = 256 if name.startswith("swinv2") else 224
    return SMALL.get(name.rpartition("_")[2], usual)


def count(name: str) -> list[int]:
    """Image size, parameters and MACs."""
    size = image_size(name)
    words = [f"model={name}", f"data.image_size={size}"]
    config = parse(TrainConfig, compose("train", words)[0]).model
    found = cost(config, size, 3, 1000)
    return [size, found.parameters, found.macs]


if __name__ == "__main__":
    names = [name for name in sorted(choices()["model"]) if name not in ("auto", "timm")]
    rows = [f" {json.dumps(name)}: {json.dumps(count(name))}" for name in names]
    print("{\n" + ",\n".join(rows) + "\n}")
