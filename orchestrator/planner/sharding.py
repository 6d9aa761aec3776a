"""What data parallelism sends: gathers of parameters and reductions of gradients, by ZeRO stage and unit.

Called by communication for every stage; `gather_passes` by the cost model. The formulas are those of
jobs.parallel.data and jobs.parallel.buckets.
"""
import collections
import functools

from jobs.spec.model import ModelSpec
from jobs.spec.parallel import Layout, Schedule
from orchestrator.planner.book import Book
from orchestrator.planner.schedules import order
from orchestrator.planner.units import stage_units, way_of


def gather_passes(layout: Layout, *, stage: int) -> tuple[int, int]:
    """In how many forwards and backwards of a step FSDP has to gather a unit of `stage`.

    Under zero_stage=3 in every one of both; under a pipeline torch keeps units gathered from one microbatch's backward
    to the next forward, so only forwards that do not follow a backward gather, and of the backwards those that follow a
    forward. Else in none: weights are gathered after the update."""
    m, pp = layout.num_microbatches, layout.dims.pp
    if not layout.shards_weights:
        return 0, 0
    if layout.num_stages == 1:
        return m, m
    return _pipelined_gathers(layout.schedule, stage=stage, pp=pp, virtual_stages=layout.virtual_stages,
                              num_microbatches=m)


@functools.lru_cache(maxsize=4096)
def _pipelined_gathers(schedule: Schedule, *, stage: int, pp: int, virtual_stages: int,
                       num_microbatches: int) -> tuple[int, int]:
    m = num_microbatches
    if schedule == "gpipe":
        return m, 1
    if schedule == "1f1b":
        warmup = min(m, pp - stage)
        return warmup, m - warmup + 1
    few = (2 * virtual_stages + 2) * pp
    run = m if m <= few else few + m % pp
    rank = min(stage, 2 * pp - 1 - stage) if schedule in ("zbv", "dualpipev") else stage % pp
    forwards = backwards = 0
    gathered = False
    for action in order(schedule, rank=rank, pp=pp, virtual_stages=virtual_stages, num_microbatches=run):
        if action.stage != stage or action.kind == "W":
            continue
        if action.kind == "F":
            forwards += not gathered
            gathered = False
        else:
            backwards += not gathered
            gathered = True
    return forwards, backwards + m - run


def data_parallel(book: Book) -> None:
    """Over fsdp = dp_shard·cp gather parameters and scatter gradients; over dp_replicate then all-reduce the shard of
    the gradient (HSDP). Units: layers_per_unit layers, the embedding, norm with output. ZeRO-1 and 2 gather after
    the update instead. Experts are shared by fewer ranks, edp, and have their own."""
    model, dims, way = book.model, book.dims, way_of(book.model, book.layout, book.stage)
    units = [weights for weights, _ in stage_units(model, book.layout.layers(book.stage), tp=dims.tp, ep=dims.ep,
                                                   per_unit=book.layout.layers_per_unit)]
    kinds = {weights.experts > 0 for weights in units}
    for weights, count in collections.Counter(units).items():
        with_rest = dims.ep == dims.tp == 1  # experts are shared by the same ranks as the rest, and go with it
        kept = 1 if book.last and weights == units[-1] else 0  # the model's last unit of layers stays gathered
        what = "layers" if len(kinds) == 1 else "expert layers" if weights.experts else "dense layers"
        _unit(book, what, weights.total if with_rest else weights.dense, units=count, kept=kept)
        if not with_rest:
            _unit(book, "experts", weights.experts, units=count, kept=kept, group="edp")
    _unit(book, "embedding", way.begin, units=1, kept=0)
    _unit(book, "norm and output", way.root, units=1, kept=1)


def _unit(book: Book, what: str, params: float, *, units: int, kept: int, group: str = "fsdp") -> None:
    """The collectives of `units` like units of `params` weights, `kept` of which stay gathered through a forward and
    the backward that begins behind it."""
    if params == 0:
        return
    layout, ranks = book.layout, max(1, book.group(group).ranks)
    messages = _tensors(model=book.model) if book.software.collectives_by_tensor else 1
    gather = {"payload_bytes": book.element * params, "group": group, "messages": messages}
    if not layout.shards_weights:
        book.add("dp_shard", "all_gather", f"{what}: weights", times=units, **gather)
    else:
        forwards, backwards = gather_passes(layout, stage=book.stage)
        alone = forwards if layout.num_stages == 1 else 1  # forwards in which a kept unit is gathered
        book.add("dp_shard", "all_gather", f"{what}: weights", phase="forward",
                 times=(units - kept) * forwards + kept * alone, **gather)
        book.add("dp_shard", "all_gather", f"{what}: weights", phase="backward", times=(units - kept) * backwards,
                 **gather)
    often = book.m if layout.shards_gradients else 1
    book.add("dp_shard", "reduce_scatter", f"{what}: gradients", payload_bytes=book.reduced * params, group=group,
             times=units * often, phase="backward" if often > 1 else "step", messages=messages)
    book.add("dp_replicate", "all_reduce", f"{what}: gradients", payload_bytes=book.reduced * params / ranks,
             times=units * (often if layout.shards_weights else 1), messages=messages)


def _tensors(*, model: ModelSpec) -> int:
    """Parameters of a layer: matrices (queries, keys and values in one, gate and up in one) and norms, with biases."""
    return 12 if model.bias else 6
