"""Images kept in memory: the same batches as without, decoded once, within the bound."""

import io
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from augment_settings import augment, loader_config, noise, preprocess
from PIL import Image
from source_settings import data_config

from vision.data.batches import Batch, Loader, build_loader, training_batches
from vision.data.images.kept import KeptImages
from vision.data.order import BatchOrder
from vision.data.sources.build_source import build_source
from vision.data.sources.source import ArraySource, Source, StoredImage, take

SAMPLES = 30


class Files(Source):
    """Encoded images of many kinds, some of them damaged; counts how often each is read."""

    def __init__(self, damaged: bool = False) -> None:
        super().__init__(np.arange(SAMPLES, dtype=np.int64) % 3, ("cat", "dog", "bird"), 3)
        self.files = [encoded(index, damaged) for index in range(SAMPLES)]
        self.reads = RawArray("q", SAMPLES)

    def name(self, index: int) -> str:
        return f"folder/{index}"

    def read(self, index: int) -> StoredImage:
        self.reads[index] += 1
        return self.files[index]


def encoded(index: int, damaged: bool) -> bytes:
    height, width = [(16, 16), (40, 33), (90, 70), (33, 60), (100, 100)][index % 5]
    smooth = Image.fromarray(noise(5, 5, seed=index)).resize((width, height))
    exif = Image.Exif()
    exif[0x0112] = 6 if index % 4 == 3 else 1
    kind, options = [
        ("PNG", {}),
        ("JPEG", {"subsampling": "4:2:0"}),
        ("JPEG", {"progressive": True}),
        ("WEBP", {}),
        ("JPEG", {"restart_marker_rows": 1}),
        ("JPEG", {}),
    ][index % 6]
    image = smooth.convert("L") if index % 7 == 0 else smooth
    buffer = io.BytesIO()
    image.save(buffer, kind, exif=exif, **options)  # type: ignore[arg-type]
    data = bytearray(buffer.getvalue())
    if damaged and index % 3 == 1:  # the lower half, so that some crops can still be decoded
        data[len(data) * 2 // 3 : -2] = bytes(255 - byte for byte in data[len(data) * 2 // 3 : -2])
    if damaged and index % 11 == 5:
        data = data[: len(data) // 2]
    return bytes(data)


def loader(source: Source, crop: str, memory: int = 64, size: int = 24, **config: Any) -> Loader:
    settings = loader_config(**({"workers": 0} | config), memory=memory)
    data = data_config("shapes", on_error="skip", max_error_share=1.0)
    augmentation = augment("fast", crop=crop)
    return build_loader(
        source, preprocess(size), data, settings, augment=augmentation, seed=5, keep=True
    )


def content(batch: Batch) -> tuple[Any, ...]:
    return batch.images.tolist(), batch.labels.tolist(), batch.ids.tolist(), batch.failures


def epochs(loader: Loader, count: int = 3) -> list[tuple[Any, ...]]:
    order = BatchOrder(seed=3, batch_size=6)
    return [content(batch) for batch in training_batches(loader, order, 0, count * SAMPLES)]


@pytest.mark.parametrize("crop", ["random_resized", "random", "center"])
@pytest.mark.parametrize("damaged", [False, True])
def test_batches_are_the_same_to_the_bit_with_and_without(crop: str, damaged: bool) -> None:
    source = Files(damaged)
    assert epochs(loader(source, crop, memory=64)) == epochs(loader(source, crop, memory=0))
    # The pixels in memory are still those of the files.
    again = loader(source, crop, memory=64, size=50)
    assert epochs(again, 8)[20:] == epochs(loader(source, crop, memory=0, size=50), 8)[20:]


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_workers_share_one_memory_and_give_the_same_batches(start_method: str) -> None:
    source = Files()
    plain = epochs(loader(source, "random", memory=0))
    assert sum(source.reads) == 3 * SAMPLES
    source = Files()
    workers = 1 if start_method == "spawn" else 2  # a spawned one takes seconds to start
    kept = loader(source, "random", size=50, workers=workers, start_method=start_method)
    assert kept.workers == workers
    found = epochs(kept, 5)
    # Two workers may read an image at the same time, at the end of an epoch and in the next one.
    assert SAMPLES <= sum(source.reads) <= 2 * SAMPLES
    assert found == epochs(loader(Files(), "random", memory=0, size=50), 5)
    assert plain != found


def test_each_image_is_read_once_if_it_fits_into_its_share_of_the_memory() -> None:
    source = Files()
    epochs(loader(source, "random", size=50))  # 100 × 100 pixels are four times the input
    assert list(source.reads) == [1] * SAMPLES
    source = Files()
    epochs(loader(source, "random", size=24))  # 40 × 33 pixels fit, 90 × 70 do not
    assert list(source.reads) == [1 if index % 5 in (0, 1, 3) else 3 for index in range(SAMPLES)]
    source = Files()
    epochs(loader(source, "random", memory=0))
    assert list(source.reads) == [3] * SAMPLES


def test_memory_is_divided_among_images_and_never_exceeded() -> None:
    for images, memory, largest in ((10, 1000, 10**9), (3, 10**6, 50), (1000, 100, 50), (0, 9, 9)):
        kept = KeptImages(images, memory, largest, 1)
        assert len(kept.block) <= max(memory, 1)
        for index in range(images):
            for side in (1, 3, 9, 40):
                pixels = noise(side, side, 1, seed=side)
                kept.put(index, pixels)
                found = kept.get(index)
                assert found is None or found.nbytes <= min(largest, memory // images)
        assert kept.get(images) is None


def test_kept_pixels_are_those_that_were_put_and_read_only() -> None:
    kept = KeptImages(4, 10**5, 10**4, 3)
    assert all(kept.get(index) is None for index in range(5))
    images = {index: noise(5 + index, 9 - index, 3, seed=index) for index in (0, 2, 3)}
    for index, pixels in images.items():
        kept.put(index, pixels)
    for index, pixels in images.items():
        found = kept.get(index)
        assert found is not None
        assert np.array_equal(found, pixels)
        assert not found.flags.writeable
    assert kept.get(1) is None


def test_arrays_are_not_kept_again_but_generated_images_are() -> None:
    array = ArraySource(np.zeros(4, np.int64), ("a",), 3, "a", noise(4 * 8, 8).reshape(4, 8, 8, 3))
    part = take(array, np.array([1, 3]))
    assert loader(array, "random").pipeline.kept is None
    assert loader(part, "random").pipeline.kept is None
    shapes = build_source(data_config("shapes"), "train")
    assert loader(take(shapes, np.array([1, 3])), "random").pipeline.kept is not None


def test_folder_of_files_needs_them_once(tmp_path: Path) -> None:
    for number in range(12):
        path = tmp_path / "train" / ("cat", "dog")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise(20, 20, seed=number)).save(path)
    source = build_source(data_config("folder", root=str(tmp_path)), "train")
    kept, order = loader(source, "random"), BatchOrder(seed=3, batch_size=6)
    expected = [
        content(batch) for batch in training_batches(loader(source, "random"), order, 12, 24)
    ]
    list(training_batches(kept, order, 0, 12))
    for path in tmp_path.rglob("*.png"):
        path.unlink()
    assert [content(batch) for batch in training_batches(kept, order, 12, 24)] == expected
