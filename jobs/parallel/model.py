"""A rank's part of the model once it is laid out: a step's gradients, a validation's loss, parameters by name.

Built by jobs.parallel, called by the trainer, its validation and jobs.verify. How the parts were made, and in which
order their microbatches run, is known elsewhere.
"""
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jobs.mesh import axis_size, local_of
from jobs.parallel.buckets import Buckets
from jobs.parallel.expert import router_biases, update_balance
from jobs.parallel.fill import COPY
from jobs.parallel.forwards import evaluating
from jobs.parallel.pipeline import Schedule, sum_tied_gradients
from jobs.parallel.sequences import Sequences
from jobs.parallel.tensor import partial_parameters, reduce_partial_gradients


@dataclass(frozen=True, kw_only=True, slots=True)
class Ties:
    """Parameters that several modules share. `names`: every further name → the first, which they go by. `ends`: of the
    first names those that the first stage of a pipeline needs, and the last."""

    names: Mapping[str, str] = field(default_factory=dict)
    ends: tuple[str, ...] = ()


class ParallelModel:
    """This rank's parts of the model, and how a step's microbatches run through them."""

    def __init__(self, model_parts: tuple[nn.Module, ...], *, schedule: Schedule, buckets: Buckets | None,
                 mesh: DeviceMesh, expert_mesh: DeviceMesh | None, sequences: Sequences, ties: Ties) -> None:
        self.model_parts = model_parts
        self.mesh, self.expert_mesh = mesh, expert_mesh
        self.holds_first, self.holds_last = model_parts[0].is_first, model_parts[-1].is_last
        self.schedule = schedule
        self.buckets = buckets
        self._sequences = sequences
        self._tied = ties.ends if axis_size(mesh, "pp") > 1 and (self.holds_first or self.holds_last) else ()
        weights = named_weights(model_parts, ties=ties)
        self.parameters = {name: weight if buckets is None else buckets.master_of(weight)
                           for name, weight in weights.items()}
        self.gradients: dict[str, Tensor] = {}  # of `parameters`, this rank's shards
        self._weights = weights
        # not updated by the optimizer, but part of the model's state
        self.buffers = {name: t for part in model_parts for name, t in router_biases(part, mesh=mesh).items()}
        partial = {weight for part in model_parts for weight in partial_parameters(part)}
        self._partial = [name for name, weight in weights.items() if weight in partial]

    @property
    def copies(self) -> frozenset[str]:
        """Names of parameters held here whose original is elsewhere: neither counted nor saved."""
        return frozenset(name + COPY * self.holds_first for name in self._tied if self.holds_last)

    @property
    def aliases(self) -> dict[str, str]:
        """Of the copies those whose original is on this rank, too: name → name of the original."""
        return {name: name.removesuffix(COPY) for name in self.copies if name.endswith(COPY)}

    def forward_backward(self, inputs: Tensor | None, targets: Tensor | None, *, documents: Tensor | None = None,
                         step: int = 0) -> Tensor:
        """All microbatches of a step, [num_microbatches·microbatch_size, seq/cp]. Afterwards `gradients` are the sums
        over the global batch. Returns this rank's share of the loss (zero but on the last stage). `documents`, on every
        stage: int32 [num_microbatches·microbatch_size, seq] of whole sequences, on the host: tokens see only those of
        the same number; they never decrease along a sequence."""
        loss = self.schedule.forward_backward(inputs, targets, self._sequences.at(step, documents=documents))
        self.gradients = self._take_gradients()
        if self._partial:
            reduce_partial_gradients([self.gradients[name] for name in self._partial], group=self.mesh.get_group("tp"))
        for tied in self._tied:
            sum_tied_gradients([grad for name, grad in self.gradients.items() if name.removesuffix(COPY) == tied],
                               mesh=self.mesh, is_first=self.holds_first)
        update_balance(self.model_parts, mesh=self.mesh)
        return loss

    @torch.no_grad()
    def evaluate(self, inputs: Tensor | None, targets: Tensor | None, *, documents: Tensor | None = None) -> Tensor:
        """The loss of forward_backward, by forward passes alone: nothing is dropped out, choices of experts are not
        counted, and what trains is afterwards as it was."""
        with evaluating(self.model_parts):
            loss = self.schedule.evaluate(inputs, targets, self._sequences.at(None, documents=documents))
        if self.buckets is not None:
            self.buckets.gather_rest()  # what this rank's forward has not used another's may have
        return loss

    @torch.no_grad()
    def _take_gradients(self) -> dict[str, Tensor]:
        if self.buckets is not None:
            found = self.buckets.finish()
            return {name: found[weight] for name, weight in self._weights.items()}
        # no gradient: no token of this step has used it; whole weights' buckets say zero, too
        found = {name: torch.zeros_like(local_of(weight)) if weight.grad is None else local_of(weight.grad)
                 for name, weight in self._weights.items()}
        for weight in self._weights.values():
            weight.grad = None
        return found

    def refresh_weights(self) -> None:
        """To be called whenever `parameters` have been changed: what computes may be a copy of them."""
        if self.buckets is not None:
            self.buckets.refresh_weights()


def named_weights(model_parts: tuple[nn.Module, ...], *, ties: Ties) -> dict[str, nn.Parameter]:
    """Of all parts, by name in the whole model."""
    found: dict[str, nn.Parameter] = {}
    for part in model_parts:
        for name, weight in part.named_parameters():
            name = ties.names.get(name, name)
            found[name + COPY if name in found else name] = weight
    return found
