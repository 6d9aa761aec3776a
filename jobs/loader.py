"""Which tokens a rank trains on at which step, and having them ready in time.

Called by the trainer. The sample in a slot is a pure function of (seed, data_cursor, slot): it does not
depend on the layout, on what was read before, or on a restart.
"""
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from jobs.data.mixture import Mixture
from jobs.data.shuffle import permute
from jobs.data.token_file import TokenFile
from jobs.loss import IGNORED
from jobs.spec.load import Problem, SpecError
from jobs.spec.tokens import num_sequences
from jobs.spec.training import DataSpec

READ_AHEAD = 2  # batches: one slow read of a shared file system is not waited for
PLACES_AT_ONCE = 64  # batches whose samples are looked up together: it takes hardly longer than for one


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One rank's share of a step."""

    inputs: Tensor  # int64 [slots, this rank's part of seq_len], on the device
    targets: Tensor  # the same, one token on; IGNORED where nothing is to be predicted
    # int32 [slots, seq_len], of whole sequences and on the host, where which blocks are empty is decided: the number of
    # each token's document in its sequence, from 0. None unless documents are masked.
    documents: Tensor | None = None


class Loader:
    """Batches of one data-parallel share of the slots, read from memory-mapped token files.

    `data` names token files only (jobs.spec.tokens.with_token_files). `slots` is this rank's share of
    range(layout.slots); a slot from global_batch_size on holds no sample and its targets weigh nothing. `chunks` of
    `num_chunks` equal chunks of each sequence are this rank's, where sequences are split over ranks. The batches after
    the one asked for are read by a thread meanwhile (behind number `num_batches` - 1 the first again): create a Loader
    only in a process that will not fork any more.
    Raises SpecError if the data does not fit; a run's has been checked before (jobs.spec.tokens.fit_problems).
    """

    def __init__(self, data: DataSpec, *, seq_len: int, vocab_size: int, global_batch_size: int, seed: int,
                 slots: range, device: torch.device, chunks: tuple[int, ...] = (0,), num_chunks: int = 1,
                 num_batches: int | None = None) -> None:
        self.files = [TokenFile(Path(source.path)) for source in data.all_sources]
        self.num_sequences = [num_sequences(file.info, seq_len=seq_len) for file in self.files]
        for file, held in zip(self.files, self.num_sequences):
            if held < 1:
                raise SpecError([Problem(where="training.seq_len", value=seq_len, message=f"is more than the "
                                         f"{file.info.num_tokens:,} tokens of {file.path} give; shorten it")])
        self.mixture = Mixture(tuple(source.weight for source in data.all_sources))
        self.document_mask = data.document_mask
        self.ignore_document_ends = data.ignores_document_ends
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.slots = slots
        self.num_batches = num_batches
        size = seq_len // num_chunks
        # (columns of the rank's part, columns of the sequence)
        self.parts = [(slice(i * size, (i + 1) * size), slice(chunk * size, (chunk + 1) * size))
                      for i, chunk in enumerate(chunks)]
        self.num_columns = size * len(chunks)
        self.device = device
        self._places: tuple[int, np.ndarray, np.ndarray] | None = None  # of a block of batches
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader", initializer=_choose,
                                        initargs=(device,))
        self._ahead: deque[tuple[int, Future[Batch]]] = deque()

    def batch(self, data_cursor: int) -> Batch:
        """The batch number `data_cursor` (from 0). Raises SpecError for a token outside the vocabulary."""
        if not self._ahead or self._ahead[0][0] != data_cursor:
            for _, unwanted in self._ahead:
                unwanted.cancel()
            self._ahead.clear()
        if not self._ahead:
            self._order(data_cursor)
        read = self._ahead.popleft()[1].result()
        inputs, targets = (t.to(self.device, non_blocking=True) for t in (read.inputs, read.targets))
        for cursor in range(data_cursor + 1 + len(self._ahead), data_cursor + 1 + READ_AHEAD):
            self._order(cursor)  # last: the thread that is woken takes Python's lock from this one
        return Batch(inputs=inputs, targets=targets, documents=read.documents)

    def _order(self, cursor: int) -> None:
        if self.num_batches is not None:
            cursor %= self.num_batches
        self._ahead.append((cursor, self._pool.submit(self._read, cursor)))

    def places(self, data_cursor: int) -> tuple[np.ndarray, np.ndarray]:
        """(source, sequence in it) of the sample in each of this rank's slots; the sequence is -1 for none."""
        block, row = divmod(data_cursor, PLACES_AT_ONCE)
        known = self._places
        if known is None or known[0] != block:
            self._places = known = block, *self._places_from(block * PLACES_AT_ONCE)
        return known[1][row], known[2][row]

    def _places_from(self, first: int) -> tuple[np.ndarray, np.ndarray]:
        """places() of PLACES_AT_ONCE batches, [batches, slots]."""
        cursors = np.arange(first, first + PLACES_AT_ONCE)[:, None]
        slots = np.arange(self.slots.start, self.slots.stop)
        sources, ordinals = self.mixture.locate(cursors * self.global_batch_size + slots)
        found = np.full(sources.shape, -1, dtype=np.int64)
        for source, size in enumerate(self.num_sequences):
            held = (slots < self.global_batch_size) & (sources == source)
            for epoch in np.unique(ordinals[held] // size):
                here = held & (ordinals // size == epoch)
                found[here] = permute(ordinals[here] % size, size=size, seed=self.seed, epoch=int(epoch), source=source)
        return sources, found

    def _read(self, data_cursor: int) -> Batch:
        shape = len(self.slots), self.num_columns
        inputs, targets = np.zeros(shape, dtype=np.int64), np.full(shape, IGNORED, dtype=np.int64)
        documents = np.zeros((len(self.slots), self.seq_len), dtype=np.int32) if self.document_mask else None
        held = [(row, self.files[source], sequence * self.seq_len)
                for row, (source, sequence) in enumerate(zip(*self.places(data_cursor))) if sequence >= 0]
        for _, file, start in held:
            file.will_need(start, self.seq_len + 1)
        for row, file, start in held:
            window = self._window(file, start)
            following = window[1:]
            if documents is not None or self.ignore_document_ends:
                starts = file.document_starts(start + 1, start + self.seq_len + 1) - start
                if documents is not None:
                    documents[row, starts[starts < self.seq_len]] = 1
                if self.ignore_document_ends:
                    following = following.copy()
                    following[starts - 1] = IGNORED
            for mine, columns in self.parts:
                inputs[row, mine], targets[row, mine] = window[:-1][columns], following[columns]
        pin = self.device.type == "cuda"
        inputs, targets = (torch.from_numpy(a).pin_memory() if pin else torch.from_numpy(a) for a in (inputs, targets))
        if documents is not None:
            documents = torch.from_numpy(documents.cumsum(axis=1, dtype=np.int32))
        return Batch(inputs=inputs, targets=targets, documents=documents)

    def _window(self, file: TokenFile, start: int) -> np.ndarray:
        """A sample and the token behind it: targets are the inputs, one token on."""
        window = file.window(start, self.seq_len + 1)
        # what nobody has declared is only seen here; on a GPU it would end in an assertion without a name
        declared = file.info.vocab_size is not None and file.info.vocab_size <= self.vocab_size
        if not declared and not 0 <= window.min() <= window.max() < self.vocab_size:
            bad = int(window.max() if window.min() >= 0 else window.min())
            raise SpecError([Problem(where="model.vocab_size", value=self.vocab_size, message=f"does not cover token "
                                     f"{bad} of {file.path}, within {self.seq_len} tokens from {start}; raise it, or "
                                     "tokenize the data otherwise")])
        return window

    def close(self) -> None:
        """Stop reading ahead."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def _choose(device: torch.device) -> None:
    """In the reading thread, which begins with GPU 0: pinning memory there would give each rank a context on it."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
