"""This process as one rank of a world that is not there.

Entered by jobs.verify and jobs.own.measure, whose tensors hold no data. Knows no model.
"""
import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def pretended_rank(rank: int, *, world_size: int) -> Iterator[None]:
    """A process group whose other members answer at once, with nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
