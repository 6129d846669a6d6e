"""Odd and broken files, and the fast way of reading JPEG files against Pillow's."""

import io
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from vision.data.images.decode import UnreadableImageError, decode, open_image

TOLERANCE = 2
"""Largest difference from Pillow: both use libjpeg-turbo, but not always the same version."""


def scene(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth colours with some noise: compresses like a photograph."""
    random = np.random.default_rng(seed)
    small = random.integers(0, 256, (height // 16 + 2, width // 16 + 2, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))
    noisy = smooth.astype(int) + random.integers(-12, 13, smooth.shape)
    return Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def plain(data: bytes, mode: str = "RGB") -> np.ndarray:
    """What a few lines of Pillow make of the file."""
    return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert(mode)).astype(
        int
    )


@settings(max_examples=60, deadline=None)
@given(
    width=st.integers(1, 150),
    height=st.integers(1, 150),
    subsampling=st.sampled_from(["4:4:4", "4:2:2", "4:2:0"]),
    progressive=st.booleans(),
    restart=st.sampled_from([0, 3]),
    grey=st.booleans(),
    channels=st.sampled_from([1, 3]),
    corners=st.tuples(*[st.floats(0, 1)] * 4),
)
def test_jpeg_region_fast_way_equals_pillow(
    width: int,
    height: int,
    subsampling: str,
    progressive: bool,
    restart: int,
    grey: bool,
    channels: int,
    corners: tuple[float, float, float, float],
) -> None:
    image = scene(width, height).convert("L" if grey else "RGB")
    data = encoded(
        image,
        "JPEG",
        quality=85,
        subsampling=subsampling,
        progressive=progressive,
        restart_marker_rows=restart,
    )
    top, bottom = sorted(round(corner * height) for corner in corners[:2])
    left, right = sorted(round(corner * width) for corner in corners[2:])
    top, left = min(top, height - 1), min(left, width - 1)
    bottom, right = max(bottom, top + 1), max(right, left + 1)
    opened = open_image(data, channels, "a.jpg")
    region = opened.region(top, left, bottom - top, right - left)
    expected = plain(data, "RGB" if channels == 3 else "L").reshape(height, width, channels)
    assert region.dtype == np.uint8
    assert np.abs(region - expected[top:bottom, left:right]).max() <= TOLERANCE


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_image_with_exif_orientation_comes_upright(orientation: int, kind: str) -> None:
    image = scene(60, 40)
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(image, kind, exif=exif)
    opened = open_image(data, 3, "a")
    expected = plain(data)
    assert (opened.height, opened.width) == ((60, 40) if orientation >= 5 else (40, 60))
    assert np.abs(opened.pixels() - expected).max() <= TOLERANCE
    assert np.abs(opened.region(3, 5, 20, 21) - expected[3:23, 5:26]).max() <= TOLERANCE


def test_jpeg_with_orientation_in_xmp_only_comes_upright() -> None:
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    data = encoded(scene(60, 40), "JPEG", xmp=xmp)
    assert decode(data, 3, "a").shape == plain(data).shape == (60, 40, 3)


def test_cmyk_jpeg_gives_rgb_as_pillow_does() -> None:
    data = encoded(scene(50, 40).convert("CMYK"), "JPEG")
    assert np.array_equal(decode(data, 3, "a.jpg"), plain(data))


@pytest.mark.parametrize("channels", [1, 3])
def test_sixteen_bit_png_keeps_its_upper_eight_bits(channels: int) -> None:
    values = (np.arange(64 * 64, dtype=np.uint16) * 16).reshape(64, 64)
    data = encoded(Image.fromarray(values), "PNG")
    pixels = decode(data, channels, "a.png")
    assert pixels.shape == (64, 64, channels)
    assert np.array_equal(pixels[:, :, 0], values >> 8)


def test_palette_and_bilevel_images_get_their_colours() -> None:
    image = scene(40, 30)
    palette = encoded(image.quantize(16), "PNG")
    assert np.array_equal(decode(palette, 3, "a.png"), plain(palette))
    bilevel = encoded(image.convert("1"), "PNG")
    assert set(np.unique(decode(bilevel, 1, "a.png"))) == {0, 255}


@pytest.mark.parametrize("kind", ["RGBA", "LA", "PA"])
def test_transparent_image_shows_white(kind: str) -> None:
    image = Image.new("RGBA", (4, 1), (100, 100, 100, 255))
    image.putpixel((1, 0), (100, 100, 100, 0))
    image.putpixel((2, 0), (0, 0, 0, 51))
    if kind == "PA":
        image = Image.new("P", (4, 1), 1)
        image.putpalette([0, 0, 0, 100, 100, 100])
        image.putpixel((1, 0), 0)
        data = encoded(image, "PNG", transparency=0)
        assert decode(data, 3, "a.png")[0, :, 0].tolist() == [100, 255, 100, 100]
        return
    data = encoded(image.convert(kind), "PNG")
    # Black with an opacity of one fifth on white: 0.2 · 0 + 0.8 · 255.
    assert decode(data, 3, "a.png")[0, :, 0].tolist() == [100, 255, 204, 100]
    assert decode(data, 1, "a.png")[0, :, 0].tolist() == [100, 255, 204, 100]


def test_animation_gives_its_first_frame() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "green", "blue")]
    for kind in ("GIF", "WEBP", "PNG"):
        options = {"lossless": True} if kind == "WEBP" else {}
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        assert decode(data, 3, "a")[0, 0].tolist() == [255, 0, 0], kind


def test_file_with_wrong_extension_is_read_by_content(tmp_path: Path) -> None:
    path = tmp_path / "really_a_png.jpg"
    path.write_bytes(encoded(scene(20, 20), "PNG"))
    assert np.array_equal(decode(path.read_bytes(), 3, str(path)), np.asarray(scene(20, 20)))


@pytest.mark.parametrize("kept", [0.3, 0.6, 0.95])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_truncated_file_is_unreadable_whatever_the_crop(kept: float, kind: str) -> None:
    data = encoded(scene(200, 200), kind)
    data = data[: int(len(data) * kept)]
    with pytest.raises(UnreadableImageError, match=r"folder/cut: .*truncated"):
        open_image(data, 3, "folder/cut").region(0, 0, 8, 8)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html><html>not found</html>", "known format.*DOCTYPE"),
        (b"\xff\xd8\xff\xe0", "known format|truncated|broken"),
        (b"\x89PNG\r\n\x1a\n", "known format|broken|truncated"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "known format"),
    ],
)
def test_file_without_image_is_unreadable_by_name(data: bytes, reason: str) -> None:
    with pytest.raises(UnreadableImageError, match=f"some/path.jpg: .*({reason})"):
        decode(data, 3, "some/path.jpg")


def test_floating_point_image_is_refused() -> None:
    data = encoded(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF")
    with pytest.raises(UnreadableImageError, match="no stated range"):
        decode(data, 3, "a.tiff")


def png_header(width: int, height: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(bytes(1000)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixels + chunk(b"IEND", b"")


def test_decompression_bomb_is_refused_before_memory_is_taken() -> None:
    jpeg = bytearray(encoded(scene(64, 64), "JPEG"))
    frame = jpeg.index(b"\xff\xc0")
    jpeg[frame + 5 : frame + 9] = struct.pack(">HH", 60_000, 60_000)
    for data in (png_header(60_000, 60_000), bytes(jpeg)):
        with pytest.raises(UnreadableImageError, match=r"bomb.*pixels|60000 × 60000 pixels"):
            open_image(data, 3, "bomb")
    with pytest.raises(UnreadableImageError, match=r"100 × 100 pixels are more than.*9,999"):
        open_image(encoded(scene(100, 100), "JPEG"), 3, "bomb", max_pixels=9_999)


def test_image_of_thirty_thousand_pixels_length_is_read() -> None:
    image = Image.new("RGB", (30_000, 40), (10, 200, 30))
    for kind in ("JPEG", "PNG"):
        pixels = decode(encoded(image, kind), 3, "long")
        assert pixels.shape == (40, 30_000, 3)
        assert np.abs(pixels[-1, -1].astype(int) - [10, 200, 30]).max() <= 3


def test_arrays_are_checked_and_converted() -> None:
    grey = np.arange(12, dtype=np.uint8).reshape(3, 4)
    assert np.array_equal(decode(grey, 3, "a"), np.repeat(grey[:, :, None], 3, axis=2))
    assert np.array_equal(decode(grey[:, :, None], 1, "a")[:, :, 0], grey)
    colour = np.asarray(scene(5, 6))
    assert np.array_equal(decode(colour, 3, "a"), colour)
    assert np.array_equal(decode(colour, 1, "a")[:, :, 0], np.asarray(scene(5, 6).convert("L")))
    with pytest.raises(UnreadableImageError, match=r"a: expected a uint8 array.*float64"):
        decode(np.zeros((2, 2, 3)), 3, "a")  # type: ignore[arg-type]
    with pytest.raises(UnreadableImageError, match="a: expected a uint8 array"):
        decode(np.zeros((0, 2, 3), np.uint8), 3, "a")


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10_000), kind=st.sampled_from(["JPEG", "PNG", "GIF", "TIFF", "WEBP"]))
def test_damaged_file_gives_pixels_or_one_kind_of_error(seed: int, kind: str) -> None:
    random = np.random.default_rng(seed)
    data = bytearray(encoded(scene(40, 40), kind))
    for place in random.integers(0, len(data), 1 + seed % 12):
        data[place] = random.integers(256)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            image = open_image(bytes(data), 3, "damaged", max_pixels=1_000_000)
            pixels = image.pixels()
        except UnreadableImageError as error:
            assert str(error).startswith("damaged: ")  # noqa: PT017 (both outcomes are right)
        else:
            assert pixels.shape == (image.height, image.width, 3)
