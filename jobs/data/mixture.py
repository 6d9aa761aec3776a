"""Which source the n-th sample of a run comes from, and the how-manieth of that source it is.

Called by jobs.loader. A function of n and the weights alone, looked up in a table of one period.
"""
import numpy as np

from jobs.spec.sources import whole_shares


class Mixture:
    """Sources in the proportions of their weights, at every moment: after n samples each has had its exact share,
    give or take less than one.

    The order within a period is Tijdeman's ("The chairman assignment problem", 1980), whose deviation never exceeds
    1 − 1/(2k − 2) for k sources; a period ends with none.
    """

    def __init__(self, weights: tuple[float, ...]) -> None:
        shares = whole_shares(weights)
        self.shares = np.array(shares, dtype=np.int64)
        self.period = sum(shares)
        self._order = np.array(_order(shares), dtype=np.int64)
        self._before = np.empty(self.period, dtype=np.int64)  # of the same source, earlier in the period
        for source in range(len(shares)):
            here = self._order == source
            self._before[here] = np.arange(here.sum())

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source, number among that source's samples) of each sample of the run; all int64."""
        period, place = np.divmod(samples, self.period)
        sources = self._order[place]
        return sources, period * self.shares[sources] + self._before[place]


def _order(shares: tuple[int, ...]) -> list[int]:
    """Of those sources that are behind by enough, the one that would be too late first."""
    if len(shares) == 1:
        return [0] * shares[0]
    total, slack = sum(shares), 2 * len(shares) - 2
    given, order = [0] * len(shares), []
    for n in range(1, total + 1):
        behind = [slack * (share * n - total * had) for share, had in zip(shares, given)]
        due = [i for i, lag in enumerate(behind) if lag >= total]
        chosen = min(due, key=lambda i: (total * (slack - 1) - behind[i]) / shares[i])
        given[chosen] += 1
        order.append(chosen)
    return order
