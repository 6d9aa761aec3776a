"""Planner and trainer agree: the presets, whole in width and reduced in depth, as ranks of worlds that no machine here
has, need the memory and send the bytes that the plan says. And the fake rank does what a real one does."""
import dataclasses
import json
import subprocess
import sys

import pytest
import torch

from jobs.mesh import build_mesh
from jobs.parallel import parallelize
from jobs.spec.job import JobSpec
from jobs.spec.load import to_dict
from jobs.spec.model import ModelSpec
from jobs.spec.parallel import Layout, ParallelDims
from jobs.spec.training import DataSpec, TrainingSpec
from jobs.spec.verification import Collective, RankReport
from jobs.verify import verify
from jobs.verify.collectives import CollectiveLog
from orchestrator.config import RunConfig
from orchestrator.submission.assemble import assemble_job
from orchestrator.verification import SMALL_PRINT_BYTES, VerifiedRank, compare, telling_ranks
from tests.helpers.communication import sent
from tests.helpers.fake import in_child, preset
from tests.helpers.models import DEEPSEEK3, MIXTURE
from tests.helpers.orc import orc, training_run
from tests.helpers.planning import h100
from tests.helpers.ranks import run_ranks
from tests.helpers.training import TINY, TRAINING, layout as tiny_layout

pytestmark = pytest.mark.distributed

# preset, layers, degrees, the rest of the layout, tokens in a sequence
PRESETS = {
    "llama3-8b, ZeRO-2": ("llama3-8b", 4, dict(dp_shard=8), dict(zero_stage=2, layers_per_unit=2, num_microbatches=2,
                                                                 reduce_every_microbatch=True), 8192),
    "llama3-8b, gpipe, no backward before the last forward": (
        "llama3-8b", 4, dict(pp=2, dp_shard=2), dict(schedule="gpipe", num_microbatches=2), 8192),
    "deepseek-v3, ep × tp × pp": ("deepseek-v3", 4, dict(tp=2, pp=2, dp_shard=8, ep=8),
                                  dict(zero_stage=1, recompute="selective"), 4096),
}
SLOW = {
    "llama3-8b, ZeRO-2, short sequences": (
        "llama3-8b", 8, dict(dp_shard=8), dict(zero_stage=2, num_microbatches=4, reduce_every_microbatch=True,
                                               recompute="full"), 1024),
    "llama3-8b, ZeRO-2, interleaved, reduced every microbatch": (
        "llama3-8b", 8, dict(dp_shard=2, pp=2), dict(zero_stage=2, schedule="interleaved_1f1b", virtual_stages=2,
                                                     num_microbatches=8, reduce_every_microbatch=True), 2048),
    "llama3-8b, ZeRO-2, replicas": (
        "llama3-8b", 8, dict(dp_shard=2, dp_replicate=2), dict(zero_stage=2, num_microbatches=4, recompute="full",
                                                               reduce_every_microbatch=True), 2048),
    "llama3-8b, zbv, ZeRO-2, reduced every microbatch": (
        "llama3-8b", 8, dict(dp_shard=2, pp=2), dict(zero_stage=2, schedule="zbv", virtual_stages=2,
                                                     num_microbatches=8, reduce_every_microbatch=True), 4096),
    "llama3-8b, interleaved, reduced every microbatch": (
        "llama3-8b", 8, dict(dp_shard=2, pp=2), dict(schedule="interleaved_1f1b", virtual_stages=2,
                                                     num_microbatches=8, reduce_every_microbatch=True), 2048),
    "llama3-8b, gpipe": ("llama3-8b", 4, dict(pp=2, dp_shard=2), dict(schedule="gpipe"), 8192),
    "llama3-8b, one microbatch": ("llama3-8b", 4, dict(dp_shard=8), dict(num_microbatches=1), 8192),
    "llama3-8b, four stages per rank, ZeRO-2": (
        "llama3-8b", 8, dict(pp=2, dp_shard=2), dict(schedule="interleaved_1f1b", virtual_stages=4, zero_stage=2),
        4096),
    "llama3-405b, many weights' gradients wait": (
        "llama3-405b", 8, dict(cp=2, tp=8, dp_shard=2, pp=4),
        dict(zero_stage=1, schedule="interleaved_zero_bubble", virtual_stages=2, num_microbatches=16), 8192),
    "llama3-70b, zbv": ("llama3-70b", 16, dict(tp=4, dp_shard=2, pp=4),
                        dict(zero_stage=2, schedule="zbv", virtual_stages=2, num_microbatches=16), 8192),
    "llama3-8b, no sequence parallelism": ("llama3-8b", 4, dict(tp=4, dp_shard=2),
                                           dict(sequence_parallel=False, recompute="full"), 8192),
    "llama3-8b, dualpipev": ("llama3-8b", 4, dict(pp=2, dp_shard=2), dict(schedule="dualpipev", virtual_stages=2,
                                                                          zero_stage=2), 8192),
    "llama3-70b, ring": ("llama3-70b", 3, dict(cp=4, dp_shard=2), {}, 8192),
    "gemma2-27b, gpipe keeps capped logits": ("gemma2-27b", 4, dict(pp=4, dp_shard=2), dict(
        schedule="gpipe", zero_stage=2, recompute="full", microbatch_size=2, num_microbatches=4), 2048),
    "gemma2-27b, kinds of layers share a unit": ("gemma2-27b", 4, dict(tp=2, dp_shard=2),
                                                 dict(zero_stage=1, layers_per_unit=2), 2048),
    "qwen3-30b-a3b, so do the experts of two layers": ("qwen3-30b-a3b", 4, dict(tp=2, dp_shard=4, ep=2),
                                                       dict(zero_stage=1, layers_per_unit=2), 4096),
    "deepseek-v3, ep over dp_shard × cp": ("deepseek-v3", 4, dict(cp=2, dp_shard=4, ep=8), dict(recompute="full"),
                                           2048),
    "deepseek-v3, ring": ("deepseek-v3", 4, dict(cp=2, dp_shard=2, pp=4),
                          dict(recompute="selective", microbatch_size=2), 8192),
    "deepseek-v3, gathered keys, gpipe": ("deepseek-v3", 4, dict(cp=2, dp_shard=2, pp=4), dict(
        cp_method="allgather", recompute="selective", schedule="gpipe", microbatch_size=2), 8192),
    "llama3-70b, 2,048 ranks": ("llama3-70b", 16, dict(pp=8, tp=8, dp_shard=32), dict(recompute="selective"), 8192),
    "llama3-405b, zbv": ("llama3-405b", 4, dict(cp=2, tp=4, dp_shard=2, pp=2),
                         dict(zero_stage=2, schedule="zbv", virtual_stages=2), 8192),
    "gpt3-175b, zero bubble": ("gpt3-175b", 4, dict(tp=4, dp_shard=2, dp_replicate=2, pp=2),
                               dict(zero_stage=1, schedule="interleaved_zero_bubble", virtual_stages=2,
                                    recompute="selective"), 2048),
    "gpt-1t, replicas": ("gpt-1t", 2, dict(tp=8, dp_replicate=2), dict(recompute="selective"), 2048),
    "qwen3-30b-a3b, recompute full": ("qwen3-30b-a3b", 2, dict(tp=2, dp_shard=2, ep=2), dict(recompute="full"), 4096),
    "qwen3-235b-a22b, interleaved": ("qwen3-235b-a22b", 4, dict(tp=4, pp=2, dp_shard=8, ep=8),
                                     dict(zero_stage=2, schedule="interleaved_1f1b", virtual_stages=2), 4096),
    "mixtral-8x7b, ep4 in dp_shard × tp": ("mixtral-8x7b", 2, dict(tp=2, dp_shard=2, ep=4), {}, 4096),
    "mixtral-8x7b, ep8": ("mixtral-8x7b", 2, dict(dp_shard=8, ep=8), dict(zero_stage=1), 4096),
    "gemma2-27b": ("gemma2-27b", 2, dict(tp=2, dp_shard=2), dict(zero_stage=1), 2048),
}


def preset_job(name: str, layers: int, degrees: dict, rest: dict, seq_len: int) -> tuple[RunConfig, JobSpec]:
    model = dataclasses.replace(preset(name), num_layers=layers)
    dims = ParallelDims(**degrees)
    stages = dims.pp * rest.get("virtual_stages", 1)
    split = tuple(layers // stages + (i < layers % stages) for i in range(stages))
    where = Layout(**{"dims": dims, "microbatch_size": 1, "num_microbatches": 2 * stages if dims.pp > 1 else 2,
                      "layers_per_stage": split} | rest)
    training = TrainingSpec(steps=10, seq_len=seq_len, global_batch_size=where.slots, param_dtype="bfloat16")
    config = RunConfig(run="x", cluster=h100(max(1, dims.world_size // 8)), model=model, training=training)
    return config, assemble_job(config, layout=where, world_size=dims.world_size, run_dir=config.run_dir, attempt=1,
                                resume_step=None)


def agree(case: tuple) -> None:
    config, job = preset_job(*case)
    for rank in telling_ranks(job.layout):
        report = in_child(verify, job, rank=rank)
        found = compare(report, job=job, config=config, limit_bytes=2**62)
        assert found.problems == (), [(row.what, row.planned_bytes, row.measured_bytes) for row in found.memory]


@pytest.mark.parametrize("case", PRESETS)
def test_plan_and_trainer_agree_on_memory_and_bytes(case):
    agree(PRESETS[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_plan_and_trainer_agree_on_presets(case):
    agree(SLOW[case])


# documents are masked by another algorithm than the planner knows, which keeps what a fused kernel keeps
MASKED = {"ZeRO-3": dict(dp_shard=8), "pp2 × tp2": dict(pp=2, tp=2, dp_shard=2)}


@pytest.mark.parametrize("case", MASKED)
def test_the_step_of_masked_documents_is_the_one_that_is_verified(case):
    config, job = preset_job("llama3-8b", 4, MASKED[case], {}, 2048)
    masked = dataclasses.replace(job, data=DataSpec(path="a.bin", document_mask=True))
    for rank in telling_ranks(job.layout):
        plain, report = (in_child(verify, one, rank=rank) for one in (job, masked))
        assert report.peak_bytes["activations"] != plain.peak_bytes["activations"]  # masks, no table of angles
        assert compare(report, job=masked, config=config, limit_bytes=2**62).problems == ()


def compared(arguments: dict, **changed) -> VerifiedRank:
    """A toy's report, with fields changed by functions of it."""
    job = job_of(TINY, arguments)
    report = in_child(verify, job, rank=0)
    report = dataclasses.replace(report, **{name: change(report) for name, change in changed.items()})
    return compare(report, job=job, config=RunConfig(run="x", cluster=h100(1), model=TINY, training=TRAINING),
                   limit_bytes=2**62)


def more(report: RankReport) -> dict[str, int]:
    return report.peak_bytes | {"activations": report.peak_bytes["activations"] + 2 * SMALL_PRINT_BYTES}


def halves(report: RankReport) -> tuple[Collective, ...]:
    return tuple(dataclasses.replace(one, payload_bytes=one.payload_bytes // 2, times=2 * one.times)
                 if one.payload_bytes > 1024 else one for one in report.collectives)


def test_of_a_toy_more_than_the_small_print_is_told():
    assert compared(dict(dp_shard=2)).problems == ()
    [problem] = compared(dict(dp_shard=2), peak_bytes=more).problems
    assert "the plan says" in problem and "GiB" in problem


def test_the_same_bytes_in_more_messages_are_told():
    [problem] = compared(dict(dp_shard=2), collectives=halves).problems
    assert "messages per step, the plan says" in problem


def test_axes_that_have_one_group_are_told_together():
    found = compared(dict(cp=2))
    assert [row.what for row in found.axes] == ["cp+dp_shard"] and found.problems == ()


# ------------------------------------------------------------------ a fake rank is a rank
# model, layout, what of the messages depends on the routing
REAL = {
    "dp_shard2 × tp2": (TINY, dict(dp_shard=2, tp=2)),
    "pp2 × dp_replicate2": (TINY, dict(pp=2, dp_replicate=2)),
    "ZeRO-1 × cp2": (TINY, dict(dp_shard=2, cp=2, zero_stage=1)),
    "experts, bias": (DEEPSEEK3, dict(dp_shard=2, tp=2, ep=4)),
    "experts, loss": (MIXTURE, dict(tp=2, ep=2, recompute="full")),
}


def job_of(model: ModelSpec, arguments: dict) -> JobSpec:
    where = tiny_layout(model=model, **arguments)
    config = RunConfig(run="x", cluster=h100(1), model=model,
                       training=TRAINING)
    job = assemble_job(config, layout=where, world_size=where.dims.world_size, run_dir=config.run_dir, attempt=1,
                       resume_step=None)
    return dataclasses.replace(job, device="cpu")


def really_send(job: JobSpec) -> dict[tuple[str, int], int]:
    """What a rank of a gloo group sends in its second step."""
    device, where = torch.device("cpu"), job.layout
    mesh = build_mesh(where.dims, device=device)
    parallel = parallelize(job.model, mesh=mesh, layout=where, training=job.training, device=device)
    rows = where.microbatch_size * where.num_microbatches
    tokens = torch.zeros(rows, job.training.seq_len // where.dims.cp, dtype=torch.int64)
    parallel.forward_backward(tokens, tokens)
    parallel.refresh_weights()
    with CollectiveLog() as log:
        parallel.forward_backward(tokens, tokens, step=1)
        parallel.refresh_weights()
    return sent(log.collectives())


@pytest.mark.parametrize("case", REAL)
def test_a_fake_ranks_first_step_sends_what_a_real_ranks_second_does(case):
    job = job_of(*REAL[case])
    real = run_ranks(really_send, world_size=job.world_size, args=(job,))
    for rank, seen in enumerate(real):
        fake = {(op, size): times for (op, size), times in sent(in_child(verify, job, rank=rank).collectives).items()
                if size > 4}  # the norm, which the optimizer sums up
        routed = "all_to_all"  # of these the sizes are the routing's, the number is not
        assert sum(n for (op, _), n in fake.items() if op == routed) == \
            sum(n for (op, _), n in seen.items() if op == routed)
        assert {key: n for key, n in fake.items() if key[0] != routed} == \
            {key: n for key, n in seen.items() if key[0] != routed}


# ------------------------------------------------------------------ what is found before a GPU hour is spent
def ask(job: JobSpec, folder, rank: int = 0) -> subprocess.CompletedProcess:
    path = folder / "job.json"
    path.write_text(json.dumps(to_dict(job)))
    return subprocess.run([sys.executable, "-m", "jobs.verify", str(path), str(rank)], capture_output=True, text=True)


def test_a_layout_that_the_trainer_refuses_is_told_in_a_line(tmp_path):
    job = job_of(dataclasses.replace(TINY, num_heads=4, num_kv_heads=2), dict(tp=4))
    done = ask(job, tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("refused: parallel.tp: 4 does not divide model.num_kv_heads=2")
    assert "Traceback" not in done.stderr


def test_shapes_that_do_not_fit_are_told_in_the_last_line(tmp_path):
    """Three kv heads for four heads: no rule of the trainer's, but a step cannot be computed."""
    job = job_of(dataclasses.replace(TINY, num_heads=4, num_kv_heads=3, head_dim=8), dict(pp=2))
    done = ask(job, tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert "Error: " in done.stderr.splitlines()[-1] and "Traceback" in done.stderr


@pytest.mark.slow
def test_orc_verify_runs_what_orc_run_would_and_ends_well(tmp_path):
    """Ranks of three stages, told as JSON; nothing is left behind."""
    run_file = training_run(tmp_path, nodes=1, ranks=4)
    before = sorted(tmp_path.rglob("*"))
    done = orc("verify", run_file, "--json", "parallel.pp=2", "parallel.dp_shard=2", check=True)
    found = json.loads(done.stdout)
    assert [rank["report"]["rank"] for rank in found["ranks"]] == [0, 2] and found["problems"] == []
    assert {row["what"] for row in found["ranks"][0]["axes"]} == {"dp_shard", "pp"}
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_orc_verify_refuses_a_rank_that_does_not_exist(tmp_path):
    done = orc("verify", training_run(tmp_path, nodes=1, ranks=2), "--ranks", "2")
    assert done.returncode == 2 and done.stderr.startswith("orc: --ranks: 2 is no rank of 2")
