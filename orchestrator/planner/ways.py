"""What was learned from pipelines that were run: per schedule, the ways through it that took longest.

Kept by a search, and handed on to searches for other questions: ways hold for any durations (see walk). They bound a
pipeline from below to within a fraction of a percent, in the time of one addition per stage.
"""
from jobs.spec.parallel import Schedule
from orchestrator.planner.timeline import StageTimes, durations_of, pipeline_way, way_s
from orchestrator.planner.walk import Way

MOST_WAYS = 24  # of one schedule; the oldest go first


class Ways:
    """By schedule, number of stages and of microbatches."""

    def __init__(self) -> None:
        self._known: dict[tuple, list[Way]] = {}

    def least_s(self, schedule: Schedule, *, stages: tuple[StageTimes, ...], virtual_stages: int,
                num_microbatches: int) -> float:
        """What this pipeline takes at least. The first of its schedule is run."""
        known = self._known.get((schedule, len(stages), virtual_stages, num_microbatches))
        if known is None:
            return self.run(schedule, stages=stages, virtual_stages=virtual_stages, num_microbatches=num_microbatches)
        durations = durations_of(stages)
        return max(way_s(way, durations) for way in known)

    def run(self, schedule: Schedule, *, stages: tuple[StageTimes, ...], virtual_stages: int,
            num_microbatches: int) -> float:
        """What this pipeline takes."""
        total_s, way = pipeline_way(schedule, stages=stages, virtual_stages=virtual_stages,
                                    num_microbatches=num_microbatches)
        known = self._known.setdefault((schedule, len(stages), virtual_stages, num_microbatches), [])
        if way not in known:
            known.append(way)
            del known[:-MOST_WAYS]
        return total_s
