"""Mixture of experts: a router sends each token to top_k of many small feed-forward blocks. Nothing is dropped.

Built by jobs.model.transformer. Two seams and no parallel code: `MoE.dispatcher` brings tokens to experts
and back, `MoE.sum_counts` adds up the counts of sequences that several ranks share a part of.
"""
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from jobs.model.layers import FeedForward, activate, is_gated
from jobs.model.places import Tokens
from jobs.spec.model import ModelSpec

# tokens [tokens, dim], their experts [tokens, top_k], the experts → outputs [tokens, top_k, dim]
Dispatcher = Callable[[Tensor, Tensor, "Experts"], Tensor]


class MoE(nn.Module):
    """[batch, seq, dim] → the same: the chosen experts' outputs, weighted, plus the shared experts'."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        moe = spec.moe
        self.top_k = moe.top_k
        self.balance = moe.balance
        self.balance_rate = moe.balance_rate
        self.router = Router(spec)
        self.experts = Experts(spec)
        # one block: n experts that are always active are one expert of n times the width
        self.shared = FeedForward(spec, ffn_dim=moe.num_shared_experts * moe.ffn_dim,
                                  bias=False) if moe.num_shared_experts else None
        self.dispatcher: Dispatcher = dispatch_here
        self.sum_counts: Callable[[Tensor], Tensor] = lambda counts: counts

    @torch.compiler.disable  # how many tokens each expert gets is known only then
    def forward(self, x: Tensor, tokens: Tokens | None = None) -> Tensor:
        flat = x.flatten(0, 1)
        scores, chosen, weights = self.router(flat)
        outputs = self.dispatcher(flat, chosen, self.experts)  # [tokens, top_k, dim]
        out = torch.bmm(weights.to(outputs.dtype)[:, None], outputs)[:, 0].view_as(x)
        if tokens is not None and tokens.weights is not None:
            out = self._balanced(out, scores, chosen, tokens)
        return out if self.shared is None else out + self.shared(x)

    def _balanced(self, out: Tensor, scores: Tensor, chosen: Tensor, tokens: Tokens) -> Tensor:
        """Count what was chosen, and let the backward of `out` also descend the load-balance loss.

        The loss is per sequence (DeepSeek-V3, arXiv:2412.19437, eq. 17–20), rate · Σ_e f_e·P_e, averaged over the
        step's sequences: its statistics never span microbatches or replicas, so it is the same in every layout.
        """
        rows, (batch,) = tokens.rows.flatten(), tokens.weights.shape
        num_experts = scores.shape[-1]
        counts = occurrences((rows[:, None] * num_experts + chosen).flatten(), size=batch * num_experts)
        counts = counts.view(batch, num_experts)
        real = (tokens.weights > 0)[:, None]  # an empty slot's tokens are not counted
        loss = None
        if self.balance == "loss":
            whole = self.sum_counts(counts)
            choices = whole.sum(dim=1, keepdim=True)  # top_k · tokens of the sequence
            shares = scores / scores.sum(dim=-1, keepdim=True)
            mean = torch.zeros(batch, num_experts, device=out.device).index_add(0, rows, shares)  # this rank's part
            mean = mean * (self.top_k / choices)
            loss = self.balance_rate * (tokens.weights[:, None] * (whole * num_experts / choices) * mean).sum()
        return _Balance.apply(out, loss, counts * real, self.router.load)


class _Balance(torch.autograd.Function):
    """Identity on `out`. Its backward starts the loss's own, and counts: once per microbatch, however often the
    forward is computed again."""

    @staticmethod
    def forward(ctx, out, loss, counts, load):
        ctx.counts, ctx.load = counts.sum(dim=0), load
        ctx.has_loss = loss is not None
        return out.view_as(out)

    @staticmethod
    def backward(ctx, grad):
        ctx.load += ctx.counts
        return grad, torch.ones((), device=grad.device) if ctx.has_loss else None, None, None


class Router(nn.Module):
    """tokens [tokens, dim] → scores [tokens, num_experts], chosen [tokens, top_k], weights [tokens, top_k], in
    float32: a near tie must not be decided by bfloat16.

    With balance `bias` a bias steers which experts are chosen and nothing else (arXiv:2408.15664).
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec.moe
        self.weight = nn.Parameter(torch.empty(self.spec.num_experts, spec.dim))
        if self.spec.balance == "bias":
            self.register_buffer("bias", torch.zeros(self.spec.num_experts))
        else:
            self.bias = None
        # tokens that chose each expert since the last update of the bias; of this rank only
        self.register_buffer("load", torch.zeros(self.spec.num_experts, dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.route(x, self.weight)

    def route(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(x.float(), weight.float())
        scores = logits.softmax(dim=-1) if self.spec.score == "softmax" else logits.sigmoid()
        ranked = scores.detach() if self.bias is None else scores.detach() + self.bias
        if self.spec.top_groups < self.spec.num_groups:
            ranked = self._of_top_groups(ranked)
        chosen = ranked.topk(self.spec.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if self.spec.normalize_weights:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return scores, chosen, weights * self.spec.scale

    def _of_top_groups(self, ranked: Tensor) -> Tensor:
        """Only experts of the groups whose best two add up to most can be chosen (arXiv:2412.19437, §2.1.2)."""
        grouped = ranked.unflatten(-1, (self.spec.num_groups, -1))  # [tokens, groups, experts of a group]
        best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
        top = torch.zeros_like(best, dtype=torch.bool).scatter(-1, best.topk(self.spec.top_groups).indices, True)
        return grouped.masked_fill(~top[..., None], -torch.inf).flatten(-2)

    @torch.no_grad()
    def update_bias(self, load: Tensor) -> None:
        """Once per step: raise the bias of experts chosen less than the mean, lower that of the others, by one
        balance_rate. load: int64 [num_experts], of the whole step and all ranks."""
        mean = load.sum() / len(load)
        self.bias += self.spec.balance_rate * torch.sign(mean - load)


class Experts(nn.Module):
    """A stack of feed-forward blocks without biases. [tokens, dim] sorted by expert, and how many are each
    expert's, int64 [experts] → [tokens, dim]."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.kind = spec.ffn
        num_experts, ffn_dim = spec.moe.num_experts, spec.moe.ffn_dim
        self.gate = nn.Parameter(torch.empty(num_experts, ffn_dim, spec.dim)) if is_gated(spec) else None
        self.up = nn.Parameter(torch.empty(num_experts, ffn_dim, spec.dim))
        self.down = nn.Parameter(torch.empty(num_experts, spec.dim, ffn_dim))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        return self.compute(x, counts, self.gate, self.up, self.down)

    def compute(self, x: Tensor, counts: Tensor, gate: Tensor | None, up: Tensor, down: Tensor) -> Tensor:
        gated = None if gate is None else grouped_linear(x, gate, counts)
        return self.finish(gated, grouped_linear(x, up, counts), down, counts)

    def finish(self, gate: Tensor | None, up: Tensor, down: Tensor, counts: Tensor) -> Tensor:
        """What follows the first matrices. One method, so that it may be computed again in the backward."""
        return grouped_linear(activate(gate, up, kind=self.kind), down, counts)


def grouped_linear(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """x [tokens, in] sorted by group, weights [groups, out, in], counts [groups] → [tokens, out]"""
    # the grouped kernel wants rows of whole 16 bytes, and on CUDA bfloat16
    aligned = all(size * x.element_size() % 16 == 0 for size in weights.shape[1:])
    if aligned and (x.device.type == "cpu" or x.dtype == torch.bfloat16):
        ends = counts.cumsum(0).to(torch.int32)
        return F.grouped_mm(x, weights.transpose(-1, -2), offs=ends)
    pieces = x.split(counts.tolist())
    return torch.cat([F.linear(piece, weight) for piece, weight in zip(pieces, weights, strict=True)])


# ------------------------------------------------------------------ sorting tokens by expert
def dispatch_here(x: Tensor, chosen: Tensor, experts: Experts) -> Tensor:
    """Every expert is at hand: sort, compute, sort back."""
    order, counts = sort_by_expert(chosen, num_experts=experts.up.shape[0])
    outputs = experts(spread(x, order, top_k=chosen.shape[1]), counts)
    return permute(outputs, invert(order)).unflatten(0, chosen.shape)


def sort_by_expert(chosen: Tensor, *, num_experts: int) -> tuple[Tensor, Tensor]:
    """[tokens, top_k] → the order [tokens·top_k] in which choices are grouped by expert, stable in the tokens, and
    how many choices each expert has, int64 [num_experts]."""
    flat = chosen.flatten()
    return flat.argsort(stable=True), occurrences(flat, size=num_experts)


def occurrences(numbers: Tensor, *, size: int) -> Tensor:
    """How often each of 0 … size − 1 occurs, int64 [size]. torch.bincount would wait for the device, to see the
    largest."""
    return numbers.new_zeros(size).scatter_add_(0, numbers, numbers.new_ones(()).expand_as(numbers))


def invert(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


def spread(x: Tensor, order: Tensor, *, top_k: int) -> Tensor:
    """One row per choice: x [tokens, dim] → [tokens·top_k, dim] in the given order."""
    return _Spread.apply(x, order, top_k)


def permute(x: Tensor, order: Tensor) -> Tensor:
    """x[order], for an order without repetitions."""
    return _Permute.apply(x, order)


class _Spread(torch.autograd.Function):
    """Indexing's own backward adds up row by row; here the choices of a token are known to be top_k."""

    @staticmethod
    def forward(ctx, x, order, top_k):
        ctx.save_for_backward(order)
        ctx.top_k = top_k
        return x[order // top_k]

    @staticmethod
    def backward(ctx, grad):
        return grad[invert(*ctx.saved_tensors)].unflatten(0, (-1, ctx.top_k)).sum(dim=1), None, None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, order):
        ctx.save_for_backward(order)
        return x[order]

    @staticmethod
    def backward(ctx, grad):
        return grad[invert(*ctx.saved_tensors)], None
