"""Operations on `meta` as another device runs them: its kernel of attention, its autocast."""

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vision.models.attention import TRACED_DEVICE, AttentionCall

FUSED_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
PRODUCTS = {
    *("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "conv1d", "conv2d", "conv3d"),
    *("conv_transpose1d", "conv_transpose2d", "scaled_dot_product_attention"),
}
"""Functions that autocast runs in 16 bits."""
IN_32_BITS = {"cpu": frozenset[str](), "cuda": frozenset({"softmax", "layer_norm", "norm"})}
"""Functions of some device types that autocast runs in 32 bits."""


class AsOn(TorchFunctionMode):
    """Within, tensors on `meta` are worked on as on a device of this type, under autocast to
    `dtype` if there is one: torch has neither its fused attention nor autocast for `meta`.
    """

    def __init__(self, device: str, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.device, self.dtype = device, dtype
        self._casts: dict[int, tuple[Tensor, Tensor]] = {}
        """Parameters in 16 bits, which autocast keeps until it ends, with the originals."""

    def __enter__(self) -> Self:
        self._token = TRACED_DEVICE.set(self.device)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        TRACED_DEVICE.reset(self._token)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self.dtype is not None and name in PRODUCTS:
            args, kwargs = self._cast(args, self.dtype), self._cast(kwargs, self.dtype)
        elif self.dtype is not None and name in IN_32_BITS.get(self.device, ()):
            args = self._cast(args, torch.float32)
        if func is F.scaled_dot_product_attention:
            return self._attention(AttentionCall(*args, **kwargs))
        return func(*args, **kwargs)

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(self._cast(part, dtype) for part in value)
        if isinstance(value, dict):
            return {name: self._cast(part, dtype) for name, part in value.items()}
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype == dtype:
            return value
        if not (value.is_leaf and value.requires_grad):
            return value.to(dtype)
        if id(value) not in self._casts:
            self._casts[id(value)] = value, value.to(dtype)
        return self._casts[id(value)][1]

    def _attention(self, call: AttentionCall) -> Tensor:
        """The fused kernel where the device takes it. That of CUDA, which stores as much as that of
        a CPU, also has dropout and learned masks.
        """
        q, k, v, mask = call[:4]
        learned = mask is not None and mask.requires_grad
        if self.device != "cpu":
            call, learned = call._replace(dropout_p=0.0), False
        other = call.enable_gqa or q.ndim != 4 or q.shape[-1] != v.shape[-1]
        if call.dropout_p or learned or other:
            return F.scaled_dot_product_attention(**call._asdict())
        # A boolean mask becomes additive.
        mask = None if mask is None else mask.detach().to(q.dtype)
        options = {"attn_mask": mask, "scale": call.scale}
        out: Tensor = FUSED_ATTENTION(q, k, v, 0.0, call.is_causal, **options)[0]
        return out
