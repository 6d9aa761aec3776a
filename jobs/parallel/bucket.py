"""One bucket: a unit's masters, the message in which its gradients are reduced, and the one that brings weights back.

Built by jobs.parallel.buckets, which says when. Messages are [shards, numel]; each weight has the same columns in the
row of every shard (jobs.parallel.masters).
"""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jobs.mesh import local_of
from jobs.parallel.collectives import Work, reduce_scatter
from jobs.parallel.masters import Master


class Bucket:
    """Its masters, and the buffers of the collective that is under way."""

    def __init__(self, masters: list[Master], *, shards: DeviceMesh, replicas: DeviceMesh) -> None:
        self.masters = masters
        self.shards = shards
        self.replicas = replicas
        self._sizes = [master.numel for master in masters]
        self.numel = sum(self._sizes)  # of one shard's part of the buffers
        # zeroed only where a last shard has fewer rows: what is there is summed, too
        self._empty = torch.empty if all(master.is_even for master in masters) else torch.zeros
        self.waiting = 0  # backward passes of its weights still to come before it is reduced
        self.reductions = 0  # still to come in this step
        self.summed: Tensor | None = None  # gradients since the last reduction, [shards, numel]
        self._parts: dict[Master, Tensor] = {}  # its columns
        self._sent: Tensor | None = None  # as long as it is under way, whatever the backend holds
        self.reduced: Tensor | None = None  # this rank's part of their sum over ranks, flat; under way until settled
        self.total: Tensor | None = None  # of this step's reductions so far
        self.gathered: Tensor | None = None  # [shards, numel]
        self.work: list[Work] = []

    def add(self, master: Master, *, dtype: torch.dtype) -> None:
        """Move what one weight has of gradient into the message."""
        if (grad := master.weight.grad) is None or grad is master.summed:
            return
        if self.summed is None:
            self._begin(dtype)
        part = self._parts[master]
        if master.sums_in_message:
            master.summed = part.view(grad.shape)
            master.summed.copy_(grad)  # where another has taken its place, that holds the sum
        else:
            for into, rows in zip(master.places(part), master.cut(local_of(grad))):
                into.copy_(rows) if master.is_new else into.add_(rows)
        master.weight.grad, master.is_new = master.summed, False

    def reduce(self, *, sum_dtype: torch.dtype, dtype: torch.dtype) -> None:
        """Start it; nothing may be under way."""
        message = self._take(dtype=sum_dtype).to(dtype)
        if self.shards.size() == 1:
            self.reduced = message.view(-1)
            self.settle()
        else:
            self._sent, self.reduced = message, message.new_empty(self.numel)
            self.work.append(reduce_scatter(self.reduced, message, group=self.shards.get_group()))

    def _take(self, *, dtype: torch.dtype) -> Tensor:
        """The whole message, [shards, numel]."""
        if self.summed is None:
            self._begin(dtype)
        for master in self.masters:
            self.add(master, dtype=dtype)  # not every pass has used it
            if master.is_new:  # no token of this rank has
                self._parts[master].zero_()
            master.is_new = True
            if master.sums_in_message:
                master.weight.grad = master.summed = None
        summed, self.summed = self.summed, None
        self._parts.clear()
        return summed

    def _begin(self, dtype: torch.dtype) -> None:
        self.summed = self._empty(self.shards.size(), self.numel, dtype=dtype, device=self.masters[0].whole.device)
        self._parts.update(zip(self.masters, self.summed.split(self._sizes, dim=1)))

    def wait(self) -> None:
        while self.work:
            self.work.pop().wait()

    def settle(self) -> None:
        """Wait for the reduction under way, add its result to the others' and, behind the last, sum over replicas."""
        if self.reduced is None:
            return
        self.wait()
        self._sent = None
        self.reductions -= 1
        reduced, self.reduced = self.reduced, None
        if self.total is not None:
            self.total += reduced
        else:
            self.total = reduced if self.reductions == 0 else reduced.float()
        if self.reductions == 0 and self.replicas.size() > 1:
            self.total = self.total.to(reduced.dtype)
            self.work.append(dist.all_reduce(self.total, group=self.replicas.get_group(), async_op=True))

    def results(self) -> dict[nn.Parameter, Tensor]:
        """Of each weight this rank's rows of the sum, in float32, once settled."""
        self.wait()
        total, self.total = self.total.float(), None
        return {m.weight: (part if m.is_even else part[:m.local.numel()]).view_as(m.local)
                for m, part in zip(self.masters, total.split(self._sizes))}

    def gather(self) -> None:
        """Start to gather what the masters have become."""
        whole = self.masters[0].whole
        mine = whole.new_empty(self.numel)  # without data where the weights have none
        torch._foreach_copy_([part[:m.local.numel()] for m, part in zip(self.masters, mine.split(self._sizes))],
                             [m.local.reshape(-1) for m in self.masters])
        self.gathered = mine.new_empty(self.shards.size(), self.numel)
        self.work.append(dist.all_gather_single(self.gathered.view(-1), mine, group=self.shards.get_group(),
                                                async_op=True))

    def unpack(self) -> None:
        """The gathered weights into their place."""
        self.wait()
        parts = zip(self.masters, self.gathered.split(self._sizes, dim=1))
        torch._foreach_copy_([piece for m in self.masters for piece in m.pieces],
                             [place for m, part in parts for place in m.places(part)])
        self.gathered = None
