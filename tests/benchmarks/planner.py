"""How long the search takes: `python -m tests.benchmarks.planner [REPEATS]` prints one line per job.

CPU seconds of one core, the best of REPEATS (default 3), from the question to the winner and to the next best five;
imports are not counted. The goal is the first figure of Llama-3 405B on 16,384 GPUs below one second.
"""
import gc
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


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    print(f"{'job':28} {'legal layouts':>14} {'shapes':>7} {'variants':>9} {'timelines':>9} {'priced':>7} {'winner':>8} "
          f"{'best six':>8}")
    for model, nodes, batch in JOBS:
        runs = [measure(model, nodes, batch) for _ in range(repeats)]
        first_s, six_s = min(run[0] for run in runs), min(run[1] for run in runs)
        search, winner = runs[0][2:]
        effort = search.effort
        print(f"{f'{model.name} on {8 * nodes:,}':28} {search.space.count():14,} {effort.shapes:7,} {effort.variants:9,} "
              f"{effort.timelines:9,} {effort.priced:7,} {first_s:7.2f}s {six_s:7.2f}s  {winner.layout} "
              f"{winner.layout.schedule} {winner.predicted.step_time_s:.2f} s")


if __name__ == "__main__":
    main()
