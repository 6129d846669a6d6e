"""The weights of one model in what a training program stored.

Programs put a model's tensors beside an optimiser's and more, under names of their own, and
wrappers (data parallel, compile, Lightning, a module of one's own) put words in front of each. Here
that is taken off.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from vision.checkpoints.configs import WhichWeights
from vision.checkpoints.errors import CheckpointError
from vision.checkpoints.files.reading import Raw
from vision.checkpoints.files.renaming import rename
from vision.checkpoints.layouts.recognise import LAYOUTS, Layout, recognise

AVERAGED = ("state_dict_ema", "model_ema", "ema_state_dict", "ema", "teacher")
"""Parts with weights averaged over the training, in the order of preference, as in timm. DINO's
teacher is one, and is what its authors publish.
"""
TRAINED = (
    *("state_dict", "model", "model_state_dict", "model_state", "student"),
    *("module", "net", "network", "weights", "params"),
)
"""Parts with weights as the optimiser left them, in the order of preference."""
OTHER = {
    *("optimizer", "optimizer_state_dict", "optimizer_states", "optimizers", "lr_scheduler"),
    *("lr_schedulers", "scheduler", "scaler", "amp_scaler", "grad_scaler", "criterion", "loss"),
    *("dino_loss", "ibot_loss", "fp16_scaler", "task_state", "message_hub", "callbacks", "loops"),
    *("rng_state", "amp", "loss_scaler"),
}
"""Parts that do not belong to a model."""
_WRAPPERS = ("module.", "model.", "net.", "network.")
"""What stands in front of every name, once or more."""
_INSIDE = re.compile(r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.)")
"""What wrappers put anywhere in a name: compile, sharding, activation checkpointing."""
_LAYOUTS = {
    *("blocks", "layers", "stages", "encoder", "features", "backbone", "embeddings", "transformer"),
    *("vit", "swin", "swinv2", "deit", "dinov2", "patch_embed", "head", "norm", "conv_proj"),
}
"""First words of names that belong to the model itself."""
_HEAD = re.compile(r"(?:\w+_)?(?:head|heads|classifier|fc|linear)\.(weight|bias)")
"""A classifier beside the network that it belongs to."""
_CHUNKED = re.compile(r"((?:^|\.)blocks\.)\d+\.(\d+\.)")


@dataclass(frozen=True)
class Weights:
    """The weights of one model, by the names that its program gave them."""

    tensors: Mapping[str, Tensor]
    path_taken: tuple[str, ...] = ()
    """What was unwrapped, from the outside in, such as "state_dict_ema" and "module."."""
    left: Mapping[str, int] = field(default_factory=dict)
    """The other parts of the file, and the number of tensors in each."""


def unwrap(
    raw: Raw,
    weights: WhichWeights = "auto",
    rules: Sequence[tuple[str, str]] = (),
) -> Weights:
    """The weights in a file: averaged ones where there are any (auto), or the kind asked for.

    `rules` rename their tensors (see renaming.py) before anything is taken off the names.
    """
    if not raw.tensors:
        raise CheckpointError(f"{raw.path} holds no tensor.")
    tensors, steps, left = _choose(raw, weights)
    if rules:
        tensors, lines = rename(tensors, rules)
        steps.extend(lines)
    lightning = any("lightning" in str(key) for key in raw.extra)
    tensors = _without_prefixes(tensors, steps, left, lightning)
    tensors = _without_chunks(tensors, steps, raw)
    tensors = _without_path(tensors, steps, left)
    return Weights(tensors, tuple(steps), left)


def _choose(raw: Raw, weights: WhichWeights) -> tuple[dict[str, Tensor], list[str], dict[str, int]]:
    """The part of the file that holds the weights asked for, its name, and what else there is."""
    parts, loose = _parts(raw)
    averaged = [part for part in AVERAGED if part in parts]
    trained = [part for part in TRAINED if part in parts]
    unknown = [part for part in parts if part not in (*averaged, *trained, *OTHER)]
    if not averaged and not trained and not loose:
        if len(unknown) != 1:
            found = ", ".join(f"'{part}' ({len(parts[part])} tensors)" for part in parts)
            raise CheckpointError(
                f"{raw.path} holds {found}, of which none is known to be a model. Store the one "
                f'that is: torch.save({{"model": …}}, "model.pth").'
            )
        trained = unknown
    if weights == "ema" and not averaged:
        raise CheckpointError(
            f"{raw.path} has no averaged weights (none of {', '.join(AVERAGED)}); use weights=raw."
        )
    if weights == "raw" and averaged and not trained:
        raise CheckpointError(
            f"{raw.path} has averaged weights only ({averaged[0]}); use weights=ema or auto."
        )
    candidates = averaged if weights == "ema" or (weights == "auto" and averaged) else trained
    if not candidates:  # tensors that are in no part at all
        return loose, [], {part: len(names) for part, names in parts.items()}
    chosen = candidates[0]
    left = {part: len(names) for part, names in parts.items() if part != chosen}
    left |= dict.fromkeys(loose, 1)
    return parts[chosen], [chosen], left


def _parts(raw: Raw) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """The tensors of each part, and those that are in none."""
    first_words = {name.partition(".")[0] for name in raw.tensors}
    names = set(raw.parts)
    one_wrapper = any(first_words == {wrapper.rstrip(".")} for wrapper in _WRAPPERS)
    if not names and not one_wrapper and first_words <= {*AVERAGED, *TRAINED, *OTHER}:
        names = first_words  # a flat format, such as safetensors, with parts in its names
    parts: dict[str, dict[str, Tensor]] = {}
    loose: dict[str, Tensor] = {}
    by_length = sorted(names, key=len, reverse=True)  # a part's own name may hold dots
    dotted = [name for name in by_length if "." in name]
    for name, tensor in raw.tensors.items():
        part = name.partition(".")[0]
        part = next((d for d in dotted if name.startswith(f"{d}.")), part)
        if part in names and name != part:
            parts.setdefault(part, {})[name[len(part) + 1 :]] = tensor
        else:
            loose[name] = tensor
    return parts, loose


def _without_prefixes(
    tensors: dict[str, Tensor], steps: list[str], left: dict[str, int], lightning: bool
) -> dict[str, Tensor]:
    """Take off what wrappers put in front of all names, as often as they did."""
    if "n_averaged" in tensors:  # torch's AveragedModel counts its updates
        tensors = {name: tensor for name, tensor in tensors.items() if name != "n_averaged"}
        left["n_averaged"] = 1
    inside = sorted({found[2] for name in tensors for found in _INSIDE.finditer(name)})
    if inside:
        tensors = {_INSIDE.sub("", name).lstrip("."): tensor for name, tensor in tensors.items()}
        steps.extend(f"{word}." for word in inside)
    while True:
        wrapper = next((w for w in _WRAPPERS if all(n.startswith(w) for n in tensors)), None)
        if wrapper is None and lightning:
            wrapper = _attribute(tensors)
        if wrapper is None or not tensors:
            return tensors
        for name in tensors:
            if not name.startswith(wrapper):
                word = name.partition(".")[0]
                left[word] = left.get(word, 0) + 1
        tensors = {n[len(wrapper) :]: t for n, t in tensors.items() if n.startswith(wrapper)}
        steps.append(wrapper)


def _attribute(tensors: Mapping[str, Tensor]) -> str | None:
    """The attribute of a Lightning module that is the model: the one with most of the tensors.
    Metrics and losses, which have a few, stay behind.
    """
    words = Counter(name.partition(".")[0] for name in tensors if "." in name)
    if not words:
        return None
    word, count = words.most_common(1)[0]
    return f"{word}." if word not in _LAYOUTS and 2 * count > len(tensors) else None


def _without_path(
    tensors: dict[str, Tensor], steps: list[str], left: dict[str, int]
) -> dict[str, Tensor]:
    """The network of a known layout inside a module of someone's own (`backbone.`, `encoder.vit.`):
    the words in front of its names are taken off. Its classifier may lie beside it; what else does,
    such as projection heads and losses, stays behind.
    """
    if not tensors or _layout(tensors) is not None:
        return tensors
    found = _paths(tensors)
    if not found:
        return tensors
    if len(found) > 1:
        raise CheckpointError(
            f"The file holds several networks: {', '.join(found)}. Leave all but one out, e.g. "
            f"rename=['{re.escape(list(found)[-1])}.* -> ']."
        )
    ((path, layout),) = found.items()
    steps.append(path)
    inside = {n.removeprefix(path): t for n, t in tensors.items() if n.startswith(path)}
    for name, tensor in tensors.items():
        if name.startswith(path):
            continue
        match = _HEAD.fullmatch(name)
        if match is None:
            word = name.partition(".")[0]
            left[word] = left.get(word, 0) + 1
            continue
        head = LAYOUTS[layout].head
        own = f"{head}.{match[1]}" if head else name
        if own in inside:
            raise CheckpointError(
                f"The file has two classifiers, '{path}{own}' and '{name}'. Leave one out, e.g. "
                f"rename=['{re.escape(name)} -> ']."
            )
        inside[own] = tensor
        if own != name:
            steps.append(f"{name} → {own}")
    return inside


def _paths(tensors: Mapping[str, Tensor]) -> dict[str, Layout]:
    """The words after which names are those of a known layout, and the layout."""
    parents = {name.rpartition(".")[0] for name in tensors}
    words = {tuple(parent.split(".")[:depth]) for parent in parents for depth in range(1, 6)}
    found: dict[str, Layout] = {}
    for path in sorted(words, key=lambda path: (len(path), path)):
        prefix = ".".join(path) + "."
        if any(word.isdigit() for word in path) or prefix.startswith(tuple(found)):
            continue
        layout = _layout(n.removeprefix(prefix) for n in tensors if n.startswith(prefix))
        if layout is not None:
            found[prefix] = layout
    return found


def _layout(names: Iterable[str]) -> Layout | None:
    """The layout of these names; a ViT of someone's own has any words in front."""
    try:
        layout = recognise(list(names))
    except CheckpointError:
        return None
    return None if layout == "PyTorch ViT" else layout


def _without_chunks(tensors: dict[str, Tensor], steps: list[str], raw: Raw) -> dict[str, Tensor]:
    """DINOv2 in training puts blocks into chunks; a block's number counts through all of them."""
    if not any(_CHUNKED.search(name) for name in tensors):
        return tensors
    found = {_CHUNKED.sub(r"\1\2", name, count=1): t for name, t in tensors.items()}
    if len(found) != len(tensors):
        raise CheckpointError(f"{raw.path} has two blocks of the same number in its chunks.")
    steps.append("blocks.{chunk}.")
    return found
