"""A model of the user's own computes on every layout what it computes on one rank: the same tolerances as ours. The
model is the docs' example: convolutions, moving averages and attention, without a line of parallel code."""
import dataclasses
import tempfile
from pathlib import Path

import pytest
import torch

from configs.examples.mixer import build as mixer
from jobs.mesh import build_mesh
from jobs.own import parallelize_own
from jobs.spec.own_model import OwnModel
from jobs.spec.parallel import split_layers
from tests.helpers.ranks import run_ranks
from tests.helpers.training import TRAINING, assert_matches_single_rank, commit, job, layout, train_job

pytestmark = pytest.mark.distributed

MIXER = OwnModel(name="mixer", entrypoint="configs.examples.mixer:build", vocab_size=256,
                 arguments={"dim": 32, "depth": 4, "head_dim": 8})

# what is special about the case → (layout, changes of the training)
FAST = {
    "dp_shard2": (dict(dp_shard=2), {}),
    "tp2": (dict(tp=2), {}),
    "pp2": (dict(pp=2), {}),
    "tp2: whole sequences between splits": (dict(tp=2, sequence_parallel=False), {}),
    "tp2 × pp2 × dp_shard2": (dict(tp=2, pp=2, dp_shard=2), {}),
}
SLOW = {
    "dp_replicate2": (dict(dp_replicate=2), {}),
    "dp_shard2: zero_stage 1": (dict(dp_shard=2, zero_stage=1), {}),
    "dp_shard2: zero_stage 2": (dict(dp_shard=2, zero_stage=2), {}),
    "dp_replicate2 × dp_shard2": (dict(dp_replicate=2, dp_shard=2), {}),
    "dp_shard2: two blocks to a unit": (dict(dp_shard=2, layers_per_unit=2), {}),
    "dp_shard2: surplus slots weigh nothing": (dict(dp_shard=2, global_batch_size=7), dict(global_batch_size=7)),
    "tp4": (dict(tp=4), {}),
    "tp2 × dp_shard2: zero_stage 1": (dict(tp=2, dp_shard=2, zero_stage=1), {}),
    "tp2 × dp_shard2": (dict(tp=2, dp_shard=2), {}),
    "tp2 × pp2": (dict(tp=2, pp=2), {}),
    "tp2: recompute full": (dict(tp=2, recompute="full"), {}),
    "dp_shard2: recompute selective": (dict(dp_shard=2, recompute="selective"), {}),
    "pp2: recompute full": (dict(pp=2, recompute="full"), {}),
    "pp2: interleaved": (dict(pp=2, schedule="interleaved_1f1b", virtual_stages=2), {}),
    "pp2: zbv": (dict(pp=2, schedule="zbv", virtual_stages=2, zero_stage=1), {}),
    "pp4: a block to a stage": (dict(pp=4), {}),
    "pp2 × dp_shard2: reduced with every microbatch": (dict(pp=2, dp_shard=2, reduce_every_microbatch=True), {}),
    "dp_shard2: compiled": (dict(dp_shard=2), dict(compile=True)),
    "tp2: z-loss": (dict(tp=2), dict(z_loss=0.1)),
}


def where_of(fields: dict):
    stages = fields.get("pp", 1) * fields.get("virtual_stages", 1)
    return layout(layers_per_stage=split_layers(4, stages), **fields)


def check(case: tuple[dict, dict], model: OwnModel = MIXER) -> None:
    fields, changes = case
    with tempfile.TemporaryDirectory() as folder:
        assert_matches_single_rank(Path(folder), where_of(fields), model=model,
                                   training=dataclasses.replace(TRAINING, **changes))


@pytest.mark.parametrize("case", FAST.values(), ids=FAST)
def test_an_own_model_matches_its_single_rank(case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW.values(), ids=SLOW)
def test_an_own_model_matches_its_single_rank_elsewhere(case) -> None:
    check(case)


def test_a_checkpoint_of_an_own_model_resumes_on_another_layout(tmp_path: Path) -> None:
    whole = train_job(job(tmp_path / "whole", where_of(dict(tp=2)), model=MIXER))
    first = dataclasses.replace(TRAINING, steps=5)
    before = train_job(job(tmp_path / "cut", where_of(dict(dp_shard=2)), model=MIXER, training=first, interval_steps=3))
    commit(tmp_path / "cut", before.shards, step=3)
    after = train_job(job(tmp_path / "cut", where_of(dict(tp=2, pp=2)), model=MIXER, training=first, resume_step=3,
                          attempt=2))
    assert after.losses == pytest.approx(whole.losses[3:], abs=1e-5, rel=0)


def first_loss(spec) -> tuple[float, float]:
    """Of the rank's model, and of the user's module as anybody would run it with the same seed."""
    device = torch.device("cpu")
    mesh = build_mesh(spec.layout.dims, device=device)
    parallel = parallelize_own(spec.model, mesh=mesh, layout=spec.layout, training=spec.training, device=device)
    tokens = torch.randint(256, (spec.training.global_batch_size, spec.training.seq_len + 1))
    loss = parallel.forward_backward(tokens[:, :-1], tokens[:, 1:])
    torch.manual_seed(spec.training.seed)
    model, _ = mixer(vocab_size=256, seq_len=spec.training.seq_len, **spec.model.arguments)
    wanted = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    return loss.item(), wanted.item()


@pytest.mark.parametrize("seed", [0, 7])
def test_weights_and_buffers_are_what_the_users_code_makes_of_the_seed(tmp_path: Path, seed: int) -> None:
    where = layout(layers_per_stage=(4,), microbatch_size=8)
    spec = job(tmp_path, where, model=MIXER, training=dataclasses.replace(TRAINING, seed=seed))
    (found, wanted), = run_ranks(first_loss, world_size=1, args=(spec,))
    assert found == pytest.approx(wanted, abs=1e-6)
