"""Where and how a row trained: its columns → layout, cluster, training and software.

Rules read columns that say something about hardware, shapes or software, and nothing else. What a column leaves
blank follows from the others; each rule says why.
"""
import re
from dataclasses import dataclass

from jobs.spec.hardware import GPUS
from jobs.spec.model import ModelSpec
from jobs.spec.parallel import Layout, ParallelDims, Recompute, split_layers
from jobs.spec.training import TrainingSpec
from orchestrator.cluster import ClusterSpec
from orchestrator.planner import constants
from orchestrator.planner.software import MatmulDtype, Software
from orchestrator.validation.model import NotPriced
from orchestrator.validation.table import Row

# Megatron's order of ranks: pipeline stages farthest apart
ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """All that a prediction needs beside the model."""

    layout: Layout
    training: TrainingSpec
    cluster: ClusterSpec
    software: Software
    states_recompute: bool  # the row says what it recomputes
    recomputed_share: float = 1.0  # of the layers, where the layout recomputes in full: as many as memory asks for
    lighter: Recompute = "none"  # what the other layers do


def setup_of(row: Row, *, model: ModelSpec) -> Setup:
    """Raises NotPriced with the reason."""
    if row.seq_len is None:
        raise NotPriced("sequence length not stated")
    if row.n_gpus is None or row.gpu is None:
        raise NotPriced("hardware not stated")
    if None in (row.tp, row.pp, row.dp):
        raise NotPriced("layout not stated: " + ", ".join(n for n in ("tp", "pp", "dp") if getattr(row, n) is None))
    old = _kernels_of_2021(row, model)
    training, dims = _training(row), _dims(row)
    layout = _layout(row, model=model, dims=dims, global_batch_size=training.global_batch_size, old=old)
    software = _software(row, old=old)
    return Setup(layout=layout, training=training, cluster=cluster_of(row), software=software,
                 states_recompute=row.recompute is not None)


# ------------------------------------------------------------------ hardware
def cluster_of(row: Row) -> ClusterSpec:
    """Nodes of the row's GPU with that GPU's usual links."""
    gpu = gpu_of(row.gpu, memory_gb=row.mem_gb)
    per_node = min(row.gpus_per_node or 8, row.n_gpus)
    if row.n_gpus % per_node:
        raise NotPriced(f"n_gpus={row.n_gpus} are not whole nodes of {per_node}")
    hardware = GPUS[gpu]
    return ClusterSpec(name="published", kind="slurm", num_nodes=row.n_gpus // per_node, gpus_per_node=per_node,
                       gpu=gpu, inter_node_gb_s=hardware.nic_gb_s)


def gpu_of(name: str, *, memory_gb: float | None) -> str:
    """A name of GPUS. Of a chip with several memories the one stated, else the largest."""
    plain = name.lower().replace(" ", "-")
    families = {known.split("-")[0] for known in GPUS}
    family = max((known for known in families if plain.startswith(known)), key=len, default=None)
    if family is None:
        raise NotPriced(f"unknown GPU {name}")
    kinds = [spec for known, spec in GPUS.items() if known.split("-")[0] == family]
    stated = [spec for spec in kinds if plain.startswith(spec.name)]
    if stated:
        return max(stated, key=lambda spec: len(spec.name)).name
    if memory_gb is not None:
        return min(kinds, key=lambda spec: abs(spec.memory_gib - memory_gb)).name
    return max(kinds, key=lambda spec: spec.memory_gib).name if family == "a100" else kinds[0].name


# ------------------------------------------------------------------ layout
def _training(row: Row) -> TrainingSpec:
    batch = row.gbs
    if batch is None and None not in (row.mbs, row.grad_accum, row.dp):
        batch = row.mbs * row.grad_accum * row.dp
    if batch is None:
        raise NotPriced("global batch not stated")
    fsdp, precision = _is_fsdp(row), row.precision or ""
    low = matmul_dtype(precision or "fp16") == "float16" or matmul_dtype(precision) in ("float8", "float4")
    return TrainingSpec(steps=1, seq_len=row.seq_len, global_batch_size=batch, param_dtype="bfloat16",
                        # published FSDP reduces in 16 bits, as do fp16 trainers and fp8 recipes; others in float32
                        reduce_dtype="bfloat16" if fsdp or low else "float32")


def _dims(row: Row) -> ParallelDims:
    """ZeRO shards over dp; without it dp is replicas. Stated or not, 8-bit and bf16 pipelines shard the optimizer."""
    tp, pp, cp, ep = row.tp, row.pp, row.cp or 1, row.ep or 1
    if tp * pp * cp * row.dp != row.n_gpus:
        raise NotPriced(f"tp·pp·cp·dp = {tp}·{pp}·{cp}·{row.dp} = {tp * pp * cp * row.dp} is not n_gpus={row.n_gpus}")
    if (row.dp * cp * tp) % ep:
        raise NotPriced(f"ep={ep} does not divide dp·cp·tp={row.dp * cp * tp}")
    unstated = 3 if _is_fsdp(row) else 0 if row.precision in ("fp16", None) else 1
    shards = unstated if row.zero_stage is None else row.zero_stage
    replicas, sharded = (row.dp, 1) if shards == 0 else (1, row.dp)
    return ParallelDims(dp_replicate=replicas, dp_shard=sharded, cp=cp, tp=tp, pp=pp, ep=ep, order=ORDER)


def _layout(row: Row, *, model: ModelSpec, dims: ParallelDims, global_batch_size: int, old: bool) -> Layout:
    size = row.mbs or 1  # unstated, a pipeline's microbatch is one sequence: the least bubble
    share, rest = divmod(global_batch_size, dims.dp * size)
    if rest or share == 0:
        raise NotPriced(f"gbs={global_batch_size} is not a multiple of dp × mbs = {dims.dp} × {size}")
    if row.grad_accum is not None and row.grad_accum not in (share, share * size) and row.mbs is not None:
        raise NotPriced(f"mbs·grad_accum·dp = {size * row.grad_accum * dims.dp} contradicts gbs={global_batch_size}")
    chunks = row.vpp or 1
    interleaved = dims.pp > 1 and (chunks > 1 or (row.schedule or "").startswith("interleaved"))
    if interleaved and chunks == 1:
        chunks = 2  # the least that interleaves
    if not interleaved:
        chunks = 1
    if interleaved and share % max(1, share // dims.pp):
        raise NotPriced(f"interleaving needs rounds of pp={dims.pp} microbatches, but there are {share}")
    if dims.pp * chunks > model.num_layers + 2:  # embedding and loss may be stages of their own
        raise NotPriced(f"{model.num_layers} layers are fewer than {dims.pp * chunks} stages")
    zero = 3 if _is_fsdp(row) else 2 if row.zero_stage == 2 else 1
    recompute = _recompute(row.recompute)
    # sequence parallelism came with selective recompute (arXiv:2205.05198), behind the trainers of 2021
    sequence_parallel = dims.tp > 1 and (not old or recompute == "selective")
    return Layout(dims=dims, microbatch_size=size, num_microbatches=share,
                  layers_per_stage=_split(model.num_layers, dims.pp * chunks), sequence_parallel=sequence_parallel,
                  schedule="interleaved_1f1b" if interleaved else "1f1b", virtual_stages=chunks, recompute=recompute,
                  zero_stage=zero, reduce_every_microbatch=zero == 3, cp_method="ring")


def _split(layers: int, stages: int) -> tuple[int, ...]:
    """Even; or with embedding and loss counted as a layer each, where that makes the stages even."""
    if layers % stages and (layers + 2) % stages == 0 and stages > 1:
        each = (layers + 2) // stages
        return (each - 1, *[each] * (stages - 2), each - 1)
    return split_layers(layers, stages)


def _recompute(text: str | None) -> str:
    if text is None or text == "none" or "none" in text:
        return "none"
    return "selective" if text.startswith("selective") else "full"


# ------------------------------------------------------------------ software
def _kernels_of_2021(row: Row, model: ModelSpec) -> bool:
    """A GPT's shape on a GPU of 2020: before fused attention and overlap. FSDP in bf16 is of later years."""
    gpt = model.ffn == "gelu" and model.num_kv_heads == model.num_heads and model.moe is None
    early = (row.gpu or "").upper().startswith(("A100", "V100"))
    return gpt and early and (row.precision in ("fp16", None) or not _is_fsdp(row))


def _is_fsdp(row: Row) -> bool:
    """ZeRO-3; a compiled trainer that does not state it is PyTorch's own, with FSDP."""
    return row.zero_stage == 3 or (row.zero_stage is None and "compile" in (row.precision or ""))


def _software(row: Row, *, old: bool) -> Software:
    """Which trainer it was, from what its table states. PyTorch's own trainers state a ZeRO stage (and whether they
    compile); Megatron's state a pipeline and a precision, with fp8 recipes that keep gradients in 16 bits."""
    precision = (row.precision or "fp16").lower()
    dtype = matmul_dtype(precision)
    fsdp, low = _is_fsdp(row), dtype in ("float8", "float4")
    eager = not fsdp and not old and row.zero_stage is not None
    megatron = not fsdp and not eager
    ports = constants.PORTS_OF_2021 if old else None
    repeats_ffn = megatron and bool({"mlp", "moe"} & set(re.findall(r"\w+", row.recompute or "")))
    return Software(
        matmul_dtype=dtype,
        flash_attention=not old,
        tuned_attention=megatron,
        fused_kernels="compile" in precision or not fsdp,
        fused_loss="compile" not in precision and not eager,  # PyTorch's own loss keeps float32 gradients beside
        dropout=old,
        selective="all but matmuls" if fsdp else "attention, feed-forward" if repeats_ffn else "attention",
        selective_share=0.5 if row.recompute == "selective(op)" else 1.0,  # torchtitan keeps every second matmul's
        regathers_inputs=megatron,
        scatters_messages=old and not fsdp,
        frees_outputs=megatron,
        keeps_half_weights=not fsdp or old,
        sums_in_matmul=megatron and not old,
        gradient_bytes=2 if low or dtype == "float16" else 4,
        overlaps_data_parallel=not old and not eager,
        overlaps_input_gradients=eager,  # Megatron's is part of the next; FSDP2's tensor parallelism has none
        overlaps_tensor_parallel="asynctp" in precision or (megatron and not old),
        dispatches_once=megatron,
        collectives_by_tensor=eager or (old and fsdp),
        ports=ports,
    )


def matmul_dtype(precision: str) -> MatmulDtype:
    plain = precision.lower()
    if "fp4" in plain:
        return "float4"
    if "fp8" in plain or "float8" in plain:
        return "float8"
    return "float16" if plain == "fp16" else "bfloat16"


