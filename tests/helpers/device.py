"""The device that multi-rank tests run on, chosen in one place: CPU and gloo, or CUDA and NCCL where ORC_TEST_DEVICE
says so (tests/gpu sets it). Read by the process that starts ranks and, inherited, by the ranks."""
import os

import torch

from jobs.spec.job import Device

VARIABLE = "ORC_TEST_DEVICE"


def kind() -> Device:
    return "cuda" if os.environ.get(VARIABLE) == "cuda" else "cpu"


def rank_device() -> torch.device:
    """In a rank: the device that it computes on."""
    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if kind() == "cuda" else torch.device("cpu")


def missing_gpus(world_size: int) -> str:
    """Why so many ranks, each with a GPU of its own, cannot run here; empty if they can. NCCL refuses two ranks on one
    GPU. Makes no CUDA context."""
    if torch.version.cuda is None:
        return f"this build of torch, {torch.__version__}, has no CUDA"
    found = torch.cuda.device_count()
    return f"needs {world_size} GPUs, here are {found}" if found < world_size else ""
