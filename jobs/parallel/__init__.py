"""From sizes and a layout to this rank's part of the model, in one visible order:
tensor parallel → recompute → FSDP → weights → microbatch schedule.

Called by jobs.train. The model is built on the meta device and only this rank's shards are ever filled,
from (seed, parameter name), so weights do not depend on the layout.
"""
import functools

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from jobs.loss import cross_entropy
from jobs.mesh import axis_size
from jobs.model.transformer import Transformer, initial_rows
from jobs.parallel.data import apply_fsdp
from jobs.parallel.pipeline import Loss, MicrobatchLoop, OneForwardOneBackward, Schedule, sum_tied_gradients
from jobs.parallel.recompute import apply_recompute
from jobs.parallel.tensor import apply_tensor_parallel, reduce_norm_gradients, vocab_parallel_cross_entropy
from jobs.spec.model import ModelSpec
from jobs.spec.parallel import Layout
from jobs.spec.training import TrainingSpec


class ParallelModel:
    """This rank's part of the model, and how a step's microbatches run through it."""

    def __init__(self, model: Transformer, *, schedule: Schedule, mesh: DeviceMesh, sequence_parallel: bool,
                 tied: bool) -> None:
        self.model = model
        self.mesh = mesh
        self._schedule = schedule
        self._tp_group = mesh.get_group("tp") if sequence_parallel and axis_size(mesh, "tp") > 1 else None
        self._tied_across_stages = tied and axis_size(mesh, "pp") > 1

    @property
    def copies(self) -> frozenset[str]:
        """Names of parameters held here whose original is on another stage: neither counted nor saved here."""
        is_copy = self._tied_across_stages and not self.model.is_first and self.model.is_last
        return frozenset({"embedding.weight"} if is_copy else ())

    def forward_backward(self, inputs: Tensor | None, targets: Tensor | None) -> Tensor:
        """All microbatches of a step, [num_microbatches·microbatch_size, seq]. Afterwards every gradient is
        the sum over the global batch. Returns this rank's share of the loss (zero but on the last stage)."""
        loss = self._schedule.forward_backward(inputs, targets)
        if self._tp_group is not None:
            reduce_norm_gradients(self.model, group=self._tp_group)
        if self._tied_across_stages:
            sum_tied_gradients(self.model, mesh=self.mesh)
        return loss


def parallelize(spec: ModelSpec, *, mesh: DeviceMesh, layout: Layout, training: TrainingSpec,
                device: torch.device) -> ParallelModel:
    """Build this rank's part. Raises ValueError where the layout does not fit the model."""
    _refuse(spec, layout=layout, training=training)
    dims, stage = layout.dims, mesh.get_local_rank("pp")
    first = sum(layout.layers_per_stage[:stage])
    with torch.device("meta"):
        model = Transformer(spec, layers=range(first, first + layout.layers_per_stage[stage]), is_first=stage == 0,
                            is_last=stage == dims.pp - 1)
    if dims.tp > 1:
        apply_tensor_parallel(model, mesh=mesh["tp"], sequence_parallel=layout.sequence_parallel)
    apply_recompute(model, recompute=layout.recompute)
    if dims.dp > 1 or training.param_dtype != "float32":  # FSDP also keeps the float32 master of bf16 weights
        apply_fsdp(model, mesh=mesh, reshard_after_forward=layout.reshard_after_forward,
                   param_dtype=training.param_dtype, reduce_dtype=training.reduce_dtype)
    fill_weights(model, spec=spec, seed=training.seed, device=device)
    schedule = _build_schedule(model, spec=spec, mesh=mesh, layout=layout, training=training, device=device)
    return ParallelModel(model, schedule=schedule, mesh=mesh, sequence_parallel=layout.sequence_parallel,
                         tied=spec.tie_embeddings)


def _refuse(spec: ModelSpec, *, layout: Layout, training: TrainingSpec) -> None:
    dims = layout.dims
    problems = []
    if dims.cp > 1 or dims.ep > 1:
        problems.append(f"parallel.cp, parallel.ep: {dims.cp}, {dims.ep}: only 1 is implemented in the trainer")
    if len(layout.layers_per_stage) != dims.pp or sum(layout.layers_per_stage) != spec.num_layers:
        problems.append(f"layers_per_stage: {layout.layers_per_stage} does not split {spec.num_layers} layers over "
                        f"pp={dims.pp} stages")
    if layout.sequence_parallel and training.seq_len % dims.tp:
        problems.append(f"training.seq_len: {training.seq_len} is not divisible by tp={dims.tp}, as "
                        "sequence_parallel needs")
    for size in ("num_heads", "num_kv_heads", "ffn_dim", "vocab_size"):
        if getattr(spec, size) % dims.tp:
            problems.append(f"parallel.tp: {dims.tp} does not divide model.{size}={getattr(spec, size)}")
    if dims.order.index("dp_replicate") > dims.order.index("dp_shard"):
        problems.append(f"mesh order: {dims.order} has dp_shard outside dp_replicate, which FSDP does not take; put "
                        "dp_replicate first")
    if layout.slots < training.global_batch_size:
        problems.append(f"layout: {layout.slots} slots cannot hold global_batch_size={training.global_batch_size}")
    if problems:
        raise ValueError("\n".join(problems))


def _build_schedule(model: Transformer, *, spec: ModelSpec, mesh: DeviceMesh, layout: Layout, training: TrainingSpec,
                    device: torch.device) -> Schedule:
    global_tokens = training.global_batch_size * training.seq_len
    loss: Loss = functools.partial(cross_entropy, global_tokens=global_tokens)
    if layout.dims.tp > 1:
        loss = functools.partial(vocab_parallel_cross_entropy, group=mesh.get_group("tp"), global_tokens=global_tokens)
    if layout.dims.pp == 1:
        return MicrobatchLoop(model, layout=layout, loss=loss)
    return OneForwardOneBackward(model, spec=spec, mesh=mesh, layout=layout, training=training, loss=loss,
                                 device=device)


@torch.no_grad()
def fill_weights(model: Transformer, *, spec: ModelSpec, seed: int, device: torch.device) -> None:
    """Give a model on meta its storage and its initial weights, one full row block at a time."""
    # not to_empty: it would send every DTensor through dispatch, a quarter of the time to build a small model
    model._apply(functools.partial(_allocate, device=device))
    for name, parameter in model.named_parameters():
        local, sizes, offsets = parameter, parameter.shape, (0,) * parameter.ndim
        if isinstance(parameter, DTensor):
            local = parameter.to_local()
            sizes, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh,
                                                                   parameter.placements)
        if local.numel() == 0:
            continue  # fewer rows than ranks
        values = initial_rows(name, tuple(parameter.shape), rows=range(offsets[0], offsets[0] + sizes[0]), spec=spec,
                              seed=seed)
        for dim in range(1, parameter.ndim):
            values = values.narrow(dim, offsets[dim], sizes[dim])
        local.copy_(values)


def _allocate(tensor: Tensor, *, device: torch.device) -> Tensor:
    if not isinstance(tensor, DTensor):
        return torch.empty_like(tensor, device=device)
    local = torch.empty_like(tensor.to_local(), device=device)
    return DTensor.from_local(local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape,
                              stride=tensor.stride())
