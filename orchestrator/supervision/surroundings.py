"""What reaches a supervisor from outside the run: signals, and the end of the job that it runs in.

Called by the supervisor, which is told with `ask(kind, summary)` that the run must stop. Knows no attempt.
"""
import asyncio
import signal
import time
from collections.abc import Callable

from jobs.spec.events import DiagnosisKind
from orchestrator.submission import Launcher

CLOCK_S = 30.0  # between questions for the job's end
Ask = Callable[[DiagnosisKind, str], None]


def handle_signals(ask: Ask) -> None:
    """From now on the signals that end a run ask for it. Called in the running event loop."""
    loop = asyncio.get_running_loop()
    reasons: dict[int, tuple[DiagnosisKind, str]] = {
        signal.SIGTERM: ("stopped", "stopped by SIGTERM (scancel, or kill)"),
        signal.SIGINT: ("stopped", "stopped by SIGINT"),
        signal.SIGUSR2: ("time_limit", "Slurm warned that the job's time is almost up")}
    for signum, (kind, summary) in reasons.items():
        loop.add_signal_handler(signum, ask, kind, summary)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, reasons)  # blocked until here by the local executor


async def watch_the_clock(launcher: Launcher, ask: Ask, *, lead_s: float) -> None:
    """Ask to stop `lead_s` before the job's end, for ever. Slurm's warning signal reaches the first host of a job
    only, and never twice."""
    while True:
        end = await launcher.end_time()
        if end is not None and end - time.time() < lead_s:
            ask("time_limit", f"the job ends in less than {lead_s} s")
        await asyncio.sleep(CLOCK_S)
