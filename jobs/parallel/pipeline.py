"""How the microbatches of one step flow: a loop on one stage, or one of six schedules over several.

Called by jobs.parallel; the trainer sees `forward_backward` only. Schedules are torch.distributed.pipelining's:
gpipe (arXiv:1811.06965), 1f1b (2006.09503), interleaved_1f1b (2104.04473), interleaved_zero_bubble and zbv
(2401.10241), dualpipev (2412.19437). The last three split backward in two, gradients of inputs and of weights; with
recompute they do not: the first half is all of it, or torch would recompute a layer once for each of its weights.
No computation waits for a send; receives are posted as early as they can be without ranks waiting for each other.

Collectives over pp, per microbatch; A = microbatch_size·seq_len/cp·dim·bytes(param_dtype), divided by tp under
sequence parallelism:

    op            from → to                 bytes   when
    send / recv   stage s → s+1             A       forward; nothing where both are on one rank (the turn of a V)
    send / recv   stage s+1 → s             A       backward, the same
    send / recv   first ↔ last              4·vocab·dim/(tp·fsdp)   once per step, tied embeddings only, and not where
                                            both are on one rank (zbv, dualpipev); fsdp = dp_shard·cp
"""
import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (PipelineStage, ScheduleDualPipeV, ScheduleInterleaved1F1B,
                                          ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble)
# what torch makes its schedules of several stages from
from torch.distributed.pipelining.schedules import (RESHARD, UNSHARD, _Action, _add_reduce_grad, _add_send_recv,
                                                    _ComputationType, _PipelineScheduleRuntime)

from jobs.parallel.buckets import Buckets
from jobs.parallel.forwards import forwards_of
from jobs.parallel.stage import Stage
from jobs.spec.parallel import Layout
from jobs.spec.training import TrainingSpec

Shapes = tuple[Tensor, Tensor, Tensor]  # of a microbatch, on meta: token ids, what passes between stages, logits
Loss = Callable[[Tensor, Tensor], Tensor]  # logits, targets of a microbatch → its share of the step's loss


class OneStage(_PipelineScheduleRuntime):
    """Schedules of one stage per rank. torch's own post a receive when its message is needed, and wait for what they
    have sent; this runs the same order as the schedules of several stages are run. `in_turn`: forwards and backwards
    alternate, behind as many forwards as it takes until the first gradient is back; else all forwards come first."""

    def __init__(self, stages: list[PipelineStage], num_microbatches: int, *, in_turn: bool, **options: Any) -> None:
        super().__init__(stages, num_microbatches, **options)
        last = self._num_stages - 1
        order = {rank: _add_reduce_grad(_order(rank, num_microbatches, ahead=last - rank if in_turn else
                                               num_microbatches), num_microbatches) for rank in range(last + 1)}
        self._prepare_schedule_with_comms(_add_send_recv(order, stage_to_rank=lambda stage: stage, num_stages=last + 1),
                                          format="compute_comms")


def _order(rank: int, num_microbatches: int, *, ahead: int) -> list[_Action]:
    """`ahead`: forwards before the first that a backward follows."""
    forwards, backwards = ([_Action(rank, kind, i) for i in range(num_microbatches)]
                           for kind in (_ComputationType.FORWARD, _ComputationType.FULL_BACKWARD))
    in_turn = [action for pair in zip(forwards[ahead:], backwards) for action in pair]
    return forwards[:ahead] + in_turn + backwards[len(in_turn) // 2:]


SCHEDULES = {
    "gpipe": functools.partial(OneStage, in_turn=False),
    "1f1b": functools.partial(OneStage, in_turn=True),
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


class Schedule(Protocol):
    def forward_backward(self, inputs: Tensor | None, targets: Tensor | None, sequences: dict[str, Tensor]) -> Tensor:
        """All microbatches of a step, [num_microbatches·microbatch_size, seq/cp]; leaves the gradients in place.
        `sequences`: further arguments of the model by name, [num_microbatches·microbatch_size] each.

        Returns this rank's share of the step's loss, a scalar; zero on all but the last stage."""

    def evaluate(self, inputs: Tensor | None, targets: Tensor | None, sequences: dict[str, Tensor]) -> Tensor:
        """The same loss, of forward passes alone; to be called under no_grad."""


class MicrobatchLoop:
    """One stage: forward and backward of one microbatch after the other."""

    def __init__(self, model: nn.Module, *, layout: Layout, loss: Loss, buckets: Buckets | None) -> None:
        self.model = model
        self.loss = loss
        self.buckets = buckets
        self.microbatch_size = layout.microbatch_size
        self.reduce_every_microbatch = layout.reduce_every_microbatch

    def forward_backward(self, inputs: Tensor | None, targets: Tensor | None, sequences: dict[str, Tensor]) -> Tensor:
        microbatches = list(zip(inputs.split(self.microbatch_size), targets.split(self.microbatch_size), strict=True))
        total = torch.zeros((), device=inputs.device)
        for i, (tokens, wanted) in enumerate(microbatches):
            if isinstance(self.model, FSDPModule):
                is_last = i == len(microbatches) - 1
                self.model.set_is_last_backward(is_last)
                self.model.set_requires_gradient_sync(is_last or self.reduce_every_microbatch)
            loss = self._loss(i, tokens, wanted, sequences)
            loss.backward()
            if self.buckets is not None:
                self.buckets.backward_done(0)
            total += loss.detach()
        return total

    def evaluate(self, inputs: Tensor | None, targets: Tensor | None, sequences: dict[str, Tensor]) -> Tensor:
        microbatches = zip(inputs.split(self.microbatch_size), targets.split(self.microbatch_size), strict=True)
        return sum(self._loss(i, tokens, wanted, sequences) for i, (tokens, wanted) in enumerate(microbatches))

    def _loss(self, microbatch: int, tokens: Tensor, wanted: Tensor, sequences: dict[str, Tensor]) -> Tensor:
        rows = slice(microbatch * self.microbatch_size, (microbatch + 1) * self.microbatch_size)
        return self.loss(self.model(tokens, **{name: value[rows] for name, value in sequences.items()}), wanted)


def _no_second_half() -> Callable[[], None]:
    return lambda: None


class Pipeline:
    """This rank's stages of a pipeline."""

    def __init__(self, model_parts: tuple[nn.Module, ...], *, shapes: Shapes, mesh: DeviceMesh, layout: Layout,
                 loss: Loss, buckets: Buckets | None, device: torch.device) -> None:
        self.device = device
        self.holds_first, self.holds_last = model_parts[0].is_first, model_parts[-1].is_last
        tokens, hidden, logits = shapes
        # Shapes are given, not inferred: inference would cost a round of object messages through all stages.
        self.stages = [
            Stage(part, index, layout.num_stages, device, input_args=tokens if part.is_first else hidden,
                  output_args=logits if part.is_last else hidden, group=mesh.get_group("pp"),
                  dw_builder=None if layout.recompute == "none" else _no_second_half, buckets=buckets, part=i,
                  reduce_every_microbatch=layout.reduce_every_microbatch)
            for i, (part, index) in enumerate(zip(model_parts, layout.stages(mesh.get_local_rank("pp")), strict=True))]
        # scale_grads: the loss is already a share of the whole
        self.schedule = SCHEDULES[layout.schedule](self.stages, layout.num_microbatches, loss_fn=loss,
                                                   scale_grads=False, backward_requires_autograd=False)  # evaluate()
        # Taken as gathered: FSDP's hooks do that unit by unit. torch would gather whole stages, and of more than three
        # on a rank drop one for another, to gather it again for the next microbatch.
        self.schedule.unsharded_stages.update(stage.stage_index for stage in self.stages)
        for order in self.schedule.pipeline_order_with_comms.values():
            order[:] = [action for action in order if action.computation_type not in (UNSHARD, RESHARD)]
        self.order = self.schedule.pipeline_order_with_comms
        self.forwards = {rank: forwards_of(order) for rank, order in self.order.items()}

    def forward_backward(self, inputs: Tensor | None, targets: Tensor | None, sequences: dict[str, Tensor]) -> Tensor:
        args = (inputs,) if self.holds_first else ()
        losses: list[Tensor] = []
        if self.holds_last:
            self.schedule.step(*args, target=targets, losses=losses, return_outputs=False, **sequences)
        else:
            self.schedule.step(*args, return_outputs=False, **sequences)
        return torch.stack(losses).detach().sum() if losses else torch.zeros((), device=self.device)

    def evaluate(self, inputs: Tensor | None, targets: Tensor | None, sequences: dict[str, Tensor]) -> Tensor:
        self.schedule.pipeline_order_with_comms = self.forwards
        loss = self.forward_backward(inputs, targets, sequences)
        self.schedule.pipeline_order_with_comms = self.order
        for stage in self.stages:
            stage.clear_runtime_states()  # the last microbatch's logits
        return loss


def boundary_shapes(*, hidden: tuple[int, ...], vocab_size: int, layout: Layout, training: TrainingSpec,
                    splits_logits: bool = True) -> Shapes:
    """Of one microbatch, on meta: token ids; what passes between stages (`hidden`: of one token); logits. The last two
    require grad, or torch would send no gradient back."""
    tp, batch = layout.dims.tp, layout.microbatch_size
    dtype = getattr(torch, training.param_dtype)
    seq = training.seq_len // layout.dims.cp
    tokens = torch.empty(batch, seq, dtype=torch.int64, device="meta")
    passed = torch.empty(batch, seq // tp if layout.sequence_parallel else seq, *hidden, dtype=dtype, device="meta",
                         requires_grad=True)
    logits = torch.empty(batch, seq, vocab_size // tp if splits_logits else vocab_size, dtype=dtype, device="meta",
                         requires_grad=True)
    return tokens, passed, logits


def sum_tied_gradients(grads: list[Tensor], *, mesh: DeviceMesh, is_first: bool) -> None:
    """Tied embeddings live on the first and the last stage: both add the other's gradient to their own.

    `grads`: this rank's shards, of one end or (in a V) of both. Each rank talks to the one of its
    own coordinate on all other axes, whose shard is the same. Two addends commute exactly, so both copies stay equal
    bit for bit, step after step.
    """
    if len(grads) == 2:
        grads[0] += grads[1]
        grads[1].copy_(grads[0])
        return
    group = mesh.get_group("pp")
    other = torch.empty_like(grads[0])
    peer = group.size() - 1 if is_first else 0
    ops = [dist.P2POp(dist.isend, grads[0], group=group, group_peer=peer),
           dist.P2POp(dist.irecv, other, group=group, group_peer=peer)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    grads[0] += other
