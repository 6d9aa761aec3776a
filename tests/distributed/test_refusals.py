"""A layout that does not fit is refused by every rank, with the value and the remedy, before training."""
import dataclasses

import pytest

from jobs.spec.parallel import ParallelDims
from tests.helpers.ranks import RanksFailed, run_ranks
from tests.helpers.training import TINY, TRAINING, build_model, job, layout, train_here

pytestmark = pytest.mark.distributed

# name → (world_size, layout arguments, changes of the layout, changes of the model, message)
CASES = {
    "world is not the product": (2, {}, {}, {}, "2 ranks were started, but the layout .* needs 1"),
    "heads": (3, dict(tp=3), {}, {}, "tp: 3 does not divide model.num_heads=4"),
    "kv heads": (4, dict(tp=4), {}, {}, "tp: 4 does not divide model.num_kv_heads=2"),
    "ffn": (2, dict(tp=2), {}, dict(ffn_dim=33), "tp: 2 does not divide model.ffn_dim=33"),
    "vocabulary": (2, dict(tp=2), {}, dict(vocab_size=257), "tp: 2 does not divide model.vocab_size=257"),
    "sequence": (3, dict(tp=3), {}, dict(num_kv_heads=3), "seq_len: 16 is not divisible by tp=3"),
    "stages": (2, dict(pp=2), dict(layers_per_stage=(1, 2)), {}, r"\(1, 2\) does not split 4 layers over pp=2"),
    "slots": (1, {}, dict(num_microbatches=3), {}, "6 slots cannot hold global_batch_size=8"),
    "context parallel": (1, {}, dict(dims=ParallelDims(cp=2)), {}, "needs 2"),
    "dp_shard outermost": (1, dict(order=("dp_shard", "dp_replicate", "pp", "cp", "tp")), {}, {},
                           "put dp_replicate first"),
    "experts": (1, {}, dict(dims=ParallelDims(ep=2)), {}, "there are no experts"),
    "too few microbatches": (2, dict(pp=2, microbatch_size=8), {}, {}, "microbatches"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_layout_that_does_not_fit_is_refused(case, tmp_path):
    world_size, arguments, layout_changes, model_changes, message = CASES[case]
    where = dataclasses.replace(layout(**arguments), **layout_changes)
    spec = job(tmp_path, where, model=dataclasses.replace(TINY, **model_changes))
    with pytest.raises(RanksFailed, match=message):
        run_ranks(build_model, world_size=world_size, args=(spec,))


def test_data_beyond_the_vocabulary_is_refused(tmp_path):
    spec = job(tmp_path, layout(), model=dataclasses.replace(TINY, vocab_size=64), training=TRAINING)
    with pytest.raises(RanksFailed, match="model.vocab_size: 64 does not cover token"):
        run_ranks(train_here, world_size=1, args=(spec,))
