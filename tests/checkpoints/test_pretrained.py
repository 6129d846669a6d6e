"""`vision list pretrained` against timm's own registry."""

import re

import pytest
import timm
import torch
from omegaconf import OmegaConf

from vision.checkpoints.pretrained import TOP1
from vision.cli.app import main
from vision.cli.listing import CONFIGS

WORD = re.compile(r"\S+(?: M)?")


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, str]]:
    """The rows by name, each with its family and its cells by the heads of their columns."""
    assert main(["list", "pretrained", *words]) == 0
    *tables, _ = capsys.readouterr().out.split("\n\n")
    rows: dict[str, dict[str, str]] = {}
    for table in tables:
        first, *lines = table.splitlines()
        title = re.match(r"(.+) \((\d+)\)", first)
        assert title is not None and len(lines) == int(title[2])
        heads = list(WORD.finditer(first, title.end()))
        for line in lines:
            name, *cells = WORD.finditer(line)
            rows[name[0]] = {"family": title[1]}
            for cell in cells:  # aligned with its head
                (head,) = (h[0] for h in heads if cell.start() < h.end() and h.start() < cell.end())
                rows[name[0]][head] = cell[0]
    return rows


def test_names_are_those_of_timm_in_families_of_vit_and_swin(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = listed(capsys)
    assert rows.keys() <= set(timm.list_pretrained())
    assert set(timm.list_pretrained("swin_*")) <= rows.keys()
    assert set(timm.list_pretrained("deit*")) <= rows.keys()
    families = {row["family"] for row in rows.values()}
    expected = "ViT DeiT BEiT EVA EVA-02 CLIP SigLIP DINO DINOv2 DINOv3 FlexiViT NaFlexViT Swin"
    assert {*expected.split(), "Swin V2", "Perception Encoder"} <= families
    assert rows["vit_base_patch16_clip_224.openai"]["family"] == "CLIP"
    assert rows["vit_base_patch16_224.dino"]["family"] == "DINO"
    assert rows["vit_base_patch16_224.mae"]["family"] == "ViT"
    assert "resnet50.a1_in1k" not in rows and "swinv2_cr_small_224.sw_in1k" not in rows


def test_size_and_licence_are_those_of_timm(capsys: pytest.CaptureFixture[str]) -> None:
    for name, row in listed(capsys).items():
        config = timm.get_pretrained_cfg(name)
        sides = [int(side) for side in row["image"].split("×")]
        assert [sides[0], sides[-1]] == list(config.input_size[1:])
        assert row.get("licence") == config.license


def test_weights_of_init_pretrained_are_marked_with_their_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    marks = {name: row["model"] for name, row in listed(capsys).items() if "model" in row}
    expected = {}
    for file in CONFIGS.glob("model/*.yaml"):
        source = OmegaConf.to_container(OmegaConf.load(file)).get("pretrained")  # type: ignore[union-attr]
        if source is not None and "$" not in source:
            expected[source.removeprefix("timm:")] = file.stem
    assert marks == expected and len(marks) >= 12


@pytest.mark.parametrize("pattern", ["vit_tiny", "timm:vit_tiny_*.augreg_in21k*"])
def test_parameters_are_those_of_the_model_that_timm_builds(
    pattern: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = listed(capsys, pattern)
    for name in ("vit_tiny_patch16_224.augreg_in21k", "vit_tiny_patch16_384.augreg_in21k_ft_in1k"):
        with torch.device("meta"):
            built = timm.create_model(name)  # heads for 21,843 and for 1,000 classes
        count = sum(parameter.numel() for parameter in built.parameters())
        shown = float(rows[name]["params"].removesuffix(" M"))
        assert shown == pytest.approx(count / 1e6, abs=0.051)


def test_pattern_finds_any_model_of_timm_and_marks_those_of_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = listed(capsys, "*test_*")
    assert rows.keys() == {name for name in timm.list_pretrained() if "test_" in name}
    assert rows["test_resnet.r160_in1k"]["model"] == "timm"


def test_long_lists_are_not_counted_and_say_how_to(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "pretrained", "vit_*"]) == 0
    *tables, notes = capsys.readouterr().out.split("\n\n")
    assert "params" not in "".join(tables)
    assert "pattern" in notes and "40" in notes


@pytest.mark.parametrize(
    ("pattern", "near"), [("*dnov3*", "dinov3"), ("swin_tinny_patch4*", "swin_tiny_patch4_window7")]
)
def test_pattern_that_matches_nothing_is_answered_with_the_nearest_names(
    pattern: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["list", "pretrained", pattern]) == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert pattern in error and near in error


def test_published_accuracies_are_of_classifiers_of_imagenet() -> None:
    for name, accuracy in TOP1.items():
        assert timm.get_pretrained_cfg(name).num_classes == 1000
        assert 70 < accuracy < 90
    assert TOP1.keys() <= set(timm.list_pretrained())


def test_published_accuracy_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    rows = listed(capsys, "deit_tiny*")
    for name, row in rows.items():
        assert float(row["top-1"]) == pytest.approx(TOP1[name], abs=0.051)
