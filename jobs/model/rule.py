"""What attention has to compute, whoever computes it: which keys a query sees, and which of its weights are dropped.

Read by jobs.model.attention, jobs.model.blockwise, jobs.model.flex and jobs.parallel.context. Every query sees an
interval of positions that ends with its own, so a window, a document's beginning and causality are one comparison.
Knows no algorithm and no group.
"""
from dataclasses import dataclass

import torch
from torch import Tensor

from jobs.model.places import Tokens, mix
from jobs.spec.model import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionKind:
    """What is the same in every microbatch."""

    scale: float  # on QKᵀ
    softcap: float | None = None  # scores become softcap · tanh(scores / softcap)
    window: int | None = None  # a token sees itself and window − 1 before it; None: all before it
    dropout: float = 0.0  # of the weights, behind softmax
    layer: int = 0
    head_share: int = 0  # which of the equal shares of the layer's query heads is at hand

    @classmethod
    def of(cls, spec: ModelSpec, *, layer: int, head_dim: int) -> "AttentionKind":
        scale = head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale
        return cls(scale=scale, softcap=spec.attention_softcap, window=spec.window(layer),
                   dropout=spec.attention_dropout, layer=layer)


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Some queries and some keys of the tensors at hand, each a run of consecutive tokens. Where nothing counts but
    causality, several runs may be one block as long as comparing the first positions tells the truth."""

    queries: slice
    keys: slice
    first_query: int  # position in the sequence
    first_key: int

    @property
    def num_queries(self) -> int:
        return self.queries.stop - self.queries.start

    @property
    def num_keys(self) -> int:
        return self.keys.stop - self.keys.start


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One layer's attention over one microbatch."""

    kind: AttentionKind
    tokens: Tokens | None = None  # None: whole sequences without documents, nothing dropped

    @property
    def starts(self) -> Tensor | None:
        """int32 [batch, seq]: where the document of each token begins."""
        return None if self.tokens is None else self.tokens.starts

    @property
    def drops(self) -> bool:
        return self.kind.dropout > 0 and self.tokens is not None and self.tokens.sequence_keys is not None

    @property
    def is_only_causal(self) -> bool:
        return self.kind.window is None and self.starts is None

    def lowest(self, position: int) -> tuple[int, int]:
        """The lowest position that a query at `position` sees in any sequence, and that it sees in all of them; both
        never decrease from one query to the next."""
        window = 0 if self.kind.window is None else max(0, position - self.kind.window + 1)
        if self.starts is None:
            return window, window
        of_documents = self.tokens.starts_on_host[:, position]
        return max(window, int(of_documents.min())), max(window, int(of_documents.max()))

    def visible(self, block: Block, *, device: torch.device) -> Tensor | None:
        """Bool [batch or 1, queries, keys]; None where every query sees every key."""
        last_query = block.first_query + block.num_queries - 1
        shows_all = self.is_only_causal or self.lowest(last_query)[1] <= block.first_key
        is_past = block.first_key + block.num_keys - 1 <= block.first_query
        if shows_all and is_past:
            return None
        queries = torch.arange(block.first_query, last_query + 1, device=device)[:, None]
        keys = torch.arange(block.first_key, block.first_key + block.num_keys, device=device)
        seen = (keys <= queries)[None]
        if self.kind.window is not None:
            seen = seen & (keys > queries - self.kind.window)
        if self.starts is not None:
            seen = seen & (keys >= self.starts[:, block.first_query:last_query + 1, None])
        return seen

    def is_triangle(self, block: Block) -> bool:
        """Whether the block's mask is that of causality alone, from corner to corner."""
        return (block.first_query == block.first_key and block.num_queries == block.num_keys
                and (self.is_only_causal
                     or self.lowest(block.first_query + block.num_queries - 1)[1] <= block.first_key))

    def kept(self, block: Block, *, num_heads: int, dtype: torch.dtype) -> Tensor | None:
        """What the weights behind softmax are multiplied with: 0 or 1/(1−p), [batch, heads, queries, keys]; None where
        nothing is dropped. A function of (sequence's key, layer, head, positions of query and key) alone, so it is the
        same wherever it is computed. One 64-bit number serves four neighbouring keys, and p is rounded to a multiple
        of 2⁻¹⁶: they take 1.5 times as long as QKᵀ of heads of 64 (CPU), a number per weight would take four times
        that. Attention as a whole, forward and backward, takes twice the time of the fused kernel without dropout."""
        if not self.drops:
            return None
        keys = self.tokens.sequence_keys
        positions = torch.arange(block.first_query, block.first_query + block.num_queries, device=keys.device)
        heads = torch.arange(num_heads, device=keys.device) + num_heads * self.kind.head_share
        # other sites of dropout are numbered from 0 (jobs.model.layers)
        of_layer = mix(mix(keys[:, None] + positions) ^ (-1 - self.kind.layer))  # [batch, queries]
        rows = mix(of_layer[:, None] + heads[:, None])  # [batch, heads, queries]
        first, last = block.first_key // 4, (block.first_key + block.num_keys - 1) // 4
        numbers = mix(rows[..., None] + torch.arange(first, last + 1, device=keys.device)).view(torch.int16)
        skipped = block.first_key - 4 * first
        threshold = round(self.kind.dropout * 2**16)
        kept = numbers[..., skipped:skipped + block.num_keys] >= threshold - 2**15
        return kept.to(dtype) * (2**16 / (2**16 - threshold))


def split(block: Block, rule: Rule, *, size: int) -> list[Block]:
    """The parts of a block that hold a visible pair, `size` queries at a time, each with the keys that at least one of
    its queries sees; none where nothing is visible."""
    found = []
    for start in range(0, block.num_queries, size):
        stop = min(start + size, block.num_queries)
        low = max(block.first_key, rule.lowest(block.first_query + start)[0])
        high = min(block.first_key + block.num_keys, block.first_query + stop)  # the last query sees itself
        if low < high:
            keys = slice(block.keys.start + low - block.first_key, block.keys.start + high - block.first_key)
            found.append(Block(queries=slice(block.queries.start + start, block.queries.start + stop), keys=keys,
                               first_query=block.first_query + start, first_key=low))
    return found
