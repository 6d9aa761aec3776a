"""Checkpoints as the supervisor sees them: committing, choosing and pruning. It never reads a tensor.

Ranks write their shards into a folder of the attempt's own and report files, sizes and checksums; once
every rank has reported, the supervisor makes one index of theirs, writes the manifest and renames the folder. A
checkpoint exists if and only if it was renamed: there is no `latest` that could lie.
"""
import dataclasses
import json
import os
import shutil
import time
import zlib
from collections.abc import Iterable
from pathlib import Path

from jobs.spec.events import CheckpointCommitted, CheckpointSkipped
from jobs.spec.job import JobSpec
from jobs.spec.load import to_dict
from jobs.spec.reports import ShardFile, ShardReport
from jobs.spec.rundir import INDEX, MANIFEST, RunDir, rank_index


class CommitError(RuntimeError):
    """The ranks said they had written what is not there."""


def commit(run_dir: RunDir, job: JobSpec, reports: tuple[ShardReport, ...]) -> CheckpointCommitted:
    """Verify, merge the indices, write the manifest, rename. Blocking. Raises CommitError or OSError, and then nothing
    exists."""
    step = reports[0].step
    folder = run_dir.checkpoint_in_progress(step, job.attempt)
    files = [file for report in reports for file in report.files]
    for file in files:
        path = folder / file.name
        size = path.stat().st_size if path.is_file() else None
        if size != file.size_bytes:
            raise CommitError(f"{path}: its rank reported {file.size_bytes} bytes, "
                              f"{'nothing is there' if size is None else f'{size} are there'}")
    cursors = {report.data_cursor for report in reports}
    if len(cursors) != 1:
        raise CommitError(f"step {step}: the ranks disagree about the data cursor: {sorted(cursors)}")
    files = _merge_indices(folder, reports)
    committed = CheckpointCommitted(
        t=time.time(), attempt=job.attempt, step=step, data_cursor=cursors.pop(),
        size_bytes=sum(file.size_bytes for file in files), save_s=max(report.save_s for report in reports))
    _write_manifest(folder, job, committed, files)
    final = run_dir.checkpoint(step)
    replaced = folder.with_suffix(".replaced.tmp")
    if final.exists():  # computed again after a restart from an earlier one
        os.rename(final, replaced)
    os.rename(folder, final)
    _sync(run_dir.checkpoints)
    shutil.rmtree(replaced, ignore_errors=True)  # what is left of it remove_unfinished() finds
    return committed


def newest_usable(run_dir: RunDir, *, refused: frozenset[int], t: float) -> tuple[int | None, list[CheckpointSkipped]]:
    """The newest committed step whose files are all there with their sizes, and why newer ones are not used.

    `refused`: steps in which a rank found a wrong checksum.
    """
    skipped = []
    for step in reversed(run_dir.committed_steps()):
        reason = "a rank found it corrupt" if step in refused else _defect(run_dir.checkpoint(step))
        if reason is None:
            return step, skipped
        skipped.append(CheckpointSkipped(t=t, step=step, reason=reason))
    return None, skipped


def prune(run_dir: RunDir, *, keep: int, refused: frozenset[int]) -> None:
    """Remove all but the newest `keep` usable checkpoints. One that cannot be used keeps no place, and stays
    until its step is written again."""
    usable = [step for step in run_dir.committed_steps()
              if step not in refused and _defect(run_dir.checkpoint(step)) is None]
    for step in usable[:-keep]:
        doomed = run_dir.checkpoint(step)
        (doomed / MANIFEST).unlink()  # first: a half-removed folder must not look committed
        shutil.rmtree(doomed)


def remove_unfinished(run_dir: RunDir) -> None:
    """Remove what dead attempts began to write."""
    for folder in run_dir.checkpoints.glob("step-*.tmp"):
        shutil.rmtree(folder)


def _merge_indices(folder: Path, reports: tuple[ShardReport, ...]) -> list[ShardFile]:
    """All ranks' indices as the lines of one file, in the place of theirs: a rank that resumes reads this one, and not
    one per rank. Returns the files that there are then."""
    indices = {rank_index(report.rank) for report in reports}
    files = [file for report in sorted(reports, key=lambda report: report.rank) for file in report.files]
    merged = [file for file in files if file.name in indices]
    if not merged:
        return files
    index = _write(folder / INDEX, (_checked(folder / file.name, file) + b"\n" for file in merged))
    for file in merged:
        (folder / file.name).unlink()
    return [index, *(file for file in files if file.name not in indices)]


def _write_manifest(folder: Path, job: JobSpec, committed: CheckpointCommitted, files: list) -> None:
    manifest = {"step": committed.step, "attempt": job.attempt, "data_cursor": committed.data_cursor,
                "world_size": job.world_size, "layout": job.layout.flat() if job.layout else None,
                "model": to_dict(job.model), "seed": job.training.seed if job.training else None,
                "files": [dataclasses.asdict(file) for file in files]}
    _write(folder / MANIFEST, [json.dumps(manifest, indent=1).encode()])
    _sync(folder)


def _write(path: Path, parts: Iterable[bytes]) -> ShardFile:
    """Written and synced, as a manifest lists it."""
    size = checksum = 0
    with path.open("wb") as out:
        for part in parts:
            out.write(part)
            size, checksum = size + len(part), zlib.crc32(part, checksum)
        out.flush()
        os.fsync(out.fileno())
    return ShardFile(name=path.name, size_bytes=size, checksum=f"crc32:{checksum:08x}")


def _checked(path: Path, file: ShardFile) -> bytes:
    content = path.read_bytes()
    if (found := f"crc32:{zlib.crc32(content):08x}") != file.checksum:
        raise CommitError(f"{path}: its rank reported {file.checksum}, {found} is there")
    return content


def _defect(folder: Path) -> str | None:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        for file in manifest["files"]:
            if (folder / file["name"]).stat().st_size != file["size_bytes"]:
                return f"{file['name']} does not have the size the manifest gives"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
