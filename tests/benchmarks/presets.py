"""Layouts that were published beside the planner's own: `python -m tests.benchmarks.presets` prints the table of
docs/planner.md, `--write` puts it there.

A published layout is priced by the same model, with everything its source does not state chosen as well as possible;
so the last column is what the planner's choice would gain by its own account, not a measurement.
"""
import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.load import load
from orchestrator.planner.cost import Priced
from orchestrator.planner.question import Question
from orchestrator.planner.search import Search
from orchestrator.planner.words import details
from orchestrator.planning import question_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "planner.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A run that its authors described."""

    name: str
    source: str
    run: str  # of configs/runs
    overrides: tuple[str, ...]
    wishes: dict[str, Any]  # what they state of their layout
    measured: str  # what they report


A100 = ("cluster=a100",)
PUBLISHED = (
    Published(name="GPT-3 175B, 768 A100", source="arXiv:2104.04473, table 2", run="gpt3_175b",
              overrides=(*A100, "cluster.num_nodes=96"), measured="149 TFLOP/s executed",
              wishes={"tp": 8, "pp": 12, "cp": 1, "dp_replicate": 8, "dp_shard": 1, "microbatch_size": 1,
                      "schedule": "1f1b", "recompute": "full"}),
    Published(name="GPT 1T, 3,072 A100", source="arXiv:2104.04473, table 1", run="gpt3_175b",
              overrides=(*A100, "model=gpt-1t", "cluster.num_nodes=384", "training.global_batch_size=3072"),
              measured="163 TFLOP/s executed",
              wishes={"tp": 8, "pp": 64, "cp": 1, "dp_replicate": 6, "dp_shard": 1, "microbatch_size": 1,
                      "schedule": "1f1b", "recompute": "full"}),
    Published(name="Llama 3 405B, 8k, 8,192 H100", source="arXiv:2407.21783, table 4", run="llama3_405b",
              overrides=("cluster.num_nodes=1024",), measured="430 TFLOP/s, MFU 43%",
              wishes={"tp": 8, "pp": 16, "cp": 1, "dp_shard": 64}),
    Published(name="Llama 3 405B, 8k, 16,384 H100", source="arXiv:2407.21783, table 4", run="llama3_405b",
              overrides=(), measured="400 TFLOP/s, MFU 41%", wishes={"tp": 8, "pp": 16, "cp": 1, "dp_shard": 128}),
    Published(name="Llama 3 405B, 131k, 16,384 H100", source="arXiv:2407.21783, table 4", run="llama3_405b",
              overrides=("training.seq_len=131072", "training.global_batch_size=128"),
              measured="380 TFLOP/s, MFU 38%", wishes={"tp": 8, "pp": 16, "cp": 16, "dp_shard": 8}),
    Published(name="DeepSeek-V3, 2,048 H800", source="arXiv:2412.19437, section 3.2", run="deepseek_v3",
              overrides=("cluster.gpu=h800",), measured="FP8; not stated",
              wishes={"tp": 1, "cp": 1, "pp": 16, "ep": 64, "dp_shard": 128, "zero_stage": 1,
                      "schedule": "dualpipev"}),
)


def searches(one: Published) -> tuple[Priced, Priced]:
    """(the published layout, the planner's)"""
    config = load(ROOT / "configs" / "runs" / f"{one.run}.yaml", one.overrides)
    free: Question = question_of(config, trainable=False)
    search = Search(free, headroom=config.memory.headroom, convention="causal")
    asked = search.again(dataclasses.replace(free, request=dataclasses.replace(free.request, **one.wishes)))
    theirs = next(asked.ranked(), None) or asked.smallest()
    return theirs, next(search.ranked())


def row(one: Published) -> str:
    theirs, ours = searches(one)
    gain = theirs.predicted.step_time_s / ours.predicted.step_time_s - 1
    fits = "" if theirs.fits else f", {theirs.predicted.memory_gib:.0f} GiB: too big by our memory model"
    return (f"| {one.name} ({one.source}) | {_worded(theirs)}{fits} | {one.measured}; predicted "
            f"{theirs.predicted.tflops_per_gpu:.0f}, executed {_executed(theirs):.0f} | {_worded(ours)} | "
            f"{ours.predicted.tflops_per_gpu:.0f} TFLOP/s, {gain:+.0%} |\n")


def _executed(one: Priced) -> float:
    """TFLOP/s with what is computed twice."""
    return one.predicted.tflops_per_gpu * one.predicted.hfu / one.predicted.mfu


def _worded(one: Priced) -> str:
    return f"`{one.layout}` {details(one.layout)}"


def table() -> str:
    head = ("| run | published layout, details as good as they can be | measured | the planner's | predicted, "
            "faster by |\n"
            "|---|---|---|---|---|\n")
    return head + "".join(row(one) for one in PUBLISHED)


def written() -> str:
    """The table as it stands in the docs."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="into docs/planner.md")
    found = table()
    if parser.parse_args().write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + BEGIN + found + END + rest.partition(END)[2])
    print(found)


if __name__ == "__main__":
    main()
