"""Faults injected on purpose, as data: what strikes this rank before this step.

Called by the trainer before each step. Every fault is told to the agent before it strikes, so that a
diagnosis can be compared with what was really done.
"""
import math
import os
import signal
import time
from collections.abc import Iterable
from typing import Any

from jobs.recorder import Recorder
from jobs.spec.job import FaultSpec
from jobs.spec.reports import FaultInjected

AGENT_PID = "ORC_AGENT_PID"  # of this node's agent, in the rank's environment
EXIT_CODE = 17  # of the `exit` fault: an ordinary non-zero code, not the 1 of an exception


class InjectedFault(RuntimeError):
    """Raised by the `exception` fault."""


def strike(faults: tuple[FaultSpec, ...], *, attempt: int, rank: int, step: int, recorder: Recorder,
           parameters: Iterable[Any] = ()) -> None:
    """Carry out the faults meant for this attempt, rank and step (the step about to be computed, from 1).
    `parameters` are this rank's tensors, for the faults that damage them."""
    for fault in faults:
        if (fault.attempt, fault.rank, fault.step) != (attempt, rank, step):
            continue
        recorder.report(FaultInjected(attempt=attempt, rank=rank, step=step, t=time.time(), fault=fault.kind))
        print(f"rank {rank}: injected fault {fault.kind!r} before step {step}", flush=True)
        match fault.kind:
            case "sigkill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exception":
                raise InjectedFault(f"injected fault before step {step} on rank {rank} of attempt {attempt}")
            case "exit":
                os._exit(EXIT_CODE)
            case "agent_kill":
                os.kill(int(os.environ[AGENT_PID]), signal.SIGKILL)
            case "nan":
                from jobs.mesh import local_of  # torch is there already: who calls this from elsewhere need not have it

                for parameter in parameters:
                    local_of(parameter.detach()).fill_(math.nan)
            case other:
                raise ValueError(f"faults: kind {other!r} is not known to the trainer")
