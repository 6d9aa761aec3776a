"""The agent of a node: obeys the supervisor, keeps the node's ranks, and tells what happens to them.

Started once per node (spares too) by the supervisor's launcher. asyncio, never imports torch. One
authenticated TCP connection to the supervisor carries everything; reports are spooled and sent again
after a reconnect. Ranks are forked by a fork server, this process's child, and never outlive it.
"""
import argparse
import asyncio
import collections
import contextlib
import os
import secrets
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from jobs import node as node_facts
from jobs.listener import Listener
from jobs.process import adopt_orphans
from jobs.ranks import Ranks
from jobs.recorder import AGENT_SOCKET
from jobs.spec.control import (Ack, Challenge, Heartbeat, Hello, Kill, Killed, Knock, Prepare, Prepared, Shutdown,
                               Spooled, Start, ToAgent, Welcome, prove, proves)
from jobs.spec.lines import PROVEN_LIMIT, Lines
from jobs.spec.rundir import RunDir
from jobs.spec.wire import decode, encode, kind_of, to_wire

RETRY_S = 0.5  # between attempts to reach the supervisor
HANDSHAKE_S = 10.0  # both proofs
FIRST_CONTACT_S = 60.0  # to be welcomed for the first time


class Agent:
    """State of one node: its ranks, the reports not yet acknowledged, and the highest term obeyed."""

    def __init__(self, *, node: str, run_dir: RunDir, supervisor: tuple[str, int]) -> None:
        self.node = node
        self.supervisor = supervisor
        self.secret = run_dir.secret.read_text().strip()
        self.spool: collections.deque[Spooled] = collections.deque()
        self.seq = 0
        self.term = 0
        self.welcome: Welcome | None = None
        self.writer: asyncio.StreamWriter | None = None
        self.address = ""
        self.last_contact = time.monotonic()
        self.done = asyncio.Event()
        self.background: set[asyncio.Task] = set()  # orders that take a while; asyncio itself keeps no reference
        self.listener = Listener(hear=self.report)
        self.ranks = Ranks(node=node, run_dir=run_dir, report=self.report, listener=self.listener,
                           extra_env={AGENT_SOCKET: self.listener.name, "ORC_AGENT_PID": str(os.getpid()),
                                      "ORC_RUN_DIR": str(run_dir.path)})

    async def run(self) -> None:
        """Until the supervisor says shutdown, or stays away for too long."""
        adopt_orphans()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.done.set)
        loop.add_signal_handler(signal.SIGINT, lambda: None)  # Ctrl-C is the supervisor's to answer
        threading.Thread(target=self._look_at_logs, daemon=True).start()
        server = await self.listener.open()
        tasks = [asyncio.create_task(t) for t in (self._stay_connected(), self._heartbeat(), self._sample(),
                                                  self.done.wait())]
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()  # a defect in one of the loops ends the agent loudly
        finally:
            for task in tasks:
                task.cancel()
            server.close()
            await self.ranks.close()
            if self.writer is not None:
                self.writer.close()

    # -------------------------------------------------------------- supervisor
    async def _stay_connected(self) -> None:
        while not self.done.is_set():
            try:
                await self._converse()
            except (OSError, TimeoutError) as error:
                say(f"no connection to the supervisor at {self.supervisor[0]}:{self.supervisor[1]}: {error}")
            self.writer = None
            patience = self.welcome.orphan_s if self.welcome else FIRST_CONTACT_S
            if time.monotonic() - self.last_contact > patience:
                say(f"no supervisor for {patience:.0f} s: ending this node's ranks")
                return
            await asyncio.sleep(RETRY_S)

    async def _converse(self) -> None:
        reader, writer = await asyncio.open_connection(*self.supervisor)
        lines = Lines(reader)
        try:
            self.address = writer.get_extra_info("sockname")[0]
            await asyncio.wait_for(self._introduce(lines, writer), HANDSHAKE_S)
            self.writer = writer
            for spooled in list(self.spool):
                self._send(spooled)
            while line := await lines.next():
                self.last_contact = time.monotonic()
                await self._obey(decode(line, ToAgent, origin="supervisor"))
            say("the supervisor closed the connection")
        finally:
            writer.close()
            with contextlib.suppress(OSError):  # how it broke has been told; unawaited, asyncio tells it again
                await writer.wait_closed()

    async def _introduce(self, lines: Lines, writer: asyncio.StreamWriter) -> None:
        """Only after the supervisor has proved itself does this agent prove anything, or obey."""
        mine = secrets.token_hex(16)
        writer.write(encode(Knock(nonce=mine)))
        challenge = decode(await _next(lines), Challenge | Knock, origin="supervisor")
        if not proves(challenge.proof, self.secret, "supervisor", mine, challenge.nonce, challenge.term):
            raise ConnectionError("it does not know this run's secret")
        if challenge.term < self.term:
            raise ConnectionError(f"its term {challenge.term} is over; {self.term} has been seen")
        lines.limit = PROVEN_LIMIT
        said = (mine, challenge.nonce, self.node, os.getpid(), self.term)
        writer.write(encode(Hello(
            proof=prove(self.secret, "agent", *said), node=self.node, host=socket.gethostname(), address=self.address,
            pid=os.getpid(), gpus=node_facts.count_gpus(), term=self.term, attempt=self.ranks.attempt)))
        answer = decode(await _next(lines), Welcome | Shutdown, origin="supervisor")
        self.term, self.last_contact = answer.term, time.monotonic()
        if isinstance(answer, Shutdown):
            await self._obey(answer)
            raise ConnectionError(f"it has no use for this agent: {answer.reason}")
        self.welcome = answer
        self._acknowledge(answer.ack_seq)
        if answer.preload:
            await self.ranks.start_fork_server(preload=True)

    async def _obey(self, order) -> None:
        if isinstance(order, Ack):
            self._acknowledge(order.seq)
            return
        if order.term < self.term:
            say(f"refused {kind_of(type(order))} of term {order.term}: {self.term} has been seen")
            return
        match order:
            case Prepare(attempt=attempt, pick_port=pick_port):
                self._in_background(self._prepare(attempt, pick_port))
            case Start():
                await self.ranks.start(order, address=self.address)
            case Kill(attempt=attempt, grace_s=grace_s):
                self._in_background(self._kill(attempt, grace_s))
            case Shutdown(reason=reason):
                say(f"shutdown: {reason}")
                self.done.set()

    def _in_background(self, work) -> None:
        task = asyncio.create_task(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)

    async def _prepare(self, attempt: int, pick_port: bool) -> None:
        try:
            await self.ranks.prepare(attempt, preload=self.welcome.preload)
            self._send(Prepared(attempt=attempt, port=node_facts.pick_port() if pick_port else None))
        except (OSError, RuntimeError) as error:
            self._send(Prepared(attempt=attempt, problem=str(error)))

    async def _kill(self, attempt: int, grace_s: float) -> None:
        await self.ranks.kill(grace_s)
        self._send(Killed(attempt=attempt))

    # -------------------------------------------------------------- reports
    def report(self, report) -> None:
        """Spool a report until the supervisor acknowledges it."""
        self.seq += 1
        self.spool.append(Spooled(seq=self.seq, report=to_wire(report)))
        self._send(self.spool[-1])

    def _acknowledge(self, seq: int) -> None:
        while self.spool and self.spool[0].seq <= seq:
            self.spool.popleft()

    def _send(self, message) -> None:
        if self.writer is not None and not self.writer.is_closing():
            self.writer.write(encode(message))

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(self.welcome.heartbeat_s if self.welcome else RETRY_S)
            self._send(Heartbeat(node=self.node, t=time.time(), attempt=self.ranks.attempt, ranks=self.ranks.states()))

    def _look_at_logs(self) -> None:
        """In a thread: heartbeats must not wait for the run's file system."""
        while True:
            time.sleep(self.welcome.heartbeat_s if self.welcome else RETRY_S)
            self.ranks.look_at_logs()

    async def _sample(self) -> None:
        gpus = node_facts.count_gpus() > 0
        while True:
            await asyncio.sleep(self.welcome.sample_s if self.welcome else RETRY_S)
            if self.welcome:
                self.report(await node_facts.sample(self.node, gpus=gpus))


async def _next(lines: Lines) -> bytes:
    line = await lines.next()
    if not line:
        raise ConnectionError("it closed the connection (another secret, or not a node of this run)")
    return line


def say(message: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} agent: {message}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m jobs.agent", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--supervisor", required=True, help="HOST:PORT")
    parser.add_argument("--node", default=os.environ.get("SLURMD_NODENAME"), help="default: $SLURMD_NODENAME")
    args = parser.parse_args()
    if not args.node:
        parser.error("--node is needed outside Slurm")
    host, _, port = args.supervisor.rpartition(":")
    asyncio.run(Agent(node=args.node, run_dir=RunDir(args.run_dir), supervisor=(host, int(port))).run())


if __name__ == "__main__":
    main()
