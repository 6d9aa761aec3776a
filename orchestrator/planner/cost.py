"""Seconds of one optimizer step of one layout: roofline compute, exposed communication, bubble, optimizer.

Called by the search for every legal layout. Knows shapes, the GPU table and the transfers of
communication.py; it never sees why a layout was proposed.

Overlap rules, as our trainer behaves:
- tp: nothing is hidden, the next matmul needs the result.
- pp: nothing is hidden, torch's 1F1B waits for the messages it posts; filling and draining is the bubble.
- dp_shard: gathers hide behind the compute of their pass, except the first unit's; reductions hide behind the
  last microbatch's backward, except the last unit's. dp_replicate: as the reductions.
- on CPU nothing is hidden: the ranks' cores do the communication.
"""
import dataclasses
from dataclasses import dataclass

from jobs.spec.model import (AttentionConvention, ModelSpec, attention_flops_per_token, attention_params,
                             embedding_params, ffn_params, model_flops_per_token)
from jobs.spec.parallel import Layout
from jobs.spec.training import DTYPE_BYTES, TrainingSpec
from orchestrator.cluster import ClusterSpec
from orchestrator.planner.communication import gather_passes, stage_transfers
from orchestrator.planner.memory import stage_memory, stage_params
from orchestrator.planner.plan import Prediction, Transfer

# Share of the best measured matmul (GpuSpec.matmul_efficiency) that a training step sustains: mixed shapes and
# power limits. Chosen to meet one published row, compiled Llama-2 7B with FSDP on 96 H100 (9,600 tokens/s/GPU);
# eager rows of the same source are up to a third slower than predicted.
SUSTAINED_MATMUL = 0.70
# Fused attention against the same matmul rate: FlashAttention-2 reaches 190 of 271 TFLOP/s on A100, ~400 of 790
# on H100 (arXiv:2307.08691, arXiv:2407.08608).
ATTENTION_EFFICIENCY = 0.60
ATTENTION_BACKWARD = 2.5  # it recomputes the scores: 5 matmuls against the forward's 2
MEMORY_EFFICIENCY = 0.85  # of the published bandwidth, streaming
ADAM_TRAFFIC_BYTES = 40  # per parameter: clip (read, scale), read weight, gradient, m, v, write weight, m, v
# Eager kernels of one block, and what starting one costs: hidden on a GPU while the kernels are longer.
BLOCK_KERNELS = {"forward": 30, "backward": 60}
LAUNCH_S = {"cuda": 6e-6, "cpu": 20e-6}


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCost:
    """One stage. Compute is per microbatch, the rest per step."""

    forward_s: float
    backward_s: float  # recomputation included
    exposed_s: float  # repeated by each microbatch: tp, pp and gathers
    tail_s: float  # once per step: reductions that the last backward cannot hide
    transfers: tuple[Transfer, ...]

    def microbatch_s(self, num_microbatches: int) -> float:
        return self.forward_s + self.backward_s + self.exposed_s / num_microbatches


@dataclass(frozen=True, kw_only=True, slots=True)
class Priced:
    """A layout and what it costs."""

    layout: Layout
    predicted: Prediction
    transfers: tuple[Transfer, ...]  # of the busiest stage

    @property
    def fits(self) -> bool:
        return self.predicted.memory_gib <= self.predicted.memory_limit_gib


def price(model: ModelSpec, layout: Layout, *, training: TrainingSpec, cluster: ClusterSpec, headroom: float,
          convention: AttentionConvention) -> Priced:
    """Predict one layout. The pipeline takes Σ over stages of one microbatch, plus m − 1 of the slowest:
    for even stages the 1F1B bubble (p−1)/(m+p−1) exactly."""
    m, pp = layout.num_microbatches, layout.dims.pp
    stages = _distinct_stages(model, layout, training=training, cluster=cluster)
    rounds = [stage.microbatch_s(m) for stage in stages]
    busiest = max(range(pp), key=rounds.__getitem__)
    bubble_s = sum(rounds) - rounds[busiest]
    pipeline_s = m * rounds[busiest] + bubble_s
    tail_s = max(stage.tail_s for stage in stages)
    optimizer_s = max(_optimizer_s(model, layout, cluster=cluster, stage=s) for s in _telling_stages(layout))
    step_s = pipeline_s + tail_s + optimizer_s
    memory = max((stage_memory(model, layout, training=training, stage=s, device=cluster.device)
                  for s in _telling_stages(layout)), key=lambda stage: stage.total_bytes)
    per_gpu = training.global_batch_size * training.seq_len / step_s / layout.dims.world_size
    flops = model_flops_per_token(model, seq_len=training.seq_len, convention=convention)
    executed = flops + _recomputed_flops(model, layout, seq_len=training.seq_len, convention=convention)
    peak = cluster.peak(training.param_dtype) * 1e12
    predicted = Prediction(
        step_time_s=step_s,
        tokens_per_s=per_gpu * layout.dims.world_size,
        tokens_per_s_per_gpu=per_gpu,
        tflops_per_gpu=per_gpu * flops / 1e12,
        mfu=per_gpu * flops / peak,
        mfu_convention=convention,
        hfu=per_gpu * executed / peak,
        compute_s=m * (stages[busiest].forward_s + stages[busiest].backward_s),
        exposed_communication_s=stages[busiest].exposed_s + tail_s,
        bubble_s=bubble_s,
        optimizer_s=optimizer_s,
        bubble_fraction=bubble_s / pipeline_s,
        memory_gib=memory.total_gib,
        memory_stage=memory.stage,
        memory_limit_gib=cluster.gpu_memory_gib * (1 - headroom),
    )
    return Priced(layout=layout, predicted=predicted, transfers=stages[busiest].transfers)


def _telling_stages(layout: Layout) -> tuple[int, ...]:
    """Stages one of which is the heaviest: both ends, and the earliest with the most layers (activations
    in flight fall from stage to stage)."""
    layers = layout.layers_per_stage
    return tuple(sorted({0, layers.index(max(layers)), layout.dims.pp - 1}))


def _distinct_stages(model: ModelSpec, layout: Layout, *, training: TrainingSpec,
                     cluster: ClusterSpec) -> list[StageCost]:
    """Cost of every stage; equal ones are computed once."""
    last = layout.dims.pp - 1
    known: dict[tuple[int, bool, bool], StageCost] = {}
    costs = []
    for stage, layers in enumerate(layout.layers_per_stage):
        kind = (layers, stage == 0, stage == last)
        if kind not in known:
            known[kind] = _stage_cost(model, layout, training=training, cluster=cluster, stage=stage)
        costs.append(known[kind])
    return costs


def _stage_cost(model: ModelSpec, layout: Layout, *, training: TrainingSpec, cluster: ClusterSpec,
                stage: int) -> StageCost:
    forward_s, backward_s = _compute_s(model, layout, training=training, cluster=cluster, stage=stage)
    transfers = list(stage_transfers(model, layout, training=training, cluster=cluster, stage=stage))
    gathers = [i for i, t in enumerate(transfers) if t.axis == "dp_shard" and t.op == "all_gather"]
    reductions = [i for i, t in enumerate(transfers) if t.axis.startswith("dp_") and t.op != "all_gather"]
    if cluster.device == "cuda":
        passes = gather_passes(layout, stage=stage)
        hidden_s = _hidden_gather_s(sum(transfers[i].seconds for i in gathers), passes, forward_s=forward_s,
                                    backward_s=backward_s)
        _hide(transfers, gathers, hidden_s, passes=sum(passes))
        _hide(transfers, reductions, backward_s, passes=1)
    # norm and tied gradients, which follow the last microbatch (as does anything else that happens once)
    once = {*reductions, *(i for i, t in enumerate(transfers) if t.times == 1 and t.axis in ("tp", "pp"))}
    return StageCost(forward_s=forward_s, backward_s=backward_s, transfers=tuple(transfers),
                     exposed_s=sum(t.exposed_s for i, t in enumerate(transfers) if i not in once),
                     tail_s=sum(t.exposed_s for i, t in enumerate(transfers) if i in once))


def _hidden_gather_s(total_s: float, passes: tuple[int, int], *, forward_s: float, backward_s: float) -> float:
    """Of the gathers' time, what the compute of the passes they belong to covers."""
    each = total_s / max(1, sum(passes))
    return passes[0] * min(each, forward_s) + passes[1] * min(each, backward_s)


def _hide(transfers: list[Transfer], which: list[int], covered_s: float, *, passes: int) -> None:
    """Cover these transfers, all alike, but for one unit per pass: the first has no compute before it to hide
    behind (of reductions, the last none after it)."""
    total_s = sum(transfers[i].seconds for i in which)
    edge_s = passes * max((transfers[i].seconds / transfers[i].times for i in which), default=0.0)
    exposed_s = min(total_s, max(total_s - covered_s, edge_s))
    for i in which:
        share = transfers[i].seconds / total_s
        transfers[i] = dataclasses.replace(transfers[i], exposed_s=share * exposed_s)


def _compute_s(model: ModelSpec, layout: Layout, *, training: TrainingSpec, cluster: ClusterSpec,
               stage: int) -> tuple[float, float]:
    """Forward and backward of one microbatch on one rank of `stage`."""
    tp, hardware = layout.dims.tp, cluster.hardware
    layers, device = layout.layers_per_stage[stage], cluster.device
    tokens = training.seq_len // layout.dims.cp * layout.microbatch_size
    matmul_rate = cluster.peak(training.param_dtype) * 1e12 * hardware.matmul_efficiency * SUSTAINED_MATMUL
    bandwidth = hardware.memory_bandwidth_gb_s * 1e9 * MEMORY_EFFICIENCY
    matmul_s = 2 * tokens * (attention_params(model) + ffn_params(model)) / tp / matmul_rate
    # our attention skips the masked half, so the executed forward is a third of the causal count
    per_token = attention_flops_per_token(model, seq_len=training.seq_len, convention="causal") / 3 / model.num_layers
    attention_s = tokens * per_token / tp / (matmul_rate * ATTENTION_EFFICIENCY)
    streaming_s = tokens * _streamed_bytes(model, layout, element=DTYPE_BYTES[training.param_dtype]) / bandwidth
    forward = _with_launches(matmul_s + attention_s + streaming_s, device=device, phase="forward")
    backward = _with_launches(2 * matmul_s + ATTENTION_BACKWARD * attention_s + 2 * streaming_s, device=device,
                              phase="backward")
    # selective recompute keeps the outputs of matmuls and of attention, so only the rest runs again
    again = {"none": 0.0, "selective": streaming_s, "full": forward}[layout.recompute]
    head = 0.0
    if stage == layout.dims.pp - 1:
        logits = 8 * tokens * model.vocab_size / tp  # float32, read and written about once per pass of the loss
        head = 2 * tokens * embedding_params(model) / tp / matmul_rate + logits / bandwidth
    return layers * forward + head, layers * (backward + again) + 2 * head


def _streamed_bytes(model: ModelSpec, layout: Layout, *, element: int) -> float:
    """Memory traffic per token of one block's forward outside the matmuls, as eager kernels move it."""
    tp = layout.dims.tp
    on_sequence = tp if layout.sequence_parallel else 1
    norms_and_residuals = 18 * element * model.dim  # two norms of about six passes, two sums of three
    # rotary positions in float32: four half products (12 bytes per element), two half sums (12), cat (8), cast (6)
    rotary = 38 * model.head_size * (model.num_heads + model.num_kv_heads)
    swiglu = 5 * element * model.ffn_dim  # silu: read, write; product: read twice, write
    return norms_and_residuals / on_sequence + (rotary + swiglu) / tp


def _with_launches(seconds: float, *, device: str, phase: str) -> float:
    launches_s = BLOCK_KERNELS[phase] * LAUNCH_S[device]
    return max(seconds, launches_s) if device == "cuda" else seconds + launches_s


def _optimizer_s(model: ModelSpec, layout: Layout, *, cluster: ClusterSpec, stage: int) -> float:
    shard = stage_params(model, layout, stage) / layout.dims.dp_shard
    return shard * ADAM_TRAFFIC_BYTES / (cluster.hardware.memory_bandwidth_gb_s * 1e9 * MEMORY_EFFICIENCY)


def _recomputed_flops(model: ModelSpec, layout: Layout, *, seq_len: int, convention: AttentionConvention) -> float:
    """Matmul FLOPs per token that are computed a second time: none under selective recompute."""
    if layout.recompute != "full":
        return 0.0
    attention = attention_flops_per_token(model, seq_len=seq_len, convention=convention) / 3
    return 2 * model.num_layers * (attention_params(model) + ffn_params(model)) + attention
