"""How long the search takes: `python -m tests.benchmarks.planner [REPEATS]` prints one line per run of configs/runs.

CPU seconds of one core, the best of REPEATS (default 3), from the question to the winner, to the next best five, and to
the best of every axis; imports are not counted. The goal is the first figure of the first line below one second: all
layouts of Llama-3 405B on 16,384 GPUs.
"""
import dataclasses
import gc
import json
import subprocess
import sys
import time
from pathlib import Path

from orchestrator.load import load
from orchestrator.planner.axes import axis_groups
from orchestrator.planner.question import Question
from orchestrator.planner.search import Search
from orchestrator.planning import question_of

RUNS = Path(__file__).parents[2] / "configs" / "runs"
FLAT = "llama3_405b on a full fat tree"  # the same without the narrow spine of its paper's cluster
JOBS = (FLAT, "llama3_405b", "llama3_70b", "llama3_8b", "gemma2_27b", "gpt3_175b", "deepseek_v3")


def question(name: str) -> Question:
    asked = question_of(load(RUNS / f"{name.split()[0]}.yaml"), trainable=False)
    if name != FLAT:
        return asked
    return dataclasses.replace(asked, cluster=dataclasses.replace(asked.cluster, switches=[]))


def measure(name: str) -> dict:
    """Each part is a search of its own: nothing is remembered from the one before."""
    asked, found = question(name), {}
    for part, count, groups in (("winner_s", 1, ()), ("six_s", 6, ()), ("axes_s", 6, axis_groups(asked))):
        gc.collect()
        started = time.process_time()
        search = Search(asked, headroom=0.1, convention="causal")
        best, _ = search.best(count, groups=groups)
        found[part] = time.process_time() - started
    return found | dataclasses.asdict(search.effort) | {
        "legal": search.space.count(),
        "winner": f"{best[0].layout} {best[0].layout.schedule} {best[0].predicted.step_time_s:.2f} s"}


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    print(f"{'job':32} {'legal layouts':>14} {'shapes':>7} {'variants':>9} {'priced':>7} {'timelines':>9} "
          f"{'winner':>8} "
          f"{'best six':>9} {'and axes':>9}")
    for name in JOBS:
        runs = [json.loads(subprocess.run([sys.executable, "-m", "tests.benchmarks.planner", "--one", name],
                                          capture_output=True, text=True, check=True).stdout) for _ in range(repeats)]
        one = runs[0]
        times = "".join(f" {min(run[part] for run in runs):8.2f}s" for part in ("winner_s", "six_s", "axes_s"))
        print(f"{name:32} {one['legal']:14,} {one['shapes']:7,} {one['variants']:9,} {one['priced']:7,} "
              f"{one['timelines']:9,}{times}  {one['winner']}", flush=True)


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[2]))) if sys.argv[1:2] == ["--one"] else main()
