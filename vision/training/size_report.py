"""A line of the load report on the size of the images."""

from vision.checkpoints.open import OpenedModel

LARGE, SMALLER = 384, 224
"""Sides of images: above the first, the cost of a size that the weights decide is said."""


def size_line(opened: OpenedModel, chosen: bool) -> list[str]:
    """A line of the report where the weights were trained on images of another size, or where their
    size is `chosen` for the run and large.
    """
    if opened.trained_size == opened.image_size:
        height, width = opened.image_size
        if not chosen or max(height, width) <= LARGE:
            return []
        more = height * width / SMALLER**2
        return [
            f"size      {height} × {width} as the weights were trained: {more:.1f} × the pixels of "
            f"{SMALLER} × {SMALLER}, and about as much time and memory; data.image_size={SMALLER} "
            "is the smaller choice"
        ]
    sizes = (opened.trained_size, opened.image_size)
    before, after = (f"{height} × {width}" for height, width in sizes)
    return [f"size      trained on {before} pixels; this run has {after} (data.image_size)"]
