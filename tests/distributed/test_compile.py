"""Compiled layers compute what layers run operation by operation compute, in every kind of layout; and they are
compiled."""
import dataclasses
import re

import pytest
import torch
import torch._dynamo

from jobs.spec.support import compile_problems
from tests.distributed import test_documents
from tests.helpers.models import DEEPSEEK3, GEMMA2, GPT, MIXTURE
from tests.helpers.ranks import RanksFailed, run_ranks
from tests.helpers.training import (TINY, TRAINING, assert_same_run, build_model, final_parameters, job, layout,
                                    reference, train_job)

pytestmark = pytest.mark.distributed

COMPILED = dataclasses.replace(TRAINING, compile=True)
LATENT = dataclasses.replace(DEEPSEEK3, name="latent", moe=None)

# what is special about the case → (layout, model)
SLOW = {
    "recompute full": (dict(recompute="full"), TINY),
    "recompute selective": (dict(recompute="selective"), TINY),
    "dp_replicate2": (dict(dp_replicate=2), TINY),
    "dp_shard2": (dict(dp_shard=2), TINY),
    "dp_shard2, ZeRO-1, recompute full": (dict(dp_shard=2, zero_stage=1, recompute="full"), TINY),
    "tp2": (dict(tp=2), TINY),
    "tp2, whole sequences between layers": (dict(tp=2, sequence_parallel=False), TINY),
    "tp2 × dp_shard2, recompute full": (dict(tp=2, dp_shard=2, recompute="full"), TINY),
    "pp2": (dict(pp=2), TINY),
    "pp2 in a V, recompute full": (dict(pp=2, schedule="zbv", virtual_stages=2, zero_stage=2, recompute="full"), TINY),
    "cp2": (dict(cp=2), TINY),
    "cp2, recompute selective": (dict(cp=2, recompute="selective"), TINY),
    "pp2 in a V, recompute selective": (dict(pp=2, schedule="zbv", virtual_stages=2, zero_stage=2,
                                             recompute="selective"), TINY),
    "GPT: dropout": (dict(), GPT),
    "GPT: dropout, recompute selective": (dict(recompute="selective"), GPT),
    "Gemma 2: windows and caps": (dict(recompute="full"), GEMMA2),
    "Gemma 2, recompute selective": (dict(recompute="selective"), GEMMA2),
    "MLA": (dict(), LATENT),
    "experts, tp2, recompute selective": (dict(tp=2, ep=2, recompute="selective"), MIXTURE),
    "experts stay as they are": (dict(dp_shard=2, ep=2), MIXTURE),
}


def check(case, run_dir) -> None:
    arguments, model = case
    spec = job(run_dir, layout(model=model, **arguments), model=model, training=COMPILED)
    found = train_job(spec)
    assert_same_run(found, final_parameters(spec), *reference(model, TRAINING))


def test_compiled_layers_match_single_rank(tmp_path):
    check((dict(), dataclasses.replace(TINY, num_layers=2)), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_compiled_layers_combined_match_single_rank(case, tmp_path):
    check(SLOW[case], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_compiled_layers_match_single_rank_with_packed_documents(recompute, tmp_path):
    spec = job(tmp_path, layout(recompute=recompute), training=COMPILED)
    found = test_documents.run_packed(spec)
    assert_same_run(found, final_parameters(spec), *test_documents.reference(TINY))


def graphs_compiled(spec) -> int:
    """Of a forward, with a back end that compiles nothing and counts."""
    from torch._dynamo.testing import CompileCounter

    counter, compile_with = CompileCounter(), torch.compile
    torch.compile = lambda function: compile_with(function, backend=counter)
    parallel = build_model(spec)
    model = parallel.model_parts[0]
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    model(tokens, **{name: value[:2] for name, value in parallel._sequences.at(1).items()})
    return counter.frame_count


# recompute and model → graphs for all layers together
MANY = dataclasses.replace(GPT, num_layers=12, attention_dropout=0.0)
GRAPHS = {
    "dropout, more layers than torch compiles one by one": ("none", MANY, 2),  # the first layer, and the others
    "the same, recompute full": ("full", MANY, 2),
    "plain": ("none", TINY, 1),
    "plain, recompute full": ("full", TINY, 1),
    "plain, recompute selective": ("selective", TINY, 1),
}


@pytest.mark.parametrize("case", GRAPHS)
def test_layers_that_are_alike_are_compiled_once(case, tmp_path):
    recompute, model, wanted = GRAPHS[case]
    spec = job(tmp_path, layout(model=model, recompute=recompute), model=model, training=COMPILED)
    assert run_ranks(graphs_compiled, world_size=1, args=(spec,)) == [wanted]


@pytest.mark.parametrize("model", [GPT, GEMMA2, MIXTURE], ids=lambda model: model.name)
def test_layers_with_a_part_that_is_not_compiled_are_compiled_around_it(model, tmp_path):
    spec = job(tmp_path, layout(model=model, recompute="full"), model=model, training=COMPILED)
    assert run_ranks(graphs_compiled, world_size=1, args=(spec,))[0] >= 2


def test_a_backward_in_two_halves_is_refused():
    problem, = compile_problems(layout(pp=2, schedule="zbv", virtual_stages=2, zero_stage=2))
    assert re.search("training.compile: True .*does not go with schedule=zbv.*; set false, recompute=full, or "
                     "schedule=1f1b", str(problem))


@pytest.mark.parametrize("arguments, model", [*SLOW.values()], ids=SLOW)
def test_what_is_tested_compiled_is_not_refused(arguments, model):
    assert not compile_problems(layout(model=model, **arguments))


def test_a_rank_refuses_what_cannot_be_compiled(tmp_path):
    spec = job(tmp_path, layout(pp=2, schedule="zbv", virtual_stages=2, zero_stage=2), training=COMPILED)
    with pytest.raises(RanksFailed, match="training.compile: True does not go with"):
        run_ranks(build_model, world_size=2, args=(spec,))
