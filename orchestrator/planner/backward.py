"""The moments of one backward pass at which a rank may need most: what it has then of gradients, of whole weights and
of messages, and what is left of activations and logits.

Called by memory with every scene of a rank. Weights are kept in one of two ways, those of jobs.parallel: `whole`, with
buckets, or `sharded`, by FSDP2; other trainers know a third, which is here. All is bytes of one rank; which passes are
looked at is in scenes.
"""
from collections.abc import Iterator
from typing import NamedTuple

from orchestrator.planner.units import Way
from orchestrator.planner.weights import Weights

MASTER_BYTES = 4  # of float32 weights, and of the sums of their gradients


class Moment(NamedTuple):
    gradients: float  # sums of them
    gathered: float  # whole weights, and gradients that are in no sum yet, with their messages
    activations: float
    logits: float


class Pass(NamedTuple):
    """A backward pass through one stage."""

    way: Way
    activations: float  # held when it begins
    own: float  # of these the ones of its own microbatch, which it leaves behind
    again: float  # of a block while it goes through that, beside what was kept of it
    waiting: float  # gradients of outputs that its first half hands to its second
    logits: float  # at the loss, with those of microbatches whose backward is still to come
    logits_behind: float  # when the projection's weights get their gradient
    logits_left: float  # of the other microbatches
    gradients: float  # of all stages, when it begins
    gathered: float  # weights of other stages that are whole
    is_split: bool
    begun: bool  # gradients of this stage exist
    reduces: bool  # gradients of this stage are complete with it, and reduced
    stays: bool  # weights of this stage have been whole since another backward
    keeps: bool  # what it gathers stays whole, for the next forward

    def begins(self, gathered: float) -> Moment:
        return Moment(self.gradients, gathered, self.activations, self.logits)

    def at(self, more: float, gathered: float, *, gone: float, again: bool = False) -> Moment:
        """`more`: in sums of gradients. `gone`: share of its way that lies behind it. `again`: amid a block."""
        return Moment(self.gradients + more, gathered,
                      self.activations - gone * self.own + (self.again if again else 0), self.logits_left)


class Bytes(NamedTuple):
    """Per weight; experts may be shared by other ranks."""

    dense: float
    experts: float

    def of(self, weights: Weights) -> float:
        return self.dense * weights.dense + self.experts * weights.experts


class Kept:
    """Weights and gradients have a place of their own for the whole step (Megatron-LM), which is counted elsewhere."""

    sums = Bytes(0, 0)
    replaces = False

    def elsewhere(self, way: Way, *, begun: bool) -> float:
        return 0.0

    def moments(self, one: Pass) -> Iterator[Moment]:
        yield one.begins(0.0)
        yield one.at(0.0, 0.0, gone=0, again=True)
