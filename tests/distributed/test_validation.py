"""Validation gives on every layout the single rank's loss, and training does not notice it: losses, gradient norms and
all that is saved after the last step are the same bits with it and without."""
import dataclasses
import json
import tempfile
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, fully_shard

from jobs.spec.job import FaultSpec
from jobs.spec.load import to_dict
from jobs.spec.own_model import OwnModel
from jobs.spec.reports import ShardReport, StepReport, ValidationReport
from jobs.spec.training import DataSpec, OptimizerSpec, ValidationSpec
from jobs.verify.collectives import CollectiveLog
from jobs.verify.memory import PeakMemory
from tests.distributed.test_own_model import MIXER, TIED
from tests.helpers.communication import sent
from tests.helpers.models import DEEPSEEK3, GEMMA2, GPT, MIXTURE
from tests.helpers.ranks import collect_ranks, run_ranks, tokens_file
from tests.helpers.training import (TINY, TRAINING, ListRecorder, Outcome, build_model, build_trainer, commit, job,
                                    layout, read_reports, train_here)

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-6  # relative
DATA = DataSpec(path=str(tokens_file()))
V = dict(schedule="zbv", virtual_stages=2, zero_stage=1)
DUALPIPEV = dict(schedule="dualpipev", virtual_stages=2)
INTERLEAVED = dict(schedule="interleaved_1f1b", virtual_stages=2)
IZB = dict(schedule="interleaved_zero_bubble", virtual_stages=2)
MASKED = {"document_mask": True}
DEPTH = {"mixer": 4, "tied": 4}  # of own models

# what is special about the case → (layout, model, changes of the training, of what is validated on)
FAST = {
    "one rank": (dict(), TINY, {}, {}),
    "dp_replicate2: the last slot is empty": (dict(dp_replicate=2), TINY, dict(global_batch_size=7), {}),
    "ZeRO-3": (dict(dp_shard=2), TINY, {}, {}),
    "ZeRO-1": (dict(dp_shard=2, zero_stage=1), TINY, {}, {}),
    "tp2": (dict(tp=2), TINY, {}, {}),
    "cp2": (dict(cp=2), TINY, {}, {}),
    "zbv": (dict(pp=2, **V), TINY, {}, {}),
    "dualpipev: forwards come inside of pairs": (dict(pp=2, **DUALPIPEV), TINY, {}, {}),
    "experts are not counted: ep2": (dict(dp_shard=2, ep=2), DEEPSEEK3, {}, {}),
    "nothing is dropped out: pp2": (dict(pp=2), GPT, {}, {}),
    "an own model with dropout: tp2": (dict(tp=2, sequence_parallel=False), TIED, {}, {}),
    "documents: pp2": (dict(pp=2), TINY, {}, MASKED),
}
SLOW = {
    "ZeRO-2": (dict(dp_shard=2, zero_stage=2), TINY, {}, {}),
    "ZeRO-3, reduced every microbatch": (dict(dp_shard=2, reduce_every_microbatch=True), TINY, {}, {}),
    "ZeRO-3, units of two layers": (dict(dp_shard=2, layers_per_unit=2), TINY, {}, {}),
    "dp_replicate2 × dp_shard2": (dict(dp_replicate=2, dp_shard=2), TINY, {}, {}),
    "tp2 × pp2": (dict(tp=2, pp=2), TINY, {}, {}),
    "tp2, whole sequences between layers": (dict(tp=2, sequence_parallel=False), TINY, {}, {}),
    "cp2, gathered keys": (dict(cp=2, cp_method="allgather"), TINY, {}, {}),
    "gpipe": (dict(pp=2, schedule="gpipe"), TINY, {}, {}),
    "1f1b × ZeRO-3": (dict(pp=2, dp_shard=2), TINY, {}, {}),
    "interleaved_1f1b": (dict(pp=2, **INTERLEAVED), TINY, {}, {}),
    "interleaved_1f1b × ZeRO-3": (dict(pp=2, dp_shard=2, **INTERLEAVED), TINY, {}, {}),
    "interleaved_zero_bubble × ZeRO-2": (dict(pp=2, dp_shard=2, zero_stage=2, **IZB), TINY, {}, {}),
    "zbv of four ranks": (dict(pp=4, **V), dataclasses.replace(TINY, num_layers=8), {}, {}),
    "zbv × dp_shard2": (dict(pp=2, dp_shard=2, **V), TINY, {}, {}),
    "dualpipev × dp_shard2": (dict(pp=2, dp_shard=2, zero_stage=2, microbatch_size=1, **DUALPIPEV),
                               TINY, {}, {}),
    "pp4: stages without loss or tokens": (dict(pp=4), TINY, {}, {}),
    "tp2 × pp2 × dp_shard2": (dict(tp=2, pp=2, dp_shard=2), TINY, {}, {}),
    "cp2 × pp2": (dict(cp=2, pp=2), TINY, {}, {}),
    "cp2 × tp2 × dp_shard2": (dict(cp=2, tp=2, dp_shard=2), TINY, {}, {}),
    "pp2 × dp_shard2: empty slots": (dict(pp=2, dp_shard=2), TINY, dict(global_batch_size=5), {}),
    "experts balanced by a loss: dp_shard2 × tp2": (dict(dp_shard=2, tp=2, ep=4), MIXTURE, {}, {}),
    "experts, ZeRO-1": (dict(dp_shard=2, zero_stage=1, ep=2), DEEPSEEK3, {}, {}),
    "experts in a V": (dict(pp=2, **V), DEEPSEEK3, {}, {}),
    "GPT: tp2 × dp_shard2": (dict(tp=2, dp_shard=2), GPT, {}, {}),
    "GPT: cp2": (dict(cp=2), GPT, {}, {}),
    "Gemma 2: tied, ZeRO-3 × tp2": (dict(dp_shard=2, tp=2), GEMMA2, {}, {}),
    "Gemma 2: tied, in a V": (dict(pp=2, **V), GEMMA2, {}, {}),
    "documents: cp2": (dict(cp=2), TINY, {}, MASKED),
    "documents: tp2 × pp4": (dict(tp=2, pp=4), TINY, {}, MASKED),
    "ends of documents train on nothing": (dict(dp_shard=2), TINY, {}, dict(document_ends="ignore")),
    "recompute full": (dict(dp_shard=2, recompute="full"), TINY, {}, {}),
    "recompute selective: pp2": (dict(pp=2, recompute="selective"), TINY, {}, {}),
    "z-loss": (dict(tp=2), TINY, dict(z_loss=0.1), {}),
    "compiled": (dict(dp_shard=2), TINY, dict(compile=True), {}),
    "compiled, dropout": (dict(), GPT, dict(compile=True), {}),
    "an own model: dp_shard2": (dict(dp_shard=2), MIXER, {}, {}),
    "an own model: tp2 × pp2": (dict(tp=2, pp=2), MIXER, {}, {}),
    "an own model with dropout: ZeRO-1": (dict(dp_shard=2, zero_stage=1), TIED, {}, {}),
    "an own model with dropout: zbv": (dict(pp=2, **V), TIED, {}, {}),
}


def with_validation(training=TRAINING, *, interval_steps: int = 2, batches: int = 3, **data):
    spec = ValidationSpec(data=dataclasses.replace(DATA, **data), interval_steps=interval_steps, batches=batches)
    return dataclasses.replace(training, validation=spec)


def trained(run_dir: Path, where, model, training) -> list:
    """All ranks' reports of one run."""
    spec = job(run_dir, where, model=model, training=training)
    of_ranks = run_ranks(train_here, world_size=spec.world_size, args=(spec,))
    return [report for reports in of_ranks for report in reports]


def validations(reports: list) -> dict[int, float]:
    found = [report for report in reports if isinstance(report, ValidationReport)]
    assert len({report.step for report in found}) == len(found)
    return {report.step: report.loss for report in found}


def noticed(reports: list) -> tuple:
    """All that training leaves: what its steps said, and the checksums of what all ranks saved last."""
    shards = sorted((report.rank, file.name, file.checksum) for report in reports if isinstance(report, ShardReport)
                    for file in report.files)
    return [(report.loss, report.grad_norm) for report in reports if isinstance(report, StepReport)], shards


_REFERENCES: dict[str, dict[int, float]] = {}


def reference(where, model, training) -> dict[int, float]:
    """Validations of the single rank, by step."""
    key = json.dumps([to_dict(one) for one in (where, model, training)])
    if key not in _REFERENCES:
        with tempfile.TemporaryDirectory() as folder:
            _REFERENCES[key] = validations(trained(Path(folder), where, model, training))
    return _REFERENCES[key]


def check(case: tuple, run_dir: Path) -> None:
    degrees, model, changes, data = case
    training = dataclasses.replace(TRAINING, **changes)
    depth = DEPTH[model.name] if isinstance(model, OwnModel) else model.num_layers
    size = {"global_batch_size": training.global_batch_size}
    where = layout(model=dataclasses.replace(TINY, num_layers=depth), **size, **degrees)
    single = layout(model=dataclasses.replace(TINY, num_layers=depth), **size,
                    microbatch_size=training.global_batch_size)
    wanted = reference(single, model, with_validation(dataclasses.replace(training, compile=False), **data))
    found = trained(run_dir / "with", where, model, with_validation(training, **data))
    assert list(wanted) == [2, 4, 5] and validations(found) == pytest.approx(wanted, rel=TOLERANCE, abs=0)
    assert noticed(found) == noticed(trained(run_dir / "without", where, model, training))


@pytest.mark.parametrize("case", FAST)
def test_the_loss_is_the_single_ranks_and_training_does_not_notice(case, tmp_path):
    check(FAST[case], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_the_loss_is_the_single_ranks_and_training_does_not_notice_elsewhere(case, tmp_path):
    check(SLOW[case], tmp_path)


@pytest.mark.parametrize("ends", ["predict", "ignore"])
def test_the_loss_is_that_of_steps_on_the_same_batches(ends, tmp_path):
    """Nothing is learned, so that the first three steps are what is validated on three batches of the same data."""
    data = dataclasses.replace(DATA, document_ends=ends)
    still = dataclasses.replace(TRAINING, optimizer=OptimizerSpec(lr=0.0))
    spec = job(tmp_path, layout(dp_replicate=2), training=with_validation(still, document_ends=ends), data=data)
    reports = [report for of_rank in run_ranks(train_here, world_size=2, args=(spec,)) for report in of_rank]
    mean = sum(report.loss for report in reports if isinstance(report, StepReport) and report.step <= 3) / 3
    assert validations(reports) == pytest.approx(dict.fromkeys((2, 4, 5), mean), rel=TOLERANCE)
    assert {r.tokens for r in reports if isinstance(r, ValidationReport)} == {3 * 8 * 16}


# a model that drops out → the same without
DROPPING = {
    "GPT": (GPT, dataclasses.replace(GPT, dropout=0.0, attention_dropout=0.0)),
    "an own model": (TIED, dataclasses.replace(TIED, arguments={"p": 0.0})),
}


@pytest.mark.parametrize("case", DROPPING)
def test_nothing_is_dropped_out(case, tmp_path):
    still = with_validation(dataclasses.replace(TRAINING, steps=1, optimizer=OptimizerSpec(lr=0.0)))
    dropping, whole = (trained(tmp_path / name, layout(), model, still) for name, model in zip("ab", DROPPING[case]))
    assert validations(dropping) == validations(whole)
    assert noticed(dropping)[0] != noticed(whole)[0]


def test_ranks_need_not_use_the_same_blocks(tmp_path):
    """Updated weights are gathered as they are used; those that one rank leaves out, before anything else is sent."""
    leaving = OwnModel(name="leaving", entrypoint="tests.helpers.own_models:kind", vocab_size=256,
                       arguments={"name": "leaving"})
    where = layout(model=dataclasses.replace(TINY, num_layers=8), dp_shard=2, zero_stage=1)
    found = trained(tmp_path / "with", where, leaving, with_validation(interval_steps=1))
    assert noticed(found) == noticed(trained(tmp_path / "without", where, leaving, TRAINING))


# ------------------------------------------------------------------ over restarts
# checkpoint interval, validation interval, layout of the second attempt → steps validated in the first, in the second
RESTARTS = {
    "at the step of a checkpoint, another layout": (2, 2, dict(pp=2), [2, 4], [6, 7]),
    "behind it: lost, and computed again": (3, 5, dict(), [5], [5, 7]),
    "at the step of a checkpoint, the same layout": (2, 2, dict(dp_shard=2), [2, 4], [6, 7]),
    "the last checkpoint is older": (5, 3, dict(), [3], [6, 7]),
}


@pytest.mark.parametrize("case", [case if i < 2 else pytest.param(case, marks=pytest.mark.slow)
                                  for i, case in enumerate(RESTARTS)])
def test_a_restart_goes_on_at_the_right_steps(case, tmp_path):
    saving, validating, degrees, first, second = RESTARTS[case]
    training = with_validation(dataclasses.replace(TRAINING, steps=7), interval_steps=validating)
    whole = reference(layout(), TINY, training)
    spec = job(tmp_path, layout(dp_shard=2), training=training, interval_steps=saving)
    spec = dataclasses.replace(spec, faults=(FaultSpec(attempt=1, step=6, rank=1, kind="sigkill"),))
    collect_ranks(train_here, world_size=2, args=(spec,), kwargs={"reports_to": tmp_path})
    reports = [report for rank in range(2) for report in read_reports(tmp_path, rank=rank)]
    resume = saving * (5 // saving)
    commit(tmp_path, Outcome.of([reports]).shards, step=resume)
    spec = job(tmp_path, layout(**degrees), training=training, interval_steps=saving, resume_step=resume, attempt=2)
    again = [r for of_rank in run_ranks(train_here, world_size=spec.world_size, args=(spec,)) for r in of_rank]
    assert (list(validations(reports)), list(validations(again))) == (first, second)
    assert validations(reports) | validations(again) == pytest.approx(whole, rel=TOLERANCE)


def test_a_step_is_validated_before_it_is_saved(tmp_path):
    """Else a rank that dies in between would leave it out: who resumes from a step does not look back."""
    spec = job(tmp_path, layout(), training=with_validation(), interval_steps=2)
    reports = run_ranks(train_here, world_size=1, args=(spec,))[0]
    kinds = [(type(report), report.step) for report in reports]
    for step in (2, 4, 5):
        assert kinds.index((ValidationReport, step)) < kinds.index((ShardReport, step))


# ------------------------------------------------------------------ what it needs and leaves
class Phases(ListRecorder):
    def progress(self, step: int, phase: str) -> None:
        super().progress(step, phase)
        self.reports.append((step, phase))


def phases(spec) -> list:
    trainer = build_trainer(spec, recorder=Phases(rank=0, attempt=1))
    trainer.run()
    return [one for one in trainer.recorder.reports if isinstance(one, tuple)]


def test_every_batch_is_a_sign_of_life(tmp_path):
    seen = run_ranks(phases, world_size=1, args=(job(tmp_path, layout(), training=with_validation(batches=4)),))[0]
    assert [step for step, phase in seen if phase == "validation"] == [2] * 4 + [4] * 4 + [5] * 4


def slow_validation(spec) -> list:
    """Reports of a trainer whose validations take 100 seconds, by its own clock."""
    trainer = build_trainer(spec, recorder=ListRecorder(rank=0, attempt=1))
    clock, loss, waited = time.perf_counter, trainer.validation.loss, []
    time.perf_counter = lambda: clock() + 100 * len(waited)
    trainer.validation.loss = lambda **options: waited.append(None) or loss(**options)
    trainer.run()
    return trainer.recorder.reports


def test_its_time_is_its_own_and_no_steps(tmp_path):
    """Of a step before a validation, behind one, and behind one and a checkpoint."""
    spec = job(tmp_path, layout(), training=with_validation(), interval_steps=4)
    reports = run_ranks(slow_validation, world_size=1, args=(spec,))[0]
    steps = [report for report in reports if isinstance(report, StepReport)]
    assert len(steps) == 5 and all(report.step_time_s < 100 for report in steps)
    assert all(report.tokens_per_s > report.tokens / 100 for report in steps)
    assert all(100 <= report.validation_s < 200 for report in reports if isinstance(report, ValidationReport))
    assert all(report.save_s < 100 for report in reports if isinstance(report, ShardReport))


def batch_of(spec) -> torch.Tensor:
    slots = spec.layout.microbatch_size * spec.layout.num_microbatches
    return torch.arange(slots * 16 // spec.layout.dims.cp).view(slots, -1) % 256


def peaks(spec) -> tuple[int, int, int]:
    """Of a step, and of forward passes alone, above what is held before; both after a first step. What the latter leave
    behind."""
    trainer = build_trainer(spec, recorder=ListRecorder(rank=0, attempt=1))
    parallel, batch = trainer.parallel, batch_of(spec)
    parallel.forward_backward(batch, batch)
    parallel.gradients = {}
    found = []
    for run in (parallel.forward_backward, parallel.evaluate):
        memory = PeakMemory(parallel, trainer.optimizer, axes={})
        before = memory._now
        with memory:
            run(batch, batch)
        parallel.gradients = {}
        found.append(sum(memory.peak_bytes.values()) - before)
        held = memory._now - before
    return *found, held


MEMORY = {
    "ZeRO-3": dict(dp_shard=2),
    "zbv": dict(pp=2, **V),
    "one rank": dict(),
    "pp2": dict(pp=2),
}


@pytest.mark.parametrize("case", [case if i < 2 else pytest.param(case, marks=pytest.mark.slow)
                                  for i, case in enumerate(MEMORY)])
def test_it_needs_less_memory_than_a_step_and_holds_one_microbatch_at_a_time(case, tmp_path):
    degrees = MEMORY[case]
    dp = degrees.get("dp_shard", 1)
    few, many = ([*run_ranks(peaks, world_size=spec.world_size, args=(spec,))] for spec in (
        job(tmp_path, layout(global_batch_size=2 * dp * count, **degrees),
            training=dataclasses.replace(TRAINING, global_batch_size=2 * dp * count)) for count in (2, 8)))
    logits = 4 * 2 * 16 * TINY.vocab_size
    for (_, little, _), (step, much, held) in zip(few, many, strict=True):
        assert much < step and held < logits / 4  # the tokens, which the caller has
        assert much - little < 6 * logits / 4  # in a V as well, where hidden states wait, an eighth of logits each


def messages(spec, *, evaluates: bool) -> list:
    """What a step sends, in whose stead others have been evaluated before; how many units are gathered then; its
    loss."""
    parallel, batch = build_model(spec), batch_of(spec)
    states = [fully_shard.state(m) for part in parallel.model_parts for m in part.modules()
              if isinstance(m, FSDPModule)]
    if evaluates:
        parallel.evaluate(batch, batch)
    losses = [parallel.forward_backward(batch, batch).item()]
    if evaluates:
        parallel.evaluate(batch, batch)
    gathered = sum(group.is_unsharded for state in states for group in state._fsdp_param_groups)
    with CollectiveLog() as log:
        losses.append(parallel.forward_backward(batch, batch).item())
    return [sent(log.collectives()), gathered, losses, all(module.training for part in parallel.model_parts
                                                           for module in part.modules())]


@pytest.mark.parametrize("degrees", [dict(dp_shard=2), dict(dp_shard=2, zero_stage=2), dict(dp_shard=2, pp=2)],
                         ids=["ZeRO-3", "ZeRO-2", "ZeRO-3 × pp2"])
def test_a_step_behind_it_sends_what_it_always_sends(degrees, tmp_path):
    """The very first step, too."""
    spec = job(tmp_path, layout(**degrees))
    plain, behind = (run_ranks(messages, world_size=spec.world_size, args=(spec,), kwargs={"evaluates": evaluates})
                     for evaluates in (False, True))
    assert behind == plain and all(gathered == 0 and in_training for _, gathered, _, in_training in behind)


def frozen_modes(spec) -> list[bool]:
    parallel, batch = build_model(spec), batch_of(spec)
    part = parallel.model_parts[0]
    part.layers["1"].eval()
    seen = []
    part.layers["0"].register_forward_pre_hook(lambda module, args: seen.append(module.training))
    parallel.evaluate(batch, batch)
    return [*seen, part.layers["0"].training, part.layers["1"].training]


def test_modules_know_that_they_are_not_trained_and_go_back_to_their_own_mode(tmp_path):
    spec = job(tmp_path, layout(microbatch_size=8))
    assert run_ranks(frozen_modes, world_size=1, args=(spec,))[0] == [False, True, False]
