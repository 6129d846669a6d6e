"""Mixed precision."""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

Precision = Literal["fp32", "bf16", "fp16"]


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Run matrix products in the 16 bits of a precision; softmax, norms and losses stay in 32."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16 if precision == "bf16" else torch.float16)
