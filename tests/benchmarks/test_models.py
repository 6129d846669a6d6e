"""Who takes part in `benchmarks/models.py`, and what it makes of times."""

import pytest
import torch
from contenders import CASES, OURS, Case, contenders
from models import verdict
from timing import AGAIN, PRODUCTS, timed, timed_row

KEY_BIASES = 2 * 96 + 2 * 192 + 6 * 384 + 2 * 768
"""torchvision's SwinV2 stores the biases of the keys, which are always zero."""


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("vit_small", "swinv2_tiny") else pytest.param(name, marks=pytest.mark.slow)
        for name in CASES
    ],
)
def test_contenders_of_a_case_have_the_same_shapes(name: str) -> None:
    case = CASES[name]
    parameters = {}
    with torch.device("meta"), torch.no_grad():
        images = torch.empty(2, 3, case.size, case.size)
        for contender, build in contenders().items():
            model = build(case).eval()
            parameters[contender] = sum(p.numel() for p in model.parameters())
            if contender == OURS:  # built for real, whatever the device
                model = model.to("meta")
            assert model(images).shape == (2, 1000)
    if case.config == "swinv2_tiny":
        parameters["torchvision"] -= KEY_BIASES
    assert set(parameters.values()) == {parameters[OURS]}


def test_times_of_a_case_are_there_for_everyone() -> None:
    case = Case("small", "vit_small", "vit_small_patch16_224", 32, None)
    times = timed(case, "training", threads=1, batch=1, rounds=1)
    assert set(times) == {*contenders(), AGAIN, PRODUCTS}
    assert all(seconds > 0 for seconds in times.values())


def test_ratio_is_taken_within_a_process_against_the_peer_that_is_fastest_overall() -> None:
    processes = [
        {"vision": 2.0, "timm": 2.0, "timm again": 2.2, "torchvision": 1.0, "products": 0.5},
        {"vision": 3.0, "timm": 6.0, "timm again": 6.0, "torchvision": 4.0, "products": 0.5},
        {"vision": 3.0, "timm": 6.0, "timm again": 5.4, "torchvision": 4.0, "products": 0.5},
    ]
    row = timed_row(processes, batch=10)
    assert row["fastest"] == "torchvision"
    assert row["ratio"] == {"median": 0.75, "least": 0.75, "most": 2.0}
    assert row["itself"] == pytest.approx({"median": 1.0, "least": 0.9, "most": 1.1})
    assert row["milliseconds"]["timm"] == 600


@pytest.mark.parametrize(
    ("value", "bar", "word"), [(0.55, 0.55, "reached"), (0.551, 0.55, "missed"), (9.0, None, "")]
)
def test_bar_is_reached_up_to_its_value(value: float, bar: float | None, word: str) -> None:
    assert word in verdict(value, bar)[1]
