"""What `orc verify` says of a rank's report: tolerances, out-of-memory, axes that share a group, ranks to look at."""
import dataclasses

import pytest

from jobs.spec.load import SpecError
from jobs.spec.model import ModelSpec
from jobs.spec.parallel import Layout
from jobs.spec.verification import MEMORY, Collective, RankReport
from orchestrator.config import RunConfig
from orchestrator.planner.communication import stage_transfers
from orchestrator.planner.memory import stage_memory
from orchestrator.submission.assemble import assemble_job
from orchestrator.verification import SMALL_PRINT_BYTES, compare, parse_ranks, rank_name, telling_ranks
from tests.helpers.planning import SMALL, h100, layout_of, training

GIB = 2**30
# so large that a tenth of it is more than what is small print
LARGE = dataclasses.replace(SMALL, vocab_size=64 * SMALL.vocab_size, ffn_dim=64 * SMALL.ffn_dim)
LAYOUT = {"dims": {"dp_shard": 4, "tp": 2, "pp": 2}, "num_microbatches": 4}


def job_of(layout: Layout, model: ModelSpec = SMALL):
    config = RunConfig(run="x", cluster=h100(2), model=model,
                       training=training(global_batch_size=layout.slots, param_dtype="bfloat16"))
    return config, assemble_job(config, layout=layout, world_size=layout.dims.world_size, run_dir=config.run_dir,
                                attempt=1, resume_step=None)


def as_planned(layout: Layout, *, rank: int = 0, model: ModelSpec = SMALL) -> RankReport:
    """A report that says exactly what the plan says."""
    config, job = job_of(layout, model)
    here = layout.dims.coordinate(rank)
    memory = stage_memory(model, layout, training=job.training, stage=here["pp"], device="cuda")
    peak = {name: getattr(memory, f"{name}_bytes") for name in MEMORY}
    peak["activations"] += memory.logits_bytes
    sent = [one for stage in layout.stages(here["pp"]) for one in stage_transfers(
        model, layout, training=job.training, cluster=config.cluster, stage=stage)]
    return RankReport(rank=rank, coordinate=here, stages=layout.stages(here["pp"]), peak_bytes=peak, shapes=(),
                      seconds=1.0, collectives=tuple(Collective(axis=one.axis, op=one.op, times=one.times,
                                                                payload_bytes=one.payload_bytes) for one in sent))


def problems(report: RankReport, layout: Layout, *, model: ModelSpec = SMALL,
             limit_bytes: int = 80 * GIB) -> tuple[str, ...]:
    config, job = job_of(layout, model)
    return compare(report, job=job, config=config, limit_bytes=limit_bytes).problems


def test_a_rank_that_does_what_the_plan_says_has_no_problem():
    layout = layout_of(SMALL, **LAYOUT)
    for rank in telling_ranks(layout):
        assert problems(as_planned(layout, rank=rank), layout) == ()


# how much more memory than planned → whether that is a problem: 10% of what is needed
MEMORY_FACTORS = [(0.95, False), (1.05, False), (1.10, False), (1.12, True), (0.88, True)]


@pytest.mark.parametrize("factor,wrong", MEMORY_FACTORS)
def test_memory_may_be_off_by_a_tenth(factor, wrong):
    layout = layout_of(LARGE, **LAYOUT)
    report = as_planned(layout, model=LARGE)
    assert report.total_bytes > 20 * SMALL_PRINT_BYTES
    report = dataclasses.replace(report, peak_bytes={name: int(factor * n) for name, n in report.peak_bytes.items()})
    found = problems(report, layout, model=LARGE)
    assert bool(found) == wrong
    assert all("the plan says" in one and "rank 0 (pp=0 dp_shard=0 tp=0; stage 0 of 2)" in one for one in found)


def test_megabytes_are_not_held_against_a_toy():
    layout = layout_of(SMALL, **LAYOUT)
    report = as_planned(layout)
    few, many = ({"activations": report.peak_bytes["activations"] + n} for n in (SMALL_PRINT_BYTES, 2**30))
    assert report.total_bytes < SMALL_PRINT_BYTES
    assert not problems(dataclasses.replace(report, peak_bytes=report.peak_bytes | few), layout)
    assert problems(dataclasses.replace(report, peak_bytes=report.peak_bytes | many), layout)


@pytest.mark.parametrize("share,wrong", [(0.01, False), (0.03, True)])
@pytest.mark.parametrize("axis", ["dp_shard", "tp", "pp"])
def test_bytes_of_an_axis_may_be_off_by_a_fiftieth(axis, share, wrong):
    layout = layout_of(SMALL, **LAYOUT)
    report = as_planned(layout)
    larger = tuple(dataclasses.replace(one, payload_bytes=int((1 + share * (one.axis == axis)) * one.payload_bytes))
                   for one in report.collectives)
    found = problems(dataclasses.replace(report, collectives=larger), layout)
    assert [f"{axis} moves" in one for one in found] == [True] * wrong


@pytest.mark.parametrize("axis", ["dp_shard", "tp", "pp"])
def test_the_same_bytes_in_another_number_of_messages_are_a_problem(axis):
    layout = layout_of(SMALL, **LAYOUT)
    report = as_planned(layout)
    halves = tuple(dataclasses.replace(one, payload_bytes=one.payload_bytes // 2, times=2 * one.times)
                   if one.axis == axis else one for one in report.collectives)
    [found] = problems(dataclasses.replace(report, collectives=halves), layout)
    assert f"{axis} sends" in found and "of the same bytes" in found


def test_an_axis_that_the_plan_does_not_know_is_a_problem():
    layout = layout_of(SMALL, dims={"tp": 2})
    report = as_planned(layout)
    extra = Collective(axis="cp", op="send_recv", payload_bytes=1000, times=1)
    [found] = problems(dataclasses.replace(report, collectives=report.collectives + (extra,)), layout)
    assert "cp moves 1,000 bytes" in found


def test_a_single_number_is_no_part_of_a_plan():
    layout = layout_of(SMALL, dims={"tp": 2})
    report = as_planned(layout)
    norm = Collective(axis="pp", op="all_reduce", payload_bytes=4, times=1)
    assert problems(dataclasses.replace(report, collectives=report.collectives + (norm,)), layout) == ()


def test_out_of_memory_names_the_stage_what_fills_it_and_a_remedy():
    layout = layout_of(SMALL, **LAYOUT)
    report = as_planned(layout)
    [found] = problems(report, layout, limit_bytes=report.total_bytes // 2)
    assert "stage 0 of 2" in found and "out of memory" in found
    most = max(report.peak_bytes, key=report.peak_bytes.__getitem__)
    assert f"most of it {most}" in found and "; try " in found


def test_the_buffers_that_no_tensor_shows_count_against_the_limit():
    layout = layout_of(SMALL, **LAYOUT)
    report = as_planned(layout)
    assert problems(report, layout, limit_bytes=report.total_bytes + 1)


def test_weights_sharded_over_cp_alone_are_told_with_cp():
    """The group is cp's own: a fake or real rank cannot tell the two uses of it apart."""
    layout = layout_of(SMALL, dims={"cp": 2})
    report = as_planned(layout)
    assert {one.axis for one in report.collectives} == {"cp", "dp_shard"}
    folded = tuple(dataclasses.replace(one, axis="cp+dp_shard") for one in report.collectives)
    assert problems(dataclasses.replace(report, collectives=folded), layout) == ()


# degrees and the rest → ranks that are looked at: order dp_replicate, pp, dp_shard, cp, tp
TELLING = [({"dp_shard": 4}, {}, (0,)), ({"pp": 2, "tp": 2}, {}, (0, 2)), ({"pp": 4, "dp_shard": 2}, {}, (0, 4, 6)),
           ({"pp": 8, "tp": 8, "dp_replicate": 2}, {}, (0, 32, 56))]


@pytest.mark.parametrize("dims,rest,ranks", TELLING)
def test_the_first_a_middle_and_the_last_pipeline_rank_are_looked_at(dims, rest, ranks):
    model = dataclasses.replace(SMALL, num_layers=8)
    assert telling_ranks(layout_of(model, dims=dims, **rest)) == ranks


def test_a_v_says_both_of_its_stages():
    model = dataclasses.replace(SMALL, num_layers=8)
    layout = dataclasses.replace(layout_of(model, dims={"pp": 4}, num_microbatches=8), schedule="zbv",
                                 virtual_stages=2, layers_per_stage=(1,) * 8)
    assert rank_name(layout, 3) == "rank 3 (pp=3; stage 3, 4 of 8)"


def test_ranks_are_read_and_what_is_none_is_refused():
    assert parse_ranks("0,17") == (0, 17) and parse_ranks("") == ()
    with pytest.raises(SpecError, match="is no list of ranks"):
        parse_ranks("0,x")
