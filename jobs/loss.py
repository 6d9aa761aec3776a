"""Next-token cross-entropy, summed over tokens and divided by the *global* number of tokens.

Called by jobs.parallel for each microbatch. Because every microbatch is divided by the same global count,
losses and gradients add up to the same mean whatever the layout, even where some slots hold no sample.
"""
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # target of a slot that weighs nothing


def cross_entropy(logits: Tensor, targets: Tensor, *, global_tokens: int, z_loss: float = 0.0) -> Tensor:
    """logits [batch, seq, vocab], targets [batch, seq] → this microbatch's share of the mean loss (float32), with
    z_loss times the squared logarithm of each token's normaliser, which keeps it near one (arXiv:2204.02311, §5)."""
    logits, targets = logits.flatten(0, 1).float(), targets.flatten()
    total = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    if z_loss:
        total = total + z_loss * (logits.logsumexp(dim=-1).square() * (targets != IGNORED)).sum()
    return total / global_tokens
