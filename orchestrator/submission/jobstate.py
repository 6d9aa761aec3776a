"""What Slurm's words mean to us: job states and job ids, as sacct and squeue print them.

Pure text work, called by client.py. It must not run a command: whether an answer came at all is the
caller's to know, and only what is written here decides what an answer says.
"""
import re
from dataclasses import dataclass

from orchestrator.submission import JobState

# Every state of slurm.h and the flags that sacct and squeue print in a state's place. A word that is
# not here is "unknown": guessing "failed" would resubmit a job that is alive.
STATES: dict[str, JobState] = {
    "BOOT_FAIL": "node_failure",
    "CANCELLED": "cancelled",
    "COMPLETED": "completed",
    "COMPLETING": "running",  # its processes are still being ended
    "CONFIGURING": "pending",  # nodes are chosen but still booting
    "DEADLINE": "time_limit",
    "EXPEDITING": "pending",
    "FAILED": "failed",
    "LAUNCH_FAILED": "node_failure",
    "NODE_FAIL": "node_failure",
    "OUT_OF_MEMORY": "failed",
    "PENDING": "pending",
    "POWER_UP_NODE": "pending",
    "PREEMPTED": "preempted",
    "RECONFIG_FAIL": "node_failure",
    "REQUEUED": "pending",
    "REQUEUE_FED": "pending",
    "REQUEUE_HOLD": "pending",
    "RESIZING": "running",  # a node was lost or given back; the rest goes on
    "RESV_DEL_HOLD": "pending",
    "REVOKED": "unknown",  # the job went to another cluster of a federation
    "RUNNING": "running",
    "SIGNALING": "running",
    "SPECIAL_EXIT": "pending",  # requeued and held
    "STAGE_OUT": "running",
    "STOPPED": "running",
    "SUSPENDED": "running",
    "TIMEOUT": "time_limit",
}
FINAL: frozenset[JobState] = frozenset({"completed", "failed", "cancelled", "time_limit", "preempted",
                                        "node_failure"})
# What a job of several parts (an array, a heterogeneous job) is called: the first that any part has.
_PRECEDENCE: tuple[JobState, ...] = ("running", "pending", "unknown", "node_failure", "preempted", "time_limit",
                                     "failed", "cancelled", "completed")

_JOB_ID = re.compile(r"(?P<job>\d+)(?:_(?:(?P<task>\d+)|\[(?P<tasks>[^\]]*)\]?)|\+(?P<part>\d+))?(?P<step>\..+)?")
_RANGE = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobId:
    """A job id as printed: `20`, `20_3`, `20_[0-10:2%4]`, `21+1`, `20.batch`."""

    job: str
    tasks: tuple[int, ...] = ()  # of an array
    complete: bool = True  # False: the list of tasks was cut off ("...") by the command that printed it
    part: int | None = None  # of a heterogeneous job
    step: str | None = None  # "batch", "0", …; None is the allocation itself

    def covers(self, wanted: str) -> bool:
        """Whether this row speaks of the job `wanted`, or of a part of it."""
        other = parse_job_id(wanted)
        if other is None or self.job != other.job:
            return False
        if other.part is not None:
            return self.part == other.part
        return not other.tasks or set(other.tasks) <= set(self.tasks)


def parse_state(text: str) -> JobState:
    """`CANCELLED by 1000` → cancelled; `COMPLETED+` (cut off by a narrow column) and new words → unknown."""
    words = text.split()
    return STATES.get(words[0].upper(), "unknown") if words else "unknown"


def parse_job_id(text: str) -> JobId | None:
    """None if `text` is not a job id at all."""
    match = _JOB_ID.fullmatch(text.strip())
    if match is None:
        return None
    listed = match["tasks"]
    tasks = (int(match["task"]),) if match["task"] else _parse_tasks(listed or "")
    return JobId(job=match["job"], tasks=tasks, complete="..." not in (listed or ""),
                 part=int(match["part"]) if match["part"] else None,
                 step=match["step"][1:] if match["step"] else None)


def parse_states(text: str, *, job_ids: list[str]) -> dict[str, JobState]:
    """`JobID|State` lines → the state of each of `job_ids` that they speak of.

    Steps are skipped: their states are not the job's. Of several rows with the same id the last counts:
    sacct starts a new row when a job is requeued, and also when it goes on with fewer nodes after a
    node was lost (the row before then stays RESIZING for ever). Of several parts of one job (array
    tasks, heterogeneous parts) a living part outweighs an ended one, and a failure outweighs success.
    """
    rows: dict[JobId, JobState] = {}
    for line in text.splitlines():
        name, _, state = line.partition("|")
        job_id = parse_job_id(name)
        if job_id is not None and job_id.step is None:
            rows[job_id] = parse_state(state.partition("|")[0])
    found = {wanted: {state for row, state in rows.items() if row.covers(wanted)} for wanted in job_ids}
    return {wanted: min(states, key=_PRECEDENCE.index) for wanted, states in found.items() if states}


def _parse_tasks(listed: str) -> tuple[int, ...]:
    tasks: list[int] = []
    for item in listed.partition("%")[0].split(","):  # %4 limits how many run at once
        if match := _RANGE.fullmatch(item):  # a list that was cut off ends in "..." or in half a number
            first, last, step = match.groups()
            tasks += range(int(first), int(last or first) + 1, int(step or 1))
    return tuple(tasks)
