"""Each figure of `vision visualize`, from images and models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image

from vision.config import ConfigError
from vision.data.images.augment import to_image
from vision.inference.load import Loaded
from vision.inference.visualize.configs import VisualizeConfig
from vision.inference.visualize.images import Item
from vision.inspection.capture.capture import capture
from vision.inspection.capture.recording import Captured
from vision.inspection.explain import Pixels, as_batch, look_at, possible_requests
from vision.inspection.explorer.page import METHODS, Scores, write_page
from vision.inspection.figures.drawing import Drawing, Style
from vision.inspection.figures.filmstrip import comparison, film_strip
from vision.inspection.figures.heads import heads_sheet, nine_places, queries_sheet
from vision.inspection.figures.microscope import microscope
from vision.inspection.figures.sheet import overlay_sheet
from vision.inspection.methods.requests import Request
from vision.inspection.methods.rollout import seed_of
from vision.inspection.methods.token_maps import cam_seed
from vision.inspection.trust.masks import Sample
from vision.inspection.trust.scoring import score


@dataclass(frozen=True, eq=False)
class Viewer:
    """A model that is looked at."""

    name: str
    loaded: Loaded
    requests: tuple[Request, ...]
    """Methods of the sheet."""
    every: tuple[Request, ...]
    """Methods of the comparison and the scores."""
    classes: int | tuple[int, ...]


def draw_figure(
    figure: str,
    subjects: Sequence[Viewer],
    items: Sequence[Item],
    pixels: Sequence[Sequence[Pixels]],
    config: VisualizeConfig,
    style: Style,
) -> list[Drawing]:
    """One figure for each image. pixels: by image and model."""
    if figure == "sheet":
        return _sheets(subjects, items, pixels, config, style)
    (subject,) = subjects
    drawn = []
    for item, (one,) in zip(items, pixels, strict=True):
        try:
            drawn.append(_single(figure, subject, item, one, config, style))
        except ConfigError:
            raise
        except ValueError as error:  # a layer, a token or a cell that is not there
            raise ConfigError(f"{figure}: {error}") from error
    return drawn


def _sheets(
    subjects: Sequence[Viewer],
    items: Sequence[Item],
    pixels: Sequence[Sequence[Pixels]],
    config: VisualizeConfig,
    style: Style,
) -> list[Drawing]:
    looks = [
        look_at(
            subject.loaded,
            [one[number] for one in pixels],
            subject.requests,
            classes=subject.classes,
            query=config.query,
            interpolation=config.interpolation,
            name=subject.name,
        )
        for number, subject in enumerate(subjects)
    ]
    return [
        overlay_sheet(
            [of_model[i] for of_model in looks],
            style=style,
            percentile=config.percentile,
            interpolation=config.interpolation,
            title=Path(item.name).name,
        )
        for i, item in enumerate(items)
    ]


def _single(
    figure: str,
    subject: Viewer,
    item: Item,
    pixels: Pixels,
    config: VisualizeConfig,
    style: Style,
) -> Drawing:
    loaded = subject.loaded
    images = as_batch(loaded, [pixels])
    if figure == "comparison":
        look = look_at(
            loaded,
            [pixels],
            subject.every,
            classes=1 if isinstance(subject.classes, int) else subject.classes[:1],
            query=config.query,
            interpolation=config.interpolation,
            name=subject.name,
        )[0]
        scores = image_scores(subject, item, pixels, config) if config.score else None
        captured = capture(loaded.model, images, reduce="mean")
        return comparison(
            look,
            captured,
            scores=scores,
            style=style,
            percentile=config.percentile,
            interpolation=config.interpolation,
        )
    captured = capture(loaded.model, images, reduce="mean" if figure == "filmstrip" else None)
    match figure:
        case "heads":
            if config.query == "cam":
                raise ConfigError("query=cam: heads are drawn for a token, a cell or the pool.")
            query = config.query or "pool"
            return heads_sheet(
                captured, pixels, query=query, style=style, percentile=config.percentile
            )
        case "queries":
            places = nine_places(captured.image_size)
            if isinstance(config.query, tuple):
                places = [_pixel(captured, config.query)]
            return queries_sheet(
                captured, pixels, places, style=style, percentile=config.percentile
            )
        case "microscope":
            height, width = captured.image_size
            middle = (height // 2, width // 2)
            chosen = isinstance(config.query, tuple)
            place = _pixel(captured, config.query) if chosen else middle  # type: ignore[arg-type]
            return microscope(captured, pixels, place, style=style)
        case "filmstrip":
            return _film(captured, pixels, subject, config, style)
        case _:
            raise AssertionError(figure)


def _film(
    captured: Captured, pixels: Pixels, subject: Viewer, config: VisualizeConfig, style: Style
) -> Drawing:
    if config.query == "cam":
        if captured.logits is None:
            raise ConfigError("query=cam: the model has no classes.")
        best = captured.logits.argmax(1)
        seed = cam_seed(captured, best)
        query = f"the cells that speak for {subject.loaded.classes[int(best[0])]}"
    else:
        seed = seed_of(captured, config.query or "pool")
        query = "what the model pools" if config.query in (None, "pool") else str(config.query)
    return film_strip(
        captured, pixels, seed, query=query, style=style, percentile=config.percentile
    )


def _pixel(captured: Captured, cell: tuple[int, int]) -> tuple[int, int]:
    """The middle of a cell of the last layer."""
    captured.layout.query(cell)  # an error where there is no such cell
    rows, columns = captured.layout.grid
    top, left, bottom, right = captured.layout.box((cell[0] % rows, cell[1] % columns))
    return (top + bottom) // 2, (left + right) // 2


def draw_page(
    subject: Viewer, item: Item, pixels: Pixels, config: VisualizeConfig, stem: Path
) -> None:
    """The explorer page of one image."""
    loaded = subject.loaded
    image: Image.Image = to_image(pixels)
    scores, words = page_scores(subject, item, pixels, config)
    number = len(subject.classes) if isinstance(subject.classes, tuple) else subject.classes
    write_page(
        loaded.model,
        as_batch(loaded, [pixels]),
        image,
        stem.with_name(f"{stem.name}.html"),
        classes=loaded.classes or None,
        top=number if loaded.classes else 0,
        scores=scores,
        scores_note=words,
        title=Path(item.name).name,
        subtitle=subject.name,
    )


def page_scores(
    subject: Viewer, item: Item, pixels: Pixels, config: VisualizeConfig
) -> tuple[Scores | None, str]:
    """The scores that a page shows, and what it says of them or of their absence.

    A mask makes them cheap: maps are compared with it. What hiding pixels does to the answer takes
    hundreds of forward passes and is measured where scores are asked for.
    """
    loaded = subject.loaded
    mask = item.seen_mask(loaded)
    hidden = config.score and bool(loaded.classes)
    said = []
    if item.mask is None:
        said.append(
            "It is not known where the object is, so maps could not be compared with it: "
            "masks=FOLDER or boxes=FILE.csv tell, and the embedded data set (data=shapes) knows."
        )
    elif mask is None or not mask.any():
        mask = None
        said.append("Nothing of the object is left in what the model sees of this image.")
    if not loaded.classes:
        said.append(
            "The model has no classes, so there is no answer that hiding pixels can change."
        )
    elif not config.score:
        said.append("What hiding pixels does to the answer was not measured: score=true does that.")
    if mask is None and not hidden:
        return None, " ".join(said)
    captured = capture(loaded.model, as_batch(loaded, [pixels]), reduce="mean")
    found = score(
        loaded,
        [Sample(item.name, pixels, mask)],
        possible_requests(list(METHODS.values()), captured),
        steps=config.steps if hidden else None,
        seed=config.seed,
    )
    own = {request: name for name, request in METHODS.items()}
    return {own.get(name, name): row for name, row in found.items()}, " ".join(said)


def image_scores(
    subject: Viewer, item: Item, pixels: Pixels, config: VisualizeConfig
) -> Mapping[str, Mapping[str, float]]:
    """All scores on one image, by method."""
    mask = item.seen_mask(subject.loaded)
    sample = Sample(item.name, pixels, mask if mask is not None and mask.any() else None)
    with torch.no_grad():
        return score(subject.loaded, [sample], subject.every, steps=config.steps, seed=config.seed)
