"""Data parallelism with whole weights: replicas alone (dp_replicate), ZeRO-1 and ZeRO-2 (arXiv:1910.02054).

Built by jobs.parallel where the weights themselves are not sharded. Every rank computes with whole weights in
param_dtype; the optimizer updates float32 *masters*: this rank's rows of them under ZeRO, the weights themselves where
they are float32. A bucket is a unit of jobs.parallel.data, so messages are as many and as large as there. A gradient
moves into its bucket's message as soon as a backward pass has it, while it is in cache, and is dropped: gradients exist
once. Microbatches are summed in float32: in the message; or, where gradients are sharded (Layout.shards_gradients), in
this rank's rows, behind a reduction of every microbatch. Over data-parallel ranks they are *summed*, too: the loss has
already been divided by the global token count.

Collectives per step and unit; P = the unit's weights / tp in param_dtype, G = the same in reduce_dtype, rows rounded up
to a multiple of fsdp = dp_shard·cp, m = num_microbatches:

    op               axis           bytes    when
    reduce_scatter   fsdp           G        as soon as the last microbatch's backward has left the unit; m times, with
                                             every microbatch's, where gradients are sharded
    all_reduce       dp_replicate   G/fsdp   behind the last: when the next unit's reduction starts, or at the end
    all_gather       fsdp           P        after the update: of the first units at once, of each other one when the
                                             one AHEAD before it is used; waited for where the unit is used
"""
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jobs.parallel.bucket import Bucket
from jobs.parallel.masters import Master


AHEAD = 2  # units that are gathered before they are used: with all of them weights would be there twice


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Weights that are reduced together, the modules that use them, and the 1-D meshes over which: shards of the
    optimizer's state, and replicas of those."""

    modules: list[nn.Module]
    weights: list[nn.Parameter]
    is_used_first: bool = False  # of its model part, whatever its place
    shards: DeviceMesh
    replicas: DeviceMesh


class _Round:
    """Buckets that are reduced one after the other, in the order in which backward leaves them: it must be the same on
    every rank, whatever the order in which gradients come. `num_backwards`: passes before they are."""

    def __init__(self, buckets: list[Bucket], *, num_backwards: int) -> None:
        self.order = buckets[::-1]
        self._num_backwards = num_backwards
        self._begin()

    def _begin(self) -> None:
        self._started = 0
        for bucket in self.order:
            bucket.waiting = len(bucket.masters) * self._num_backwards

    @property
    def next(self) -> Bucket | None:
        """Whose turn it is."""
        return self.order[self._started] if self._started < len(self.order) else None

    def complete(self) -> Iterator[Bucket]:
        """Those whose turn it is and that have all gradients."""
        while self._started < len(self.order) and self.order[self._started].waiting <= 0:
            self._started += 1
            yield self.order[self._started - 1]

    def rest(self) -> list[Bucket]:
        """All passes are over: those with weights that not every pass has used. Another round begins."""
        rest = self.order[self._started:]
        self._begin()
        return rest


class Buckets:
    """Whole weights of this rank's model parts, reduced bucket by bucket while backward goes on.

    `parts`: of each model part its units, in the order in which forward first uses their weights; a weight belongs to
    the first unit that has it.
    `num_backwards`: backward passes of every part per step. They are summed and reduced once, or, `in_shards`, reduced
    one by one and summed in this rank's rows.
    """

    def __init__(self, parts: list[list[Unit]], *, num_backwards: int, in_shards: bool,
                 reduce_dtype: torch.dtype) -> None:
        self._num_reductions = num_backwards if in_shards else 1
        self._in_shards = in_shards
        self._several = num_backwards > 1 and not in_shards  # passes before a reduction
        self._reduce_dtype = reduce_dtype
        self._sum_dtype = reduce_dtype if in_shards or num_backwards == 1 else torch.float32
        self._home: dict[nn.Parameter, tuple[Bucket, Master]] = {}
        by_unit = [[(unit, bucket) for unit in units if (bucket := self._build(unit)).masters] for units in parts]
        built = [[bucket for _, bucket in of_part] for of_part in by_unit]
        self.buckets = [bucket for of_part in built for bucket in of_part]
        self._rounds = [_Round(of_part, num_backwards=1) for of_part in built] if in_shards else [
            _Round(self.buckets, num_backwards=num_backwards)]
        self._round_of = {bucket: one for one in self._rounds for bucket in one.order}
        self._last: Bucket | None = None  # whose reduction was started last
        first = {bucket for of_part in by_unit for unit, bucket in of_part if unit.is_used_first}
        self._by_use = sorted((b for b in self.buckets if b.shards.size() > 1), key=lambda b: b not in first)
        self._to_gather: list[Bucket] = []
        self._begin()

    def _build(self, unit: Unit) -> Bucket:
        sum_dtype = self._sum_dtype if self._several else None
        masters = [Master(weight, shards=unit.shards, replicas=unit.replicas, sum_dtype=sum_dtype)
                   for weight in dict.fromkeys(unit.weights) if weight not in self._home]
        bucket = Bucket(masters, shards=unit.shards, replicas=unit.replicas)
        for master in bucket.masters:
            self._home[master.weight] = bucket, master
            master.weight.register_post_accumulate_grad_hook(functools.partial(self._arrived, bucket, master))
        for module in unit.modules if unit.shards.size() > 1 else ():
            module.register_forward_pre_hook(functools.partial(self._used, bucket))
        return bucket

    def _begin(self) -> None:
        for bucket in self.buckets:
            bucket.reductions = self._num_reductions

    def master_of(self, weight: nn.Parameter) -> nn.Parameter:
        """What the optimizer updates in place of `weight`."""
        return self._home[weight][1].parameter

    # -------------------------------------------------------------- gradients
    def held_gradients(self) -> list[Tensor]:
        """What this holds of gradients beside weight.grad: sums over microbatches, and parts that are reduced."""
        return [held for b in self.buckets for held in (b.summed, b.reduced, b.total) if held is not None]

    def accumulated(self, weight: nn.Parameter) -> None:
        """A schedule that went round autograd has added to weight.grad."""
        self._arrived(*self._home[weight])

    def _arrived(self, bucket: Bucket, master: Master, *_: nn.Parameter) -> None:
        """A backward pass has added to weight.grad; a hook of autograd's."""
        this = self._round_of[bucket]
        bucket.waiting -= 1
        # of the only pass when it is the bucket's turn: a message before that would only take memory
        if self._several or bucket is this.next and bucket.waiting < len(bucket.masters):
            if self._in_shards and bucket is this.order[0]:  # has had all of a forward
                self._settle_last()
            bucket.add(master, dtype=self._sum_dtype)
        if bucket.waiting <= 0:
            for complete in this.complete():
                self._start(complete)

    def backward_done(self, part: int) -> None:
        """A backward pass of a part (its place in `parts`) is over, whatever weights it has used."""
        if self._in_shards:
            self._end(self._rounds[part])

    def finish(self) -> dict[nn.Parameter, Tensor]:
        """Wait for all reductions. Of every weight: its master's gradient, summed over all data-parallel ranks."""
        if not self._in_shards:
            self._end(self._rounds[0])
        for bucket in self.buckets[::-1]:
            bucket.settle()
        found = {weight: grad for bucket in self.buckets[::-1] for weight, grad in bucket.results().items()}
        self._begin()
        return found

    def _end(self, this: _Round) -> None:
        for bucket in this.rest():
            self._start(bucket)

    def _start(self, bucket: Bucket) -> None:
        """Reduce it, and finish the one before: waiting for that earlier would hold up the backward between them."""
        self.gather_rest()  # what this rank's forward has not used another's may have
        self._settle_last()
        self._last = bucket
        bucket.reduce(sum_dtype=self._sum_dtype, dtype=self._reduce_dtype)

    def _settle_last(self) -> None:
        if self._last is not None and (self._in_shards or self._last.replicas.size() > 1):
            self._last.settle()

    # -------------------------------------------------------------- weights
    @torch.no_grad()
    def refresh_weights(self) -> None:
        """After the masters have changed: gather them into the weights. Returns before that is complete; the next
        forward waits, unit by unit."""
        self._to_gather = list(self._by_use)
        self._gather(AHEAD)
        for bucket in self.buckets:
            for master in bucket.masters if bucket.shards.size() == 1 else ():
                if not master.shares_storage:
                    master.whole.copy_(master.local)

    def gather_rest(self) -> None:
        """Start all gathers that wait for their turn."""
        self._gather(len(self._to_gather))

    def _gather(self, number: int) -> None:
        """Of the buckets that are still to be gathered: as ever in the same order on every rank."""
        for bucket in self._to_gather[:number]:
            bucket.gather()
        del self._to_gather[:number]

    @torch.no_grad()
    def _used(self, bucket: Bucket, *module_and_args: Any) -> None:
        """A forward pre-hook: the gathered weights are in place before they are used."""
        if bucket in self._to_gather:  # others were to be used first
            self._gather(self._to_gather.index(bucket) + 1)
        if bucket.gathered is not None:
            bucket.unpack()
            self._gather(1)
