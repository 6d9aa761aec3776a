"""Layouts drawn at random from all that the planner may choose, for every preset, whole in width and reduced in depth:
what a rank needs and sends is what the plan says. The tables of test_verify say why a case is there; this one finds
the case that nobody thought of."""
import dataclasses
import os
import random

import pytest

from jobs.spec.job import JobSpec
from jobs.spec.parallel import VIRTUAL_STAGES
from jobs.spec.training import TrainingSpec
from jobs.verify import verify
from orchestrator.config import RunConfig
from orchestrator.planner.question import Question
from orchestrator.planner.space import every_layout
from orchestrator.request import ParallelRequest
from orchestrator.submission.assemble import assemble_job
from orchestrator.verification import VerifiedRank, compare, telling_ranks
from tests.helpers.fake import in_child, preset
from tests.helpers.planning import h100

pytestmark = pytest.mark.distributed

# numbers that are drawn: a few that are quick, all when there is time
SMOKE, ALL = (3, 4, 5), range(int(os.environ.get("ORC_EXAMPLES", "40")))
PRESETS = ("llama3-8b", "llama3-70b", "llama3-405b", "gpt3-175b", "gemma2-27b", "mixtral-8x7b", "qwen3-30b-a3b",
           "qwen3-235b-a22b", "moonlight-16b", "deepseek-v3")
LAYERS, NODES, SEQ_LENS, BATCHES = (4, 6, 8, 12), (1, 2, 4, 8), (2048, 2048, 4096, 8192), (16, 32, 64)
DTYPES = (("bfloat16", "float32"),) * 4 + (("bfloat16", "bfloat16"), ("float32", "float32"))
# what a layout leaves open beside its degrees, each drawn, so that the rest is a space small enough to be listed
OPEN = {
    "pp": (1, 1, 2, 4),
    "cp": (1, 1, 2, 4),
    "tp": (1, 2, 4, 8),
    "recompute": ("none", "selective", "full"),
    "microbatch_size": (1, 1, 2),
    "layers_per_unit": (1, 2, 4),
    "zero_stage": (1, 2, 3),
    "reduce_every_microbatch": (True, False),
    "cp_method": ("ring", "allgather"),
    "schedule": tuple(VIRTUAL_STAGES),
}
MOST_WORK = 200  # layers × microbatches of a rank, times its steps of a ring: a minute


def drawn(number: int) -> tuple[RunConfig, JobSpec]:
    """The same for the same number."""
    draw = random.Random(number)
    while True:
        param_dtype, reduce_dtype = draw.choice(DTYPES)
        model = dataclasses.replace(preset(draw.choice(PRESETS)), num_layers=draw.choice(LAYERS))
        training = TrainingSpec(steps=10, seq_len=min(draw.choice(SEQ_LENS), model.max_positions or 8192),
                                global_batch_size=draw.choice(BATCHES), param_dtype=param_dtype,
                                reduce_dtype=reduce_dtype)
        cluster = h100(draw.choice(NODES))
        wishes = {name: draw.choice(values) for name, values in OPEN.items()}
        question = Question(model=model, training=training, cluster=cluster, request=ParallelRequest(**wishes),
                            num_nodes=cluster.num_nodes, allow_tp_across_nodes=False, trainable=True)
        legal = [one for one in every_layout(question)
                 if model.num_layers // one.dims.pp * one.num_microbatches * one.dims.cp <= MOST_WORK]
        if legal:
            config = RunConfig(run="x", cluster=cluster, model=model, training=training)
            where = draw.choice(legal)
            return config, assemble_job(config, layout=where, world_size=where.dims.world_size, run_dir=config.run_dir,
                                        attempt=1, resume_step=None)


def verified(number: int) -> list[VerifiedRank]:
    config, job = drawn(number)
    return [compare(in_child(verify, job, rank=rank), job=job, config=config, limit_bytes=2**62)
            for rank in telling_ranks(job.layout)]


@pytest.mark.parametrize("number", [pytest.param(n, marks=[] if n in SMOKE else [pytest.mark.slow]) for n in ALL])
def test_what_the_planner_may_choose_needs_and_sends_what_the_plan_says(number):
    for found in verified(number):
        assert found.problems == (), [(row.what, row.planned_bytes, row.measured_bytes) for row in found.memory]


def test_the_draw_reaches_every_axis_schedule_and_option():
    """Of the slow ones together; else the comparison would be of a corner."""
    jobs = [drawn(number)[1] for number in range(40)]
    layouts = [job.layout for job in jobs]
    for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep"):
        assert sum(getattr(one.dims, axis) > 1 for one in layouts) >= 5, axis
    for name, least in (("schedule", 6), ("zero_stage", 3), ("recompute", 3), ("reduce_every_microbatch", 2),
                        ("layers_per_unit", 3), ("microbatch_size", 2)):
        assert len({getattr(one, name) for one in layouts}) >= least, name
    assert len({job.model.name for job in jobs}) >= 8
