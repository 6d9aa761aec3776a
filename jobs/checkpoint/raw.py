"""The files of a checkpoint: raw tensor bytes and a JSON index per rank. Nothing is pickled.

Used by jobs.checkpoint only. `rank-00003.bin` holds tensor chunks one after the other, little-endian;
`rank-00003.json` says for every chunk its tensor, dtype, global shape, place in it, place in the file and
crc32. When the supervisor commits, the indices become the lines of one file, so that a rank that resumes reads two
files and those that hold its own tensors; indices of their own are read as well. Reader and writer follow the plans of
torch.distributed.checkpoint for one rank alone: they need no coordinator and know no mesh.
"""
import dataclasses
import io
import json
import math
import os
import zlib
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties,
                                                   TensorStorageMetadata)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner

from jobs.spec.load import SpecError, from_dict, to_dict
from jobs.spec.reports import ShardFile
from jobs.spec.rundir import MANIFEST, rank_index

FORMAT = 1
DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64,
                                          torch.int32, torch.uint8, torch.bool)}


class CheckpointCorrupt(RuntimeError):
    """A checkpoint cannot be trusted; the message names its step and the file."""


# ------------------------------------------------------------------ what a rank's json file says
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """One rectangular piece of one tensor."""

    tensor: str
    dtype: str
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]  # of the piece in it
    sizes: tuple[int, ...]
    byte_offset: int  # in the .bin file
    num_bytes: int
    crc32: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ShardIndex:
    format: int
    step: int
    data_cursor: int
    rank: int
    layout: dict[str, Any]  # Layout.flat()
    chunks: tuple[Chunk, ...]


# ------------------------------------------------------------------ write
class RawWriter:
    """Tensor bytes one after the other into rank-N.bin. For one rank alone: it needs no coordinator."""

    def __init__(self, folder: Path, *, rank: int) -> None:
        self.folder = folder
        self.name = f"rank-{rank:05d}.bin"
        self.file: ShardFile | None = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> tuple[Chunk, ...]:
        chunks, position, checksum = [], 0, 0
        with (self.folder / self.name).open("wb") as stream:
            for item in plan.items:
                data = _bytes_of(planner.resolve_data(item))
                stream.write(data)
                checksum = zlib.crc32(data, checksum)
                described = item.tensor_data
                chunks.append(Chunk(tensor=item.index.fqn, dtype=str(described.properties.dtype),
                                    shape=tuple(described.size), offsets=tuple(described.chunk.offsets),
                                    sizes=tuple(described.chunk.sizes), byte_offset=position, num_bytes=len(data),
                                    crc32=zlib.crc32(data)))
                position += len(data)
            stream.flush()
            os.fsync(stream.fileno())
        self.file = ShardFile(name=self.name, size_bytes=position, checksum=f"crc32:{checksum:08x}")
        return tuple(chunks)

    def write_index(self, index: ShardIndex) -> ShardFile:
        """Write and sync the description, then the folder: a new name is durable only once its folder is."""
        content = json.dumps(to_dict(index)).encode()
        path = self.folder / rank_index(index.rank)
        with path.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return ShardFile(name=path.name, size_bytes=len(content), checksum=_checksum(content))


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


# ------------------------------------------------------------------ read
class RawReader:
    """Chunks out of the rank-N.bin files that the manifest lists; each is checked before it is used."""

    def __init__(self, folder: Path, *, step: int) -> None:
        self.folder = folder
        self.step = step
        self.indices: list[ShardIndex] = []
        self._files: dict[str, ShardFile] = {}
        self._chunks: dict[MetadataIndex, tuple[str, Chunk]] = {}

    def read_metadata(self, wanted: Collection[str] | None = None) -> Metadata:
        """The union of all ranks' indices, complete or refused. Of the `wanted` tensors; None: of all."""
        self._files = files = self._listed_files()
        for name in sorted(name for name in files if name.endswith((".json", ".jsonl"))):
            self._read_indices(files[name], wanted)
        if not self.indices:
            raise self._corrupt(MANIFEST, "lists no rank's index")
        by_tensor: dict[str, list[Chunk]] = defaultdict(list)
        for index in self.indices:
            data_file = f"rank-{index.rank:05d}.bin"
            if data_file not in files:
                raise self._corrupt(data_file, "is not listed in the manifest")
            for chunk in index.chunks:
                by_tensor[chunk.tensor].append(chunk)
                self._chunks[MetadataIndex(chunk.tensor, chunk.offsets)] = data_file, chunk
        return Metadata(state_dict_metadata={name: self._describe(name, chunks) for name, chunks in by_tensor.items()})

    def require(self, wanted: dict[str, Tensor]) -> None:
        """Raises CheckpointCorrupt naming tensors that are absent or of another shape."""
        shapes = {chunk.tensor: chunk.shape for _, chunk in self._chunks.values()}
        for name, tensor in wanted.items():
            if name not in shapes:
                raise self._corrupt(MANIFEST, f"covers no tensor {name!r}; is it a checkpoint of this model?")
            if shapes[name] != tuple(tensor.shape):
                raise self._corrupt(MANIFEST, f"holds {name!r} with shape {shapes[name]}, the model needs "
                                              f"{tuple(tensor.shape)}")

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        by_file = defaultdict(lambda: defaultdict(list))
        for item in plan.items:
            name, _ = self._chunks[item.storage_index]
            by_file[name][item.storage_index].append(item)
        for name, by_chunk in by_file.items():
            with self._open(self._files[name]) as stream:
                for storage_index, items in by_chunk.items():
                    piece = self._read_chunk(stream, *self._chunks[storage_index])
                    for item in items:
                        _fill(item, piece, planner)

    def _listed_files(self) -> dict[str, ShardFile]:
        try:
            manifest = json.loads((self.folder / MANIFEST).read_text())
            files = [from_dict(ShardFile, file) for file in manifest["files"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._corrupt(MANIFEST, f"cannot be read: {error}") from error
        return {file.name: file for file in files}

    def _open(self, file: ShardFile) -> BinaryIO:
        """Looked at only when it is needed: a resume by every rank would ask for the state of every rank's file."""
        path = self.folder / file.name
        if not path.is_file():
            raise self._corrupt(file.name, "is missing")
        if path.stat().st_size != file.size_bytes:
            raise self._corrupt(file.name, f"has {path.stat().st_size} bytes where the manifest says {file.size_bytes}")
        return path.open("rb")

    def _read_indices(self, file: ShardFile, wanted: Collection[str] | None) -> None:
        with self._open(file) as stream:
            content = stream.read()
        if _checksum(content) != file.checksum:
            raise self._corrupt(file.name, f"has {_checksum(content)} where the manifest says {file.checksum}")
        for line in io.BytesIO(content):
            try:
                said = json.loads(line)
                chunks = tuple(_chunk(one) for one in said["chunks"] if wanted is None or one["tensor"] in wanted)
                index = dataclasses.replace(from_dict(ShardIndex, said | {"chunks": []}), chunks=chunks)
            except (SpecError, ValueError, KeyError, TypeError) as error:
                raise self._corrupt(file.name, f"cannot be understood: {error}") from error
            if index.format != FORMAT or index.step != self.step:
                raise self._corrupt(file.name, f"is of format {index.format}, step {index.step}; expected format "
                                               f"{FORMAT}, step {self.step}")
            self.indices.append(index)

    def _describe(self, name: str, chunks: list[Chunk]) -> TensorStorageMetadata:
        """Chunks never overlap, because each has one owner: they are complete if their sizes add up."""
        whole = math.prod(chunks[0].shape)
        found = sum(math.prod(chunk.sizes) for chunk in chunks)
        if found != whole:
            raise self._corrupt(MANIFEST, f"covers {found} of the {whole} elements of {name!r}")
        if chunks[0].dtype not in DTYPES:
            raise self._corrupt(MANIFEST, f"covers {name!r} of unknown dtype {chunks[0].dtype!r}")
        return TensorStorageMetadata(
            properties=TensorProperties(dtype=DTYPES[chunks[0].dtype]), size=torch.Size(chunks[0].shape),
            chunks=[ChunkStorageMetadata(offsets=torch.Size(c.offsets), sizes=torch.Size(c.sizes)) for c in chunks])

    def _read_chunk(self, stream: BinaryIO, name: str, chunk: Chunk) -> Tensor:
        stream.seek(chunk.byte_offset)
        data = bytearray(stream.read(chunk.num_bytes))
        if len(data) != chunk.num_bytes or zlib.crc32(data) != chunk.crc32:
            raise self._corrupt(name, f"has a wrong checksum in {chunk.tensor!r} at byte {chunk.byte_offset}")
        flat = torch.frombuffer(data, dtype=DTYPES[chunk.dtype]) if data else torch.empty(0, dtype=DTYPES[chunk.dtype])
        return flat.view(chunk.sizes)

    def _corrupt(self, name: str, what: str) -> CheckpointCorrupt:
        return CheckpointCorrupt(f"checkpoint of step {self.step}: {self.folder / name} {what}")


def _chunk(said: dict[str, Any]) -> Chunk:
    """As from_dict in a fraction of its time: there is one per rank of nearly every tensor."""
    return Chunk(**{name: tuple(value) if isinstance(value, list) else value for name, value in said.items()})


def _fill(item: ReadItem, source: Tensor, planner: LoadPlanner) -> None:
    for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths)):
        source = source.narrow(dim, offset, length)
    target = planner.resolve_tensor(item).detach()
    target.copy_(source)
    planner.commit_tensor(item, target)


def _checksum(content: bytes) -> str:
    return f"crc32:{zlib.crc32(content):08x}"
