"""Plan: the chosen layout, what it is predicted to cost, and why the others lost.

Made by the planner's search, read by placement, assembly, the CLI and the run's report; stored as
plan.json. Data only: no formula lives here, and no rank ever reads it.
"""
from dataclasses import dataclass
from typing import Any, Literal

from jobs.spec.load import Problem, SpecError, from_dict, to_dict
from jobs.spec.model import AttentionConvention
from jobs.spec.parallel import AXES, MESH_ORDER, Layout, ParallelDims

GIB = 2**30
# Inside a node; NVLink that joins nodes; the network below one leaf switch; above it.
Link = Literal["intra_node", "nvlink_domain", "inter_node", "spine"]
Op = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]
Phase = Literal["forward", "backward", "step"]


class PlanError(SpecError):
    """No legal layout, or none that fits: `problems` holds every reason, each with its remedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedJob:
    """What the plan is for, in the figures a reader needs beside it."""

    model: str
    num_params: int
    cluster: str
    num_nodes: int
    gpus_per_node: int
    gpu: str
    seq_len: int
    global_batch_size: int
    param_dtype: str
    headroom: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """Peak bytes of one pipeline rank, by what they are for."""

    pp_rank: int  # its coordinate on pp: under virtual stages it holds several stages
    layers: int  # of all its stages
    in_flight: int  # microbatches whose activations are held at once
    parameters_bytes: int  # float32 master shard
    gradients_bytes: int  # shard, and the unsharded sum while microbatches accumulate
    optimizer_bytes: int
    gathered_bytes: int  # FSDP units unsharded at the same time
    activations_bytes: int
    logits_bytes: int
    communication_bytes: int = 0  # buffers that collectives and messages need beside their tensors

    @property
    def total_bytes(self) -> int:
        return (self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes + self.gathered_bytes
                + self.activations_bytes + self.logits_bytes + self.communication_bytes)

    @property
    def total_gib(self) -> float:
        return self.total_bytes / GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """One kind of collective of one rank: who, how much, how often, over which link, at what cost."""

    axis: str
    op: Op
    what: str
    ranks: int  # in the group
    payload_bytes: int  # of one operation: the full tensor, before it is divided among the ranks
    times: int  # per step, on the rank of the heaviest stage
    link: Link
    seconds: float  # all `times` of a step
    exposed_s: float  # the part that compute cannot hide
    phase: Phase = "step"  # forward and backward: with every microbatch; step: around the update

    @property
    def wire_bytes(self) -> float:
        """Bytes that one rank sends per step with ring algorithms."""
        share = (self.ranks - 1) / self.ranks
        factor = {"all_reduce": 2 * share, "send_recv": 1.0}.get(self.op, share)
        return factor * self.payload_bytes * self.times

    @property
    def moved_bytes(self) -> float:
        """Of the tensors that are communicated, however many ranks share the work: an all-gather or a reduce-scatter
        is half of the all-reduce that they make together."""
        return (0.5 if self.op in ("all_gather", "reduce_scatter") else 1.0) * self.payload_bytes * self.times


def alike(transfers: tuple[Transfer, ...], *fields: str) -> list[list[Transfer]]:
    """Those that agree in these fields together, in the order of the first of each."""
    groups: dict[tuple, list[Transfer]] = {}
    for one in transfers:
        groups.setdefault(tuple(getattr(one, field) for field in fields), []).append(one)
    return list(groups.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Per optimizer step. compute + exposed communication + bubble + optimizer = step time."""

    step_time_s: float
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float  # model FLOPs, under mfu_convention
    mfu: float
    mfu_convention: AttentionConvention
    hfu: float  # recomputed FLOPs included
    compute_s: float  # busiest stage
    exposed_communication_s: float
    bubble_s: float
    optimizer_s: float
    bubble_fraction: float  # of the pipeline's time: (p−1)/(m+p−1) for even stages
    memory_gib: float  # heaviest pipeline rank
    memory_pp_rank: int  # that rank's coordinate on pp
    memory_limit_gib: float  # of the GPU, less the headroom

    @property
    def serial_share(self) -> float:
        """Amdahl's s: the part of a step that is not compute (communication, bubble, update), which more ranks on the
        same work do not shorten."""
        return max(0.0, 1 - self.compute_s / self.step_time_s)

    @property
    def speedup_ceiling(self) -> float:
        """What Amdahl's law allows at most, however many ranks share the compute: 1/s."""
        return 1 / self.serial_share if self.serial_share > 0 else float("inf")

    def speedup(self, ranks: float) -> float:
        """Amdahl: 1/(s + (1 − s)/N), of `ranks` times as many ranks at the same work."""
        return 1 / (self.serial_share + (1 - self.serial_share) / ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """A legal layout that lost: too big (fits is False), or slower."""

    layout: Layout
    fits: bool
    step_time_s: float
    memory_gib: float
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """How many layouts broke one rule, with one of them as the example."""

    rule: str
    count: int
    example: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisEffect:
    """The best layout without an axis that the winner has, or with one that it has not."""

    axis: str
    value: int  # of the winner
    what: str  # "without tp", "with cp", "tp=16 crosses nodes"
    other: Rejected | None  # None: there is none
    change: float | None  # of the step time, as a share
    note: str  # why there is none


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    job: PlannedJob
    layout: Layout
    predicted: Prediction
    memory: tuple[StageMemory, ...]  # one entry per stage
    communication: tuple[Transfer, ...]
    candidates: int  # legal layouts
    search_s: float
    rejected: tuple[Rejected, ...]  # fastest of the losers, then the fastest of those that do not fit
    refused: tuple[Refusal, ...]  # illegal combinations, by rule
    priced: int = 0  # of the candidates; the others were shown to be slower without a price
    axes: tuple[AxisEffect, ...] = ()
    untrained: tuple[str, ...] = ()  # what of the layout and the model this version's trainer does not run


def layout_from_flat(flat: dict[str, Any]) -> Layout:
    """The inverse of Layout.flat(). Raises SpecError for unknown or missing keys, and for counts that are none."""
    rest = dict(flat)
    dims = {axis: rest.pop(axis) for axis in AXES if axis in rest}
    if "mesh_order" in rest:
        dims["order"] = rest.pop("mesh_order")
    nested = {"dims": to_dict(from_dict(ParallelDims, dims, origin="layout"))}
    layout = from_dict(Layout, rest | nested, origin="layout")
    counts = {name: value for name, value in flat.items() if isinstance(value, int) and not isinstance(value, bool)}
    counts |= {f"layers_per_stage[{i}]": count for i, count in enumerate(layout.layers_per_stage)}
    problems = [Problem(where=name, value=value, message="must be at least 1", origin="layout")
                for name, value in counts.items() if value < 1]
    if len(layout.layers_per_stage) != layout.num_stages or sorted(layout.dims.order) != sorted(MESH_ORDER):
        problems.append(Problem(where="layers_per_stage", value=list(layout.layers_per_stage), message="or mesh_order "
                                f"do not go with pp={layout.dims.pp} × virtual_stages={layout.virtual_stages}",
                                origin="layout"))
    if problems:
        raise SpecError(problems)
    return layout


def plan_json(plan: Plan) -> dict[str, Any]:
    """The published form (`orc plan --json`, plan.json)."""
    data = to_dict(plan)
    data["layout"] = plan.layout.flat()
    data["rejected"] = [to_dict(r) | {"layout": r.layout.flat()} for r in plan.rejected]
    for effect, entry in zip(plan.axes, data["axes"]):
        if effect.other is not None:
            entry["other"]["layout"] = effect.other.layout.flat()
    serial = plan.predicted.serial_share
    data["predicted"] |= {"serial_share": serial, "speedup_ceiling": 1 / serial if serial else None}
    for stage, entry in zip(plan.memory, data["memory"]):
        entry["total_bytes"] = stage.total_bytes
    for transfer, entry in zip(plan.communication, data["communication"]):
        entry["wire_bytes"] = transfer.wire_bytes
    return data


def plan_from_dict(data: dict[str, Any]) -> Plan:
    """The inverse of plan_json. Raises SpecError naming every problem."""
    def nested(entry: dict[str, Any]) -> dict[str, Any]:
        return entry | {"layout": to_dict(layout_from_flat(entry["layout"]))}

    data = nested(data)
    data["rejected"] = [nested(entry) for entry in data["rejected"]]
    data["axes"] = [entry | {"other": entry["other"] and nested(entry["other"])} for entry in data.get("axes", [])]
    # derived figures are for readers of the file; they are computed again, not read
    data["memory"] = [{k: v for k, v in entry.items() if k != "total_bytes"} for entry in data["memory"]]
    data["communication"] = [{k: v for k, v in entry.items() if k != "wire_bytes"} for entry in data["communication"]]
    data["predicted"] = {k: v for k, v in data["predicted"].items() if k not in ("serial_share", "speedup_ceiling")}
    plan = from_dict(Plan, data, origin="plan.json")
    problems = [Problem(where=f"job.{name}", value=getattr(plan.job, name), message="must be at least 1",
                        origin="plan.json") for name in ("num_nodes", "gpus_per_node", "seq_len", "global_batch_size")
                if getattr(plan.job, name) < 1]
    if problems:
        raise SpecError(problems)
    return plan
