"""Supervisor, agents and fork servers on virtual nodes: what is noticed, what is restarted, what ends, what is left."""
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from jobs.spec.events import AgentJoined, AgentLost, AttemptStarted, Decision, Diagnosis, RunEnded
from jobs.spec.reports import RankExit, StepReport
from jobs.spec.rundir import RunDir
from orchestrator.load import load
from orchestrator.submission.prepare import prepare
from tests.helpers.orc import (ALL_END, POLICY, ROOT, TIMEOUT_S, command_run, events, orc, report, training_run,
                               wait_for)

FIRST_ATTEMPT = ("import os, sys, time\nfirst = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
                 "rank = os.environ['RANK']\n")
SLEEPS = "\ntime.sleep(60 if first else 0.2)\n"

# name, what a rank does in its first attempt (the second always completes), kind, summary
ONE_FAULT = [
    ("sigkill", "if first and rank == '2': os.kill(os.getpid(), 9)", "crash", "rank 2 on node-1 was killed by SIGKILL"),
    ("segfault", "if first and rank == '1': os.kill(os.getpid(), 11)", "crash",
     "rank 1 on node-0 was killed by SIGSEGV"),
    ("exit code", "if first and rank == '3': sys.exit(17)", "crash", "rank 3 on node-1 ended with exit code 17"),
    ("exception", "if first and rank == '0': raise KeyError('lr')", "crash", "rank 0 on node-0 raised KeyError: 'lr'"),
    ("agent death", "if first and rank == '2': os.kill(int(os.environ['ORC_AGENT_PID']), 9)", "node_failure",
     "the agent of node-1 is lost"),
]


def only(run_dir: Path, kind: type) -> list:
    return [event for event in events(run_dir) if isinstance(event, kind)]


@pytest.mark.parametrize("program, kind, summary", [c[1:] for c in ONE_FAULT], ids=[c[0] for c in ONE_FAULT])
def test_one_fault_costs_one_attempt(tmp_path: Path, program: str, kind: str, summary: str) -> None:
    run_file = command_run(tmp_path, FIRST_ATTEMPT + program + SLEEPS)
    done = orc("run", run_file, check=True)
    run_dir = tmp_path / "runs" / "tiny"
    first, last = only(run_dir, Diagnosis)
    assert (first.kind, last.kind) == (kind, "completed") and summary in first.summary
    assert [d.act for d in only(run_dir, Decision)] == ["restart", "finish"]
    assert summary in done.stdout


def test_survivors_of_a_crash_are_ended_before_the_next_attempt(tmp_path: Path) -> None:
    program = (FIRST_ATTEMPT + "open(f'{os.environ[\"ORC_RUN_DIR\"]}/alive-{os.getpid()}-{rank}', 'w')\n"
               "if not first:\n"
               "    pids = [n.split('-')[1] for n in os.listdir(os.environ['ORC_RUN_DIR']) if n.startswith('alive')]\n"
               "    mates = open(f'/proc/{os.getppid()}/task/{os.getppid()}/children').read().split()\n"
               "    old = [p for p in pids if p in mates and os.getpid() != int(p)]\n"
               "    assert len(old) < 2, old\n"
               "if first and rank == '0': time.sleep(1); sys.exit(1)" + SLEEPS)
    orc("run", command_run(tmp_path, program), check=True)


def test_a_crash_loop_ends_within_its_budget(tmp_path: Path) -> None:
    run_file = command_run(tmp_path, "import sys; sys.exit(3)", policy={"max_restarts": 2, "backoff_s": 0.05})
    done = orc("run", run_file)
    run_dir = tmp_path / "runs" / "tiny"
    assert done.returncode == 1
    assert len(only(run_dir, AttemptStarted)) == 3
    assert "policy.max_restarts is 2" in only(run_dir, RunEnded)[0].reason


def test_the_same_exception_twice_is_reported_as_the_users_with_its_traceback(tmp_path: Path) -> None:
    run_file = command_run(tmp_path, "import os\nif os.environ['RANK'] == '1':\n    raise ValueError('row 7')\n"
                           "import time; time.sleep(60)")
    done = orc("run", run_file)
    run_dir = tmp_path / "runs" / "tiny"
    assert done.returncode == 1
    last = only(run_dir, Diagnosis)[-1]
    assert last.kind == "user_error" and len(only(run_dir, AttemptStarted)) == 2
    assert "ValueError: row 7" in last.evidence and any("Traceback" in line for line in last.evidence)
    assert "ValueError: row 7" in orc("report", run_dir, check=True).stdout


def test_an_exception_inside_the_trainer_is_told_with_its_step(tmp_path: Path) -> None:
    faults = [{"attempt": n, "step": 3, "rank": 1, "kind": "exception"} for n in (1, 2)]
    run_file = training_run(tmp_path, nodes=1, ranks=2, faults=faults, parallel={"dp_shard": 2})
    assert orc("run", run_file).returncode == 1
    last = only(tmp_path / "runs" / "tiny", Diagnosis)[-1]
    assert (last.kind, last.rank, last.step) == ("user_error", 1, 2)
    assert "InjectedFault" in last.summary


def test_stop_ends_every_process_and_resume_continues(tmp_path: Path) -> None:
    run_file = training_run(tmp_path, nodes=2, ranks=1, steps=5000, checkpoint={"interval_steps": 5, "keep": 2})
    run_dir = tmp_path / "runs" / "tiny"
    orc("submit", run_file, check=True)
    wait_for(lambda: len(list(run_dir.glob("checkpoints/step-????????"))) > 1, what="two checkpoints")
    assert orc("status", run_dir, "--json", check=True).stdout.find('"state": "running"') > 0
    assert orc("resume", run_dir).returncode == 2  # two supervisors must not work on one run
    members = processes_of(run_dir)
    assert len(members) >= 7  # supervisor, and per node an agent, a fork server and a rank
    assert "stop: accepted" in orc("stop", run_dir, "--reason", "enough", check=True).stdout
    ended = wait_for(lambda: only(run_dir, RunEnded), what="the end of the run")
    assert ended[0].state == "stopped" and "enough" in ended[0].reason
    wait_for(lambda: not [p for p in members if p.is_running()], what="the end of all its processes")
    assert not (run_dir / "supervisor.json").exists()

    steps_before = max(int(step) for step in report(run_dir)["losses"])
    shorter = (run_dir / "config.yaml").read_text().replace("steps: 5000", f"steps: {steps_before + 3}")
    (run_dir / "config.yaml").write_text(shorter)
    orc("resume", run_dir, check=True)
    seen = report(run_dir)
    assert (seen["state"], seen["final_step"]) == ("completed", steps_before + 3)
    assert [a["n"] for a in seen["attempts"]] == [1, 2] and seen["attempts"][1]["first_step"] % 5 == 1


def test_ctrl_c_stops_the_run(tmp_path: Path) -> None:
    run_file = command_run(tmp_path, "import time; time.sleep(300)")
    run_dir = tmp_path / "runs" / "tiny"
    following = subprocess.Popen([sys.executable, "-m", "orchestrator.cli", "run", str(run_file)], cwd=ROOT,
                                 stdout=subprocess.PIPE, text=True)
    wait_for(lambda: len(list(run_dir.glob("attempts/1/logs/*.log"))) == 4, what="four ranks")
    following.send_signal(signal.SIGINT)
    output, _ = following.communicate(timeout=TIMEOUT_S)
    assert following.returncode == 3 and "stopped by Ctrl-C" in output
    assert only(run_dir, RunEnded)[0].state == "stopped"


def test_a_dead_supervisor_is_reported_as_unknown_and_resume_takes_over(tmp_path: Path) -> None:
    run_file = command_run(tmp_path, FIRST_ATTEMPT + SLEEPS, nodes=1)
    run_dir = tmp_path / "runs" / "tiny"
    orc("submit", run_file, check=True)
    wait_for(lambda: len(list(run_dir.glob("attempts/1/logs/*.log"))) == 2, what="two ranks")
    supervisor = next(p for p in processes_of(run_dir) if "orchestrator.supervision" in p.cmdline())
    agents = [p for p in processes_of(run_dir) if "jobs.agent" in p.cmdline()]
    supervisor.kill()
    wait_for(lambda: orc("status", run_dir, "--json").stdout.find('"state": "unknown"') > 0, what="an unknown state")
    refused = orc("resume", run_dir)
    assert refused.returncode == 2 and "may still be at work" in refused.stderr and agents[0].is_running()
    assert "was cancelled" in orc("stop", run_dir, check=True).stdout
    assert not any(agent.is_running() for agent in agents)
    orc("resume", run_dir, check=True)
    assert [a["n"] for a in report(run_dir)["attempts"]] == [1, 2]


def test_ranks_see_torchrun_and_nothing_of_slurm(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import json, os
        json.dump(dict(os.environ), open(f"{os.environ['ORC_RUN_DIR']}/env-{os.environ['RANK']}.json", "w"))
    """)
    orc("run", command_run(tmp_path, program), check=True, SLURM_JOB_ID="7", PMI_RANK="0", SUBMITIT_EXECUTOR="x",
        MINE="1")
    run_dir = tmp_path / "runs" / "tiny"
    seen = [json.loads((run_dir / f"env-{rank}.json").read_text()) for rank in range(4)]
    assert [(e["RANK"], e["LOCAL_RANK"], e["GROUP_RANK"], e["WORLD_SIZE"], e["LOCAL_WORLD_SIZE"]) for e in seen] == [
        ("0", "0", "0", "4", "2"), ("1", "1", "0", "4", "2"), ("2", "0", "1", "4", "2"), ("3", "1", "1", "4", "2")]
    assert len({(e["MASTER_ADDR"], e["MASTER_PORT"]) for e in seen}) == 1
    assert all(e["MINE"] == "1" and e["TORCHELASTIC_RUN_ID"] == "tiny" for e in seen)
    assert not [name for e in seen for name in e if name.startswith(("SLURM_", "PMI_", "SUBMITIT_"))]


def test_children_of_ranks_are_ended_with_the_attempt(tmp_path: Path) -> None:
    program = (FIRST_ATTEMPT + "import subprocess\n"
               "p = subprocess.Popen(['sleep', '987'], start_new_session=True)\n"
               "open(f'{os.environ[\"ORC_RUN_DIR\"]}/child-{p.pid}', 'w')\n"
               "while sum(name.startswith('child-') for name in os.listdir(os.environ['ORC_RUN_DIR'])) < 2:\n"
               "    time.sleep(0.05)\n"
               "if first and rank == '0': sys.exit(1)\n" + SLEEPS)
    orc("run", command_run(tmp_path, program, nodes=1), check=True)
    children = [int(p.name.split("-")[1]) for p in (tmp_path / "runs" / "tiny").glob("child-*")]
    assert len(children) == 4 and not [pid for pid in children if psutil.pid_exists(pid)]


def test_exit_codes_are_exact(tmp_path: Path) -> None:
    run_file = command_run(tmp_path, "import os, sys, signal\nr = int(os.environ['RANK'])\n"
                           "sys.exit(40 + r) if r < 3 else os.kill(os.getpid(), signal.SIGABRT)",
                           policy=ALL_END | {"max_restarts": 0})
    assert orc("run", run_file).returncode == 1
    exits = {e.rank: (e.exit_code, e.signal) for e in only(tmp_path / "runs" / "tiny", RankExit)}
    assert exits == {0: (40, None), 1: (41, None), 2: (42, None), 3: (None, signal.SIGABRT)}


def test_an_agent_that_lost_its_connection_comes_back_and_nothing_is_lost(tmp_path: Path) -> None:
    run_file = training_run(tmp_path, nodes=2, ranks=1, steps=100_000, policy=POLICY | {"reconnect_s": 600.0},
                            checkpoint={"interval_steps": 100_000})
    run_dir = tmp_path / "runs" / "tiny"
    orc("submit", run_file, check=True)
    wait_for(lambda: only(run_dir, StepReport), what="training")
    agent = next(p for p in processes_of(run_dir) if "jobs.agent" in p.cmdline())
    cut, = [c for c in agent.net_connections(kind="tcp") if c.status == "ESTABLISHED"]
    killed = subprocess.run(["ss", "--kill", "dst", f"{cut.raddr.ip}:{cut.raddr.port}", "src",
                             f"{cut.laddr.ip}:{cut.laddr.port}"], check=True, capture_output=True, text=True).stdout
    assert "ESTAB" in killed
    before = only(run_dir, StepReport)[-1].step
    wait_for(lambda: only(run_dir, StepReport)[-1].step > before + 30, what="30 further steps")
    orc("stop", run_dir, check=True)
    wait_for(lambda: only(run_dir, RunEnded), what="the end")
    steps = [event.step for event in only(run_dir, StepReport)]
    assert steps == [*range(1, len(steps) + 1)] and len(only(run_dir, AttemptStarted)) == 1
    assert not only(run_dir, AgentLost) and len(only(run_dir, AgentJoined)) == 2


def test_an_agent_that_comes_back_too_late_ends_itself(tmp_path: Path) -> None:
    policy = {"heartbeat_s": 0.2, "heartbeat_timeout_s": 5.0, "reconnect_s": 1.0}
    program = FIRST_ATTEMPT + ("while first or not os.path.exists(os.environ['ORC_RUN_DIR'] + '/late-has-ended'):\n"
                               "    time.sleep(0.05)")
    run_file = command_run(tmp_path, program, nodes=2, ranks=1, policy=policy)
    run_dir = tmp_path / "runs" / "tiny"
    orc("submit", run_file, check=True)
    wait_for(lambda: len(list(run_dir.glob("attempts/1/logs/*.log"))) == 2, what="two ranks")
    late = next(p for p in processes_of(run_dir) if "jobs.agent" in p.cmdline() and "node-1" in p.cmdline())
    late.suspend()
    wait_for(lambda: len(list(run_dir.glob("attempts/2/logs/*.log"))) == 2, what="the second attempt")
    late.resume()
    wait_for(lambda: not late.is_running(), what="the late agent's end")
    (run_dir / "late-has-ended").touch()
    ended = wait_for(lambda: only(run_dir, RunEnded), what="the end of the run")
    assert ended[0].state == "completed" and len(only(run_dir, AttemptStarted)) == 2
    assert len(only(run_dir, AgentJoined)) == 3


def test_of_two_resumes_at_once_one_is_refused(tmp_path: Path) -> None:
    program = FIRST_ATTEMPT + ("if first: sys.exit(1)\n"
                               "while not os.path.exists(os.environ['ORC_RUN_DIR'] + '/one-is-refused'):\n"
                               "    time.sleep(0.05)")
    run_file = command_run(tmp_path, program, nodes=1, policy={"max_restarts": 0})
    run_dir = tmp_path / "runs" / "tiny"
    assert orc("run", run_file).returncode == 1
    both = [subprocess.Popen([sys.executable, "-m", "orchestrator.cli", "resume", str(run_dir)], cwd=ROOT,
                             stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    wait_for(lambda: any(p.poll() is not None for p in both), what="a refusal")
    (run_dir / "one-is-refused").touch()
    refusals = [p.communicate(timeout=TIMEOUT_S)[1] for p in both]
    assert sorted(p.returncode for p in both) == [0, 2] and any("`orc stop` ends it" in text for text in refusals)
    assert report(run_dir)["state"] == "completed" and len(only(run_dir, AttemptStarted)) == 2
    again = orc("resume", run_dir)
    assert again.returncode == 2 and "has completed" in again.stderr


def test_a_torn_history_is_followed_and_continued(tmp_path: Path) -> None:
    run_file = command_run(tmp_path, FIRST_ATTEMPT + "sys.exit(1 if first else 0)", nodes=1, policy={"max_restarts": 0})
    run_dir = tmp_path / "runs" / "tiny"
    orc("run", run_file)
    for name in ("events.jsonl", "submissions.jsonl"):
        with (run_dir / name).open("a") as torn:
            torn.write('{"event": "decis')
    orc("resume", run_dir, check=True)
    assert report(run_dir)["state"] == "completed"


def test_a_run_whose_data_is_gone_can_be_seen_and_stopped(tmp_path: Path) -> None:
    run_file = training_run(tmp_path, nodes=1, ranks=1, steps=100000, checkpoint={"interval_steps": 1000})
    run_dir = tmp_path / "runs" / "tiny"
    orc("submit", run_file, check=True)
    wait_for(lambda: only(run_dir, AttemptStarted), what="the first attempt")
    shutil.rmtree(tmp_path / "text")
    assert '"state": "running"' in orc("status", run_dir, "--json", check=True).stdout
    assert "stop: accepted" in orc("stop", run_dir, check=True).stdout
    wait_for(lambda: only(run_dir, RunEnded), what="the end")


def test_a_lost_loss_ends_the_run_and_keeps_what_came_before(tmp_path: Path) -> None:
    faults = [{"attempt": 1, "step": 5, "rank": 0, "kind": "nan"}]
    run_file = training_run(tmp_path, nodes=1, ranks=2, steps=8, faults=faults,
                            parallel={"dp_shard": 2, "zero_stage": 3})
    assert orc("run", run_file).returncode == 1
    run_dir = tmp_path / "runs" / "tiny"
    found = only(run_dir, Diagnosis)[0]
    assert found.kind == "divergence" and found.step in (5, 6)  # weights gathered ahead still serve one step
    assert RunDir(run_dir).committed_steps() == [2, 4]
    assert None in report(run_dir)["losses"].values()


def supervise(run_dir: RunDir, *, launcher: str) -> int:
    """A supervisor with a launcher of the test's own, given as the source of a class derived from LocalLauncher."""
    source = ("import sys, time\nfrom pathlib import Path\nfrom orchestrator.submission import local\n"
              "from orchestrator.supervision.supervisor import main\n"
              f"{launcher}\nsys.exit(main(Path(sys.argv[1]), Own(1)))")
    return subprocess.run([sys.executable, "-c", source, str(run_dir.path)], cwd=ROOT, timeout=TIMEOUT_S).returncode


def test_an_agent_that_cannot_start_is_told_at_once(tmp_path: Path) -> None:
    run_file = command_run(tmp_path, "pass", nodes=1, policy={"max_restarts": 0, "agent_start_s": 3600.0})
    run_dir = prepare(load(run_file), None)
    code = supervise(run_dir, launcher=(
        "class Own(local.LocalLauncher):\n    pass\n"
        "local.agent_argv = lambda *a, **k: [sys.executable, '-c', 'raise SystemExit(\"no agent here\")']"))
    assert code == 1
    found = only(run_dir.path, Diagnosis)[0]
    assert found.kind == "node_failure" and "its start failed" in found.summary
    assert "no agent here" in run_dir.agent_log("node-0").read_text()


def test_the_end_of_the_allocation_is_seen_without_a_signal(tmp_path: Path) -> None:
    # agents that have not connected yet are waited for by nobody
    run_file = command_run(tmp_path, "import time; time.sleep(300)", nodes=1,
                           policy=POLICY | {"heartbeat_timeout_s": 4.0 * TIMEOUT_S})
    run_dir = prepare(load(run_file), None)
    code = supervise(run_dir, launcher=("class Own(local.LocalLauncher):\n"
                                        "    async def end_time(self):\n        return time.time() + 100"))
    assert code == 3
    assert only(run_dir.path, Diagnosis)[0].kind == "time_limit"
    assert "orc resume" in only(run_dir.path, Decision)[0].reason


def processes_of(run_dir: Path) -> list[psutil.Process]:
    """Every process that works for this run: those that name it, and all their descendants."""
    named = [p for p in psutil.process_iter() if p.pid != os.getpid() and _names(p, str(run_dir))]
    family = {p.pid: p for root in named for p in [root, *root.children(recursive=True)]}
    return list(family.values())


def _names(process: psutil.Process, text: str) -> bool:
    try:
        return any(text in part for part in process.cmdline())
    except psutil.Error:
        return False
