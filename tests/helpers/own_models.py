"""Small own models, each with one thing that a user may get wrong or that orc must find out; see test_own_model.py."""
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

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


def kind(*, vocab_size: int, seq_len: int, name: str) -> tuple[nn.Module, dict]:
    return {"scaled": Scaled, "backwards": Backwards, "looped": Looped, "hidden": Hidden,
            "noisy": Noisy, "misplaced": Misplaced}[name](vocab_size), PLAN


def raising(*, vocab_size: int, seq_len: int) -> tuple[nn.Module, dict]:
    return {}["dim"]


def raising_lines(*, vocab_size: int, seq_len: int) -> tuple[nn.Module, dict]:
    raise ValueError("one\ntwo: three")


def leaving(*, vocab_size: int, seq_len: int) -> tuple[nn.Module, dict]:
    raise SystemExit(0)


def returning(*, vocab_size: int, seq_len: int) -> Any:
    return Small(vocab_size)


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
