"""A mixture of token files, with documents masked, gives one curve in every layout and after every interruption."""
import dataclasses

import numpy as np
import pytest

from jobs.data.writer import TokenWriter
from jobs.spec.training import DataSpec, SourceSpec
from tests.helpers.ranks import run_ranks
from tests.helpers.training import TRAINING, Outcome, commit, job, layout, train_here, train_job

pytestmark = pytest.mark.distributed

LOSS_TOLERANCE = 1e-5

# One run, handed from layout to layout, one step each
JOURNEY = [dict(dp_shard=2), dict(tp=2), dict(pp=2), dict(cp=2), dict(dp_replicate=2, tp=2), dict()]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> DataSpec:
    """Two files of pseudo-random tokens; documents are about as long as a sequence, so most sequences hold two."""
    folder, random = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for name, num_documents, dtype in (("a", 60, "uint8"), ("b", 9, "int32")):
        with TokenWriter(folder / f"{name}.bin", dtype=dtype) as writer:
            for length in random.integers(1, 2 * TRAINING.seq_len, num_documents):
                writer.write(random.integers(0, 256, length), lengths=np.array([length]), opens=np.array([True]))
            writer.commit(vocab_size=256, tokenizer="none", eod=None, inputs_sha256="")
    return DataSpec(sources=[SourceSpec(path=str(folder / "a.bin"), weight=0.7),
                             SourceSpec(path=str(folder / "b.bin"), weight=0.3)])


def until(spec, step: int) -> Outcome:
    """Train up to `step`, and leave without a word."""
    return Outcome.of(run_ranks(train_here, world_size=spec.world_size, args=(spec,), kwargs={"stop_before": step + 1}))


@pytest.mark.parametrize("document_mask", [False, True], ids=["plain", "documents"])
def test_a_mixture_goes_on_in_any_layout(document_mask, mixture, tmp_path):
    data = dataclasses.replace(mixture, document_mask=document_mask)
    training = dataclasses.replace(TRAINING, steps=len(JOURNEY))
    whole = train_job(job(tmp_path / "whole", layout(), training=training, data=data))
    losses = []
    for step, degrees in enumerate(JOURNEY, start=1):
        leg = until(job(tmp_path, layout(**degrees), training=training, interval_steps=1, data=data,
                        resume_step=step - 1 or None), step)
        commit(tmp_path, leg.shards, step=step)
        losses += leg.losses
    assert losses == pytest.approx(whole.losses, abs=LOSS_TOLERANCE, rel=0)


def test_a_resumed_mixture_is_the_same_bit_for_bit(mixture, tmp_path):
    data = dataclasses.replace(mixture, document_mask=True)
    where = layout(dp_shard=2)
    whole = train_job(job(tmp_path / "whole", where, data=data))
    first = until(job(tmp_path, where, interval_steps=2, data=data), 3)
    commit(tmp_path, first.shards, step=2)  # step 3 is lost
    second = train_job(job(tmp_path, where, resume_step=2, attempt=2, data=data))
    assert first.losses[:2] + second.losses == whole.losses
    assert len(set(whole.losses)) == TRAINING.steps


def test_masking_documents_changes_what_is_learned(mixture, tmp_path):
    plain, masked, predicting = (
        train_job(job(tmp_path / name, layout(), data=dataclasses.replace(mixture, **changes))).losses
        for name, changes in (("plain", {}), ("masked", {"document_mask": True}),
                              ("predicting", {"document_mask": True, "document_ends": "predict"})))
    assert plain[0] != masked[0] and plain[0] != predicting[0]
    assert masked[0] < predicting[0]  # the ends weigh nothing, and the divisor stays
