"""What a rank of a gloo group really sends: collectives and bytes, counted where they reach c10d."""
import collections

import torch
from torch.utils._python_dispatch import TorchDispatchMode

OPS = {"_allgather_base_": "all_gather", "allreduce_": "all_reduce", "send": "send_recv"}


class CommunicationLog(TorchDispatchMode):
    """Counts collectives and the bytes of the full tensors they move; of an all_to_all, those that are sent.

    gloo's reduce-scatter is an all-to-all of gradients or activations in equal parts (jobs.parallel.collectives);
    experts' tokens have uneven parts, their counts are integers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: collections.Counter[tuple[str, int]] = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if func.namespace == "c10d":
            tensors = [t for arg in args for t in (arg if isinstance(arg, list | tuple) else [arg])
                       if isinstance(t, torch.Tensor)]
            sizes = [t.numel() * t.element_size() for t in tensors]
            if name == "alltoall_base_":
                reduces = tensors[1].is_floating_point() and not args[3]
                self.seen["reduce_scatter" if reduces else "all_to_all", sizes[1]] += 1
            elif name in OPS:
                self.seen[OPS[name], max(sizes)] += 1
            assert name != "_reduce_scatter_base_", "slow on gloo: use jobs.parallel.collectives"
        return func(*args, **kwargs or {})
