"""The embedded data set: reproducible, told by all three cues together, masks that fit."""

import subprocess
import sys

import numpy as np
import pytest
from source_settings import data_config

from vision.data.sources.build_source import build_source
from vision.data.sources.shapes import CLASSES, COLOURS, KINDS, Shapes, two_objects
from vision.data.sources.source import Source

SIZE = (48, 48)


@pytest.fixture(scope="module")
def samples() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    train, val = Shapes(SIZE, 0, "train", 3000), Shapes(SIZE, 0, "val", 1500)
    images = [np.stack([s.read(i) for i in range(len(s))]) for s in (train, val)]
    return images[0], train.labels, images[1], val.labels


def probe(features: np.ndarray, labels: np.ndarray, tests: np.ndarray, truth: np.ndarray) -> float:
    """Accuracy of a linear classifier: ridge regression to one-hot targets, best of 5 penalties."""
    mean, scale = features.mean(0), features.std(0) + 1e-6
    x, z = ((f - mean) / scale for f in (features, tests))
    x, z = (np.column_stack([f, np.ones(len(f))]) for f in (x, z))
    target = np.eye(len(CLASSES))[labels]
    accuracies = []
    for penalty in (0.1, 1.0, 10.0, 100.0, 1000.0):
        weights = np.linalg.solve(x.T @ x + penalty * np.eye(x.shape[1]), x.T @ target)
        accuracies.append(float(((z @ weights).argmax(1) == truth).mean()))
    return max(accuracies)


def test_shapes_source_any_split_follows_the_protocol() -> None:
    source = build_source(data_config("shapes", val_samples=20), "val")
    assert isinstance(source, Source)
    assert (len(source), source.channels, source.classes) == (20, 3, CLASSES)
    assert len(CLASSES) == len(set(CLASSES)) == 8
    assert source.read(3).shape == (48, 48, 3)
    assert source.read(3).dtype == np.uint8


def test_shapes_image_same_coordinates_is_identical_and_otherwise_different() -> None:
    source = Shapes(SIZE, 5, "train", 100)
    again = Shapes(SIZE, 5, "train", 50)  # the number of samples changes no image
    assert np.array_equal(source.read(17), again.read(17))
    others = [Shapes(SIZE, 6, "train", 100), Shapes(SIZE, 5, "val", 100)]
    assert not any(np.array_equal(source.read(17), other.read(17)) for other in others)
    assert not np.array_equal(source.read(17), source.read(17 + len(CLASSES)))


def test_shapes_labels_any_number_are_balanced_and_end_at_the_last() -> None:
    source = Shapes(SIZE, 0, "train", 803)
    counts = np.bincount(source.labels)
    assert counts.max() - counts.min() <= 1
    with pytest.raises(IndexError):
        source.read(803)


def test_shapes_mask_of_each_class_covers_pixels_of_its_colour() -> None:
    source = Shapes((64, 64), 0, "test", 80)
    for index in range(80):
        mask, image = source.mask(index), source.read(index).astype(float)
        assert mask.shape == (64, 64)
        assert mask.dtype == np.bool_
        assert 0.05 < mask.mean() < 0.45
        # The object's mean colour points to its own class colour, not to the other one.
        mean = image[mask].mean(0)
        own = KINDS[source.labels[index]][0]
        cosine = {
            name: mean @ np.array(c) / np.linalg.norm(mean) / np.linalg.norm(c)
            for name, c in COLOURS.items()
        }
        assert max(cosine, key=lambda name: cosine[name]) == own


def test_shapes_mask_of_disc_and_cross_has_the_area_of_the_shape() -> None:
    source = Shapes((96, 96), 1, "val", 80)
    for index in range(80):
        rows, columns = np.nonzero(source.mask(index))
        radius = np.hypot(rows - rows.mean(), columns - columns.mean()).max()
        filled = len(rows) / (np.pi * radius**2)
        disc = KINDS[source.labels[index]][2] == "disc"
        assert (filled > 0.9) if disc else (filled < 0.65)


@pytest.mark.parametrize("size", [(48, 48), (40, 72), (16, 16), (224, 224)])
def test_two_objects_any_size_have_two_classes_and_disjoint_masks(size: tuple[int, int]) -> None:
    for index in range(20):
        scene = two_objects(size, 3, index)
        assert scene.image.shape == (*size, 3)
        assert scene.labels[0] != scene.labels[1]
        first, second = scene.masks
        assert first.any()
        assert second.any()
        assert not (first & second).any()
    assert np.array_equal(two_objects(size, 3, 7).image, two_objects(size, 3, 7).image)


def test_shapes_mean_colour_alone_tells_less_than_half(samples: tuple[np.ndarray, ...]) -> None:
    train, labels, val, truth = samples
    accuracy = probe(train.mean((1, 2)), labels, val.mean((1, 2)), truth)
    assert 0.15 < accuracy < 0.5  # more than chance: the probe works


@pytest.mark.parametrize("bins", [4, 8])
def test_shapes_colour_histogram_alone_tells_less_than_half(
    samples: tuple[np.ndarray, ...], bins: int
) -> None:
    def histogram(images: np.ndarray) -> np.ndarray:
        level = images.astype(int) * bins // 256
        cell = (level[..., 0] * bins + level[..., 1]) * bins + level[..., 2]
        return np.stack([np.bincount(c.ravel(), minlength=bins**3) for c in cell]) ** 0.5

    train, labels, val, truth = samples
    assert 0.15 < probe(histogram(train), labels, histogram(val), truth) < 0.5


def test_shapes_best_single_patch_alone_tells_less_than_half(
    samples: tuple[np.ndarray, ...],
) -> None:
    train, labels, val, truth = samples
    best = 0.0
    for y in range(0, 48, 8):
        for x in range(0, 48, 8):
            patches = [p[:, y : y + 8, x : x + 8].reshape(len(p), -1) / 255 for p in (train, val)]
            best = max(best, probe(patches[0], labels, patches[1], truth))
    assert 0.15 < best < 0.5


def test_shapes_import_and_drawing_never_load_torch() -> None:
    code = (
        "import sys; from vision.data.sources.shapes import Shapes; "
        "Shapes((32, 32), 0, 'train', 8).read(0); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
