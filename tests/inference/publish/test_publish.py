"""A published folder is opened by the libraries that its card names, with the same logits."""

import json
from pathlib import Path

import pytest
import timm
import torch
import transformers
import yaml
from fake_hub import TOKEN, FakeHub, fake_hub
from untrained_runs import CLASSES, a_run

import vision
from vision.checkpoints.open import open_model
from vision.cli.app import main
from vision.models.configs import TimmConfig

Capture = pytest.CaptureFixture[str]
IMAGES = torch.randn(3, 3, 24, 24, generator=torch.Generator().manual_seed(0))
TIMM = {
    "vit": (),
    "swin": ("model=swin_mini", "model.width=24", "model.window=3"),
    "baseline": ("model=timm", "model.name=resnet10t"),
}
OWN = ("model=vit_mini", "model.width=32", "model.pool=class_token_and_mean")


def published(run: Path, *words: str) -> Path:
    """The folder of a run, published."""
    assert main(["publish", f"checkpoint={run}", "evaluate=false", *words]) == 0
    return run / "publish"


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found = model.eval()(IMAGES)
    return getattr(found, "logits", found)


@pytest.mark.parametrize("family", TIMM)
def test_timm_transformers_and_this_project_open_the_folder_with_equal_logits(
    family: str, tmp_path: Path, capsys: Capture
) -> None:
    run = a_run(tmp_path / "run", *TIMM[family])
    folder = published(run, "license=mit")
    assert "layout of timm" in capsys.readouterr().out
    expected = logits(vision.load(run).model)
    peer = timm.create_model(f"local-dir:{folder}", pretrained=True)
    torch.testing.assert_close(logits(peer), expected, atol=1e-5, rtol=1e-5)
    wrapper = transformers.TimmWrapperForImageClassification.from_pretrained(folder)
    torch.testing.assert_close(logits(wrapper), expected, atol=1e-5, rtol=1e-5)
    assert list(wrapper.config.id2label.values()) == CLASSES
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    assert list(processor.data_config["mean"]) == [0.485, 0.456, 0.406]
    config = TimmConfig(kind="timm", **_resnet()) if family == "baseline" else None
    opened = open_model(folder, model=config)
    torch.testing.assert_close(logits(opened.model), expected, atol=1e-5, rtol=1e-5)
    assert opened.class_names == tuple(CLASSES) and opened.image_size == (24, 24)
    assert sorted(p.name for p in run.iterdir()) == ["checkpoints", "publish"]


def _resnet() -> dict[str, object]:
    return {
        "name": "resnet10t", "drop_path": None, "checkpoint_activations": False, "pretrained": None
    }  # fmt: skip


def test_model_that_timm_does_not_have_is_published_in_the_own_layout_which_the_card_says(
    tmp_path: Path, capsys: Capture
) -> None:
    run = a_run(tmp_path / "run", *OWN)
    folder = published(run)
    out, said = capsys.readouterr()
    assert "layout of vision" in out and "class token and the mean" in said
    assert "names no licence" in said
    opened = open_model(folder)
    assert torch.equal(logits(opened.model), logits(vision.load(run).model))
    assert opened.class_names == tuple(CLASSES)
    card = (folder / "README.md").read_text()
    assert "class token and the mean" in card and "timm and transformers do not" in card
    config = json.loads((folder / "config.json").read_text())
    assert config["model"]["pool"] == "class_token_and_mean" and config["classes"] == CLASSES
    words = ["publish", f"checkpoint={run}", "evaluate=false", "layout=timm"]
    assert main([*words, f"output={tmp_path / 'other'}"]) == 2
    assert "class token and the mean" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_card_has_the_results_of_an_evaluation_and_no_path(tmp_path: Path, capsys: Capture) -> None:
    shapes = ("data.val_samples=40", "data.train_samples=40", "data.image_size=24")
    from vision.cli.composition import compose
    from vision.config import parse
    from vision.data.configs import ShapesConfig
    from vision.data.sources.build_source import describe

    data = parse(ShapesConfig, compose("train", [*shapes])[0]["data"])
    names = describe(data).classes
    assert names is not None
    run = a_run(tmp_path / "secret-run", "model=vit_mini", "model.width=32", *shapes, classes=names)
    words = [f"checkpoint={run}", "device=cpu", "loader.workers=0"]
    assert main(["publish", *words, "repository=me/shapes", "license=cc-by-4.0"]) == 0
    capsys.readouterr()
    assert main(["eval", *words, "format=json", "save=false"]) == 0
    metrics = json.loads(capsys.readouterr().out)["models"][0]["metrics"]
    folder = run / "publish"
    text = (folder / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    front = yaml.safe_load(front)
    assert front["license"] == "cc-by-4.0" and front["library_name"] == "timm"
    (result,) = front["model-index"][0]["results"]
    values = {metric["type"]: metric["value"] for metric in result["metrics"]}
    assert values["accuracy"] == pytest.approx(metrics["top1"], abs=1e-6)
    assert f"{100 * metrics['top1']:.2f} %" in body and f"{metrics['ece']:.4f}" in body
    assert 'timm.create_model("hf-hub:me/shapes"' in body and 'vision.load("hf:me/shapes")' in body
    assert str(tmp_path) not in text and f"`{names[0]}`" in body
    for name in ("confusion.png", "calibration.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG") and name in body


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """A hub of this machine in place of the real one, and a token of it."""
    with fake_hub() as running:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", running.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield running


def test_folder_is_uploaded_in_one_commit_as_it_is(
    tmp_path: Path, hub: FakeHub, capsys: Capture
) -> None:
    run = a_run(tmp_path / "run")
    folder = published(run, "push=true", "repository=me/bears", "private=true", "license=mit")
    assert f"uploaded: {hub.url}/me/bears" in capsys.readouterr().out
    written = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert hub.files["me/bears"] == written and "model.safetensors" in hub.files["me/bears"]
    assert hub.private == {"me/bears": True} and len(hub.commits) == 1


@pytest.mark.parametrize(
    ("refused", "license", "status", "said_there"),
    [
        ("/repos/create", "mit", "403", "required permissions"),
        ("/commit/", "mit", "403", "required permissions"),
        (None, "my-own", "", '"license" must be one of'),
    ],
)
def test_refused_upload_is_one_line_and_the_folder_stays(
    refused: str | None,
    license: str,
    status: str,
    said_there: str,
    tmp_path: Path,
    hub: FakeHub,
    capsys: Capture,
) -> None:
    hub.refuse = refused
    run = a_run(tmp_path / "run")
    words = ["evaluate=false", "push=true", "repository=me/bears", f"license={license}"]
    assert main(["publish", f"checkpoint={run}", *words]) == 1
    said = [line for line in capsys.readouterr().err.splitlines() if "note:" not in line]
    assert len(said) == 1 and status in said[0] and said_there in said[0]
    assert f"hf upload me/bears {run / 'publish'}" in said[0]
    assert (run / "publish" / "model.safetensors").is_file() and not hub.commits


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["push=true"], 2, "repository=OWNER/NAME"),
        (["push=true", "repository=me/bears"], 2, "hf auth login"),
        (["repository=a/b/c"], 2, "repository=OWNER/NAME"),
        (["license=MIT License"], 2, "apache-2.0"),
        (["output=."], 2, "already exists"),
    ],
)
def test_what_cannot_be_published_is_said_before_any_work(
    words: list[str],
    code: int,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    run = a_run(tmp_path / "run")
    monkeypatch.chdir(run)
    assert main(["publish", f"checkpoint={run}", *words]) == code
    said = [line for line in capsys.readouterr().err.splitlines() if "note:" not in line]
    assert len(said) == 1 and expected in said[0] and said[0].startswith("error: ")
    assert sorted(p.name for p in run.iterdir()) == ["checkpoints"]
