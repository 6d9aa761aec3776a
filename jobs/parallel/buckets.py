"""Data parallelism with whole weights: replicas alone (dp_replicate), and ZeRO-1 (arXiv:1910.02054).

Built by jobs.parallel where nothing, or only the optimizer's state, is sharded. Every rank computes with whole
weights in param_dtype; the optimizer updates float32 *masters*: this rank's rows of them under ZeRO-1, the weights
themselves where they are float32. A bucket is a unit of jobs.parallel.data, so messages are as many and as large as
there. A gradient moves into its bucket's message as soon as the last backward pass has it, while it is in cache, and
is dropped: gradients exist once. Microbatches are summed in float32: by autograd in weight.grad where it sums in that,
else in the message. Over data-parallel ranks they are *summed*, too: the loss has already been divided by the global
token count.

Collectives, once per step and unit; P = the unit's weights / tp in param_dtype, G = the same in reduce_dtype, rows
rounded up to a multiple of fsdp = dp_shard·cp:

    op               axis           bytes    when
    reduce_scatter   fsdp           G        as soon as the last microbatch's backward has left the unit
    all_reduce       dp_replicate   G/fsdp   behind it: when the next unit's reduction starts, or at the end
    all_gather       fsdp           P        after the update, waited for where the unit is used next
"""
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jobs.mesh import local_of
from jobs.parallel.collectives import Work, reduce_scatter
from jobs.parallel.masters import Master


class _Bucket:
    """One unit: its masters, and the buffers of the collective that is under way."""

    def __init__(self, masters: list[Master], *, shards: DeviceMesh, replicas: DeviceMesh) -> None:
        self.masters = masters
        self.shards = shards
        self.replicas = replicas
        self._sizes = [master.numel for master in masters]
        self.numel = sum(self._sizes)  # of one shard's part of the buffers
        # zeroed only where a last shard has fewer rows: what is there is summed, too
        self._empty = torch.empty if all(master.is_even for master in masters) else torch.zeros
        self.waiting = 0  # backward passes of its weights still to come in this step
        self.summed: Tensor | None = None  # this step's gradients so far, [fsdp, numel]
        self.reduced: Tensor | None = None  # this rank's part of the sum, flat
        self.to_replicate = False  # still to be summed over replicas
        self.gathered: Tensor | None = None  # [fsdp, numel]
        self.work: list[Work] = []

    def add(self, master: Master, *, dtype: torch.dtype) -> None:
        """Move what one weight has of gradient into the message."""
        if (grad := master.weight.grad) is None:
            return
        if self.summed is None:
            self._begin(dtype)
        for into, rows in zip(master.into, master.cut(local_of(grad))):
            into.copy_(rows) if master.is_new else into.add_(rows)
        master.weight.grad, master.is_new = None, False

    def take(self, *, dtype: torch.dtype) -> Tensor:
        """The whole message, [fsdp, numel]."""
        if self.summed is None:
            self._begin(dtype)
        for master in self.masters:
            self.add(master, dtype=dtype)  # not every pass has used it
            if master.is_new:  # no token of this rank has
                for into in master.into:
                    into.zero_()
            master.into, master.is_new = [], True
        summed, self.summed = self.summed, None
        return summed

    def _begin(self, dtype: torch.dtype) -> None:
        self.summed = self._empty(self.shards.size(), self.numel, dtype=dtype, device=self.masters[0].whole.device)
        for master, part in zip(self.masters, self.summed.split(self._sizes, dim=1)):
            master.into = master.places(part)

    def wait(self) -> None:
        while self.work:
            self.work.pop().wait()

    def results(self) -> dict[nn.Parameter, Tensor]:
        """Of each weight this rank's rows of the sum, in float32."""
        self.wait()
        reduced, self.reduced = self.reduced.float(), None
        return {m.weight: (part if m.is_even else part[:m.local.numel()]).view_as(m.local)
                for m, part in zip(self.masters, reduced.split(self._sizes))}

    def gather(self) -> None:
        """Start to gather what the masters have become."""
        whole = self.masters[0].whole
        mine = whole.new_empty(self.numel)  # without data where the weights have none
        torch._foreach_copy_([part[:m.local.numel()] for m, part in zip(self.masters, mine.split(self._sizes))],
                             [m.local.reshape(-1) for m in self.masters])
        self.gathered = mine.new_empty(self.shards.size(), self.numel)
        self.work.append(dist.all_gather_single(self.gathered.view(-1), mine, group=self.shards.get_group(),
                                                async_op=True))

    def unpack(self, module: nn.Module | None = None, args: tuple = ()) -> None:
        """A forward pre-hook: the gathered weights are in place before they are used."""
        if self.gathered is None:
            return
        self.wait()
        parts = zip(self.masters, self.gathered.split(self._sizes, dim=1))
        torch._foreach_copy_([piece for m in self.masters for piece in m.pieces],
                             [place for m, part in parts for place in m.places(part)])
        self.gathered = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Modules whose weights are reduced together, and the 1-D meshes over which: shards of the optimizer's state, and
    replicas of those."""

    modules: list[nn.Module]
    shards: DeviceMesh
    replicas: DeviceMesh


class Buckets:
    """Whole weights of this rank's model parts, reduced bucket by bucket while backward goes on.

    `units`: in the order of forward, of one or several model parts; a weight belongs to the first unit that has it.
    `num_backwards`: backward passes per step, after the last of which a weight's gradient is complete.
    """

    def __init__(self, units: list[Unit], *, num_backwards: int, reduce_dtype: torch.dtype) -> None:
        self._num_backwards = num_backwards
        self._reduce_dtype = reduce_dtype
        self._sum_dtype = torch.float32 if num_backwards > 1 else reduce_dtype
        self._home: dict[nn.Parameter, tuple[_Bucket, Master]] = {}
        built = [self._build(unit) for unit in units]
        self.buckets = [bucket for bucket in built if bucket.masters]
        # Started in this order whatever the order in which gradients come: it must be the same on every rank.
        self._order = self.buckets[::-1]
        self._begin()

    def _build(self, unit: Unit) -> _Bucket:
        weights = [p for module in unit.modules for p in module.parameters() if p not in self._home]
        masters = [Master(weight, shards=unit.shards, replicas=unit.replicas) for weight in dict.fromkeys(weights)]
        bucket = _Bucket(masters, shards=unit.shards, replicas=unit.replicas)
        for master in bucket.masters:
            self._home[master.weight] = bucket, master
            master.weight.register_post_accumulate_grad_hook(self.accumulated)
        for module in unit.modules if unit.shards.size() > 1 else ():
            module.register_forward_pre_hook(bucket.unpack)
        return bucket

    def _begin(self) -> None:
        self._started = 0
        for bucket in self.buckets:
            bucket.waiting = len(bucket.masters) * self._num_backwards

    def master_of(self, weight: nn.Parameter) -> nn.Parameter:
        """What the optimizer updates in place of `weight`."""
        return self._home[weight][1].parameter

    # -------------------------------------------------------------- gradients
    def held_gradients(self) -> list[Tensor]:
        """What this holds of gradients beside weight.grad: sums over microbatches, and parts that are reduced."""
        return [held for b in self.buckets for held in (b.summed, b.reduced) if held is not None]

    def accumulated(self, weight: nn.Parameter) -> None:
        """One backward pass has added to weight.grad: autograd calls it, or a schedule that went round autograd."""
        bucket, master = self._home[weight]
        bucket.waiting -= 1
        if bucket.waiting < len(bucket.masters) or weight.dtype != self._sum_dtype:  # the last pass, or not autograd's
            bucket.add(master, dtype=self._sum_dtype)
        while self._started < len(self._order) and self._order[self._started].waiting <= 0:
            self._start()

    def finish(self) -> dict[nn.Parameter, Tensor]:
        """Wait for all reductions. Of every weight: its master's gradient, summed over all data-parallel ranks."""
        while self._started < len(self._order):  # weights that no token of this rank has used
            self._start()
        self._replicate(self._order[-1])
        found = {weight: grad for bucket in self._order for weight, grad in bucket.results().items()}
        self._begin()
        return found

    def _start(self) -> None:
        """Reduce the next bucket in order."""
        bucket = self._order[self._started]
        if self._started > 0:
            self._replicate(self._order[self._started - 1])
        self._started += 1
        message = bucket.take(dtype=self._sum_dtype).to(self._reduce_dtype)
        bucket.to_replicate = bucket.replicas.size() > 1
        if bucket.shards.size() == 1:
            bucket.reduced = message.view(-1)
            self._replicate(bucket)
        else:
            bucket.reduced = message.new_empty(bucket.numel)
            bucket.work.append(reduce_scatter(bucket.reduced, message, group=bucket.shards.get_group()))

    def _replicate(self, bucket: _Bucket) -> None:
        """The second half of a reduction: its result is summed over replicas."""
        if bucket.to_replicate:
            bucket.to_replicate = False
            bucket.wait()
            bucket.work.append(dist.all_reduce(bucket.reduced, group=bucket.replicas.get_group(), async_op=True))

    # -------------------------------------------------------------- weights
    @torch.no_grad()
    def refresh_weights(self) -> None:
        """After the masters have changed: gather them into the weights. Returns before that is complete; the next
        forward waits, unit by unit."""
        for bucket in self.buckets:
            if bucket.shards.size() > 1:
                bucket.gather()
            else:
                for master in bucket.masters:
                    if not master.shares_storage:
                        master.whole.copy_(master.local)
