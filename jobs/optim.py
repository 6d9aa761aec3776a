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
    0.5 s of the first step and a sixth of every later one (8 ranks on 2 cores). `copies` names parameters
    whose original another stage holds: they are updated but not counted in the norm.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], *, spec: OptimizerSpec, total_steps: int,
                 mesh: DeviceMesh, copies: frozenset[str]) -> None:
        self.spec = spec
        self.total_steps = total_steps
        self.mesh = mesh
        self.parameters = dict(named_parameters)
        self._counted = [name not in copies and is_owner(p, axes=MODEL_AXES) for name, p in self.parameters.items()]
        with torch.no_grad():
            self._shards = [nn.Parameter(local_of(p)) for p in self.parameters.values()]
        matrices = [p.ndim > 1 for p in self.parameters.values()]
        groups = [{"params": list(itertools.compress(self._shards, matrices)), "weight_decay": spec.weight_decay},
                  {"params": [s for s, matrix in zip(self._shards, matrices) if not matrix], "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW([g for g in groups if g["params"]], lr=spec.lr, betas=(spec.beta1, spec.beta2),
                                       eps=spec.eps, fused=True)
        for shard in self._shards:  # allocated now and not in the first step: a checkpoint is read into it
            self.adamw.state[shard] = {"step": torch.zeros((), device=shard.device),
                                       "exp_avg": torch.zeros_like(shard), "exp_avg_sq": torch.zeros_like(shard)}

    def step(self, step: int) -> tuple[Tensor, float]:
        """Clip and apply the gradients as update number `step`, then drop them. Returns (gradient norm before
        clipping, learning rate)."""
        lr = learning_rate(step, spec=self.spec, total_steps=self.total_steps)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        with torch.no_grad():
            for shard, parameter in zip(self._shards, self.parameters.values()):
                shard.data = local_of(parameter)  # FSDP allocates anew in its first forward
                shard.grad, parameter.grad = local_of(parameter.grad), None
            norm = self._clip([shard.grad for shard in self._shards])
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        return norm, lr

    def named_state(self) -> dict[str, Tensor]:
        """`<parameter>.exp_avg` and so on; sharded like the parameter, scalars replicated. May be written to in
        place."""
        named = {}
        for shard, (name, parameter) in zip(self._shards, self.parameters.items()):
            for key, value in self.adamw.state[shard].items():
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
