"""The DeviceMesh of a layout, and this rank's place in it.

Called by jobs.train. The order of axes and the rank numbers come from ParallelDims, so that placement,
which never sees a DeviceMesh, speaks of the same coordinates.
"""
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from jobs.spec.parallel import ParallelDims

FSDP_AXES = ("dp_shard", "cp")
LOSS_AXES = ("dp_replicate", "dp_shard", "cp")  # over which the shares of a loss add up


def build_mesh(dims: ParallelDims, *, device: torch.device) -> DeviceMesh:
    """All axes of `dims.order`, those of size 1 included. Raises ValueError if the world does not fit."""
    if dist.get_world_size() != dims.world_size:
        shape = " × ".join(f"{axis}={getattr(dims, axis)}" for axis in dims.order)
        raise ValueError(f"world_size: {dist.get_world_size()} ranks were started, but the layout {shape} needs "
                         f"{dims.world_size}")
    mesh = init_device_mesh(device.type, dims.shape, mesh_dim_names=dims.order)
    if dims.dp_shard > 1 and dims.cp > 1:
        # Ranks that split a sequence hold the same weights: they are shards of them like dp_shard's.
        mesh[tuple(axis for axis in dims.order if axis in FSDP_AXES)]._flatten("fsdp")
    return mesh


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The 1-D mesh over which one copy of the weights is sharded: dp_shard × cp, named after the axis that is not 1."""
    split = [axis for axis in FSDP_AXES if axis_size(mesh, axis) > 1]
    return mesh["fsdp"] if len(split) > 1 else mesh[split[0] if split else "dp_shard"]


def coordinate(mesh: DeviceMesh) -> dict[str, int]:
    """This rank's index along each axis."""
    return {axis: mesh.get_local_rank(axis) for axis in mesh.mesh_dim_names}


def axis_size(mesh: DeviceMesh, axis: str) -> int:
    return mesh.size(mesh.mesh_dim_names.index(axis))


def all_reduce(tensor: Tensor, *, mesh: DeviceMesh, axes: tuple[str, ...]) -> Tensor:
    """Sum in place over the named axes, one axis after the other: small messages stay on the fast links
    and no group has to span the world."""
    for axis in axes:
        if axis_size(mesh, axis) > 1:
            dist.all_reduce(tensor, group=mesh.get_group(axis))
    return tensor


def start_all_reduce(tensor: Tensor, *, mesh: DeviceMesh, axes: tuple[str, ...]) -> Callable[[], Tensor]:
    """As all_reduce, behind other work: starts along the first axis, and whoever wants the sum calls what is returned
    (every rank must)."""
    axes = [axis for axis in axes if axis_size(mesh, axis) > 1]
    work = [dist.all_reduce(tensor, group=mesh.get_group(axis), async_op=True) for axis in axes[:1]]

    def finish() -> Tensor:
        for started in work:
            started.wait()
        return all_reduce(tensor, mesh=mesh, axes=axes[1:])

    return finish


def is_owner(tensor: Tensor, *, axes: tuple[str, ...] | None = None) -> bool:
    """Of a tensor that several ranks along `axes` (None: along any axis of its mesh) hold in full, exactly one rank is
    the owner: coordinate 0."""
    if not isinstance(tensor, DTensor):
        return True
    mesh = tensor.device_mesh
    return all(not placement.is_replicate() or (axes and axis not in axes) or mesh.get_local_rank(axis) == 0
               for axis, placement in zip(mesh.mesh_dim_names, tensor.placements, strict=True))


def local_of(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
