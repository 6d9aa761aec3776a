"""Which token is where: the sequence and position of every token at hand, and random numbers that depend on
nothing else.

Built by jobs.model.transformer. A rank may hold a part of the tokens only; whoever splits them replaces
`Places.positions` or `Places.tokens`, the two seams, and nothing else of the model needs to know.
"""
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# splitmix64's increment and factors, as signed 64-bit integers: torch multiplies modulo 2^64
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64


class Places:
    """`positions(seq_len, device)` → int64 [seq_len]: positions in their sequence of the tokens that attention sees.
    `tokens(batch, seq_len, device)` → two int64 [batch, seq_len]: sequence (row of the microbatch) and position of
    each token of the residual stream, which under sequence parallelism is only a part of what attention sees."""

    def __init__(self) -> None:
        self.positions: Callable[[int, torch.device], Tensor] = _all_positions
        self.tokens: Callable[[int, int, torch.device], tuple[Tensor, Tensor]] = self._all_tokens

    def _all_tokens(self, batch: int, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
        rows = torch.arange(batch, device=device)[:, None].expand(batch, seq_len)
        return rows, self.positions(seq_len, device).expand(batch, seq_len)


def _all_positions(seq_len: int, device: torch.device) -> Tensor:
    return torch.arange(seq_len, device=device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """What a layer may know of its tokens beside their hidden state."""

    rows: Tensor  # int64 [batch, seq]: sequence of the microbatch that the token belongs to
    positions: Tensor  # int64 [batch, seq]
    keys: Tensor | None  # int64 [batch, seq]: what the token's random numbers come from; None draws none
    weights: Tensor | None  # float32 [batch]: share of each sequence in the step's mean; 0 for an empty slot


def locate(x: Tensor, *, places: Places, keys: Tensor | None, weights: Tensor | None) -> Tokens:
    """The tokens of the residual stream x [batch, seq, dim]; keys and weights are of whole sequences, [batch]."""
    rows, positions = places.tokens(x.shape[0], x.shape[1], x.device)
    return Tokens(rows=rows, positions=positions, weights=weights,
                  keys=None if keys is None else mix(keys[rows] + positions))


def sequence_keys(slots: Tensor, *, seed: int, step: int) -> Tensor:
    """Random keys of the sequences in `slots` of the global batch, int64 like them: functions of (seed, step, slot),
    whichever rank asks."""
    return mix(mix(torch.full_like(slots, seed)) + step) ^ mix(slots)


def dropped(keys: Tensor, *, site: int, size: int, p: float) -> Tensor:
    """Bool [..., size]: true with probability p, a function of (key, site, index) alone."""
    numbers = mix(mix(keys ^ site)[..., None] + torch.arange(size, device=keys.device))
    return numbers < round(p * 2**64) - 2**63  # signed, uniform over all 64 bits


def mix(x: Tensor) -> Tensor:
    """splitmix64 (Steele, Lea & Flood, OOPSLA 2014): every input bit reaches every output bit. int64 → int64"""
    x = x + _GOLDEN  # the only copy: the masks of dropout are as large as the activations
    x = x.bitwise_xor_(_shift(x, 30)).mul_(_FIRST)
    x = x.bitwise_xor_(_shift(x, 27)).mul_(_SECOND)
    return x.bitwise_xor_(_shift(x, 31))


def _shift(x: Tensor, bits: int) -> Tensor:
    """Right, filling with zeros: torch's own shift repeats the sign."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)
