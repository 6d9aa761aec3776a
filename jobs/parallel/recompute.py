"""Recompute (activation checkpointing): trade a second forward of each layer for its activations; and torch.compile.

Called by jobs.parallel between tensor parallelism and FSDP. The layer's forward is wrapped, not the
layer: names of parameters stay, and FSDP's hooks, which sit outside, run once.
"""
import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn as nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from jobs.model.layers import FeedForward
from jobs.model.moe import Experts
from jobs.spec.parallel import Recompute

# Dropout's numbers come from keys, so there is no generator to set back.
OPTIONS: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
# What `selective` keeps of a block that it knows nothing of: the outputs of matmuls and of attention.
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


def repeat_activations(model: nn.Module) -> None:
    """What `selective` is for our own decoder: of every feed-forward only what its first matrices gave is kept, and
    what lies before its last is computed again. That is half of what a layer keeps and hardly any work: no matmul, no
    collective and no attention runs twice, and the last matmul, whose output nothing needs, is not reached."""
    for module in model.modules():
        if isinstance(module, (FeedForward, Experts)):
            module.finish = functools.partial(checkpoint, module.finish, **OPTIONS)


def apply_recompute(layers: Iterable[nn.Module], *, recompute: Recompute, compiled: bool = False) -> None:
    """Wrap every layer's forward in place; `none` leaves them as they are. `selective` goes by single operations, KEPT:
    for blocks of which nothing is known.

    `compiled`: by torch.compile, one compilation for all layers that are alike, in the first step. A full recompute
    repeats compiled layers. A selective one, which has to see single operations, is compiled along.
    """
    if recompute == "none" and not compiled:
        return
    options = dict(OPTIONS)
    if recompute == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    if compiled:
        # A number of a layer's own, such as its site of dropout, is an input and no reason to compile again: behind
        # eight compilations of one function torch gives up, with a warning, and runs the other layers as they are.
        torch._dynamo.config.allow_unspec_int_on_nn_module = True
    for layer in layers:
        forward = layer.forward
        if compiled and recompute != "selective":
            forward = torch.compile(forward)
        if recompute != "none":
            forward = functools.partial(checkpoint, forward, **options)
        if compiled and recompute == "selective":
            forward = torch.compile(forward)
        layer.forward = forward
