"""`orc verify`: what ranks of a plan really need and send, before a GPU hour is spent, held against the prediction.

Called by the CLI. The step itself runs in processes of its own (`python -m jobs.verify`), which may import torch; here
their reports are compared with what memory and communication predict for the same ranks.
"""
import json
import os
import tempfile
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from jobs.spec.job import JobSpec
from jobs.spec.load import Problem, SpecError, from_dict, to_dict
from jobs.spec.own_model import OwnModel
from jobs.spec.parallel import Layout
from jobs.spec.verification import MEMORY, SHARED, RankReport
from orchestrator.config import RunConfig
from orchestrator.placement import place
from orchestrator.planner import Plan, own_cost
from orchestrator.planner.communication import stage_transfers
from orchestrator.planner.memory import stage_memory
from orchestrator.planner.own_memory import OwnQuestion
from orchestrator.planner.plan import GIB, StageMemory, Transfer
from orchestrator.planning_own import ask, own_question
from orchestrator.submission.assemble import assemble_job

MEMORY_TOLERANCE = 0.10
BYTES_TOLERANCE = 0.02
SCALAR_BYTES = 8  # messages of one number, the loss and the gradient's norm, are no part of a plan
# What all stages of a rank send in one message, of which the plan's list of each stage has its part.
ONE_PER_RANK = ("gradients of what is not split", "balance: load")
# Of a model of a few MiB these are most: seeds, counts, losses, positions and masks, which no plan lists, are a few
# tensors of one number per token each. Less than half a per mille of the smallest GPU known to the planner.
SMALL_PRINT_BYTES = 16 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One figure as it was planned and as it is; of messages also how many there are."""

    what: str
    planned_bytes: int
    measured_bytes: int
    planned_times: int = 0
    measured_times: int = 0

    @property
    def error(self) -> float:
        """Of the measured; negative where the plan asked for too little."""
        return (self.planned_bytes - self.measured_bytes) / max(1, self.measured_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifiedRank:
    """One rank: `memory` by purpose, `total` of it, `axes` of what is communicated per step."""

    report: RankReport
    memory: tuple[Compared, ...]
    total: Compared
    unseen_bytes: int  # buffers of NCCL, which the plan charges and no tensor shows
    axes: tuple[Compared, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """`failed`: ranks whose step did not run, and why."""

    layout: Layout
    world_size: int
    limit_bytes: int
    ranks: tuple[VerifiedRank, ...]
    failed: tuple[str, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        return self.failed + tuple(problem for rank in self.ranks for problem in rank.problems)


def verify(config: RunConfig, plan: Plan, *, ranks: tuple[int, ...] = ()) -> Verification:
    """Run the first step of `ranks` (none: one of the first, a middle and the last pipeline rank) and compare. Raises
    SpecError for a rank that does not exist."""
    layout, world = plan.layout, plan.layout.dims.world_size
    place(layout, cluster=config.cluster, nodes=tuple(f"node-{i}" for i in range(config.cluster.num_nodes)),
          spares=config.placement.spares, excluded=(), allow_tp_across_nodes=config.placement.allow_tp_across_nodes)
    if wrong := [rank for rank in ranks if not 0 <= rank < world]:
        raise SpecError([Problem(where="--ranks", value=wrong[0], message=f"is no rank of {world}; try 0 to "
                                 f"{world - 1}")])
    job = assemble_job(config, layout=layout, world_size=world, run_dir=config.run_dir, attempt=1, resume_step=None)
    chosen = ranks or telling_ranks(layout)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(to_dict(job)))
        answers = list(pool.map(lambda rank: _ask(path, rank), chosen))
    own = own_question(config, (1, layout.dims.tp)) if isinstance(config.model, OwnModel) else None
    limit = int(plan.predicted.memory_limit_gib * GIB)
    return Verification(
        layout=layout, world_size=world, limit_bytes=limit,
        ranks=tuple(compare(answer, job=job, config=config, limit_bytes=limit, own=own) for answer in answers
                    if isinstance(answer, RankReport)),
        failed=tuple(f"{rank_name(layout, rank)}: {answer}" for rank, answer in zip(chosen, answers)
                     if isinstance(answer, str)))


def parse_ranks(text: str) -> tuple[int, ...]:
    """"0,17" → (0, 17). Raises SpecError."""
    try:
        return tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        raise SpecError([Problem(where="--ranks", value=text, message="is no list of ranks; try 0,17")]) from None


def telling_ranks(layout: Layout) -> tuple[int, ...]:
    """The first rank of the first, a middle and the last pipeline rank."""
    pp = layout.dims.pp
    return tuple(layout.dims.rank(pp=at) for at in sorted({0, pp // 2, pp - 1}))


def rank_name(layout: Layout, rank: int) -> str:
    here = layout.dims.coordinate(rank)
    stages = ", ".join(map(str, layout.stages(here["pp"])))
    where = " ".join(f"{axis}={index}" for axis, index in here.items() if getattr(layout.dims, axis) > 1)
    return f"rank {rank} ({where or 'alone'}; stage {stages} of {layout.num_stages})"


def _ask(job: Path, rank: int) -> RankReport | str:
    """The rank's report, or the last line of what went wrong."""
    answer = ask("jobs.verify", str(job), str(rank))
    return answer if isinstance(answer, str) else from_dict(RankReport, answer, origin="jobs.verify")


# ------------------------------------------------------------------ against the plan
def compare(report: RankReport, *, job: JobSpec, config: RunConfig, limit_bytes: int,
            own: OwnQuestion | None = None) -> VerifiedRank:
    """The report of one rank beside what the plan says of it; `own`: of a model of the user's own."""
    if own is not None:
        planned = own_cost.stage_memory(own, job.layout, report.coordinate["pp"])
        transfers = [one for stage in report.stages for one in own_cost.stage_transfers(own, job.layout, stage)]
    else:
        planned = stage_memory(job.model, job.layout, training=job.training, stage=report.coordinate["pp"],
                               device=job.device)
        transfers = [one for stage in report.stages for one in stage_transfers(
            job.model, job.layout, training=job.training, cluster=config.cluster, stage=stage)]
    unseen = planned.communication_bytes
    total = Compared(what="memory", planned_bytes=planned.total_bytes - unseen, measured_bytes=report.total_bytes)
    axes = _axes(report, transfers)
    problems = [*_memory_problems(report, total, unseen_bytes=unseen, limit_bytes=limit_bytes),
                *(f"{row.what} moves {row.measured_bytes:,} bytes per step, the plan says {row.planned_bytes:,} "
                  f"({row.error:+.1%})" for row in axes if abs(row.error) > BYTES_TOLERANCE),
                *(f"{row.what} sends {row.measured_times:,} messages per step, the plan says {row.planned_times:,} of "
                  "the same bytes" for row in axes if abs(row.error) <= BYTES_TOLERANCE and
                  row.planned_times != row.measured_times)]
    return VerifiedRank(report=report, memory=_memory(report, planned), total=total, unseen_bytes=unseen, axes=axes,
                        problems=tuple(f"{rank_name(job.layout, report.rank)}: {problem}" for problem in problems))


def _memory(report: RankReport, planned: StageMemory) -> tuple[Compared, ...]:
    """Logits are activations here: no tensor says what it is called."""
    said = {name: getattr(planned, f"{name}_bytes") for name in MEMORY}
    said["activations"] += planned.logits_bytes
    return tuple(Compared(what=name, planned_bytes=said[name], measured_bytes=report.peak_bytes[name])
                 for name in MEMORY)


def _axes(report: RankReport, transfers: list[Transfer]) -> tuple[Compared, ...]:
    """By axis, or by axes that have one group. Of the messages that all stages of a rank share the plan says each
    stage's part: they count once."""
    seen = [one for one in report.collectives if one.payload_bytes > SCALAR_BYTES]
    # of the groups that an axis has the one that most axes share: dp_shard·cp counts as dp_shard, and may be ep's, too
    by_sharers = sorted(seen, key=lambda one: one.axis.count(SHARED))
    label = {axis: one.axis for one in by_sharers if one.op != "all_to_all" for axis in one.axis.split(SHARED)}
    planned: dict[str, Counter] = defaultdict(Counter)
    measured: dict[str, Counter] = defaultdict(Counter)
    shared = set()
    for one in transfers:
        axis = one.axis if one.op == "all_to_all" else label.get(one.axis, one.axis)
        again = one.what in ONE_PER_RANK and (one.axis, one.what) in shared
        shared.add((one.axis, one.what))
        planned[axis] += Counter(bytes=one.payload_bytes * one.times, times=0 if again else one.times)
    for one in seen:
        axis = one.axis if one.op == "all_to_all" else label[one.axis.partition(SHARED)[0]]
        measured[axis] += Counter(bytes=one.payload_bytes * one.times, times=one.times)
    return tuple(Compared(what=axis, planned_bytes=planned[axis]["bytes"], measured_bytes=measured[axis]["bytes"],
                          planned_times=planned[axis]["times"], measured_times=measured[axis]["times"])
                 for axis in sorted({*planned, *measured}))


def _memory_problems(report: RankReport, total: Compared, *, unseen_bytes: int, limit_bytes: int) -> list[str]:
    found = []
    if abs(total.error) > MEMORY_TOLERANCE and abs(total.planned_bytes - total.measured_bytes) > SMALL_PRINT_BYTES:
        found.append(f"needs {total.measured_bytes / GIB:.2f} GiB, the plan says {total.planned_bytes / GIB:.2f} "
                     f"({total.error:+.1%})")
    needed = report.total_bytes + unseen_bytes
    if needed > limit_bytes:
        most = max(report.peak_bytes, key=report.peak_bytes.__getitem__)
        found.append(f"out of memory: needs {needed / GIB:.2f} GiB of {limit_bytes / GIB:.2f}, most of it {most} "
                     f"({report.peak_bytes[most] / GIB:.2f}); try {REMEDIES[most]}")
    return found


REMEDIES = {"parameters": "a higher dp_shard, tp or pp", "gradients": "a higher dp_shard, tp or pp, or "
            "reduce_every_microbatch=true", "optimizer": "a higher dp_shard", "gathered": "zero_stage=3, or fewer "
            "layers_per_unit", "activations": "a smaller microbatch_size, or recompute=selective or full"}
