"""The vocabulary split over `tp`: embedding, tied output projection and the loss, of which no rank ever holds all
logits.

Called by jobs.parallel and jobs.parallel.tensor; collectives are in the latter's table.
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from jobs.loss import IGNORED
from jobs.model.transformer import TokenEmbedding
from jobs.parallel.boundary import Boundary
from jobs.parallel.columns import column_parallel


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
        return column_parallel(x, self, boundary=self.boundary)[0]


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of logits that are split along the vocabulary; no rank holds all of them."""

    @staticmethod
    def forward(ctx, logits, targets, group, z_loss):
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
        normaliser = sums[0].log() + top  # log Σ exp of the whole row
        ctx.z_loss = z_loss
        ctx.save_for_backward(probabilities.div_(sums[0][:, None]), column, here, counted, normaliser)
        return ((sums[0].log() - sums[1] + z_loss * normaliser.square()) * counted).sum()

    @staticmethod
    def backward(ctx, grad):
        probabilities, column, here, counted, normaliser = ctx.saved_tensors
        # [tokens, vocab/tp]: softmax − one-hot, and softmax once more for the normaliser's square
        out = probabilities * (1 + 2 * ctx.z_loss * normaliser)[:, None]
        out.scatter_add_(-1, column[:, None], -here.to(out.dtype)[:, None])
        return out.mul_((grad * counted)[:, None]), None, None, None


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, *, group: dist.ProcessGroup,
                                 global_tokens: int, z_loss: float = 0.0) -> Tensor:
    """jobs.loss.cross_entropy for this rank's logits [batch, seq, vocab/tp]; the same value on every tp rank."""
    loss = _VocabParallelCrossEntropy.apply(logits.flatten(0, 1), targets.flatten(), group, z_loss)
    return loss / global_tokens
