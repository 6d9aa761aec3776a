"""The life of a rank process: the user's program, the user's function, or the built-in trainer, to its exit code.

Called by the fork server in the child that it has just forked. Knows its job and its agent, no other process.
"""
import os
import sys
import time
import traceback

from jobs.recorder import Recorder
from jobs.spec.job import JobSpec
from jobs.spec.reports import RankError


def run_rank(job: JobSpec) -> int:
    """The life of a rank process; returns its exit code. An exception is told to the agent first."""
    if job.workdir is not None:
        _enter(job.workdir)
    if job.command is not None:
        sys.stdout.flush()
        try:
            os.execvp(job.command[0], list(job.command))
        except OSError as error:  # which does not say of what
            raise OSError(f"command: {job.command[0]!r} cannot be run: {error.strerror}") from None
    recorder = Recorder.from_environment(attempt=job.attempt)
    try:
        if job.entrypoint is not None:
            run_entrypoint(job.entrypoint, arguments=job.arguments)
        else:
            from jobs.train import main

            main(job, recorder=recorder)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        traceback.print_exc()
        root = _root(error)
        recorder.report(RankError(attempt=job.attempt, rank=recorder.rank, step=recorder.step, t=time.time(),
                                  type=type(root).__name__, message=str(root), traceback=traceback.format_exc()))
        return 1
    return 0


def run_entrypoint(entrypoint: str, *, arguments: tuple[str, ...]) -> None:
    """Call a trainer of the user's own, as its script would be started: with arguments in sys.argv."""
    from jobs.own.build import load_entrypoint

    function = load_entrypoint(entrypoint, where="entrypoint")
    sys.argv = [getattr(sys.modules[entrypoint.partition(":")[0]], "__file__", None) or entrypoint, *arguments]
    function()


def _enter(workdir: str) -> None:
    """Where the user's own code runs, and first on its import path."""
    try:
        os.chdir(workdir)
    except OSError as error:
        raise OSError(f"workdir: {workdir!r} cannot be entered on this node: {error.strerror}") from None
    sys.path.insert(0, workdir)


def _root(error: BaseException) -> BaseException:
    """The exception at the bottom of the chain: torch's pipeline wraps every one in a RuntimeError of its own."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error
