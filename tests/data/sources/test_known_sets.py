"""Sets with a name: Fashion-MNIST, CIFAR, ImageNet, torchvision's and Hugging Face's."""

import gzip
import hashlib
import pickle
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from source_settings import YAML, data_config, image_bytes, make_folder, shade_of
from timm.data import ImageNetInfo
from torchvision import datasets as torchvision_datasets

from vision.config import ConfigError
from vision.data.sources.build_source import build_source, describe, list_splits
from vision.data.sources.known_sets import CIFAR10, CIFAR100, FASHION_MNIST, SETS
from vision.data.sources.source import Source
from vision.data.sources.wordnet import imagenet_synsets

RANDOM = np.random.default_rng(0)


def write_idx(path: Path, array: np.ndarray) -> None:
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    path.write_bytes(gzip.compress(header + array.tobytes()))


def make_fashion_mnist(root: Path) -> dict[str, np.ndarray]:
    arrays = {}
    for prefix, number in (("train", 30), ("t10k", 10)):
        arrays[prefix] = RANDOM.integers(0, 256, (number, 28, 28), dtype=np.uint8)
        write_idx(root / f"{prefix}-images-idx3-ubyte.gz", arrays[prefix])
        labels = (np.arange(number) % 10).astype(np.uint8)
        write_idx(root / f"{prefix}-labels-idx1-ubyte.gz", labels)
    return arrays


def make_cifar10(root: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    """The files as torchvision expects them, with its list of checksums adapted."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    arrays, sums = {}, {}
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        arrays[name] = RANDOM.integers(0, 256, (10, 3, 32, 32), dtype=np.uint8)
        batch = {"data": arrays[name].reshape(10, -1), "labels": list(range(10))}
        (folder / name).write_bytes(pickle.dumps(batch))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list(CIFAR10)}))
    for path in folder.iterdir():
        sums[path.name] = hashlib.md5(path.read_bytes()).hexdigest()
    kind = torchvision_datasets.CIFAR10
    monkeypatch.setattr(kind, "train_list", [[n, sums[n]] for n in arrays if n != "test_batch"])
    monkeypatch.setattr(kind, "test_list", [["test_batch", sums["test_batch"]]])
    monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": sums["batches.meta"]})
    return arrays


def test_describe_known_sets_needs_neither_data_nor_torch() -> None:
    code = """
import sys, yaml
from pathlib import Path
from vision.config import parse
from vision.data.configs import DataConfig
from vision.data.sources.build_source import describe
for name in ("shapes", "fashion_mnist", "cifar10", "cifar100", "imagenet"):
    values = yaml.safe_load(Path(sys.argv[1], name + ".yaml").read_text())
    spec = describe(parse(DataConfig, values))
    assert spec.classes and len(spec.classes) == spec.number_of_classes
    print(name, *spec.image_size, spec.channels, spec.number_of_classes)
assert "torch" not in sys.modules and "torchvision" not in sys.modules
"""
    run = subprocess.run(
        [sys.executable, "-c", code, str(YAML)], check=True, capture_output=True, text=True
    )
    assert run.stdout.splitlines() == [
        "shapes 48 48 3 8",
        "fashion_mnist 28 28 1 10",
        "cifar10 32 32 3 10",
        "cifar100 32 32 3 100",
        "imagenet 224 224 3 1000",
    ]


def test_known_class_names_are_those_of_torchvision_and_timm() -> None:
    assert tuple(torchvision_datasets.FashionMNIST.classes) == FASHION_MNIST
    assert list(CIFAR100) == sorted(CIFAR100)
    assert len(CIFAR100) == len(set(CIFAR100)) == 100
    info = ImageNetInfo()
    names = describe(data_config("imagenet")).classes
    assert names is not None
    assert len(set(names)) == 1000  # two cranes are told apart
    for index, synset in enumerate(imagenet_synsets()):
        assert synset == info.index_to_label_name(index)
        assert names[index].startswith(info.index_to_description(index))


def test_fashion_mnist_files_as_distributed_give_images_and_labels(tmp_path: Path) -> None:
    arrays = make_fashion_mnist(tmp_path)
    config = data_config("fashion_mnist", root=str(tmp_path))
    train, val = (build_source(config, split) for split in ("train", "val"))
    assert isinstance(train, Source)
    assert (len(train), len(val), train.channels) == (30, 10, 1)
    assert np.array_equal(train.read(4)[..., 0], arrays["train"][4])
    assert np.array_equal(val.read(7)[..., 0], arrays["t10k"][7])
    assert val.labels.tolist() == list(range(10))
    assert list_splits(config) == ("train", "val")  # test would be the same images as val
    held_out = data_config("fashion_mnist", root=str(tmp_path), val_fraction=1 / 3)
    assert [len(build_source(held_out, s)) for s in ("train", "val", "test")] == [20, 10, 10]
    assert list_splits(held_out) == ("train", "val", "test")


def test_fashion_mnist_missing_or_damaged_files_say_what_to_do(tmp_path: Path) -> None:
    config = data_config("fashion_mnist", root=str(tmp_path))
    with pytest.raises(ConfigError, match=r"train-images-idx3-ubyte .*dataset-fashion-mnist"):
        build_source(config, "train")
    make_fashion_mnist(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"not gzip", gzip.compress(b"short"), b""):
        path.write_bytes(damaged)
        with pytest.raises(OSError, match=r"train-images-idx3-ubyte\.gz is damaged"):
            build_source(config, "train")


def test_cifar10_in_torchvision_files_gives_images_and_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = make_cifar10(tmp_path, monkeypatch)
    config = data_config("cifar10", root=str(tmp_path))
    train, val = (build_source(config, split) for split in ("train", "val"))
    assert (len(train), len(val), train.channels, train.classes) == (50, 10, 3, CIFAR10)
    assert np.array_equal(train.read(13), arrays["data_batch_2"][3].transpose(1, 2, 0))
    assert np.array_equal(val.read(2), arrays["test_batch"][2].transpose(1, 2, 0))
    assert train.labels[13] == 3


@pytest.mark.parametrize("second", ["val", "test"])
def test_cifar10_as_a_folder_of_images_is_found(tmp_path: Path, second: str) -> None:
    make_folder(tmp_path / "train", dict.fromkeys(CIFAR10, 2))
    make_folder(tmp_path / second, dict.fromkeys(CIFAR10, 1), first=50)
    config = data_config("cifar10", root=str(tmp_path))
    assert (len(build_source(config, "train")), build_source(config, "train").classes) == (
        20,
        CIFAR10,
    )
    assert shade_of(build_source(config, "val").read(3)) == 53
    (tmp_path / "train" / "zebra").mkdir()
    (tmp_path / "train" / "zebra" / "1.png").write_bytes(image_bytes(1))
    with pytest.raises(
        ConfigError, match=r"not the classes of CIFAR10: unknown zebra.*data=folder"
    ):
        build_source(config, "train")


def test_imagenet_folders_have_readable_names_and_must_be_complete(tmp_path: Path) -> None:
    for split in ("train", "val"):
        make_folder(tmp_path / split, dict.fromkeys(imagenet_synsets(), 1))
    config = data_config("imagenet", root=str(tmp_path))
    source = build_source(config, "val")
    assert source.classes == describe(config).classes
    assert source.classes[207] == "golden retriever"
    assert "/n02099601/" in source.name(207)
    (tmp_path / "val" / "n02099601" / "0000.png").unlink()
    (tmp_path / "val" / "n02099601").rmdir()
    with pytest.raises(ConfigError, match=r"missing n02099601"):
        build_source(config, "val")
    assert list_splits(config) == ("train", "val")


@pytest.mark.parametrize("choice", ["cifar10", "cifar100", "imagenet"])
def test_known_sets_that_are_not_there_say_what_to_put_where(tmp_path: Path, choice: str) -> None:
    config = data_config(choice, root=str(tmp_path))
    with pytest.raises(ConfigError, match=rf"Expected in {tmp_path}: .*train/"):
        build_source(config, "train")


def test_torchvision_sets_are_all_known_to_torchvision() -> None:
    for name, facts in SETS.items():
        assert hasattr(torchvision_datasets, name)
        assert "train" in facts.arguments
        assert facts.classes is None or len(facts.classes) == facts.number_of_classes


@pytest.mark.parametrize("name", sorted(set(SETS) - {"PCAM"}))  # which needs h5py first of all
def test_torchvision_set_that_is_not_there_is_a_config_error(tmp_path: Path, name: str) -> None:
    options = {"split": "letters"} if name == "EMNIST" else {}
    config = data_config("torchvision", name=name, root=str(tmp_path), options=options)
    with pytest.raises(ConfigError, match=r"Expected in "):
        build_source(config, "train")
    assert describe(config).number_of_classes == (
        37 if name == "EMNIST" else SETS[name].number_of_classes
    )


def test_torchvision_name_misspelt_is_suggested(tmp_path: Path) -> None:
    config = data_config("torchvision", name="Flowers", root=str(tmp_path))
    with pytest.raises(ConfigError, match=r"'Flowers' .* Did you mean 'Flowers102'"):
        build_source(config, "train")


def test_torchvision_wrong_option_is_named(tmp_path: Path) -> None:
    config = data_config("torchvision", name="DTD", root=str(tmp_path), options={"partion": 2})
    with pytest.raises(ConfigError, match=r"data.options: .*DTD.*partion"):
        build_source(config, "train")


def test_torchvision_eurosat_reads_its_files_and_is_split_on_demand(tmp_path: Path) -> None:
    make_folder(tmp_path / "eurosat" / "2750", {"Forest": 6, "River": 4})
    config = data_config("torchvision", name="EuroSAT", root=str(tmp_path))
    source = build_source(config, "train")
    assert source.classes == ("Forest", "River")
    assert [shade_of(source.read(i)) for i in range(10)] == list(range(10))
    with pytest.raises(ConfigError, match=r"no images for val.*val_fraction"):
        build_source(config, "val")
    split = data_config("torchvision", name="EuroSAT", root=str(tmp_path), val_fraction=0.5)
    assert [len(build_source(split, s)) for s in ("train", "val")] == [5, 5]


def test_torchvision_svhn_arrays_equal_what_torchvision_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scipy_io = pytest.importorskip("scipy.io", reason="torchvision reads SVHN with scipy")
    images = RANDOM.integers(0, 256, (32, 32, 3, 6), dtype=np.uint8)
    labels = np.array([[1], [10], [3], [4], [10], [9]], dtype=np.uint8)
    scipy_io.savemat(tmp_path / "train_32x32.mat", {"X": images, "y": labels})
    checksum = hashlib.md5((tmp_path / "train_32x32.mat").read_bytes()).hexdigest()
    kind = torchvision_datasets.SVHN
    train = ["", "train_32x32.mat", checksum]
    monkeypatch.setattr(kind, "split_list", {**kind.split_list, "train": train})
    source = build_source(data_config("torchvision", name="SVHN", root=str(tmp_path)), "train")
    assert source.labels.tolist() == [1, 0, 3, 4, 0, 9]
    expected = kind(str(tmp_path), split="train")
    for i in range(6):
        assert np.array_equal(source.read(i), np.asarray(expected[i][0]))


def test_huggingface_without_the_library_says_how_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="pip install datasets"):
        build_source(data_config("huggingface", path="x"), "train")


@pytest.mark.parametrize("layout", ["saved", "folder"])
def test_huggingface_local_set_gives_bytes_labels_and_names(tmp_path: Path, layout: str) -> None:
    library = pytest.importorskip("datasets", reason="optional extra: pip install datasets")
    root = tmp_path / "set"
    if layout == "folder":
        make_folder(root / "train", {"cat": 3, "dog": 2})
        make_folder(root / "validation", {"cat": 1, "dog": 1}, first=100)
    else:
        features = library.Features(
            {"image": library.Image(), "species": library.ClassLabel(names=["cat", "dog"])}
        )
        parts = {"train": (range(5), [0, 0, 0, 1, 1]), "validation": ((100, 101), [0, 1])}
        library.DatasetDict(
            {
                split: library.Dataset.from_dict(
                    {
                        "image": [{"bytes": image_bytes(s), "path": None} for s in shades],
                        "species": labels,
                    },
                    features=features,
                )
                for split, (shades, labels) in parts.items()
            }
        ).save_to_disk(root)
    config = data_config("huggingface", path=str(root), cache=str(tmp_path / "cache"))
    train, val = (build_source(config, split) for split in ("train", "val"))
    assert isinstance(train, Source)
    assert train.classes == describe(config).classes == ("cat", "dog")
    assert train.labels.tolist() == [0, 0, 0, 1, 1]
    assert [shade_of(train.read(i)) for i in range(5)] == list(range(5))
    assert [shade_of(val.read(i)) for i in range(2)] == [100, 101]
    assert train.name(3) == f"{root}:train[3]"
    wrong = data_config(
        "huggingface", path=str(root), cache=str(tmp_path / "cache"), label_column="lable"
    )
    with pytest.raises(ConfigError, match="unknown column 'lable'"):
        build_source(wrong, "train")


def test_huggingface_path_that_is_not_there_is_a_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = pytest.importorskip("datasets", reason="optional extra: pip install datasets")
    monkeypatch.setattr(library.config, "HF_HUB_OFFLINE", True)
    config = data_config("huggingface", path=str(tmp_path / "none"), cache=str(tmp_path))
    with pytest.raises(ConfigError, match="cannot be read"):
        build_source(config, "train")
