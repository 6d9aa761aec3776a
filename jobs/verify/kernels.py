"""What CUDA's fused kernels keep for their backward, on a machine that has none of them.

Entered by jobs.verify for a job on GPUs. On CPU torch's RMSNorm is a chain of kernels that keep float32
intermediates, attention whose keys and values differ in size keeps seq × seq scores, and where FlexAttention would do
it goes chunk by chunk, in thousands of operations; on CUDA each is one kernel.
Values do not matter here: only which tensors exist, and for how long.
"""
import contextlib
from collections.abc import Iterator
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from jobs.model import attention
from jobs.model.rule import Rule

aten = torch.ops.aten
_of_this_machine = F.scaled_dot_product_attention
_chunked_of_this_machine = attention.chunked_attention


@contextlib.contextmanager
def cuda_kernels() -> Iterator[None]:
    """Replaces F.rms_norm, unmasked F.scaled_dot_product_attention and what stands in for FlexAttention. Not by a mode:
    recomputing a layer in its backward would not see it."""
    with patch.object(F, "rms_norm", _rms_norm), patch.object(F, "scaled_dot_product_attention", _attention), \
            patch.object(attention, "chunked_attention", _chunked):
        yield


def _rms_norm(x: Tensor, size: tuple[int, ...], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    return _FusedNorm.apply(x, weight)


class _FusedNorm(torch.autograd.Function):
    """Keeps its input and one float32 per row."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad):
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _chunked(q: Tensor, k: Tensor, v: Tensor, *, rule: Rule) -> Tensor:
    """Weights are dropped chunk by chunk on CUDA, too."""
    if rule.drops:
        return _chunked_of_this_machine(q, k, v, rule=rule)
    return _FusedAttention.apply(q, k, v)


class _FusedAttention(torch.autograd.Function):
    """Keeps its inputs, its output and one float32 per query."""

    @staticmethod
    def forward(ctx, q, k, v):
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx, grad):
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


def _attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
               is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False) -> Tensor:
    """Flash attention; where keys and values differ in size, the memory-efficient kernel."""
    if attn_mask is not None:
        return _of_this_machine(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if q.shape[-1] == v.shape[-1]:
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
    return aten._scaled_dot_product_efficient_attention(q, k, v, None, True, dropout_p, is_causal, scale=scale)[0]
