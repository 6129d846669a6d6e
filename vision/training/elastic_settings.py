"""Checks of `elastic`. Free of torch, so that a mistake is reported at once."""

from vision.config import ConfigError


def check_elastic(
    elastic: int,
    batch_size: int,
    parallel: str,
    compiled: bool,
    max_batch_per_device: int | str | None,
) -> None:
    """Refuse settings with which the number of processes would change the bits of a run."""
    if elastic & (elastic - 1):
        below = 1 << (elastic.bit_length() - 1)
        raise ValueError(
            f"elastic = {elastic} is not a power of two; choose elastic={below} or {2 * below}."
        )
    if batch_size % elastic:
        raise ValueError(
            f"elastic = {elastic} does not divide batch_size = {batch_size}; choose elastic="
            f"{batch_size & -batch_size} or a smaller power of two, or a multiple of {elastic} "
            "for batch_size."
        )
    if parallel == "fsdp":
        raise ValueError(
            "elastic: parallel=fsdp sums gradients in an order of its own; use parallel=ddp, or "
            "elastic=null."
        )
    if compiled:
        raise ValueError(
            "elastic: compile=true may compile other kernels in another start; use compile=false, "
            "or elastic=null."
        )
    if isinstance(max_batch_per_device, int):
        raise ValueError(
            f"max_batch_per_device = {max_batch_per_device}: with elastic the virtual ranks are "
            f"the micro-batches ({batch_size // elastic} images each); use "
            "max_batch_per_device=null, or a larger elastic for smaller ones."
        )


def virtual_ranks_of_each(elastic: int, processes: int) -> int:
    """Number of virtual ranks of each process."""
    if elastic % processes:
        fitting = [str(1 << n) for n in range(elastic.bit_length())]
        raise ConfigError(
            f"elastic = {elastic} virtual ranks cannot be shared by {processes} processes; start "
            f"{' or '.join(fitting[-4:])} of them."
        )
    return elastic // processes
