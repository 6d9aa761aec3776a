"""What one transformer block keeps for its backward, in bytes: Korthikanti et al. (arXiv:2205.05198), generalised.

Called by memory, and by the test that holds it against a real layer. It knows the shape of a block and nothing of
pipelines or states.
"""
from dataclasses import dataclass

from jobs.spec.job import Device
from jobs.spec.model import ModelSpec
from jobs.spec.parallel import Recompute
from orchestrator.planner.software import OURS, Selective, Software


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockShape:
    """What one transformer block keeps for its backward depends on these, and on nothing else."""

    seq_len: int
    microbatch_size: int
    dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int  # of experts: those that one token passes, together
    gated_ffn: bool = True  # SwiGLU; False is GELU
    dropout: bool = False  # one byte per masked element
    flash_attention: bool = True  # False keeps the s×s scores: the 5·a·s²·b term
    regathers_inputs: bool = False  # sequence parallelism gathers the projections' inputs again in the backward
    # False is torch's RMSNorm on CPU, a chain of kernels: it keeps its input and the normalised input in float32.
    fused_norms: bool = True
    fused_gate: bool = False  # a compiled gate keeps its two inputs, and its product for the next matmul
    element_bytes: int = 2
    input_bytes: int | None = None  # of an element that a linear map keeps as its input: 1 under fp8; None: as others
    norms: int = 2
    wide_norms: bool = False  # with an offset they are computed on a float32 copy of their input, which is kept
    qk_norm: bool = False  # queries and keys are kept before their norms, too
    selective: Selective = "activations"  # see software.py
    selective_share: float = 1.0
    latent: int = 0  # MLA: channels of both latents, kept whole on every tp rank
    value_dim: int | None = None  # MLA: of one head's value; None: head_dim
    routed: int = 0  # copies of a token that go to experts (top_k), kept before and behind them


def block_shape(model: ModelSpec, *, microbatch_size: int, seq_len: int, element_bytes: int, device: Device,
                layer: int = 0, software: Software = OURS) -> BlockShape:
    """A block of this model."""
    head, latent, value = model.head_size, 0, None
    if model.mla is not None:
        head = model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim
        latent = model.mla.kv_lora_rank + model.mla.qk_rope_head_dim + (model.mla.q_lora_rank or 0)
        value = model.mla.v_head_dim
    ffn, routed = model.ffn_dim, 0
    if model.is_moe(layer):
        moe = model.moe
        ffn, routed = (moe.top_k + moe.num_shared_experts) * moe.ffn_dim, moe.top_k
    return BlockShape(seq_len=seq_len, microbatch_size=microbatch_size, dim=model.dim, num_heads=model.num_heads,
                      num_kv_heads=model.num_heads if model.mla else model.num_kv_heads, head_dim=head, ffn_dim=ffn,
                      gated_ffn=model.ffn != "gelu", dropout=software.dropout or model.dropout > 0,
                      flash_attention=software.flash_attention, regathers_inputs=software.regathers_inputs,
                      fused_norms=device == "cuda", fused_gate=software.fused_kernels, element_bytes=element_bytes,
                      input_bytes=1 if software.matmul_dtype in ("float8", "float4") else None,
                      norms=4 if model.post_norms else 2, qk_norm=model.qk_norm and model.mla is None,
                      wide_norms=model.norm_offset,
                      selective=software.selective, selective_share=software.selective_share,
                      latent=latent, value_dim=value, routed=routed)


def keys_width(model: ModelSpec) -> int:
    """Elements of one token's keys and values; latent ones are expanded."""
    if model.mla is not None:
        return queries_width(model) + model.num_heads * model.mla.v_head_dim
    return 2 * model.num_kv_heads * model.head_size


def queries_width(model: ModelSpec) -> int:
    size = model.head_size if model.mla is None else model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim
    return model.num_heads * size


def waiting_gradient_bytes(shape: BlockShape, *, tp: int, sequence_parallel: bool) -> float:
    """Gradients of the outputs of a block's norms and linear maps, which a backward that is cut in two hands from its
    first half to its second. Those of wo and down are of the whole width: they were gathered on their way in."""
    on_sequence = tp if sequence_parallel else 1
    value = shape.head_dim if shape.value_dim is None else shape.value_dim
    split = shape.num_heads * shape.head_dim + shape.num_kv_heads * (shape.head_dim + value)
    split += (2 if shape.gated_ffn else 1) * shape.ffn_dim
    down = shape.routed * shape.dim / on_sequence if shape.routed else shape.dim
    each = shape.norms * shape.dim / on_sequence + split / tp + shape.latent + shape.dim + down
    return shape.element_bytes * shape.seq_len * shape.microbatch_size * each


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
    value = shape.head_dim if shape.value_dim is None else shape.value_dim
    # q, k, v and attention's output
    heads = shape.num_heads * (shape.head_dim + value) + shape.num_kv_heads * (shape.head_dim + value)
    if recompute == "full":
        return tokens * block_input
    if recompute == "selective" and shape.selective == "all but matmuls":
        # Outputs of every matmul and of attention: those of wo and down are partial sums of the whole width.
        matrices = 2 if shape.gated_ffn else 1
        outputs = (heads + matrices * shape.ffn_dim) / tp + shape.latent + shape.routed * shape.dim / on_sequence
        return tokens * (block_input + element * shape.selective_share * (2 * shape.dim + outputs))
    of_norm = 8 if not shape.fused_norms else 4 if shape.wide_norms else element
    norms = shape.norms * of_norm * shape.dim / on_sequence
    if shape.qk_norm:
        heads += (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    kept = element if shape.input_bytes is None else shape.input_bytes
    projections = 2 * kept * shape.dim / (on_sequence if shape.regathers_inputs else 1)
    masks = 2 * shape.dim / on_sequence if shape.dropout else 0
    # GELU keeps its input and output; eager SwiGLU keeps gate, up, silu(gate) and their product
    ffn = shape.ffn_dim * ((3 if shape.fused_gate else 4) if shape.gated_ffn else 2)
    again = recompute == "selective" and shape.selective
    if again == "activations":  # what the first matrices gave
        ffn = shape.ffn_dim * (2 if shape.gated_ffn else 1)
    elif again == "attention, feed-forward":
        ffn = 0
    saved = (element - kept) * shape.ffn_dim  # the last product is the down projection's input
    routed = 2 * element * shape.routed * shape.dim / on_sequence + element * shape.latent
    if shape.routed:  # the router's float32 copy of its input, in place of what a dense layer keeps of it
        routed += (4 - kept) * shape.dim / on_sequence
    scores = 0
    if not shape.flash_attention and again not in ("attention", "attention, feed-forward"):
        # softmax, its dropout's output, the dropout's mask
        scores = (2 * element + (1 if shape.dropout else 0)) * shape.num_heads * shape.seq_len
    split = element * (heads + ffn) - (saved if ffn else 0) + scores
    return tokens * (norms + projections + masks + routed + split / tp)
