"""Maps from a single layer: Grad-CAM, class activation maps, principal components, norms.

Axes: b batch · q queries · n tokens · c width · k components · y, x rows and columns of cells.
"""

import torch
from einops import rearrange
from torch import Tensor, nn

from vision.inspection.capture.captured import Captured, CaptureError, LayerAttention
from vision.inspection.methods.rollout import carried, without_padding


def attention_gradcam(layer: LayerAttention, seed: Tensor) -> Tensor:
    """ReLU(mean over heads of g_h · a_h): (b q n), zero for prefix tokens.

    a_h: the query's attention in head h; g_h: the mean over cells of its gradient (Chefer et al.,
    CVPR 2021, baseline). A query of several tokens takes their rows in its proportions.
    """
    prefix = len(layer.layout.prefix)
    heads = layer.weights.unbind(layer.head_axis)
    total = torch.zeros_like(seed)
    for head, gradient in zip(heads, layer.need_gradient().unbind(layer.head_axis), strict=True):
        attended, slopes = (
            carried(seed, without_padding(matrix, layer.layout), layer.layout)
            for matrix in (head, gradient)
        )
        total = total + slopes[..., prefix:].mean(-1, keepdim=True) * attended
    total = (total / len(heads)).clamp_min(0)
    total[..., :prefix] = 0
    return total


def token_gradcam(layer: LayerAttention) -> Tensor:
    """Grad-CAM (Selvaraju et al., ICCV 2017) on the input of a layer's attention: (b n).

    Channels are weighted by the mean of their gradient over the cells. Not on the last tokens: in
    a model with a class token the gradients of all other last tokens are zero.
    """
    if layer.inputs is None or layer.inputs_gradient is None:
        raise ValueError(
            f"Token Grad-CAM of {layer.name} needs the input of its attention with gradients: "
            "capture(..., gradients=True)."
        )
    prefix = len(layer.layout.prefix)
    weights = layer.inputs_gradient[:, prefix:].mean(dim=1)
    values = torch.einsum("bnc,bc->bn", layer.inputs, weights).clamp_min(0)
    values[:, :prefix] = 0
    return values


def last_tokens(captured: Captured) -> Tensor:
    """The tokens before the final norm, or an error."""
    if captured.tokens is None:
        raise ValueError(
            f"The last tokens of {captured.model} could not be captured: its final norm is unknown."
        )
    return captured.tokens


def token_norms(captured: Captured) -> Tensor:
    """‖x‖ of each last token before the final norm, which would hide outliers: (b n)."""
    return last_tokens(captured).float().norm(dim=-1)


def norm_outliers(cells: Tensor) -> Tensor:
    """Cells (b y x) whose norm exceeds median + 6 × median absolute deviation: true or false.

    Tokens of outlying norm carry global information instead of their patch's ("Vision Transformers
    Need Registers", Darcet et al., ICLR 2024).
    """
    flat = cells.flatten(1)
    median = flat.median(dim=1, keepdim=True).values
    deviation = (flat - median).abs().median(dim=1, keepdim=True).values
    return cells > (median + 6 * deviation)[..., None]


def feature_components(captured: Captured, components: int = 3) -> Tensor:
    """Principal components of the cells' last tokens, joint over the batch: (b y x k).

    Each has mean 0 over the batch; the entry of largest size is positive, so that equal inputs give
    equal images.
    """
    tokens = last_tokens(captured)[:, len(captured.layout.prefix) :].float()
    norm = captured.anatomy.norm
    if norm is not None and not captured.anatomy.norm_after:
        with torch.no_grad():
            tokens = norm(tokens.to(next(norm.parameters(), tokens).dtype)).float()
    flat = rearrange(tokens, "b n c -> (b n) c")
    if not 1 <= components <= min(flat.shape):
        raise ValueError(
            f"components must be from 1 to {min(flat.shape)} for {flat.shape[0]} tokens of width "
            f"{flat.shape[1]}, found {components}."
        )
    left, sizes, _ = torch.linalg.svd(flat - flat.mean(dim=0), full_matrices=False)
    values = left[:, :components] * sizes[:components]
    largest = values.gather(0, values.abs().argmax(dim=0, keepdim=True))
    values = values * largest.sign()
    return rearrange(values, "(b y x) k -> b y x k", b=captured.batch, y=captured.layout.grid[0])


def logit_parts(captured: Captured, classes: Tensor, *, centred: bool) -> Tensor:
    """The exact part of each cell in the logit of one class per image (b): (b y·x).

    A linear head on a mean of tokens is a sum over tokens: y = Σ_j w · norm(x_j) / n + b. Where the
    norm follows the pooling its scale is that of the pooled token. centred: relative to the mean
    over all classes, which removes evidence that all classes share.
    """
    head = _pooled_head(captured)
    parts = _parts(captured, head, head.weight[classes])
    _check_sum(captured, head, parts, classes)
    if not centred:
        return parts
    return parts - _parts(captured, head, head.weight.mean(dim=0).expand(len(classes), -1))


def cam_seed(captured: Captured, classes: Tensor) -> Tensor:
    """The cells that speak for a class, as shares that sum to 1: (b 1 y·x).

    All zero for an image none of whose cells does.
    """
    parts = logit_parts(captured, classes, centred=True).clamp_min(0)
    total = parts.sum(dim=-1, keepdim=True)
    shares = parts / total.masked_fill(total == 0, 1)
    prefix = shares.new_zeros(len(shares), len(captured.layout.prefix))
    return torch.cat([prefix, shares], dim=1)[:, None]


def _pooled_head(captured: Captured) -> nn.Linear:
    anatomy = captured.anatomy
    if anatomy.pool != "mean" or anatomy.head is None or anatomy.norm is None:
        raise ValueError(
            f"A class activation map needs a linear head on the mean of the tokens; "
            f"{captured.model} pools: {anatomy.pool}. Use a gradient method instead."
        )
    return anatomy.head


def _parts(captured: Captured, head: nn.Linear, direction: Tensor) -> Tensor:
    """Each cell's part of w · pooled, without the constant: (b y·x). direction: (b c)."""
    tokens = last_tokens(captured)[:, len(captured.layout.prefix) :]
    norm = captured.anatomy.norm
    assert norm is not None
    with torch.no_grad():
        after = captured.anatomy.norm_after
        tokens = _normed_as_pooled(norm, tokens) if after else norm(tokens)
        return torch.einsum("bnc,bc->bn", tokens, direction.to(tokens.dtype)) / tokens.shape[1]


def _normed_as_pooled(norm: nn.Module, tokens: Tensor) -> Tensor:
    """Tokens whose mean is the normed mean: but for its scale a LayerNorm is linear."""
    if not isinstance(norm, nn.LayerNorm):
        raise ValueError(f"A final {type(norm).__name__} after the pooling cannot be split.")
    pooled = tokens.mean(dim=1, keepdim=True)
    scale = (pooled.var(dim=-1, keepdim=True, unbiased=False) + norm.eps).rsqrt()
    out = (tokens - tokens.mean(dim=-1, keepdim=True)) * scale
    if norm.weight is not None:
        out = out * norm.weight
    return out if norm.bias is None else out + norm.bias


def _check_sum(captured: Captured, head: nn.Linear, parts: Tensor, classes: Tensor) -> None:
    """Check that parts and bias add up to the logit of the model."""
    assert captured.logits is not None
    total = parts.sum(dim=1)
    if head.bias is not None:
        total = total + head.bias.detach()[classes]
    logits = captured.logits.gather(1, classes[:, None])[:, 0]
    apart = (total - logits).abs().max().item()
    if not apart <= 1e-3 * max(1.0, logits.abs().max().item()):
        raise CaptureError(
            f"The parts of the logit do not add up to it (difference {apart:.2g}): "
            f"{captured.model} does more between its last norm and its head than take a mean."
        )
