"""Each figure of `vision visualize`, from images and models."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from vision.config import ConfigError
from vision.data.images.decode import Pixels, to_image
from vision.inference.predict import Loaded
from vision.inference.visualize.configs import VisualizeConfig
from vision.inference.visualize.images import Item
from vision.inspection.capture.capture import Passes
from vision.inspection.capture.captured import Captured
from vision.inspection.explain import (
    Explanation,
    as_batch,
    available_methods,
    explain,
    settings_error,
)
from vision.inspection.explorer.page import PAGE_METHODS, Scores, write_page
from vision.inspection.figures.drawing import Drawing, Style
from vision.inspection.figures.filmstrip import comparison, film_strip
from vision.inspection.figures.raw_attention import (
    heads_sheet,
    microscope,
    nine_places,
    queries_sheet,
)
from vision.inspection.figures.sheet import overlay_sheet
from vision.inspection.methods.layer_maps import cam_seed
from vision.inspection.methods.rollout import seed_of
from vision.inspection.methods.spec import MethodChoice
from vision.inspection.trust.localization import Mask
from vision.inspection.trust.scoring import Sample, score


@dataclass(frozen=True, eq=False)
class VisualizedModel:
    """A model with the methods and classes to visualize."""

    name: str
    loaded: Loaded
    choices: tuple[MethodChoice, ...]
    """Methods of the sheet."""
    every: tuple[MethodChoice, ...]
    """Methods of the comparison and the scores."""
    classes: int | tuple[int, ...]


@dataclass(frozen=True, eq=False)
class View:
    """One image as one model sees it. All its figures share the same captures."""

    model: VisualizedModel
    item: Item
    pixels: Pixels
    config: VisualizeConfig
    style: Style

    @cached_property
    def passes(self) -> Passes:
        """The captures of the image."""
        return Passes(self.model.loaded.model, as_batch(self.model.loaded, [self.pixels]))

    def explain(self, choices: Sequence[MethodChoice], classes: int | Sequence[int]) -> Explanation:
        """The maps of some methods."""
        return explain(
            self.model.loaded,
            [self.pixels],
            choices,
            classes=classes,
            query=self.config.query,
            interpolation=self.config.interpolation,
            name=self.model.name,
            passes=self.passes,
        )[0]

    def score(
        self, choices: Sequence[MethodChoice], mask: Mask | None, steps: int | None
    ) -> dict[str, dict[str, float]]:
        """The scores of some methods on this image."""
        return score(
            self.model.loaded,
            [Sample(self.pixels, mask)],
            choices,
            steps=steps,
            seed=self.config.seed,
            passes=self.passes,
        )

    def middle(self) -> tuple[int, int]:
        """The pixel in the middle of the cell that `query` names, or of the image."""
        captured, cell = self.passes.plain, self.config.query
        if not isinstance(cell, tuple):
            height, width = captured.layout.image_size
            return height // 2, width // 2
        place = captured.layout.place(captured.layout.query(cell))  # raises outside the grid
        top, left, bottom, right = captured.layout.field(place)  # type: ignore[arg-type]
        return (top + bottom) // 2, (left + right) // 2


def draw_figure(figure: str, views: Sequence[View]) -> Drawing:
    """A figure of one image: the sheet of all models, any other figure of one."""
    with settings_error(figure):
        return _sheet(views) if figure == "sheet" else _DRAW[figure](views[0])


def _sheet(views: Sequence[View]) -> Drawing:
    explanations = [view.explain(view.model.choices, view.model.classes) for view in views]
    return overlay_sheet(explanations, style=views[0].style, title=Path(views[0].item.name).name)


def _heads(view: View) -> Drawing:
    query = view.config.query or "pool"
    if query == "cam":
        raise ConfigError("query=cam: figures=[heads] needs a token, a cell or pool.")
    return heads_sheet(view.passes.plain, view.pixels, query=query, style=view.style)


def _queries(view: View) -> Drawing:
    captured = view.passes.plain
    chosen = isinstance(view.config.query, tuple)
    places = [view.middle()] if chosen else nine_places(captured.layout.image_size)
    return queries_sheet(captured, view.pixels, places, style=view.style)


def _microscope(view: View) -> Drawing:
    return microscope(view.passes.plain, view.pixels, view.middle(), style=view.style)


def _film_strip(view: View) -> Drawing:
    captured: Captured = view.passes.plain
    query = view.config.query or "pool"
    if query == "cam":
        if captured.logits is None:
            raise ConfigError("query=cam: the model has no classes.")
        best = captured.logits.argmax(1)
        seed = cam_seed(captured, best)
        words = f"the cells that speak for {view.model.loaded.classes[int(best[0])]}"
    else:
        seed = seed_of(captured, query)
        words = "what the model pools" if query == "pool" else str(query)
    return film_strip(captured, view.pixels, seed, query=words, style=view.style)


def _comparison(view: View) -> Drawing:
    classes = view.model.classes
    explanation = view.explain(view.model.every, 1 if isinstance(classes, int) else classes[:1])
    scores = None
    if view.config.score:
        scores = view.score(
            view.model.every, view.item.object_mask(view.model.loaded), view.config.steps
        )
    return comparison(explanation, view.passes.plain, scores=scores, style=view.style)


_DRAW: dict[str, Callable[[View], Drawing]] = {
    "heads": _heads,
    "queries": _queries,
    "microscope": _microscope,
    "filmstrip": _film_strip,
    "comparison": _comparison,
}


def draw_page(view: View, output: Path) -> None:
    """Write the explorer page of one image."""
    loaded, classes = view.model.loaded, view.model.classes
    scores, words = page_scores(view)
    write_page(
        loaded.model,
        view.passes.images,
        to_image(view.pixels),
        output,
        classes=loaded.classes or None,
        top=classes if loaded.classes else 0,
        scores=scores,
        scores_note=words,
        title=Path(view.item.name).name,
        subtitle=view.model.name,
        passes=view.passes,
    )


def page_scores(view: View) -> tuple[Scores | None, str]:
    """The scores of a page, and a note on those that are missing.

    Comparing maps with a mask is cheap. Hiding pixels takes hundreds of forward passes and is done
    only with `score=true`.
    """
    loaded, config = view.model.loaded, view.config
    mask = view.item.object_mask(loaded)
    hidden = config.score and bool(loaded.classes)
    notes = []
    if view.item.mask is None:
        notes.append(
            "The position of the object is unknown, so maps could not be compared with it: give "
            "masks=FOLDER or boxes=FILE.csv, or use the embedded data set (data=shapes)."
        )
    elif mask is None:
        notes.append("Nothing of the object is left in what the model sees of this image.")
    if not loaded.classes:
        notes.append("The model has no classes, so hiding pixels cannot change its prediction.")
    elif not config.score:
        notes.append("How hiding pixels changes the prediction is measured with score=true.")
    if mask is None and not hidden:
        return None, " ".join(notes)
    choices = available_methods([str(choice) for choice in PAGE_METHODS], view.passes.plain)
    found = view.score(choices, mask, config.steps if hidden else None)
    return {name.partition(":")[0]: row for name, row in found.items()}, " ".join(notes)
