"""What a node looks like from inside: a health sample (psutil, NVML), its CPUs and GPUs, its network interface, a port.

Called by the agent. NVML runs in a child with a time-out, because a call into a hung driver never returns.
"""
import asyncio
import json
import os
import secrets
import socket
import sys
import time
from pathlib import Path

import psutil

from jobs.spec.reports import NodeSample

NVML_TIMEOUT_S = 10.0


async def sample(node: str, *, gpus: bool) -> NodeSample:
    """One health sample. GPU figures are empty where there are no GPUs, None where NVML does not know."""
    memory = psutil.virtual_memory()
    network = psutil.net_io_counters()
    gpu = await _query_gpus() if gpus else []
    return NodeSample(
        node=node, t=time.time(), cpu_percent=psutil.cpu_percent(), memory_used_bytes=memory.total - memory.available,
        memory_total_bytes=memory.total, network_sent_bytes=network.bytes_sent if network else 0,
        network_received_bytes=network.bytes_recv if network else 0,
        gpu_utilization=tuple(g["utilization"] for g in gpu),
        gpu_memory_used_bytes=tuple(g["memory_used_bytes"] for g in gpu),
        gpu_temperature_c=tuple(g["temperature_c"] for g in gpu))


def available_cpus() -> int:
    return len(os.sched_getaffinity(0))


def interface_of(address: str) -> str | None:
    """Name of the network interface that owns `address`; None if none does."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address.partition("%")[0] == address for a in addresses):
            return name
    return None


def count_gpus() -> int:
    """GPUs this job may use: what Slurm gave, else the driver's device files."""
    given = os.environ.get("SLURM_STEP_GPUS") or os.environ.get("CUDA_VISIBLE_DEVICES")
    if given:
        return len(given.split(","))
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def pick_port() -> int:
    """A free port for the ranks' rendezvous, outside the range that outgoing connections take theirs from."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = range(max(1024, low - 10_000), low) if low > 2048 else range(10_000, 20_000)
    for _ in range(100):
        port = secrets.choice(ports)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
                return port
            except OSError:
                continue  # taken
    raise RuntimeError(f"no free port found in {ports.start}-{ports.stop - 1}")


async def _query_gpus() -> list[dict]:
    """One dict per GPU; empty where NVML is absent or does not answer in time."""
    child = await asyncio.create_subprocess_exec(sys.executable, "-m", "jobs.node", stdout=asyncio.subprocess.PIPE,
                                                 stderr=asyncio.subprocess.DEVNULL)
    try:
        output, _ = await asyncio.wait_for(child.communicate(), NVML_TIMEOUT_S)
    except TimeoutError:
        child.kill()
        return []
    return json.loads(output) if child.returncode == 0 else []


def _read_nvml() -> list[dict]:
    """Runs in the child: one dict per GPU, None where NVML has no figure."""
    import pynvml

    def ask(query, *args):  # a GPU that cannot answer one question may answer the next
        try:
            return query(*args)
        except pynvml.NVMLError:
            return None

    pynvml.nvmlInit()
    found = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        utilization = ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
        memory = ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
        temperature = ask(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU)
        found.append({"utilization": utilization and float(utilization.gpu),
                      "memory_used_bytes": memory and memory.used,
                      "temperature_c": temperature and float(temperature)})
    return found


if __name__ == "__main__":
    print(json.dumps(_read_nvml()))
