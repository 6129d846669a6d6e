"""Write a data set as tar shards of smaller images, with an index and checksums.

A preparation that was killed continues when it is run again, and gives the same bytes: the order of
the images, their encoding and the tar headers depend only on the data and the settings. Shards get
their names when they are complete; complete shards are recorded in a file until the split is done.
"""

import hashlib
import io
import json
import tarfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vision.config import ConfigError
from vision.data.configs import Split
from vision.data.images.decode import UnreadableImageError, open_image, to_image
from vision.data.sources.build_source import build_source, list_splits
from vision.data.sources.folder import FORMATS
from vision.data.sources.shard_index import index_file, open_index
from vision.data.sources.shards import DESCRIPTION, find_shards, read_description
from vision.data.sources.source import Source
from vision.data.tools.configs import PrepareConfig
from vision.data.tools.pool import ordered_map
from vision.files import replacing, write_text
from vision.terminal import tracked

_FORMAT = 1
_MEGABYTE = 1_000_000
_ORDER_KEY = 4
_DECISIVE = {"short_side", "image_format", "quality", "shard_size"}
"""Settings that decide the bytes of the shards."""


@dataclass(frozen=True)
class Shard:
    """One complete shard."""

    name: str
    count: int
    bytes: int
    sha256: str
    end: int
    """Number of images of the split in this shard and those before it, including skipped ones."""
    skipped: list[str]
    """Names and reasons of the images that could not be read."""


@dataclass
class Prepared:
    """The shards of one split."""

    split: Split
    shards: list[Shard] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Number of images of the split that are written or skipped."""
        return self.shards[-1].end if self.shards else 0

    @property
    def count(self) -> int:
        """Number of images written."""
        return sum(shard.count for shard in self.shards)

    @property
    def skipped(self) -> list[str]:
        """Names and reasons of the images that could not be read."""
        return [name for shard in self.shards for name in shard.skipped]

    def line(self) -> str:
        """Return a summary in one line."""
        size = sum(shard.bytes for shard in self.shards) / _MEGABYTE
        skipped = f", {len(self.skipped)} unreadable images skipped" if self.skipped else ""
        shards = f"{len(self.shards)} shards, {size:,.1f} MB"
        return f"{self.split}: {self.count:,} images in {shards}{skipped}"


def prepare(config: PrepareConfig) -> list[Prepared]:
    """Write and verify every split below `config.output`; complete ones are only verified."""
    splits = list_splits(config.data)
    return [prepare_split(build_source(config.data, split), split, config) for split in splits]


def prepare_split(source: Source, split: Split, config: PrepareConfig) -> Prepared:
    """Write one source as `split`-000000.tar and so on, and record it in dataset.json.

    Raise OSError if more images are unreadable than the config allows. A split that is complete is
    only verified.
    """
    output = config.output
    if source.multi_label:
        raise ConfigError(
            "data: shards hold one class per image, but these images have several labels; train on "
            "them as they are."
        )
    output.mkdir(parents=True, exist_ok=True)
    settings = config.model_dump(include=_DECISIVE)
    identity = {"settings": settings, "source": _fingerprint(source)}
    noted = _check_description(output, source, split, identity)
    if split in noted["splits"]:
        done = Prepared(split, [Shard(**shard) for shard in noted["splits"][split]["shards"]])
        verify(output, done)
        return done
    journal = output / f"{split}.progress"
    done = _resume(output, split, journal, identity)
    # Shuffled once, so that readers that go through a shard in order see all classes.
    order = np.random.default_rng([_ORDER_KEY]).permutation(len(source))[done.end :].tolist()
    results = ordered_map(partial(encode, source, config), order, config.workers)
    images = tracked(results, f"prepare {split}", len(source), done.end)
    while done.end < len(source):
        done.shards.append(_write_shard(source, config, done, images))
        _write_journal(journal, identity, done)
    verify(output, done)
    pattern = f"{split}-*.tar"
    open_index(find_shards(output, pattern), index_file(output, pattern, "label", None), "label")
    shards = [asdict(shard) for shard in done.shards]
    noted["splits"][split] = {"count": done.count, **identity, "shards": shards}
    write_text(output / DESCRIPTION, json.dumps(noted, indent=1, ensure_ascii=False) + "\n")
    journal.unlink()
    return done


@dataclass(frozen=True)
class Encoded:
    """An encoded image, or the reason why there is none."""

    index: int
    content: bytes = b""
    suffix: str = ""
    error: str = ""


def encode(source: Source, config: PrepareConfig, index: int) -> Encoded:
    """Read, shrink and encode one image."""
    try:
        content, kind = _encode(source, config, index)
    except OSError as error:
        return Encoded(index, error=str(error))
    return Encoded(index, content, FORMATS[kind][0])


def _encode(source: Source, config: PrepareConfig, index: int) -> tuple[bytes, str]:
    """Return the encoded image and its format."""
    stored, name = source.read(index), source.name(index)
    opened = open_image(stored, source.channels, name)
    pixels = opened.pixels()  # an unreadable file is found now, not in training
    short_side = min(opened.height, opened.width)
    limit = config.short_side or short_side
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
    kind = config.image_format.upper()
    options = {"optimize": True} if kind == "PNG" else {"quality": config.quality}
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue(), kind


def _write_shard(
    source: Source, config: PrepareConfig, done: Prepared, images: Iterator[Encoded]
) -> Shard:
    """Write the next shard; the file appears under its name when it is complete."""
    path = config.output / f"{done.split}-{len(done.shards):06d}.tar"
    digits = len(str(len(source) - 1))
    allowed = int(config.data.max_error_share * len(source) * (config.data.on_error == "skip"))
    count = 0
    skipped: list[str] = []
    with replacing(path) as raw:
        file = io.BufferedWriter(raw)
        with tarfile.TarFile(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for image in images:
                if image.error:
                    skipped.append(image.error)
                    total = len(done.skipped) + len(skipped)
                    if total > allowed:
                        raise OSError(
                            f"{image.error} ({total} of {len(source)} images cannot be read; "
                            f"data.on_error and data.max_error_share allow {allowed}.)"
                        )
                else:
                    count += 1
                    key = f"{image.index:0{digits}d}"
                    _add(tar, f"{key}{image.suffix}", image.content)
                    _add(tar, f"{key}.cls", str(source.labels[image.index]).encode())
                if file.tell() >= config.shard_size * _MEGABYTE:
                    break
        file.detach()  # writes the rest; `replacing` closes the file
    end = done.end + count + len(skipped)
    return Shard(path.name, count, path.stat().st_size, _checksum(path), end, skipped)


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)  # owner, time and mode are constants
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(output: Path, prepared: Prepared) -> None:
    """Read the shards back; raise OSError if a checksum or a number of images differs."""
    for shard in prepared.shards:
        path = output / shard.name
        if not path.is_file():
            raise OSError(f"{path} is missing. Remove {output} and prepare again.")
        checksum = _checksum(path)
        with tarfile.open(path, "r:") as tar:
            count = sum(member.name.endswith(".cls") for member in tar)
        if (checksum, count) != (shard.sha256, shard.count):
            raise OSError(
                f"{path} is damaged: {count} images with checksum {checksum[:12]}…, but "
                f"{shard.count} with {shard.sha256[:12]}… were written. Remove {output} and "
                "prepare again."
            )


def _fingerprint(source: Source) -> str:
    """Return a hash of the images' names, labels and classes."""
    digest = hashlib.sha256(json.dumps([source.classes, source.channels]).encode())
    digest.update(source.labels.tobytes())
    for index in range(len(source)):
        name = source.name(index).rpartition("/")[2]  # the folder may move
        digest.update(name.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _check_description(
    output: Path, source: Source, split: Split, identity: dict[str, Any]
) -> dict[str, Any]:
    """Return the record of the complete splits; ConfigError if this one does not match it."""
    fresh = {"format": _FORMAT, "classes": list(source.classes), "channels": source.channels}
    noted = read_description(output) or {**fresh, "splits": {}}
    for key, value in fresh.items():
        if noted.get(key) != value:
            raise ConfigError(f"output: {output} holds shards of another data set ({key} differs).")
    before = noted["splits"].get(split)
    if before is not None:
        _check_identity(output, {key: before[key] for key in identity}, identity)
    return noted


def _check_identity(output: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    if before == now:
        return
    changed = [
        f"{key} was {value}, is {now['settings'][key]}"
        for key, value in before["settings"].items()
        if value != now["settings"][key]
    ] or ["other images"]
    raise ConfigError(
        f"output: {output} holds shards prepared differently ({'; '.join(changed)}). Choose "
        "another folder, or remove this one."
    )


def _resume(output: Path, split: Split, journal: Path, identity: dict[str, Any]) -> Prepared:
    """Return the shards of an earlier preparation that was interrupted, if any."""
    done = Prepared(split)
    if not journal.is_file():
        found = sorted(output.glob(f"{split}-*.tar"))
        if found:
            raise ConfigError(
                f"output: {found[0]} exists already, but its origin is unknown. Choose "
                "another folder, or remove it."
            )
        _write_journal(journal, identity, done)
    head, *lines = journal.read_text(encoding="utf-8").splitlines()
    _check_identity(output, json.loads(head), identity)
    for line in lines:
        shard = Shard(**json.loads(line))
        path = output / shard.name
        if not path.is_file() or path.stat().st_size != shard.bytes:
            break  # it was removed: continue from here
        done.shards.append(shard)
    return done


def _write_journal(journal: Path, identity: dict[str, Any], done: Prepared) -> None:
    """Record the complete shards, atomically: a partial line could not be read."""
    lines = [json.dumps(identity), *(json.dumps(asdict(shard)) for shard in done.shards)]
    write_text(journal, "\n".join(lines) + "\n")
