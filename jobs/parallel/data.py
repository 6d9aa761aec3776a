"""Data parallelism: FSDP2 over `dp_shard`, replicas of it (HSDP) over `dp_replicate`.

Called by jobs.parallel, last of the transformations. Gradients are *summed* over data-parallel ranks: the
loss has already been divided by the global token count.

Collectives; P = a layer's parameter bytes / tp in param_dtype, G = the same in reduce_dtype:

    op               axis           bytes   when
    all_gather       dp_shard       P       forward of each layer, and again in its backward if reshard_after_forward;
                                            per microbatch, or once per step without reshard_after_forward
    reduce_scatter   dp_shard       G       backward of the step's last microbatch
    all_reduce       dp_replicate   G/dp_shard   the same, after the reduce_scatter
"""
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from jobs.mesh import axis_size
from jobs.model.transformer import Transformer
from jobs.spec.training import DType


def apply_fsdp(model: Transformer, *, mesh: DeviceMesh, reshard_after_forward: bool, param_dtype: DType,
               reduce_dtype: DType) -> None:
    """Shard `model` (on meta) in place: one unit per layer, one for the embedding, one for the output."""
    replicated = axis_size(mesh, "dp_replicate") > 1
    fsdp_mesh = mesh["dp_replicate", "dp_shard"] if replicated else mesh["dp_shard"]
    # Activations already have param_dtype behind the embedding: nothing is cast at layer boundaries.
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, param_dtype), reduce_dtype=getattr(torch, reduce_dtype),
                                  cast_forward_inputs=False)
    if axis_size(mesh, "dp_shard") == 1:
        reshard_after_forward = False  # nothing is freed where nothing is sharded, only copied again
    options = {"mesh": fsdp_mesh, "mp_policy": policy}
    if model.is_first and not (model.is_last and model.output is None):
        fully_shard(model.embedding, reshard_after_forward=reshard_after_forward, **options)
    for layer in model.layers.values():
        fully_shard(layer, reshard_after_forward=reshard_after_forward, **options)
    # The root holds the rest: norm and output, or norm and tied embedding. Backward begins with it, so
    # it stays gathered.
    fully_shard(model, reshard_after_forward=False, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM; a plain sum is meant anyway
