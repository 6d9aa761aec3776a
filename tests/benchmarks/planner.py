"""How long the search takes: `python -m tests.benchmarks.planner [REPEATS]` prints one line per job.

CPU seconds of one core, the best of REPEATS (default 3), from the question to the winner and to the next best five;
imports are not counted. The goal is the first figure of Llama-3 405B on 16,384 GPUs below one second.
"""
import gc
import json
import subprocess
import sys
import time

from orchestrator.config import ParallelRequest
from orchestrator.planner.question import Question
from orchestrator.planner.search import Search
from tests.helpers.planning import LLAMA3_8B, LLAMA3_70B, LLAMA3_405B, h100, training

JOBS = [(LLAMA3_8B, 16, 512), (LLAMA3_70B, 64, 512), (LLAMA3_405B, 2048, 2048)]  # model, nodes of 8 H100, global batch


def measure(model, nodes: int, batch: int) -> tuple[float, float, Search, object]:
    """(seconds to the winner, to the sixth, the search, the winner)."""
    spec = training(global_batch_size=batch, seq_len=8192, param_dtype="bfloat16")
    question = Question(model=model, training=spec, cluster=h100(nodes), request=ParallelRequest(), num_nodes=nodes,
                        allow_tp_across_nodes=False)
    gc.collect()
    started = time.process_time()
    search = Search(question, headroom=0.1, convention="causal")
    seen: set = set()
    ranked = search.ranked(wanted=lambda layout: layout.dims not in seen)
    winner = next(ranked)
    first_s = time.process_time() - started
    seen.add(winner.layout.dims)
    for _ in range(5):
        seen.add(next(ranked).layout.dims)
    return first_s, time.process_time() - started, search, winner


def one(name: str) -> None:
    """In a process of its own: nothing is remembered from another run."""
    model, nodes, batch = next(job for job in JOBS if job[0].name == name)
    first_s, six_s, search, winner = measure(model, nodes, batch)
    effort = search.effort
    print(json.dumps([first_s, six_s, search.space.count(), effort.shapes, effort.variants, effort.timelines,
                      effort.priced,
                      f"{winner.layout} {winner.layout.schedule} {winner.predicted.step_time_s:.2f} s"]))


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    print(f"{'job':22} {'legal layouts':>14} {'shapes':>7} {'variants':>9} {'timelines':>9} {'priced':>7} "
          f"{'winner':>8} "
          f"{'best six':>8}")
    for model, nodes, _ in JOBS:
        runs = [json.loads(subprocess.run([sys.executable, "-m", "tests.benchmarks.planner", "--one", model.name],
                                          capture_output=True, text=True, check=True).stdout) for _ in range(repeats)]
        _, _, count, shapes, variants, timelines, priced, winner = runs[0]
        print(f"{f'{model.name} on {8 * nodes:,}':22} {count:14,} {shapes:7,} {variants:9,} {timelines:9,} {priced:7,} "
              f"{min(run[0] for run in runs):7.2f}s {min(run[1] for run in runs):7.2f}s  {winner}")


if __name__ == "__main__":
    one(sys.argv[2]) if sys.argv[1:2] == ["--one"] else main()
