"""A model of the user's own computes on every layout what it computes on one rank: the same tolerances as ours. One
model is the docs' example: convolutions, moving averages and attention, without a line of parallel code; the other has
one matrix at both ends, and drops out wherever that is possible."""
import dataclasses
import tempfile
import weakref
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from configs.examples.mixer import build as mixer
from jobs.mesh import build_mesh
from jobs.own import parallelize_own
from jobs.own.build import build
from jobs.spec.own_model import OwnModel
from jobs.spec.parallel import split_layers
from tests.helpers.own_models import SeededDraws, tied
from tests.helpers.ranks import run_ranks
from tests.helpers.training import (TRAINING, assert_same_run, commit, final_parameters, job, layout, reference,
                                    train_job)

pytestmark = pytest.mark.distributed

MIXER = OwnModel(name="mixer", entrypoint="configs.examples.mixer:build", vocab_size=256,
                 arguments={"dim": 32, "depth": 4, "head_dim": 8})

TIED = OwnModel(name="tied", entrypoint="tests.helpers.own_models:tied", vocab_size=256)
PEEKING, NESTED = (OwnModel(name=name, entrypoint="tests.helpers.own_models:kind", vocab_size=256,
                            arguments={"name": name}) for name in ("peeking", "nested"))
WRAPPED = OwnModel(name="wrapped", entrypoint="tests.helpers.own_models:wrapped", vocab_size=256)
BARE = OwnModel(name="bare", entrypoint="tests.helpers.own_models:bare", vocab_size=256)
WHOLE = {"sequence_parallel": False}  # its learned positions need all tokens

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
    "tp2: compiled": (dict(tp=2), dict(compile=True)),
    "tp2: recompute selective, whole sequences between splits": (dict(tp=2, recompute="selective", **WHOLE), {}),
}
TIED_FAST = {
    "dp_shard2": (dict(dp_shard=2), {}),
    "dp_shard2: zero_stage 1": (dict(dp_shard=2, zero_stage=1), {}),
    "tp2: the rank's own part is dropped from": (dict(tp=2, **WHOLE), {}),
    "pp2: the matrix on two stages": (dict(pp=2), {}),
    "pp2: in a V, both ends on one rank": (dict(pp=2, schedule="zbv", virtual_stages=2, zero_stage=1), {}),
    "recompute full: the same numbers again": (dict(recompute="full"), {}),
}
BARE_FAST = {
    "dp_replicate2": (dict(dp_replicate=2), {}),
    "dp_shard2: zero_stage 1": (dict(dp_shard=2, zero_stage=1), {}),
    "dp_shard2": (dict(dp_shard=2), {}),
    "pp2: in a V": (dict(pp=2, schedule="zbv", virtual_stages=2, zero_stage=1), {}),
}
TIED_SLOW = {
    "tp2 × pp2 × dp_shard2, recompute selective": (dict(tp=2, pp=2, dp_shard=2, recompute="selective", **WHOLE), {}),
    "tp2 × dp_shard2, ZeRO-1, in a V": (dict(tp=2, pp=2, dp_shard=2, zero_stage=1, schedule="zbv", virtual_stages=2,
                                             **WHOLE), {}),
    "dp_replicate2 × dp_shard2": (dict(dp_replicate=2, dp_shard=2), {}),
    "pp2: interleaved, recompute full": (dict(pp=2, schedule="interleaved_1f1b", virtual_stages=2, recompute="full"),
                                         {}),
    "pp4": (dict(pp=4), {}),
    "tp2: compiled": (dict(tp=2, **WHOLE), dict(compile=True)),
    "pp2: compiled, recompute full": (dict(pp=2, recompute="full"), dict(compile=True)),
}


def where_of(fields: dict):
    stages = fields.get("pp", 1) * fields.get("virtual_stages", 1)
    return layout(layers_per_stage=split_layers(4, stages), **fields)


def check(case: tuple[dict, dict], model: OwnModel = MIXER) -> None:
    """Compiled or not, the reference is not."""
    fields, changes = case
    training, where = dataclasses.replace(TRAINING, **changes), where_of(fields)
    with tempfile.TemporaryDirectory() as folder:
        spec = job(Path(folder), where, model=model, training=training)
        found = train_job(spec)
        plain = dataclasses.replace(training, compile=False)
        assert_same_run(found, final_parameters(spec), *reference(model, plain, num_layers=4))


@pytest.mark.parametrize("case", FAST.values(), ids=FAST)
def test_an_own_model_matches_its_single_rank(case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW.values(), ids=SLOW)
def test_an_own_model_matches_its_single_rank_elsewhere(case) -> None:
    check(case)


@pytest.mark.parametrize("case", TIED_FAST.values(), ids=TIED_FAST)
def test_a_tied_matrix_and_dropout_match_the_single_rank(case) -> None:
    check(case, TIED)


@pytest.mark.parametrize("case", BARE_FAST.values(), ids=BARE_FAST)
def test_weights_transposed_unused_or_made_by_numpy_match_the_single_rank(case) -> None:
    check(case, BARE)


@pytest.mark.parametrize("zero_stage", [1, 3])
@pytest.mark.parametrize("model", [PEEKING, NESTED, WRAPPED], ids=lambda model: model.name)
def test_a_weight_that_is_used_before_its_unit_is_called_is_there(zero_stage, model) -> None:
    check((dict(dp_shard=2, zero_stage=zero_stage), {}), model)


@pytest.mark.slow
@pytest.mark.parametrize("case", TIED_SLOW.values(), ids=TIED_SLOW)
def test_a_tied_matrix_and_dropout_match_the_single_rank_elsewhere(case) -> None:
    check(case, TIED)


def test_dropout_drops_the_share_that_it_is_asked_for_and_others_at_every_place(tmp_path: Path) -> None:
    spec = job(tmp_path, layout(layers_per_stage=(4,), microbatch_size=8), model=TIED)
    drops, = run_ranks(masks, world_size=1, args=(spec,))
    assert len(drops) == 1 + 3 * 4  # behind the embedding, and in each block one module twice
    assert all(mask.float().mean().item() == pytest.approx(0.2, abs=0.03) for mask in drops)
    same = [(a == b).float().mean().item() for i, a in enumerate(drops) for b in drops[:i] if a.shape == b.shape]
    assert max(same) < 0.75  # 0.2² + 0.8² of independent masks agree


def masks(spec) -> list[torch.Tensor]:
    """Of every call of a dropout, in the order of the forward: what became zero."""
    device = torch.device("cpu")
    parallel = parallelize_own(spec.model, mesh=build_mesh(spec.layout.dims, device=device), layout=spec.layout,
                               training=spec.training, device=device)
    found = []
    for module in parallel.model_parts[0].modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda module, args, out: found.append((out == 0) & (args[0] != 0)))
    tokens = torch.randint(256, (spec.training.global_batch_size, spec.training.seq_len))
    parallel.forward_backward(tokens, tokens, step=1)
    return found


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
    with SeededDraws(spec.training.seed):
        model, _ = mixer(vocab_size=256, seq_len=spec.training.seq_len, **spec.model.arguments)
    wanted = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    return loss.item(), wanted.item()


@pytest.mark.parametrize("seed", [0, 7])
def test_weights_and_buffers_are_what_the_users_code_makes_of_the_seed(tmp_path: Path, seed: int) -> None:
    where = layout(layers_per_stage=(4,), microbatch_size=8)
    spec = job(tmp_path, where, model=MIXER, training=dataclasses.replace(TRAINING, seed=seed))
    (found, wanted), = run_ranks(first_loss, world_size=1, args=(spec,))
    assert found == pytest.approx(wanted, abs=1e-6)


def tied_gradient(spec) -> tuple[list[str], torch.Tensor, torch.Tensor]:
    """Names of the rank's parameters; the shared one's gradient, and what plain torch makes of the same weights."""
    device = torch.device("cpu")
    parallel = parallelize_own(spec.model, mesh=build_mesh(spec.layout.dims, device=device), layout=spec.layout,
                               training=spec.training, device=device)
    tokens = torch.randint(256, (spec.training.global_batch_size, spec.training.seq_len + 1))
    parallel.forward_backward(tokens[:, :-1], tokens[:, 1:])
    model, _ = tied(vocab_size=256, seq_len=spec.training.seq_len, **spec.model.arguments)
    model.load_state_dict(parallel.parameters, strict=False)
    torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return list(parallel.parameters), parallel.gradients["embedding.weight"], model.embedding.weight.grad


def test_a_parameter_of_two_modules_is_one_and_its_gradient_is_both_of_theirs(tmp_path: Path) -> None:
    spec = job(tmp_path, layout(layers_per_stage=(4,), microbatch_size=8),
               model=dataclasses.replace(TIED, arguments={"p": 0.0}))
    (names, found, wanted), = run_ranks(tied_gradient, world_size=1, args=(spec,))
    assert "embedding.weight" in names and not any("head" in name or "copy" in name for name in names)
    assert (found - wanted).abs().max() < 1e-6 < wanted.abs().max()


class Live(TorchDispatchMode):
    """Bytes of the storages that are there at once."""

    now = peak = 0

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for storage in (leaf.untyped_storage() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)):
            if (key := storage._cdata) not in self.seen and storage.device.type != "meta":
                self.seen.add(key)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.forget, key, storage.nbytes())
        return out

    def forget(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


def test_initial_weights_are_made_one_at_a_time() -> None:
    deep = dataclasses.replace(MIXER, arguments={"dim": 64, "depth": 12, "head_dim": 16})
    model, _, recipe = build(deep, seq_len=16, seed=0)
    sizes = {name: 4 * p.numel() for name, p in model.named_parameters()}
    with Live() as live:
        values = {name: recipe.value(name).sum().item() for name in sizes}
    assert len(set(values.values())) > 12 and live.peak <= 1.1 * max(sizes.values()) < 0.2 * sum(sizes.values())
