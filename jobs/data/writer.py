"""Writing a token file, its index and its description: all of them, or none.

Called by whoever has tokens: jobs.tokens and jobs.data.tokenize. Memory does not grow with the file.
"""
import json
import os
import shutil
import zlib
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np

from jobs.spec.load import to_dict
from jobs.spec.tokens import HEADER, MAGIC, NUMBERS, TokensInfo, index_path, info_path

BLOCK = 2**20  # entries of the index that are in memory at once


class TokenWriter:
    """To be used in a `with`: what is not committed at its end is removed."""

    def __init__(self, out: Path, *, dtype: str) -> None:
        self.out = out
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.num_tokens = self.num_sequences = self.num_documents = 0
        self._checksum = 0
        self._parts = {name: out.with_name(f"{out.name}.{os.getpid()}.{name}.part")
                       for name in ("tokens", "lengths", "marks", "index", "info")}
        self._files: dict[str, BinaryIO] = {}

    def __enter__(self) -> Self:
        self._files = {name: self._parts[name].open("w+b") for name in ("tokens", "lengths", "marks", "index", "info")}
        return self

    def __exit__(self, *_: object) -> None:
        for name, file in self._files.items():
            file.close()
            self._parts[name].unlink(missing_ok=True)

    def write(self, tokens: np.ndarray, *, lengths: np.ndarray, opens: np.ndarray) -> None:
        """Sequences one after the other: `lengths` of each, and whether it opens a document or continues the last."""
        raw = tokens.astype(self.dtype, copy=False).tobytes()
        self._files["tokens"].write(raw)
        self._checksum = zlib.crc32(raw, self._checksum)
        self._files["lengths"].write(np.asarray(lengths, dtype="<i4").tobytes())
        marks = self.num_sequences + np.flatnonzero(opens)
        self._files["marks"].write(marks.astype("<i8").tobytes())
        self.num_tokens += len(tokens)
        self.num_sequences += len(lengths)
        self.num_documents += len(marks)

    def commit(self, *, vocab_size: int, tokenizer: str, eod: int | None, inputs_sha256: str,
               tokenizer_path: str | None = None) -> TokensInfo:
        """Let all of it appear. The index comes last: who finds it finds the rest."""
        info = TokensInfo(num_tokens=self.num_tokens, dtype=self.dtype.name, num_documents=self.num_documents,
                          vocab_size=vocab_size, tokenizer=tokenizer, tokenizer_path=tokenizer_path, eod=eod,
                          inputs_sha256=inputs_sha256, checksum=f"crc32:{self._checksum:08x}")
        self._write_index()
        self._files["info"].write(json.dumps(to_dict(info), indent=1).encode() + b"\n")
        index_path(self.out).unlink(missing_ok=True)
        for name, final in (("tokens", self.out), ("info", info_path(self.out)), ("index", index_path(self.out))):
            self._files[name].flush()
            os.fsync(self._files[name].fileno())
            os.replace(self._parts[name], final)
        return info

    def _write_index(self) -> None:
        index, lengths, marks = (self._files[name] for name in ("index", "lengths", "marks"))
        code = next(code for code, name in NUMBERS.items() if name == self.dtype.name)
        index.write(HEADER.pack(MAGIC, 1, code, self.num_sequences, self.num_documents + 1))
        lengths.seek(0)
        shutil.copyfileobj(lengths, index)
        lengths.seek(0)
        end = 0
        while block := lengths.read(4 * BLOCK):
            ends = end + np.frombuffer(block, dtype="<i4").cumsum(dtype="<i8") * self.dtype.itemsize
            index.write(np.concatenate(([end], ends[:-1])).astype("<i8").tobytes())
            end = int(ends[-1])
        marks.write(np.array([self.num_sequences], dtype="<i8").tobytes())
        marks.seek(0)
        shutil.copyfileobj(marks, index)
