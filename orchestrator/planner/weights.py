"""How many parameters a rank of a pipeline stage holds, before data parallelism shards them.

Called by memory, communication and cost. Experts are counted apart: another group of ranks shares them.
"""
import functools
from dataclasses import dataclass

from jobs.spec.counts import (attention_bias_params, attention_matmul_params, attention_norm_params, embedding_params,
                              expert_params, ffn_params, layer_norm_params, norm_params, position_params,
                              router_params, shared_expert_params)
from jobs.spec.model import ModelSpec
from jobs.spec.parallel import Layout, ParallelDims


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters on one tp rank."""

    dense: int
    experts: int = 0  # of the experts that this rank's ep coordinate holds

    def __add__(self, other: "Weights") -> "Weights":
        return Weights(self.dense + other.dense, self.experts + other.experts)

    @property
    def total(self) -> int:
        return self.dense + self.experts


@functools.lru_cache(maxsize=4096)
def block_params(model: ModelSpec, *, tp: int, layer: int = 0) -> int:
    """Of one block on one tp rank, its routed experts left out."""
    whole, split = _block_parts(model, layer)
    return whole + split // tp


def whole_block_params(model: ModelSpec, layer: int) -> int:
    """Of one block, what every tp rank holds: norms, routers, MLA's way down to its latents, biases behind sums."""
    return _block_parts(model, layer)[0]


def _block_parts(model: ModelSpec, layer: int) -> tuple[int, int]:
    """(whole on every tp rank, split over tp)"""
    whole = layer_norm_params(model) + attention_norm_params(model)
    split = attention_matmul_params(model) + attention_bias_params(model)
    if model.bias and model.mla is None:
        whole, split = whole + model.dim, split - model.dim  # the bias behind the partial sums
    if model.mla is not None:
        latents = model.dim * (model.mla.kv_lora_rank + model.mla.qk_rope_head_dim + (model.mla.q_lora_rank or 0))
        whole, split = whole + latents, split - latents
    if model.is_moe(layer):
        return whole + router_params(model), split + shared_expert_params(model)
    bias = model.dim if model.bias else 0
    return whole + bias, split + ffn_params(model) - bias


@functools.lru_cache(maxsize=4096)
def expert_weights(model: ModelSpec, layer: int, *, dims: ParallelDims) -> int:
    """Of one layer's routed experts on one rank."""
    if not model.is_moe(layer):
        return 0
    return model.moe.num_experts * expert_params(model) // dims.ep


def widest_weight(model: ModelSpec, layer: int, *, dims: ParallelDims) -> int:
    """Of one layer's matrices on one rank the largest; all experts' are one."""
    if model.is_moe(layer):
        return expert_weights(model, layer, dims=dims) // (2 if model.ffn == "gelu" else 3)
    return model.dim * max(model.ffn_dim, model.num_heads * model.head_size) // dims.tp


@functools.lru_cache(maxsize=4096)
def ends_params(model: ModelSpec, *, tp: int, first: bool, last: bool) -> int:
    """Of the embedding and of the final norm with the output projection, split over the vocabulary.

    A tied projection is one tensor where both ends are on the same stage, else a copy on each.
    """
    table = embedding_params(model) // tp
    shared = first and last and model.tie_embeddings
    begin = table + position_params(model) if first else 0
    return begin + (norm_params(model) + (0 if shared else table) if last else 0)


def layer_weights(model: ModelSpec, layer: int, *, dims: ParallelDims) -> Weights:
    return Weights(block_params(model, tp=dims.tp, layer=layer), expert_weights(model, layer, dims=dims))


def dense_weights(model: ModelSpec, *, tp: int) -> int:
    """Of the whole model but its routed experts, on one tp rank."""
    layers = sum(count * block_params(model, tp=tp, layer=layer)
                 for layer, count in layer_kinds(model, 0, model.num_layers))
    return layers + ends_params(model, tp=tp, first=True, last=True)


def stage_weights(model: ModelSpec, layout: Layout, stage: int) -> Weights:
    """Of one pipeline stage (a chunk of layers; the first and the last with the model's ends)."""
    start = sum(layout.layers_per_stage[:stage])
    return _weights_of(model, start, start + layout.layers_per_stage[stage], tp=layout.dims.tp, ep=layout.dims.ep,
                       first=stage == 0, last=stage == layout.num_stages - 1)


@functools.lru_cache(maxsize=65536)
def _weights_of(model: ModelSpec, start: int, stop: int, *, tp: int, ep: int, first: bool, last: bool) -> Weights:
    """Of the layers from start to stop, with the model's ends where they belong to them. Asked for every layout."""
    found, dims = Weights(ends_params(model, tp=tp, first=first, last=last)), ParallelDims(tp=tp, ep=ep)
    for layer, count in layer_kinds(model, start, stop):
        one = layer_weights(model, layer, dims=dims)
        found += Weights(count * one.dense, count * one.experts)
    return found


def rank_weights(model: ModelSpec, layout: Layout, pp_rank: int) -> Weights:
    """Of all stages of a pipeline rank. A V holds both ends of the model, and with them both copies of a tied table."""
    return weights_of_stages(model, layout.layers_per_stage, layout.stages(pp_rank), tp=layout.dims.tp,
                             ep=layout.dims.ep)


@functools.lru_cache(maxsize=16384)  # asked several times for each of many layouts
def weights_of_stages(model: ModelSpec, layers_per_stage: tuple[int, ...], stages: tuple[int, ...], *, tp: int,
                      ep: int) -> Weights:
    found, last = Weights(0), len(layers_per_stage) - 1
    for stage in stages:
        start = sum(layers_per_stage[:stage])
        found += _weights_of(model, start, start + layers_per_stage[stage], tp=tp, ep=ep, first=stage == 0,
                             last=stage == last)
    return found


@functools.lru_cache(maxsize=16384)
def layer_kinds(model: ModelSpec, start: int, stop: int) -> tuple[tuple[int, int], ...]:
    """(a layer, how many are like it) of the layers from start to stop: dense or experts, local or global."""
    if model.moe is None and model.sliding_window is None:
        return ((start, stop - start),) if stop > start else ()
    counts: dict[tuple, list[int]] = {}
    for layer in range(start, stop):
        counts.setdefault((model.is_moe(layer), model.window(layer)), []).append(layer)
    return tuple((layers[0], len(layers)) for layers in counts.values())


def stage_kinds(model: ModelSpec, layout: Layout, stage: int) -> tuple[tuple[int, int], ...]:
    layers = layout.layers(stage)
    return layer_kinds(model, layers.start, layers.stop)


@functools.lru_cache(maxsize=4096)  # asked for every layout
def stages_like(model: ModelSpec, layers_per_stage: tuple[int, ...]) -> tuple[int, ...]:
    """For every stage the first one that is like it: in its layers, and in the ends of the model."""
    last, start, firsts, found = len(layers_per_stage) - 1, 0, {}, []
    for stage, layers in enumerate(layers_per_stage):
        kind = (stage == 0, stage == last, like_layers(model, start, start + layers))
        found.append(firsts.setdefault(kind, stage))
        start += layers
    return tuple(found)


@functools.lru_cache(maxsize=16384)
def like_layers(model: ModelSpec, start: int, stop: int) -> tuple[tuple, ...]:
    """What tells the layers from start to stop from others: kinds in their order, with their number."""
    return tuple((model.is_moe(layer), model.window(layer), count) for layer, count in layer_kinds(model, start, stop))
