"""Capped scores, windows and documents in one generated kernel: FlexAttention (arXiv:2412.05496), on CUDA.

Called by jobs.model.attention where `algorithm` says so. The kernel skips blocks of keys that no query of a block
sees; which those are is found once for all layers of a microbatch. Tensors are [batch, heads, seq, head size].
"""
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from jobs.model.rule import Rule

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@functools.cache
def _kernels() -> tuple[Callable, Callable]:
    """The compiled attention and the compiled search for blocks. Imported late: a rank that has no use for them does
    not load the compiler, and nothing is compiled before the first call."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention as flex

    return torch.compile(flex, dynamic=False), torch.compile(create_block_mask, dynamic=False)


@torch.compiler.disable  # a kernel of its own, with blocks that all layers share
def flex_attention(q: Tensor, k: Tensor, v: Tensor, *, rule: Rule) -> Tensor:
    """Keys and values possibly with fewer heads, values of another head size."""
    attend, find_blocks = _kernels()
    return attend(q, k, v, score_mod=score_mod(rule), scale=rule.kind.scale, enable_gqa=q.shape[1] != k.shape[1],
                  block_mask=_blocks(rule, batch=q.shape[0], seq_len=q.shape[2], device=q.device, find=find_blocks))


def _blocks(rule: Rule, *, batch: int, seq_len: int, device: torch.device, find: Callable):
    """The BlockMask, shared by all layers of the microbatch that have the same window."""
    shared = {} if rule.tokens is None else rule.tokens.shared
    if rule.kind.window not in shared:
        shared[rule.kind.window] = find(mask_mod(rule, seq_len=seq_len, device=device),
                                        batch if rule.starts is not None else None, None, seq_len, seq_len,
                                        device=device)
    return shared[rule.kind.window]


def score_mod(rule: Rule) -> ScoreMod | None:
    """What becomes of a scaled score."""
    cap = rule.kind.softcap
    if cap is None:
        return None

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


def mask_mod(rule: Rule, *, seq_len: int, device: torch.device) -> MaskMod:
    """Whether a query sees a key: as a function of positions and one tensor, the lowest position that each query sees,
    so that one kernel serves every microbatch."""
    positions = torch.arange(seq_len, device=device)
    lowest = torch.zeros_like(positions) if rule.kind.window is None else positions - rule.kind.window + 1
    if rule.starts is None:
        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (key >= lowest[query])
    else:
        lowest = torch.maximum(lowest, rule.starts)  # [batch, seq]

        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (key >= lowest[batch, query])

    return visible
