"""Seconds that one rank computes of a layer and of the model's ends: matmuls, attention, memory-bound kernels.

Called by the cost model per kind of layer. What is no matmul moves bytes. It knows the layer's shapes and the chip
(chip.py); communication and schedules are elsewhere.
"""
import functools
from dataclasses import dataclass
from typing import NamedTuple

from jobs.spec.counts import layer_attention_flops_per_token, num_ffn_matrices
from jobs.spec.model import ModelSpec
from jobs.spec.parallel import Layout
from orchestrator.planner import constants
from orchestrator.planner.chip import Chip, matmul_s, with_launches
from orchestrator.planner.software import Software


class Shape(NamedTuple):
    """One microbatch as one rank sees it. A layer of a shape is computed once."""

    tokens: int  # microbatch_size · seq_len / cp
    seq_len: int
    tp: int
    ep: int
    sequence_split: int  # tp under sequence parallelism, else 1
    recompute: str
    blocks: int = 1  # of keys, one after the other, that attention is put together from: a ring's hops


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of one layer, or of a model's end, for one microbatch."""

    forward_s: float
    inputs_s: float  # backward of its inputs
    weights_s: float  # backward of its weights
    again_s: float = 0.0  # recomputed before the backward
    attention_s: float = 0.0  # forward attention alone: what a ring of keys and values hides behind
    # where tensor parallelism is entered: (hidden states whose gradient is reduced there, seconds of weights_s that it
    # may hide behind)
    entries: tuple[tuple[float, float], ...] = ()

    @property
    def backward_s(self) -> float:
        return self.inputs_s + self.weights_s + self.again_s


def shape_of(layout: Layout, *, seq_len: int) -> Shape:
    dims = layout.dims
    return Shape(tokens=max(1, layout.microbatch_size * seq_len // dims.cp), seq_len=seq_len, tp=dims.tp, ep=dims.ep,
                 sequence_split=dims.tp if layout.sequence_parallel else 1, recompute=layout.recompute,
                 blocks=dims.cp if layout.cp_method == "ring" else 1)


@functools.lru_cache(maxsize=16384)
def layer_times(model: ModelSpec, layer: int, *, shape: Shape, chip: Chip, software: Software) -> LayerTimes:
    """One decoder layer. `layer` picks dense or experts, local or global attention."""
    maps = _linear_maps(model, layer, shape=shape)
    flops = chip.matmul_flops
    forward = sum(count * matmul_s(m, n, k, flops=flops, chip=chip) for m, n, k, count in maps)
    inputs = sum(count * matmul_s(m, k, n, flops=flops, chip=chip) for m, n, k, count in maps)
    weights = sum(count * matmul_s(k, n, m, flops=flops, chip=chip) for m, n, k, count in maps)
    weights += _accumulated_s(maps, chip=chip, software=software)
    attention, attention_back = _attention_s(model, layer, shape=shape, chip=chip, software=software)
    merging = _merging_s(model, shape=shape, chip=chip, software=software)
    streamed = _streamed_bytes(model, layer, shape=shape, chip=chip, software=software)
    stream = shape.tokens * streamed / chip.memory_bytes_s
    casts = constants.CAST_BYTES if chip.casts else 0.0
    cast = casts * sum(m * k * count for m, _, k, count in maps) / chip.memory_bytes_s
    kernels = _kernels(model, layer, shape=shape, chip=chip, software=software)
    forward_s = with_launches(forward + attention + merging + stream + cast, kernels=kernels, chip=chip)
    inputs_s = inputs + attention_back + constants.BACKWARD_TRAFFIC * (stream + merging) + cast
    backward_s = with_launches(inputs_s + weights, kernels=2 * kernels, chip=chip)
    entries = tuple((share, sum(matmul_s(k, n, m, flops=flops, chip=chip) for m, n, k, _ in columns))
                    for share, columns in _entries(model, layer, maps))
    again_s = _again_s(model, layer, shape, chip, software, maps=maps, forward_s=forward_s, attention=attention,
                       stream=stream)
    return LayerTimes(forward_s=forward_s, inputs_s=backward_s - weights, weights_s=weights, attention_s=attention,
                      entries=entries, again_s=again_s)


def _accumulated_s(maps: list, *, chip: Chip, software: Software) -> float:
    """A microbatch's gradients of the weights are added to the sum of those before: read, and the sum read and written.
    The fewer tokens there are to a weight, the more it shows. A matmul that adds them itself hides it."""
    if software.sums_in_matmul:
        return 0.0
    summed = software.gradient_bytes if software.keeps_half_weights else 4
    return (chip.element + 2 * summed) * sum(n * k * count for _, n, k, count in maps) / chip.memory_bytes_s


def _again_s(model: ModelSpec, layer: int, shape: Shape, chip: Chip, software: Software, *, maps: list,
             forward_s: float, attention: float, stream: float) -> float:
    if shape.recompute == "full":
        return forward_s
    if shape.recompute == "none":
        return 0.0
    if software.selective == "activations":
        repeated = shape.tokens * _activation_bytes(model, layer, chip=chip, software=software)
        return repeated / (shape.tp * chip.memory_bytes_s)
    # keeping outputs of matmuls and of attention repeats what lies between; of attention a fused kernel saves nothing
    if software.selective == "all but matmuls":
        repeated = 1 - software.selective_share
        return stream + (repeated * sum(count * matmul_s(m, n, k, flops=chip.matmul_flops, chip=chip)
                                        for m, n, k, count in maps) if repeated else 0.0)
    again = software.selective == "attention, feed-forward"
    ffn = maps[len(_attention_maps(model, shape.tokens, shape.tp)):] if again else ()
    again = sum(count * matmul_s(m, n, k, flops=chip.matmul_flops, chip=chip) for m, n, k, count in ffn)
    return again if software.flash_attention else again + attention


def _linear_maps(model: ModelSpec, layer: int, *, shape: Shape) -> list[tuple[int, int, int, float]]:
    """(m, n, k, how many) of the matmuls of one layer on one rank."""
    t, tp = shape.tokens, shape.tp
    maps = _attention_maps(model, t, tp)
    gates = num_ffn_matrices(model) - 1
    if not model.is_moe(layer):
        ffn = _share(model.ffn_dim, tp)
        return maps + [(t, gates * ffn, model.dim, 1), (t, model.dim, ffn, 1)]
    moe = model.moe
    # experts are never split over tp: each rank sends the tokens of its sequence shard to the ep ranks that hold them
    local = max(1, moe.num_experts // shape.ep)
    routed = max(1, t * moe.top_k // tp // local)  # tokens per expert, balanced
    maps += [(routed, gates * moe.ffn_dim, model.dim, local), (routed, model.dim, moe.ffn_dim, local),
             (t // shape.sequence_split or 1, moe.num_experts, model.dim, 1)]
    if moe.num_shared_experts:
        shared = _share(moe.num_shared_experts * moe.ffn_dim, tp)
        maps += [(t, gates * shared, model.dim, 1), (t, model.dim, shared, 1)]
    return maps


def _attention_maps(model: ModelSpec, t: int, tp: int) -> list[tuple[int, int, int, float]]:
    if model.mla is None:
        q, kv = model.num_heads * model.head_size, model.num_kv_heads * model.head_size
        return [(t, _share(q + 2 * kv, tp), model.dim, 1), (t, model.dim, _share(q, tp), 1)]
    mla, heads = model.mla, _share(model.num_heads, tp)
    queries = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    q = [(t, queries, model.dim, 1)] if mla.q_lora_rank is None else [
        (t, mla.q_lora_rank, model.dim, 1), (t, queries, mla.q_lora_rank, 1)]
    return q + [(t, mla.kv_lora_rank + mla.qk_rope_head_dim, model.dim, 1),
                (t, heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank, 1),
                (t, model.dim, heads * mla.v_head_dim, 1)]


def _entries(model: ModelSpec, layer: int, maps: list) -> list[tuple[float, list]]:
    """Where a layer enters tensor parallelism, with the maps behind it: attention, whose latents are narrower than the
    hidden state, and the feed-forward or the shared experts. Routed experts are not split."""
    experts = model.is_moe(layer)
    shared = experts and model.moe.num_shared_experts > 0
    ffn = len(maps) - 2 if not experts or shared else len(maps)
    mla = model.mla
    if mla is None:
        found = [(1.0, maps[:1])]
    else:
        latents = (mla.q_lora_rank or model.dim) + mla.kv_lora_rank + mla.qk_rope_head_dim
        queries = 0 if mla.q_lora_rank is None else 1
        found = [(latents / model.dim, [maps[queries], maps[queries + 2]])]
    return found + ([(1.0, maps[ffn:ffn + 1])] if ffn < len(maps) else [])


def _share(size: int, parts: int) -> int:
    return max(1, -(-size // parts))


def _attention_s(model: ModelSpec, layer: int, *, shape: Shape, chip: Chip,
                 software: Software) -> tuple[float, float]:
    """Forward and backward of QKᵀ, softmax and AV for one microbatch. Where weights are dropped our trainer writes the
    scores out, in float32 and without the masked half."""
    flash, dropped = software.flash_attention, model.attention_dropout > 0
    per_token = layer_attention_flops_per_token(model, layer, seq_len=shape.seq_len,
                                                convention="causal" if flash else "full") / 3
    flops = shape.tokens * per_token / shape.tp
    if flash and not (dropped and chip.device == "cuda"):
        rate = chip.half_flops * chip.attention
        forward = flops / (rate * constants.FLASH_FORWARD)
        backward = constants.FLASH_BACKWARD_FLOPS * flops / (rate * constants.FLASH_BACKWARD)
        slower, back = constants.DROPPED_ATTENTION if dropped else (1.0, 1.0)
        return slower * forward, back * backward
    window = min(shape.seq_len, model.window(layer) or shape.seq_len)
    scores = shape.tokens * window * model.num_heads / shape.tp
    scores, element = (scores / 2, 4) if flash else (scores, chip.element)
    traffic = constants.UNFUSED_SCORE_BYTES * element / 2 * scores / chip.memory_bytes_s
    matmuls = flops / (chip.half_flops * constants.UNFUSED_MATMUL)
    return matmuls + traffic, 2 * matmuls + traffic


def _merging_s(model: ModelSpec, *, shape: Shape, chip: Chip, software: Software) -> float:
    """Memory traffic of putting attention together, block after block: a float32 sum of the outputs is scaled, the
    block's is scaled and added; three passes where that is one kernel."""
    if shape.blocks == 1:
        return 0.0
    size = model.head_size if model.mla is None else model.mla.v_head_dim
    passes = shape.blocks * (3 if software.fused_kernels else 8)
    return passes * 4 * shape.tokens * model.num_heads * size / shape.tp / chip.memory_bytes_s


def _streamed_bytes(model: ModelSpec, layer: int, *, shape: Shape, chip: Chip, software: Software) -> float:
    """Memory traffic per token of one layer's forward outside matmuls and attention."""
    element, heads = chip.element, model.num_heads + model.num_kv_heads
    if software.fused_kernels:  # each norm and residual reads and writes its operands once
        norms, rotary = 10 * element * model.dim, 2 * element * heads * model.head_size
    else:
        # two norms of about six passes, two sums of three; rotary positions in float32: four half products (12 bytes
        # per element), two half sums (12), cat (8), cast (6)
        eager = constants.EAGER_TRAFFIC
        norms, rotary = eager * 18 * element * model.dim, eager * 38 * heads * model.head_size
    rotary = 0 if model.positions == "learned" else rotary
    norms += (4 * element + 2) * model.dim if software.dropout else 0
    if model.post_norms:
        norms *= 1.5
    if model.is_moe(layer):
        norms += 4 * element * model.moe.top_k * model.dim  # tokens are put in the order of experts, and back
    activation = _activation_bytes(model, layer, chip=chip, software=software)
    return norms / shape.sequence_split + (rotary + activation) / shape.tp


def _activation_bytes(model: ModelSpec, layer: int, *, chip: Chip, software: Software) -> float:
    """Memory traffic per token between a feed-forward's matrices: of an eager gate silu and product apart."""
    passes = 2.0 if model.ffn == "gelu" else 3.0 if software.fused_kernels else 5 * constants.EAGER_TRAFFIC
    moe = model.moe if model.is_moe(layer) else None
    ffn = model.ffn_dim if moe is None else (moe.top_k + moe.num_shared_experts) * moe.ffn_dim
    return passes * chip.element * ffn


def _kernels(model: ModelSpec, layer: int, *, shape: Shape, chip: Chip, software: Software) -> float:
    """Of one layer's forward. Experts have a matmul each, or more where their inputs are cast."""
    kernels = constants.BLOCK_KERNELS["fused" if software.fused_kernels else "eager"]
    if not model.is_moe(layer):
        return kernels
    each = constants.EXPERT_KERNELS["cast" if chip.casts else "plain"]
    return kernels + constants.ROUTING_KERNELS + each * max(1, model.moe.num_experts // shape.ep)


@functools.lru_cache(maxsize=4096)
def head_times(model: ModelSpec, *, shape: Shape, chip: Chip) -> LayerTimes:
    """Final norm, output projection and loss of one microbatch. The projection is never below 16 bits; its float32
    logits are read and written about once per pass of the loss."""
    vocabulary = _share(model.vocab_size, shape.tp)
    logits = 8.0 * shape.tokens * vocabulary / chip.memory_bytes_s
    m, n, k = shape.tokens, vocabulary, model.dim
    weights = matmul_s(k, n, m, flops=chip.half_flops, chip=chip)
    return LayerTimes(forward_s=matmul_s(m, n, k, flops=chip.half_flops, chip=chip) + logits,
                      inputs_s=matmul_s(m, k, n, flops=chip.half_flops, chip=chip) + logits,
                      weights_s=weights, entries=((1.0, weights),))


@functools.lru_cache(maxsize=4096)
def embedding_times(model: ModelSpec, *, shape: Shape, chip: Chip) -> LayerTimes:
    """Look-up, and the sum into the table's gradient."""
    moved = chip.element * shape.tokens * model.dim / shape.sequence_split / chip.memory_bytes_s
    return LayerTimes(forward_s=2 * moved, inputs_s=0.0, weights_s=4 * moved)
