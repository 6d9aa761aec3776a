"""Our trainer beside Lightning Fabric, Accelerate and DeepSpeed, unmodified, on the layouts that each can run.

    python -m tests.benchmarks.peers --peer-python PATH [--rounds 10] [--steps 3] [--only TEXT]

PATH is the Python of an environment of its own that has the peers:

    python -m venv peers && peers/bin/pip install torch==2.13.0 && \
        peers/bin/pip install numpy omegaconf lightning-fabric accelerate deepspeed

All contenders of a layout are processes that are alive at once and take turns, a few steps each, the others waiting for
a line on their stdin. What counts is the median over rounds of the ratio of neighbouring turns; beside it the same of
the CPU time of rank 0, which others on the machine disturb less; the loss of the last step, which is everybody's; and
anonymous memory above that of a rank that has imported everything. A contender that does not run is listed with why.
"""
import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from jobs.spec.job import JobSpec, RankSlot, rank_environment
from jobs.spec.load import to_dict
from tests.benchmarks.core import ratio
from tests.benchmarks.decoder import MODEL, TRAINING
from tests.helpers.training import job, layout

ROOT = Path(__file__).parents[2]
# one unit of all layers where weights are whole, as DDP's and DeepSpeed's buckets are larger than this model
LAYOUTS = {
    "dp_replicate2": (dict(dp_replicate=2, layers_per_unit=4, microbatch_size=4),
                      ("Lightning Fabric", "Accelerate", "DeepSpeed")),
    "dp_replicate2, accumulating": (dict(dp_replicate=2, layers_per_unit=4, microbatch_size=2),
                                    ("Lightning Fabric", "Accelerate", "DeepSpeed")),
    "dp_shard2, ZeRO-1": (dict(dp_shard=2, layers_per_unit=4, zero_stage=1, microbatch_size=4), ("DeepSpeed",)),
    "dp_shard2, ZeRO-2": (dict(dp_shard=2, zero_stage=2, microbatch_size=4), ("DeepSpeed",)),
    "dp_shard2, ZeRO-3": (dict(dp_shard=2, microbatch_size=4), ("Lightning Fabric", "DeepSpeed")),
    "tp2": (dict(tp=2, microbatch_size=8), ("Lightning Fabric",)),
    "dp_shard2 × tp2": (dict(dp_shard=2, tp=2, microbatch_size=4), ("Lightning Fabric",)),
}


class Failed(Exception):
    """A contender that does not run; its last line of stderr."""


@dataclass(kw_only=True)
class Contender:
    """The ranks of one, and what rank 0 said of each turn."""

    ranks: list[subprocess.Popen]
    logs: list[Path]
    turns: list[dict] = field(default_factory=list)
    peak_bytes: int = 0  # of the rank that needs most

    def answers(self) -> list[dict]:
        lines = [rank.stdout.readline() for rank in self.ranks]
        if not all(lines):
            for rank in self.ranks:
                rank.kill()
            texts = [log.read_text(errors="replace").strip() for log in self.logs]
            raise Failed(next((text.splitlines()[-1] for text in texts if text), "no message"))
        return [json.loads(line) for line in lines]

    def take_turn(self, steps: int, *, counts: bool) -> None:
        for rank in self.ranks:
            rank.stdin.write(f"{steps}\n")
            rank.stdin.flush()
        found = self.answers()
        self.peak_bytes = max(one["peak_bytes"] for one in found)
        if counts:
            self.turns.append(found[0])


def start(name: str, spec: JobSpec, folder: Path, *, python: str) -> Contender:
    """Raises Failed."""
    job_file = folder / "job.json"
    job_file.write_text(json.dumps(to_dict(spec)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    contender = Contender(ranks=[], logs=[])
    for rank in range(spec.world_size):
        env = rank_environment(RankSlot(rank=rank, local_rank=rank, gpu=None), world_size=spec.world_size,
                               local_world_size=spec.world_size, node_index=0, master_addr="127.0.0.1",
                               master_port=port, attempt=1, max_restarts=0, run="bench")
        log = folder / f"{name}-{rank}.log"
        contender.logs.append(log)
        contender.ranks.append(subprocess.Popen(
            [python, "-m", "tests.benchmarks.peer_ranks", str(job_file), name], cwd=ROOT, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=log.open("w"), text=True,
            env=os.environ | env | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "true"}))
    contender.answers()
    return contender


def compete(name: str, folder: Path, *, peer_python: str | None, rounds: int, steps: int) -> None:
    arguments, others = LAYOUTS[name]
    where = layout(**{"model": MODEL, **arguments})
    spec = job(folder, where, model=MODEL, training=TRAINING)
    running: dict[str, Contender] = {}
    with contextlib.ExitStack() as stack:
        for who in ("ours", *others):
            try:
                if who != "ours" and peer_python is None:
                    raise Failed("no --peer-python")
                running[who] = start(who, spec, folder, python=sys.executable if who == "ours" else peer_python)
            except Failed as error:
                print(f"{name:28}  {who:18}  skipped: {error}", flush=True)
                continue
            for rank in running[who].ranks:
                stack.callback(rank.wait)
                stack.callback(rank.stdin.close)
        for number in range(rounds + 2):  # the first two warm up
            for contender in running.values():
                contender.take_turn(steps, counts=number > 1)
    show(name, running, tokens=TRAINING.seq_len * TRAINING.global_batch_size * steps)


def show(name: str, running: dict[str, Contender], *, tokens: int) -> None:
    def of(who: str, what: str) -> list[float]:
        return [turn[what] for turn in running[who].turns]

    for who, contender in running.items():
        beside = ""
        if who != "ours":
            beside = (f"ours × {ratio(of(who, 'seconds'), of('ours', 'seconds')):.3f}, "
                      f"CPU × {ratio(of(who, 'cpu_s'), of('ours', 'cpu_s')):.3f}")
        print(f"{name:28}  {who:18}  {tokens / statistics.median(of(who, 'seconds')):8,.0f} tokens/s   {beside:28}  "
              f"peak {contender.peak_bytes / 2**20:6.1f} MiB   loss {contender.turns[-1]['loss']:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python", help="Python of the environment that has the peers")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=3, help="of each contender per round")
    parser.add_argument("--only", default="", help="layouts whose name contains this")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(LAYOUTS):
            if asked.only in name:
                of_layout = Path(folder) / str(number)
                of_layout.mkdir()
                compete(name, of_layout, peer_python=asked.peer_python, rounds=asked.rounds, steps=asked.steps)


if __name__ == "__main__":
    main()
