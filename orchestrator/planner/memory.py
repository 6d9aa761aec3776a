"""Bytes of one rank of every pipeline stage: states, gathered FSDP units, activations, logits.

Called by the search for every candidate, so it is plain arithmetic. It describes our own trainer
(FSDP2 with float32 master weights, flash attention, no dropout) and knows nothing of time.

Sources: ZeRO (arXiv:1910.02054) for states; Korthikanti et al. (arXiv:2205.05198) for activations,
generalised here to grouped-query attention and gated FFNs; 1F1B holds min(m, p − stage) microbatches.
"""
from dataclasses import dataclass

from jobs.spec.job import Device
from jobs.spec.model import ModelSpec, attention_params, embedding_params, ffn_params
from jobs.spec.parallel import Layout, Recompute
from jobs.spec.training import DTYPE_BYTES, TrainingSpec
from orchestrator.planner.plan import StageMemory

MASTER_BYTES = 4  # float32 weights that the optimizer updates
ADAM_BYTES = 8  # float32 first and second moment
# FSDP2 gathers the next unit while the present one computes.
GATHERED_UNITS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockShape:
    """What one transformer block keeps for its backward depends on these, and on nothing else."""

    seq_len: int
    microbatch_size: int
    dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    gated_ffn: bool = True  # SwiGLU; False is GELU
    dropout: bool = False  # one byte per masked element
    flash_attention: bool = True  # False keeps the s×s scores: the 5·a·s²·b term
    regathers_inputs: bool = False  # Megatron's sequence parallelism gathers the projections' inputs again in backward
    # False is torch's RMSNorm on CPU, a chain of kernels: it keeps its input and the normalised input in float32.
    fused_norms: bool = True
    element_bytes: int = 2


def block_shape(model: ModelSpec, *, microbatch_size: int, seq_len: int, element_bytes: int,
                device: Device) -> BlockShape:
    """The block of our own decoder. Its tensor parallelism keeps the gathered inputs of the projections."""
    return BlockShape(seq_len=seq_len, microbatch_size=microbatch_size, dim=model.dim, num_heads=model.num_heads,
                      num_kv_heads=model.num_kv_heads, head_dim=model.head_size, ffn_dim=model.ffn_dim,
                      fused_norms=device == "cuda", element_bytes=element_bytes)


def block_activation_bytes(shape: BlockShape, *, tp: int, sequence_parallel: bool, recompute: Recompute) -> float:
    """Activations that one block keeps for one microbatch, on one rank.

    With GELU, dropout, 16-bit elements, as many kv heads as heads and regathered inputs these are
    Korthikanti's table 2: sbh(10 + 24/t + 5as/(ht)), with sequence parallelism (sbh/t)(34 + 5as/h), 34·sbh/t
    with flash attention; 2sbh for full recompute (÷t under sequence parallelism, whose block input is split).
    """
    tokens = shape.seq_len * shape.microbatch_size
    element = shape.element_bytes
    on_sequence = tp if sequence_parallel else 1  # what TP does not split, sequence parallelism does
    block_input = element * shape.dim / on_sequence
    heads = shape.head_dim * (2 * shape.num_heads + 2 * shape.num_kv_heads)  # q, k, v and attention's output
    if recompute == "full":
        return tokens * block_input
    if recompute == "selective":
        # Outputs of every matmul and of attention: those of wo and down are partial sums of the whole width.
        return tokens * (block_input + element * (2 * shape.dim + (heads + 2 * shape.ffn_dim) / tp))
    norms = 2 * (element if shape.fused_norms else 8) * shape.dim / on_sequence
    projections = 2 * element * shape.dim / (on_sequence if shape.regathers_inputs else 1)
    masks = 2 * shape.dim / on_sequence if shape.dropout else 0
    # GELU keeps its input and output; eager SwiGLU keeps gate, up, silu(gate) and their product
    ffn = shape.ffn_dim * (4 if shape.gated_ffn else 2)
    scores = 0
    if not shape.flash_attention:
        # softmax, its dropout's output, the dropout's mask
        scores = (2 * element + (1 if shape.dropout else 0)) * shape.num_heads * shape.seq_len
    return tokens * (norms + projections + masks + (element * (heads + ffn) + scores) / tp)


def in_flight(layout: Layout, stage: int) -> int:
    """Microbatches whose activations stage `stage` holds at its peak under 1F1B."""
    return min(layout.num_microbatches, layout.dims.pp - stage)


def block_params(model: ModelSpec, *, tp: int) -> int:
    """Of one block on one tp rank: projections are split, norms are whole."""
    return (attention_params(model) + ffn_params(model)) // tp + 2 * model.dim


def ends_params(model: ModelSpec, *, tp: int, first: bool, last: bool) -> int:
    """Of the embedding and of the final norm with the output projection, split over the vocabulary.

    A tied projection is one tensor where both ends are on the same stage, else a copy on each.
    """
    table = embedding_params(model) // tp
    shared = first and last and model.tie_embeddings
    return (table if first else 0) + (model.dim + (0 if shared else table) if last else 0)


def stage_params(model: ModelSpec, layout: Layout, stage: int) -> int:
    """Parameters of one stage on one tp rank, before FSDP shards them."""
    tp, last = layout.dims.tp, layout.dims.pp - 1
    ends = ends_params(model, tp=tp, first=stage == 0, last=stage == last)
    return layout.layers_per_stage[stage] * block_params(model, tp=tp) + ends


def stage_memory(model: ModelSpec, layout: Layout, *, training: TrainingSpec, stage: int,
                 device: Device) -> StageMemory:
    """Peak bytes of a rank of `stage`."""
    dims = layout.dims
    first, last = stage == 0, stage == dims.pp - 1
    layers = layout.layers_per_stage[stage]
    held = in_flight(layout, stage)
    params = stage_params(model, layout, stage)
    shard = -(-params // dims.dp_shard)
    return StageMemory(
        stage=stage,
        layers=layers,
        in_flight=held,
        parameters_bytes=MASTER_BYTES * shard,
        gradients_bytes=_gradients_bytes(layout, training=training, params=params, shard=shard),
        optimizer_bytes=ADAM_BYTES * shard,
        gathered_bytes=_gathered_bytes(model, layout, training=training, stage=stage, params=params),
        activations_bytes=_activations_bytes(model, layout, training=training, stage=stage, held=held, device=device),
        logits_bytes=_logits_bytes(model, layout, training=training) if last else 0,
    )


def _gradients_bytes(layout: Layout, *, training: TrainingSpec, params: int, shard: int) -> int:
    """Gradients are reduced with the last microbatch, so until then a rank sums the unsharded gradients of its
    stage (torch's pipeline stages do the same). The shards replace them unit by unit: the larger counts."""
    sharded = MASTER_BYTES * shard
    if layout.num_microbatches == 1:
        return sharded
    return max(sharded, DTYPE_BYTES[training.reduce_dtype] * params)


def _gathered_bytes(model: ModelSpec, layout: Layout, *, training: TrainingSpec, stage: int, params: int) -> int:
    """Unsharded parameters, and the unsharded gradient of the unit being reduced, alive at the same time."""
    dims = layout.dims
    if dims.dp == 1 and training.param_dtype == "float32":
        return 0  # no FSDP: the master weights are used in place
    element = DTYPE_BYTES[training.param_dtype]
    block = block_params(model, tp=dims.tp)
    if not layout.reshard_after_forward or dims.dp_shard == 1 or dims.pp > 1:
        # FSDP copies even what it need not gather. Under a pipeline torch leaves every unit unsharded from one
        # microbatch's backward to the next forward: at the peak the whole stage is gathered.
        gathered = element * params
    else:
        ends = ends_params(model, tp=dims.tp, first=stage == 0, last=stage == dims.pp - 1)
        gathered = element * (GATHERED_UNITS * block + ends)  # the ends stay gathered, or are gathered with a block
    reduced = DTYPE_BYTES[training.reduce_dtype] * block if layout.num_microbatches == 1 else 0
    return gathered + reduced


def _activations_bytes(model: ModelSpec, layout: Layout, *, training: TrainingSpec, stage: int, held: int,
                       device: Device) -> int:
    dims = layout.dims
    element = DTYPE_BYTES[training.param_dtype]
    shape = block_shape(model, microbatch_size=layout.microbatch_size, seq_len=training.seq_len // dims.cp,
                        element_bytes=element, device=device)
    split = {"tp": dims.tp, "sequence_parallel": layout.sequence_parallel}
    per_block = block_activation_bytes(shape, recompute=layout.recompute, **split)
    hidden = element * shape.seq_len * shape.microbatch_size * model.dim
    hidden /= dims.tp if layout.sequence_parallel else 1
    # What a pipeline stage received and what it sent on are both kept until the backward; the last stage
    # keeps the inputs of the final norm and of the output projection.
    boundary = 2 * hidden if dims.pp > 1 or stage == dims.pp - 1 else hidden
    total = held * (layout.layers_per_stage[stage] * per_block + boundary)
    if layout.recompute != "none":  # the block being recomputed
        total += max(0.0, block_activation_bytes(shape, recompute="none", **split) - per_block)
    return int(total)


def _logits_bytes(model: ModelSpec, layout: Layout, *, training: TrainingSpec) -> int:
    """Of one microbatch, because the last stage runs its backward at once: logits as the projection gave them,
    float32 probabilities and their gradient, and the gradient cast back. 12 bytes in either precision."""
    element = DTYPE_BYTES[training.param_dtype]
    cast_back = element if element < 4 else 0
    tokens = training.seq_len // layout.dims.cp * layout.microbatch_size
    return (element + 4 + 4 + cast_back) * tokens * model.vocab_size // layout.dims.tp
