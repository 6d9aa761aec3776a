"""AdamW with warm-up and decay of the learning rate, and gradient clipping by the norm over the whole model.

Called by the trainer. The learning rate is a function of the step alone, so a checkpoint needs no
scheduler state.
"""
import itertools
import math
from collections.abc import Iterable

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from jobs.mesh import all_reduce, is_owner, local_of
from jobs.spec.training import OptimizerSpec

# Axes over which parameters differ. Over dp_replicate they are the same, and so are their gradients.
MODEL_AXES = ("tp", "cp", "dp_shard", "pp")


def learning_rate(step: int, *, spec: OptimizerSpec, total_steps: int) -> float:
    """Of update number `step` (from 1): linear warm-up to lr, then down to min_lr_ratio·lr at the last step, along a
    cosine, or (wsd, arXiv:2404.06395, §4) on a straight line at the end."""
    if step <= spec.warmup_steps:
        return spec.lr * step / spec.warmup_steps
    if spec.lr_schedule == "wsd":
        falling = min(total_steps - spec.warmup_steps, math.ceil(spec.decay_fraction * total_steps))
        remaining = min(1.0, max(0, total_steps - step) / max(1, falling))
    else:
        progress = (step - spec.warmup_steps) / max(1, total_steps - spec.warmup_steps)
        remaining = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return spec.lr * (spec.min_lr_ratio + (1 - spec.min_lr_ratio) * remaining)


class Optimizer:
    """This rank's shards of AdamW (arXiv:1711.05101); no decay on norms and other 1-D parameters.

    AdamW runs on the local shards, not on the DTensors: it is elementwise, and DTensor's dispatch took
    0.5 s of the first step and a sixth of every later one (8 ranks on 2 cores). It is torch's fused kernel without
    torch.optim around it, which took a third of a small model's update. `copies` names parameters
    whose original another stage holds: they are updated but not counted in the norm.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], *, spec: OptimizerSpec, total_steps: int,
                 mesh: DeviceMesh, copies: frozenset[str]) -> None:
        self.spec = spec
        self.total_steps = total_steps
        self.mesh = mesh
        self.parameters = dict(named_parameters)
        self._counted = [name not in copies and is_owner(p, axes=MODEL_AXES) for name, p in self.parameters.items()]
        self._matrices = [p.ndim > 1 for p in self.parameters.values()]
        with torch.no_grad():
            shards = [local_of(p) for p in self.parameters.values()]
        self._updates = torch.zeros((), device=shards[0].device)  # as a tensor: the kernel reads it on the device
        self._moments = [[torch.zeros_like(shard) for shard in shards] for _ in range(2)]

    @property
    def state(self) -> list[Tensor]:
        """All that it keeps from step to step."""
        return [self._updates, *itertools.chain(*self._moments)]

    @torch.no_grad()
    def step(self, step: int, gradients: dict[str, Tensor]) -> tuple[Tensor, float]:
        """Clip and apply these (this rank's shards, by name) as update number `step`, and drop them. Returns (gradient
        norm before clipping, learning rate)."""
        lr = learning_rate(step, spec=self.spec, total_steps=self.total_steps)
        shards = [local_of(p) for p in self.parameters.values()]  # FSDP allocates anew in its first forward
        grads = [gradients[name] for name in self.parameters]
        gradients.clear()
        norm = self._clip(grads)
        self._updates += 1
        self._update(shards, grads, self._matrices, lr=lr, weight_decay=self.spec.weight_decay)
        self._update(shards, grads, [not matrix for matrix in self._matrices], lr=lr, weight_decay=0.0)
        return norm, lr

    def _update(self, shards: list[Tensor], grads: list[Tensor], which: list[bool], *, lr: float,
                weight_decay: float) -> None:
        of = [list(itertools.compress(tensors, which)) for tensors in (shards, grads, *self._moments)]
        if of[0]:
            torch._fused_adamw_(*of, [], [self._updates] * len(of[0]), amsgrad=False, lr=lr, beta1=self.spec.beta1,
                                beta2=self.spec.beta2, weight_decay=weight_decay, eps=self.spec.eps, maximize=False)

    def named_state(self) -> dict[str, Tensor]:
        """`<parameter>.exp_avg` and so on; sharded like the parameter, scalars replicated. May be written to in
        place."""
        named = {}
        for (name, parameter), *moments in zip(self.parameters.items(), *self._moments):
            for key, value in zip(("step", "exp_avg", "exp_avg_sq"), (self._updates, *moments), strict=True):
                named[f"{name}.{key}"] = _sharded_like(parameter, value)
        return named

    def _clip(self, grads: list[Tensor]) -> Tensor:
        """Exact over every axis: each element of the model is counted by one rank."""
        counted = [g for g, count in zip(grads, self._counted) if count and g.numel()]
        norms = torch._foreach_norm(counted) if counted else [grads[0].new_zeros(())]
        total = torch.stack(norms).square().sum()
        norm = all_reduce(total, mesh=self.mesh, axes=MODEL_AXES).sqrt()
        # no branch on the value: that would wait for the device
        torch._foreach_mul_(grads, (self.spec.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm


def _sharded_like(parameter: Tensor, value: Tensor) -> Tensor:
    """`value`, this rank's shard of something that belongs to `parameter`, as a tensor of global shape."""
    if not isinstance(parameter, DTensor):
        return value
    if value.ndim == 0:
        return DTensor.from_local(value, parameter.device_mesh, [Replicate()] * len(parameter.placements),
                                  run_check=False)
    return DTensor.from_local(value, parameter.device_mesh, parameter.placements, run_check=False,
                              shape=parameter.shape, stride=parameter.stride())
