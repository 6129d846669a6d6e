"""`vision publish`: an evaluation as usual for the card, then the folder and its upload."""

from collections.abc import Callable

from vision.cli.composition import compose
from vision.config import parse
from vision.evaluation.configs import EvalConfig
from vision.inference.predict import Loaded
from vision.inference.publish.configs import PublishConfig


def run(config: PublishConfig, load: Callable[[], Loaded]) -> int:
    """Check what can be refused at once; measure, write and upload; print the outcome."""
    from vision.checkpoints.open import print_notes
    from vision.evaluation.evaluate_checkpoints import Processes, evaluate_checkpoints
    from vision.inference.publish.hub import check_token
    from vision.inference.publish.publish import publish, published_folder
    from vision.models.build import pick_device

    if config.push:
        check_token()
    loaded = load()
    loaded.opened.check_head()
    folder = published_folder(loaded, config)
    record = loaded.opened.record
    known = config.data is not None or (record is not None and record.config.data is not None)
    report = None
    if config.evaluate and known:
        processes = Processes(pick_device(config.device))
        report = evaluate_checkpoints(_evaluation_of(config), processes)
    elif config.evaluate:
        print_notes(["the card has no results; data=… names images to measure on."])
    result = publish(loaded, config, report, folder)
    print_notes(result.notes)
    if config.license is None:
        print_notes(["the card names no licence; license=apache-2.0 does, or another of the hub."])
    print(f"{result.folder}: layout of {result.layout}, opened again with the same probabilities.")
    if result.url is not None:
        print(f"uploaded: {result.url}")
    return 0


def _evaluation_of(config: PublishConfig) -> EvalConfig:
    """The evaluation for the card: what both commands have as given, the rest as usual."""
    given = {
        "checkpoint": config.checkpoint,
        "model": config.model.model_dump(mode="json"),
        "weights": config.weights,
        "rename": config.rename,
        "image_size": config.image_size,
        "data": None if config.data is None else config.data.model_dump(mode="json"),
        "split": config.split,
        "batch_size": config.batch_size,
        "device": config.device,
        "loader": config.loader.model_dump(mode="json"),
        "save": False,
    }
    values, _ = compose("eval", ["checkpoint=given"])
    return parse(EvalConfig, values | given)
