"""How a global batch becomes microbatches."""

from __future__ import annotations

from pipesim.errors import ScheduleError, require_count

__all__ = ["microbatch_sizes"]


def microbatch_sizes(batch: int, microbatch_size: int, data_parallel: int = 1) -> list[int]:
    """Cuts a global batch into the microbatches of one pipeline.

    One pipeline may get a smaller last microbatch. Several pipelines must all get the same, so there the batch must be a
    multiple of ``microbatch_size * data_parallel``.

    Args:
        batch: Samples of one step, over all pipelines.
        microbatch_size: Samples of one microbatch.
        data_parallel: Pipelines that share the batch.

    Returns:
        Samples of each microbatch; the number of microbatches is the length of the list.

    Raises:
        ScheduleError: A number is not a whole number of at least 1, or the batch cannot be shared.

    Examples:
        >>> len(microbatch_sizes(1024, 8, data_parallel=4))
        32
        >>> microbatch_sizes(10, 4)
        [4, 4, 2]
        >>> microbatch_sizes(100, 8, data_parallel=3)
        Traceback (most recent call last):
        pipesim.errors.ScheduleError: batch = 100 is no multiple of microbatch_size x data_parallel = 8 x 3 = 24 (100 mod 24 = 4)
    """
    batch = require_count("batch", batch)
    size = require_count("microbatch_size", microbatch_size)
    pipelines = require_count("data_parallel", data_parallel)
    together = size * pipelines
    if pipelines > 1 and batch % together:
        raise ScheduleError(
            f"batch = {batch} is no multiple of microbatch_size x data_parallel = {size} x {pipelines} = {together} "
            f"({batch} mod {together} = {batch % together})"
        )
    share = batch // pipelines
    return [size] * (share // size) + ([share % size] if share % size else [])
