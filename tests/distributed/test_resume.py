"""A run that was interrupted gives the losses of one that was not: bit for bit in the same layout, to 1e-5
in another. Checkpoints are saved without any rank waiting for another, and are not used when damaged."""
import dataclasses
import json
import sys
import zlib
from pathlib import Path

import pytest
import torch.distributed as dist

from jobs import checkpoint
from jobs.checkpoint import CheckpointCorrupt, Progress
from jobs.spec.job import FaultSpec
from jobs.spec.rundir import INDEX, MANIFEST, RunDir
from tests.helpers.ranks import RanksFailed, collect_ranks, run_ranks
from tests.helpers.training import (TINY, TRAINING, ListRecorder, Outcome, build_trainer, commit, job, layout,
                                    read_reports, train_here, train_job)

pytestmark = pytest.mark.distributed

LOSS_TOLERANCE = 1e-5
SIX_STEPS = dataclasses.replace(TRAINING, steps=6)
TIED = dataclasses.replace(TINY, tie_embeddings=True)

SAME_LAYOUT = {
    "one rank": dict(),
    "tp2 × dp_shard2": dict(tp=2, dp_shard=2),
    "dp_replicate2": dict(dp_replicate=2),
    "pp2": dict(pp=2),
    "ZeRO-1": dict(dp_shard=2, zero_stage=1),
    "cp2": dict(cp=2),
    "a V": dict(pp=2, schedule="zbv", virtual_stages=2),
}

# One run, handed from layout to layout, one step each
JOURNEY = [
    ("dp_shard2", dict(dp_shard=2)),
    ("tp2", dict(tp=2)),
    ("one rank", dict()),
    ("pp2", dict(pp=2)),
    ("tp2 × pp2 × dp_shard2", dict(tp=2, pp=2, dp_shard=2)),
    ("tp2 × dp_replicate2", dict(tp=2, dp_replicate=2)),
    ("a V, whose ends are on one rank", dict(pp=2, schedule="zbv", virtual_stages=2)),
    ("ZeRO-1 × tp2", dict(dp_shard=2, tp=2, zero_stage=1)),
    ("cp2 × dp_shard2", dict(cp=2, dp_shard=2)),
    ("interleaved", dict(pp=2, schedule="interleaved_1f1b", virtual_stages=2)),
    ("ZeRO-1 in a V", dict(pp=2, dp_shard=2, zero_stage=1, schedule="zbv", virtual_stages=2)),
]


def interrupted(spec, *, stop_before: int) -> Outcome:
    """Train, and leave without a word before step `stop_before`."""
    results = run_ranks(train_here, world_size=spec.world_size, args=(spec,), kwargs={"stop_before": stop_before})
    return Outcome.of(results)


@pytest.mark.parametrize("case", SAME_LAYOUT)
def test_resume_in_the_same_layout_is_bit_for_bit(case, tmp_path):
    where = layout(**SAME_LAYOUT[case])
    whole = train_job(job(tmp_path / "whole", where, training=SIX_STEPS))
    first = interrupted(job(tmp_path, where, training=SIX_STEPS, interval_steps=3), stop_before=6)
    commit(tmp_path, first.shards, step=3)  # steps 4 and 5 are lost
    second = train_job(job(tmp_path, where, training=SIX_STEPS, resume_step=3, attempt=2))
    assert first.losses[:3] + second.losses == whole.losses
    assert first.grad_norms[:3] + second.grad_norms == whole.grad_norms


@pytest.mark.parametrize("model", [TINY, TIED], ids=["untied", "tied"])
def test_a_run_goes_on_in_any_layout(model, tmp_path):
    training = dataclasses.replace(TRAINING, steps=len(JOURNEY))
    whole = train_job(job(tmp_path / "whole", layout(), model=model, training=training))
    losses = []
    for step, (_, degrees) in enumerate(JOURNEY, start=1):
        spec = job(tmp_path, layout(**degrees), model=model, training=training, interval_steps=1,
                   resume_step=step - 1 or None)
        leg = interrupted(spec, stop_before=step + 1)
        commit(tmp_path, leg.shards, step=step)
        losses += leg.losses
    assert losses == pytest.approx(whole.losses, abs=LOSS_TOLERANCE, rel=0)


def test_shards_without_rows_are_saved_and_resharded(tmp_path):
    """Nine rows over four ranks are 3, 3, 3 and none."""
    model = dataclasses.replace(TINY, dim=9, head_dim=8)
    first = train_job(job(tmp_path, layout(dp_shard=4, microbatch_size=1), model=model, interval_steps=2))
    commit(tmp_path, first.shards, step=2)
    second = train_job(job(tmp_path, layout(tp=2), model=model, resume_step=2, attempt=2))
    assert second.losses == pytest.approx(first.losses[2:], abs=LOSS_TOLERANCE, rel=0)


def test_the_final_step_is_saved_though_not_due(tmp_path):
    outcome = train_job(job(tmp_path, layout(), interval_steps=3))
    assert sorted({shard.step for shard in outcome.shards}) == [3, TRAINING.steps]
    assert all(shard.data_cursor == shard.step for shard in outcome.shards)


def test_a_finished_run_resumed_does_nothing(tmp_path):
    outcome = train_job(job(tmp_path, layout()))
    commit(tmp_path, outcome.shards, step=TRAINING.steps)
    again = train_job(job(tmp_path, layout(), resume_step=TRAINING.steps, attempt=2))
    assert again.losses == [] and again.shards == []


# ------------------------------------------------------------------ no rank waits for another
def save_alone(spec, saving_rank: int) -> list[str]:
    """One step on all ranks; then only `saving_rank` saves, while the others have left."""
    trainer = build_trainer(spec, recorder=ListRecorder(rank=dist.get_rank(), attempt=1))
    trainer._step(1)
    if dist.get_rank() != saving_rank:
        return []
    folder = RunDir(Path(spec.run_dir)).checkpoint_in_progress(1, 1)
    files = checkpoint.save(folder, trainer.state, progress=Progress(step=1, data_cursor=1), layout={})
    return [file.name for file in files]


def test_saving_waits_for_no_other_rank(tmp_path):
    spec = job(tmp_path, layout(tp=2, dp_shard=2))
    names = run_ranks(save_alone, world_size=4, args=(spec, 3))
    assert names == [[], [], [], ["rank-00003.bin", "rank-00003.json"]]


def test_replicated_tensors_are_written_once(tmp_path):
    def written(**degrees):
        run_dir = tmp_path / str(degrees)
        outcome = train_job(job(run_dir, layout(**degrees), model=TIED))
        folder = commit(run_dir, outcome.shards, step=TRAINING.steps)
        chunks = [c for line in (folder / INDEX).read_text().splitlines() for c in json.loads(line)["chunks"]]
        return sum(c["num_bytes"] for c in chunks if not c["tensor"].startswith("random."))

    layouts = [dict(), dict(tp=2, dp_replicate=2), dict(pp=2, dp_shard=2),
               dict(dp_shard=2, dp_replicate=2, zero_stage=1), dict(cp=2), dict(pp=2, schedule="zbv", virtual_stages=2)]
    assert len({written(**degrees) for degrees in layouts}) == 1


def opened_on_resume(spec) -> list[str]:
    """Names of the checkpoint's files that this rank opens, as often as it does."""
    trainer = build_trainer(spec, recorder=ListRecorder(rank=dist.get_rank(), attempt=2))
    folder, opened = RunDir(Path(spec.run_dir)).checkpoint(spec.resume_step), []
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
    trainer.resume(spec.resume_step)
    return sorted(Path(name).name for name in opened if name.startswith(str(folder)))


def test_a_rank_that_resumes_opens_one_index_and_its_own_shards(tmp_path):
    where = layout(dp_shard=4, microbatch_size=1)
    commit(tmp_path, train_job(job(tmp_path, where)).shards, step=TRAINING.steps)
    opened = run_ranks(opened_on_resume, world_size=4, args=(job(tmp_path, where, resume_step=TRAINING.steps),))
    shards = [sorted({0, rank}) for rank in range(4)]  # rank 0 wrote what all hold
    assert opened == [[INDEX, MANIFEST, *(f"rank-{rank:05d}.bin" for rank in ranks)] for ranks in shards]


# ------------------------------------------------------------------ damage
def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def list_files(path, change):
    """Of the checkpoint that `path` is in, another list in the manifest."""
    manifest = path.parent / MANIFEST
    manifest.write_text(json.dumps({"files": change(json.loads(manifest.read_text())["files"])}))


def leave_out_a_rank(manifest):
    index = manifest.parent / INDEX
    line = index.read_bytes().splitlines(keepends=True)[0]
    index.write_bytes(line)
    whole = {"name": INDEX, "size_bytes": len(line), "checksum": f"crc32:{zlib.crc32(line):08x}"}
    list_files(manifest, lambda files: [whole, *(f for f in files if f["name"] != INDEX)])


DAMAGE = {
    "a byte of a shard": ("rank-00001.bin", flip_a_byte, "checksum"),
    "a byte of the index": (INDEX, flip_a_byte, "crc32"),
    "the index is cut short": (INDEX, lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes where"),
    "the index is gone": (INDEX, lambda path: path.unlink(), "is missing"),
    "a shard is gone": ("rank-00001.bin", lambda path: path.unlink(), "is missing"),
    "a shard is cut short": ("rank-00001.bin", lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes where"),
    "no manifest": (MANIFEST, lambda path: path.unlink(), "cannot be read"),
    "half a manifest": (MANIFEST, lambda path: path.write_bytes(path.read_bytes()[:40]), "cannot be read"),
    "a shard is not in the manifest": ("rank-00001.bin", lambda path: list_files(
        path, lambda files: [f for f in files if f["name"] != path.name]), "is not listed"),
    "no index is in the manifest": (MANIFEST, lambda path: list_files(
        path, lambda files: [f for f in files if f["name"] != INDEX]), "lists no rank's index"),
    "a rank is not in the index": (MANIFEST, leave_out_a_rank, "elements of"),
}


@pytest.fixture(scope="module")
def committed(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run")
    return commit(run_dir, train_job(job(run_dir, layout(dp_shard=2))).shards, step=TRAINING.steps)


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_name(case, committed, tmp_path):
    name, damage, message = DAMAGE[case]
    folder = RunDir(tmp_path).checkpoint(TRAINING.steps)
    folder.mkdir(parents=True)
    for path in committed.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    damage(folder / name)
    with pytest.raises(RanksFailed, match=message) as failure:
        train_job(job(tmp_path, layout(), resume_step=TRAINING.steps))
    assert CheckpointCorrupt.__name__ in str(failure.value)
    assert f"step {TRAINING.steps}" in str(failure.value) and name in str(failure.value)


def test_a_checkpoint_of_another_model_is_refused(committed):
    spec = job(committed.parent.parent, layout(), model=dataclasses.replace(TINY, ffn_dim=96),
               resume_step=TRAINING.steps)
    with pytest.raises(RanksFailed, match="the model needs"):
        train_job(spec)


# ------------------------------------------------------------------ a real kill
def test_a_killed_run_resumes_bit_for_bit(tmp_path):
    """A rank is killed with SIGKILL in the middle of a step; its peer is ended; both start again."""
    where = layout(dp_shard=2)
    whole = train_job(job(tmp_path / "whole", where, training=SIX_STEPS))
    fault = FaultSpec(attempt=1, step=5, rank=1, kind="sigkill")
    spec = dataclasses.replace(job(tmp_path, where, training=SIX_STEPS, interval_steps=2), faults=(fault,))
    results = collect_ranks(train_here, world_size=2, args=(spec,), kwargs={"reports_to": tmp_path})
    assert results[1].error == "died with exit code -9"
    first = Outcome.of([read_reports(tmp_path, rank=rank) for rank in range(2)])
    assert first.losses == whole.losses[:4]
    commit(tmp_path, first.shards, step=4)
    second = train_job(dataclasses.replace(spec, attempt=2, resume_step=4))  # the fault is of attempt 1 only
    assert first.losses + second.losses == whole.losses
