"""Layouts drawn at random from all that the planner may choose, for every kind of decoder: each computes what one rank
computes. The tables beside this one say why a case is there; this one finds the case that nobody thought of."""
import dataclasses
import os
import random

import pytest

from jobs.spec.model import ModelSpec
from jobs.spec.parallel import VIRTUAL_STAGES, Layout
from jobs.spec.training import TrainingSpec
from orchestrator.planner.question import Question
from orchestrator.planner.space import every_layout
from orchestrator.request import ParallelRequest
from tests.helpers.models import DEEPSEEK3, GEMMA2, GPT, LLAMA3, MIXTURE
from tests.helpers.planning import cpu
from tests.helpers.training import TINY, TRAINING, assert_matches_single_rank

pytestmark = pytest.mark.distributed

SMOKE, ALL = 6, int(os.environ.get("ORC_EXAMPLES", "60"))
MODELS = [LLAMA3, GPT, GEMMA2, DEEPSEEK3, MIXTURE,
          dataclasses.replace(TINY, tie_embeddings=True),
          dataclasses.replace(GPT, tie_embeddings=False),
          dataclasses.replace(GPT, moe=MIXTURE.moe),
          dataclasses.replace(GEMMA2, moe=MIXTURE.moe, tie_embeddings=False),
          dataclasses.replace(DEEPSEEK3, moe=None),
          dataclasses.replace(DEEPSEEK3, tie_embeddings=True)]
TRAININGS = [TRAINING,
             dataclasses.replace(TRAINING, global_batch_size=7, z_loss=0.01),
             dataclasses.replace(TRAINING, global_batch_size=5)]
RANKS = [2, 4, 4, 8]
# what a layout leaves open beside its degrees, each drawn, so that the rest is a space small enough to be listed
OPEN = {
    "pp": (1, 2, 4),
    "cp": (1, 2, 4),
    "tp": (1, 2, 4),
    "sequence_parallel": (True, False),
    "recompute": ("none", "selective", "full"),
    "microbatch_size": (1, 2, 4),
    "layers_per_unit": (1, 2, 4),
    "reduce_every_microbatch": (True, False),
    "cp_method": ("ring", "allgather"),
    "schedule": tuple(VIRTUAL_STAGES),
}


def drawn(number: int) -> tuple[ModelSpec, TrainingSpec, Layout]:
    """The same for the same number."""
    draw = random.Random(number)
    while True:
        model, training, cluster = draw.choice(MODELS), draw.choice(TRAININGS), cpu(1, draw.choice(RANKS))
        wishes = {name: draw.choice(values) for name, values in OPEN.items()}
        question = Question(model=model, training=training, cluster=cluster, request=ParallelRequest(**wishes),
                            num_nodes=1, allow_tp_across_nodes=False, trainable=True)
        if legal := list(every_layout(question)):
            return model, training, draw.choice(legal)


@pytest.mark.parametrize("number", [pytest.param(n, marks=[] if n < SMOKE else [pytest.mark.slow]) for n in range(ALL)])
def test_what_the_planner_may_choose_matches_single_rank(number, tmp_path):
    model, training, where = drawn(number)
    assert_matches_single_rank(tmp_path, where, model=model, training=training)


def test_the_draw_reaches_every_axis_schedule_and_option():
    """Of the slow ones together; else the comparison would be of a corner."""
    layouts = [drawn(number)[2] for number in range(60)]
    for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep"):
        assert sum(getattr(one.dims, axis) > 1 for one in layouts) >= 5, axis
    for name, least in (("schedule", 6), ("zero_stage", 3), ("recompute", 3), ("sequence_parallel", 2),
                        ("reduce_every_microbatch", 2), ("layers_per_unit", 3), ("microbatch_size", 3)):
        assert len({getattr(one, name) for one in layouts}) >= least, name
