"""`vision data`: a sheet of training images as the model gets them."""

import torch

from vision.data.batches import build_loader, training_batches
from vision.data.images.mixing import mix_batch
from vision.data.order import BatchOrder
from vision.data.preprocess import normalizer, resolve_preprocess, usual_values
from vision.data.sources.build_source import build_source, image_size
from vision.data.tools.configs import DataCommandConfig
from vision.data.tools.contact_sheet import contact_sheet


def draw_training_images(config: DataCommandConfig) -> None:
    """Write the sheet: augmented, normalised and mixed images with their targets."""
    source = build_source(config.data, "train")
    preprocess = resolve_preprocess(
        config.preprocess, image_size(config.data)[0], source.channels, usual_values(config.data)
    )
    loader = build_loader(
        source,
        preprocess,
        config.data,
        config.loader.model_copy(update={"workers": 0}),  # one batch
        augment=config.augment,
        seed=config.seed,
    )
    order = BatchOrder(
        config.seed,
        config.count,
        config.data.sampling,
        config.augment.repeats,
        tail="pad",
    )
    batch = next(training_batches(loader, order))
    images = normalizer(preprocess, torch.device("cpu"))(batch.images)
    images, targets = mix_batch(
        images, batch.labels, len(source.classes), config.augment, seed=config.seed, step=0
    )
    sheet = contact_sheet(images, targets, source.classes, preprocess)
    config.output.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(config.output)
