"""The tables of layouts that are held against one rank leave nothing out that can be combined."""
import dataclasses
import itertools

import pytest

from jobs.spec.model import ModelSpec
from jobs.spec.parallel import AXES, VIRTUAL_STAGES, Layout
from orchestrator.request import CHOICES
from tests.distributed import (test_context, test_documents, test_experts, test_models, test_parity, test_schedules,
                               test_zero)
from tests.helpers.training import TINY, layout


def rows() -> list[tuple[Layout, ModelSpec]]:
    """Of all tables: layout and model."""
    found = []
    for module in (test_context, test_experts, test_models, test_parity, test_schedules, test_zero):
        for arguments, model, *_ in (*module.FAST.values(), *module.SLOW.values()):
            model = model if isinstance(model, ModelSpec) else dataclasses.replace(TINY, **model)
            found.append((layout(model=model, **arguments), model))
    return found


ROWS = rows()


def axes(where: Layout) -> frozenset[str]:
    return frozenset(axis for axis in AXES if getattr(where.dims, axis) > 1)


# ep is carved out of the others: it is never alone
COMBINATIONS = [frozenset(c) for n in (1, 2) for c in itertools.combinations(AXES, n) if c != ("ep",)]


@pytest.mark.parametrize("wanted", COMBINATIONS, ids=" × ".join)
def test_every_axis_and_every_pair_is_held_against_one_rank(wanted):
    """A pair of ep and an axis that it is not carved out of has one more axis, from which it is."""
    if wanted in ({"ep", "pp"}, {"ep", "dp_replicate"}):
        wanted = wanted | {"dp_shard"}
    assert any(axes(where) == wanted for where, _ in ROWS)


TRIPLES = [{"tp", "pp", "dp_shard"}, {"tp", "cp", "dp_shard"}, {"ep", "dp_shard", "tp"}, {"pp", "cp", "dp_shard"},
           {"dp_replicate", "dp_shard", "tp"}, *map(set, itertools.combinations(AXES[:-1], 3))]


@pytest.mark.parametrize("wanted", TRIPLES, ids=lambda wanted: " × ".join(sorted(wanted)))
def test_every_triple_up_to_eight_ranks_is_held_against_one_rank(wanted):
    assert any(axes(where) == wanted and where.dims.world_size <= 8 for where, _ in ROWS)


def test_every_choice_of_a_layout_is_held_against_one_rank():
    for name, values in CHOICES.items():
        missing = set(values) - {getattr(where, name) for where, _ in ROWS}
        assert not missing, (name, missing)


@pytest.mark.parametrize("schedule", VIRTUAL_STAGES)
def test_every_schedule_is_held_against_one_rank_tied_and_untied(schedule):
    found = [model.tie_embeddings for where, model in ROWS if where.schedule == schedule and where.dims.pp > 1]
    assert set(found) == {True, False}


@pytest.mark.parametrize("schedule", VIRTUAL_STAGES)
def test_every_schedule_is_held_against_one_rank_with_uneven_stages(schedule):
    assert any(where.schedule == schedule and len(set(where.layers_per_stage)) > 1 for where, _ in ROWS)


# the axes that ep is carved out of, all of whose ranks it takes
CARVED = [frozenset(c) for n in (1, 2, 3) for c in itertools.combinations(("dp_shard", "cp", "tp"), n)]


@pytest.mark.parametrize("wanted", CARVED, ids=" × ".join)
def test_experts_on_all_ranks_of_every_combination_are_held_against_one_rank(wanted):
    assert any(axes(where) == wanted | {"ep"} and where.dims.ep == where.dims.world_size for where, _ in ROWS)


KINDS = {
    "dense": (lambda model: model.moe is None, set(AXES) - {"ep"}),
    "experts": (lambda model: model.moe is not None, set(AXES)),
    "latent attention": (lambda model: model.mla is not None, set(AXES)),
    "dropped weights": (lambda model: model.attention_dropout > 0, set(AXES) - {"ep"}),
    "windows and caps": (lambda model: model.sliding_window and model.attention_softcap,
                         {"dp_shard", "cp", "tp", "pp"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_is_held_against_one_rank_on_every_axis(kind):
    is_kind, wanted = KINDS[kind]
    assert {axis for where, model in ROWS if is_kind(model) for axis in axes(where)} >= wanted


@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard", "cp", "tp", "pp"])
def test_every_axis_is_held_against_one_rank_with_empty_slots(axis):
    cases = [(arguments, changes) for arguments, _, changes in (*test_parity.FAST.values(), *test_parity.SLOW.values())]
    assert any(arguments.get(axis, 1) > 1 and "global_batch_size" in changes for arguments, changes in cases)


def test_every_axis_is_held_against_one_rank_with_packed_documents():
    found = {axis for arguments, model in (*test_documents.FAST.values(), *test_documents.SLOW.values())
             for axis in axes(layout(model=model, **arguments))}
    assert found == set(AXES)
