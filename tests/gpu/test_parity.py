"""The parity tables of tests/distributed once more, one rank per GPU over NCCL: same cases, same tolerances."""
import dataclasses

import pytest

from jobs.spec.model import ModelSpec
from tests.distributed import (test_context, test_documents, test_experts, test_models, test_parity, test_schedules,
                               test_zero)
from tests.helpers.training import TINY, TRAINING, assert_matches_single_rank, layout

TABLES = (test_parity, test_schedules, test_zero, test_context, test_models, test_experts)


def rows(name: str) -> list:
    """Of the tables called `name`, as pytest parameters: world size, layout, model, training."""
    found = []
    for table in TABLES:
        for case, (arguments, model, *changes) in getattr(table, name).items():
            model = model if isinstance(model, ModelSpec) else dataclasses.replace(TINY, **model)
            where, training = layout(model=model, **arguments), dataclasses.replace(TRAINING, **dict(*changes))
            found.append(pytest.param(where.dims.world_size, where, model, training,
                                      id=f"{table.__name__.rpartition('_')[2]}: {case}"))
    return found


@pytest.mark.parametrize("world_size, where, model, training", rows("FAST"))
def test_layout_matches_single_gpu(world_size, where, model, training, tmp_path):
    assert_matches_single_rank(tmp_path, where, model=model, training=training)


@pytest.mark.slow
@pytest.mark.parametrize("world_size, where, model, training", rows("SLOW"))
def test_combined_layout_matches_single_gpu(world_size, where, model, training, tmp_path):
    assert_matches_single_rank(tmp_path, where, model=model, training=training)


DOCUMENTS = [pytest.param(layout(model=case[1], **case[0]).dims.world_size, case, id=name)
             for name, case in test_documents.FAST.items()]


@pytest.mark.parametrize("world_size, case", DOCUMENTS)
def test_packed_sequences_match_single_gpu(world_size, case, tmp_path):
    test_documents.check(case, tmp_path)
