"""Vision Transformer and Swin image classifiers: train, fine-tune, evaluate, inspect attention.

The names below are imported on first use, so that `import vision` is fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vision.checkpoints.open import load_weights as load_weights
    from vision.cli.from_python import TrainResult as TrainResult
    from vision.cli.from_python import train as train
    from vision.config import ConfigError as ConfigError
    from vision.config import parse as parse
    from vision.data.sources.build_source import build_source as build_source
    from vision.inference.predict import load as load
    from vision.inspection.figures.sheet import show_attention as show_attention
    from vision.models.build import build_model as build_model
    from vision.models.cost.count import cost as cost
    from vision.models.layers import static_bias as static_bias

__version__ = "0.1.0"

_HOMES = {
    "ConfigError": "vision.config",
    "parse": "vision.config",
    "build_source": "vision.data.sources.build_source",
    "build_model": "vision.models.build",
    "load": "vision.inference.predict",
    "load_weights": "vision.checkpoints.open",
    "cost": "vision.models.cost.count",
    "train": "vision.cli.from_python",
    "TrainResult": "vision.cli.from_python",
    "show_attention": "vision.inspection.figures.sheet",
    "static_bias": "vision.models.layers",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vision' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
