"""What `orc plan` prints adds up: a reader who sums a column gets the figure beside it."""
import dataclasses
import io
import re

import pytest
from rich.console import Console

from orchestrator.planner.cost import Priced, price
from orchestrator.planner.plan import GIB, Plan, plan_from_dict, plan_json
from orchestrator.planner.reasons import SLOWED, reason
from orchestrator.planner.show import amdahl, render
from tests.helpers.planning import LLAMA3_8B, LLAMA3_70B, SMALL, cpu, h100, layout_of, plan_for, training

GPUS = {"seq_len": 8192, "param_dtype": "bfloat16"}
SECONDS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
# one rank's rows, pipelines, interleaved stages, hidden communication that slows compute
PLANS = {
    "one stage": (LLAMA3_8B, h100(16), {"global_batch_size": 512, **GPUS}, {}),
    "interleaved": (LLAMA3_70B, h100(16), {"global_batch_size": 256, **GPUS},
                    {"tp": 8, "pp": 4, "schedule": "interleaved_1f1b", "virtual_stages": 4}),
    "on CPUs": (SMALL, cpu(2), {"global_batch_size": 16}, {"tp": 2, "pp": 2}),
}


@pytest.fixture(scope="module", params=PLANS)
def made(request) -> Plan:
    model, cluster, spec, fixed = PLANS[request.param]
    return plan_for(model, cluster, training(**spec), **fixed)


def shown(plan: Plan, *, width: int = 140) -> str:
    screen = io.StringIO()
    Console(file=screen, width=width).print(render(plan))
    return "\n".join(line.rstrip() for line in screen.getvalue().splitlines())


def seconds_of(text: str) -> float:
    number, unit = text.split()
    return float(number) * SECONDS[unit]


def rows_after(head: str, text: str) -> list[str]:
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.lstrip().startswith(head)) + 1
    return lines[start:lines.index("", start)]


def test_the_columns_of_memory_add_up_to_its_last(made):
    rows = [row.split() for row in rows_after("rank ", shown(made))]
    assert rows
    for _, _, _, *parts, total in rows:
        assert sum(map(float, parts)) == pytest.approx(float(total), abs=0.005 * (len(parts) + 1))


def test_nothing_is_cut_off_in_a_terminal_of_80_columns(made):
    narrow = shown(made, width=80)
    assert "…" not in narrow and max(map(len, narrow.splitlines())) <= 80
    figures = {figure for row in rows_after("rank ", shown(made)) for figure in row.split()}
    assert figures == {figure for row in rows_after("rank ", narrow) for figure in row.split()}


def test_operations_too_small_for_a_line_of_their_own_are_counted_in_one(made):
    """Every operation of the plan is in the times column once."""
    text = "\n".join(rows_after("axis ", shown(made)))
    times = re.findall(r"([\d,]+) (?:in node|network|spine)| small ones +([\d,]+)", text)
    assert sum(int("".join(one).replace(",", "")) for one in times) == sum(one.times for one in made.communication)


def test_what_is_exposed_per_operation_adds_up_to_the_steps(made):
    exposed = [seconds_of(re.search(r"[\d.]+ (?:s|ms|µs)$", row)[0]) for row in rows_after("axis ", shown(made))]
    assert sum(exposed) == pytest.approx(made.predicted.exposed_communication_s, rel=0.02, abs=1e-4)


def test_compute_that_hidden_communication_slows_has_a_line_where_there_is_any():
    text = shown(plan_for(*PLANS["one stage"][:2], training(**PLANS["one stage"][2])))
    assert SLOWED in text.split("best rejected")[0]


def test_memory_is_told_of_pipeline_ranks_and_their_layers(made):
    """A rank of an interleaved schedule holds several stages."""
    text = shown(made)
    assert f"on pipeline rank {made.predicted.memory_pp_rank}, the heaviest" in text
    assert f"{made.job.gpu} less 10% headroom" in text
    assert sum(one.layers for one in made.memory) == sum(made.layout.layers_per_stage)
    assert max(one.total_bytes for one in made.memory) / GIB == pytest.approx(made.predicted.memory_gib)


def test_faster_and_slower_are_told_of_the_step_time(made):
    """One convention in every reason, that of the table of axes."""
    told = 0
    for loser in made.rejected:
        change = loser.step_time_s / made.predicted.step_time_s - 1
        if match := re.match(r"([\d.]+)% (slower|faster)", loser.reason):
            told += 1
            assert float(match[1]) == pytest.approx(100 * abs(change), abs=0.051)
            assert (match[2] == "slower") == (change > 0)
    assert told


# seconds more of compute and of the bubble than the winner, on a step of 1 s → the reason
REASONS = {
    (0.1, 0.0): "10.0% slower: compute +100.0 ms",
    (0.1, -0.03): "7.0% slower: compute +100.0 ms",
    (0.1, -0.09): "1.0% slower: compute +100.0 ms, pipeline bubble −90.0 ms",
    (0.0001, 0.0): "as fast within 0.05%, in 2.0 GiB instead of 1.0 GiB",
}


def taking(winner: Priced, compute_s: float, bubble_s: float, memory_gib: float) -> Priced:
    predicted = dataclasses.replace(winner.predicted, step_time_s=1 + compute_s + bubble_s, compute_s=0.5 + compute_s,
                                    bubble_s=0.5 + bubble_s, memory_gib=memory_gib)
    return dataclasses.replace(winner, predicted=predicted)


@pytest.mark.parametrize("grown", REASONS, ids=str)
def test_a_reason_that_is_more_than_the_loss_says_what_came_back(grown):
    one = price(SMALL, layout_of(SMALL), training=training(global_batch_size=1), cluster=h100(1), headroom=0.1,
                convention="causal")
    assert reason(taking(one, *grown, 2.0), taking(one, 0.0, 0.0, 1.0)) == REASONS[grown]


AMDAHL = {  # serial share of a step → speed-up by 1, 2, 8 times the GPUs, and by any number
    0.05: (1.0, 1.9048, 5.9259, 20.0),
    0.5: (1.0, 1.3333, 1.7778, 2.0),
}


@pytest.mark.parametrize("serial", AMDAHL)
def test_amdahls_law_bounds_what_more_gpus_bring(serial, made):
    step_s = made.predicted.step_time_s
    predicted = dataclasses.replace(made.predicted, compute_s=(1 - serial) * step_s)
    once, twice, eight, ceiling = AMDAHL[serial]
    assert [predicted.speedup(n) for n in (1, 2, 8)] == pytest.approx([once, twice, eight], rel=1e-4)
    assert predicted.speedup_ceiling == pytest.approx(ceiling)


def test_the_plans_own_serial_share_and_ceiling_are_printed_and_published(made):
    predicted = made.predicted
    serial = (predicted.exposed_communication_s + predicted.bubble_s + predicted.optimizer_s) / predicted.step_time_s
    assert f"{serial:.1%} is not compute: 2× the GPUs bring at most {predicted.speedup(2):.2f}×" in shown(made)
    assert f"any number {1 / serial:,.1f}× (Amdahl)" in shown(made)
    published = plan_json(made)
    assert published["predicted"]["serial_share"] == pytest.approx(serial)
    assert published["predicted"]["speedup_ceiling"] == pytest.approx(1 / serial)
    assert plan_from_dict(published) == made


def test_a_step_of_compute_alone_has_no_ceiling(made):
    predicted = dataclasses.replace(made.predicted, compute_s=made.predicted.step_time_s)
    assert predicted.speedup(8) == pytest.approx(8) and "All of it is compute" in amdahl(predicted)
    assert plan_json(dataclasses.replace(made, predicted=predicted))["predicted"]["speedup_ceiling"] is None
