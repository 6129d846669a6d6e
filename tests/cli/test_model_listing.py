"""`vision list models`: the stored costs are those that are counted."""

import json
import subprocess
import sys

import pytest
from model_costs import count

from vision.cli.listing import MODEL_COSTS, choices, listing
from vision.config import ConfigError

COSTS = json.loads(MODEL_COSTS.read_text())


def test_every_model_has_its_costs() -> None:
    assert COSTS.keys() == choices()["model"].keys() - {"auto", "timm"}


@pytest.mark.parametrize(
    "name",
    [
        n if n in ("vit_tiny", "swin_mini", "vit_fast") else pytest.param(n, marks=pytest.mark.slow)
        for n in COSTS
    ],
)
def test_stored_costs_are_those_of_the_model(name: str) -> None:
    assert COSTS[name] == count(name)


def test_pattern_selects_models_and_shows_parameters_macs_and_image_size() -> None:
    lines = listing(["models", "*swin*"]).splitlines()[1:]
    assert lines and all("swin" in line.split()[0] for line in lines)
    (tiny,) = [line for line in lines if line.startswith("swin_tiny ")]
    assert "28.3 M" in tiny and "224" in tiny  # Liu et al., ICCV 2021, table 1: 29 M, 4.5 G
    assert "4.5" in tiny or "4.4" in tiny
    with pytest.raises(ConfigError, match="no name matches"):
        listing(["models", "*resnet*"])


def test_listing_models_does_not_import_torch() -> None:
    code = (
        "import sys; from vision.cli.listing import listing; listing(['models']); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
