"""Methods as people ask for them: `rollout`, or with options `rollout:fusion:max:residual:0.3`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from vision.config import suggest
from vision.inspection.methods.spec import METHODS, Method

TITLES = {
    "attention": "Attention",
    "rollout": "Rollout",
    "gradient_rollout": "Gradient rollout",
    "chefer": "Chefer",
    "attention_gradcam": "Attention Grad-CAM",
    "token_gradcam": "Token Grad-CAM",
    "cam": "CAM",
    "cam_rollout": "CAM-seeded rollout",
    "norm": "Token norm",
    "pca": "Features, PCA",
}
WORDS: dict[str, tuple[str, ...]] = {
    "fusion": ("mean", "max", "min"),
    "clamp": ("before", "after"),
}
"""What an option that is a word may be."""


@dataclass(frozen=True)
class Request:
    """One method with some of its options."""

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def about(self) -> Method:
        """What is told of the method."""
        return METHODS[self.method]

    @property
    def title(self) -> str:
        """For people."""
        name = TITLES[self.method]
        return f"{name} ({', '.join(self._spoken())})" if self.options else name

    def __str__(self) -> str:
        """As it was asked for."""
        given = [f"{name}:{_written(value)}" for name, value in self.options.items()]
        return ":".join([self.method, *given])

    def _spoken(self) -> list[str]:
        spoken = []
        for name, value in self.options.items():
            words = name.replace("_", " ")
            if isinstance(value, bool):
                spoken.append(words if value else f"no {words}")
            else:
                spoken.append(f"{words} {value}")
        return spoken


def parse_request(text: str) -> Request:
    """`method` or `method:option:value:option:value`, or a ValueError that says what is wrong."""
    method, *parts = text.strip().split(":")
    if method not in METHODS:
        raise ValueError(f"there is no method '{method}'. {suggest(method, METHODS)}")
    known = METHODS[method].options
    options: dict[str, Any] = {}
    for name, value in zip_longest(parts[::2], parts[1::2]):
        if value is None or name not in known:
            has = ", ".join(known) or "none"
            raise ValueError(
                f"'{text}': '{name}' is no option of {method} with a value. Options: {has}; one is "
                f"written as {method}:name:value."
            )
        options[name] = _checked(text, name, _value(value))
    return Request(method, options)


def parse_requests(texts: Sequence[str]) -> tuple[Request, ...]:
    """Several, each once."""
    requests = [parse_request(text) for text in texts]
    return tuple({str(request): request for request in requests}.values())


def _value(text: str) -> bool | int | float | str:
    match text:
        case "true" | "false":
            return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _checked(text: str, name: str, value: bool | int | float | str) -> bool | int | float | str:
    words = WORDS.get(name)
    if words is not None and value not in words:
        raise ValueError(f"'{text}': {name} must be one of {', '.join(words)}, found '{value}'.")
    return value


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
