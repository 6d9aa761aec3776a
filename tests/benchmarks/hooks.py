"""What watching costs: the trainer's steps with its reports, heartbeats, metrics and fault hooks, and without.

    python -m tests.benchmarks.hooks [--rounds 30] [--steps 5] [--ranks 1]

Ranks train with a real agent on the other end of their sockets, and the agent talks to a real channel, at the default
rates of heartbeats and samples. The same trainer takes turns with the bare loop of its own parts (data, forward and
backward, update, the two figures read back). Printed: the median step of each and the median of the ratios of
neighbouring turns; the same of the rank's CPU time; and the seconds per step spent inside the hooks, by the clock and
by the CPU: the latter is not disturbed by others on the machine, and is held against the limit of 1% of a 50 ms step.
The CPU time of the agent and of the channel's other end is not the rank's: it is printed per watched step of all ranks.
"""
import argparse
import asyncio
import contextlib
import multiprocessing
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from jobs import trainer as trainer_module
from jobs.recorder import Recorder
from jobs.spec.control import Spooled, Welcome
from jobs.spec.job import FaultSpec
from jobs.spec.rundir import RunDir
from jobs.trainer import Trainer
from orchestrator.config import PolicySpec
from orchestrator.supervision.channel import Channel, Received
from tests.benchmarks.core import ratio
from tests.benchmarks.decoder import MODEL, TRAINING
from tests.helpers.ranks import run_ranks
from tests.helpers.training import build_trainer, job, layout

STEP_S = 0.05  # the step that the limit is for
SEQUENCES = 4  # make about that on one core


def supervise(run_dir: Path, port_to: Any) -> None:
    """A process: the supervisor's end, which acknowledges every report."""
    policy = PolicySpec()

    async def listen() -> None:
        channel = Channel(secret=RunDir(run_dir).secret.read_text(), nodes=("node-0",), welcome=Welcome(
            term=1, ack_seq=0, heartbeat_s=policy.heartbeat_s, sample_s=policy.sample_s, orphan_s=60.0, preload=False))
        port_to.send(await channel.listen())
        while True:
            message = await channel.inbox.get()
            if isinstance(message, Received) and isinstance(message.message, Spooled):
                channel.acknowledge(message.node, message.message.seq)

    asyncio.run(listen())


@contextlib.contextmanager
def watched(run_dir: Path):
    """Yields the processes of the agent and of the supervisor, and the name of the agent's socket."""
    RunDir(run_dir).secret.write_text(secrets.token_hex(16))
    receive, send = multiprocessing.Pipe(duplex=False)
    supervisor = multiprocessing.get_context("fork").Process(target=supervise, args=(run_dir, send), daemon=True)
    supervisor.start()
    agent = subprocess.Popen([sys.executable, "-m", "jobs.agent", "--run-dir", str(run_dir), "--node", "node-0",
                              "--supervisor", f"127.0.0.1:{receive.recv()}"])
    try:
        yield [psutil.Process(agent.pid), psutil.Process(supervisor.pid)], _socket_of(agent)
    finally:
        agent.terminate()
        agent.wait()
        supervisor.terminate()


def _socket_of(agent: subprocess.Popen) -> str:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for line in Path("/proc/net/unix").read_text().splitlines():
            if (name := line.split()[-1]).startswith(f"@orc-agent-{agent.pid}-"):
                return name
        time.sleep(0.1)
    raise RuntimeError("the agent opens no socket")


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    seconds: dict[str, list[float]]
    cpu_s: dict[str, list[float]]
    inside_s: list[tuple[float, float]]  # per step of each watched turn, in the hooks: by the clock, by the CPU


def bare_step(trainer: Trainer, step: int) -> None:
    batch = trainer.loader.batch(trainer.progress.data_cursor)
    loss = trainer.parallel.forward_backward(batch.inputs, batch.targets, step=step, documents=batch.documents)
    norm, _ = trainer.optimizer.step(step, trainer.parallel.gradients)
    trainer.parallel.refresh_weights()
    loss.item(), norm.item()
    trainer.progress = replace(trainer.progress, step=step, data_cursor=trainer.progress.data_cursor + 1)


def take_turns(spec, socket_name: str, rounds: int, steps: int) -> Turns:
    recorder = Recorder(socket_name, attempt=1, rank=dist.get_rank())
    trainer = build_trainer(spec, recorder=recorder)
    trainer.plan = replace(trainer.plan, interval_steps=10**9)
    inside = _clock_hooks(trainer)
    seconds, cpu_s, inside_s = defaultdict(list), defaultdict(list), []
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        for number in range(2 * (rounds + 2)):
            kind = ("watched", "bare")[number % 2]
            inside.clear()
            first = trainer.progress.step + 1
            dist.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            for step in range(first, first + steps):
                if kind == "bare":
                    bare_step(trainer, step)
                else:
                    trainer_module.strike(trainer.faults, attempt=1, rank=recorder.rank, step=step, recorder=recorder)
                    trainer._step(step)
            if number > 3:  # the first two of each warm up
                seconds[kind].append(time.perf_counter() - start)
                cpu_s[kind].append(time.process_time() - cpu_start)
                if kind == "watched":
                    inside_s.append(tuple(sum(of) / steps for of in zip(*inside)))
    trainer.loader.close()
    return Turns(seconds=dict(seconds), cpu_s=dict(cpu_s), inside_s=inside_s)


def _clock_hooks(trainer: Trainer) -> list[tuple[float, float]]:
    """From now on the seconds inside each outermost hook are added to the list, by the clock and by the CPU."""
    spent: list[tuple[float, float]] = []

    def clocked(function: Callable) -> Callable:
        def call(*args, **kwargs):
            start, cpu_start = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent.append((time.perf_counter() - start, time.thread_time() - cpu_start))
        return call

    trainer.recorder.progress = clocked(trainer.recorder.progress)
    trainer._report = clocked(trainer._report)
    trainer_module.strike = clocked(trainer_module.strike)
    return spent


def _cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=5, help="of each kind per round")
    parser.add_argument("--ranks", type=int, default=1)
    asked = parser.parse_args()
    training = replace(TRAINING, global_batch_size=SEQUENCES * asked.ranks)
    where = layout(model=MODEL, microbatch_size=SEQUENCES, global_batch_size=training.global_batch_size,
                   dp_replicate=asked.ranks, layers_per_unit=MODEL.num_layers)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        spec = replace(job(run_dir, where, model=MODEL, training=training),
                       faults=tuple(FaultSpec(attempt=9, step=step, rank=0, kind="sigkill") for step in range(1, 9)))
        with watched(run_dir) as (watchers, socket_name):
            before = _cpu_s(watchers)
            found: Turns = run_ranks(take_turns, world_size=asked.ranks,
                                     args=(spec, socket_name, asked.rounds, asked.steps))[0]
            watching_s = (_cpu_s(watchers) - before) / (asked.rounds + 2) / asked.steps
    for kind in ("bare", "watched"):
        print(f"{kind:8} step {1e3 * statistics.median(found.seconds[kind]) / asked.steps:7.2f} ms   "
              f"CPU {1e3 * statistics.median(found.cpu_s[kind]) / asked.steps:7.2f} ms")
    clock_s, busy_s = (statistics.median(of) for of in zip(*found.inside_s))
    by_clock, by_cpu = (ratio(of["watched"], of["bare"]) for of in (found.seconds, found.cpu_s))
    print(f"watched ÷ bare, median of {asked.rounds} pairs: {by_clock:.4f}, CPU {by_cpu:.4f}\n"
          f"inside hooks: {1e6 * clock_s:.0f} µs per step, {1e6 * busy_s:.0f} µs of CPU, which is "
          f"{100 * busy_s / STEP_S:.2f}% of {1e3 * STEP_S:.0f} ms\n"
          f"agent and supervisor: {1e6 * watching_s:.0f} µs of CPU per watched step")


if __name__ == "__main__":
    main()
