"""Which collectives a rank issues: operation, axis, bytes, times.

Used by jobs.verify on a fake group and by tests on a real one: it looks at what is dispatched, whoever answers.
"""
import collections

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from jobs.mesh import fsdp_mesh
from jobs.spec.verification import SHARED, Collective

# c10d's names; a receive is its sender's to count
OPS = {"_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter", "allreduce_": "all_reduce",
       "alltoall_base_": "all_to_all", "send": "send_recv"}


def axes_of_groups(mesh: DeviceMesh, expert_mesh: DeviceMesh | None) -> dict[str, str]:
    """Name of a group → axis of the layout, or several joined by SHARED: where dp_shard is 1 weights are sharded over
    cp's own group, and all axes of the size of the world have torch's one group of it. What is shared over dp_shard·cp
    is the plan's dp_shard, and so are the experts that ep leaves on several ranks."""
    groups = [(mesh.get_group(axis), axis) for axis in mesh.mesh_dim_names]
    groups.append((fsdp_mesh(mesh).get_group(), "dp_shard"))
    if expert_mesh is not None:
        groups += [(expert_mesh.get_group(name), axis) for name, axis in
                   (("expert_fsdp", "dp_shard"), ("dp_replicate", "dp_replicate"), ("ep", "ep"))]
    found: dict[str, set[str]] = collections.defaultdict(set)
    for group, axis in groups:
        found[group.group_name].add(axis)
    return {name: SHARED.join(sorted(axes)) for name, axes in found.items()}


class CollectiveLog(TorchDispatchMode):
    """Counts (axis, op, bytes of the whole tensor). A group that `axes` does not name has the axis ''. gloo's
    reduce-scatter, an all-to-all of numbers in equal parts (jobs.parallel.collectives), counts as what it is for."""

    def __init__(self, axes: dict[str, str] | None = None) -> None:
        super().__init__()
        self.axes = axes or {}
        self.seen: collections.Counter[tuple[str, str, int]] = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and (op := OPS.get(func.overloadpacket.__name__)):
            sizes = [t.numel() * t.element_size() for t in tensors_of(args)]
            # of what is received an all_to_all's peers decide: what is sent counts
            payload = sizes[1] if op == "all_to_all" else max(sizes)
            if op == "all_to_all" and args[1].is_floating_point() and not args[3]:
                op = "reduce_scatter"
            # whoever shares ep's group: only experts exchange all to all
            axis = "ep" if op == "all_to_all" else self.axes.get(group_name(args), "")
            self.seen[axis, op, payload] += 1
        return func(*args, **kwargs or {})

    def collectives(self) -> tuple[Collective, ...]:
        return tuple(Collective(axis=axis, op=op, payload_bytes=payload, times=times)
                     for (axis, op, payload), times in sorted(self.seen.items()))


def tensors_of(args: tuple) -> list[Tensor]:
    return [t for arg in args for t in (arg if isinstance(arg, list | tuple) else [arg]) if isinstance(t, Tensor)]


def group_name(args: tuple) -> str:
    """Of the group among a c10d operation's arguments."""
    for arg in args:
        if isinstance(arg, ProcessGroup):
            return arg.group_name
        if type(arg).__name__ == "ScriptObject" and "ProcessGroup" in str(arg._type()):
            return ProcessGroup.unbox(arg).group_name
    return ""
