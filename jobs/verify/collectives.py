"""Which collectives a rank issues: operation, axis, bytes, times.

Used by jobs.verify on a fake group and by tests on a real one: it looks at what is dispatched, whoever answers.
"""
import collections

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from jobs.mesh import fsdp_mesh
from jobs.spec.verification import Collective

# c10d's names; a receive is its sender's to count
OPS = {"_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter", "allreduce_": "all_reduce",
       "alltoall_base_": "all_to_all", "send": "send_recv"}


def axes_of_groups(mesh: DeviceMesh, expert_mesh: DeviceMesh | None) -> dict[str, str]:
    """Name of a group → axis of the layout. What is shared over dp_shard·cp is the plan's dp_shard, and so are the
    experts that ep leaves on several ranks; where dp_shard is 1 the first of these groups is cp's."""
    found = {}
    if expert_mesh is not None:
        found |= {expert_mesh.get_group("expert_fsdp").group_name: "dp_shard",
                  expert_mesh.get_group("dp_replicate").group_name: "dp_replicate",
                  expert_mesh.get_group("ep").group_name: "ep"}
    found[fsdp_mesh(mesh).get_group().group_name] = "dp_shard"
    return found | {mesh.get_group(axis).group_name: axis for axis in mesh.mesh_dim_names}


class CollectiveLog(TorchDispatchMode):
    """Counts (axis, op, bytes of the whole tensor). A group that `axes` does not name has the axis ''."""

    def __init__(self, axes: dict[str, str] | None = None) -> None:
        super().__init__()
        self.axes = axes or {}
        self.seen: collections.Counter[tuple[str, str, int]] = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and (op := OPS.get(func.overloadpacket.__name__)):
            sizes = [t.numel() * t.element_size() for t in tensors_of(args)]
            # of what is received an all_to_all's peers decide: what is sent counts
            payload = sizes[1] if op == "all_to_all" else max(sizes)
            # ep's ranks may be those of another axis, and then it is the same group; only experts exchange all to all
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
