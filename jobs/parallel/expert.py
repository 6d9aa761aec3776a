"""Expert parallelism: the experts of a layer spread over the `ep` axis, tokens brought to them and back.

Called by jobs.parallel on a model built on the meta device; the seams are `MoE.dispatcher` and `MoE.sum_counts`.
`ep` is carved out of dp_shard × cp × tp, innermost first: those ranks hold different tokens, so all of them are
data-parallel for the experts. What ep does not take is `expert_fsdp` = dp_shard·cp·tp/ep; the experts' weights are
sharded and their gradients reduced over it, with the formulas of jobs.parallel.data and jobs.parallel.buckets.

Collectives, per microbatch and layer; T = microbatch_size·seq_len/(cp·tp)·top_k choices of this rank, E = num_experts,
B = microbatch_size; with even routing each rank gets as many choices as it sends:

    op            axis   bytes                          when
    all_to_all    ep     8·E                            forward: how many choices go where
    all_to_all    ep     T·dim·bytes(param_dtype)       forward twice (out and back), backward twice
    all_reduce    tp, cp 8·B·E each                     forward, balance=loss only: counts of shared sequences
    all_reduce    dp_replicate, dp_shard, cp, tp        once per step, balance=bias only: 8·E·(MoE layers of the rank)
    recompute                                           full: the forward's once more
"""
import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
# public in fully_shard's documentation, but exported nowhere in torch 2.13
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Replicate, Shard

from jobs.mesh import all_reduce, axis_size
from jobs.model.moe import Experts, MoE, Router, invert, permute, sort_by_expert, spread
from jobs.model.transformer import Transformer
from jobs.spec.parallel import ParallelDims

CARVED = ("dp_shard", "cp", "tp")  # what ep is carved out of
SEQUENCE_AXES = ("cp", "tp")  # ranks along them hold parts of the same sequences
TOKEN_AXES = ("dp_replicate", "dp_shard", "cp", "tp")  # ranks along them hold different tokens


def build_expert_mesh(dims: ParallelDims, *, device: torch.device) -> DeviceMesh | None:
    """The same ranks as the experts see them: dp_replicate, pp, expert_fsdp, ep. To be called by all ranks. None where
    that is the mesh of all other weights."""
    if dims.ep * dims.tp == 1:
        return None
    ranks = torch.arange(dims.world_size).view(dims.shape)
    carved = [dims.order.index(axis) for axis in dims.order if axis in CARVED]
    ranks = ranks.permute(dims.order.index("dp_replicate"), dims.order.index("pp"), *carved)
    return DeviceMesh(device.type, ranks.reshape(dims.dp_replicate, dims.pp, -1, dims.ep),
                      mesh_dim_names=("dp_replicate", "pp", "expert_fsdp", "ep"))


def moe_blocks(model: Transformer) -> list[MoE]:
    return [module for module in model.modules() if isinstance(module, MoE)]


def apply_expert_parallel(model: Transformer, *, mesh: DeviceMesh, expert_mesh: DeviceMesh | None) -> None:
    """Give each rank of `ep` its share of every layer's experts (on meta), in place; see jobs.parallel.fit.
    `expert_mesh` is None where experts are spread like all other weights."""
    sharing = [mesh.get_group(axis) for axis in SEQUENCE_AXES if axis_size(mesh, axis) > 1]
    for moe in moe_blocks(model):
        moe.sum_counts = functools.partial(_sum_over, groups=sharing)
        if expert_mesh is not None and axis_size(expert_mesh, "ep") > 1:
            _split_experts(moe.experts, mesh=expert_mesh["ep"])
            moe.dispatcher = functools.partial(dispatch, group=expert_mesh.get_group("ep"))


class LocalExperts(Experts):
    """This rank's experts of DTensor weights, computed on the local shard."""

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        gate = None if self.gate is None else self.gate.to_local()
        return self.compute(x, counts, gate, self.up.to_local(), self.down.to_local())


def _split_experts(experts: Experts, *, mesh: DeviceMesh) -> None:
    experts.__class__ = LocalExperts
    for name, parameter in list(experts.named_parameters()):
        local = torch.empty(parameter.shape[0] // mesh.size(), *parameter.shape[1:], device="meta")
        setattr(experts, name, nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False)))


def _sum_over(counts: Tensor, *, groups: list[dist.ProcessGroup]) -> Tensor:
    counts = counts.clone() if groups else counts  # the addends are needed, too
    for group in groups:
        dist.all_reduce(counts, group=group)
    return counts


# ------------------------------------------------------------------ dispatch and combine
class _AllToAll(torch.autograd.Function):
    """Rows of x to the ranks of the group, `sent` rows to each and `received` from each; backward the other way."""

    @staticmethod
    def forward(ctx, x, sent, received, group):
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(x, sent, received, group)

    @staticmethod
    def backward(ctx, grad):
        return _exchange(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), output_split_sizes=received, input_split_sizes=sent, group=group)
    return out


def dispatch(x: Tensor, chosen: Tensor, experts: Experts, *, group: dist.ProcessGroup) -> Tensor:
    """jobs.model.moe.dispatch_here for experts that are spread over the group, each rank holding the same number of
    consecutive ones. x [tokens, dim], chosen [tokens, top_k] → [tokens, top_k, dim]. Nothing is dropped or padded."""
    ranks = group.size()
    mine = experts.up.shape[0] // ranks
    order, counts = sort_by_expert(chosen, num_experts=ranks * mine)  # by expert is by rank, too
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts, group=group)
    theirs = theirs.view(ranks, mine)  # choices that each rank sends to each of my experts
    # one wait for the device: both lists at once
    sent, received = torch.stack((counts.view(ranks, mine).sum(dim=1), theirs.sum(dim=1))).tolist()
    arrived = _AllToAll.apply(spread(x, order, top_k=chosen.shape[1]), sent, received, group)
    # from each rank in turn, by expert → by expert
    experts_of = torch.arange(mine, device=x.device).repeat(ranks).repeat_interleave(
        theirs.flatten(), output_size=sum(received))
    grouped = experts_of.argsort(stable=True)
    outputs = experts(permute(arrived, grouped), theirs.sum(dim=0))
    returned = _AllToAll.apply(permute(outputs, invert(grouped)), received, sent, group)
    return permute(returned, invert(order)).unflatten(0, chosen.shape)


# ------------------------------------------------------------------ data parallelism of the experts
def expert_placement(model: Transformer, *,
                     expert_mesh: DeviceMesh) -> Callable[[nn.Parameter], ShardPlacementResult | None]:
    """For fully_shard: the experts of a unit are gathered with it, but over a mesh of their own."""
    num_shards, ep = axis_size(expert_mesh, "expert_fsdp"), axis_size(expert_mesh, "ep")
    if axis_size(expert_mesh, "dp_replicate") > 1:
        where = HSDPMeshInfo(expert_mesh["dp_replicate", "expert_fsdp"], shard_mesh_dim=1, replicate_mesh_dim=0)
    else:
        where = FSDPMeshInfo(expert_mesh["expert_fsdp"], shard_mesh_dim=0)
    experts = {parameter for moe in moe_blocks(model) for parameter in moe.experts.parameters()}

    def place(parameter: nn.Parameter) -> ShardPlacementResult | None:
        if parameter not in experts:
            return None
        # whole experts to each rank where that is even, else rows of each expert, where that is
        uneven = parameter.shape[0] // ep % num_shards
        by_rows = uneven and parameter.shape[1] % num_shards == 0
        return ShardPlacementResult(placement=Shard(1 if by_rows else 0), mesh_info=where)

    return place


# ------------------------------------------------------------------ once per step
def router_biases(model: Transformer, *, mesh: DeviceMesh) -> dict[str, Tensor]:
    """State that no gradient reaches, by name: to be saved and loaded in place. The same on all ranks of a stage."""
    names = tuple(axis for axis in mesh.mesh_dim_names if axis != "pp")
    biases = {f"{name}.bias": module.bias for name, module in model.named_modules()
              if isinstance(module, Router) and module.bias is not None}
    return {name: DTensor.from_local(bias, mesh[names], [Replicate()] * len(names), run_check=False)
            for name, bias in biases.items()}


@torch.no_grad()
def update_balance(model_parts: tuple[Transformer, ...], *, mesh: DeviceMesh) -> None:
    """Bias balancing: every rank counts what its tokens chose in this step; all of them move the bias alike."""
    routers = [moe.router for part in model_parts for moe in moe_blocks(part)]
    if not routers:
        return
    if routers[0].bias is not None:
        # one small message for all layers
        loads = all_reduce(torch.stack([router.load for router in routers]), mesh=mesh, axes=TOKEN_AXES)
        for router, load in zip(routers, loads):
            router.update_bias(load)
    for router in routers:
        router.load.zero_()
