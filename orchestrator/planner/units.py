"""The units of one pipeline stage as a backward pass comes to them.

Called by backward and by sharding, for every candidate. Units are those of jobs.parallel.data; bytes are not known.
"""
import functools
from typing import NamedTuple

from jobs.spec.model import ModelSpec
from jobs.spec.parallel import Layout, ParallelDims
from orchestrator.planner.weights import Weights, ends_params, layer_kinds, layer_weights, widest_weight


class Place(NamedTuple):
    """One unit of layers on a backward's way. Weights are those of one tp rank, whole."""

    unit: Weights
    before: Weights  # of the layers that backward has left already
    left: int  # of the message before: the unit left last, of two messages the second; or the end of the model
    sent: int  # of the unit left last, in all its messages
    ahead: int  # of the unit that comes next, and is gathered while this one computes
    gone: float  # share of the stage's layers that backward has left when it comes here, and when it leaves
    then: float


class Way(NamedTuple):
    """Through one stage."""

    root: int  # norm and output, with a tied embedding: where backward begins
    places: tuple[Place, ...]
    begin: int  # the embedding, where backward ends
    total: Weights
    is_tied: bool  # the end is the embedding, too
    widest: int  # weights of the largest matrix of a layer: autograd makes one gradient at a time
    last: int  # of the message that FSDP2 makes last, and keeps until another pass


@functools.lru_cache(maxsize=16384)  # asked for many layouts that differ in other things alone
def stage_units(model: ModelSpec, layers: range, *, per_unit: int, tp: int, ep: int) -> tuple[tuple[Weights, int], ...]:
    """Weights of a stage's units of layers, and their layers, in the order of forward."""
    dims, found = ParallelDims(tp=tp, ep=ep), []
    for begin in layers[::per_unit]:
        unit = range(begin, min(begin + per_unit, layers.stop))
        found.append((sum((layer_weights(model, layer, dims=dims) for layer in unit), Weights(0)), len(unit)))
    return tuple(found)


def way_of(model: ModelSpec, layout: Layout, stage: int) -> Way:
    return _way(model, layout.layers(stage), per_unit=layout.layers_per_unit, tp=layout.dims.tp, ep=layout.dims.ep,
                first=stage == 0, last=stage == layout.num_stages - 1)


@functools.lru_cache(maxsize=16384)
def _way(model: ModelSpec, layers: range, *, per_unit: int, tp: int, ep: int, first: bool, last: bool) -> Way:
    """Of the units those alone that differ from the one before them, and the last: between them all grows evenly."""
    ends = ends_params(model, tp=tp, first=first, last=last)
    root = ends if first and last and model.tie_embeddings else ends_params(model, tp=tp, first=False, last=last)
    # other trainers' stages may have no layer
    units = stage_units(model, layers, per_unit=per_unit, tp=tp, ep=ep) or ((Weights(0), 0),)
    places, before, left, sent, gone = [], Weights(0), root, 0, 0
    for i, (unit, count) in reversed([*enumerate(units)]):
        ahead = units[i - 1][0].total if i else ends - root
        place = Place(unit, before, left, sent, ahead, gone / (len(layers) or 1),
                      (gone + count) / (len(layers) or 1))
        if i == 0 or not places or (unit, left, ahead) != (places[-1].unit, places[-1].left, places[-1].ahead):
            places.append(place)
        before, gone = before + unit, gone + count
        left, sent = unit.dense if ep * tp > 1 else unit.total, unit.total
    widest = max((widest_weight(model, layer, dims=ParallelDims(tp=tp, ep=ep))
                  for layer, _ in layer_kinds(model, layers.start, layers.stop)), default=0)
    is_tied = first and last and model.tie_embeddings
    return Way(root=root, places=tuple(places), begin=ends - root, total=before + Weights(ends), is_tied=is_tied,
               widest=widest, last=(root if is_tied else ends - root) or sent)
