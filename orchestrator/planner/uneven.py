"""How many layers each pipeline stage gets when they do not come out even, or the ends carry more than layers.

Called by the enumeration for every number of stages. The embedding and the output projection with the loss are
counted in layers' worth of work, so that the last stage of a model with a large vocabulary gets fewer layers.
Knows FLOPs, not seconds.
"""
import bisect
import functools

from jobs.spec.counts import embedding_params, layer_attention_flops_per_token, layer_matmul_params
from jobs.spec.model import ModelSpec
from jobs.spec.parallel import Recompute

PASSES = {"none": 3.0, "selective": 3.0, "full": 4.0}  # forwards' worth of work of a layer in a step


def stage_splits(model: ModelSpec, *, num_stages: int, seq_len: int,
                 recompute: Recompute) -> tuple[tuple[int, ...], ...]:
    """Splits worth pricing, best balanced first; empty if there are more stages than layers.

    The first takes each end at its work (a look-up is none). The second takes each end as at least one layer (as
    MLPerf's 126 layers over 8 · 8 stages: 128 = 126 + 2), which spares the stages that hold the most microbatches.
    """
    if num_stages > model.num_layers:
        return ()
    if num_stages == 1:
        return ((model.num_layers,),)
    weights = layer_weights(model, seq_len=seq_len, recompute=recompute)
    head = head_weight(model)
    layer = sum(weights) / len(weights)
    by_work = split_weighted(weights, num_stages=num_stages, first=0.0, last=head)
    with_ends = split_weighted(weights, num_stages=num_stages, first=layer, last=max(head, layer))
    return tuple(dict.fromkeys((by_work, with_ends)))


@functools.lru_cache(maxsize=64)
def layer_weights(model: ModelSpec, *, seq_len: int, recompute: Recompute) -> tuple[float, ...]:
    """FLOPs of every layer for one token of a step."""
    return tuple(PASSES[recompute] * (2 * layer_matmul_params(model, layer) + layer_attention_flops_per_token(
        model, layer, seq_len=seq_len, convention="causal") / 3) for layer in range(model.num_layers))


def head_weight(model: ModelSpec) -> float:
    """FLOPs of the output projection for one token of a step; it is never computed again."""
    return PASSES["none"] * 2 * embedding_params(model)


@functools.lru_cache(maxsize=4096)
def split_weighted(weights: tuple[float, ...], *, num_stages: int, first: float, last: float) -> tuple[int, ...]:
    """Layers per stage so that the heaviest stage is as light as possible; each stage gets at least one layer.

    `first` and `last` are the extra weights of the end stages. Exact: the limit is the smallest sum of consecutive
    layers (with their ends) that a greedy packing can live with, and the layers are then spread as evenly as that
    limit allows. Raises ValueError if there are more stages than layers.
    """
    if not 1 <= num_stages <= len(weights):
        raise ValueError(f"{num_stages} stages for {len(weights)} layers")
    prefix = [0.0]
    for weight in weights:
        prefix.append(prefix[-1] + weight)
    limit = _smallest_limit(prefix, num_stages, first, last)
    return _spread(prefix, num_stages, first, last, limit * (1 + 1e-9))


def _smallest_limit(prefix: list[float], num_stages: int, first: float, last: float) -> float:
    """By bisection over the weight that the heaviest stage may have."""
    low, high = 0.0, prefix[-1] + first + last
    for _ in range(40):  # to 1e-10 of the limit, whatever the number of stages
        middle = (low + high) / 2
        if _cuts(prefix, num_stages, first, last, middle) is None:
            low = middle
        else:
            high = middle
    return high


def _cuts(prefix: list[float], num_stages: int, first: float, last: float, limit: float) -> list[int] | None:
    """The latest end of every stage under `limit`, so that the layers before it are packed as early as possible;
    None if they do not fit."""
    layers = len(prefix) - 1
    ends, done = [], 0
    for stage in range(num_stages):
        extra = (first if stage == 0 else 0.0) + (last if stage == num_stages - 1 else 0.0)
        most = layers - (num_stages - 1 - stage)  # the stages behind need a layer each
        end = min(most, bisect.bisect_right(prefix, prefix[done] + limit - extra) - 1)
        if end <= done:
            return None
        ends.append(end)
        done = end
    return ends if done == layers else None


def _spread(prefix: list[float], num_stages: int, first: float, last: float, limit: float) -> tuple[int, ...]:
    """From the last stage back: each takes its even share of what is left, if the stages before can take the rest."""
    latest = _cuts(prefix, num_stages, first, last, limit)
    assert latest is not None
    end, counts = len(prefix) - 1, []
    for stage in reversed(range(num_stages)):
        if stage == 0:
            counts.append(end)
            break
        extra = last if stage == num_stages - 1 else 0.0
        share = (prefix[end] + first + extra) / (stage + 1)
        start = end - 1
        while start > stage and (start > latest[stage - 1] or (
                prefix[end] - prefix[start - 1] + extra <= limit
                and prefix[end] - (prefix[start] + prefix[start - 1]) / 2 + extra <= share)):
            start -= 1
        counts.append(end - start)
        end = start
    return tuple(reversed(counts))
