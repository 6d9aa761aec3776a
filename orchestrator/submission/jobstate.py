"""What Slurm's words mean to us: job states, as sacct and squeue print them.

Pure text work, called by client.py. It must not run a command: whether an answer came at all is the
caller's to know, and only what is written here decides what an answer says.
"""
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


def parse_state(text: str) -> JobState:
    """`CANCELLED by 1000` → cancelled; `COMPLETED+` (cut off by a narrow column) and new words → unknown."""
    words = text.split()
    return STATES.get(words[0].upper(), "unknown") if words else "unknown"


def parse_states(text: str, *, job_ids: list[str]) -> dict[str, JobState]:
    """`JobID|State` lines → the state of each of `job_ids` that they speak of.

    Steps are skipped: their states are not the job's. Of several rows with the same id the last counts: sacct starts a
    new row when a job is requeued, and also when it goes on with fewer nodes after a node was lost (the row before then
    stays RESIZING for ever). Arrays and heterogeneous jobs are never submitted.
    """
    rows = dict(line.partition("|")[::2] for line in text.splitlines())
    return {job_id: parse_state(rows[job_id].partition("|")[0]) for job_id in job_ids if job_id in rows}
