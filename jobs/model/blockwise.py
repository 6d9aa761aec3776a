"""Attention over one block of keys after the other, forward and backward.

Used by jobs.model.chunked and jobs.parallel.context; knows no group. Results of blocks are put together from their
log-sum-exp (arXiv:1805.02867; as a backward pass without stored scores: arXiv:2205.14135). Shapes: q, out
[batch, heads, queries, d]; k, v [batch, kv heads, keys, d or another size for v]; lse [batch, heads, queries]. Sums
are float32, or float64 where the tensors are.
"""
import torch
import torch.nn.functional as F
from torch import Tensor

from jobs.model.rule import Block, Rule

aten = torch.ops.aten
CHUNK = 256  # queries of a block whose scores are written out: they stay in cache, and a matmul is still long


def wide(t: Tensor) -> torch.dtype:
    """What sums over elements of `t` are kept in."""
    return torch.promote_types(t.dtype, torch.float32)


class Partial:
    """softmax(QKᵀ)V over the blocks so far. The first block of a query must show it at least one key."""

    def __init__(self, q: Tensor, v: Tensor) -> None:
        self.out = q.new_zeros(*q.shape[:-1], v.shape[-1], dtype=wide(q))
        self.lse = q.new_full(q.shape[:-1], -torch.inf, dtype=wide(q))

    def add(self, block: Block, q: Tensor, k: Tensor, v: Tensor, *, rule: Rule) -> None:
        """q, k, v: whole, of which the block is a part."""
        out, lse = _forward(block, q[:, :, block.queries], k[:, :, block.keys], v[:, :, block.keys], rule=rule)
        before = self.lse[:, :, block.queries]
        together = torch.logaddexp(before, lse)
        kept = self.out[:, :, block.queries] * (before - together).exp()[..., None]
        self.out[:, :, block.queries] = kept + out * (lse - together).exp()[..., None]
        self.lse[:, :, block.queries] = together


def block_gradients(block: Block, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *,
                    into: tuple[Tensor, Tensor, Tensor], rule: Rule) -> None:
    """Add to `into` (sums, of the shapes of q, k, v) what this block contributes to their gradients. `grad`, `out`
    and `lse` are of all blocks together: that is what makes the contributions add up."""
    queries, keys = block.queries, block.keys
    parts = _backward(block, grad[:, :, queries], q[:, :, queries], k[:, :, keys], v[:, :, keys], out[:, :, queries],
                      lse[:, :, queries], rule=rule)
    for total, part, where in zip(into, parts, (queries, keys, keys), strict=True):
        total[:, :, where] += part


def _mask(block: Block, q: Tensor, v: Tensor, *, rule: Rule) -> tuple[bool, bool, Tensor | None]:
    """Whether a fused kernel computes this, whether with its own causal mask, and else the mask, bool [batch or 1,
    queries, keys]; none where everything is visible. No kernel caps scores or drops weights as `Rule.kept` does, and
    all want one head size, to which narrower values are padded; CUDA's also wants 16-bit elements, no mask but the
    causal one, and heads of a multiple of 8 up to 256."""
    size, on_cpu = q.shape[-1], q.device.type == "cpu"
    fused = rule.kind.softcap is None and not rule.drops and size >= v.shape[-1] and (
        on_cpu or (q.dtype in (torch.bfloat16, torch.float16) and size % 8 == 0 and size <= 256))
    if fused and rule.is_triangle(block):
        return True, True, None
    seen = rule.visible(block, device=q.device)
    return fused and (on_cpu or seen is None), False, seen


def _forward(block: Block, q: Tensor, k: Tensor, v: Tensor, *, rule: Rule) -> tuple[Tensor, Tensor]:
    fused, causal, seen = _mask(block, q, v, rule=rule)
    if not fused:
        return _written_out(block, seen, q, k, v, rule=rule)
    width, v = v.shape[-1], _padded(v, q)
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=rule.kind.scale,
                                                                    attn_mask=_addends(seen, q))
        if seen is not None:  # the kernel gives 0 for a query that sees no key
            lse = lse.masked_fill(~seen.any(dim=-1)[:, None], -torch.inf)
    else:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, *_for_each_head(q, k, v), 0.0, causal,
                                                                scale=rule.kind.scale)
    return out[..., :width], lse


def _backward(block: Block, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *,
              rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    fused, causal, seen = _mask(block, q, v, rule=rule)
    if not fused:
        return _gradients_written_out(block, seen, grad, q, k, v, out, lse, rule=rule)
    width = v.shape[-1]
    grad, v, out = (_padded(t, q) for t in (grad, v, out))
    grad, out, lse = grad.contiguous(), out.contiguous(), lse.contiguous()
    if q.device.type == "cpu":
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, attn_mask=_addends(seen, q), scale=rule.kind.scale)
        return dq, dk, dv[..., :width]
    # seed and offset of a generator that is not used, as its forward would give them
    seed, offset = (torch.empty(shape, dtype=torch.uint64, device=q.device) for shape in ((2,), ()))
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
        grad, q, *_for_each_head(q, k, v), out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, offset,
        scale=rule.kind.scale)
    groups = q.shape[1] // k.shape[1]
    dk, dv = (t.unflatten(1, (-1, groups)).sum(dim=2) for t in (dk, dv))
    return dq, dk, dv[..., :width]


def _padded(t: Tensor, q: Tensor) -> Tensor:
    """Of values, and what has their size: zeros up to the size of a query's head, which change nothing else."""
    return t if t.shape[-1] == q.shape[-1] else F.pad(t, (0, q.shape[-1] - t.shape[-1]))


def _addends(seen: Tensor | None, q: Tensor) -> Tensor | None:
    """A mask as the CPU's kernel takes it."""
    return None if seen is None else q.new_zeros(()).masked_fill(~seen[:, None], -torch.inf)


def _for_each_head(q: Tensor, *keys: Tensor) -> tuple[Tensor, ...]:
    groups = q.shape[1] // keys[0].shape[1]
    return tuple(t.repeat_interleave(groups, dim=1) for t in keys)


# ------------------------------------------------------------------ without a fused kernel: keeps no scores either
def _scores(seen: Tensor | None, q: Tensor, k: Tensor, *, rule: Rule) -> Tensor:
    """Capped, masked scores [batch, kv heads, groups, queries, keys]"""
    q, k = q.to(wide(q)).unflatten(1, (k.shape[1], -1)), k.to(wide(k))
    scores = q @ k[:, :, None].transpose(-1, -2) * rule.kind.scale
    if rule.kind.softcap is not None:
        scores = rule.kind.softcap * torch.tanh(scores / rule.kind.softcap)
    return scores if seen is None else scores.masked_fill(~seen[:, None, None], -torch.inf)


def _written_out(block: Block, seen: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *,
                 rule: Rule) -> tuple[Tensor, Tensor]:
    scores = _scores(seen, q, k, rule=rule)
    lse = scores.logsumexp(dim=-1)  # −∞ where no key is visible
    weights = (scores - lse.masked_fill(lse.isinf(), 0.0)[..., None]).exp()
    kept = rule.kept(block, num_heads=q.shape[1], dtype=weights.dtype)
    if kept is not None:
        weights = weights * kept.unflatten(1, (k.shape[1], -1))
    return (weights @ v.to(wide(v))[:, :, None]).flatten(1, 2), lse.flatten(1, 2)


def _gradients_written_out(block: Block, seen: Tensor | None, grad: Tensor, q: Tensor, k: Tensor, v: Tensor,
                           out: Tensor, lse: Tensor, *, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    shape = (k.shape[1], -1)
    scores = _scores(seen, q, k, rule=rule)
    weights = (scores - lse.unflatten(1, shape)[..., None]).exp()
    grad, out = (t.to(wide(t)).unflatten(1, shape) for t in (grad, out))
    of_weights = grad @ v.to(wide(v))[:, :, None].transpose(-1, -2)
    kept = rule.kept(block, num_heads=q.shape[1], dtype=weights.dtype)
    used = weights
    if kept is not None:  # Σ over keys of weight · gradient of weight is still grad · out: `out` is of the used weights
        kept = kept.unflatten(1, shape)
        used, of_weights = weights * kept, of_weights * kept
    dv = (used.transpose(-1, -2) @ grad).sum(dim=2)
    of_scores = weights * (of_weights - (grad * out).sum(dim=-1, keepdim=True))
    if rule.kind.softcap is not None:  # d tanh(x) = 1 − tanh²(x); masked scores have weight 0
        of_scores = of_scores * (1 - (scores / rule.kind.softcap).masked_fill(scores.isinf(), 0.0).square())
    of_scores = of_scores * rule.kind.scale
    dq = of_scores @ k.to(wide(k))[:, :, None]
    dk = (of_scores.transpose(-1, -2) @ q.to(wide(q)).unflatten(1, shape)).sum(dim=2)
    return dq.flatten(1, 2), dk, dv
