"""Augmentation policies as they are written in settings. Free of torch."""

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

from vision.config import suggest

PLAIN_POLICIES = ("none", "auto_augment", "trivial_augment", "augmix", "three_augment")


@dataclass(frozen=True)
class RandAugment:
    """Settings of RandAugment (Cubuk et al., 2020) in one of three forms."""

    flavour: Literal["timm", "torchvision", "big_vision"]
    magnitude: int = 10
    """Magnitude on a scale where 10 is strong; torchvision: one of 31 bins."""
    layers: int = 2
    """Number of operations chosen for each image."""
    probability: float = 1.0
    """Probability that a chosen operation is applied."""
    magnitude_std: float = 0.0
    """Standard deviation of the magnitude; infinity: uniform from 0 to the magnitude."""
    magnitude_max: int = 10
    increasing: bool = False
    """Whether all operations get stronger with the magnitude."""


_SETTINGS = {
    "timm": ("m", "n", "p", "mstd", "mmax", "inc"),
    "torchvision": ("m", "n"),
    "big_vision": ("m", "n"),
}


@cache
def parse_policy(text: str) -> str | RandAugment:
    """Return the name of a plain policy, or the settings of RandAugment. Raise ValueError.

        none | auto_augment | trivial_augment | augmix | three_augment
        timm:rand-m9-mstd0.5-inc1         timm's own string: m n p mstd mmax inc
        torchvision:rand-m9-n2            RandAugment of torchvision: m n
        big_vision:rand-m10-n2            RandAugment of big_vision: m n

    The three RandAugments differ in their operations and in the meaning of a magnitude (without
    `inc1` some of timm's operations get weaker as it grows), and timm applies each chosen operation
    with a probability of one half.
    """
    if text in PLAIN_POLICIES:
        return text
    flavour, colon, settings = text.partition(":")
    if flavour not in _SETTINGS or not colon:
        known = [*PLAIN_POLICIES, *(f"{name}:rand-m9-n2" for name in _SETTINGS)]
        raise ValueError(f"unknown augmentation policy '{text}'. {suggest(text, known)}")
    first, *parts = settings.split("-")
    if first != "rand":
        raise ValueError(f"'{text}': '{flavour}:' is followed by rand, as in {flavour}:rand-m9-n2.")
    values: dict[str, float] = {}
    for part in parts:
        match = re.fullmatch(r"([a-z]+)(\d+(?:\.\d+)?)", part)
        key = match[1] if match else part
        if not match or key not in _SETTINGS[flavour] or key in values:
            raise ValueError(
                f"'{text}': cannot parse '{part}'; each part is one of "
                f"{', '.join(_SETTINGS[flavour])} followed by a number, given once."
            )
        values[key] = float(match[2])
    for key in ("m", "n", "mmax", "inc"):
        if values.get(key, 0) % 1:
            raise ValueError(f"'{text}': {key} must be a whole number.")
    if values.get("p", 0) > 1:
        raise ValueError(f"'{text}': p is a probability, at most 1.")
    if flavour == "torchvision" and values.get("m", 0) > 30:
        raise ValueError(f"'{text}': torchvision's magnitudes end at 30.")
    spread = values.get("mstd", 0.0)
    return RandAugment(
        flavour=flavour,  # type: ignore[arg-type]
        magnitude=int(values.get("m", 9 if flavour == "torchvision" else 10)),
        layers=int(values.get("n", 2)),
        probability=values.get("p", 0.5 if flavour == "timm" else 1.0),
        magnitude_std=float("inf") if spread > 100 else spread,
        magnitude_max=int(values.get("mmax", 10)),
        increasing=bool(values.get("inc", 0)),
    )
