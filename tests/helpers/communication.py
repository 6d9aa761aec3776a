"""What a CollectiveLog has counted, whatever the axes: ranks of a test's gloo group are told by none."""
import collections
from collections.abc import Iterable

from jobs.spec.verification import Collective


def sent(collectives: Iterable[Collective]) -> dict[tuple[str, int], int]:
    """(operation, bytes of the whole tensor) → times."""
    found: collections.Counter[tuple[str, int]] = collections.Counter()
    for one in collectives:
        found[one.op, one.payload_bytes] += one.times
    return dict(found)
