"""Plan: the chosen layout, what it is predicted to cost, and why the others lost.

Made by the planner's search, read by placement, assembly, the CLI and the run's report; stored as
plan.json. Data only: no formula lives here, and no rank ever reads it.
"""
from dataclasses import dataclass
from typing import Any, Literal

from jobs.spec.load import SpecError, from_dict, to_dict
from jobs.spec.model import AttentionConvention
from jobs.spec.parallel import AXES, Layout, ParallelDims

GIB = 2**30
Link = Literal["intra_node", "inter_node"]


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
    """Peak bytes of one rank of one pipeline stage, by what they are for."""

    stage: int
    layers: int
    in_flight: int  # microbatches whose activations are held at once
    parameters_bytes: int  # float32 master shard
    gradients_bytes: int  # shard, and the unsharded sum while microbatches accumulate
    optimizer_bytes: int
    gathered_bytes: int  # FSDP units unsharded at the same time
    activations_bytes: int
    logits_bytes: int

    @property
    def total_bytes(self) -> int:
        return (self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes + self.gathered_bytes
                + self.activations_bytes + self.logits_bytes)

    @property
    def total_gib(self) -> float:
        return self.total_bytes / GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """One kind of collective of one rank: who, how much, how often, over which link, at what cost."""

    axis: str
    op: Literal["all_reduce", "all_gather", "reduce_scatter", "send_recv"]
    what: str
    ranks: int  # in the group
    payload_bytes: int  # of one operation: the full tensor, before it is divided among the ranks
    times: int  # per step, on the rank of the heaviest stage
    link: Link
    seconds: float  # all `times` of a step
    exposed_s: float  # the part that compute cannot hide

    @property
    def wire_bytes(self) -> float:
        """Bytes that one rank sends per step with ring algorithms."""
        share = (self.ranks - 1) / self.ranks
        factor = {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share, "send_recv": 1.0}[self.op]
        return factor * self.payload_bytes * self.times


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
    memory_gib: float  # heaviest stage
    memory_stage: int
    memory_limit_gib: float  # of the GPU, less the headroom


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
class Plan:
    job: PlannedJob
    layout: Layout
    predicted: Prediction
    memory: tuple[StageMemory, ...]  # one entry per stage
    communication: tuple[Transfer, ...]
    candidates: int  # legal layouts that were priced
    search_s: float
    rejected: tuple[Rejected, ...]  # fastest of the losers, then the fastest of those that do not fit
    refused: tuple[Refusal, ...]  # illegal layouts, by rule


def layout_from_flat(flat: dict[str, Any]) -> Layout:
    """The inverse of Layout.flat(). Raises SpecError for unknown or missing keys."""
    rest = dict(flat)
    dims = {axis: rest.pop(axis) for axis in AXES if axis in rest}
    if "mesh_order" in rest:
        dims["order"] = rest.pop("mesh_order")
    return from_dict(Layout, rest | {"dims": to_dict(from_dict(ParallelDims, dims, origin="layout"))}, origin="layout")


def plan_json(plan: Plan) -> dict[str, Any]:
    """The published form (`orc plan --json`, plan.json)."""
    data = to_dict(plan)
    data["layout"] = plan.layout.flat()
    data["rejected"] = [to_dict(r) | {"layout": r.layout.flat()} for r in plan.rejected]
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
    # derived figures are for readers of the file; they are computed again, not read
    data["memory"] = [{k: v for k, v in entry.items() if k != "total_bytes"} for entry in data["memory"]]
    data["communication"] = [{k: v for k, v in entry.items() if k != "wire_bytes"} for entry in data["communication"]]
    return from_dict(Plan, data, origin="plan.json")
