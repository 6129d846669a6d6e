"""Images as they are stored in prepared shards: shrunk and encoded, or unchanged."""

import io
from dataclasses import dataclass

from PIL import Image

from vision.data.images.decode import UnreadableImageError, open_image, to_image
from vision.data.sources.folder import FORMATS
from vision.data.sources.source import Source


@dataclass(frozen=True)
class Settings:
    """Settings that decide the bytes of the shards."""

    short_side: int | None
    image_format: str
    quality: int
    shard_size: int


@dataclass(frozen=True)
class Encoded:
    """An encoded image, or the reason why there is none."""

    index: int
    content: bytes = b""
    suffix: str = ""
    error: str = ""


def encode(source: Source, settings: Settings, index: int) -> Encoded:
    """Read, shrink and encode one image."""
    try:
        content, kind = _encode(source, settings, index)
    except OSError as error:
        return Encoded(index, error=str(error))
    return Encoded(index, content, FORMATS[kind][0])


def _encode(source: Source, settings: Settings, index: int) -> tuple[bytes, str]:
    """Return the encoded image and its format."""
    stored, name = source.read(index), source.name(index)
    opened = open_image(stored, source.channels, name)
    pixels = opened.pixels()  # an unreadable file is found now, not in training
    short_side = min(opened.height, opened.width)
    limit = settings.short_side or short_side
    if isinstance(stored, bytes) and short_side <= limit:
        with Image.open(io.BytesIO(stored)) as file:  # by the content: names may be wrong
            kind = str(file.format)
        if not FORMATS.get(kind):
            raise UnreadableImageError(f"{name}: the format {kind} cannot be stored in shards.")
        return stored, kind
    image = to_image(pixels)
    if short_side > limit:
        scale = limit / short_side
        size = [max(limit, round(side * scale)) for side in image.size]
        image = image.resize((size[0], size[1]), Image.Resampling.BICUBIC)
    kind = settings.image_format.upper()
    options = {"optimize": True} if kind == "PNG" else {"quality": settings.quality}
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue(), kind
