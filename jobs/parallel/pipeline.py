"""How the microbatches of one step flow: a loop on one stage, 1F1B over several.

Called by jobs.parallel; the trainer sees `forward_backward` only.

Collectives over pp, per microbatch; A = microbatch_size·seq_len·dim·bytes(param_dtype), divided by tp
under sequence parallelism:

    op            from → to                 bytes   when
    send / recv   stage s → s+1             A       forward
    send / recv   stage s+1 → s             A       backward
    send / recv   first ↔ last              4·vocab·dim/(tp·dp_shard)   once per step, tied embeddings only
"""
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from jobs.mesh import axis_size, local_of
from jobs.model.transformer import Transformer
from jobs.spec.model import ModelSpec
from jobs.spec.parallel import Layout
from jobs.spec.training import TrainingSpec

Loss = Callable[[Tensor, Tensor], Tensor]  # logits, targets of a microbatch → its share of the step's loss


class Schedule(Protocol):
    def forward_backward(self, inputs: Tensor | None, targets: Tensor | None) -> Tensor:
        """All microbatches of a step, [num_microbatches·microbatch_size, seq]; leaves the gradients in place.

        Returns this rank's share of the step's loss, a scalar; zero on all but the last stage."""


class MicrobatchLoop:
    """One stage: forward and backward of one microbatch after the other, reducing gradients with the last."""

    def __init__(self, model: Transformer, *, layout: Layout, loss: Loss) -> None:
        self.model = model
        self.loss = loss
        self.microbatch_size = layout.microbatch_size
        self.reshard_after_forward = layout.reshard_after_forward

    def forward_backward(self, inputs: Tensor | None, targets: Tensor | None) -> Tensor:
        microbatches = list(zip(inputs.split(self.microbatch_size), targets.split(self.microbatch_size), strict=True))
        total = torch.zeros((), device=inputs.device)
        for i, (tokens, wanted) in enumerate(microbatches):
            if isinstance(self.model, FSDPModule):
                is_last = i == len(microbatches) - 1
                self.model.set_is_last_backward(is_last)
                self.model.set_requires_gradient_sync(is_last)
                self.model.set_reshard_after_backward(is_last or self.reshard_after_forward)
            loss = self.loss(self.model(tokens), wanted)
            loss.backward()
            total += loss.detach()
        return total


class OneForwardOneBackward:
    """This rank's stage of a 1F1B pipeline (arXiv:2006.09503)."""

    def __init__(self, model: Transformer, *, spec: ModelSpec, mesh: DeviceMesh, layout: Layout,
                 training: TrainingSpec, loss: Loss, device: torch.device) -> None:
        self.device = device
        self.is_first, self.is_last = model.is_first, model.is_last
        tokens, hidden, logits = _boundary_shapes(spec, layout=layout, training=training)
        # Shapes are given, not inferred: inference would cost a round of object messages through all stages.
        stage = PipelineStage(model, mesh.get_local_rank("pp"), axis_size(mesh, "pp"), device,
                              input_args=tokens if model.is_first else hidden,
                              output_args=logits if model.is_last else hidden, group=mesh.get_group("pp"))
        # scale_grads: the loss is already a share of the whole
        self.schedule = Schedule1F1B(stage, layout.num_microbatches, loss_fn=loss, scale_grads=False)

    def forward_backward(self, inputs: Tensor | None, targets: Tensor | None) -> Tensor:
        args = (inputs,) if self.is_first else ()
        losses: list[Tensor] = []
        if self.is_last:
            self.schedule.step(*args, target=targets, losses=losses, return_outputs=False)
        else:
            self.schedule.step(*args, return_outputs=False)
        return torch.stack(losses).detach().sum() if losses else torch.zeros((), device=self.device)


def _boundary_shapes(spec: ModelSpec, *, layout: Layout, training: TrainingSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Of one microbatch, on meta: token ids; what passes between stages; logits. The last two require grad,
    or torch would send no gradient back."""
    tp = layout.dims.tp
    dtype = getattr(torch, training.param_dtype)
    seq = training.seq_len // tp if layout.sequence_parallel else training.seq_len
    tokens = torch.empty(layout.microbatch_size, training.seq_len, dtype=torch.int64, device="meta")
    hidden = torch.empty(layout.microbatch_size, seq, spec.dim, dtype=dtype, device="meta", requires_grad=True)
    logits = torch.empty(layout.microbatch_size, training.seq_len, spec.vocab_size // tp, dtype=dtype, device="meta",
                         requires_grad=True)
    return tokens, hidden, logits


def sum_tied_gradients(model: Transformer, *, mesh: DeviceMesh) -> None:
    """Tied embeddings live on the first and the last stage: both add the other's gradient to their own.

    Each rank talks to the one of its own dp and tp coordinate, whose shard is the same. Two addends
    commute exactly, so both copies stay equal bit for bit, step after step.
    """
    if not (model.is_first or model.is_last):
        return
    group, last = mesh.get_group("pp"), axis_size(mesh, "pp") - 1
    grad = local_of(model.embedding.weight.grad)
    other = torch.empty_like(grad)
    peer = last if model.is_first else 0
    ops = [dist.P2POp(dist.isend, grad, group=group, group_peer=peer),
           dist.P2POp(dist.irecv, other, group=group, group_peer=peer)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    grad += other
