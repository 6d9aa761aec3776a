"""Data parallelism with sharded weights: FSDP2 over fsdp = dp_shard·cp, replicas of it (HSDP) over dp_replicate.

Called by jobs.parallel, last of the transformations, for zero_stage=3; whole weights are jobs.parallel.buckets'.
Gradients are *summed* over data-parallel ranks: the loss has already been divided by the global token count.

A unit is gathered and reduced at once: layers_per_unit consecutive layers; the embedding; norm and output, with a
tied embedding. The last two units of the model (norm and output, and the layers before it) are not dropped between
forward and backward, which begins with them. FSDP reduces its root last, behind the backward: it has a unit of its own
only where embedding and output are tied, or an own model does not say what follows its blocks.

Collectives per unit; P = its weights / tp in param_dtype, G = the same in reduce_dtype, m = num_microbatches:

    op               axis           bytes    when
    all_gather       fsdp           P        one stage: every forward, and every backward but that of the last two
                                             units. Several stages: a unit that a backward has gathered stays so for
                                             the next forward; see orchestrator.planner.sharding
    reduce_scatter   fsdp           G        backward of the last microbatch; of every one if reduce_every_microbatch
    all_reduce       dp_replicate   G/fsdp   after each reduce_scatter
"""
import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from jobs.mesh import axis_size, fsdp_mesh
from jobs.model.transformer import Transformer
from jobs.parallel.collectives import SummedReduceScatter, lacks_reduce_scatter
from jobs.parallel.expert import expert_placement
from jobs.spec.training import DType


def units(model: Transformer, *, layers_per_unit: int) -> list[list[nn.Module]]:
    """Modules that are gathered and reduced together, in the order of forward. The last unit holds what the others do
    not; it is empty on a stage that has neither norm nor output."""
    layers = list(model.layers.values())
    found = [layers[i:i + layers_per_unit] for i in range(0, len(layers), layers_per_unit)]
    embeddings = [module for module in (model.embedding, model.position_embedding) if module is not None]
    ends = [module for module in (model.norm, model.output) if module is not None]
    if model.is_first and not (model.is_last and model.output is None):
        return [embeddings, *found, ends]
    return [*found, ends + embeddings]  # a tied embedding is where backward begins


def apply_fsdp(model: nn.Module, *, units: list[list[nn.Module]], mesh: DeviceMesh, expert_mesh: DeviceMesh | None,
               param_dtype: DType, reduce_dtype: DType) -> None:
    """Shard `model` (on meta) in place, unit by unit; the last of `units` is what the others leave."""
    shards = fsdp_mesh(mesh)
    if axis_size(mesh, "dp_replicate") > 1:
        shards = DeviceMesh._concatenate([mesh["dp_replicate"], shards])
    # Activations already have param_dtype behind the embedding: nothing is cast at layer boundaries.
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, param_dtype), reduce_dtype=getattr(torch, reduce_dtype),
                                  cast_forward_inputs=False)
    options = {"mesh": shards, "mp_policy": policy}
    if expert_mesh is not None:
        options["shard_placement_fn"] = expert_placement(model, expert_mesh=expert_mesh)
    of_layers, last = units[:-1], units[-1]
    for i, unit in enumerate(of_layers):
        kept = model.is_last and i == len(of_layers) - 1
        fully_shard(unit if len(unit) > 1 else unit[0], reshard_after_forward=not kept, **options)
    tied = getattr(model, "embedding", None) in last  # of ours: forward begins with it, too
    if last and model not in last and not tied:
        fully_shard(last, reshard_after_forward=False, **options)
    root = fully_shard(model, reshard_after_forward=False, **options)  # of what is left
    # Backward ends with the first unit: torch would gather then what the microbatch before this one has used last. No
    # list of units can say "none", so the unit names itself, which is there.
    first = of_layers[0][0] if of_layers else root
    first.set_modules_to_backward_prefetch([first])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM; a plain sum is meant anyway
            for group in fully_shard.state(module)._fsdp_param_groups:  # several where experts have a mesh of their own
                if lacks_reduce_scatter(group._reduce_scatter_process_group):
                    group._reduce_scatter_comm = SummedReduceScatter()
