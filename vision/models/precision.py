"""Numbers of 16 bits in matrix products."""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

Precision = Literal["fp32", "bf16", "fp16"]


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Matrix products in 16 bits where the precision says so; softmax, norms and losses never."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16 if precision == "bf16" else torch.float16)
