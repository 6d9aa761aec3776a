"""Inside a Slurm allocation: its nodes, and agents on them.

Used by the supervisor, in the batch step. It starts steps and asks Slurm questions; what a lost agent
means and who replaces it is decided elsewhere.
"""
import asyncio
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jobs.spec.rundir import RunDir
from orchestrator.submission import SubmissionError, agent_argv
from orchestrator.submission.client import ANSWER_S, ask
from orchestrator.submission.nodes import expand_nodelist, order_by_switch, own_address

log = logging.getLogger(__name__)

# srun takes options from its environment as well. These would contradict what agent_step says: the job
# may have asked for memory and CPUs in other terms, and the allocation may have shrunk since it began.
_CONFLICTING = ("SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU", "SLURM_MEM_PER_NODE", "SLURM_TRES_PER_TASK",
                "SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES",
                "SLURM_JOB_NUM_NODES", "SLURM_NTASKS_PER_NODE", "SLURM_DISTRIBUTION", "SLURM_HOSTFILE",
                "SLURM_EXCLUSIVE", "SLURM_EXACT")


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmLauncher:
    """Implements orchestrator.submission.Launcher."""

    job_id: str
    nodes: tuple[str, ...]  # in topology order
    address: str  # where the other nodes reach this host
    cpus_per_node: int

    @classmethod
    def from_environment(cls) -> "SlurmLauncher":
        """The allocation that this process is in. Raises SubmissionError outside of one."""
        env = os.environ
        missing = [name for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURMD_NODENAME") if name not in env]
        if missing:
            raise SubmissionError(f"not inside a Slurm job ({', '.join(missing)} not set): `orc submit` starts the "
                                  "supervisor in one")
        nodes = order_by_switch(expand_nodelist(env["SLURM_JOB_NODELIST"]))
        return cls(job_id=env["SLURM_JOB_ID"], nodes=nodes, address=own_address(nodes, own=env["SLURMD_NODENAME"]),
                   cpus_per_node=cpus_per_node(env))

    async def start_agents(self, nodes: tuple[str, ...], *, run_dir: Path,
                           port: int) -> list[asyncio.subprocess.Process]:
        """One step with an agent on each of `nodes`: all of them at first, one of them to replace a lost agent.

        The process is srun's. It ends when the last of its agents has ended, however the others fared.
        Raises SubmissionError for nodes that are not the allocation's.
        """
        if strangers := set(nodes) - set(self.nodes):
            raise SubmissionError(f"{', '.join(sorted(strangers))}: not among the nodes of job {self.job_id}, "
                                  f"{', '.join(self.nodes)}")
        RunDir(run_dir).agent_log("").parent.mkdir(parents=True, exist_ok=True)
        step = agent_step(nodes, cpus_per_node=self.cpus_per_node, run_dir=run_dir)
        process = await asyncio.create_subprocess_exec(
            *step, *agent_argv(run_dir, address=self.address, port=port), stdin=asyncio.subprocess.DEVNULL,
            env=step_environment(os.environ))
        log.info("srun (pid %d) starts agents on %s", process.pid, ", ".join(nodes))
        return [process]

    async def end_time(self) -> float | None:
        """When Slurm will end this job, in seconds since 1970: its time limit, or its preemption if that is near.

        None: no limit, or no answer. Asked again and again by the supervisor, since a limit may be
        changed, and Slurm's warning signal reaches only the first host of the job.
        """
        answer = await asyncio.to_thread(ask, "scontrol", "--oneliner", "show", "job", self.job_id,
                                         timeout_s=ANSWER_S)
        return parse_end_time(answer or "")


def agent_step(nodes: tuple[str, ...], *, cpus_per_node: int, run_dir: Path) -> list[str]:
    """Command line of the step, up to the agent's own.

    The flags are explicit even where they are Slurm's defaults: sites change the defaults.
    """
    before, _, after = str(RunDir(run_dir).agent_log("@")).rpartition("@")
    return [
        "srun",
        "--no-kill", "--kill-on-bad-exit=0", "--wait=0",  # a dead node or task takes nothing else with it
        "--overlap",  # without it a second step waits for the first to end
        f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1", f"--nodelist={','.join(nodes)}",
        f"--cpus-per-task={cpus_per_node}",  # srun does not inherit it from sbatch (since 22.05)
        "--mem=0",  # all of the job's memory on the node, for every step: nothing is set aside for one of them
        "--mpi=none", "--cpu-bind=none",  # ranks are bound by their agent, if at all
        "--export=ALL",
        "--input=none",
        # Each node opens its own log: it outlives srun and this host. srun's --output=…%N would name it by
        # the host, which need not be Slurm's name of the node.
        "sh", "-c", 'log=$1$SLURMD_NODENAME$2; shift 2; exec "$@" >>"$log" 2>&1', "agent", before, after,
    ]


def step_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The environment for srun: the job's, without what contradicts agent_step."""
    return {name: value for name, value in env.items() if name not in _CONFLICTING}


def cpus_per_node(env: Mapping[str, str]) -> int:
    """CPUs of the allocation on each node: what was asked for, or the smallest node's share (`16(x3),8`)."""
    if "SLURM_CPUS_PER_TASK" in env:
        return int(env["SLURM_CPUS_PER_TASK"])
    counts = re.findall(r"(\d+)(?:\(x\d+\))?(?:,|$)", env.get("SLURM_JOB_CPUS_PER_NODE", ""))
    return min(map(int, counts), default=1)


def parse_end_time(job: str) -> float | None:
    """`scontrol --oneliner show job`, with times in seconds → the earlier of EndTime and PreemptTime."""
    times = re.findall(r"\b(?:EndTime|PreemptTime)=(\d+)\b", job)
    return min(map(float, times), default=None)
