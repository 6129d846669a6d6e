"""What a task needs of a run's data and model before it is built: labels or none, further parts."""

from vision.checkpoints.load_report import LoadReport
from vision.checkpoints.open import OpenedModel
from vision.data.preprocess import Preprocess
from vision.data.sources.source import Source, Unlabelled
from vision.models.layers import Classifier
from vision.models.reconstruction import MaskedModel
from vision.training.configs import TrainConfig
from vision.training.tasks.configs import MaskedConfig
from vision.training.tasks.masked_model import load_decoder, masked_model


def seen_by_task(config: TrainConfig, source: Source) -> Source:
    """The images as the task sees them: without labels where it needs none."""
    return Unlabelled(source) if isinstance(config.task, MaskedConfig) else source


def with_parts(config: TrainConfig, model: Classifier, preprocess: Preprocess) -> Classifier:
    """The model that the task trains: the given one, or one with further parts around it."""
    if not isinstance(config.task, MaskedConfig):
        return model
    size, channels = preprocess.image_size, preprocess.channels
    return masked_model(config.task, model, size, channels, config.seed)


def fill_parts(model: Classifier, opened: OpenedModel) -> LoadReport:
    """Put weights that a checkpoint has for these parts into them; the report names both."""
    if not isinstance(model, MaskedModel):
        return opened.report
    return load_decoder(model, opened.decoder, opened.report)
