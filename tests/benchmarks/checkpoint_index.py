"""What one rank of many spends on finding its tensors in a checkpoint: with one merged index, and with one per rank.

    python -m tests.benchmarks.checkpoint_index [--ranks 512] [--tensors 216]

Pretended ranks write descriptions and no tensors: each a row shard of every tensor, as FSDP leaves them. The files are
in the page cache; on a shared file system each opened file is a round trip more.
"""
import argparse
import json
import tempfile
import time
from pathlib import Path

from jobs.checkpoint.raw import FORMAT, Chunk, RawReader, RawWriter, ShardIndex
from jobs.spec.job import JobSpec
from jobs.spec.load import to_dict
from jobs.spec.reports import ShardFile, ShardReport
from jobs.spec.rundir import INDEX, MANIFEST, RunDir
from jobs.spec.training import CheckpointSpec
from orchestrator.supervision.commit import commit

STEP, WIDTH = 1, 16


def write_indices(run: RunDir, *, ranks: int, names: list[str]) -> tuple[ShardReport, ...]:
    folder = run.checkpoint_in_progress(STEP, 1)
    folder.mkdir(parents=True)
    reports = []
    for rank in range(ranks):
        chunks = tuple(Chunk(tensor=name, dtype="torch.float32", shape=(ranks, WIDTH), offsets=(rank, 0), crc32=0,
                             sizes=(1, WIDTH), byte_offset=4 * WIDTH * i, num_bytes=4 * WIDTH)
                       for i, name in enumerate(names))
        index = RawWriter(folder, rank=rank).write_index(ShardIndex(format=FORMAT, step=STEP, data_cursor=STEP,
                                                                    rank=rank, layout={}, chunks=chunks))
        (folder / f"rank-{rank:05d}.bin").touch()
        shard = ShardFile(name=f"rank-{rank:05d}.bin", size_bytes=0, checksum="crc32:00000000")
        reports.append(ShardReport(attempt=1, rank=rank, step=STEP, t=0.0, files=(shard, index), save_s=0.0,
                                   data_cursor=STEP))
    return tuple(reports)


def read(folder: Path, *, wanted: list[str]) -> str:
    start = time.process_time()
    RawReader(folder, step=STEP).read_metadata(wanted=set(wanted))
    return f"{1e3 * (time.process_time() - start):,.0f} ms to find {len(wanted)} tensors"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--tensors", type=int, default=216)
    args = parser.parse_args()
    names = [f"model.layers.{i}.weight" for i in range(args.tensors)]
    with tempfile.TemporaryDirectory() as path:
        run = RunDir(Path(path))
        reports = write_indices(run, ranks=args.ranks, names=names)
        job = JobSpec(run="x", attempt=1, run_dir=path, device="cpu", world_size=args.ranks, resume_step=None,
                      checkpoint=CheckpointSpec(), peak_tflops=1.0)
        folder = run.checkpoint_in_progress(STEP, 1)
        files = [to_dict(file) for report in reports for file in report.files]
        (folder / MANIFEST).write_text(json.dumps({"files": files}))
        for wanted in (names, names[:len(names) // 8]):
            print(f"{args.ranks} indices   {read(folder, wanted=wanted)}, {args.ranks + 1} files opened")
        start = time.process_time()
        commit(run, job, reports)
        size = (run.checkpoint(STEP) / INDEX).stat().st_size
        print(f"merged into {size / 2**20:.1f} MiB and committed in {1e3 * (time.process_time() - start):,.0f} ms")
        for wanted in (names, names[:len(names) // 8]):
            print(f"one index   {read(run.checkpoint(STEP), wanted=wanted)}, 2 files opened")


if __name__ == "__main__":
    main()
