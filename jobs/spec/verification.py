"""What `python -m jobs.verify` reports of one rank: the contract between it and `orc verify`."""
from dataclasses import dataclass
from typing import Literal

# What memory is for, in the plan's words: `gathered` are unsharded weights and the buffers of their collectives.
MEMORY = ("parameters", "gradients", "optimizer", "gathered", "activations")

SHARED = "+"  # joins the names of axes that have one group, whose messages nothing tells apart

CollectiveOp = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """Operations of one kind and size. `payload_bytes`: the whole tensor, of an all_to_all and a send what leaves."""

    axis: str  # of the layout, or several with SHARED between; what is shared over dp_shard·cp counts as dp_shard
    op: CollectiveOp
    payload_bytes: int
    times: int  # per step


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalShape:
    """A parameter as this rank holds it."""

    name: str
    whole: tuple[int, ...]
    local: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """One rank's step: forward and backward of all microbatches, and the update."""

    rank: int
    coordinate: dict[str, int]
    stages: tuple[int, ...]
    peak_bytes: dict[str, int]  # by MEMORY, all at the moment when their sum is largest
    collectives: tuple[Collective, ...]
    shapes: tuple[LocalShape, ...]
    seconds: float  # that building and running it took

    @property
    def total_bytes(self) -> int:
        return sum(self.peak_bytes.values())
