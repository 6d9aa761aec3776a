"""Files in the safetensors format: a length, a JSON header and raw tensor bytes. Nothing is pickled.

Used by jobs.weights. Written here rather than taken from a package because a rank reads only its own rows of
each tensor, straight from the mapped file. Format: https://huggingface.co/docs/safetensors
"""
import json
import math
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
          "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
          "BOOL": torch.bool}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class SafetensorsError(ValueError):
    """A file or folder is not what the format says; the message names it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int  # byte in the file


class Folder:
    """All tensors of a folder's .safetensors files, by name; mapped, so that only what is used is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: dict[str, tuple[mmap.mmap, _Entry]] = {}
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise SafetensorsError(f"{path}: holds no .safetensors file")
        for file in files:
            for name, mapped, entry in _open(file):
                if name in self._entries:
                    raise SafetensorsError(f"{file}: holds {name!r}, which another file of the folder holds, too")
                self._entries[name] = mapped, entry

    def names(self) -> list[str]:
        return list(self._entries)

    def tensor(self, name: str) -> Tensor:
        """A view of the mapped file: read-only."""
        if name not in self._entries:
            raise SafetensorsError(f"{self.path}: holds no tensor {name!r}")
        mapped, entry = self._entries[name]
        count = math.prod(entry.shape)
        if count == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        return torch.frombuffer(mapped, dtype=entry.dtype, count=count, offset=entry.first).view(entry.shape)


def _open(file: Path) -> Iterator[tuple[str, mmap.mmap, _Entry]]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 + length:
            raise SafetensorsError(f"{file}: has {size} bytes, its header alone would take {8 + length}")
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise SafetensorsError(f"{file}: header is not JSON: {error}") from error
        # a private copy on write: torch wants a writable buffer, and nothing here writes
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    for name, described in header.items():
        if name == "__metadata__":
            continue
        first, end = (8 + length + offset for offset in described["data_offsets"])
        dtype, shape = DTYPES.get(described["dtype"]), tuple(described["shape"])
        if dtype is None:
            raise SafetensorsError(f"{file}: {name!r} has dtype {described['dtype']!r}; known are {', '.join(DTYPES)}")
        if end > size or end - first != torch.Size(shape).numel() * dtype.itemsize:
            raise SafetensorsError(f"{file}: {name!r} of shape {list(shape)} does not fit its bytes {first} to {end}")
        yield name, mapped, _Entry(dtype=dtype, shape=shape, first=first)


def write(path: Path, tensors: dict[str, Tensor]) -> int:
    """One file, tensors in the given order. Returns the bytes of the tensors."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % 8)  # tensors begin aligned
    with path.open("wb") as stream:
        stream.write(len(content).to_bytes(8, "little") + content)
        for tensor in tensors.values():
            stream.write(memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
    return at


def write_folder(folder: Path, tensors: Iterable[tuple[str, Tensor]], *, max_file_bytes: int = 5 * 10**9) -> None:
    """As many files as needed and the index that ties them together. Tensors are taken one by one, so that never more
    than one file's worth is in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[list[str]] = []
    held: dict[str, Tensor] = {}
    total = held_bytes = 0

    def flush() -> None:
        nonlocal total, held_bytes
        total += write(folder / f"part-{len(parts):05d}.safetensors", held)
        parts.append(list(held))
        held.clear()
        held_bytes = 0

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if held and held_bytes + size > max_file_bytes:
            flush()
        held[name] = tensor
        held_bytes += size
    flush()
    if len(parts) == 1:
        (folder / "part-00000.safetensors").rename(folder / SINGLE)
        return
    where = {}
    for i, names in enumerate(parts):
        final = f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        (folder / f"part-{i:05d}.safetensors").rename(folder / final)
        where |= dict.fromkeys(names, final)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1))
