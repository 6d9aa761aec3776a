"""A model of the user's own: where its code is, and what measuring it has given.

Read wherever a ModelSpec is read. The code itself is imported only by ranks and by `python -m jobs.own.measure`.
"""
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnModel:
    """`entrypoint`, package.module:function, is called with vocab_size, seq_len and `arguments`, all by name, and
    returns (nn.Module, plan table); see docs/bring_your_own_model.md."""

    entrypoint: str
    vocab_size: int
    name: str = "own"
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A block, or all that lies before or behind the blocks, as one tp rank computes it for one sequence. Sizes are
    elements: of parameters, and of activations in the parameters' precision."""

    params: int
    flops: float  # forward: matmuls, convolutions, attention
    moved: float  # read and written by all other operations of a forward
    kernels: int  # operations of a forward
    saved: float  # kept for the backward, recompute=none
    kept: float  # the same, recompute=selective
    entered: float = 0.0  # whole tensors that enter the split of tp, in a forward
    left: float = 0.0  # and that leave it
    entries: int = 0
    exits: int = 0
    summed: int = 0  # parameters whose gradients are added up over tp, once per step


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The model at one degree of tp."""

    tp: int
    sequence_parallel: bool
    before: Piece
    blocks: tuple[Piece, ...]
    behind: Piece
    hidden: int  # elements that one rank passes from block to block
    tied: int = 0  # parameters of `behind` that lie before the blocks, too
    drawn: int = 0  # elements of the largest mask of dropout


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnProfile:
    """All that the planner knows of an own model; made by `python -m jobs.own.measure`."""

    num_params: int
    flops_per_token: float  # forward and backward: three times the forward's
    splits_logits: bool  # the loss is computed on parts of the logits
    measured: tuple[Measured, ...]  # tp=1, and every degree asked for that the table allows
    no_pp: str | None = None  # why its blocks cannot be stages of a pipeline; None: they can
    no_tp: dict[int, str] = field(default_factory=dict)  # degree → why it is not among `measured`
    no_sequence_parallel: str | None = None

    @property
    def num_blocks(self) -> int:
        return len(self.measured[0].blocks)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureOrder:
    """What `python -m jobs.own.measure` reads, as JSON."""

    model: OwnModel
    seq_len: int
    workdir: str
    tp: tuple[int, ...] = (1,)  # degrees to measure


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureAnswer:
    """What it writes: one of the two."""

    profile: OwnProfile | None = None
    problems: tuple[str, ...] = ()
