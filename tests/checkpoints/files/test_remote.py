"""Weights by name come from the libraries' caches; what is not there is explained."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from vision.checkpoints.files.reading import read_raw
from vision.checkpoints.files.remote import pretrained_config, resolve
from vision.config import ConfigError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, and no network."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def place(hub: Path, repository: str, **files: bytes) -> Path:
    """Files in the cache as the hub's library stores them."""
    folder = hub / f"models--{repository.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    for name, content in files.items():
        (snapshot / name).write_bytes(content)
    return snapshot


def test_hub_name_in_the_cache_gives_file_and_config(hub: Path) -> None:
    weights = safetensors.torch.save({"w": torch.ones(2)})
    files = {"model.safetensors": weights, "config.json": b'{"hidden_size": 32}'}
    snapshot = place(hub, "google/vit-tiny", **files)
    for name in ("hf:google/vit-tiny", f"hf:google/vit-tiny@{COMMIT}", "hf:google/vit-tiny@main"):
        assert resolve(name) == snapshot / "model.safetensors"
    raw = read_raw(resolve("hf:google/vit-tiny"))
    assert raw.tensors["w"].tolist() == [1, 1] and raw.extra["config"] == {"hidden_size": 32}


def test_hub_name_in_shards_needs_all_of_them(hub: Path) -> None:
    index = b'{"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}'
    files = {"model.safetensors.index.json": index}
    files["a.safetensors"] = safetensors.torch.save({"w": torch.ones(2)})
    snapshot = place(hub, "google/vit-huge", **files)
    with pytest.raises(ConfigError, match="not in the cache"):
        resolve("hf:google/vit-huge")
    (snapshot / "b.safetensors").write_bytes(safetensors.torch.save({"v": torch.ones(1)}))
    assert read_raw(resolve("hf:google/vit-huge")).tensors.keys() == {"w", "v"}


def test_timm_name_in_the_cache_gives_the_file_that_timm_loads(hub: Path) -> None:
    name = "vit_small_patch16_224.augreg_in21k_ft_in1k"
    weights = safetensors.torch.save({"w": torch.ones(2)})
    snapshot = place(hub, f"timm/{name}", **{"model.safetensors": weights})
    assert resolve(f"timm:{name}") == snapshot / "model.safetensors"
    assert resolve("timm:vit_small_patch16_224") == snapshot / "model.safetensors"  # its default
    assert pretrained_config(f"timm:{name}")["config"]["mean"] == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        (
            "hf:google/vit-base-patch16-224@v1",
            [
                "hf download google/vit-base-patch16-224 --revision v1",
                "--local-dir weights/vit-base-patch16-224",
                "init=weights/vit-base-patch16-224",
            ],
        ),
        (
            "timm:swin_tiny_patch4_window7_224",
            [
                "hf download timm/swin_tiny_patch4_window7_224.ms_in1k",
                "init=weights/swin_tiny_patch4_window7_224.ms_in1k",
            ],
        ),
    ],
)
def test_name_without_network_says_what_to_place_where(
    hub: Path, source: str, messages: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(source)
    assert all(message in str(caught.value) for message in messages)


def test_timm_url_without_network_says_what_to_place_where(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import timm.models._hub as timm_hub

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(timm_hub, "download_url_to_file", fail)
    monkeypatch.setattr(timm_hub, "get_cache_dir", lambda _="": str(hub))
    name, url = timm_name_with_url_only()
    with pytest.raises(ConfigError) as caught:
        resolve(f"timm:{name}", "checkpoint")
    place = str(hub / url.rpartition("/")[2])
    assert url in str(caught.value) and place in str(caught.value)
    assert "checkpoint=PATH" in str(caught.value)


def timm_name_with_url_only() -> tuple[str, str]:
    import timm

    for name in timm.list_pretrained():
        config = timm.models.get_pretrained_cfg(name)
        if config.url and not config.hf_hub_id:
            return name, config.url
    raise AssertionError("timm has no such weights any more")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("timm:vit_smal_patch16_224", r"Did you mean 'vit_small_patch16_224\."),
        (
            "timm:vit_small_patch16_224.augreg_in21k_ft_in1",
            "Did you mean 'vit_small_patch16_224.aug",
        ),
        ("hf:google", r"not of the form hf:OWNER/NAME\[@REVISION\]"),
        ("hf:../../etc", "not of the form"),
        ("tim:vit_small", "Sources are timm:NAME, hf:OWNER/NAME and paths"),
        ("/none/model.pth", "/none/model.pth does not exist"),
    ],
)
def test_wrong_name_is_told(hub: Path, source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(source)


def test_misspelt_path_names_the_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match=r"Did you mean 'model\.safetensors'"):
        resolve(str(tmp_path / "model.safetensor"))
    assert resolve(str(tmp_path)) == tmp_path


def test_path_is_resolved_without_the_libraries(tmp_path: Path) -> None:
    code = (
        "import sys; from vision.checkpoints.files.remote import resolve; "
        f"resolve({str(tmp_path)!r}); "
        "print({'timm', 'torch', 'huggingface_hub'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
