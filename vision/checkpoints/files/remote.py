"""Weights by name: `timm:NAME.TAG` and `hf:owner/name@revision`, through the libraries' own caches.

timm and the hub's library are imported only when such a name is given.
"""

import dataclasses
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from vision.config import ConfigError, suggest

_OPEN_CLIP = {"open_clip": "open_clip_config.json"}
_JSON = {"config": "config.json", "preprocessor": "preprocessor_config.json", **_OPEN_CLIP}
HUB_FILES = {
    "model.safetensors": _JSON,
    "model.safetensors.index.json": _JSON,
    "pytorch_model.bin": _JSON,
    "pytorch_model.bin.index.json": _JSON,
    "open_clip_model.safetensors": _OPEN_CLIP,
    "open_clip_pytorch_model.bin": _OPEN_CLIP,
}
"""Weights of a repository, of which the first one that is there is taken; and the files beside them
that describe the model. A repository of OpenCLIP may hold its weights in the layout of transformers
or timm too, which config.json is about.
"""
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_DOWNLOAD_LIMIT = 16 * 2**20
"""Bytes of an index, which is read here to learn the names of the shards."""


def resolve(source: str, setting: str = "init") -> Path:
    """Where the file of a source is: downloaded, in the cache, or the path itself.

    Raises a ConfigError if there is no such name or file, and where nothing can be downloaded one
    that says what to place where. `setting` is the name of the setting that gave the source.
    """
    scheme, colon, name = source.partition(":")
    match scheme if colon else "":
        case "timm":
            return _timm(name, setting)
        case "hf":
            return _hub(name, None, source, setting)
    path = Path(source).expanduser()
    if path.exists():
        return path
    if colon and scheme.isalnum() and len(scheme) > 1:  # one letter may be a disk
        raise ConfigError(
            f"{setting}: '{source}' is neither a file nor a source that is known. Sources are "
            f"timm:NAME, hf:OWNER/NAME and paths."
        )
    beside = [other.name for other in path.parent.glob("[!.]*")]
    near = suggest(path.name, beside)
    if len(beside) > 9 and near.startswith("Known"):
        near = ""  # a long list of everything that is not meant helps nobody
    raise ConfigError(f"{setting}: {path} does not exist. {near}".rstrip())


def pretrained_config(source: str) -> dict[str, Any]:
    """What timm says of the weights that a `timm:` source names (mean, std, crop, classes …), as a
    config.json, which not every file of timm brings along.
    """
    values = dataclasses.asdict(_timm_config(source.removeprefix("timm:"), "init"))
    return {"config": {key: value for key, value in values.items() if value is not None}}


def _timm_config(name: str, setting: str) -> Any:
    import timm

    known = timm.list_pretrained()
    architectures = {full.partition(".")[0] for full in known}
    if name not in known and name not in architectures:
        architecture = name.partition(".")[0]
        choice = [full for full in known if full.startswith(f"{architecture}.")]
        raise ConfigError(
            f"{setting}: timm has no weights '{name}'. {suggest(name, choice or known)}"[:800]
        )
    return timm.models.get_pretrained_cfg(name)


def _timm(name: str, setting: str) -> Path:
    """The file that timm itself would load."""
    config = _timm_config(name, setting)
    source = f"timm:{name}"
    if config.hf_hub_id:
        return _hub(config.hf_hub_id, config.hf_hub_filename, source, setting)
    if not config.url:
        raise ConfigError(f"{setting}: timm knows '{name}', but publishes no weights of it.")
    from timm.models._hub import download_cached_file, get_cache_dir

    try:
        return Path(download_cached_file(config.url))
    except OSError as error:
        place = Path(get_cache_dir()) / config.url.rpartition("/")[2]
        raise ConfigError(
            f"{setting}: {source} cannot be downloaded ({error}). Bring {config.url} from another "
            f"machine to {place}, or anywhere else and give its path: {setting}=PATH"
        ) from error


def _hub(name: str, filename: str | None, source: str, setting: str) -> Path:
    """The weights of a repository, with the JSON files that belong to them beside.

    What is in the cache is taken as it is, so that machines without a network need not wait for it.
    """
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    if not _REPOSITORY.fullmatch(name):
        raise ConfigError(f"{setting}: '{source}' is not of the form hf:OWNER/NAME[@REVISION].")
    for cached in (True, False):
        for candidate in _candidates(filename):
            try:
                return _fetch_all(name, candidate, cached)
            except LocalEntryNotFoundError as error:
                if not cached:
                    raise _unavailable(name, source, setting, error) from error
            except EntryNotFoundError:
                continue
            except (HfHubHTTPError, OSError) as error:
                raise _unavailable(name, source, setting, error) from error
    names = ", ".join(_candidates(filename))
    raise ConfigError(f"{setting}: {source} has none of the files {names}.")


def _candidates(filename: str | None) -> tuple[str, ...]:
    """What to ask for. A named file may have a twin in the safe format."""
    if filename is None:
        return tuple(HUB_FILES)
    twin = Path(filename).with_suffix(".safetensors").name
    return (filename,) if twin == filename else (twin, filename)


def _fetch_all(name: str, filename: str, cached: bool) -> Path:
    """A file of weights, the shards that it names, and the settings, which not all weights have."""
    from huggingface_hub.errors import EntryNotFoundError

    path = _fetch(name, filename, cached)
    for shard in _shards(path) if filename.endswith(".index.json") else []:
        _fetch(name, shard, cached)
    for settings in HUB_FILES.get(filename, _JSON).values():
        with suppress(EntryNotFoundError):
            _fetch(name, settings, cached)
    return path


def _fetch(name: str, filename: str, cached: bool) -> Path:
    from huggingface_hub import hf_hub_download

    repository, _, revision = name.partition("@")
    path = hf_hub_download(repository, filename, revision=revision or None, local_files_only=cached)
    return Path(path)


def _shards(index: Path) -> list[str]:
    """The files that an index names; its mistakes are reported when it is read."""
    with index.open("rb") as file:
        content = json.loads(file.read(_DOWNLOAD_LIMIT))
    names = content.get("weight_map", {}) if isinstance(content, dict) else {}
    return sorted({str(name) for name in names.values()}) if isinstance(names, dict) else []


def _unavailable(name: str, source: str, setting: str, error: Exception) -> ConfigError:
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repository, _, revision = name.partition("@")
    match error:
        case GatedRepoError():
            return ConfigError(
                f"{setting}: {source} asks you to accept its terms first, at "
                f"https://huggingface.co/{repository}; then log in: hf auth login"
            )
        case RepositoryNotFoundError():
            return ConfigError(
                f"{setting}: the hub has no repository '{repository}', or it is private (then log "
                f"in: hf auth login)."
            )
        case RevisionNotFoundError():
            return ConfigError(f"{setting}: {repository} has no revision '{revision}'.")
    folder = f"weights/{repository.rpartition('/')[2]}"
    at = f" --revision {revision}" if revision else ""
    return ConfigError(
        f"{setting}: {source} is not in the cache and the hub cannot be reached. On a machine that "
        f"can reach it:\n"
        f"    hf download {repository}{at} --local-dir {folder} --include '*.json' "
        f"'*.safetensors'\n"
        f"(without .safetensors in the list of https://huggingface.co/{repository}/tree/main: "
        f"'pytorch_model*.bin'). Copy the folder here and give its path:\n"
        f"    {setting}={folder}"
    )
