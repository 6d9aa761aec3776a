"""A token file, memory-mapped: windows of its tokens, and where documents begin in them.

Called by jobs.loader and jobs.data.inspect. All ranks of a node share the pages; neither tokens nor index are ever read
as a whole.
"""
import bisect
import mmap
from pathlib import Path

import numpy as np

from jobs.spec.tokens import BYTES, index_path, read_header, read_info


class TokenFile:
    """Raises SpecError if `path` is not a token file with its index."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.info = read_info(path)
        header = read_header(path)
        self._token_bytes = BYTES[header.dtype]
        with path.open("rb") as stream:
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        self._tokens = np.frombuffer(self._map, dtype=np.dtype(header.dtype).newbyteorder("<"))
        index = index_path(path)
        # asarray: still mapped, but a memmap's own way to give one number takes ten times as long
        self.offsets = np.asarray(np.memmap(index, "<i8", "r", header.offsets_at, (header.num_sequences,)))
        self._marks = range(header.num_sequences)
        if header.num_marks > 1:
            self._marks = np.asarray(np.memmap(index, "<i8", "r", header.marks_at, (header.num_marks - 1,)))

    def will_need(self, start: int, length: int) -> None:
        """Have the pages of a window read in one go: a slow file system would else be asked for one after another."""
        first = start * self._token_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_WILLNEED, first, (start + length) * self._token_bytes - first)

    def window(self, start: int, length: int) -> np.ndarray:
        """A copy of `length` tokens, int64."""
        return self._tokens[start:start + length].astype(np.int64)

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """Positions p, start ≤ p < stop, of tokens that begin a document; ascending, int64."""
        # not numpy's searchsorted: it would copy the whole index, which is never aligned
        first = bisect.bisect_left(self._marks, start, key=self._position)
        last = bisect.bisect_left(self._marks, stop, lo=first, key=self._position)
        marks = np.asarray(self._marks[first:last], dtype=np.int64)
        marks = marks[marks < len(self.offsets)]  # a document without a sequence may be the last
        return np.unique(self.offsets[marks] // self._token_bytes)

    def _position(self, sequence: int) -> int:
        if sequence == len(self.offsets):
            return len(self._tokens)
        return int(self.offsets[sequence]) // self._token_bytes
