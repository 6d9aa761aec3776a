"""The supervisor of a run: hands out attempts, watches, diagnoses, decides.

Runs in the batch step of the allocation (or detached on one machine). It is the only writer of
events.jsonl and of checkpoint manifests and keeps no state that is not in the run directory. It never
imports torch.
"""
import asyncio
import contextlib
import os
import resource
import secrets
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from jobs.spec.control import Command, Welcome
from jobs.spec.events import (EXIT_CODES, OWN_LAYOUT, AgentJoined, AgentLost, AttemptEnded, AttemptStarted,
                              CheckpointSkipped, Decision, Diagnosis, DiagnosisKind, RunEnded, RunStarted)
from jobs.spec.job import JobSpec
from jobs.spec.reports import ShardReport, StepReport
from jobs.spec.rundir import RunDir
from orchestrator.load import read_stored
from orchestrator.placement import Placement
from orchestrator.submission import Launcher
from orchestrator.supervision.attempt import read_layout, write_attempt, write_json
from orchestrator.supervision.channel import Channel
from orchestrator.supervision.crew import TICK_S, CannotStart, Crew
from orchestrator.supervision.decide import decide
from orchestrator.supervision.diagnose import diagnose
from orchestrator.supervision.journal import Journal, JournalError
from orchestrator.supervision.keeper import Keeper
from orchestrator.supervision.observe import Health, observe
from orchestrator.supervision.reader import WandbReader
from orchestrator.supervision.surroundings import handle_signals, watch_the_clock

ORPHAN_S = 120.0  # agents without a supervisor end themselves; longer than any reconnect, shorter than a waste


class Stop(Exception):
    """The run must end now; `kind` is the diagnosis it will get."""

    def __init__(self, kind: DiagnosisKind, summary: str) -> None:
        super().__init__(summary)
        self.kind = kind


class Supervisor:
    """One supervisor's term. All that must outlive it is in the journal."""

    def __init__(self, run_dir: Path, launcher: Launcher) -> None:
        self.run_dir = RunDir(run_dir)
        self.launcher = launcher
        self.config = read_stored(self.run_dir.config)
        self.policy = self.config.policy
        self.layout = None if self.config.lays_itself_out else read_layout(self.run_dir)
        self.journal = Journal(self.run_dir.events)
        self.term = self.journal.term + 1
        self.channel = Channel(
            secret=self.run_dir.secret.read_text().strip(), nodes=launcher.nodes,
            welcome=Welcome(term=self.term, ack_seq=0, heartbeat_s=self.policy.heartbeat_s,
                            sample_s=self.policy.sample_s, orphan_s=ORPHAN_S, preload=self.config.command is None))
        self.crew = Crew(channel=self.channel, launcher=launcher, policy=self.policy, run_dir=self.run_dir,
                         term=self.term)
        self.health: Health | None = None  # of the attempt that is being watched
        self.checkpoints = Keeper(self.run_dir, journal=self.journal, keep=self.config.checkpoint.keep, say=say)
        self.stop: Stop | None = None
        self.wandb = WandbReader(self.run_dir, wanted=self.config.wandb.mode != "disabled")

    # -------------------------------------------------------------- the run
    async def run(self) -> int:
        """Returns the exit code of the run: 0 completed, 1 failed, 3 stopped."""
        handle_signals(self._ask_to_stop)
        self.crew.port = await self.channel.listen()
        self._announce()
        self.wandb.start()
        lead_s = self.config.cluster.slurm.signal_lead_s
        clock = asyncio.create_task(watch_the_clock(self.launcher, self._ask_to_stop, lead_s=lead_s))
        reviving = asyncio.create_task(self.wandb.keep_alive(say))
        try:
            state, reason = await self._attempts()
        except Exception as error:  # a defect here, or a full disk: the run must still end, and say why
            traceback.print_exc()
            state, reason = "failed", f"the supervisor failed: {type(error).__name__}: {error}"
        finally:
            clock.cancel()
            reviving.cancel()
            await self.crew.dismiss("the run has ended")
            self.run_dir.supervisor.unlink(missing_ok=True)
        await self.checkpoints.remove_unfinished()
        self.journal.write(RunEnded(t=time.time(), state=state, reason=reason, final_step=self.journal.last_step))
        self.journal.close()  # from now on a resume may write
        if message := await asyncio.to_thread(self.wandb.wait):
            say(message)
        return EXIT_CODES[state]

    async def _attempts(self) -> tuple[str, str]:
        """Attempt after attempt, until a decision ends the run."""
        while True:
            decision = await self._attempt(self.journal.last_attempt + 1)
            if decision.act == "finish":
                return "completed", decision.reason
            if decision.act == "stop":
                return ("stopped" if self.stop else "failed"), decision.reason
            with contextlib.suppress(Stop):  # one that comes while waiting is obeyed by the next attempt at once
                await self._watch(lambda: False, timeout_s=decision.delay_s)

    async def _attempt(self, attempt: int) -> Decision:
        newest = self.checkpoints.newest()
        placement, job = write_attempt(self.config, layout=self.layout, nodes=self.launcher.nodes, run_dir=self.run_dir,
                                       attempt=attempt, resume_step=newest)
        self.health = Health(attempt=attempt, world_size=job.world_size, nodes=placement.nodes,
                             resume_step=newest)
        self.checkpoints.begin(job)
        self.journal.write(AttemptStarted(t=time.time(), attempt=attempt, nodes=placement.nodes,
                                          world_size=job.world_size, resume_step=newest,
                                          layout=str(self.layout or OWN_LAYOUT)))
        not_started: CannotStart | None = None
        try:
            await self._start(placement, job)
            await self._watch(lambda: self.health.failed or self.health.completed)
            if self.health.failed and not self.health.diverged:  # earlier roots may still be on their way
                await self._watch(lambda: self.health.ended, timeout_s=self.policy.settle_s)
        except CannotStart as failure:
            not_started = failure
            self.channel.dismiss(failure.node, str(failure))  # the next attempt gets a new agent there
        except Stop:
            pass  # _conclude sees self.stop
        sealed, self.health = self.health, None  # what our own kill does to the ranks is no fact about the attempt
        await self._watch(self.crew.end_ranks(placement, attempt), interruptible=False,
                          timeout_s=self.policy.kill_grace_s + self.policy.heartbeat_timeout_s)
        self.crew.attempt = 0
        return self._conclude(sealed, not_started)

    async def _start(self, placement: Placement, job: JobSpec) -> None:
        """Agents up, fork servers ready, port chosen, then all ranks at once. Raises CannotStart or Stop."""
        if missing := self.crew.missing(placement.nodes + placement.spares):
            await self.crew.launch(missing)
            await self._watch(lambda: not self.crew.missing(placement.nodes) or self.crew.launch_is_over(),
                              timeout_s=self.policy.agent_start_s)
        for node in self.crew.missing(placement.nodes):
            how = "its start failed" if self.crew.launch_is_over() else f"none within {self.policy.agent_start_s:.0f} s"
            raise CannotStart(node, f"no agent connected from it: {how}; see {self.run_dir.path / 'logs'}")
        await self.checkpoints.remove_unfinished()
        self.crew.prepare(placement, job.attempt)
        await self._watch(lambda: len(self.crew.prepared) == len(placement.nodes) or self.health.failed,
                          timeout_s=self.policy.attempt_start_s)
        for node, reason in self.crew.unprepared(placement):
            raise CannotStart(node, f"not ready for attempt {job.attempt}: {reason}")
        self.crew.start(placement, job)

    def _conclude(self, health: Health, not_started: CannotStart | None) -> Decision:
        t = time.time()
        diagnosis = self._diagnose(health, not_started, t)
        self.journal.write(diagnosis)
        resumed = self.checkpoints.resumed_step
        if diagnosis.kind == "corruption" and resumed is not None:
            self.journal.write(CheckpointSkipped(t=t, step=resumed, reason=diagnosis.summary))
        decision = decide(diagnosis, history=self.journal.decisions, newest_step=self.checkpoints.newest(),
                          policy=self.policy, t=t)
        self.journal.write(decision)
        self.journal.write(AttemptEnded(t=time.time(), attempt=health.attempt, first_step=health.first_step,
                                        last_step=health.reached))
        return decision

    def _diagnose(self, health: Health, not_started: CannotStart | None, t: float) -> Diagnosis:
        known = {"t": t, "attempt": health.attempt, "step": health.reached}
        if self.stop is not None:
            return Diagnosis(kind=self.stop.kind, summary=str(self.stop), **known)
        if health.completed:
            return Diagnosis(kind="completed", summary=f"all {health.world_size} ranks have finished", **known)
        if not_started is not None and not health.failed:
            node = not_started.node
            return Diagnosis(kind="node_failure", summary=f"{node}: {not_started}", node=node, suspects=(node,),
                             fingerprint=f"start:{node}", **known)
        return diagnose(health, history=self.journal.diagnoses, t=t, user_error_repeats=self.policy.user_error_repeats)

    # -------------------------------------------------------------- watching
    async def _watch(self, until: Callable[[], bool], *, timeout_s: float | None = None,
                     interruptible: bool = True) -> None:
        """Record facts until the condition holds or time is up. Raises Stop when one was asked for."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not until():
            if self.stop is not None and interruptible:
                raise self.stop
            left = TICK_S if end is None else min(TICK_S, end - time.monotonic())
            if left <= 0:
                return
            for fact in await self.crew.facts(timeout_s=left):
                if isinstance(fact, Command):
                    self._ask_to_stop("stopped", fact.reason or "stopped by `orc stop`")
                elif isinstance(fact, ShardReport):
                    await self._note_shards(fact)
                else:
                    self._record(fact)
            if self.health is not None and not self.health.failed and (silent := self.crew.silent()):
                self._record(silent)
            self.crew.recorded()

    def _record(self, event) -> None:
        self.journal.write(event)
        if self.health is not None:
            self.health = observe(self.health, event)
        if isinstance(event, StepReport):
            self.checkpoints.note(event)
        if isinstance(event, AgentJoined | AgentLost):
            say(f"{type(event).__name__}: {event.node}")

    async def _note_shards(self, report: ShardReport) -> None:
        """Commit a checkpoint once the last of its ranks has reported."""
        reports = self.checkpoints.complete(report)
        if reports and (committed := await self.checkpoints.commit(reports)):
            self._record(committed)
            await self.checkpoints.prune()

    def _ask_to_stop(self, kind: DiagnosisKind, summary: str) -> None:
        self.stop = self.stop or Stop(kind, summary)

    def _announce(self) -> None:
        host = socket.gethostname()
        write_json(self.run_dir.supervisor, {
            "address": self.launcher.address, "port": self.crew.port, "pid": os.getpid(), "host": host,
            "job_id": self.launcher.job_id, "term": self.term})
        self.journal.write(RunStarted(
            t=time.time(), run=self.config.run, job_id=self.launcher.job_id, term=self.term, host=host,
            wandb_id=(self.journal.wandb_id or secrets.token_hex(4)) if self.wandb.wanted else None,
            max_restarts=self.policy.max_restarts))


def say(message: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} supervisor: {message}", file=sys.stderr, flush=True)


def main(run_dir: Path, launcher: Launcher) -> int:
    """Supervise the run to its end; returns the exit code."""
    (run_dir / "logs").mkdir(exist_ok=True)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection per node; the usual 1,024 are too few
    try:
        supervisor = Supervisor(run_dir, launcher)
    except JournalError as error:
        say(str(error))
        return EXIT_CODES["failed"]
    return asyncio.run(supervisor.run())
