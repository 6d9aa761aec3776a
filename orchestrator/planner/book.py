"""The list that the transfers of one stage are collected in, and what all of them are computed from.

Used by communication and sharding. It turns a payload and a count into seconds on the link that the axis crosses.
"""
from jobs.spec.model import ModelSpec
from jobs.spec.parallel import Layout
from jobs.spec.training import DTYPE_BYTES, TrainingSpec
from orchestrator.cluster import ClusterSpec
from orchestrator.planner.links import Group, collective_s, placed_group, send_recv_s
from orchestrator.planner.plan import Op, Phase, Transfer
from orchestrator.planner.software import Software
from orchestrator.planner.weights import stage_kinds


class Book:
    """Collects the transfers of one stage, and holds what all of them are computed from."""

    def __init__(self, model: ModelSpec, layout: Layout, *, training: TrainingSpec, cluster: ClusterSpec, stage: int,
                 software: Software) -> None:
        self.model, self.layout, self.training, self.cluster = model, layout, training, cluster
        self.dims, self.software, self.stage = layout.dims, software, stage
        self.first, self.last = stage == 0, stage == layout.num_stages - 1
        self.layers = layout.layers_per_stage[stage]
        self.kinds = stage_kinds(model, layout, stage)
        self.m = layout.num_microbatches
        self.element = DTYPE_BYTES[training.param_dtype]
        self.reduced = DTYPE_BYTES[training.reduce_dtype]
        self.tokens = training.seq_len // layout.dims.cp * layout.microbatch_size
        self.transfers: list[Transfer] = []
        self.groups: dict[str, Group] = {}  # by axis: looked up once

    @property
    def moe_layers(self) -> int:
        return sum(count for layer, count in self.kinds if self.model.is_moe(layer))

    def group(self, name: str) -> Group:
        if name not in self.groups:
            self.groups[name] = placed_group(self.dims, name, cluster=self.cluster)
        return self.groups[name]

    def add(self, axis: str, op: Op, what: str, *, payload_bytes: float, times: float, phase: Phase = "step",
            group: str | None = None, messages: int = 1) -> None:
        if times == 0:
            return
        placed = self.group(group or axis)
        if placed.ranks == 1:
            return
        if op == "send_recv":
            once = send_recv_s(payload_bytes, placed, cluster=self.cluster)
        else:
            once = collective_s(op, payload_bytes, placed, cluster=self.cluster, ports=self.software.ports,
                                messages=messages)
        seconds = once * times
        self.transfers.append(Transfer(axis=axis, op=op, what=what, ranks=placed.ranks, times=int(times), phase=phase,
                                       payload_bytes=int(payload_bytes), link=placed.link, seconds=seconds,
                                       exposed_s=seconds))


def hidden_bytes(model: ModelSpec, layout: Layout, *, training: TrainingSpec) -> float:
    """One microbatch's hidden state [batch, seq/cp, dim], whole."""
    element = DTYPE_BYTES[training.param_dtype]
    return element * layout.microbatch_size * (training.seq_len // layout.dims.cp) * model.dim
