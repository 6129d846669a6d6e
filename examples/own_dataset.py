"""A data set of your own: python examples/own_dataset.py [SETTING=VALUE ...]

Anything with a length and items (image, label) will do. Images are as stored; augmentation and
normalisation are settings.
"""

import sys

import numpy as np
from torch.utils.data import Dataset

import vision


class Stripes(Dataset[tuple[np.ndarray, int]]):
    """Images with horizontal or vertical stripes in noise."""

    classes = ("horizontal", "vertical")

    def __init__(self, length: int, seed: int) -> None:
        self.length, self.seed = length, seed

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        random, label = np.random.default_rng((self.seed, index)), index % 2
        waves = 60 * np.sin(np.arange(32) / random.uniform(0.5, 2) + random.uniform(0, 6))
        image = (
            128
            + random.normal(0, 40, (32, 32, 3))
            + (waves if label else waves[:, None])[..., None]
        )
        return image.clip(0, 255).astype(np.uint8), label


if __name__ == "__main__":
    words = ["model=vit_mini", "model.patch_size=4", "data.image_size=32", "duration=3epochs"]
    result = vision.train([*words, *sys.argv[1:]], Stripes(2000, 0), validation=Stripes(400, 1))
    print(f"{result.metrics['top1']:.3f} in {result.folder}")
    print(result.model.predict(Stripes(2, 2)[0][0]).top)
