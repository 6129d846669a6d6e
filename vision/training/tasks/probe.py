"""The run before a run: a linear probe whose head a fine-tuning then starts with."""

from typing import Any

from vision.config import parse
from vision.training.configs import PLAIN_PICTURES, TrainConfig
from vision.training.run.run_folder import open_run

STEADY = {"warmup": "0steps", "warmup_from": 0.0, "end_at": 0.0, "cooldown": "0steps"}


def probe_before(config: TrainConfig, label: str) -> TrainConfig | None:
    """The settings of the probe that is to come first; None if none is, or the run is past it.

    The probe is a run of its own in the folder of the run that it serves, and resumes like any. It
    has the same data, batches and loss; its rate falls to 0 from the start, without an average of
    weights.
    """
    first = config.probe_first
    if first is None:
        return None
    run, decision = open_run(config, label)
    if decision != "new":
        return None
    values: dict[str, Any] = config.model_dump(mode="json")
    values |= {
        "name": "probe",
        "output": str(run.folder),
        "tune": {"kind": "head", "cache": True},
        "probe_first": None,
        "duration": first.duration,
        "ema": None,
        "augment": values["augment"] | PLAIN_PICTURES,
        "schedule": values["schedule"] | {"shape": "cosine"} | STEADY,
    }
    values["optimizer"] |= {
        "learning_rate": first.learning_rate,
        "reference_batch": None,
        "layer_decay": 1.0,
        "weight_decay": 0.0,
    }
    return parse(TrainConfig, values)
