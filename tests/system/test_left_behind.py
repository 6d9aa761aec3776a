"""Nothing outlives a run, and nothing is left hanging: daemons of daemons, a stopped fork server, a Ctrl-C between
submission and following."""
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from jobs.spec.events import AttemptStarted, Diagnosis, RunEnded
from jobs.spec.reports import StepReport
from tests.helpers.orc import POLICY, ROOT, TIMEOUT_S, command_run, events, orc, wait_for

FIRST = "import os, sys, time\nfirst = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
# each daemon leaves its parent's session and starts the next one
DAEMONS = FIRST + """
import subprocess
nested = '''
import os, subprocess, sys, time
depth = int(sys.argv[2])
open(f"{os.environ['ORC_RUN_DIR']}/daemon-{os.getpid()}", "w")
if depth:
    subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[1], str(depth - 1)], start_new_session=True)
if depth != 1:
    time.sleep(987)
'''
subprocess.Popen([sys.executable, '-c', nested, nested, '3'], start_new_session=True)
run_dir = os.environ['ORC_RUN_DIR']
while sum(name.startswith('daemon-') for name in os.listdir(run_dir)) < 4 * (1 if first else 2):
    time.sleep(0.05)
sys.exit(1 if first else 0)
"""


def only(run_dir: Path, kind: type) -> list:
    return [event for event in events(run_dir) if isinstance(event, kind)]


def test_daemons_of_daemons_end_with_their_attempt(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "tiny"
    orc("run", command_run(tmp_path, DAEMONS, nodes=1, ranks=1), check=True)
    daemons = [int(path.name.split("-")[1]) for path in run_dir.glob("daemon-*")]
    assert len(daemons) == 8 and not [pid for pid in daemons if psutil.pid_exists(pid)]


REPORTS = FIRST + "from jobs import report\nreport.step(1)\ntime.sleep(600 if first else 0)\n"


@pytest.mark.slow
def test_a_stopped_fork_server_costs_one_attempt(tmp_path: Path) -> None:
    run_file = command_run(tmp_path, REPORTS, nodes=1, ranks=2, policy=POLICY | {"hang_s": 3.0})
    run_dir = tmp_path / "runs" / "tiny"
    orc("submit", run_file, check=True)
    wait_for(lambda: only(run_dir, StepReport), what="a step")
    server = next(p for p in psutil.process_iter() if _is_fork_server_of(p, run_dir))
    server.suspend()
    ended = wait_for(lambda: only(run_dir, RunEnded), what="the end")
    assert ended[0].state == "completed" and [d.kind for d in only(run_dir, Diagnosis)] == ["hang", "completed"]
    assert len(only(run_dir, AttemptStarted)) == 2 and not server.is_running()


def _is_fork_server_of(process: psutil.Process, run_dir: Path) -> bool:
    try:
        return "jobs.forkserver" in process.cmdline() and str(run_dir) in process.parent().cmdline()
    except (psutil.NoSuchProcess, AttributeError):
        return False


# a Ctrl-C that comes at the worst moment: the job is submitted, nobody follows it yet
INTERRUPTED = """
import os, signal, sys
from orchestrator.cli import main, runs
submit = runs.submit_run
def submit_run(*args):
    job_id = submit(*args)
    os.kill(os.getpid(), signal.SIGINT)
    return job_id
runs.submit_run = submit_run
sys.argv = ["orc", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize("verb", ["run", "resume"])
def test_ctrl_c_between_submission_and_following_stops_the_run(tmp_path: Path, verb: str) -> None:
    run_file = command_run(tmp_path, FIRST + "time.sleep(600)", nodes=1, ranks=1)
    run_dir = tmp_path / "runs" / "tiny"
    if verb == "resume":
        orc("submit", run_file, check=True)
        wait_for(lambda: only(run_dir, AttemptStarted), what="the first attempt")
        orc("stop", run_dir, check=True)
        wait_for(lambda: only(run_dir, RunEnded), what="the first end")
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, verb, str(run_file if verb == "run" else run_dir)],
                          cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S,
                          env=os.environ | {"COLUMNS": "120"})
    assert done.returncode == 3 and "stopped" in done.stdout, done.stdout + done.stderr  # whoever it was that answered
    assert only(run_dir, RunEnded)[-1].state == "stopped"
    wait_for(lambda: not [p for p in psutil.process_iter() if str(run_dir) in _cmdline(p)], what="an empty machine")


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
