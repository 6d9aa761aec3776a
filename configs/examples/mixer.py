"""An own model: blocks that mix tokens by causal convolution, by moving averages and by attention, in plain PyTorch.

`build` is what a run names as `model.entrypoint`; see docs/bring_your_own_model.md. Nothing here is parallel. What
tensor parallelism asks of it is that a module inside a split infers how many heads or channels it has from what it is
given.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


class Convolution(nn.Module):
    """Gated causal convolution, each channel by itself. [batch, seq, dim] → the same."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.value, self.gate = nn.Linear(dim, 2 * dim), nn.Linear(dim, 2 * dim)
        self.taps = nn.Conv1d(2 * dim, 2 * dim, width, groups=2 * dim)
        self.out = nn.Linear(2 * dim, dim)
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        past = F.pad(self.value(x).transpose(1, 2), (self.width - 1, 0))
        return self.out(self.taps(past).transpose(1, 2) * F.silu(self.gate(x)))


class Average(nn.Module):
    """Exponential moving average over the past, with a learned memory per channel; [batch, seq, channels]."""

    def __init__(self, channels: int, seq_len: int) -> None:
        super().__init__()
        self.memory = nn.Parameter(torch.linspace(0.0, 4.0, channels))  # logit of how much of the past stays
        self.register_buffer("age", torch.arange(seq_len - 1, -1, -1.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        seq, stays = x.shape[1], torch.sigmoid(self.memory)[:, None]
        weights = (1 - stays) * stays ** self.age[-seq:]  # [channels, seq], oldest first
        past = F.pad(x.transpose(1, 2), (seq - 1, 0))
        return F.conv1d(past, weights[:, None], groups=x.shape[2]).transpose(1, 2)


class Memory(nn.Module):
    def __init__(self, dim: int, seq_len: int) -> None:
        super().__init__()
        self.key = nn.Linear(dim, dim, bias=False)
        self.average = Average(dim, seq_len)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.average(F.relu(self.key(x)).square()))


class Attention(nn.Module):
    def __init__(self, dim: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q, self.k, self.v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.q_norm = nn.LayerNorm(head_dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q, self.k, self.v))
        q, k, v = (t.transpose(1, 2) for t in (self.q_norm(q), k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """[batch, seq, dim] → the same."""

    def __init__(self, dim: int, mixer: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mixer = mixer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(self.norm(x))


class Mixer(nn.Module):
    """Token ids [batch, seq] → logits [batch, seq, vocab_size]."""

    def __init__(self, *, vocab_size: int, seq_len: int, dim: int, depth: int, head_dim: int, width: int) -> None:
        super().__init__()
        kinds = (lambda: Convolution(dim, width), lambda: Memory(dim, seq_len), lambda: Attention(dim, head_dim))
        self.embedding = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(Block(dim, kinds[i % len(kinds)]()) for i in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.05)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


PLAN = {
    "blocks": "blocks.*",
    "styles": {
        "embedding": "vocab",
        "norm": "sequence",
        "head": "head",
        "blocks.*.norm": "sequence",
        "blocks.*.mixer": "split",  # its input enters once for value and gate, or for q, k and v
        "blocks.*.mixer.value": "column",
        "blocks.*.mixer.gate": "column",
        "blocks.*.mixer.taps": "channels",
        "blocks.*.mixer.key": "column",
        "blocks.*.mixer.average": "channels",
        "blocks.*.mixer.q": "column",
        "blocks.*.mixer.k": "column",
        "blocks.*.mixer.v": "column",
        "blocks.*.mixer.q_norm": "shared",  # every head has the same norm
        "blocks.*.mixer.out": "row",
    },
}


def build(*, vocab_size: int, seq_len: int, dim: int = 64, depth: int = 6, head_dim: int = 16,
          width: int = 4) -> tuple[nn.Module, dict]:
    """The model and its plan table."""
    return Mixer(vocab_size=vocab_size, seq_len=seq_len, dim=dim, depth=depth, head_dim=head_dim, width=width), PLAN
