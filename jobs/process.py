"""Process facilities that Python does not wrap: parent-death signals, child subreaping, what forbids a fork.

Used by agent and fork server to make sure that nothing outlives the process it belongs to, and that a fork can live.
"""
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CUDA_ERROR_NOT_INITIALIZED = 3


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


def cuda_driver_is_initialized() -> bool:
    """Whether anything in this process has called cuInit: children forked from now on cannot use CUDA. torch knows only
    of its own doing, and libraries that it imports may ask the driver themselves. Asking here initialises nothing."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False  # no driver on this machine
    return driver.cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p())) != _CUDA_ERROR_NOT_INITIALIZED


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
