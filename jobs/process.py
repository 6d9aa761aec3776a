"""Linux process facilities that Python does not wrap: parent-death signals and child subreaping.

Used by agent and fork server to make sure that nothing outlives the process it belongs to.
"""
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent_pid: int) -> None:
    """SIGKILL this process when the parent *thread* that made it ends. Call it first thing in the child:
    a parent that died before the call would otherwise go unnoticed."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent dies, so that it can end them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def num_threads() -> int:
    """OS threads of this process, counted by the kernel."""
    return len(os.listdir("/proc/self/task"))


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
