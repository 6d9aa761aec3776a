"""The crew: the agents of a run as the supervisor commands them. Start, prepare, fork, end, and who is lost.

Turns what arrives on the channel into facts worth recording; it judges nothing and records nothing.
"""
import asyncio
import contextlib
import math
import time
from collections.abc import Callable

from jobs.spec.control import (Command, Heartbeat, Kill, Killed, Prepare, Prepared, RankState, Shutdown, Spooled,
                               Start)
from jobs.spec.events import AgentJoined, AgentLost, RanksSilent
from jobs.spec.job import JobSpec
from jobs.spec.reports import Report
from jobs.spec.rundir import RunDir
from jobs.spec.wire import from_wire, kind_of
from orchestrator.config import PolicySpec
from orchestrator.placement import Placement
from orchestrator.submission import Launcher
from orchestrator.supervision.channel import Channel, Dropped, Joined, Received

TICK_S = 0.25
Fact = Report | AgentJoined | AgentLost | Command


class CannotStart(Exception):
    """An attempt could not be started; the message says why, and on which node."""

    def __init__(self, node: str, reason: str) -> None:
        super().__init__(reason)
        self.node = node


class Crew:
    """All agents of the allocation, spares included."""

    def __init__(self, *, channel: Channel, launcher: Launcher, policy: PolicySpec, run_dir: RunDir, term: int) -> None:
        self.channel = channel
        self.launcher = launcher
        self.policy = policy
        self.run_dir = run_dir
        self.term = term
        self.port = 0
        self.attempt = 0  # whose ranks have been ordered and not yet ended; 0: none
        self.prepared: dict[str, Prepared] = {}
        self.killed: set[str] = set()
        self.beats: dict[str, Heartbeat] = {}  # newest of each node
        self._absent: dict[str, tuple[float, float, str]] = {}  # node → since when (monotonic, wall clock), why
        self._unacknowledged: list[tuple[str, int]] = []
        self._launched: set[asyncio.Task] = set()
        self._last_launch: list[asyncio.subprocess.Process] = []

    # -------------------------------------------------------------- facts
    async def facts(self, *, timeout_s: float = TICK_S) -> list[Fact]:
        """What has happened since the last call, waiting up to `timeout_s` for the first. Call recorded()
        once they are on disk: only then may the agents forget them."""
        found: list[Fact] = []
        with contextlib.suppress(TimeoutError):
            found += self._understand(await asyncio.wait_for(self.channel.inbox.get(), timeout_s))
            while not self.channel.inbox.empty():
                found += self._understand(self.channel.inbox.get_nowait())
        return found + self._silent()

    def recorded(self) -> None:
        for node, seq in dict(self._unacknowledged).items():  # of each node the last, which stands for all before
            self.channel.acknowledge(node, seq)
        self._unacknowledged.clear()

    def _understand(self, item) -> list[Fact]:
        match item:
            case Joined(hello=hello, returned=returned):
                self._absent.pop(hello.node, None)
                if returned:
                    return []
                joined = AgentJoined(t=time.time(), node=hello.node, host=hello.host, pid=hello.pid, gpus=hello.gpus)
                replaced = self.attempt != 0 and hello.attempt != self.attempt
                if not replaced:
                    return [joined]
                return [joined, _lost(hello.node, "its agent was replaced by a new one", time.time())]
            case Dropped(node=node):
                if node not in self.channel.agents:
                    return []  # dismissed: nobody waits for it
                self._absent[node] = (time.monotonic(), time.time(), item.reason)
                return []
            case Command():
                return [item]
            case Received(node=node, message=Spooled() as spooled):
                self._unacknowledged.append((node, spooled.seq))
                return [from_wire(spooled.report, Report, origin=node)] if self.channel.is_new(node, spooled) else []
            case Received(node=node, message=Prepared() as answer):
                self.prepared[node] = answer
                return []
            case Received(node=node, message=Killed(attempt=attempt)):
                self.killed |= {node} if attempt == self.attempt else set()
                return []
            case Received(node=node, message=Heartbeat() as beat):
                self.beats[node] = beat
                return []
        raise TypeError(f"unexpected {kind_of(type(item))} in the channel's inbox")

    def silent(self) -> RanksSilent | None:
        """Whether the attempt's ranks hang: none of them, on any node, has given a sign of life for too long. Each
        node's clock is compared with itself alone."""
        beats = [beat for beat in self.beats.values() if beat.attempt == self.attempt and self.attempt]
        ranks = [(state, beat) for beat in beats for state in beat.ranks]
        reports = any(state.t for state, _ in ranks)
        patience = self.policy.hang_s if reports else self.policy.silence_s
        since = [beat.t - state.active_t for state, beat in ranks if state.active_t]
        if patience is None or not since or min(since) < patience:
            return None
        behind = sorted(ranks, key=lambda one: (one[0].step, one[0].t) if one[0].t else (math.inf, 0.0))
        state, beat = behind[0]
        return RanksSilent(t=time.time(), attempt=self.attempt, silent_s=min(since), rank=state.rank, node=beat.node,
                           ranks=tuple(f"rank {s.rank} on {b.node}: {_last_said(s, b)}" for s, b in behind))

    def _silent(self) -> list[Fact]:
        """Agents that have been gone or silent for too long."""
        now = time.monotonic()
        for node in self.channel.silent_for(self.policy.heartbeat_timeout_s):
            self.channel.drop(node, f"no heartbeat for {self.policy.heartbeat_timeout_s:.0f} s")
        overdue = [node for node, (since, _, _) in self._absent.items() if now - since > self.policy.reconnect_s]
        lost = []
        for node in overdue:
            _, last_heard, reason = self._absent.pop(node)
            reason += f", and it did not come back within {self.policy.reconnect_s:.0f} s"
            self.channel.dismiss(node, reason)
            lost.append(_lost(node, reason, last_heard))
        return lost

    # -------------------------------------------------------------- orders
    def missing(self, nodes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(node for node in nodes if not self.channel.connected(node))

    async def launch(self, nodes: tuple[str, ...]) -> None:
        """Start agents on nodes that have none; they connect by themselves."""
        self._last_launch = await self.launcher.start_agents(nodes, run_dir=self.run_dir.path, port=self.port)
        for process in self._last_launch:
            task = asyncio.create_task(process.wait())  # reap it; whether the agent lives its connection tells
            self._launched.add(task)
            task.add_done_callback(self._launched.discard)

    def launch_is_over(self) -> bool:
        """Everything the last launch started has ended: who has not connected by now never will."""
        return all(process.returncode is not None for process in self._last_launch)

    def prepare(self, placement: Placement, attempt: int) -> None:
        """Fork servers ready, no rank of an earlier attempt left, and a port picked on the first node."""
        self.prepared.clear()
        for index, node in enumerate(placement.nodes):
            self.channel.send(node, Prepare(term=self.term, attempt=attempt, pick_port=index == 0))

    def unprepared(self, placement: Placement) -> list[tuple[str, str]]:
        """(node, reason) of every node that has not said it is ready."""
        answers = {node: self.prepared.get(node) for node in placement.nodes}
        return [(node, answer.problem if answer else "no answer") for node, answer in answers.items()
                if answer is None or answer.problem is not None]

    def start(self, placement: Placement, job: JobSpec) -> None:
        """Fork all ranks."""
        self.attempt = job.attempt
        self.beats.clear()
        first = placement.nodes[0]
        for index, node in enumerate(placement.nodes):
            self.channel.send(node, Start(
                term=self.term, attempt=job.attempt, job=job, slots=placement.slots(node), node_index=index,
                master_addr=self.channel.agents[first].address, master_port=self.prepared[first].port,
                max_restarts=self.policy.max_restarts))

    def end_ranks(self, placement: Placement, attempt: int) -> Callable[[], bool]:
        """Order every rank's end; the condition returned holds once no reachable node has one left."""
        self.killed.clear()
        self.attempt = attempt
        for node in placement.nodes:
            self.channel.send(node, Kill(term=self.term, attempt=attempt, grace_s=self.policy.kill_grace_s))
        return lambda: all(node in self.killed or not self.channel.connected(node) for node in placement.nodes)

    async def dismiss(self, reason: str) -> None:
        """Agents end, and with them whatever they have started."""
        told = any(map(self.channel.connected, self.launcher.nodes))
        for node in self.launcher.nodes:
            self.channel.send(node, Shutdown(term=self.term, reason=reason))
        await self.channel.close()
        if self._launched and told:
            await asyncio.wait(self._launched, timeout=self.policy.heartbeat_timeout_s)
        for process in self._last_launch:  # agents that have never connected could not be told
            if process.returncode is None:
                process.terminate()


def _last_said(state: RankState, beat: Heartbeat) -> str:
    if not state.t:
        return f"has reported nothing; last output {beat.t - state.active_t:.0f} s ago" if state.active_t else "is mute"
    step = f"after step {state.step}" if state.phase in ("validation", "checkpoint") else f"of step {state.step + 1}"
    return f"in {state.phase} {step} for {beat.t - state.t:.0f} s"


def _lost(node: str, reason: str, last_heard: float) -> AgentLost:
    return AgentLost(t=time.time(), node=node, reason=reason, last_heard=last_heard)
