"""The run's checkpoints in the supervisor's hands: commits what ranks report, chooses what to resume from, prunes.

One keeper for the life of a supervisor. How a checkpoint is committed is in commit; what an attempt is, it does not
know. Everything that blocks on the file system runs in a thread: heartbeats must go on.
"""
import asyncio
import math
import time
from collections.abc import Callable

from jobs.spec.events import CheckpointCommitted, CheckpointSkipped
from jobs.spec.job import JobSpec
from jobs.spec.reports import ShardReport, StepReport
from jobs.spec.rundir import RunDir
from orchestrator.supervision.commit import CommitError, commit, newest_usable, prune, remove_unfinished
from orchestrator.supervision.journal import Journal
from orchestrator.supervision.observe import diverged


class Keeper:
    """`keep`: how many committed checkpoints stay."""

    def __init__(self, run_dir: RunDir, *, journal: Journal, keep: int, say: Callable[[str], None]) -> None:
        self.run_dir = run_dir
        self.journal = journal
        self.keep = keep
        self.say = say
        self.job: JobSpec | None = None  # of the newest attempt
        self._reports: dict[int, dict[int, ShardReport]] = {}  # its steps that are not complete → rank → report
        self._diverged_step: int | None = None  # its first step whose loss is no number

    def begin(self, job: JobSpec) -> None:
        """From now on the shard reports of this attempt count, and no other's."""
        self.job, self._reports, self._diverged_step = job, {}, None

    def note(self, report: StepReport) -> None:
        """What is computed after the loss was lost is not worth keeping, least of all instead of better. It may be told
        before the last shard of a step before it, and ranks go on until they are ended."""
        if self._diverged_step is None and self.job and report.attempt == self.job.attempt and diverged(report):
            self._diverged_step = report.step

    @property
    def resumed_step(self) -> int | None:
        return self.job.resume_step if self.job else None

    def newest(self) -> int | None:
        """The step to resume from. One that is found unusable is told to the journal, once."""
        newest, skipped = newest_usable(self.run_dir, refused=self.journal.refused_steps, t=time.time())
        for skip in skipped:
            if skip.step not in self.journal.refused_steps:
                self.journal.write(skip)
        return self.journal.saved_step if newest is None else newest

    def complete(self, report: ShardReport) -> tuple[ShardReport, ...] | None:
        """All reports of a checkpoint that is worth keeping once its last rank has reported, else None."""
        if self.job is None or report.attempt != self.job.attempt or report.step >= (self._diverged_step or math.inf):
            return None
        reports = self._reports.setdefault(report.step, {})
        reports[report.rank] = report
        return tuple(self._reports.pop(report.step).values()) if len(reports) == self.job.world_size else None

    async def commit(self, reports: tuple[ShardReport, ...]) -> CheckpointCommitted | None:
        """Commit a complete checkpoint; None, and a line in the journal, if that failed."""
        try:
            return await asyncio.to_thread(commit, self.run_dir, self.job, reports)
        except (CommitError, OSError) as error:
            self.journal.write(CheckpointSkipped(t=time.time(), step=reports[0].step, reason=str(error)))
            return None

    async def prune(self) -> None:
        await self._tidy(prune, self.run_dir, keep=self.keep, refused=self.journal.refused_steps)

    async def remove_unfinished(self) -> None:
        await self._tidy(remove_unfinished, self.run_dir)

    async def _tidy(self, remove: Callable, *args, **options) -> None:
        """Removing what is not needed may fail without harm: nothing depends on it."""
        try:
            await asyncio.to_thread(remove, *args, **options)
        except OSError as error:
            self.say(f"could not remove old files: {error}")
