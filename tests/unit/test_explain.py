"""Explanations: what each axis costs or saves, any layout beside the winner, what differs between two plans."""
import dataclasses
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from jobs.spec.load import SpecError
from orchestrator.request import ParallelRequest
from orchestrator.planner import plan, plan_from_dict, plan_json
from orchestrator.planner.explain import diff, explain, parse_wishes
from orchestrator.planner.question import Question
from orchestrator.planner.search import Search
from orchestrator.planner.show_explain import axes_table, diff_table, show_explained
from tests.helpers.planning import LLAMA3_8B, SMALL, cpu, h100, training

ROOT = Path(__file__).parents[2]
WIDE = dataclasses.replace(LLAMA3_8B, num_kv_heads=32)  # tp up to 32 is a question of links alone
GPUS = {"seq_len": 4096, "param_dtype": "bfloat16"}


def question_of(model, cluster, *, global_batch_size, request=None, wide=False, **spec) -> Question:
    return Question(model=model, training=training(global_batch_size=global_batch_size, **spec), cluster=cluster,
                    request=request or ParallelRequest(), num_nodes=cluster.num_nodes, allow_tp_across_nodes=wide)


def best_of(question, **wishes):
    request = dataclasses.replace(question.request, **wishes)
    return next(Search(dataclasses.replace(question, request=request), headroom=0.1, convention="causal").ranked())


def axes_of(question):
    return plan(question, headroom=0.1, axes=True).axes


@pytest.fixture(scope="module")
def small():
    question = question_of(SMALL, cpu(2), global_batch_size=16)
    return question, best_of(question)


def test_every_axis_is_shown_without_or_with_it(small):
    question, winner = small
    effects = axes_of(question)
    assert [effect.axis for effect in effects[:5]] == ["tp", "pp", "cp", "dp_shard", "dp_replicate"]
    for effect in effects[:5]:
        has = getattr(winner.layout.dims, effect.axis)
        assert effect.what == f"{'without' if has > 1 else 'with'} {effect.axis}"
        assert effect.other is not None and (getattr(effect.other.layout.dims, effect.axis) == 1) == (has > 1)
        assert effect.change == pytest.approx(effect.other.step_time_s / winner.predicted.step_time_s - 1)
        assert effect.change >= 0


def test_tp_over_the_edge_of_a_node_says_what_it_costs():
    question = question_of(WIDE, h100(4), global_batch_size=64, **GPUS)
    crossing = axes_of(question)[-1]
    assert crossing.what == "tp=16 crosses nodes" and crossing.change > 0.2


def test_an_axis_that_cannot_be_left_out_says_why():
    """One key-value head and one layer leave nothing to split but the states, and those do not fit one GPU."""
    whole = dataclasses.replace(LLAMA3_8B, num_layers=1, num_kv_heads=1)
    question = question_of(whole, h100(1, memory_gib=16.0), global_batch_size=16, seq_len=128, param_dtype="bfloat16")
    notes = {effect.what: effect.note for effect in axes_of(question) if effect.other is None}
    assert "nothing fits" in notes["without dp_shard"] and "too big by" in notes["without dp_shard"]
    assert "model.num_kv_heads=1" in notes["with tp"] and "model.num_layers=1" in notes["with pp"]


# wishes → what one of the reasons must say
LOSERS = {
    "tp=8": "parallel.tp: 8 does not divide model.num_kv_heads=4",
    "tp=4,pp=2": "slower",
    "cp=4": "slower",
    "pp=4 schedule=gpipe": "bubble +",
    "pp=8": "parallel.pp: 8 is above model.num_layers=4",
    "dp_replicate=8": "step ",
}


@pytest.mark.parametrize("wishes", LOSERS)
def test_any_layout_is_shown_with_every_reason_it_lost(small, wishes):
    question, winner = small
    explained = explain(question, parse_wishes(wishes), asked=wishes, winner=winner, headroom=0.1)
    assert any(LOSERS[wishes] in reason for reason in explained.reasons), explained.reasons
    if explained.priced is not None:
        for name, value in parse_wishes(wishes).items():
            assert explained.priced.layout.flat()[name] == value
        grown = [reason for reason in explained.reasons if "+" in reason]
        assert explained.priced.predicted.step_time_s > winner.predicted.step_time_s and grown


def test_what_placement_forbids_is_priced_beside_the_rule():
    question = question_of(WIDE, h100(4), global_batch_size=64, **GPUS)
    explained = explain(question, {"tp": 16}, asked="tp=16", winner=best_of(question), headroom=0.1)
    assert "parallel.tp: 16 crosses nodes" in explained.reasons[0]
    assert explained.priced.layout.dims.tp == 16 and any("exposed tp communication +" in r for r in explained.reasons)


@pytest.mark.parametrize("text,message", [("tpp=2", "did you mean 'tp'?"), ("tp", "is not key=value"), ("tp=two",
                                                                                                        "whole"),
                                          ("schedule=fast", "one of gpipe"),
                                          ("tp=²", "a whole number"), ("tp=" + 5000 * "9", "a whole number"),
                                          ("tp=2,tp=4", "asks a second time for tp"), ("", "asks for nothing")])
def test_wishes_that_cannot_be_read_are_refused(text, message):
    with pytest.raises(SpecError, match="--explain") as refused:
        parse_wishes(text)
    assert message in str(refused.value)


def test_a_diff_names_what_differs_and_nothing_else():
    question = question_of(SMALL, cpu(2), global_batch_size=16)
    a = plan(question, headroom=0.1)
    b = plan(dataclasses.replace(question, training=training(global_batch_size=32)), headroom=0.1)
    assert diff(a, a) == []
    fields = {field for field, _, _ in diff(a, b)}
    assert {"job.global_batch_size", "predicted.step_time_s"} <= fields and "job.model" not in fields


def test_a_plan_with_its_axes_reads_back(small):
    question, winner = small
    made = plan(question, headroom=0.1, axes=True)
    assert made.axes and made.layout == winner.layout
    assert plan_from_dict(json.loads(json.dumps(plan_json(made)))) == made


def test_explanations_fit_a_terminal_of_100_columns(small):
    question, winner = small
    screen = io.StringIO()
    console = Console(file=screen, width=100)
    console.print(axes_table(axes_of(question)))
    show_explained(explain(question, {"tp": 4}, asked="tp=4", winner=winner, headroom=0.1), winner, console)
    console.print(diff_table([("layout.tp", 1, 4), ("predicted.step_time_s", 1.0, 2.0)], names=("a.json", "b.json")))
    shown = screen.getvalue()
    assert max(map(len, shown.splitlines())) <= 100
    for word in ("with tp", "asked for", "winner", "MFU", "+100.0%"):
        assert word in shown


def test_brackets_of_what_was_asked_are_shown_and_are_no_markup():
    asked = ParallelRequest(tp=[2, 4])
    effects = axes_of(question_of(SMALL, cpu(2), global_batch_size=16, request=asked))
    screen = io.StringIO()
    console = Console(file=screen, width=200)
    console.print(axes_table(effects))
    console.print(diff_table([("job.model", "[bold]", "[red]")], names=("[a].json", "[b].json")))
    for word in ("tp=[2,4]", "[bold]", "[red]", "[a].json", "[b].json"):
        assert word in screen.getvalue()


# ------------------------------------------------------------------ the command
def orc(*arguments, cwd=ROOT):
    return subprocess.run([sys.executable, "-m", "orchestrator.cli", *map(str, arguments)], capture_output=True,
                          text=True,
                          cwd=cwd, env={**os.environ, "COLUMNS": "100"})


def test_the_command_explains_diffs_and_exports(tmp_path):
    demo = ROOT / "configs/runs/demo.yaml"
    shown = orc("plan", demo)
    assert shown.returncode == 0 and "each axis: the best layout without it" in shown.stdout, shown.stderr
    explained = orc("plan", demo, "--explain", "tp=4", "--json")
    data = json.loads(explained.stdout)
    assert data["explained"]["layout"]["tp"] == 4 and data["explained"]["reasons"]
    for name, override in (("a", "parallel.tp=2"), ("b", "parallel.tp=1 parallel.dp_shard=4")):
        made = orc("plan", demo, "--json", "--no-axes", *override.split())
        (tmp_path / f"{name}.json").write_text(made.stdout)
    changed = orc("plan", tmp_path / "a.json", "--diff", tmp_path / "b.json")
    assert changed.returncode == 0 and "layout.tp" in changed.stdout and "predicted.step_time_s" in changed.stdout
    refused = orc("export", tmp_path / "a.json", "--to", "accelerate")
    assert refused.returncode == 2 and "layout.pp" in refused.stderr and "Traceback" not in refused.stderr
    assert "--tensor-model-parallel-size 2" in orc("export", tmp_path / "a.json", "--to", "megatron").stdout


def test_the_command_refuses_without_a_traceback(tmp_path):
    (tmp_path / "no.json").write_text("[]")
    for arguments in (("plan", tmp_path / "no.json", "--diff", tmp_path / "no.json"), ("export", tmp_path / "no.json",
                                                                                       "--to", "x"),
                      ("plan", ROOT / "configs/runs/demo.yaml", "--explain", "tpp=1"),
                      ("plan", ROOT / "configs/runs/own_trainer.yaml"),
                      ("verify", ROOT / "configs/runs/own_trainer.yaml"),
                      ("plan", ROOT / "configs/runs/demo.yaml", "--from", tmp_path / "no.json")):
        done = orc(*arguments)
        assert done.returncode == 2 and done.stderr.startswith("orc: ") and "Traceback" not in done.stderr, done.stderr
