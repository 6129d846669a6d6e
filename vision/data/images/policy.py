"""The names of augmentation policies, as written in a config. Free of torch and Pillow.

    none | auto_augment | trivial_augment | augmix | three_augment
    timm:rand-m9-mstd0.5-inc1         timm's own string: m n p mstd mmax inc
    torchvision:rand-m9-n2            RandAugment of torchvision: m n
    big_vision:rand-m10-n2            RandAugment of big_vision: m n

The three RandAugments share a name only. They differ in their operations, in what a magnitude means
(in timm's without `inc1` some operations get weaker as it grows), and timm applies each chosen
operation with a probability of one half.
"""

import re
from dataclasses import dataclass
from typing import Literal

from vision.config import suggest

PLAIN_POLICIES = ("none", "auto_augment", "trivial_augment", "augmix", "three_augment")


@dataclass(frozen=True)
class RandAugment:
    """RandAugment (Cubuk et al., 2020) in one of the forms that are in use."""

    flavour: Literal["timm", "torchvision", "big_vision"]
    magnitude: int = 10
    """On a scale where 10 is strong; torchvision: a bin, of 31."""
    layers: int = 2
    """Operations that are chosen for each image, one after the other."""
    probability: float = 1.0
    """With which a chosen operation is applied."""
    magnitude_std: float = 0.0
    """Spread of the magnitude; infinity: uniform from 0 to the magnitude."""
    magnitude_max: int = 10
    increasing: bool = False
    """Use forms of the operations that all get stronger with the magnitude."""


_SETTINGS = {
    "timm": ("m", "n", "p", "mstd", "mmax", "inc"),
    "torchvision": ("m", "n"),
    "big_vision": ("m", "n"),
}


def parse_policy(text: str) -> str | RandAugment:
    """A plain policy's name as it is, or the settings of a RandAugment. Raises ValueError."""
    if text in PLAIN_POLICIES:
        return text
    flavour, colon, settings = text.partition(":")
    if flavour not in _SETTINGS or not colon:
        known = [*PLAIN_POLICIES, *(f"{name}:rand-m9-n2" for name in _SETTINGS)]
        raise ValueError(f"there is no augmentation policy '{text}'. {suggest(text, known)}")
    first, *parts = settings.split("-")
    if first != "rand":
        raise ValueError(f"'{text}': '{flavour}:' is followed by rand, as in {flavour}:rand-m9-n2.")
    values: dict[str, float] = {}
    for part in parts:
        match = re.fullmatch(r"([a-z]+)(\d+(?:\.\d+)?)", part)
        key = match[1] if match else part
        if not match or key not in _SETTINGS[flavour] or key in values:
            raise ValueError(
                f"'{text}': cannot make sense of '{part}'; each part is one of "
                f"{', '.join(_SETTINGS[flavour])} followed by a number, and comes once."
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
