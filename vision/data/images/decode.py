"""From an encoded file or an array to uint8 pixels with the required number of channels.

There are two paths. Plain 8-bit JPEG files take the fast one: libjpeg-turbo decodes into an array,
and of a baseline file only the rows above the lower edge of the crop. Everything else is decoded by
Pillow, including every JPEG file with errors or warnings of libjpeg-turbo.
"""

import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import simplejpeg  # type: ignore[import-untyped]
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from vision.config import UserError
from vision.data.sources.folder import FORMATS, INSTALL_HEIC, READS_HEIC
from vision.data.sources.source import StoredImage

Pixels = NDArray[np.uint8]
"""(height, width, channels)."""

BACKGROUND = (255, 255, 255, 255)
"""Colour behind transparent pixels: white, as on a page."""

DEFAULT_MAX_PIXELS = 178_956_970
"""Larger images are refused before memory is allocated; Pillow has the same limit."""

_HEIC_BRANDS = (b"ftypheic", b"ftypheix", b"ftyphevc", b"ftyphevx", b"ftypmif1", b"ftypmsf1")
"""Bytes 4 to 11 of a HEIC file (ISO/IEC 23008-12, annex B)."""

_TRANSPARENT_MODES = ("RGBA", "RGBa", "LA", "La", "PA")


class UnreadableImageError(UserError, OSError):
    """An image that cannot be decoded; the message names it and says why."""


@dataclass(frozen=True, slots=True)
class OpenImage:
    """An image of known size (EXIF rotation applied) that may still have to be decoded."""

    height: int
    width: int
    name: str
    _rows: Callable[[int], Pixels]
    """Returns all columns of at least the rows above the given one."""

    def region(self, top: int, left: int, height: int, width: int) -> Pixels:
        """Return the pixels of a rectangle inside the image."""
        with _named_errors(self.name):
            rows = self._rows(int(top + height))
            if rows.shape[0] < top + height or rows.shape[1] != self.width:
                raise ValueError("its headers disagree on its size.")
        return rows[top : top + height, left : left + width]

    def pixels(self) -> Pixels:
        """Return the whole image."""
        return self.region(0, 0, self.height, self.width)


def decode(image: StoredImage | Image.Image, channels: int, name: str) -> Pixels:
    """Return the whole image, or raise an UnreadableImageError that names it."""
    return open_image(image, channels, name).pixels()


def open_image(
    image: StoredImage | Image.Image,
    channels: int,
    name: str,
    max_pixels: int = DEFAULT_MAX_PIXELS,
    keep: Callable[[Pixels], None] = lambda _: None,
) -> OpenImage:
    """Open an image and read its size.

    `keep` is called with the pixels of the whole image, if they are decoded and those of every part
    are the same.
    """
    with _named_errors(name):
        if isinstance(image, np.ndarray):
            pixels = _array_pixels(image, channels)
        elif isinstance(image, Image.Image):
            pixels = _flatten(ImageOps.exif_transpose(image), channels)
        elif not image:
            raise ValueError("the file is empty (0 bytes).")
        else:
            jpeg = _read_jpeg_header(image)
            if jpeg is not None:
                _check_size(jpeg.width, jpeg.height, max_pixels)
                height, width = jpeg.height, jpeg.width
                if jpeg.orientation in _SWAPS_SIDES:
                    height, width = width, height
                rows = partial(_jpeg_rows, image, jpeg, channels, max_pixels, keep)
                return OpenImage(height, width, name, rows)
            pixels = _pillow_pixels(image, channels, max_pixels)
    keep(pixels)
    return OpenImage(pixels.shape[0], pixels.shape[1], name, lambda _: pixels)


def to_image(pixels: Pixels) -> Image.Image:
    """Convert pixels to a Pillow image."""
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


def from_image(image: Image.Image) -> Pixels:
    """Convert a Pillow image to pixels."""
    pixels = np.asarray(image)
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


class _named_errors:  # noqa: N801 (used like a function, and cheaper than a generator)
    """Convert any error of a decoder to an UnreadableImageError that names the file."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # Decoders raise many kinds of errors for bad files: struct.error, zlib.error, IndexError.
        # Too little memory, however, is not a fault of the file.
        if isinstance(error, Exception) and not isinstance(error, MemoryError):
            raise UnreadableImageError(f"{self.name}: {error}") from error


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise ValueError(
            f"{width} × {height} pixels are more than the limit of {max_pixels:,} "
            "(loader.max_pixels); shrink the image, or raise the limit if the memory allows it."
        )
    if width < 1 or height < 1:
        raise ValueError(f"an image of {width} × {height} pixels has no content.")


# Arrays and Pillow ------------------------------------------------------------------------------


def _array_pixels(array: NDArray[np.uint8], channels: int) -> Pixels:
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or 0 in array.shape:
        raise ValueError(
            f"expected a uint8 array (height, width, channels), found {array.dtype} {array.shape}."
        )
    if array.ndim == 3 and array.shape[2] == channels:
        return array
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    return _flatten(Image.fromarray(array), channels)


def _pillow_pixels(data: bytes, channels: int, max_pixels: int) -> Pixels:
    """Decode the first frame of an image: upright, opaque and with 8 bits per channel."""
    with warnings.catch_warnings():
        # The size is checked against our own limit. Damaged EXIF data only loses the rotation.
        warnings.simplefilter("ignore")
        try:
            image: Image.Image = Image.open(io.BytesIO(data), formats=_known_formats())
        except UnidentifiedImageError:
            if data[4:12] in _HEIC_BRANDS and not READS_HEIC:
                raise ValueError(
                    f"a HEIC image; the package pillow-heif reads it: {INSTALL_HEIC}."
                ) from None
            raise ValueError(
                f"not an image in a known format; the file begins with {data[:16]!r}."
            ) from None
        _check_size(*image.size, max_pixels)
        image.load()
        # load() turns TIFF files upright and removes the orientation from their EXIF data.
        ImageOps.exif_transpose(image, in_place=True)
        return _flatten(image, channels)


@cache
def _known_formats() -> tuple[str, ...]:
    Image.init()
    if READS_HEIC:
        import pillow_heif

        pillow_heif.register_heif_opener()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _flatten(image: Image.Image, channels: int) -> Pixels:
    """Convert any mode of Pillow to 8-bit greyscale or RGB."""
    if image.mode[0] in "IF":
        image = _eight_bits(image)
    if image.mode in _TRANSPARENT_MODES or "transparency" in image.info:
        canvas = Image.new("RGBA", image.size, BACKGROUND)
        canvas.alpha_composite(image.convert("RGBA"))
        image = canvas
    mode = "L" if channels == 1 else "RGB"
    return from_image(image if image.mode == mode else image.convert(mode))


def _eight_bits(image: Image.Image) -> Image.Image:
    """Return the upper 8 bits of a 16-bit greyscale image; Pillow itself would clip at 255."""
    # Some versions of Pillow represent 16-bit PNG and PGM files as 32-bit integers.
    sixteen = image.mode.startswith("I;16") or image.format in ("PNG", "PPM")
    if image.mode == "F" or not sixteen:
        raise ValueError(
            f"its pixels (Pillow's mode {image.mode}) have no stated range; store 8 or 16 bits."
        )
    return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))


# JPEG -------------------------------------------------------------------------------------------

_SWAPS_SIDES = (5, 6, 7, 8)


@dataclass(frozen=True, slots=True)
class _JpegHeader:
    height: int
    width: int
    height_offset: int
    """Position of the height in the file."""
    sequential: bool
    """Whether rows are coded in order, so that the upper ones can be decoded alone."""
    components: int
    orientation: int


def _read_jpeg_header(data: bytes) -> _JpegHeader | None:
    """Return what the fast path needs, or None if the file is not suited for it."""
    orientation = 1
    position, end = 2, len(data) - 10
    if data[:2] != b"\xff\xd8":
        return None
    while position < end and data[position] == 0xFF:
        marker = data[position + 1]
        if marker == 0xFF:  # a fill byte
            position += 1
            continue
        length = int.from_bytes(data[position + 2 : position + 4], "big")
        if marker == 0xE1:  # EXIF or XMP, both of which may specify a rotation
            segment = data[position + 4 : position + 2 + length]
            if segment.startswith(b"Exif\0\0"):
                orientation = _exif_orientation(segment)
            elif b"tiff:Orientation" in segment:
                return None
        elif 0xC0 <= marker <= 0xC2:
            height = int.from_bytes(data[position + 5 : position + 7], "big")
            width = int.from_bytes(data[position + 7 : position + 9], "big")
            bits, components = data[position + 4], data[position + 9]
            if not (bits == 8 and components in (1, 3) and height and width):
                return None
            sequential = marker != 0xC2
            return _JpegHeader(height, width, position + 5, sequential, components, orientation)
        elif marker in (0xDA, 0xD9) or (0xC3 <= marker <= 0xCF and marker not in (0xC4, 0xCC)):
            return None
        position += 2 + length
    return None


def _exif_orientation(segment: bytes) -> int:
    exif = Image.Exif()
    try:
        exif.load(segment)
        value = exif.get(ExifTags.Base.Orientation, 1)
    except Exception:  # damaged EXIF data loses the rotation, not the image, as in Pillow
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _jpeg_rows(
    data: bytes,
    header: _JpegHeader,
    channels: int,
    max_pixels: int,
    keep: Callable[[Pixels], None],
    bottom: int,
) -> Pixels:
    """Decode the upright image; of one stored upright, perhaps only the rows above `bottom`."""
    # Subsampled colours are interpolated, which takes one more row. A block has at most 32 rows.
    rows = -(-(bottom + 2) // 32) * 32
    space = "GRAY" if header.components == channels == 1 else "RGB"
    pixels: Pixels
    try:
        if (
            rows < header.height
            and header.sequential
            and header.orientation == 1
            and data.endswith(b"\xff\xd9")  # the file is not truncated
        ):
            # The decoder stops at the height given in the header, and warns of the bytes left over
            # unless it is not strict.
            shorter = bytearray(data)
            shorter[header.height_offset : header.height_offset + 2] = rows.to_bytes(2, "big")
            pixels = simplejpeg.decode_jpeg(shorter, space, strict=False)
        else:
            pixels = simplejpeg.decode_jpeg(data, space)
    except ValueError:
        return _pillow_pixels(data, channels, max_pixels)  # not kept: upper rows may be readable
    whole = pixels.shape[:2] == (header.height, header.width)
    if pixels.shape[2] != channels:
        pixels = _array_pixels(pixels, channels)
    pixels = np.ascontiguousarray(_upright(pixels, header.orientation))
    if whole:
        keep(pixels)
    return pixels


def _upright(pixels: Pixels, orientation: int) -> Pixels:
    """Undo the rotation and mirroring that EXIF's orientation tag (1 to 8) describes."""
    if orientation in _SWAPS_SIDES:
        pixels = pixels.transpose(1, 0, 2)
    vertical = -1 if orientation in (3, 4, 7, 8) else 1
    horizontal = -1 if orientation in (2, 3, 6, 7) else 1
    return pixels[::vertical, ::horizontal]
