"""The submitit plugin: `submitit.AutoExecutor(folder=…, cluster="orc")`.

submitit finds both classes through its own entry-point group. A job is one task in the batch step of
an N-node allocation: the supervisor, which starts everything else by itself. What submitit would do
with a job's signals, states and refusals does not fit that, and is overridden here.
"""
import dataclasses
import os
import shlex
import shutil
import signal
import sys
import time
import types
import uuid
from pathlib import Path
from typing import Any

from submitit.core import core, utils
from submitit.slurm.slurm import SlurmJobEnvironment

from jobs.spec.load import SpecError, from_dict, suggest
from orchestrator.submission import SlurmRequest, SubmissionError
from orchestrator.submission.client import job_states, run_sbatch
from orchestrator.submission.jobstate import FINAL
from orchestrator.submission.nodes import expand_nodelist
from orchestrator.submission.script import leaked_secrets, sbatch_script

# Every parameter is a field of SlurmRequest, so that YAML, plugin and script share their words.
PARAMETERS = tuple(field.name for field in dataclasses.fields(SlurmRequest))


class OrcWatcher(core.InfoWatcher):
    """Job states for submitit. Nothing is remembered as finished: Slurm may requeue a job after NODE_FAIL."""

    def update(self) -> None:
        if not self._registered:
            return
        self._num_calls += 1
        states = job_states(sorted(self._registered))
        self._info_dict |= {job_id: {"JobID": job_id, "State": state.upper()} for job_id, state in states.items()}
        self._last_status_check = time.time()

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        return self.get_info(job_id, mode=mode).get("State", "UNKNOWN")

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        return self.get_state(job_id, mode=mode).lower() in FINAL


class OrcJob(core.Job[core.R]):
    _cancel_command = "scancel"
    watcher = OrcWatcher(delay_s=30)


class OrcJobEnvironment(SlurmJobEnvironment):
    """What submitit's process finds inside the job."""

    def _handle_signals(self, paths: utils.JobPaths, submission: utils.DelayedSubmission) -> None:
        """Leaves the signals to the supervisor, which replaces these handlers with its own.

        submitit's would requeue the job and exit on USR2, and ignore SIGTERM, which is scancel's.
        """
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGUSR2, _too_early)

    def _requeue(self, countdown: int) -> None:
        raise RuntimeError("the supervisor decides about requeueing, not submitit")

    @property
    def num_tasks(self) -> int:
        return 1  # SLURM_NTASKS counts the nodes' agents

    @property
    def hostnames(self) -> list[str]:
        return list(expand_nodelist(os.environ.get("SLURM_JOB_NODELIST", ""))) or [self.hostname]


class OrcExecutor(core.PicklingExecutor):
    """Parameters: the fields of SlurmRequest, as `orc_<field>` of AutoExecutor, and submitit's generic ones.

    `python`: a shell command that starts Python on the nodes, e.g. inside a container. `log`: where the
    job writes, instead of submitit's file per job in `folder`.
    """

    job_class = OrcJob

    def __init__(self, folder: str | Path, *, python: str | None = None, log: Path | None = None) -> None:
        super().__init__(folder)
        self._python = python or shlex.quote(sys.executable)
        self._log = log or Path(str(utils.JobPaths(self.folder).stdout).replace("%t", "0"))

    @classmethod
    def affinity(cls) -> int:
        # 0: never chosen unasked, or AutoExecutor without a cluster would take it instead of "slurm"
        return -1 if shutil.which("sbatch") is None else 0

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return set(PARAMETERS)

    @classmethod
    def _equivalence_dict(cls) -> dict[str, str]:
        return {"name": "job_name", "timeout_min": "time_min", "mem_gb": "mem_gb", "nodes": "num_nodes",
                "cpus_per_task": "cpus_per_node", "gpus_per_node": "gpus_per_node", "tasks_per_node": "tasks_per_node"}

    def _convert_parameters(self, params: dict[str, Any]) -> dict[str, Any]:
        params = super()._convert_parameters(params)
        if params.pop("tasks_per_node", 1) != 1:
            raise ValueError("tasks_per_node: must be 1; the supervisor starts one agent per node and the agents "
                             "one rank per GPU")
        if not params.pop("stderr_to_stdout", True):
            raise ValueError("stderr_to_stdout: False is not supported; a job has one log, in the order of events")
        if "gpus_per_node" in params:
            params["gres"] = f"gpu:{params.pop('gpus_per_node')}"
        if float(params.get("mem_gb", 0)).is_integer() and "mem_gb" in params:
            params["mem_gb"] = int(params["mem_gb"])
        return params

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        """Raises ValueError for unknown names, SpecError (a ValueError) for all bad values at once."""
        unknown = [f"{name}: unknown parameter; {suggest(name, PARAMETERS)}" for name in kwargs
                   if name not in PARAMETERS]
        if unknown:
            raise ValueError("\n".join(unknown))
        before = dict(self.parameters)
        self.parameters.update(kwargs)  # in place: AutoExecutor shares this dict
        try:
            self._make_submission_file_text(self._submitit_command_str, "")
        except (SpecError, SubmissionError):
            self.parameters.clear()
            self.parameters.update(before)
            raise

    @property
    def request(self) -> SlurmRequest:
        return from_dict(SlurmRequest, self.parameters, origin="submission parameters")

    def script(self) -> str:
        """The sbatch script that submit() would send. Writes nothing."""
        return self._make_submission_file_text(self._submitit_command_str, "")

    @property
    def _submitit_command_str(self) -> str:
        return f"{self._python} -u -m submitit.core._submit {shlex.quote(str(self.folder))}"

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        script = sbatch_script(self.request, command=command, output=str(self._log))
        if leaked := leaked_secrets(script, os.environ):
            raise SubmissionError(f"the job script would contain the value of {', '.join(leaked)}, and Slurm keeps "
                                  "job scripts where others may read them; the job inherits your environment, so "
                                  "leave it out of cluster.slurm.setup and cluster.slurm.extra")
        return script

    def _internal_process_submissions(self, delayed_submissions: list[utils.DelayedSubmission]) -> list[core.Job]:
        return [self._submit_one(delayed) for delayed in delayed_submissions]

    def _submit_one(self, delayed: utils.DelayedSubmission) -> core.Job:
        """A job waits for its pickle, which gets its name from the job id. A refusal leaves nothing behind."""
        script = self.script()  # raises before anything is written
        wanted = {path for file in (self.folder / "x", self._log) for path in file.parents}
        created = sorted((path for path in wanted if not path.exists()), key=lambda path: len(path.parts))
        for path in created:
            path.mkdir(exist_ok=True)
        uid = uuid.uuid4().hex
        pickle, script_file = self.folder / f"{uid}.pkl", self.folder / f"{uid}.sh"
        try:
            delayed.set_timeout(self.request.time_min, 0)
            delayed.dump(pickle)
            script_file.write_text(script)
            job_id = run_sbatch(script_file)
        except BaseException:
            pickle.unlink(missing_ok=True)
            script_file.unlink(missing_ok=True)
            for path in reversed(created):
                path.rmdir()
            raise
        job = OrcJob(folder=self.folder, job_id=job_id, tasks=[0])
        job.paths.move_temporary_file(pickle, "submitted_pickle")
        job.paths.move_temporary_file(script_file, "submission_file")
        return job

    def _num_tasks(self) -> int:
        return 1

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return ["sbatch", "--parsable", str(submission_file_path)]

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        return (string if isinstance(string, str) else string.decode()).strip().partition(";")[0]


def _too_early(signum: int, frame: types.FrameType | None) -> None:
    # Not lost: the supervisor also asks Slurm for the job's end.
    print(f"orc: {signal.Signals(signum).name} arrived before the supervisor was ready", file=sys.stderr, flush=True)
