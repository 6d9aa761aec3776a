"""Which tokens a rank trains on at which step, and having them ready in time.

Called by the trainer. The sample in a slot is a pure function of (seed, data_cursor, slot): it does not
depend on the layout, on what was read before, or on a restart.
"""
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from jobs.loss import IGNORED
from jobs.spec.load import Problem, SpecError
from jobs.tokens import read_info

ROUNDS = 4  # of the Feistel network; three already give a pseudo-random permutation (Luby & Rackoff, 1988)


def permute(positions: np.ndarray, *, size: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of range(size), evaluated only where asked: needs no index in memory.

    A Feistel network over the next power of four, walked along its cycle until the value is in range
    (Black & Rogaway, "Ciphers with arbitrary finite domains", 2002). positions and result: int64.
    """
    half = np.uint64(max(1, -(-(size - 1).bit_length() // 2)))
    mask = np.uint64((1 << int(half)) - 1)
    keys = [_mix(np.uint64([seed & 0xFFFFFFFFFFFFFFFF])) for _ in range(ROUNDS)]
    keys = [_mix(key ^ np.uint64(epoch * ROUNDS + i)) for i, key in enumerate(keys)]
    values = positions.astype(np.uint64)
    walking = np.ones(len(values), dtype=bool)
    while walking.any():
        left, right = values[walking] >> half, values[walking] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        values[walking] = (left << half) | right
        walking = values >= np.uint64(size)
    return values.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser: every input bit reaches every output bit."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is meant
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


class Loader:
    """Batches of one data-parallel share of the slots, read from the memory-mapped token file.

    `slots` is this rank's share of range(layout.slots); a slot from global_batch_size on holds no sample
    and its targets weigh nothing. `chunks` of `num_chunks` equal chunks of each sequence are this rank's, where
    sequences are split over ranks. The batch after the one asked for is read by a thread meanwhile: create
    a Loader only in a process that will not fork any more.
    """

    def __init__(self, tokens: Path, *, seq_len: int, vocab_size: int, global_batch_size: int, seed: int, slots: range,
                 device: torch.device, chunks: tuple[int, ...] = (0,), num_chunks: int = 1) -> None:
        info = read_info(tokens)
        self.num_sequences = (info.num_tokens - 1) // seq_len
        self._refuse(info.vocab_size, vocab_size=vocab_size, num_tokens=info.num_tokens, seq_len=seq_len)
        self.tokens = np.memmap(tokens, dtype=info.dtype, mode="r")
        self.seq_len = seq_len
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.slots = slots
        size = seq_len // num_chunks
        self.columns = np.concatenate([np.arange(chunk * size, (chunk + 1) * size) for chunk in chunks])
        self.device = device
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        self._ahead: tuple[int, Future] | None = None

    def _refuse(self, tokens_vocab: int, *, vocab_size: int, num_tokens: int, seq_len: int) -> None:
        problems = []
        if tokens_vocab > vocab_size:
            problems.append(Problem(where="model.vocab_size", value=vocab_size,
                                    message=f"is below the data's vocabulary of {tokens_vocab}"))
        if self.num_sequences < 1:
            problems.append(Problem(where="training.seq_len", value=seq_len,
                                    message=f"is more than the data's {num_tokens} tokens give; shorten it"))
        if problems:
            raise SpecError(problems)

    def batch(self, data_cursor: int) -> tuple[Tensor, Tensor]:
        """(inputs, targets), int64 [len(slots), this rank's part of seq_len] on the device, for the batch number
        `data_cursor` (from 0)."""
        if self._ahead is not None and self._ahead[0] == data_cursor:
            inputs, targets = self._ahead[1].result()
        else:
            inputs, targets = self._read(data_cursor)
        self._ahead = data_cursor + 1, self._pool.submit(self._read, data_cursor + 1)
        return tuple(t.to(self.device, non_blocking=True) for t in (inputs, targets))

    def sequences(self, data_cursor: int) -> np.ndarray:
        """Which sequence of the token file each of this rank's slots holds, -1 for none."""
        slots = np.arange(self.slots.start, self.slots.stop)
        samples = data_cursor * self.global_batch_size + slots
        found = np.full(len(slots), -1, dtype=np.int64)
        held = slots < self.global_batch_size
        for epoch in np.unique(samples[held] // self.num_sequences):
            here = held & (samples // self.num_sequences == epoch)
            found[here] = permute(samples[here] % self.num_sequences, size=self.num_sequences, seed=self.seed,
                                  epoch=int(epoch))
        return found

    def _read(self, data_cursor: int) -> tuple[Tensor, Tensor]:
        shape = len(self.slots), len(self.columns)
        inputs, targets = np.zeros(shape, dtype=np.int64), np.full(shape, IGNORED, dtype=np.int64)
        for row, sequence in enumerate(self.sequences(data_cursor)):
            if sequence >= 0:
                start = sequence * self.seq_len
                window = self.tokens[start:start + self.seq_len + 1]  # targets are the inputs, one token on
                inputs[row], targets[row] = window[self.columns], window[self.columns + 1]
        pin = self.device.type == "cuda"
        return tuple(torch.from_numpy(a).pin_memory() if pin else torch.from_numpy(a) for a in (inputs, targets))

    def close(self) -> None:
        """Stop reading ahead."""
        self._pool.shutdown(wait=True, cancel_futures=True)
