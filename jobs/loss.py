"""Next-token cross-entropy, summed over tokens and divided by the *global* number of tokens.

Called by jobs.parallel for each microbatch. Because every microbatch is divided by the same global count,
losses and gradients add up to the same mean whatever the layout, even where some slots hold no sample.
"""
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # target of a slot that weighs nothing


def cross_entropy(logits: Tensor, targets: Tensor, *, global_tokens: int) -> Tensor:
    """logits [batch, seq, vocab], targets [batch, seq] → this microbatch's share of the mean loss (float32)."""
    total = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return total / global_tokens
