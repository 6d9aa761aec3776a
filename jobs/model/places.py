"""Which token is where: the sequence and position of every token at hand, and random numbers that depend on
nothing else.

Built by jobs.model.transformer. A rank may hold a part of the tokens only; whoever splits them replaces
`Places.positions` or `Places.tokens`, the two seams, and nothing else of the model needs to know.
"""
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# splitmix64's increment and factors, as signed 64-bit integers: torch multiplies modulo 2^64
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64


class Places:
    """`positions(seq_len, device)` → int64 [seq_len]: positions in their sequence of the tokens that attention sees.
    `tokens(batch, seq_len, device)` → two int64 [batch, seq_len]: sequence (row of the microbatch) and position of
    each token of the residual stream, which under sequence parallelism is only 1/`split` of what attention sees."""

    def __init__(self) -> None:
        self.split = 1
        self.positions: Callable[[int, torch.device], Tensor] = _all_positions
        self.tokens: Callable[[int, int, torch.device], tuple[Tensor, Tensor]] = self._all_tokens

    def _all_tokens(self, batch: int, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
        rows = torch.arange(batch, device=device)[:, None].expand(batch, seq_len)
        return rows, self.positions(seq_len, device).expand(batch, seq_len)


def _all_positions(seq_len: int, device: torch.device) -> Tensor:
    return torch.arange(seq_len, device=device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """What a layer may know of its tokens beside their hidden state. `batch` is the microbatch's sequences; `seq` is
    of whole sequences, whatever part of them the rank holds."""

    rows: Tensor  # int64 as the residual stream: sequence of the microbatch that the token belongs to
    positions: Tensor  # int64 as the residual stream: in the sequence, or in the document where these are masked
    keys: Tensor | None  # int64 as the residual stream: what the token's random numbers come from; None draws none
    weights: Tensor | None  # float32 [batch]: share of each sequence in the step's mean; 0 for an empty slot
    sequence_keys: Tensor | None = None  # int64 [batch]: what `keys` come from
    starts: Tensor | None = None  # int32 [batch, seq]: where the document of each token begins; None: no documents
    angles: tuple[Tensor, Tensor] | None = None  # cos and sin of what attention sees, if positions are rotary
    shared: dict[Any, Any] = field(default_factory=dict)  # what all layers of this microbatch can share

    @property
    def starts_on_host(self) -> Tensor:
        """`starts` for deciding which blocks are empty. As a rule it has come from there and nothing waits for the
        device; FSDP's root moves all inputs of the model to the device, and it is fetched back once."""
        if HOST not in self.shared:
            self.shared[HOST] = self.starts.cpu()
        return self.shared[HOST]


HOST = "starts on the host"
Rotary = Callable[[Tensor], tuple[Tensor, Tensor]]  # positions [(batch,) seq] → cos, sin [(batch,) seq, 1, half a head]


def locate(x: Tensor, *, places: Places, keys: Tensor | None, weights: Tensor | None, starts: Tensor | None = None,
           rotary: Rotary | None = None) -> Tokens:
    """The tokens of the residual stream x [batch, seq, dim]. Of whole sequences: keys and weights [batch], and starts
    [batch, seq], best on the host, where the document of each token begins."""
    rows, positions = places.tokens(x.shape[0], x.shape[1], x.device)
    of_attention = places.positions(x.shape[1] * places.split, x.device)
    token_keys = None if keys is None else mix(keys[rows] + positions)
    shared = {}
    if starts is not None:
        if starts.device.type == "cpu":
            shared[HOST] = starts
        starts = starts.to(x.device, non_blocking=True)
        positions = positions - starts[rows, positions]
        of_attention = of_attention - starts[:, of_attention]  # [batch, seq]
    return Tokens(rows=rows, positions=positions, keys=token_keys, weights=weights, sequence_keys=keys, starts=starts,
                  angles=None if rotary is None else rotary(of_attention), shared=shared)


def document_starts(documents: Tensor) -> Tensor:
    """int [batch, seq], numbers of documents that never decrease along a sequence → int32 [batch, seq]: the position
    at which the document of each token begins, or the sequence where it began before it."""
    positions = torch.arange(documents.shape[1], dtype=torch.int32, device=documents.device).expand(documents.shape)
    begins = torch.zeros_like(positions)
    begins[:, 1:] = positions[:, 1:] * (documents[:, 1:] != documents[:, :-1])
    return begins.cummax(dim=1).values


def sequence_keys(slots: Tensor, *, seed: int, step: int) -> Tensor:
    """Random keys of the sequences in `slots` of the global batch, int64 like them: functions of (seed, step, slot),
    whichever rank asks."""
    return mix(mix(torch.full_like(slots, seed)) + step) ^ mix(slots)


def dropped(keys: Tensor, *, site: int, size: int, p: float, first: int = 0) -> Tensor:
    """Bool [..., size]: true with probability p, a function of (key, site, index) alone. `first`: of the indices."""
    numbers = mix(mix(keys ^ site)[..., None] + torch.arange(first, first + size, device=keys.device))
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
