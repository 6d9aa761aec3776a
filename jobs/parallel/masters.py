"""What the optimizer updates of a weight that every rank holds whole, and where it lies in a message.

Built by jobs.parallel.buckets, one per weight: float32 and this rank's rows of it under ZeRO; the weight itself where
that is float32 and nothing is spread over ranks. Rows are those of dimension 0; of experts that are fewer than the
ranks, or do not divide, each expert's own. A buffer of a bucket is [shards, numel]: each weight has the same
columns in the row of every shard, so that one collective moves all of them. This knows no collective.
"""
import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from jobs.mesh import local_of


class Master:
    """The float32 rows of one weight that this rank updates, as a parameter of global shape. `sum_dtype`: in which
    several backward passes are summed before they are reduced, if they are."""

    def __init__(self, weight: nn.Parameter, *, shards: DeviceMesh, replicas: DeviceMesh,
                 sum_dtype: torch.dtype | None) -> None:
        num_shards = shards.size()
        self.weight = weight
        self.whole = local_of(weight).detach()  # of this tp rank
        shape = self.whole.shape
        self._dim = 1 if len(shape) > 2 and shape[0] % num_shards and shape[1] % num_shards == 0 else 0
        rows = shape[self._dim]
        self.padded_rows = -(-rows // num_shards)
        first = min(shards.get_local_rank() * self.padded_rows, rows)
        mine = self.whole.narrow(self._dim, first, min(self.padded_rows, rows - first))
        self.shares_storage = mine.dtype == torch.float32 and mine.is_contiguous()
        self.local = mine if self.shares_storage else torch.empty_like(mine, dtype=torch.float32,
                                                                       memory_format=torch.contiguous_format)
        self.numel = self.padded_rows * (self.whole.numel() // rows)  # of one shard in a bucket, padding included
        self._num_shards = num_shards
        self.is_even = rows == num_shards * self.padded_rows
        self._is_flat = self.is_even and self._dim == 0 and self.whole.is_contiguous()
        self.pieces = self.cut(self.whole)
        self.is_new = True  # this step's message holds nothing of it yet
        # its part of the message, of its own shape and type, is weight.grad: autograd adds further passes there
        self.sums_in_message = sum_dtype == weight.dtype and num_shards == 1 and not isinstance(weight, DTensor)
        self.summed: Tensor | None = None
        self._mesh, self._placements = _placed(weight, shards=shards, replicas=replicas, dim=self._dim)
        if self.shares_storage and num_shards == replicas.size() == 1:
            self.parameter = weight
        else:
            self.parameter = nn.Parameter(self._wrap(self.local))

    def cut(self, whole: Tensor) -> list[Tensor]:
        """Views that cover `whole`, of the weight's shape: row r is with shard r // padded_rows. Where all shards have
        as many rows it is one, [shards, …]; else one flat view per shard that has any."""
        if self._is_flat:  # with as few operations as can be: it runs for every weight, amid backward
            return [whole.reshape(self._num_shards, -1)]
        if self.is_even:
            return [whole.unflatten(self._dim, (self._num_shards, self.padded_rows)).movedim(self._dim, 0)]
        return [rows.reshape(-1) for rows in whole.split(self.padded_rows)]

    def places(self, part: Tensor) -> list[Tensor]:
        """Where in `part`, this weight's columns of a buffer [shards, numel], the pieces of cut() lie."""
        if self._is_flat:
            return [part]
        if self.is_even:
            return [part.unflatten(1, self.local.shape)]
        return [row[:piece.numel()] for row, piece in zip(part, self.pieces)]

    def _wrap(self, local: Tensor) -> Tensor:
        """`local` as a tensor of the weight's global shape; itself where nothing is spread over ranks."""
        if self._mesh is None:
            return local
        return DTensor.from_local(local, self._mesh, self._placements, run_check=False, shape=self.weight.shape,
                                  stride=self.weight.stride())


def _placed(weight: Tensor, *, shards: DeviceMesh, replicas: DeviceMesh, dim: int) -> tuple[DeviceMesh | None, list]:
    """Mesh and placements of a master: replicas × row shards × what tensor or expert parallelism has done to the
    weight."""
    meshes, placements = [], []
    if replicas.size() > 1:
        meshes.append(replicas)
        placements.append(Replicate())
    if shards.size() > 1:
        # rows that tp has already split are split once more inside each tp shard
        split = weight.device_mesh.size() if isinstance(weight, DTensor) and weight.placements[0].is_shard(dim) else 1
        meshes.append(shards)
        placements.append(_StridedShard(dim, split_factor=split) if split > 1 else Shard(dim))
    if isinstance(weight, DTensor):
        meshes.append(weight.device_mesh)
        placements += weight.placements
    if not meshes:
        return None, []
    return (DeviceMesh._concatenate(meshes) if len(meshes) > 1 else meshes[0]), placements
