"""Tensor parallelism: heads, FFN columns and vocabulary split over the `tp` axis, Megatron's f and g
(arXiv:1909.08053, sequence parallelism: arXiv:2205.05198).

Called by jobs.parallel on a model built on the meta device. Parameters become DTensors, because FSDP,
clipping and checkpoints need their global shape; the forward runs on local shards, because DTensor
dispatch costs more than the arithmetic of a small layer (2.1–2.4× the step time on CPU).

Collectives over tp, per microbatch; A = microbatch_size·seq_len·dim·bytes(param_dtype):

    when                               sequence_parallel        without
    forward, each attention and ffn    all_gather A (in)        all_reduce A (out)
                                       reduce_scatter A (out)
    backward, each attention and ffn   all_gather A             all_reduce A (in)
                                       reduce_scatter A
    embedding, forward / backward      reduce_scatter A / all_gather A     all_reduce A / –
    output, forward / backward         all_gather A / reduce_scatter A     – / all_reduce A
    loss, forward                      all_reduce 4·tokens (max), 8·tokens (sum, target)   the same
    once per step                      all_reduce of all norm gradients, 4·(2·layers+1)·dim/dp_shard   –
    recompute=full                     the forward's collectives of each layer once more
"""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from jobs.loss import IGNORED
from jobs.model.transformer import TokenEmbedding, Transformer


# ------------------------------------------------------------------ f, g and their sequence-parallel forms
# Sequence parallel: each rank keeps 1/tp of the *flattened* tokens, [batch·seq/tp, dim], carried as
# [batch, seq/tp, dim]. Norms and residuals do not care which tokens they hold, and the flat order makes
# gathering along the tokens a plain concatenation along dimension 0: no transposed copy on either side.
def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[batch, seq/tp, dim] → [batch, seq, dim]"""
    out = x.new_empty(x.shape[0], x.shape[1] * group.size(), *x.shape[2:])
    dist.all_gather_single(out.view(-1), x.contiguous().view(-1), group=group)
    return out


def _scatter_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[batch, seq, dim] of every rank → this rank's [batch, seq/tp, dim] of their sum"""
    out = x.new_empty(x.shape[0], x.shape[1] // group.size(), *x.shape[2:])
    dist.reduce_scatter_single(out.view(-1), x.contiguous().view(-1), group=group)
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
    """g: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.mark_dirty(x)
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
        return _Reduce.apply(x.contiguous(), self.group)

    def entering(self, module: nn.Module, args: tuple) -> tuple:
        """A forward pre-hook."""
        return (self.enter(args[0]), *args[1:])


# ------------------------------------------------------------------ modules on local shards
class LocalLinear(nn.Linear):
    """Linear layer of a DTensor weight, computed on the local shard."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to_local())


class RowParallelLinear(LocalLinear):
    """Weight split by input features: partial sums, added up where they leave."""

    boundary: Boundary

    def forward(self, x: Tensor) -> Tensor:
        return self.boundary.leave(super().forward(x))


class LocalRMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to_local(), self.eps)


class VocabParallelEmbedding(TokenEmbedding):
    """Rows of the vocabulary split over tp; other ranks' tokens look up zero."""

    boundary: Boundary

    def forward(self, tokens: Tensor) -> Tensor:
        weight = self.weight.to_local()
        rows = tokens - self.boundary.group.rank() * weight.shape[0]
        elsewhere = (rows < 0) | (rows >= weight.shape[0])
        out = F.embedding(rows.masked_fill(elsewhere, 0), weight).masked_fill(elsewhere[..., None], 0.0)
        return self.boundary.leave(out)

    def unembed(self, x: Tensor) -> Tensor:
        """→ this rank's logits [batch, seq, vocab/tp]"""
        return F.linear(self.boundary.enter(x), self.weight.to_local())


def apply_tensor_parallel(model: Transformer, *, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Split `model` (on meta) over the 1-D mesh `tp`, in place; tp divides heads, kv heads, ffn_dim and
    vocab_size (jobs.parallel has checked)."""
    boundary = Boundary(mesh.get_group(), sequence_parallel=sequence_parallel)
    for layer in model.layers.values():
        attention, ffn = layer.attention, layer.ffn
        for parent, names in ((attention, ("wq", "wk", "wv")), (ffn, ("gate", "up"))):
            parent.register_forward_pre_hook(boundary.entering)
            for name in names:
                _shard(parent, name, kind=LocalLinear, mesh=mesh, placement=Shard(0))
        for parent, name in ((attention, "wo"), (ffn, "down")):
            _shard(parent, name, kind=RowParallelLinear, mesh=mesh, placement=Shard(1)).boundary = boundary
        for name in ("attention_norm", "ffn_norm"):
            _shard(layer, name, kind=LocalRMSNorm, mesh=mesh, placement=Replicate())
    if model.embedding is not None:
        embedding = _shard(model, "embedding", kind=VocabParallelEmbedding, mesh=mesh, placement=Shard(0))
        embedding.boundary = boundary
    if model.norm is not None:
        _shard(model, "norm", kind=LocalRMSNorm, mesh=mesh, placement=Replicate())
    if model.output is not None:
        _shard(model, "output", kind=LocalLinear, mesh=mesh, placement=Shard(0))
        model.output.register_forward_pre_hook(boundary.entering)


def _shard(parent: nn.Module, name: str, *, kind: type, mesh: DeviceMesh, placement: Placement) -> nn.Module:
    """Make parent.name compute on a local shard, and its weight a DTensor. The class is changed in place,
    as fully_shard does: sizes, eps and hooks of the module stay what the model file made them."""
    module = getattr(parent, name)
    module.__class__ = kind
    shape = list(module.weight.shape)
    if placement.is_shard():
        shape[placement.dim] //= mesh.size()
    local = torch.empty(shape, dtype=module.weight.dtype, device="meta")
    weight = DTensor.from_local(local, mesh, [placement], run_check=False)
    module.weight = nn.Parameter(weight)
    return module


# ------------------------------------------------------------------ loss
class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of logits that are split along the vocabulary; no rank holds all of them."""

    @staticmethod
    def forward(ctx, logits, targets, group):
        logits = logits.float()  # [tokens, vocab/tp]
        top = logits.amax(dim=-1)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        logits = logits - top[:, None]
        column = targets - group.rank() * logits.shape[-1]
        here = (column >= 0) & (column < logits.shape[-1])
        column = column.masked_fill(~here, 0)
        target_logit = logits.gather(-1, column[:, None])[:, 0].masked_fill(~here, 0.0)
        probabilities = logits.exp_()
        sums = torch.stack((probabilities.sum(dim=-1), target_logit))
        dist.all_reduce(sums, group=group)
        counted = targets != IGNORED
        ctx.save_for_backward(probabilities.div_(sums[0][:, None]), column, here, counted)
        return ((sums[0].log() - sums[1]) * counted).sum()

    @staticmethod
    def backward(ctx, grad):
        probabilities, column, here, counted = ctx.saved_tensors
        out = probabilities.clone()  # [tokens, vocab/tp]: softmax − one-hot
        out.scatter_add_(-1, column[:, None], -here.to(out.dtype)[:, None])
        return out.mul_((grad * counted)[:, None]), None, None


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, *, group: dist.ProcessGroup,
                                 global_tokens: int) -> Tensor:
    """jobs.loss.cross_entropy for this rank's logits [batch, seq, vocab/tp]; the same value on every tp rank."""
    loss = _VocabParallelCrossEntropy.apply(logits.flatten(0, 1), targets.flatten(), group)
    return loss / global_tokens


# ------------------------------------------------------------------ once per step
def reduce_norm_gradients(model: Transformer, *, group: dist.ProcessGroup) -> None:
    """Under sequence parallelism each rank's norm gradients cover its own tokens only: add them up.

    One all-reduce for all norms of the model, after FSDP has reduced over dp: with a small message per
    norm the latency of 2·layers+1 all-reduces would be paid instead.
    """
    grads = [p.grad.to_local() for p in model.parameters() if p.grad is not None and p.ndim == 1]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat, group=group)
    for grad, total in zip(grads, flat.split([g.numel() for g in grads])):
        grad.copy_(total.view_as(grad))
