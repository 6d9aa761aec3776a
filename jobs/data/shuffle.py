"""The order of an epoch: a keyed permutation that is computed where it is asked for.

Called by jobs.loader. No index is kept, so an epoch may have 2^62 samples.
"""
import numpy as np

# Of the Feistel network. Three give a pseudo-random permutation of large sets (Luby & Rackoff, 1988); with four the 24
# orders of four samples still differ in frequency by half, with six they do not.
ROUNDS = 6
WORD = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio


def permute(positions: np.ndarray, *, size: int, seed: int, epoch: int, source: int = 0) -> np.ndarray:
    """A permutation of range(size) for each (seed, epoch, source), at `positions` only.

    A Feistel network over the next power of four, walked along its cycle until the value is in range
    (Black & Rogaway, "Ciphers with arbitrary finite domains", 2002). positions and result: int64.
    """
    half = np.uint64(max(1, -(-(size - 1).bit_length() // 2)))
    mask = np.uint64((1 << int(half)) - 1)
    stream = _mix(np.uint64([seed & WORD])) ^ np.uint64(source * GOLDEN & WORD)
    keys = [_mix(stream ^ np.uint64(epoch * ROUNDS + i)) for i in range(ROUNDS)]
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
        x = x + np.uint64(GOLDEN)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
