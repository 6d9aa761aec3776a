"""Degrees, mesh axes and ranks: the vocabulary of a layout, shared by planner, placement and ranks.

Pure arithmetic; the DeviceMesh itself is built from it in jobs.mesh.
"""
import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
# Outermost (slowest link tolerated) to innermost (TP, contiguous inside a node). `ep` is not a mesh
# dimension of its own: it is carved out of dp_shard × cp × tp.
MESH_ORDER = ("dp_replicate", "pp", "dp_shard", "cp", "tp")

Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"]
ZeroStage = Literal[1, 2, 3]
Recompute = Literal["none", "selective", "full"]
CpMethod = Literal["ring", "allgather"]

# Stages that a rank may hold under each schedule, least and most. In a V, rank r holds stages r and 2·pp−1−r, so that
# the first and the last stage lie on the same rank; the others deal stages out in rounds.
V_SCHEDULES = ("zbv", "dualpipev")
VIRTUAL_STAGES = {"gpipe": (1, 1), "1f1b": (1, 1), "interleaved_1f1b": (2, None), "interleaved_zero_bubble": (2, None),
                  "zbv": (2, 2), "dualpipev": (2, 2)}
# Split backward in two: gradients of inputs at once, those of weights when there is nothing better to do.
ZERO_BUBBLE_SCHEDULES = ("interleaved_zero_bubble", "zbv", "dualpipev")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelDims:
    """The degree of each axis. world_size = dp_replicate × dp_shard × cp × tp × pp."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    order: tuple[str, ...] = MESH_ORDER

    @property
    def world_size(self) -> int:
        return math.prod(self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Degrees in mesh order."""
        return tuple(getattr(self, axis) for axis in self.order)

    @property
    def dp(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        return self.dp_shard * self.cp

    def coordinate(self, rank: int) -> dict[str, int]:
        """Mesh coordinate of a global rank, row-major over `order`."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside the world of {self.world_size} ranks")
        coordinate = {}
        for axis in reversed(self.order):
            rank, coordinate[axis] = divmod(rank, getattr(self, axis))
        return {axis: coordinate[axis] for axis in self.order}

    def rank(self, **coordinate: int) -> int:
        """Global rank of a mesh coordinate; axes not named are 0."""
        rank = 0
        for axis in self.order:
            rank = rank * getattr(self, axis) + coordinate.get(axis, 0)
        return rank

    def dp_index(self, coordinate: dict[str, int]) -> int:
        """Which of the `dp` data-parallel shares of the batch this coordinate computes."""
        return coordinate["dp_replicate"] * self.dp_shard + coordinate["dp_shard"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Everything about how one step is computed that does not change its result."""

    dims: ParallelDims
    microbatch_size: int  # sequences
    num_microbatches: int  # per data-parallel share
    layers_per_stage: tuple[int, ...]  # one entry per pipeline stage (pp · virtual_stages), sums to num_layers
    sequence_parallel: bool = True
    schedule: Schedule = "1f1b"
    virtual_stages: int = 1  # pipeline stages per rank
    recompute: Recompute = "none"
    # What dp_shard shards: 1 optimizer state; 2 gradients too, once they are reduced; 3 parameters too, gathered unit
    # by unit and dropped after each use.
    zero_stage: ZeroStage = 3
    layers_per_unit: int = 1  # consecutive layers that are gathered and reduced together
    # zero_stage 2 and 3: reduce gradients after every microbatch instead of once per step, so that no whole
    # float32 gradients are held in between. Without it, and with several microbatches, 2 is as 1.
    reduce_every_microbatch: bool = False
    cp_method: CpMethod = "ring"  # how keys and values reach all cp ranks

    @property
    def num_stages(self) -> int:
        return self.dims.pp * self.virtual_stages

    def stages(self, pp_rank: int) -> tuple[int, ...]:
        """Pipeline stages that this pp coordinate holds, in the order of the model."""
        pp = self.dims.pp
        if self.schedule in V_SCHEDULES and pp > 1:
            return pp_rank, 2 * pp - 1 - pp_rank
        return tuple(range(pp_rank, self.num_stages, pp))

    def layers(self, stage: int) -> range:
        """Layers of the model that the stage computes."""
        first = sum(self.layers_per_stage[:stage])
        return range(first, first + self.layers_per_stage[stage])

    @property
    def reshard_after_forward(self) -> bool:
        """FSDP2's name for it."""
        return self.zero_stage == 3

    @property
    def shards_weights(self) -> bool:
        return self.zero_stage == 3 and self.dims.fsdp > 1

    @property
    def shards_gradients(self) -> bool:
        """Each microbatch's are reduced at once, and only this rank's shard of the sum is held."""
        return self.dims.fsdp > 1 and (self.num_microbatches == 1 or (self.zero_stage > 1 and
                                                                      self.reduce_every_microbatch))

    @property
    def slots(self) -> int:
        """Sequences computed per step: microbatch_size × num_microbatches × dp."""
        return self.microbatch_size * self.num_microbatches * self.dims.dp

    def flat(self) -> dict:
        """The published JSON form: degrees and the rest on one level."""
        dims = {axis: getattr(self.dims, axis) for axis in AXES}
        rest = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "dims"}
        return dims | rest | {"layers_per_stage": list(self.layers_per_stage), "mesh_order": list(self.dims.order)}

    def __str__(self) -> str:
        degrees = [f"{axis}={getattr(self.dims, axis)}" for axis in AXES if getattr(self.dims, axis) > 1]
        return " ".join([*(degrees or ["single rank"]), f"mb={self.microbatch_size}×{self.num_microbatches}"])


def cp_chunks(cp: int, cp_rank: int) -> tuple[int, int]:
    """Which two of the 2·cp equal chunks of every sequence a cp rank holds: one from the head and one from the tail,
    so that under a causal mask all ranks see equally many keys."""
    return cp_rank, 2 * cp - 1 - cp_rank


def split_layers(num_layers: int, pp: int) -> tuple[int, ...]:
    """Layers per stage, as even as possible; the surplus goes to the middle stages, because the first
    also computes the embedding and the last the output projection and the loss."""
    base, surplus = divmod(num_layers, pp)
    order = sorted(range(pp), key=lambda stage: (min(stage, pp - 1 - stage) == 0, stage))
    extra = set(order[:surplus])
    return tuple(base + (stage in extra) for stage in range(pp))
