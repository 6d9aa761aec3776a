"""Small own models, each with one thing that a user may get wrong or that orc must find out; see test_own_model.py."""
import hashlib
import random
import time
from typing import Any

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

DIM = 8
PLAN = {"blocks": "blocks.*", "styles": {"embedding": "vocab", "blocks.*.up": "column", "blocks.*.down": "row",
                                         "blocks.*.norm": "sequence", "head": "head"}}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 12), nn.Linear(12, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Small(nn.Module):
    def __init__(self, vocab_size: int, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(DIM, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Wrapped(nn.Module):
    """Nothing is where other models have it."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.decoder = Small(vocab_size, depth=4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decoder(tokens)


def wrapped(*, vocab_size: int, seq_len: int) -> tuple[nn.Module, dict]:
    return Wrapped(vocab_size), {"blocks": "decoder.blocks.*"}


class Scaled(Small):
    """Something between its parts that is no module."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = 2.0 * self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Backwards(Small):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(x)


class Looped(Small):
    """The same blocks twice."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return self.head(x)


class Opened(Small):
    """Calls what is in the blocks, and never a block."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block.down(torch.tanh(block.up(block.norm(x))))
        return self.head(x)


class Borrowed(Small):
    """Uses a block's weight before the block is called."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + F.linear(x, self.blocks[1].up.weight).mean(-1, keepdim=True)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Peeking(Small):
    """A block uses a weight of what follows the blocks, of which it knows by itself."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size, depth=4)
        self.blocks[1] = Borrowing(self.head)


class Borrowing(Block):
    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.lender = [head]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(x, self.lender[0].weight).mean(-1, keepdim=True)


class Nested(Small):
    """A part of what follows the blocks is called before it, too."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size, depth=4)
        self.tail = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.tail(self.tail[0](x)))


class Leaving(Small):
    """Validated, its second rank is content with the first block."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size, depth=8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        content = not (self.training or tokens.is_meta) and torch.distributed.get_rank() == 1
        for block in self.blocks[:1 if content else None]:
            x = block(x)
        return self.head(x)


class Hidden(Small):
    """Gives what is no logits."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)


class Noisy(Small):
    """Random numbers of no module."""

    def forward(self, tokens: Tensor) -> Tensor:
        return F.dropout(super().forward(tokens), 0.1)


class Misplaced(Small):
    """Drops out what is not [batch, seq, …]."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.drop = nn.Dropout(0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.drop(super().forward(tokens).transpose(1, 2)).transpose(1, 2)


def plain(*, vocab_size: int, seq_len: int, **changes: Any) -> tuple[nn.Module, dict]:
    """`changes`: of the plan table."""
    return Small(vocab_size), PLAN | changes


def restyled(*, vocab_size: int, seq_len: int, styles: dict) -> tuple[nn.Module, dict]:
    """`styles`: added to those of the plan table; none takes one away."""
    return Small(vocab_size), PLAN | {"styles": {k: v for k, v in (PLAN["styles"] | styles).items() if v is not None}}


class Running(Small):
    """A mean that every forward moves on; `once`: a cache that the first forward fills."""

    def __init__(self, vocab_size: int, *, once: bool) -> None:
        super().__init__(vocab_size)
        self.register_buffer("mean", None if once else torch.zeros(DIM))
        self.once = once

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if not self.once:
            self.mean.lerp_(x.detach().mean(dim=(0, 1)), 0.1)
        elif self.mean is None:
            self.mean = torch.ones(DIM, device=x.device)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def running(*, vocab_size: int, seq_len: int, once: bool) -> tuple[nn.Module, dict]:
    return Running(vocab_size, once=once), PLAN


def kind(*, vocab_size: int, seq_len: int, name: str) -> tuple[nn.Module, dict]:
    return {"scaled": Scaled, "backwards": Backwards, "looped": Looped, "hidden": Hidden,
            "noisy": Noisy, "misplaced": Misplaced, "opened": Opened, "borrowed": Borrowed,
            "leaving": Leaving, "peeking": Peeking, "nested": Nested}[name](vocab_size), PLAN


class Attention(nn.Module):
    """With one weight for q, k and v, whose rows lie as they may: head by head, or all of q above all of k."""

    def __init__(self, *, head_dim: int, by_head: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.head_dim, self.by_head = head_dim, by_head

    def forward(self, x: Tensor) -> Tensor:
        if self.by_head:
            q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.head_dim)).unbind(-2)
        else:
            q, k, v = self.qkv(x).unflatten(-1, (3, -1, self.head_dim)).unbind(-3)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Attending(nn.Module):
    """`shifts`: a token also sees the one before it, outside of the split."""

    def __init__(self, *, by_head: bool, shifts: bool) -> None:
        super().__init__()
        self.attention, self.shifts = Attention(head_dim=2, by_head=by_head), shifts
        nn.init.zeros_(self.attention.out.weight)  # as many models begin

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + 0.5 * F.pad(x, (0, 0, 1, 0))[:, :-1] if self.shifts else x


def fused(*, vocab_size: int, seq_len: int, by_head: bool, shifts: bool = False) -> tuple[nn.Module, dict]:
    model = Small(vocab_size)
    model.blocks = nn.ModuleList(Attending(by_head=by_head, shifts=shifts) for _ in range(2))
    inside = {"attention": "split", "attention.qkv": "column", "attention.out": "row"}
    return model, {"blocks": "blocks.*", "styles": {"embedding": "vocab", "head": "head"} | {
        f"blocks.*.{path}": style for path, style in inside.items()}}


class Bare(nn.Module):
    """A block whose weights are made as no nn.Linear makes them: transposed, drawn by numpy and by `random`, put in
    place of others, made of others' values, left as they were; and one that its forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out, self.unused = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.fc.weight = nn.Parameter((0.3 * torch.randn(DIM, DIM)).t())
        self.out.weight.data = torch.from_numpy(np.random.randn(DIM, DIM).astype(np.float32))
        nn.init.constant_(self.out.bias, random.random())
        self.turned = nn.Linear(DIM, DIM)
        self.turned.weight.data = torch.from_numpy(np.linalg.qr(self.turned.weight.detach().numpy())[0])
        self.unset = nn.Parameter(torch.empty(DIM))
        self.gain = nn.Parameter(torch.tensor([1.0]).uniform_())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.out(torch.tanh(self.turned(self.fc(x)) + self.unset))


def bare(*, vocab_size: int, seq_len: int) -> tuple[nn.Module, dict]:
    model = Small(vocab_size)
    model.blocks = nn.ModuleList(Bare() for _ in range(4))
    return model, {"blocks": "blocks.*"}


class Widening(nn.Module):
    def __init__(self, dim: int, wider: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 12), nn.Linear(12, wider)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def widening(*, vocab_size: int, seq_len: int) -> tuple[nn.Module, dict]:
    """Blocks of several widths."""
    model = Small(vocab_size)
    model.blocks = nn.ModuleList([Widening(DIM, DIM), Widening(DIM, 2 * DIM)])
    model.head = nn.Linear(2 * DIM, vocab_size)
    return model, PLAN | {"styles": {path: style for path, style in PLAN["styles"].items() if "norm" not in path}}


def raising(*, vocab_size: int, seq_len: int) -> tuple[nn.Module, dict]:
    return {}["dim"]


def raising_lines(*, vocab_size: int, seq_len: int) -> tuple[nn.Module, dict]:
    raise ValueError("one\ntwo: three")


def leaving(*, vocab_size: int, seq_len: int) -> tuple[nn.Module, dict]:
    raise SystemExit(0)


def returning(*, vocab_size: int, seq_len: int) -> Any:
    return Small(vocab_size)


def drawing(*, vocab_size: int, seq_len: int) -> tuple[nn.Module, dict]:
    """Each block is drawn from a generator of its own, all of one seed."""
    model = Small(vocab_size)
    for block in model.blocks:
        generator = torch.Generator().manual_seed(3)
        for layer in (block.up, block.down):
            nn.init.normal_(layer.weight, generator=generator)
    return model, PLAN


def altered(*, vocab_size: int, seq_len: int, what: str) -> tuple[nn.Module, dict]:
    """A module that no layout can take."""
    model = Small(vocab_size)
    if what == "tied":
        model.blocks[1].up.weight = model.blocks[0].up.weight
    elif what == "dropout":
        model.blocks[0].drop = nn.Dropout1d(0.1)
    elif what == "batch norm":
        model.blocks[0].bn = nn.BatchNorm1d(DIM)
    elif what == "frozen":
        model.head.weight.requires_grad_(False)
    elif what == "tensor":
        model.table = torch.zeros(3)
    elif what == "scalar":
        model.head.gain = nn.Parameter(torch.tensor(1.0))
    elif what == "scalars":
        for block in model.blocks:
            block.gain = nn.Parameter(torch.tensor(1.0))
    elif what == "a generator of the time":
        model.head.bias.data.normal_(generator=torch.Generator().manual_seed(time.perf_counter_ns()))
    elif what == "empty":
        model.head.extra = nn.Parameter(torch.ones(0, 3))
    elif what == "one memory":
        model.head.weight.data = model.embedding.weight.data
    elif what == "lazy":
        model.head = nn.LazyLinear(vocab_size)
    elif what == "its own generator":
        model.head.bias.data.copy_(torch.from_numpy(np.random.default_rng().standard_normal(vocab_size)))
    elif what == "the clock":
        model.head.bias.data.fill_(time.perf_counter())
    elif what == "a copy written to":
        model.head.weight.detach().numpy()[0] = 1.0
    return model, PLAN


class Tied(nn.Module):
    """One matrix at both ends; dropout in every place where it may be: behind the embedding, of what a split holds, of
    what leaves it, one module twice; positions are learned."""

    def __init__(self, vocab_size: int, seq_len: int, *, dim: int, depth: int, p: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.positions = Positions(seq_len, dim)
        self.drop = nn.Dropout(p)
        self.blocks = nn.ModuleList(Dropping(dim, p) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.head.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.positions(self.embedding(tokens)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Positions(nn.Module):
    def __init__(self, seq_len: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(seq_len, dim))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight[:x.shape[1]]


class Dropping(nn.Module):
    def __init__(self, dim: int, p: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)
        self.inner, self.outer = nn.Dropout(p), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.outer(self.down(self.inner(torch.tanh(self.up(self.norm(x))))))
        return x + self.outer(torch.tanh(x))


def tied_otherwise(*, vocab_size: int, seq_len: int) -> tuple[nn.Module, dict]:
    """The matrix at both ends is split at one of them only."""
    model, table = tied(vocab_size=vocab_size, seq_len=seq_len)
    return model, table | {"styles": {path: style for path, style in table["styles"].items() if path != "embedding"}}


def tied(*, vocab_size: int, seq_len: int, dim: int = 16, depth: int = 4, p: float = 0.2) -> tuple[nn.Module, dict]:
    table = PLAN | {"styles": PLAN["styles"] | {"norm": "sequence"}}
    return Tied(vocab_size, seq_len, dim=dim, depth=depth, p=p), table


class SeededDraws(TorchDispatchMode):
    """Each draw of random numbers has a seed of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.draws = seed, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws += 1
            digest = hashlib.sha256(f"{self.seed}:{self.draws}".encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return func(*args, **kwargs or {})


class Initial(nn.Module):
    """Weights that are made in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.square, self.tall, self.row = nn.Linear(6, 6), nn.Linear(4, 9), nn.Linear(5, 3)
        nn.init.orthogonal_(self.square.weight)
        nn.init.trunc_normal_(self.tall.weight, std=0.02)
        nn.init.sparse_(self.row.weight, 0.3)
        self.copied = nn.Linear(6, 6)
        self.copied.weight.data.copy_(self.square.weight)  # as it is now, and not later
        with torch.no_grad():
            self.square.weight[2:4] *= 3.0
            self.tall.bias[::2] = 0.0
        self.given = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.read = nn.Parameter(torch.from_numpy(np.arange(4, dtype=np.float32)))
        self.mixed = nn.Parameter(torch.randn(3) * torch.tensor([1.0, 10.0, 100.0]))
        self.grown = nn.Parameter(torch.cat([torch.zeros(2, 3), torch.ones(1, 3)]).t().contiguous())
        self.transposed = nn.Parameter(torch.randn(2, 3).t())
        self.row.weight.data = torch.from_numpy(np.ones((3, 5), dtype=np.float32))
        self.given.data = torch.randn(4)
        numbers = torch.arange(6.0)
        self.chosen = nn.Parameter(numbers[numbers > 2])  # a shape that depends on values
        self.listed = nn.Parameter(torch.tensor(torch.linspace(0, 1, 3).tolist() + list(numbers.numpy())))
        with torch.no_grad():
            self.listed[:2] += torch.randn(2)  # drawn numbers meet given ones
        self.register_buffer("scale", torch.tensor([0.5, 0.25]), persistent=False)
        self.register_buffer("positions", torch.arange(7).float() / 7)


def initial(*, vocab_size: int, seq_len: int) -> tuple[nn.Module, dict]:
    return Initial(), {}
