"""Where activations enter and leave tensor parallelism: Megatron's f and g (arXiv:1909.08053) and their
sequence-parallel forms (arXiv:2205.05198).

Used by jobs.parallel.tensor, vocab and columns, whose tables count these collectives. Knows groups and tensors, no
module.
"""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from jobs.parallel.collectives import reduce_scatter


# Sequence parallel: each rank keeps 1/tp of the *flattened* tokens, [batch·seq/tp, dim], carried as
# [batch, seq/tp, dim]. Norms and residuals do not care which tokens they hold, and the flat order makes
# gathering along the tokens a plain concatenation along dimension 0: no transposed copy on either side.
def start_gather(x: Tensor, *, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    """[batch, seq/tp, dim] → [batch, seq, dim], complete when the work has been waited for."""
    out = x.new_empty(x.shape[0], x.shape[1] * group.size(), *x.shape[2:])
    return out, dist.all_gather_single(out.view(-1), x.contiguous().view(-1), group=group, async_op=True)


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out, work = start_gather(x, group=group)
    work.wait()
    return out


def _scatter_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[batch, seq, dim] of every rank → this rank's [batch, seq/tp, dim] of their sum"""
    out = x.new_empty(x.shape[0], x.shape[1] // group.size(), *x.shape[2:])
    reduce_scatter(out, x.contiguous(), group=group).wait()
    return out


class _Copy(torch.autograd.Function):
    """f: identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, grad):
        # in place: the gradient comes from the projections' backward, nobody else holds it
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Reduce(torch.autograd.Function):
    """g: all-reduce forward, identity backward. Not in place: under recompute=selective the matmul's output is kept,
    and where it is used again it must not have been summed already."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _gather(x, group)

    @staticmethod
    def backward(ctx, grad):
        return _scatter_sum(grad, ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _scatter_sum(x, group)

    @staticmethod
    def backward(ctx, grad):
        return _gather(grad, ctx.group), None


class Boundary:
    """Where activations enter and leave the region in which each rank computes its own slice."""

    def __init__(self, group: dist.ProcessGroup, *, sequence_parallel: bool) -> None:
        self.group = group
        self.sequence_parallel = sequence_parallel

    def enter(self, x: Tensor) -> Tensor:
        """→ all tokens, [batch, seq, dim], on every rank."""
        return _Gather.apply(x, self.group) if self.sequence_parallel else _Copy.apply(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """Partial sums [batch, seq, dim] → their sum; this rank's tokens of it under sequence parallelism."""
        if self.sequence_parallel:
            return _ReduceScatter.apply(x, self.group)
        return _Reduce.apply(x, self.group)

    def entering(self, module: nn.Module, args: tuple) -> tuple:
        """A forward pre-hook."""
        return (self.enter(args[0]), *args[1:])
