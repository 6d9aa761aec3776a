"""plan for a model of the user's own: every layout that its plan table and the request allow, priced; the fastest that
fits.

Called by orchestrator.planning with what `python -m jobs.own.measure` has measured. Pure. The space is smaller than
that of our own models: cp and ep need seams that a plan table does not give, units are one block unless asked,
schedules other than 1f1b and gpipe only where asked.
"""
import itertools
import time
from collections.abc import Callable, Iterator

from jobs.spec.load import Problem
from jobs.spec.parallel import MESH_ORDER, VIRTUAL_STAGES, Layout, ParallelDims, split_layers
from jobs.spec.support import layout_problems
from orchestrator.request import ParallelRequest
from orchestrator.planner.cost import Priced
from orchestrator.planner.links import axis_group
from orchestrator.planner.own_cost import price
from orchestrator.planner.own_memory import OwnQuestion, stage_memory
from orchestrator.planner.plan import Plan, PlanError, PlannedJob
from orchestrator.planner.question import divisors
from orchestrator.planner.reasons import reject, too_big_by

SHOWN = 5  # losers, the fastest of other degrees


def plan_own(question: OwnQuestion, *, request: ParallelRequest, num_nodes: int, allow_tp_across_nodes: bool,
             clock: Callable[[], float] = time.perf_counter) -> Plan:
    """Raises PlanError with every reason if no layout is legal, or none fits."""
    started = clock()
    problems = _request_problems(question, request)
    if problems:
        raise PlanError(problems)
    world = (request.options("num_nodes") or (num_nodes,))[0] * question.cluster.gpus_per_node
    refused: dict[str, Problem] = {}
    layouts = list(_layouts(question, request, world=world, allow_tp_across_nodes=allow_tp_across_nodes,
                            refused=refused))
    if not layouts:
        raise PlanError(list(refused.values()) or [Problem(where="parallel", value=None, message=(
            f"asks for a layout that no {world} ranks with {question.profile.num_blocks} blocks have"))])
    priced = sorted((price(question, layout) for layout in layouts), key=lambda one: one.predicted.step_time_s)
    fitting = [one for one in priced if one.fits]
    if not fitting:
        least = min(priced, key=lambda one: one.predicted.memory_gib)
        raise PlanError([Problem(where="memory", value=None, message=f"no layout fits; the smallest, {least.layout}, "
                                 f"is {too_big_by(least)}; use more nodes, shorter sequences, or a smaller model")])
    return _plan(question, fitting, num_nodes=num_nodes, candidates=len(layouts), search_s=clock() - started)


def _plan(question: OwnQuestion, fitting: list[Priced], *, num_nodes: int, candidates: int, search_s: float) -> Plan:
    winner, training, cluster = fitting[0], question.training, question.cluster
    others: dict[tuple[int, ...], Priced] = {}
    for one in fitting:
        others.setdefault(one.layout.dims.shape, one)
    job = PlannedJob(model=question.model.name, num_params=question.profile.num_params, cluster=cluster.name,
                     num_nodes=num_nodes, gpus_per_node=cluster.gpus_per_node, gpu=cluster.gpu,
                     seq_len=training.seq_len, global_batch_size=training.global_batch_size,
                     param_dtype=training.param_dtype, headroom=question.headroom)
    losers = [one for shape, one in others.items() if shape != winner.layout.dims.shape][:SHOWN]
    return Plan(job=job, layout=winner.layout, predicted=winner.predicted, communication=winner.transfers,
                memory=tuple(stage_memory(question, winner.layout, rank) for rank in range(winner.layout.dims.pp)),
                candidates=candidates, priced=candidates, search_s=search_s, refused=(),
                rejected=tuple(reject(one, winner) for one in losers))


def _request_problems(question: OwnQuestion, request: ParallelRequest) -> list[Problem]:
    """Wishes that the model cannot meet."""
    found, profile = [], question.profile

    def refuse(where: str, value: object, message: str) -> None:
        found.append(Problem(where=f"parallel.{where}", value=value, message=message))

    for axis in ("cp", "ep"):
        if (wanted := request.options(axis)) and 1 not in wanted:
            refuse(axis, wanted[0], "needs a seam in the model that a plan table does not give; set 1")
    if (wanted := request.options("tp")) and not {m.tp for m in profile.measured} & set(wanted):
        refuse("tp", wanted[0], f"{profile.no_tp.get(wanted[0], 'was not measured')}; these can be: "
               f"{', '.join(str(tp) for tp in sorted({m.tp for m in profile.measured}))}")
    if profile.no_pp and (wanted := request.options("pp")) and 1 not in wanted:
        refuse("pp", wanted[0], f"cuts the model between blocks, but {profile.no_pp}; or set 1")
    if profile.no_sequence_parallel and request.options("sequence_parallel") == (True,):
        refuse("sequence_parallel", True, f"is not possible: {profile.no_sequence_parallel}; set false, or complete "
               "the plan table")
    return found


def _layouts(question: OwnQuestion, request: ParallelRequest, *, world: int, allow_tp_across_nodes: bool,
             refused: dict[str, Problem]) -> Iterator[Layout]:
    """Every legal layout. `refused` collects the first problem of each kind."""
    for dims in _dims(question, request, world=world):
        if not allow_tp_across_nodes and axis_group(dims, "tp", gpus_per_node=question.cluster.gpus_per_node).nodes > 1:
            refused.setdefault("nodes", Problem(where="parallel.tp", value=dims.tp, message="crosses nodes; set a "
                                                "degree that a node holds, or placement.allow_tp_across_nodes=true"))
            continue
        for layout in _variants(question, request, dims):
            if problems := layout_problems(layout):
                refused.setdefault(problems[0].where, problems[0])
            else:
                yield layout


def _dims(question: OwnQuestion, request: ParallelRequest, *, world: int) -> Iterator[ParallelDims]:
    order = tuple(request.mesh_order) if request.mesh_order != "auto" else MESH_ORDER
    for tp, pp in itertools.product(sorted({m.tp for m in question.profile.measured}), divisors(world)):
        if world % (tp * pp) or pp > (1 if question.profile.no_pp else question.profile.num_blocks):
            continue
        dp = world // (tp * pp)
        for shard in divisors(dp):
            dims = ParallelDims(dp_replicate=dp // shard, dp_shard=shard, tp=tp, pp=pp, order=order)
            if all(getattr(dims, axis) in (request.options(axis) or (getattr(dims, axis),))
                   for axis in ("dp_replicate", "dp_shard", "tp", "pp")):
                yield dims


def _variants(question: OwnQuestion, request: ParallelRequest, dims: ParallelDims) -> Iterator[Layout]:
    batch, blocks = question.training.global_batch_size, question.profile.num_blocks
    sequence = [s for s in (True, False) if dims.tp > 1 and s in (request.options("sequence_parallel") or (True, False))
                and any(m.tp == dims.tp and m.sequence_parallel == s for m in question.profile.measured)] or [False]
    schedules = request.options("schedule") or ("1f1b", "gpipe") if dims.pp > 1 else ("1f1b",)
    stages = request.options("zero_stage") or ((1, 2, 3) if dims.dp_shard > 1 else (3,))
    for size, sp, schedule, zero, recompute, unit in itertools.product(
            _microbatch_sizes(batch, dims, request), sequence, schedules, stages,
            request.options("recompute") or ("none", "selective", "full"), request.options("layers_per_unit") or (1,)):
        least = VIRTUAL_STAGES[schedule][0] if dims.pp > 1 else 1
        for virtual in (request.options("virtual_stages") or (least,)) if dims.pp > 1 else (1,):
            if dims.pp * virtual > blocks:
                continue
            split = split_layers(blocks, dims.pp * virtual)
            if request.layers_per_stage != "auto":
                split = tuple(request.layers_per_stage)
                if len(split) != dims.pp * virtual or sum(split) != blocks:
                    continue
            counts = request.options("num_microbatches") or (-(-batch // (size * dims.dp)),)
            for count, every in ((count, every) for count in counts
                                 for every in request.options("reduce_every_microbatch")
                                 or (zero == 2 and dims.fsdp > 1 and count > 1,)):  # without, ZeRO-2 is as ZeRO-1
                layout = Layout(dims=dims, microbatch_size=size, num_microbatches=count, layers_per_stage=split,
                                sequence_parallel=sp, schedule=schedule, virtual_stages=virtual, recompute=recompute,
                                zero_stage=zero, layers_per_unit=unit, reduce_every_microbatch=every)
                if layout.slots == batch or (layout.slots > batch and request.uneven_batch):
                    yield layout


def _microbatch_sizes(batch: int, dims: ParallelDims, request: ParallelRequest) -> tuple[int, ...]:
    share = -(-batch // dims.dp)
    return request.options("microbatch_size") or tuple(divisors(share))
