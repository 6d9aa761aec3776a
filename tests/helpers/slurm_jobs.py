"""What the Slurm tests run inside jobs. submitit pickles functions by name, so they live in a module
of their own that the job can import.

Every function tells what it sees by appending JSON lines to a file.
"""
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from orchestrator.submission.launch import SlurmLauncher, agent_step, step_environment

# A stand-in for an agent in tests of the step's flags: tells where it runs, then lives until it is told to end.
TASK = """
import json, os, pathlib, sys, time
out = pathlib.Path(sys.argv[1])
node = os.environ["SLURMD_NODENAME"]
told = {"node": node, "pid": os.getpid(), "cpus": os.environ.get("SLURM_CPUS_PER_TASK"),
        "gpus": os.environ.get("SLURM_STEP_GPUS"), "step": os.environ["SLURM_STEP_ID"]}
(out / f"{node}.{told['step']}.started").write_text(json.dumps(told))
while not (out / f"{node}.{told['step']}.end").exists():
    (out / f"{node}.{told['step']}.beat").write_text(str(time.time()))
    time.sleep(0.1)
sys.exit(int((out / f"{node}.{told['step']}.end").read_text()))
"""


def tell(path: str, **facts) -> None:
    with open(path, "a") as file:
        file.write(json.dumps(facts) + "\n")


def told(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def probe(path: str) -> str:
    """Where and as what this function runs."""
    names = ("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURMD_NODENAME", "SLURM_JOB_GPUS", "SLURM_CPUS_PER_TASK",
             "SLURM_STEP_ID", "SUBMITIT_EXECUTOR", "FROM_SETUP", "OUTER_API_KEY", "SLURM_MEM_PER_CPU")
    script = subprocess.run(["scontrol", "write", "batch_script", os.environ["SLURM_JOB_ID"], "-"],
                            capture_output=True, text=True, check=True).stdout
    tell(path, host=socket.gethostname(), pid=os.getpid(), argv=sys.argv, script=script,
         env={name: os.environ.get(name) for name in names})
    return "told"


def fail(path: str, code: int) -> None:
    tell(path, pid=os.getpid())
    sys.exit(code)


def wait_for_signals(path: str) -> None:
    """Tells each USR2 and goes on; ends on TERM."""
    signals = {signal.SIGUSR2, signal.SIGTERM}
    tell(path, event="start", t=time.time(), end=end_time(), child=child(),
         term_ends=signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    while True:
        number = signal.sigwait(signals)
        tell(path, event=signal.Signals(number).name, t=time.time())
        if number == signal.SIGTERM:
            sys.exit(7)


def child() -> int:
    """A process of its own session, as ranks are: it must not outlive a cancelled job."""
    return subprocess.Popen(["sleep", "600"], start_new_session=True).pid


def end_time() -> float | None:
    return asyncio.run(SlurmLauncher.from_environment().end_time())


def requeue_once(path: str) -> None:
    tell(path, restart=os.environ.get("SLURM_RESTART_COUNT", "0"), t=time.time())
    if "SLURM_RESTART_COUNT" not in os.environ:
        subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True)
        signal.pause()


def lead_steps(path: str, orders: str) -> None:
    """Starts the stand-in on all nodes, then one more step per node name that appears in the file `orders`."""
    asyncio.run(_lead_steps(Path(path), Path(orders)))


async def _lead_steps(path: Path, orders: Path) -> None:
    launcher = SlurmLauncher.from_environment()
    out = path.parent
    (out / "logs").mkdir()
    tell(str(path), nodes=launcher.nodes, address=launcher.address, cpus=launcher.cpus_per_node,
         end=await launcher.end_time())
    steps, served = [await _step(launcher, launcher.nodes, out)], 0
    while not (out / "finish").exists():
        wanted = orders.read_text().splitlines() if orders.exists() else []
        for node in wanted[served:]:
            steps.append(await _step(launcher, (node,), out))
            served += 1
        (out / "leader.beat").write_text(str(time.time()))
        await asyncio.sleep(0.1)
    tell(str(path), ends=[await step.wait() for step in steps])


async def _step(launcher: SlurmLauncher, nodes: tuple[str, ...], out: Path) -> asyncio.subprocess.Process:
    argv = agent_step(nodes, cpus_per_node=launcher.cpus_per_node, run_dir=out)
    return await asyncio.create_subprocess_exec(*argv, sys.executable, "-c", TASK, str(out),
                                                stdin=asyncio.subprocess.DEVNULL, env=step_environment(os.environ))
