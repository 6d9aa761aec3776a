"""Process-wide state of a rank: device, seeds, threads, the default process group; and what to import early.

Called by jobs.train; `preload` by the fork server before it forks ranks. Nothing else initialises
torch.distributed or chooses a device.
"""
import contextlib
import ctypes
import functools
import importlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

from jobs.spec.job import Device

# `jobs.train` brings nearly everything with it: FSDP2, pipelining, dynamo, checkpoints. The others are imported
# by a first step: found as the difference of sys.modules around an 8-rank job, which tests/unit/test_preload.py
# repeats; encodings.idna is what the first look-up of a host name imports.
PRELOADED = ("jobs.train", "numpy.ma", "torch.profiler._cupti_monitor", "encodings.idna")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
BACKENDS = {"cpu": "shared_gloo", "cuda": "nccl"}


@functools.cache
def _network() -> list[Any]:
    """Of this process: made in the rank, which a thread would not survive being forked to. torch's default would be
    the address of the host's name, whatever interfaces the agent or the user has named."""
    named = os.environ.get("GLOO_SOCKET_IFNAME", "")
    return [ProcessGroupGloo.create_device(interface=name) for name in named.split(",") if name] or [
        ProcessGroupGloo.create_default_device()]


def _shared_gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> ProcessGroupGloo:
    """torch's gloo, but all groups of a rank share one thread for their sockets. One of its own, as torch gives to each
    axis of a mesh, wakes 100 times a second even where the axis has a single rank: four of them took 1% of a core."""
    options = ProcessGroupGloo._Options()
    options._devices, options._timeout = _network(), timeout
    return ProcessGroupGloo(store, rank, size, options)


dist.Backend.register_backend(BACKENDS["cpu"], _shared_gloo, devices=["cpu"])


@contextlib.contextmanager
def process_group(device: Device, *, timeout_s: float, seed: int) -> Iterator[torch.device]:
    """Join the process group that the torchrun environment describes; yields this rank's device.

    The group is destroyed only after success: after a failure its peers may be dead, destroying it could
    wait for them, and the process is about to end anyway.
    """
    rank_device = torch.device("cpu")
    if device == "cuda":
        rank_device = _own_gpu(int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(rank_device)  # before anything that would make a context, which lands on GPU 0
    else:
        keep_memory()
    seed_everything(seed)
    if threads := os.environ.get("OMP_NUM_THREADS"):  # read by torch when the fork server imported it, with 1
        torch.set_num_threads(int(threads))
    dist.init_process_group(BACKENDS[device], timeout=timedelta(seconds=timeout_s),
                            device_id=rank_device if device == "cuda" else None)
    yield rank_device
    # A run that is resumed at its last step takes none. Rank 0, which holds the store, would be gone while others are
    # still making groups that it is no member of.
    dist.barrier()
    dist.destroy_process_group()


def _own_gpu(local_rank: int) -> torch.device:
    """Raises ValueError where there is none for this rank."""
    found = torch.cuda.device_count()
    if local_rank >= found:
        build = f"torch {torch.__version__}" + (", which is built without CUDA" if torch.version.cuda is None else "")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
        raise ValueError(f"cluster.gpus_per_node: local rank {local_rank} finds {found} GPUs (CUDA_VISIBLE_DEVICES="
                         f"{visible}, {build}); lower it, give the job its GPUs (cluster.slurm), or train on the CPU "
                         "(cluster.gpu=cpu)")
    return torch.device("cuda", local_rank)


def keep_memory() -> None:
    """Let glibc keep what a step frees for the next one. It would return it to the kernel, which gives it back page by
    page and zeroed: 1,200 faults, 5 ms of a step of 75. Its own thresholds grow only with what happens to be freed."""
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:  # other C libraries have none
        mallopt(_M_MMAP_THRESHOLD, 2**25)  # the most that it takes
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def limit_waiting(*, timeout_s: float) -> None:
    """Let every group's collectives fail after timeout_s; to be called when all groups exist. The groups of a mesh
    are made with torch's own limit, 30 minutes (gloo) or 10 (NCCL), whatever the default group was given."""
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


def seed_everything(seed: int) -> None:
    """Seed torch's generators. Weights and sample order have seeds of their own and do not depend on this."""
    torch.manual_seed(seed)


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a clock read afterwards is true."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def preload() -> None:
    """Import all that a rank will need, so that a forked rank starts at once. Runs no torch operation, starts
    no thread, touches no CUDA: the caller forks afterwards."""
    for name in PRELOADED:
        importlib.import_module(name)
