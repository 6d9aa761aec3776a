"""Bytes that no layout of a part of the space can do without: what cannot fit is dropped before it is timed.

Called by the search. Only the states, the weights a forward is computed with and the activations are looked at, of the
mean rank or of the first; memory.py can only add to them.
"""
import functools

from jobs.spec.parallel import ParallelDims
from jobs.spec.training import DTYPE_BYTES
from orchestrator.planner.activations import block_activation_bytes, block_shape
from orchestrator.planner.parts import Pass, Shape, Variant
from orchestrator.planner.peaks import peak_held
from orchestrator.planner.question import Question
from orchestrator.planner.schedules import stages_of
from orchestrator.planner.weights import dense_weights, expert_weights, layer_kinds, like_layers, weights_of_stages

STATE_BYTES = 12  # per parameter: float32 master and two moments, however they are sharded


class Footprint:
    """Of one question."""

    def __init__(self, question: Question) -> None:
        self.question, self.model = question, question.model
        self._element = DTYPE_BYTES[question.training.param_dtype]
        self._counts = layer_kinds(self.model, 0, self.model.num_layers)
        self._kind_of = {(self.model.is_moe(layer), self.model.window(layer)): layer for layer, _ in self._counts}
        self._kept_bytes = functools.cache(self._kept_of_kinds)
        self._first_rank_holds = functools.cache(self._held_first)
        self._first_rank_weights = functools.cache(self._weights_first)
        self._weights = functools.cache(self._all_weights)

    def least_bytes(self, shape: Shape, one: Pass) -> float:
        """That the heaviest rank needs: its share of the states, sharded over all that there are to shard over, one
        microbatch's activations, or in a pipeline the weights that these are computed with."""
        kept = sum(count * self._kept_bytes(one)[layer] for layer, count in self._counts)
        dense, experts = self._mean_weights(shape)
        return self._states(shape, dense, experts) + max(kept / shape.pp, self._computed(shape, dense + experts))

    def held_bytes(self, shape: Shape, variant: Variant, one: Pass) -> float:
        """As least_bytes, of the first rank, with all microbatches that it holds at its peak."""
        kept = self._kept_bytes(one)
        held = self._first_rank_holds(shape.pp, variant)
        dense, experts = self._first_rank_weights(variant, shape.pp, shape.tp, shape.ep)
        # sharded weights are whole when backward has left a stage, and with that the activations of one microbatch
        own = max(variant.layers_per_stage) * max(kept.values())
        return self._states(shape, dense, experts) + sum(count * kept[kind] for kind, count in held) + \
            max(0.0, self._computed(shape, dense + experts) - own)

    def _weights_first(self, variant: Variant, pp: int, tp: int, ep: int) -> tuple[int, int]:
        found = weights_of_stages(self.model, variant.layers_per_stage, _first_stages(pp, variant), tp=tp, ep=ep)
        return found.dense, found.experts

    def _held_first(self, pp: int, variant: Variant) -> tuple[tuple[int, int], ...]:
        """(a layer, how many microbatches are held of how many like it), multiplied."""
        found = dict.fromkeys(self._kind_of.values(), 0)
        held = (1,) if pp == 1 else peak_held(variant.schedule, rank=0, pp=pp, virtual_stages=variant.virtual_stages,
                                              num_microbatches=variant.num_microbatches)
        for stage, count in zip(_first_stages(pp, variant), held):
            start = sum(variant.layers_per_stage[:stage])
            for moe, window, layers in like_layers(self.model, start, start + variant.layers_per_stage[stage]):
                found[self._kind_of[moe, window]] += count * layers
        return tuple(found.items())

    def _mean_weights(self, shape: Shape) -> tuple[float, float]:
        dense, experts = self._weights(shape.tp, shape.ep)
        return dense / shape.pp, experts / shape.pp

    def _all_weights(self, tp: int, ep: int) -> tuple[int, int]:
        """Of the whole model, as much as one rank computes with; experts apart."""
        dims = ParallelDims(tp=tp, ep=ep)
        return dense_weights(self.model, tp=tp), sum(count * expert_weights(self.model, layer, dims=dims)
                                                     for layer, count in self._counts)

    def _states(self, shape: Shape, dense: float, experts: float) -> float:
        ranks = shape.dp * shape.cp
        return STATE_BYTES * (dense / ranks + experts * shape.ep / (ranks * shape.tp))

    def _computed(self, shape: Shape, weights: float) -> float:
        """16-bit copies of a stage's weights, beside their masters."""
        return self._element * weights if shape.pp > 1 and self._element < 4 else 0.0

    def _kept_of_kinds(self, one: Pass) -> dict[int, float]:
        """Activations of one layer, one microbatch, by the first layer of each kind."""
        found = {}
        for layer, _ in self._counts:
            block = block_shape(self.model, microbatch_size=one.microbatch_size, layer=layer,
                                seq_len=self.question.training.seq_len // one.cp, element_bytes=self._element,
                                device=self.question.cluster.device)
            found[layer] = block_activation_bytes(block, tp=one.tp, sequence_parallel=one.sequence_parallel,
                                                  recompute=one.recompute)
        return found


def _first_stages(pp: int, variant: Variant) -> tuple[int, ...]:
    """That the first pipeline rank holds."""
    return (0,) if pp == 1 else stages_of(variant.schedule, rank=0, pp=pp, virtual_stages=variant.virtual_stages)
