"""The pipeline's timeline in few bytes: who computes which microbatch when, forward, backward, weight gradients.

Called by the page. Times become whole ticks; of a very long step the repeating middle is cut out and said so.
"""
from typing import Any

from orchestrator.planner.timeline import Span, Timeline

TICKS = 200_000  # in one step
MAX_SPANS = 20_000  # about 20 bytes each


def timeline_data(timeline: Timeline) -> dict[str, Any]:
    """Per pipeline rank its computations as columns; bubbles are what lies between them."""
    rows = [[span for span in rank if span.kind != "bubble"] for rank in timeline.ranks]
    tick_s = timeline.total_s / TICKS
    cut = _cut(rows)
    return {"tick_s": tick_s, "end": TICKS, "cut": cut and [round(edge / tick_s) for edge in cut],
            "rows": [_row(row, tick_s=tick_s, idle=timeline.bubble_s(rank) / timeline.total_s, cut=cut)
                     for rank, row in enumerate(rows)]}


def _row(row: list[Span], *, tick_s: float, idle: float, cut: tuple[float, float] | None) -> dict[str, Any]:
    """Kinds as one letter each; starts and ends in ticks; `idle` is this row's share of the whole time."""
    kept = [span for span in row if cut is None or span.end_s <= cut[0] or span.start_s >= cut[1]]
    return {"kinds": "".join(span.kind for span in kept), "microbatch": [span.microbatch for span in kept],
            "stage": [span.stage for span in kept], "start": [round(span.start_s / tick_s) for span in kept],
            "end": [round(span.end_s / tick_s) for span in kept],
            "idle": round(idle, 4)}


def _cut(rows: list[list[Span]]) -> tuple[float, float] | None:
    """The stretch of time to leave out so that at most MAX_SPANS remain: as many from the start as from the end."""
    total = sum(map(len, rows))
    if total <= MAX_SPANS:
        return None
    ends = sorted(span.end_s for row in rows for span in row)
    starts = sorted(span.start_s for row in rows for span in row)
    return ends[MAX_SPANS // 2], starts[-(MAX_SPANS // 2)]
