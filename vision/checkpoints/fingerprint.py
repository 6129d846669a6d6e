"""Whether two models have the same weights."""

import hashlib
from collections.abc import Collection

import torch
from torch import nn


def digest_weights(model: nn.Module, excluded: Collection[str] = ()) -> str:
    """A digest of names, shapes, types and contents of all stored tensors but the excluded."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        if name not in excluded:
            data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(memoryview(data.numpy()))
    return digest.hexdigest()
