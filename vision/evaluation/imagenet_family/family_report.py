"""The results of ImageNet's test sets: dataclasses in the shape of family.json, and their table."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Group
from rich.table import Table

from vision.evaluation.imagenet_family.family_sets import CORRUPTIONS, SEVERITIES, TITLES
from vision.evaluation.model_metrics import Difference, difference, interval
from vision.terminal import percent, plain

FORMAT = 1
DEFINITIONS = {
    "top1": "fraction of the images whose most probable class is right: their label; of ReaL, any "
    "of its labels, images without one being left out",
    "top5": "the same for one of the five most probable classes",
    "classes": "number of classes whose logits are compared: of A and R, those of the folders",
    "interval": "the middle 95 % of top1 in a bootstrap over images",
    "difference": "top1 minus that of the first model, paired bootstrap over the same images",
    "c.error": "1 - top1 of each corruption and severity",
    "c.mean_error": "mean of c.error over the conditions that are there",
    "c.mce": "mean over 15 corruptions of the error, averaged over five severities, divided by "
    "AlexNet's; null unless all 75 conditions are there",
    "not_found": "sets that are not in data.root",
}


@dataclass(frozen=True)
class SetResult:
    """A model on one of the sets."""

    images: int
    skipped: int
    """Images that could not be read, and are not counted."""
    classes: int
    right: NDArray[np.bool_]
    """Whether each image was recognised."""
    top5: float

    @property
    def top1(self) -> float:
        """Accuracy."""
        return float(self.right.mean())


@dataclass(frozen=True)
class FamilyModel:
    """The results of one model."""

    name: str
    checkpoint: Path
    sets: Mapping[str, SetResult]
    corruptions: Mapping[str, Mapping[int, float]]
    """Error for each corruption and severity of ImageNet-C that is there."""
    corrupted_images: int = 0

    @property
    def mean_error(self) -> float | None:
        """Mean error over the conditions of ImageNet-C."""
        errors = [e for severities in self.corruptions.values() for e in severities.values()]
        return float(np.mean(errors)) if errors else None

    @property
    def mce(self) -> float | None:
        """Mean corruption error; None unless all conditions are there."""
        wanted = {name: set(SEVERITIES) for name in CORRUPTIONS}
        if {name: set(found) for name, found in self.corruptions.items()} != wanted:
            return None
        errors = {name: np.mean(list(found.values())) for name, found in self.corruptions.items()}
        return float(np.mean([errors[name] / alexnet for name, alexnet in CORRUPTIONS.items()]))


def accuracy_draws(right: NDArray[np.bool_], resamples: int, seed: int) -> NDArray[np.float64]:
    """The accuracy in each draw of a bootstrap over images, by drawing the number of right ones."""
    random = np.random.default_rng([seed, len(right)])
    return random.binomial(len(right), right.mean(), size=resamples) / len(right)


def paired_difference(
    first: NDArray[np.bool_], second: NDArray[np.bool_], resamples: int, seed: int
) -> Difference:
    """First minus second accuracy on the same images. A draw of images is one of the numbers of
    those that only the first, only the second, and both or neither recognise.
    """
    images = len(first)
    shares = [(first & ~second).mean(), (~first & second).mean()]
    random = np.random.default_rng([seed, images])
    drawn = random.multinomial(images, [*shares, max(0.0, 1 - sum(shares))], size=resamples)
    draws = (drawn[:, 0] - drawn[:, 1]) / images
    return difference("top1", (first.mean() - second.mean(), draws), (0.0, np.zeros(resamples)))


@dataclass(frozen=True)
class FamilyReport:
    """The results of all models."""

    root: Path
    models: tuple[FamilyModel, ...]
    not_found: tuple[str, ...]
    """Sets that are not there."""
    resamples: int
    seed: int
    notes: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()

    def interval(self, result: SetResult) -> tuple[float, float] | None:
        """Of the accuracy; None without resamples."""
        if not self.resamples:
            return None
        return interval(accuracy_draws(result.right, self.resamples, self.seed))

    def difference(self, model: FamilyModel, name: str) -> Difference | None:
        """From the first model on one set; None for that one itself."""
        first = self.models[0]
        if model is first or not self.resamples:
            return None
        right = model.sets[name].right, first.sets[name].right
        return paired_difference(*right, self.resamples, self.seed)

    def as_dict(self, summary: bool = False) -> dict[str, Any]:
        """Plain mappings and lists for JSON; a summary is without definitions."""
        return {
            "format": FORMAT,
            **({} if summary else {"definitions": DEFINITIONS}),
            "root": str(self.root),
            "not_found": list(self.not_found),
            "notes": list(self.notes),
            "models": [self._model(model) for model in self.models],
            "files": [str(file) for file in self.files],
        }

    def _model(self, model: FamilyModel) -> dict[str, Any]:
        sets: dict[str, Any] = {}
        for name, found in model.sets.items():
            sets[name] = {
                "title": TITLES[name],
                "images": found.images,
                "skipped": found.skipped,
                "classes": found.classes,
                "top1": found.top1,
                "top5": found.top5,
                "interval": self.interval(found),
            }
            if (apart := self.difference(model, name)) is not None:
                sets[name]["difference"] = {
                    "value": apart.value,
                    "interval": (apart.low, apart.high),
                    "decided": apart.decided,
                }
        corrupted = {
            "images": model.corrupted_images,
            "error": {n: {str(s): e for s, e in v.items()} for n, v in model.corruptions.items()},
            "mean_error": model.mean_error,
            "mce": model.mce,
        }
        return {
            "name": model.name,
            "checkpoint": str(model.checkpoint),
            "sets": sets,
            **({"c": corrupted} if model.corruptions else {}),
        }

    def table(self) -> Group:
        """A row per set, a column per model; ImageNet-C by corruption."""
        table = Table(title=plain(f"ImageNet's test sets in {self.root}", "table.title"))
        table.title_justify = "left"
        table.add_column("top-1 accuracy")
        for title in ("images", "classes", *(model.name for model in self.models)):
            table.add_column(plain(title), justify="right")
        for name, title in TITLES.items():
            if name in self.not_found:
                table.add_row(title, "not found", style="dim")
            elif name == "c":
                table.add_section()
                for row in self._corrupted_rows():
                    table.add_row(*row)
            else:
                found = self.models[0].sets[name]
                cells = (self._cell(model, name) for model in self.models)
                table.add_row(title, f"{found.images:,}", f"{found.classes:,}", *cells)
        captions = []
        if self.resamples:
            captions.append("[ ]: 95 % confidence interval, bootstrap over images")
        if self.resamples and len(self.models) > 1:
            captions.append(
                f"▲ ▼: better or worse than {self.models[0].name} on the same images, 95 %"
            )
        table.caption = plain("\n".join(captions), "table.caption") if captions else None
        return Group(table, *map(plain, [*self.notes, *(f"written: {f}" for f in self.files)]))

    def _cell(self, model: FamilyModel, name: str) -> str:
        found = model.sets[name]
        text = percent(found.top1)
        if (limits := self.interval(found)) is not None:
            text += f" [{100 * limits[0]:.2f}, {100 * limits[1]:.2f}]"
        apart = self.difference(model, name)
        return text + (f" {'▲' if apart.value > 0 else '▼'}" if apart and apart.decided else "")

    def _corrupted_rows(self) -> Iterator[Sequence[str]]:
        first = self.models[0]
        conditions = sum(map(len, first.corruptions.values()))
        means = [percent(1 - error) for m in self.models if (error := m.mean_error) is not None]
        yield (
            f"ImageNet-C, mean of {conditions} conditions",
            f"{first.corrupted_images:,}",
            "1,000",
            *means,
        )
        scores = ["–" if m.mce is None else f"{100 * m.mce:.1f}" for m in self.models]
        needed = " (needs all 75 conditions)" if first.mce is None else ", lower is better"
        yield (f"  mCE{needed}", "", "", *scores)
        for corruption, severities in first.corruptions.items():
            cells = (
                percent(1 - float(np.mean(list(m.corruptions[corruption].values()))))
                for m in self.models
            )
            title = f"  {corruption.replace('_', ' ')}, severities {_numbers(severities)}"
            yield (title, "", "", *cells)


def _numbers(severities: Mapping[int, float]) -> str:
    """`1 to 5`, or the severities that are there."""
    if set(severities) == set(SEVERITIES):
        return "1 to 5"
    return ", ".join(map(str, severities))
