"""Sequences that are packed from documents: each document is trained as if it were alone, and every layout computes
what one rank computes, in losses, gradient norms and final parameters."""
import dataclasses
import functools
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from jobs.loader import Batch
from jobs.loss import IGNORED, cross_entropy
from jobs.mesh import coordinate
from jobs.runtime import seed_everything
from jobs.spec.parallel import cp_chunks
from tests.helpers.models import DEEPSEEK3, GEMMA2, GPT, MIXTURE
from tests.helpers.ranks import run_ranks
from tests.helpers.training import (LOSS_TOLERANCE, PARAMETER_TOLERANCE, TINY, TRAINING, ListRecorder, Outcome,
                                    assert_same_run, build_trainer, final_parameters, job, layout)

pytestmark = pytest.mark.distributed

BATCH, SEQ = TRAINING.global_batch_size, TRAINING.seq_len
LATENT = dataclasses.replace(DEEPSEEK3, name="latent", moe=None)
ALLGATHER = dict(cp_method="allgather")
V = dict(schedule="zbv", virtual_stages=2, zero_stage=2)

# what is special about the case → (layout, model)
FAST = {
    "microbatches of one": (dict(microbatch_size=1), TINY),
    "tp2": (dict(tp=2), TINY),
    "pp2: later stages are told, too": (dict(pp=2), TINY),
    "dp_shard2": (dict(dp_shard=2), TINY),
    "cp2": (dict(cp=2), TINY),
    "cp2, gathered keys": (dict(cp=2, **ALLGATHER), TINY),
    "recompute full": (dict(recompute="full"), TINY),
    "learned positions restart, dropout, on tp2": (dict(tp=2, microbatch_size=1), GPT),
}
SLOW = {
    "pp4: stages without loss or tokens": (dict(pp=4), TINY),
    "pp2 in a V": (dict(pp=2, **V), TINY),
    "dp_replicate2": (dict(dp_replicate=2), TINY),
    "cp4": (dict(cp=4), TINY),
    "cp4, gathered keys": (dict(cp=4, **ALLGATHER), TINY),
    "recompute selective": (dict(recompute="selective"), TINY),
    "cp2, recompute selective": (dict(cp=2, recompute="selective"), TINY),
    "tp2, whole sequences between layers": (dict(tp=2, sequence_parallel=False), TINY),
    "cp2 × tp2": (dict(cp=2, tp=2), TINY),
    "cp2 × pp2": (dict(cp=2, pp=2), TINY),
    "cp2 × dp_shard2": (dict(cp=2, dp_shard=2), TINY),
    "tp2 × pp2 × dp_shard2": (dict(tp=2, pp=2, dp_shard=2), TINY),
    "cp2 × tp2 × pp2": (dict(cp=2, tp=2, pp=2), TINY),
    "GPT: cp2": (dict(cp=2), GPT),
    "GPT: cp2, gathered keys": (dict(cp=2, **ALLGATHER), GPT),
    "GPT: cp2 × tp2": (dict(cp=2, tp=2), GPT),
    "GPT: pp2, recompute full": (dict(pp=2, recompute="full"), GPT),
    "Gemma 2: windows and caps, tp2": (dict(tp=2), GEMMA2),
    "Gemma 2: windows and caps, cp2": (dict(cp=2), GEMMA2),
    "Gemma 2: windows and caps, cp2, gathered keys": (dict(cp=2, **ALLGATHER), GEMMA2),
    "MLA: tp2": (dict(tp=2), LATENT),
    "MLA: cp2": (dict(cp=2), LATENT),
    "MLA: cp2 × tp2, gathered keys": (dict(cp=2, tp=2, **ALLGATHER), LATENT),
    "mixture: ep2 of cp2": (dict(cp=2, ep=2), MIXTURE),
}


@functools.cache
def packed(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, targets, documents [BATCH, SEQ] of a step: documents of 1 to 16 tokens, the last of each predicting
    nothing."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, TINY.vocab_size // 8, (BATCH, SEQ + 1), generator=generator)
    ends = torch.rand(BATCH, SEQ, generator=generator) < 0.2
    ends[0] = False  # one sequence is one document
    documents = torch.zeros(BATCH, SEQ, dtype=torch.int32)
    documents[:, 1:] = ends[:, :-1].cumsum(dim=1)
    return tokens[:, :-1], tokens[:, 1:].masked_fill(ends, IGNORED), documents


class PackedBatches:
    """What a rank's loader would yield of `packed`."""

    def __init__(self, spec, *, mesh) -> None:
        here, share = coordinate(mesh), spec.layout.microbatch_size * spec.layout.num_microbatches
        first, cp = share * spec.layout.dims.dp_index(here), spec.layout.dims.cp
        size = SEQ // (2 * cp)
        self.rows = slice(first, first + share)
        self.columns = torch.cat([torch.arange(c * size, (c + 1) * size) for c in cp_chunks(cp, here["cp"])])

    def batch(self, data_cursor: int) -> Batch:
        inputs, targets, documents = (t[self.rows] for t in packed(data_cursor))
        return Batch(inputs=inputs[:, self.columns], targets=targets[:, self.columns], documents=documents)

    def close(self) -> None:
        pass


def train_packed(spec) -> list:
    seed_everything(spec.training.seed)
    recorder = ListRecorder(rank=dist.get_rank(), attempt=spec.attempt)
    trainer = build_trainer(spec, recorder=recorder)
    if trainer.loader is not None:
        trainer.loader.close()
    trainer.loader = PackedBatches(spec, mesh=trainer.mesh)
    trainer.run()
    return recorder.reports


def run_packed(spec) -> Outcome:
    return Outcome.of(run_ranks(train_packed, world_size=spec.world_size, args=(spec,)))


@functools.cache
def reference(model) -> tuple[Outcome, dict[str, torch.Tensor]]:
    """The packed sequences on one rank, all at once."""
    with tempfile.TemporaryDirectory() as folder:
        spec = job(Path(folder), layout(model=model, microbatch_size=BATCH), model=model)
        return run_packed(spec), final_parameters(spec)


def check(case, run_dir: Path) -> None:
    arguments, model = case
    spec = job(run_dir, layout(model=model, **arguments), model=model)
    assert_same_run(run_packed(spec), final_parameters(spec), *reference(model))


@pytest.mark.parametrize("case", FAST)
def test_packed_sequences_match_single_rank(case, tmp_path):
    check(FAST[case], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_packed_sequences_combined_match_single_rank(case, tmp_path):
    check(SLOW[case], tmp_path)


# ------------------------------------------------------------------ the truth
def train_one_by_one(spec) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final parameters of a run that sees one document at a time, alone, without any mask of documents."""
    trainer = build_trainer(spec, recorder=ListRecorder(rank=0, attempt=1))
    trainer.loader.close()
    model, losses = trainer.parallel.model_parts[0], []
    for step in range(1, TRAINING.steps + 1):
        total = 0.0
        for tokens, targets, documents in zip(*packed(step - 1), strict=True):
            lengths = documents.unique(return_counts=True)[1].tolist()
            for document, wanted in zip(tokens.split(lengths), targets.split(lengths), strict=True):
                loss = cross_entropy(model(document[None]), wanted[None], global_tokens=BATCH * SEQ)
                loss.backward()
                total += loss.item()
        trainer.optimizer.step(step, {name: p.grad for name, p in trainer.parallel.parameters.items()})
        model.zero_grad()
        losses.append(total)
    return losses, {f"model.{name}": p.detach().clone() for name, p in trainer.parallel.parameters.items()}


@pytest.mark.parametrize("model", [TINY, dataclasses.replace(GPT, dropout=0.0, attention_dropout=0.0), GEMMA2, LATENT],
                         ids=lambda model: model.name)
def test_packed_documents_are_trained_as_if_alone(model, tmp_path):
    losses, parameters = run_ranks(train_one_by_one, world_size=1, args=(job(tmp_path, layout(model=model),
                                                                             model=model),))[0]
    found, gathered = reference(model)
    assert found.losses == pytest.approx(losses, abs=LOSS_TOLERANCE, rel=0)
    assert gathered.keys() == parameters.keys()
    errors = {name: (gathered[name] - value).abs().max().item() for name, value in parameters.items()}
    assert max(errors.values()) < PARAMETER_TOLERANCE, errors
