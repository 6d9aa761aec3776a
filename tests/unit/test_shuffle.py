"""The order of an epoch is a permutation without visible order, of any number of samples, held nowhere."""
import itertools
import tracemalloc

import numpy as np
import pytest

from jobs.data.shuffle import permute

SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 64, 65, 97, 100, 255, 256, 257, 1000, 1009, 4096, 4097, 65537]
LARGE = [3 * 10**9, 2**32, 2**40 + 1, 10**13, 2**62 - 57]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed, epoch, source", [(0, 0, 0), (1, 0, 0), (0, 5, 0), (-1, 2, 3)])
def test_every_sample_comes_once(size, seed, epoch, source):
    found = permute(np.arange(size), size=size, seed=seed, epoch=epoch, source=source)
    assert (np.sort(found) == np.arange(size)).all()


@pytest.mark.parametrize("size", LARGE)
def test_billions_of_samples_need_no_memory(size):
    positions = np.concatenate([np.arange(5000), np.arange(size - 5000, size)])
    tracemalloc.start()
    found = permute(positions, size=size, seed=1, epoch=0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * 2**20
    assert len(np.unique(found)) == len(positions) and 0 <= found.min() and found.max() < size
    assert abs(found.mean() / size - 0.5) < 0.02  # 7 standard deviations of 10,000 uniform numbers
    counts, _ = np.histogram(found, bins=16, range=(0, size))
    chi_squared = ((counts - 625) ** 2 / 625).sum()
    assert chi_squared < 50  # 15 degrees of freedom: once in 100,000


def test_seed_epoch_and_source_each_give_another_order():
    orders = {key: permute(np.arange(1000), size=1000, seed=key[0], epoch=key[1], source=key[2])
              for key in itertools.product((0, 1, 2, -1), (0, 1, 4), (0, 1, 4))}
    for (a, first), (b, second) in itertools.combinations(orders.items(), 2):
        assert (first == second).mean() < 0.02, (a, b)  # two random permutations agree in one place on average


def test_a_position_does_not_depend_on_the_company():
    base = permute(np.arange(1000), size=1000, seed=1, epoch=0)
    assert permute(np.array([7]), size=1000, seed=1, epoch=0)[0] == base[7]


@pytest.mark.parametrize("size", [1000, 10_007, 65_536])
def test_no_order_is_left(size):
    order = permute(np.arange(size), size=size, seed=0, epoch=0)
    bound = 5 / size ** 0.5  # of a correlation coefficient, whose standard deviation is 1/√n
    assert abs(np.corrcoef(np.arange(size), order)[0, 1]) < bound
    for lag in (1, 2, 3, 8, 16):
        assert abs(np.corrcoef(order[:-lag], order[lag:])[0, 1]) < bound, lag
    steps = np.diff(order)
    values, counts = np.unique(steps, return_counts=True)
    assert counts.max() < 15, values[counts.argmax()]  # no favourite stride; about one of each is expected
    ascending = (steps > 0).mean()
    assert abs(ascending - 0.5) < bound
    fixed = (order == np.arange(size)).sum()
    assert fixed < 8  # Poisson, mean 1


# χ² that a fair choice exceeds once in 30,000: of 1, 5 and 23 degrees of freedom
@pytest.mark.parametrize("size, largest", [(2, 17.4), (3, 28.2), (4, 58.5)])
def test_the_orders_of_a_few_samples_are_equally_frequent(size, largest):
    orders = list(itertools.permutations(range(size)))
    found = [tuple(permute(np.arange(size), size=size, seed=seed, epoch=0)) for seed in range(200 * len(orders))]
    counts = np.array([found.count(order) for order in orders])
    assert ((counts - 200) ** 2 / 200).sum() < largest
