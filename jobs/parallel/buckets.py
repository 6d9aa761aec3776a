"""Data parallelism with whole weights: replicas alone (dp_replicate), and ZeRO-1 (arXiv:1910.02054).

Built by jobs.parallel where nothing, or only the optimizer's state, is sharded. Every rank computes with whole
weights in param_dtype; the optimizer updates float32 *masters*: this rank's rows of them under ZeRO-1, the weights
themselves where they are float32. A bucket is a unit of jobs.parallel.data, so messages are as many and as large as
there. A gradient moves into its bucket's message as soon as a backward pass has it, while it is in cache, and is
dropped: the message is where microbatches are summed, and gradients exist once. Over data-parallel ranks they are
*summed*: the loss has already been divided by the global token count.

Collectives, once per step and unit; P = the unit's weights / tp in param_dtype, G = the same in reduce_dtype, rows
rounded up to a multiple of fsdp = dp_shard·cp:

    op               axis           bytes    when
    reduce_scatter   fsdp           G        as soon as the last microbatch's backward has left the unit
    all_reduce       dp_replicate   G/fsdp   behind it: when the next unit's reduction starts, or at the end
    all_gather       fsdp           P        after the update, waited for where the unit is used next
"""
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from jobs.mesh import local_of
from jobs.parallel.collectives import Work, reduce_scatter


class Master:
    """The float32 rows of one weight that this rank updates, as a parameter of global shape."""

    def __init__(self, weight: nn.Parameter, *, shards: DeviceMesh, replicas: DeviceMesh) -> None:
        num_shards = shards.size()
        self.weight = weight
        self.whole = local_of(weight).detach()  # of this tp rank
        rows = self.whole.shape[0]
        self.padded_rows = -(-rows // num_shards)
        first = min(shards.get_local_rank() * self.padded_rows, rows)
        mine = self.whole.narrow(0, first, min(self.padded_rows, rows - first))
        self.shares_storage = mine.dtype == torch.float32
        self.local = mine if self.shares_storage else torch.empty_like(mine, dtype=torch.float32)
        self.numel = self.padded_rows * self.whole[0].numel()  # of one shard in a bucket, padding included
        self.at = 0  # where they begin; its bucket says
        self._mesh, self._placements = _placed(weight, shards=shards, replicas=replicas)
        if self.shares_storage and num_shards == replicas.size() == 1:
            self.parameter = weight
        else:
            self.parameter = nn.Parameter(self.wrap(self.local))

    def rows_in(self, buffer: Tensor, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Where in its bucket's `buffer`, [shards, numel], the rows of `whole`, of the weight's shape, lie: row r with
        shard r // padded_rows. Pairs of views that cover `whole`."""
        part, rows = buffer[:, self.at:self.at + self.numel], whole.shape[0]
        if rows == len(part) * self.padded_rows:
            yield part, whole.reshape(len(part), -1)
            return
        for shard in range(-(-rows // self.padded_rows)):
            here = whole[shard * self.padded_rows:(shard + 1) * self.padded_rows]
            yield part[shard, :here.numel()], here.reshape(-1)

    def wrap_gradient(self, local: Tensor) -> Tensor:
        """As `wrap`. DTensor.from_local goes through autograd and checks the mesh: 6% of a small model's step."""
        return local if self._mesh is None else DTensor(local, self.parameter._spec, requires_grad=False)

    def wrap(self, local: Tensor) -> Tensor:
        """`local` as a tensor of the weight's global shape; itself where nothing is spread over ranks."""
        if self._mesh is None:
            return local
        return DTensor.from_local(local, self._mesh, self._placements, run_check=False, shape=self.weight.shape,
                                  stride=self.weight.stride())


def _placed(weight: Tensor, *, shards: DeviceMesh, replicas: DeviceMesh) -> tuple[DeviceMesh | None, list]:
    """Mesh and placements of a master: replicas × row shards × what tensor or expert parallelism has done to the
    weight."""
    meshes, placements = [], []
    if replicas.size() > 1:
        meshes.append(replicas)
        placements.append(Replicate())
    if shards.size() > 1:
        # rows that tp has already split are split once more inside each tp shard
        split = weight.device_mesh.size() if isinstance(weight, DTensor) and weight.placements[0].is_shard(0) else 1
        meshes.append(shards)
        placements.append(_StridedShard(0, split_factor=split) if split > 1 else Shard(0))
    if isinstance(weight, DTensor):
        meshes.append(weight.device_mesh)
        placements += weight.placements
    if not meshes:
        return None, []
    return (DeviceMesh._concatenate(meshes) if len(meshes) > 1 else meshes[0]), placements


class _Bucket:
    """One unit: its masters, and the buffers of the collective that is under way."""

    def __init__(self, masters: list[Master], *, shards: DeviceMesh, replicas: DeviceMesh) -> None:
        self.masters = masters
        self.shards = shards
        self.replicas = replicas
        self.numel = 0  # of one shard's part of the buffers
        for master in masters:
            master.at, self.numel = self.numel, self.numel + master.numel
        self.waiting = 0  # backward passes of its weights still to come in this step
        self.summed: Tensor | None = None  # this step's gradients so far, [fsdp, numel]
        self.reduced: Tensor | None = None  # this rank's part of the sum, flat
        self.to_replicate = False  # still to be summed over replicas
        self.gathered: Tensor | None = None  # [fsdp, numel]
        self.work: list[Work] = []

    def add(self, master: Master, grad: Tensor, *, dtype: torch.dtype) -> None:
        """One backward pass's gradient of one weight."""
        first = self.summed is None or master not in self._added
        if self.summed is None:
            self._begin(dtype)
        for into, rows in master.rows_in(self.summed, grad):
            into.copy_(rows) if first else into.add_(rows)
        self._added.add(master)

    def take(self, *, dtype: torch.dtype) -> Tensor:
        """The whole message, [fsdp, numel]."""
        if self.summed is None:
            self._begin(dtype)
        for master in self.masters:
            if master not in self._added:  # no token of this rank has used it
                self.summed[:, master.at:master.at + master.numel].zero_()
        summed, self.summed = self.summed, None
        return summed

    def _begin(self, dtype: torch.dtype) -> None:
        # zeroed only where a last shard has fewer rows: what is there is summed, too
        padded = any(master.padded_rows * self.shards.size() > len(master.whole) for master in self.masters)
        empty = torch.zeros if padded else torch.empty
        self.summed = empty(self.shards.size(), self.numel, dtype=dtype, device=self.masters[0].whole.device)
        self._added: set[Master] = set()

    def wait(self) -> None:
        while self.work:
            self.work.pop().wait()

    def unpack(self, module: nn.Module | None = None, args: tuple = ()) -> None:
        """A forward pre-hook: the gathered weights are in place before they are used."""
        if self.gathered is None:
            return
        self.wait()
        for master in self.masters:
            for mine, rows in master.rows_in(self.gathered, master.whole):
                rows.copy_(mine)
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
        self._bucket_of: dict[nn.Parameter, _Bucket] = {}
        self._master_of: dict[nn.Parameter, Master] = {}
        built = [self._build(unit) for unit in units]
        self.buckets = [bucket for bucket in built if bucket.masters]
        # Started in this order whatever the order in which gradients come: it must be the same on every rank.
        self._order = self.buckets[::-1]
        self._begin()

    def _build(self, unit: Unit) -> _Bucket:
        weights = [p for module in unit.modules for p in module.parameters() if p not in self._bucket_of]
        masters = [Master(weight, shards=unit.shards, replicas=unit.replicas) for weight in dict.fromkeys(weights)]
        bucket = _Bucket(masters, shards=unit.shards, replicas=unit.replicas)
        for master in bucket.masters:
            self._bucket_of[master.weight], self._master_of[master.weight] = bucket, master
            master.weight.register_post_accumulate_grad_hook(self.accumulated)
        for module in unit.modules:
            module.register_forward_pre_hook(bucket.unpack)
        return bucket

    def _begin(self) -> None:
        self._started = 0
        for bucket in self.buckets:
            bucket.waiting = len(bucket.masters) * self._num_backwards

    def master_of(self, weight: nn.Parameter) -> nn.Parameter:
        """What the optimizer updates in place of `weight`."""
        return self._master_of[weight].parameter

    # -------------------------------------------------------------- gradients
    def held_gradients(self) -> list[Tensor]:
        """What this holds of gradients beside weight.grad: sums over microbatches, and parts that are reduced."""
        return [held for b in self.buckets for held in (b.summed, b.reduced) if held is not None]

    def accumulated(self, weight: nn.Parameter) -> None:
        """One backward pass has added to weight.grad: autograd calls it, or a schedule that went round autograd."""
        bucket, grad = self._bucket_of[weight], weight.grad
        if grad is not None:
            bucket.add(self._master_of[weight], local_of(grad), dtype=self._sum_dtype)
            weight.grad = None
        bucket.waiting -= 1
        while self._started < len(self._order) and self._order[self._started].waiting <= 0:
            self._start()

    def finish(self) -> None:
        """Wait for all reductions; every master's gradient is then the sum over all data-parallel ranks."""
        while self._started < len(self._order):  # weights that no token of this rank has used
            self._start()
        self._replicate(self._order[-1])
        for bucket in self._order:
            bucket.wait()
            reduced, bucket.reduced = bucket.reduced.float(), None
            for master in bucket.masters:
                grad = reduced[master.at:master.at + master.local.numel()].view_as(master.local)
                master.parameter.grad = master.wrap_gradient(grad)
        self._begin()

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
                self._gather(bucket)
            else:
                for master in bucket.masters:
                    if not master.shares_storage:
                        master.whole.copy_(master.local)

    def _gather(self, bucket: _Bucket) -> None:
        whole = bucket.masters[0].whole
        mine = torch.empty(bucket.numel, dtype=whole.dtype, device=whole.device)
        for master in bucket.masters:
            mine[master.at:master.at + master.local.numel()].copy_(master.local.reshape(-1))
        bucket.gathered = mine.new_empty(bucket.shards.size(), bucket.numel)
        bucket.work.append(dist.all_gather_single(bucket.gathered.view(-1), mine, group=bucket.shards.get_group(),
                                                  async_op=True))

