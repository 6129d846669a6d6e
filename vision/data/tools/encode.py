"""Images as they go into prepared shards: shrunk, encoded, or left as they are."""

import io
from dataclasses import dataclass

from PIL import Image

from vision.data.images.decode import UnreadableImageError, open_image
from vision.data.sources.source import Source

_SUFFIXES = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp", "GIF": "gif", "BMP": "bmp", "TIFF": "tif"}


@dataclass(frozen=True)
class Settings:
    """What the bytes of the shards depend on, besides the data."""

    short_side: int | None
    image_format: str
    quality: int
    shard_size: int


@dataclass(frozen=True)
class Encoded:
    """An encoded image, or why there is none."""

    index: int
    name: str
    content: bytes = b""
    suffix: str = ""
    error: str = ""


class Encoder:
    """Reads, shrinks and encodes one image; sent to the worker processes once."""

    def __init__(self, source: Source, settings: Settings) -> None:
        self.source = source
        self.settings = settings

    def __call__(self, index: int) -> Encoded:
        name = self.source.name(index)
        try:
            content, suffix = self._encode(index)
        except OSError as error:
            return Encoded(index, name, error=str(error))
        return Encoded(index, name, content, suffix)

    def _encode(self, index: int) -> tuple[bytes, str]:
        settings = self.settings
        stored = self.source.read(index)
        opened = open_image(stored, self.source.channels, name=self.source.name(index))
        short_side = min(opened.height, opened.width)
        limit = settings.short_side or short_side
        if isinstance(stored, bytes) and short_side <= limit:
            opened.pixels()  # an unreadable file is found now, not in training
            return stored, _file_suffix(stored, self.source.name(index))
        pixels = opened.pixels()
        image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
        if short_side > limit:
            scale = limit / short_side
            size = [max(limit, round(side * scale)) for side in image.size]
            image = image.resize((size[0], size[1]), Image.Resampling.BICUBIC)
        buffer = io.BytesIO()
        match settings.image_format:
            case "jpeg":
                image.save(buffer, "JPEG", quality=settings.quality)
            case "webp":
                image.save(buffer, "WEBP", quality=settings.quality)
            case "png":
                image.save(buffer, "PNG", optimize=True)
        return buffer.getvalue(), _SUFFIXES[settings.image_format.upper()]


def _file_suffix(content: bytes, name: str) -> str:
    """By the content: names lie."""
    with Image.open(io.BytesIO(content)) as image:
        kind = image.format
    if kind not in _SUFFIXES:
        raise UnreadableImageError(f"{name}: images in the format {kind} are not stored in shards.")
    return _SUFFIXES[kind]
