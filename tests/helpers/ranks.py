"""Run a function on N forked ranks with a real gloo group: a multi-rank test in one call.

The parent must not have run a torch operation on several threads before: a matmul of the child would hang.
Importing this module (which happens before the first test runs) therefore sets one thread. On CUDA (see
tests.helpers.device) ranks are fresh processes with an NCCL group, and `function` must be importable.
"""
import atexit
import dataclasses
import functools
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from jobs.runtime import BACKENDS
from tests.helpers import device

torch.set_num_threads(1)
TIMEOUT_S = 900.0  # for ranks that hang: no machine is so slow, not where a first step compiles either
FAREWELL_S = 10.0  # for what the peers of a failed rank have to tell: most fail in turn, at once


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankResult:
    """What one rank returned, or the traceback of what it raised, or how it died."""

    value: Any = None
    error: str = ""


class RanksFailed(AssertionError):
    """At least one rank did not return."""


def run_ranks(function: Callable[..., Any], *, world_size: int, args: tuple = (),
              kwargs: dict[str, Any] | None = None) -> list[Any]:
    """`function(*args, **kwargs)` on every rank of an initialised group; the values by rank. Raises RanksFailed
    with the tracebacks otherwise."""
    results = collect_ranks(function, world_size=world_size, args=args, kwargs=kwargs)
    failed = [f"rank {rank}: {result.error}" for rank, result in enumerate(results) if result.error]
    if failed:
        raise RanksFailed("\n".join(failed))
    return [result.value for result in results]


def collect_ranks(function: Callable[..., Any], *, world_size: int, args: tuple = (),
                  kwargs: dict[str, Any] | None = None) -> list[RankResult]:
    """As run_ranks, but failures are results, too: for tests of what happens when a rank dies."""
    assert torch.get_num_threads() == 1, "a forked rank would hang in its first matmul"
    context = multiprocessing.get_context("fork" if device.kind() == "cpu" else "spawn")  # CUDA survives no fork
    with tempfile.TemporaryDirectory() as folder:
        processes, pipes = [], []
        for rank in range(world_size):
            receive, send = context.Pipe(duplex=False)
            call = functools.partial(function, *args, **(kwargs or {}))
            process = context.Process(target=_rank, args=(call, rank, world_size, Path(folder), send))
            process.start()
            send.close()  # so that the parent sees the end of a rank that dies
            processes.append(process)
            pipes.append(receive)
        results = _gather(pipes, processes)
    return results


def _gather(pipes: list[Connection], processes: list) -> list[RankResult]:
    results: list[RankResult | None] = [None] * len(pipes)
    try:
        while open_pipes := [pipe for pipe, result in zip(pipes, results) if result is None]:
            ready = wait(open_pipes, timeout=TIMEOUT_S)
            for pipe in ready:
                rank = pipes.index(pipe)
                results[rank] = _receive(pipe, processes[rank])
            if not ready or any(result is not None and result.error for result in results):
                break  # peers of a failed rank may wait for it until their own time-out
        end = time.monotonic() + FAREWELL_S
        for rank, result in enumerate(results):
            if result is None and pipes[rank].poll(max(0.0, end - time.monotonic())):
                results[rank] = _receive(pipes[rank], processes[rank])
    finally:
        for process in processes:
            process.kill()  # the ranks that have sent their value wait for this
            process.join()
    return [result or RankResult(error=f"no result within {TIMEOUT_S} s, or a peer failed first") for result in results]


def _receive(pipe: Connection, process: Any) -> RankResult:
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        process.join()
        return RankResult(error=f"died with exit code {process.exitcode}")


def _rank(call: Callable[[], Any], rank: int, world_size: int, folder: Path, send: Connection) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size),
                      LOCAL_WORLD_SIZE=str(world_size))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the ranks
    torch.set_num_threads(1)
    try:
        store, mine = dist.FileStore(str(folder / "store"), world_size), device.rank_device()
        if mine.type == "cuda":
            torch.cuda.set_device(mine)
        dist.init_process_group(BACKENDS[mine.type], store=store, rank=rank, world_size=world_size,
                                device_id=mine if mine.type == "cuda" else None)
        result = RankResult(value=call())
    except BaseException:  # noqa: BLE001  everything a rank raises is the test's to see
        result = RankResult(error=traceback.format_exc())
    send.send_bytes(pickle.dumps(result))
    send.close()
    if not result.error:
        # Every rank stays until all have sent: another may still be connecting to this one, in a group's making. The
        # parent ends them then; the limit is for a parent that has been killed.
        time.sleep(TIMEOUT_S)
    # Not through Python's exit: a group with a dead peer would be waited for.
    os._exit(0 if not result.error else 1)


@functools.cache
def tokens_file() -> Path:
    """A token file of about 64 KiB of deterministic pseudo-text, made once per test process."""
    from jobs.spec.training import SourceSpec
    from jobs.tokens import build_tokens

    folder = Path(tempfile.mkdtemp(prefix="orc-tests-"))
    atexit.register(shutil.rmtree, folder)  # forked ranks leave by os._exit and do not run this
    words = ("the", "mesh", "of", "ranks", "holds", "one", "shard", "each", "and", "sums", "its", "gradient")
    state, text = 1, []
    for _ in range(12_000):
        state = (state * 1103515245 + 12345) % 2**31
        text.append(words[(state >> 16) % len(words)])
    (folder / "text.txt").write_text(" ".join(text))
    build_tokens(SourceSpec(path=str(folder / "text.txt")), folder / "tokens.bin")
    return folder / "tokens.bin"
