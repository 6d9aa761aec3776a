"""Committing, choosing and pruning checkpoints: a step exists whole, or not at all."""
import dataclasses
import json
import math
import zlib
from pathlib import Path

import pytest

from jobs.spec.job import JobSpec
from jobs.spec.reports import ShardFile, ShardReport
from jobs.spec.rundir import INDEX, MANIFEST, RunDir, rank_index
from jobs.spec.training import CheckpointSpec
from orchestrator.supervision.commit import CommitError, commit, newest_usable, prune, remove_unfinished
from orchestrator.supervision.journal import Journal
from orchestrator.supervision.keeper import Keeper
from tests.helpers.histories import step_report

WORLD = 3


def job(run_dir: RunDir, attempt: int = 1) -> JobSpec:
    return JobSpec(run="r", attempt=attempt, run_dir=str(run_dir.path), device="cpu", world_size=WORLD,
                   checkpoint=CheckpointSpec(), resume_step=None, peak_tflops=1.0)


def write_shards(run_dir: RunDir, step: int, *, attempt: int = 1, cursor: int | None = None) -> list[ShardReport]:
    folder = run_dir.checkpoint_in_progress(step, attempt)
    folder.mkdir(parents=True)
    reports = []
    for rank in range(WORLD):
        (folder / f"rank-{rank}.bin").write_bytes(bytes(rank + 5))
        index = json.dumps({"rank": rank}).encode()
        (folder / rank_index(rank)).write_bytes(index)
        files = (ShardFile(name=f"rank-{rank}.bin", size_bytes=rank + 5, checksum="crc32:0"),
                 ShardFile(name=rank_index(rank), size_bytes=len(index), checksum=f"crc32:{zlib.crc32(index):08x}"))
        reports.append(ShardReport(attempt=attempt, rank=rank, step=step, t=0.0, files=files, save_s=float(rank),
                                   data_cursor=step if cursor is None else cursor))
    return reports


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    (tmp_path / "checkpoints").mkdir()
    return RunDir(tmp_path)


def committed(run_dir: RunDir, *steps: int) -> RunDir:
    for step in steps:
        commit(run_dir, job(run_dir), tuple(write_shards(run_dir, step)))
    return run_dir


def test_a_step_is_complete_with_its_last_rank(run_dir: RunDir) -> None:
    keeper = Keeper(run_dir, journal=Journal(run_dir.events), keep=1, say=print)
    a, b, c = write_shards(run_dir, 10)
    assert keeper.complete(a) is None  # of no attempt
    keeper.begin(job(run_dir))
    assert keeper.complete(a) is None and keeper.complete(a) is None and keeper.complete(b) is None
    assert keeper.complete(dataclasses.replace(c, attempt=2)) is None
    assert keeper.complete(c) == (a, b, c)


@pytest.mark.parametrize("attempt, kept", [(1, [4]), (2, [4, 6, 8])], ids=["of this attempt", "of another"])
def test_nothing_is_kept_from_the_step_on_that_lost_the_loss(run_dir: RunDir, attempt: int, kept: list[int]) -> None:
    """Whenever it is told: before the last shard of a step before it, or while the ranks are being ended."""
    keeper = Keeper(run_dir, journal=Journal(run_dir.events), keep=1, say=print)
    keeper.begin(job(run_dir))
    keeper.note(step_report(attempt=attempt, step=6, t=0.0, loss=math.nan))
    keeper.note(step_report(attempt=attempt, step=7, t=0.0, loss=1.0))
    assert [step for step in (4, 6, 8) if any(map(keeper.complete, write_shards(run_dir, step)))] == kept


def test_commit_renames_and_lists_every_file(run_dir: RunDir) -> None:
    done = commit(run_dir, job(run_dir), tuple(write_shards(run_dir, 10)))
    folder = run_dir.checkpoint(10)
    index = (folder / INDEX).read_bytes()
    assert (done.step, done.data_cursor, done.size_bytes, done.save_s) == (10, 10, 5 + 6 + 7 + len(index), 2.0)
    files = {f["name"]: f for f in json.loads((folder / MANIFEST).read_text())["files"]}
    assert files.keys() == {INDEX, *(f"rank-{r}.bin" for r in range(WORLD))}
    assert files.keys() | {MANIFEST} == {path.name for path in folder.iterdir()}
    assert files[INDEX] == {"name": INDEX, "size_bytes": len(index), "checksum": f"crc32:{zlib.crc32(index):08x}"}
    assert not list(run_dir.checkpoints.glob("*.tmp"))


def test_the_ranks_indices_become_the_lines_of_one_in_the_ranks_order(run_dir: RunDir) -> None:
    commit(run_dir, job(run_dir), tuple(write_shards(run_dir, 10)[::-1]))
    lines = (run_dir.checkpoint(10) / INDEX).read_text().splitlines()
    assert [json.loads(line)["rank"] for line in lines] == list(range(WORLD))


def test_an_index_that_is_not_what_its_rank_wrote_is_not_committed(run_dir: RunDir) -> None:
    reports = write_shards(run_dir, 10)
    torn = run_dir.checkpoint_in_progress(10, 1) / rank_index(1)
    torn.write_bytes(torn.read_bytes().replace(b"1", b"2"))
    with pytest.raises(CommitError, match="rank-00001.json: its rank reported crc32:"):
        commit(run_dir, job(run_dir), tuple(reports))
    assert run_dir.committed_steps() == []


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_files_that_are_not_there_are_not_committed(run_dir: RunDir, damage: str) -> None:
    reports = write_shards(run_dir, 10)
    victim = run_dir.checkpoint_in_progress(10, 1) / "rank-1.bin"
    victim.unlink() if damage == "missing" else victim.write_bytes(b"x")
    with pytest.raises(CommitError, match="rank-1.bin"):
        commit(run_dir, job(run_dir), tuple(reports))
    assert run_dir.committed_steps() == []


def test_ranks_must_agree_about_the_cursor(run_dir: RunDir) -> None:
    reports = write_shards(run_dir, 10)
    reports[1] = write_shards(RunDir(run_dir.path / "other"), 10, cursor=11)[1]
    with pytest.raises(CommitError, match="cursor"):
        commit(run_dir, job(run_dir), tuple(reports))


def test_a_step_computed_again_replaces_the_old_one(run_dir: RunDir) -> None:
    committed(run_dir, 10)
    commit(run_dir, job(run_dir, attempt=2), tuple(write_shards(run_dir, 10, attempt=2)))
    assert json.loads((run_dir.checkpoint(10) / MANIFEST).read_text())["attempt"] == 2
    assert not list(run_dir.checkpoints.glob("*.tmp"))


# what is done to the newest of steps 10, 20, 30 → the step chosen
DAMAGES = [
    ("none", lambda folder: None, 30),
    ("a file is missing", lambda folder: (folder / "rank-0.bin").unlink(), 20),
    ("a file is short", lambda folder: (folder / "rank-0.bin").write_bytes(b""), 20),
    ("torn manifest", lambda folder: (folder / MANIFEST).write_text('{"files": ['), 20),
    ("no manifest", lambda folder: (folder / MANIFEST).unlink(), 20),
]


@pytest.mark.parametrize("damage, chosen", [d[1:] for d in DAMAGES], ids=[d[0] for d in DAMAGES])
def test_the_newest_whole_checkpoint_is_chosen(run_dir: RunDir, damage, chosen: int) -> None:
    committed(run_dir, 10, 20, 30)
    damage(run_dir.checkpoint(30))
    step, skipped = newest_usable(run_dir, refused=frozenset(), t=0.0)
    assert step == chosen
    assert [s.step for s in skipped] == ([30] if chosen == 20 and (run_dir.checkpoint(30) / MANIFEST).exists() else [])


def test_a_refused_step_is_not_used(run_dir: RunDir) -> None:
    committed(run_dir, 10, 20)
    assert newest_usable(run_dir, refused=frozenset({20}), t=0.0)[0] == 10
    assert newest_usable(run_dir, refused=frozenset({10, 20}), t=0.0)[0] is None


def test_unfinished_writes_are_never_chosen_and_are_removed(run_dir: RunDir) -> None:
    committed(run_dir, 10)
    write_shards(run_dir, 20)
    assert run_dir.committed_steps() == [10]
    remove_unfinished(run_dir)
    assert [p.name for p in run_dir.checkpoints.iterdir()] == ["step-00000010"]


def test_pruning_keeps_the_newest(run_dir: RunDir) -> None:
    committed(run_dir, 10, 20, 30, 40)
    prune(run_dir, keep=2, refused=frozenset())
    assert run_dir.committed_steps() == [30, 40]


@pytest.mark.parametrize("how", ["refused", "defective"])
def test_a_checkpoint_that_cannot_be_used_keeps_no_place(run_dir: RunDir, how: str) -> None:
    committed(run_dir, 10, 20, 30, 40)
    if how == "defective":
        (run_dir.checkpoint(40) / "rank-0.bin").write_bytes(b"")
    prune(run_dir, keep=2, refused=frozenset({40} if how == "refused" else ()))
    assert run_dir.committed_steps() == [20, 30, 40]
