"""From sizes and a layout to this rank's part of the model, in one visible order:
tensor parallel → expert parallel → context parallel → compile and recompute → data parallel → weights → schedule of
microbatches.

Called by jobs.train. The model is built on the meta device and only this rank's shards are ever filled,
from (seed, parameter name), so weights do not depend on the layout.
"""
import contextlib
import functools
from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from jobs.loss import cross_entropy
from jobs.mesh import axis_size, coordinate, fsdp_mesh
from jobs.model.initial import initial_slice
from jobs.model.transformer import Transformer
from jobs.parallel.buckets import Buckets, Unit
from jobs.parallel.context import apply_context_parallel
from jobs.parallel.data import apply_fsdp, units
from jobs.parallel.expert import apply_expert_parallel, build_expert_mesh, moe_blocks
from jobs.parallel.fill import allocated, fill_weights
from jobs.parallel.fit import refuse_misfits
from jobs.parallel.model import ParallelModel, Ties
from jobs.parallel.pipeline import Loss, MicrobatchLoop, Pipeline, Schedule, Shapes, boundary_shapes
from jobs.parallel.recompute import apply_recompute, repeat_activations
from jobs.parallel.sequences import Sequences
from jobs.parallel.tensor import apply_tensor_parallel
from jobs.parallel.vocab import vocab_parallel_cross_entropy
from jobs.spec.model import ModelSpec
from jobs.spec.parallel import Layout
from jobs.spec.training import TrainingSpec
from jobs.weights import HubWeights


def parallelize(spec: ModelSpec, *, mesh: DeviceMesh, layout: Layout, training: TrainingSpec,
                device: torch.device, weights: HubWeights | None = None,
                allocating: AbstractContextManager = contextlib.nullcontext()) -> ParallelModel:
    """Build this rank's parts, with initial or the given weights. `allocating`: the mode under which memory is taken;
    jobs.verify takes none. Raises ValueError where the layout does not fit the model."""
    refuse_misfits(spec, layout=layout, training=training)
    dims = layout.dims
    expert_mesh = None if spec.moe is None else build_expert_mesh(dims, device=device)
    parts = tuple(_build_part(spec, mesh=mesh, expert_mesh=expert_mesh, layout=layout, stage=stage,
                              compiled=training.compile)
                  for stage in layout.stages(mesh.get_local_rank("pp")))
    shapes = boundary_shapes(hidden=(spec.dim,), vocab_size=spec.vocab_size, layout=layout, training=training)
    model = complete(parts, units=[units(part, layers_per_unit=layout.layers_per_unit) for part in parts], mesh=mesh,
                     expert_mesh=expert_mesh, layout=layout, training=training, device=device, shapes=shapes,
                     sequences=sequences_of(mesh, layout=layout, training=training, device=device,
                                            with_keys=spec.dropout > 0 or spec.attention_dropout > 0,
                                            with_weights=spec.moe is not None),
                     ties=Ties(ends=("embedding.weight",) if spec.tie_embeddings else ()), splits_logits=dims.tp > 1,
                     allocating=allocating)
    if weights is None:
        fill_weights(model.parameters, source=functools.partial(initial_slice, spec=spec, seed=training.seed))
    else:
        fill_weights(model.parameters | model.buffers, source=weights.slice)
    model.refresh_weights()
    return model


def complete(parts: tuple[nn.Module, ...], *, units: list[list[list[nn.Module]]], mesh: DeviceMesh,
             expert_mesh: DeviceMesh | None, layout: Layout, training: TrainingSpec, device: torch.device,
             shapes: Shapes, sequences: Sequences, ties: Ties, splits_logits: bool,
             allocating: AbstractContextManager = contextlib.nullcontext()) -> ParallelModel:
    """What follows once each part is split and on meta: data parallelism by `units` (of each part), memory, schedule.
    The weights are still to be filled."""
    dims = layout.dims
    sharded = layout.shards_weights
    buckets = None
    if sharded:
        for part, of_part in zip(parts, units, strict=True):
            apply_fsdp(part, units=of_part, mesh=mesh, expert_mesh=expert_mesh, param_dtype=training.param_dtype,
                       reduce_dtype=training.reduce_dtype)
    # not to_empty: it would send every DTensor through dispatch, a quarter of the time to build a small model
    allocate = functools.partial(allocated, device=device,
                                 param_dtype=torch.float32 if sharded else getattr(torch, training.param_dtype))
    for part in parts:
        with allocating:
            part._apply(allocate)
        tie_again(part, ties.names)
        for buffer in part.buffers():
            buffer.zero_()
    shared = dims.dp * dims.cp > 1 or (expert_mesh is not None and axis_size(expert_mesh, "expert_fsdp") > 1)
    if not sharded and (shared or training.param_dtype != "float32"):
        tied = bool(ties.names or ties.ends)
        buckets = Buckets([_bucket_units(part, of_part, tied=tied, mesh=mesh, expert_mesh=expert_mesh)
                           for part, of_part in zip(parts, units, strict=True)],
                          num_backwards=layout.num_microbatches, in_shards=layout.shards_gradients,
                          reduce_dtype=getattr(torch, training.reduce_dtype))
    schedule = _build_schedule(parts, mesh=mesh, layout=layout, training=training, buckets=buckets, device=device,
                               shapes=shapes, splits_logits=splits_logits)
    return ParallelModel(parts, schedule=schedule, buckets=buckets, mesh=mesh, expert_mesh=expert_mesh,
                         sequences=sequences, ties=ties)


def _bucket_units(part: nn.Module, units: list[list[nn.Module]], *, tied: bool, mesh: DeviceMesh,
                  expert_mesh: DeviceMesh | None) -> list[Unit]:
    """The usual units without experts, whose ranks are others, and behind each the experts of its layers. Of `tied`
    weights forward begins with the last unit, and backward ends with it: with what the others leave of it."""
    *others, root = units
    elsewhere = {weight for unit in others for module in unit for weight in module.parameters()}
    units = [root, *others] if tied and part.is_first and part.is_last else units
    experts = [] if expert_mesh is None else [moe.experts for moe in moe_blocks(part)]
    apart = {weight for module in experts for weight in module.parameters()}
    found = []
    for unit in units:
        weights = [weight for module in unit for weight in module.parameters()
                   if weight not in apart and (unit is not root or weight not in elsewhere)]
        found.append(Unit(modules=unit, weights=weights, is_used_first=unit is root and part in root,
                          shards=fsdp_mesh(mesh), replicas=mesh["dp_replicate"]))
        inside = {module for top in unit for module in top.modules()}
        if here := [one for one in experts if one in inside]:
            found.append(Unit(modules=here, weights=[weight for one in here for weight in one.parameters()],
                              shards=expert_mesh["expert_fsdp"], replicas=expert_mesh["dp_replicate"]))
    return found


def tie_again(part: nn.Module, names: Mapping[str, str]) -> None:
    """Where memory was taken, each module got a parameter of its own. `names`: those of Ties."""
    here = dict(part.named_parameters())
    for name, first in names.items():
        if name in here and first in here:
            path, _, own = name.rpartition(".")
            part.get_submodule(path)._parameters[own] = here[first]


def sequences_of(mesh: DeviceMesh, *, layout: Layout, training: TrainingSpec, device: torch.device, with_keys: bool,
                 with_weights: bool = False) -> Sequences:
    """Of this rank's data-parallel share of the slots; see Sequences."""
    share = layout.microbatch_size * layout.num_microbatches
    first = share * layout.dims.dp_index(coordinate(mesh))
    return Sequences(slots=range(first, first + share), global_batch_size=training.global_batch_size,
                     seed=training.seed, with_keys=with_keys, with_weights=with_weights, device=device)


def _build_part(spec: ModelSpec, *, mesh: DeviceMesh, expert_mesh: DeviceMesh | None, layout: Layout, stage: int,
                compiled: bool) -> Transformer:
    with torch.device("meta"):
        part = Transformer(spec, layers=layout.layers(stage), is_first=stage == 0,
                           is_last=stage == layout.num_stages - 1)
    if layout.dims.tp > 1:
        apply_tensor_parallel(part, mesh=mesh["tp"], sequence_parallel=layout.sequence_parallel,
                              regather=layout.recompute != "full")
    apply_expert_parallel(part, mesh=mesh, expert_mesh=expert_mesh)
    if layout.dims.cp > 1:
        apply_context_parallel(part, mesh=mesh["cp"], method=layout.cp_method)
    if layout.recompute == "selective":
        repeat_activations(part)
    apply_recompute(part.layers.values(), recompute="full" if layout.recompute == "full" else "none", compiled=compiled)
    return part


def _build_schedule(parts: tuple[nn.Module, ...], *, mesh: DeviceMesh, layout: Layout, training: TrainingSpec,
                    buckets: Buckets | None, device: torch.device, shapes: Shapes, splits_logits: bool) -> Schedule:
    terms = {"global_tokens": training.global_batch_size * training.seq_len, "z_loss": training.z_loss}
    loss: Loss = functools.partial(cross_entropy, **terms)
    if splits_logits:
        loss = functools.partial(vocab_parallel_cross_entropy, group=mesh.get_group("tp"), **terms)
    if layout.dims.pp == 1:
        return MicrobatchLoop(parts[0], layout=layout, loss=loss, buckets=buckets)
    return Pipeline(parts, shapes=shapes, mesh=mesh, layout=layout, loss=loss, buckets=buckets, device=device)
