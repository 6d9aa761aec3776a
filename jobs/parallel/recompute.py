"""Recompute (activation checkpointing): trade a second forward of each layer for its activations.

Called by jobs.parallel between tensor parallelism and FSDP. The layer's forward is wrapped, not the
layer: names of parameters stay, and FSDP's hooks, which sit outside, run once.
"""
import functools
from collections.abc import Iterable

import torch
import torch.nn as nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from jobs.spec.parallel import Recompute

# What `selective` keeps: the outputs of matmuls and of attention. Everything else of a layer (norms,
# rotary, silu, residuals) is cheap to compute again and most of the memory.
KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def _policy(ctx, op, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def apply_recompute(layers: Iterable[nn.Module], *, recompute: Recompute) -> None:
    """Wrap every layer's forward in place; `none` leaves them as they are."""
    if recompute == "none":
        return
    options = {"use_reentrant": False, "preserve_rng_state": False}  # dropout's numbers come from keys
    if recompute == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, **options)
