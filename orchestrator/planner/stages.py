"""What one pipeline stage costs: compute per microbatch, and the communication that compute does not hide.

Called by the cost model for every stage of a layout. Overlap rules, as our trainer behaves; Software changes them:
- tp: the reduction of an input's gradient hides behind the gradients of the weights that it was multiplied with, unless
  a zero-bubble schedule puts these off; nothing else does, the next matmul needs the result.
- cp: a hop of keys and values hides behind the attention of the block before it; an all-gather does not.
- ep: nothing is hidden, experts wait for their tokens.
- pp: the timeline says what waits for messages.
- dp_shard: gathers hide behind the compute of their pass, except the first unit's; reductions hide behind the
  last microbatch's backward, except the last unit's. dp_replicate: as the reductions. ZeRO-1 gathers the updated
  weights behind the next step's first forward.
- what hides still slows the compute that hides it.
- on CPU nothing is hidden: the ranks' cores do the communication.
"""
import dataclasses
from dataclasses import dataclass

from jobs.spec.model import ModelSpec
from jobs.spec.parallel import ZERO_BUBBLE_SCHEDULES, Layout
from jobs.spec.training import TrainingSpec
from orchestrator.cluster import ClusterSpec
from orchestrator.planner import constants
from orchestrator.planner.communication import INPUTS_AGAIN, gather_passes, stage_transfers
from orchestrator.planner.chip import Chip
from orchestrator.planner.compute import LayerTimes, Shape, embedding_times, head_times, layer_times
from orchestrator.planner.plan import Transfer
from orchestrator.planner.software import Software
from orchestrator.planner.timeline import StageTimes
from orchestrator.planner.weights import stage_kinds


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCost:
    """One stage. Seconds per microbatch, but for the tail."""

    forward_s: float  # compute
    backward_s: float  # compute, recomputation included
    weights_s: float  # the part of backward_s that only the weights' gradients need
    exposed_forward_s: float  # communication that delays the forward
    exposed_backward_s: float
    send_s: float  # of one message to the next stage
    tail_s: float  # once per step: reductions that the last backward cannot hide
    told: tuple[Transfer, ...]  # exposed in full
    exposures_s: tuple[float, ...]  # of each, what compute does not hide

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        return tuple(dataclasses.replace(one, exposed_s=seconds) for one, seconds in zip(self.told, self.exposures_s))

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s

    @property
    def exposed_s(self) -> float:
        return self.exposed_forward_s + self.exposed_backward_s

    def times(self, *, sends: bool = True) -> StageTimes:
        return StageTimes(forward_s=self.forward_s + self.exposed_forward_s,
                          backward_s=self.backward_s + self.exposed_backward_s, weights_s=self.weights_s,
                          send_s=self.send_s if sends else 0.0)


def compute_times(model: ModelSpec, layout: Layout, *, stage: int, shape: Shape, chip: Chip,
                  software: Software) -> LayerTimes:
    """All layers of a stage and the ends of the model that it holds, one microbatch."""
    parts = [(count, layer_times(model, layer, shape=shape, chip=chip, software=software))
             for layer, count in stage_kinds(model, layout, stage)]
    if stage == 0:
        parts.append((1, embedding_times(model, shape=shape, chip=chip)))
    if stage == layout.num_stages - 1:
        parts.append((1, head_times(model, shape=shape, chip=chip)))
    return LayerTimes(forward_s=sum(n * one.forward_s for n, one in parts),
                      inputs_s=sum(n * one.inputs_s for n, one in parts),
                      weights_s=sum(n * one.weights_s for n, one in parts),
                      again_s=sum(n * one.again_s for n, one in parts),
                      attention_s=sum(n * one.attention_s for n, one in parts),
                      entries=tuple((n * states, n * covers_s) for n, one in parts for states, covers_s in one.entries))


def stage_cost(model: ModelSpec, layout: Layout, *, training: TrainingSpec, cluster: ClusterSpec, stage: int,
               shape: Shape, chip: Chip, software: Software, inner: bool = False) -> StageCost:
    """Raises nothing: any legal layout has a cost. `inner` leaves out what pp and data parallelism send."""
    compute = compute_times(model, layout, stage=stage, shape=shape, chip=chip, software=software)
    transfers = stage_transfers(model, layout, training=training, cluster=cluster, stage=stage, software=software,
                                inner=inner)
    exposed = [one.seconds for one in transfers]
    m = layout.num_microbatches
    slowed = [0.0, 0.0, 0.0]  # forward, backward, tail: what hiding costs the compute
    if cluster.device == "cuda":
        slowed = _hide_all(transfers, exposed, layout, stage=stage, compute=compute, software=software)
    by_phase = {"forward": slowed[0] * m, "backward": slowed[1] * m, "step": slowed[2]}
    for one, exposed_s in zip(transfers, exposed):
        if one.axis != "pp" or one.phase == "step":  # what waits for messages is the timeline's to say
            by_phase[one.phase] += exposed_s
    sends = [one.seconds / one.times for one in transfers if one.axis == "pp" and one.phase == "forward"]
    return StageCost(forward_s=compute.forward_s, backward_s=compute.backward_s, weights_s=compute.weights_s,
                     exposed_forward_s=by_phase["forward"] / m, exposed_backward_s=by_phase["backward"] / m,
                     send_s=sends[0] if sends else 0.0, tail_s=by_phase["step"], told=transfers,
                     exposures_s=tuple(exposed))


def _hide_all(transfers: tuple[Transfer, ...], exposed: list[float], layout: Layout, *, stage: int,
              compute: LayerTimes, software: Software) -> list[float]:
    """Set what is exposed of each transfer. Returns what the hidden part costs: per forward, per backward, per step."""
    m = layout.num_microbatches
    hidden = {"forward": 0.0, "backward": 0.0, "step": 0.0}
    alike: dict[tuple[str, str, str], list[int]] = {}
    for i, one in enumerate(transfers):
        alike.setdefault((one.axis, one.phase, one.op), []).append(i)

    def hide(chosen: list[int], *, covered_s: float, edges: int = 0) -> None:
        if not chosen:
            return
        total_s = sum(transfers[i].seconds for i in chosen)
        edge_s = edges * max(transfers[i].seconds / transfers[i].times for i in chosen)
        exposed_s = min(total_s, max(total_s - covered_s, edge_s))
        for i in chosen:
            share = transfers[i].seconds / total_s if total_s else 0.0
            exposed[i] = share * exposed_s
            hidden[transfers[i].phase] += transfers[i].seconds - exposed[i]

    def of(*axes: str, phase: str, op: str | None = None) -> list[int]:
        return [i for (axis, when, how), found in alike.items()
                if axis in axes and when == phase and op in (None, how) for i in found]

    passes = dict(zip(("forward", "backward"), gather_passes(layout, stage=stage)))
    for phase, covers_s in (("forward", compute.forward_s), ("backward", compute.backward_s)):
        if software.overlaps_data_parallel:
            gathers = of("dp_shard", phase=phase, op="all_gather")
            hide(gathers, covered_s=passes[phase] * covers_s, edges=passes[phase])
            # reductions of every microbatch
            every = [i for i in of("dp_shard", "dp_replicate", phase=phase) if i not in gathers]
            hide(every, covered_s=m * covers_s, edges=m)
        attention_s = compute.attention_s * (1 if phase == "forward" else 2)
        hide(of("cp", phase=phase, op="send_recv"), covered_s=m * attention_s)
        if phase == "backward" and software.overlaps_input_gradients and layout.schedule not in ZERO_BUBBLE_SCHEDULES:
            op = "reduce_scatter" if layout.sequence_parallel else "all_reduce"
            entering = of("tp", phase=phase, op=op)
            once_s = max((transfers[i].seconds / transfers[i].times for i in entering), default=0.0)
            covers = [m * min(states * once_s, seconds) for states, seconds in compute.entries]
            hide(entering, covered_s=sum(covers))
            # their gather goes behind the input's gradient, which is as many operations as the weights'; the output
            # projection, last in the last stage, keeps its input
            again = [i for i in of("tp", phase=phase, op="all_gather") if transfers[i].what == INPUTS_AGAIN]
            hide(again, covered_s=sum(covers[:-1] if stage == layout.num_stages - 1 else covers))
        if software.overlaps_tensor_parallel:
            total_s = sum(transfers[i].seconds for i in of("tp", phase=phase))
            hide(of("tp", phase=phase), covered_s=constants.HIDDEN_TENSOR_PARALLEL * total_s)
        if software.overlaps_experts:
            total_s = sum(transfers[i].seconds for i in of("ep", phase=phase))
            hide(of("ep", phase=phase), covered_s=constants.HIDDEN_EXPERTS * total_s)
    if software.overlaps_data_parallel:
        gathers = of("dp_shard", phase="step", op="all_gather")
        hide(gathers, covered_s=compute.forward_s, edges=1)
        reductions = [i for i in of("dp_shard", "dp_replicate", phase="step") if i not in gathers]
        hide(reductions, covered_s=compute.backward_s, edges=1)
    slowdown = constants.OVERLAP_SLOWDOWN - 1
    return [slowdown * hidden["forward"] / m, slowdown * hidden["backward"] / m, slowdown * hidden["step"]]
