"""Evaluation during training: metrics summed on the device, every image counted once."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vision.data.batches import Batch
from vision.data.preprocess import Preprocess, normalizer
from vision.evaluation.metrics import empty_tally, results, update
from vision.models.layers import static_bias
from vision.models.precision import Precision, autocast


def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    preprocess: Preprocess,
    classes: int,
    device: torch.device,
    precision: Precision,
    reduce: Callable[[Tensor], Tensor] | None = None,
    channels_last: bool = False,
) -> dict[str, float]:
    """The metrics of a model on all images of the batches; see `vision.evaluation.metrics`.

    Rows with the id −1 are not counted. With several processes, each gives its own batches, all the
    same number of them, and `reduce` sums a tensor over all processes; all return the numbers that
    a single process would. The model is in evaluation mode meanwhile, and afterwards as it was.
    """
    normalize = normalizer(preprocess, device)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    tally = empty_tally(classes, device)
    # Not inference_mode: tensors that FSDP allocates in it cannot be used for training later.
    with evaluation_mode(model), torch.no_grad(), biases_once(model):
        for batch in batches:
            images = normalize(batch.images.to(device, non_blocking=True))
            with autocast(precision, device):
                logits = model(images.contiguous(memory_format=layout))
            labels = batch.labels.to(device, non_blocking=True)
            valid = batch.ids.to(device, non_blocking=True) >= 0
            tally = update(tally, logits, labels, valid)
    if reduce is not None:
        tally = replace(tally, sums=reduce(tally.sums))
    return results(tally)


def biases_once(model: nn.Module) -> AbstractContextManager[None]:
    """`static_bias`, unless parameters are sharded: then only a forward pass gathers them."""
    sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return nullcontext() if sharded else static_bias(model)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode; afterwards restore the mode of every submodule."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
