"""The whitening of a stem, fitted to some training images before the first step."""

import numpy as np
import torch

from vision.data.batches import build_loader
from vision.data.order import BatchRequest
from vision.data.preprocess import Preprocess, normalizer
from vision.data.sources.source import Source
from vision.models.layers import Classifier
from vision.models.stems import ConvStem
from vision.randomness import generator
from vision.training.configs import TrainConfig
from vision.training.run.distributed import World

WHITENED = 2000
"""Number of training images whose pixels a stem whitens."""


def fit_whitening(
    model: Classifier, config: TrainConfig, train: Source, preprocess: Preprocess, world: World
) -> None:
    """Fit the whitening of a model's stem to some training images, alike in all processes."""
    stem = model.get_submodule("patch_embed")
    assert isinstance(stem, ConvStem) and stem.whitening is not None
    drawn = generator(config.seed, "whitening").permutation(len(train))[:WHITENED]
    requests = [
        BatchRequest(0, part, np.zeros_like(part))
        for part in np.array_split(drawn, -(-len(drawn) // 50))
    ]
    here = config.loader.model_copy(update={"workers": 0})
    loader = build_loader(train, preprocess, config.data, here)
    normalize = normalizer(preprocess, torch.device("cpu"))
    stem.whitening.fit(
        normalize(batch.images[batch.ids >= 0]) for batch in loader.batches(requests)
    )
    stem.whitening.weight.data = world.from_main(stem.whitening.weight.data)
