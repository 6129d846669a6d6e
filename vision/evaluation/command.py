"""`vision eval`: how good the model of a checkpoint is on the pictures of a split."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vision.config import ConfigError
from vision.data.build import build_source
from vision.data.loader import Loader, Recipe, evaluation_batches, resolve_workers
from vision.evaluation.configs import EvalConfig
from vision.evaluation.evaluate import evaluate
from vision.evaluation.stored import Stored, load_stored

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Evaluation:
    """The numbers, and what they are of."""

    checkpoint: str
    step: int
    weights: str
    split: str
    pictures: int
    skipped: int
    """Pictures that could not be read and are not in the numbers."""
    metrics: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def table(self) -> "Table":
        """For a terminal."""
        from rich.table import Table

        title = f"{self.checkpoint} (step {self.step}, {self.weights} weights)"
        table = Table(title=title, title_justify="left")
        table.add_column(f"{self.split}: {self.pictures:,} pictures")
        table.add_column("value", justify="right")
        for name, value in self.metrics.items():
            table.add_row(name, f"{value:.4f}")
        if self.skipped:
            table.caption = f"{self.skipped} pictures could not be read and are not counted."
        return table


def evaluate_checkpoint(
    config: EvalConfig,
    device: torch.device,
    rank: int = 0,
    ranks: int = 1,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Evaluation:
    """Evaluate what `config.checkpoint` holds; every process takes its share of the pictures."""
    stored = load_stored(Path(config.checkpoint), config.weights, device)
    source = build_source(stored.data, config.split)
    _check_classes(stored, source.classes)
    workers, _ = resolve_workers(config.loader.workers, ranks, on_cpu=device.type == "cpu")
    recipe = Recipe(stored.preprocess, None, 0, config.loader.max_pixels, stored.data.on_error)
    loader = Loader(source, recipe, config.loader, workers, stored.data.max_error_share)
    metrics = evaluate(
        stored.model,
        evaluation_batches(loader, config.batch_size, rank, ranks),
        stored.preprocess,
        len(stored.classes),
        device,
        config.precision,
        reduce=reduce,
    )
    return Evaluation(
        checkpoint=str(stored.path),
        step=stored.step,
        weights=stored.weights,
        split=config.split,
        pictures=len(source),
        skipped=len(loader.failures),
        metrics=metrics,
    )


def _check_classes(stored: Stored, classes: tuple[str, ...]) -> None:
    if stored.classes != classes:
        raise ConfigError(
            f"the data has the classes {', '.join(classes[:5])}… ({len(classes)}), but the model "
            f"of {stored.path} was trained for {', '.join(stored.classes[:5])}… "
            f"({len(stored.classes)})."
        )
