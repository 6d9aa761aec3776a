"""Dropout of an own model: masks that depend on (seed, step, sample, token, place in the model), on no layout.

Used by jobs.own and jobs.own.measure. nn.Dropout modules get another forward. The place of a draw is the block that is
running, and how many draws came before it in there; so a module may be used several times. Keys of tokens
(jobs.model.places) are made where a block begins and handed to its forward, which may be compiled, and repeated later.
"""
import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch.nn as nn
from torch import Tensor

from jobs.model.places import Places, dropped, mix
from jobs.parallel.tensor import Where, own_tokens


class Draws:
    """What the next mask of a forward is made from; `following` says of which layout."""

    def __init__(self) -> None:
        self.token_keys: tuple[Tensor, ...] | None = None  # int64 [batch, seq], and [batch, seq/tp] of own tokens
        self.uses = 0  # draws since the block began
        self.largest = 0  # elements of a mask
        self.rank, self.size = 0, 1  # of tp
        self._where: list[tuple[Where, int]] = []  # of all tokens and of the rank's own, and how many of a sequence
        self._keys: Tensor | None = None
        self._first_block = self._block = 0

    def _begin(self, plain: Callable[[Tensor], Tensor], x: Tensor, keys: Tensor | None = None) -> Tensor:
        self._keys, self._block = keys, self._first_block
        self.open(self._keys_at(2 * self._block))
        return plain(x)

    def _run(self, plain: Callable[..., Any], *args: Any, token_keys: tuple[Tensor, ...] | None, **kwargs: Any) -> Any:
        self.open(token_keys)
        return plain(*args, **kwargs)

    def _hand(self, wrapped: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        out = wrapped(*args, token_keys=self._keys_at(2 * self._block + 1), **kwargs)
        self._block += 1
        self.open(self._keys_at(2 * self._block))
        return out

    def open(self, token_keys: tuple[Tensor, ...] | None) -> None:
        self.token_keys, self.uses = token_keys, 0

    def _keys_at(self, place: int) -> tuple[Tensor, ...] | None:
        if self._keys is None:
            return None
        keys, found = mix(self._keys ^ place), []
        for tokens, seq_len in self._where:
            rows, positions = tokens(len(keys), seq_len, keys.device)
            found.append(mix(keys[rows] + positions))
        return tuple(found)


@contextlib.contextmanager
def following(draws: Draws | None, model: nn.Module, blocks: list[nn.Module], *, seq_len: int, first_block: int = 0,
              rank: int = 0, size: int = 1) -> Iterator[None]:
    """Make the model's forward take the keys of its sequences, int64 [batch], and each block's those of its tokens as
    an argument, whatever wraps the blocks meanwhile. `seq_len`: tokens of a sequence; this is one of `size` tp ranks,
    and the model begins with `first_block`."""
    if draws is None:
        yield
        return
    tokens = Places().tokens
    draws.rank, draws.size, draws._first_block, draws._where = rank, size, first_block, [(tokens, seq_len)]
    if size > 1 and seq_len % size == 0:
        draws._where.append((own_tokens(tokens, rank=rank, size=size), seq_len // size))
    model.forward = functools.partial(draws._begin, model.forward)
    for block in blocks:
        block.forward = functools.partial(draws._run, block.forward)
    yield
    for block in blocks:
        block.forward = functools.partial(draws._hand, block.forward)


class KeyedDropout(nn.Dropout):
    """[batch, seq, …]; of `…` a rank may hold its part of the first dimension, and of seq its share."""

    def forward(self, x: Tensor) -> Tensor:
        draws, size = self.draws, math.prod(x.shape[2:])
        if draws.token_keys is None or not self.training:
            if x.is_meta:  # traced whole; a validation's forward drops nothing, either, but may hold a part
                self.sizes.add(size)
            return x
        keys = [of_tokens for of_tokens in draws.token_keys if of_tokens.shape == x.shape[:2]]
        if not keys or not (size in self.sizes) ^ (size * draws.size in self.sizes and draws.size > 1):
            raise ValueError(f"{self.path}: dropout of {list(x.shape)}; it is for [batch, seq, …], of one size per "
                             f"module, with seq {' or '.join(str(k.shape[1]) for k in draws.token_keys)} here")
        first = 0 if size in self.sizes else draws.rank * size
        gone = dropped(keys[0], site=draws.uses, size=size, p=self.p, first=first).view(x.shape)
        draws.uses += 1
        draws.largest = max(draws.largest, x.numel())
        return x.masked_fill(gone, 0.0).mul_(1 / (1 - self.p))


def replace_dropout(model: nn.Module) -> Draws | None:
    """In place. None: the model drops nothing."""
    found = [(path, module) for path, module in model.named_modules() if type(module) is nn.Dropout and module.p > 0]
    draws = Draws()
    for path, module in found:
        module.__class__ = KeyedDropout
        module.draws, module.path, module.sizes = draws, path, set()
    return draws if found else None
