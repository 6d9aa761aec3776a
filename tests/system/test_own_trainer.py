"""Trainers of a user's own under supervision: called or exec'd, killed and resumed, silent and hanging."""
import json
import os

import subprocess
import sys

from pathlib import Path

import pytest

from jobs.spec.events import AttemptStarted, Decision, Diagnosis, RunEnded
from jobs.spec.reports import CheckpointSaved, FaultInjected, RankError, StepReport, ValidationReport
from orchestrator.monitoring.wandb_files import read_records
from tests.helpers.orc import ALL_END, POLICY, ROOT, TIMEOUT_S, command_run, events, orc, report, wait_for

STEPS = 12
DDP = ["configs.examples.ddp_trainer", "--steps", str(STEPS), "--save-every", "4", "--validate-every", "5"]
# how the DDP script is given → sections of the run file
FORMS = {
    "entrypoint": {"entrypoint": "configs.examples.ddp_trainer:main", "arguments": DDP[1:], "command": None},
    "command": {"command": [sys.executable, "-m", *DDP]},
}


def only(run_dir: Path, kind: type) -> list:
    return [event for event in events(run_dir) if isinstance(event, kind)]


def own_run(folder: Path, form: str = "entrypoint", **more) -> Path:
    folder.mkdir(exist_ok=True)
    return command_run(folder, "", nodes=1, ranks=2, policy=ALL_END, **FORMS[form], **more)


def log(run_dir: Path, *, attempt: int, rank: int = 0) -> str:
    return (run_dir / "attempts" / str(attempt) / "logs" / f"rank-{rank:05d}.log").read_text()


@pytest.mark.parametrize("form", ["entrypoint", pytest.param("command", marks=pytest.mark.slow)])
def test_a_ddp_script_that_loses_a_rank_ends_where_it_would_have_ended(tmp_path: Path, form: str) -> None:
    orc("run", own_run(tmp_path / "whole", form), check=True)
    fault = {"attempt": 1, "step": 7, "rank": 1, "kind": "sigkill"}
    orc("run", own_run(tmp_path / "hurt", form, faults=[fault]), check=True)
    whole, hurt = tmp_path / "whole" / "runs" / "tiny", tmp_path / "hurt" / "runs" / "tiny"
    assert log(whole, attempt=1).splitlines()[-1] == log(hurt, attempt=2).splitlines()[-1]  # the loss, to 10 digits
    assert [s.step for s in only(hurt, StepReport)] == [*range(1, 7), *range(5, STEPS + 1)]
    assert [s.loss for s in only(hurt, StepReport)][6:] == [s.loss for s in only(whole, StepReport)][4:]
    of_whole, of_hurt = ([(v.step, v.loss) for v in only(run_dir, ValidationReport)] for run_dir in (whole, hurt))
    assert [step for step, _ in of_whole] == [5, 10] and of_hurt == [of_whole[0], *of_whole]
    assert [f.fault for f in only(hurt, FaultInjected)] == ["sigkill"]
    assert [d.kind for d in only(hurt, Diagnosis)] == ["crash", "completed"]
    assert [d.resume_step for d in only(hurt, Decision)][0] == 4 == only(hurt, CheckpointSaved)[0].step
    made = report(hurt)
    assert (made["goodput"]["steps_productive"], made["goodput"]["steps_lost"]) == (STEPS, 2)


def test_a_script_that_is_started_behind_its_last_step_ends_well(tmp_path: Path) -> None:
    """As after a hang at its end, or a resume of what was complete."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for _ in range(2):
        subprocess.run([sys.executable, "-m", *DDP, "--folder", str(tmp_path)], check=True, cwd=ROOT, timeout=TIMEOUT_S,
                       env=os.environ | alone)


VALIDATES = ("import time\nfrom jobs import report\nreport.validation(0, loss=9)\n"
             "for step in range(1, 7):\n    time.sleep(0.02)\n    report.step(step, loss=1 / step, tokens=8)\n"
             "    if step % 2 == 0:\n        time.sleep(0.4)\n"
             "        report.validation(step, loss=2 / step, tokens=32)\n")


def test_a_trainer_tells_its_validations_and_no_step_takes_their_time(tmp_path: Path) -> None:
    orc("run", command_run(tmp_path, VALIDATES, nodes=1, wandb={"mode": "offline"}), check=True)
    run_dir = tmp_path / "runs" / "tiny"
    steps, (first, *validated) = only(run_dir, StepReport), only(run_dir, ValidationReport)
    assert (first.step, first.loss, first.tokens) == (0, 9.0, None)
    assert first.validation_s is steps[0].step_time_s is None
    losses = [(v.step, v.loss) for v in validated]
    assert losses == [(2, 1.0), (4, 0.5), (6, 1 / 3)] and {(v.rank, v.tokens) for v in validated} == {(0, 32)}
    validation_s = sum(v.validation_s for v in validated)
    assert validation_s >= 3 * 0.4
    # no second twice
    assert sum(s.step_time_s for s in steps[1:]) + validation_s <= validated[-1].t - first.t + 0.01
    made = report(run_dir)
    assert made["validation_losses"] == {str(step): loss for step, loss in [(0, 9.0), *losses]}
    assert made["goodput"]["validation_s"] == pytest.approx(validation_s, rel=0.25)
    assert "validation after step 6  loss 0.3333  32 tokens in " in orc("status", run_dir, check=True).stdout
    [log] = (run_dir / "wandb").glob("offline-run-*/*.wandb")
    rows = [{item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for record in read_records(log) if record.HasField("history")]
    assert [(row["val/step"], row["val/loss"]) for row in rows if "val/step" in row] == [(0, 9.0), *losses]
    assert ["val/validation_s" in row for row in rows if "val/step" in row] == [False, True, True, True]


GARBAGE = ["step('x')", "step(-1)", "step(1.5)", "step(2**70)", "step(1, tokens='many')", "step(1, loss='low')",
           "step(1, lr=[])", "checkpoint(None)", "validation(1, loss=None)", "validation(-1, loss=1)",
           "validation(1, loss=1, tokens='many')"]


def test_garbage_is_told_to_who_reports_it_and_to_nobody_else(tmp_path: Path) -> None:
    """One that was sent would end the connection, and with it all reports behind it."""
    calls = "".join(f"try:\n    report.{call}\nexcept ValueError as error:\n    print(error)\n" for call in GARBAGE)
    run_file = command_run(tmp_path, f"from jobs import report\n{calls}report.step(3, loss=0.5)\n", nodes=1, ranks=1)
    orc("run", run_file, check=True)
    run_dir = tmp_path / "runs" / "tiny"
    assert len(log(run_dir, attempt=1).splitlines()) == len(GARBAGE)
    assert [(s.step, s.loss) for s in only(run_dir, StepReport)] == [(3, 0.5)]


# what the script does, in its own words (all but the first are slow) → kind and summary of the first diagnosis
ENDS = {
    "an exception": ("raise KeyError('lr')", "crash", "raised KeyError: 'lr'"),
    "an exit code": ("sys.exit(9)", "crash", "ended with exit code 9"),
    "a signal": ("os.kill(os.getpid(), signal.SIGSEGV)", "crash", "was killed by SIGSEGV"),
}
SCRIPT = ("import os, signal, sys, time\nattempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n\n"
          "def main():\n    if attempt == 0 and os.environ['RANK'] == '1':\n        {act}\n"
          "    time.sleep(30 * (1 - attempt))\n")


@pytest.mark.parametrize("act, kind, summary", [pytest.param(*case, id=name, marks=[pytest.mark.slow] * (n > 0))
                                                for n, (name, case) in enumerate(ENDS.items())])
def test_an_entry_point_is_judged_by_how_its_process_ends(tmp_path: Path, act: str, kind: str, summary: str) -> None:
    (tmp_path / "my_script.py").write_text(SCRIPT.format(act=act))
    run_file = command_run(tmp_path, "", nodes=1, command=None, entrypoint="my_script:main", workdir=str(tmp_path))
    orc("run", run_file, check=True)
    first, last = only(tmp_path / "runs" / "tiny", Diagnosis)
    assert (first.kind, last.kind) == (kind, "completed") and summary in first.summary


# what is wrong with the entry point → what the run says of it
REFUSED = {
    "no module": ("nosuch_script:main", "", ["entrypoint: 'nosuch_script:main': no module 'nosuch_script'"]),
    "no function": ("my_script:train", "def main(): pass", ["my_script has no 'train'; it has main"]),
    "a broken import": ("my_script:main", "1 / 0", ["cannot be imported", "ZeroDivisionError"]),
}


@pytest.mark.parametrize("entrypoint, code, parts", REFUSED.values(), ids=REFUSED)
def test_a_wrong_entry_point_ends_the_run_with_its_reason(tmp_path: Path, entrypoint: str, code: str, parts) -> None:
    (tmp_path / "my_script.py").write_text(code + "\n")
    run_file = command_run(tmp_path, "", nodes=1, ranks=1, command=None, entrypoint=entrypoint, workdir=str(tmp_path))
    done = orc("run", run_file)
    assert done.returncode == 1 and "Traceback" not in done.stdout
    told = " ".join(error.traceback + error.message for error in only(tmp_path / "runs" / "tiny", RankError))
    assert all(part in told for part in parts), told


HANGS = ("import os, time\nfrom jobs import report\nfirst = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
         "for step in range(1, 4):\n    report.step(step)\n"
         "    if first and step == 2 and os.environ['RANK'] == '1': time.sleep(300)\n"
         "if first: time.sleep(300)\n")


def test_a_trainer_that_reports_and_stops_reporting_hangs(tmp_path: Path) -> None:
    run_file = command_run(tmp_path, HANGS, nodes=1, policy=POLICY | {"hang_s": 3.0})
    orc("run", run_file, check=True)
    first, last = only(tmp_path / "runs" / "tiny", Diagnosis)
    assert (first.kind, first.rank, last.kind) == ("hang", 1, "completed")
    assert "furthest behind: rank 1 on node-0: in step of step 3" in first.summary and len(first.evidence) == 2


# what a script that reports nothing writes; policy.silence_s → whether its silence is taken for a hang
SILENT = {
    "unknown is not failed": ("", None, False),
    "told to judge by output": ("print('started', flush=True); ", 2.0, True),
    "output is a sign of life": ("[(print('.', flush=True), time.sleep(0.1)) for _ in range(60)]; first = False; ", 4.0,
                                 False),
}


@pytest.mark.parametrize("says, silence_s, hangs", SILENT.values(), ids=SILENT)
def test_silence_is_judged_only_where_it_means_something(tmp_path: Path, says: str, silence_s, hangs: bool) -> None:
    program = ("import os, time\nfirst = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n" + says
               + f"time.sleep({300 if hangs else 4} if first else 0)")
    policy = POLICY | {"hang_s": 1.0, "silence_s": silence_s}
    orc("run", command_run(tmp_path, program, nodes=1, ranks=1, policy=policy), check=True)
    kinds = [d.kind for d in only(tmp_path / "runs" / "tiny", Diagnosis)]
    assert kinds == (["hang", "completed"] if hangs else ["completed"])


def test_an_own_trainer_is_stopped_and_resumed_like_any_other(tmp_path: Path) -> None:
    program = ("import os, time\nfrom jobs import report\nfrom pathlib import Path\n"
               "mark = Path(os.environ['ORC_RUN_DIR']) / 'mark'\n"
               "start = int(mark.read_text()) if mark.exists() else 0\n"
               "for step in range(start + 1, 100 if start == 0 else 6):\n"
               "    report.step(step, loss=1 / step)\n    mark.write_text(str(step)); report.checkpoint(step)\n"
               "    if step == 3 and start == 0: time.sleep(300)\n")
    run_dir = tmp_path / "runs" / "tiny"
    orc("run", command_run(tmp_path, program, nodes=1, ranks=1), "--detach", check=True)
    wait_for(lambda: [s for s in only(run_dir, CheckpointSaved) if s.step == 3], what="the third checkpoint")
    assert "step 3" in orc("status", run_dir, check=True).stdout
    orc("stop", run_dir, check=True)
    wait_for(lambda: only(run_dir, RunEnded), what="the end")
    assert orc("resume", run_dir).returncode == 0
    assert [s.step for s in only(run_dir, StepReport)] == [1, 2, 3, 4, 5]
    assert [a.resume_step for a in only(run_dir, AttemptStarted)] == [None, 3]
    assert json.loads(orc("report", run_dir, "--json", check=True).stdout)["state"] == "completed"
    assert "holds step 5" in orc("status", run_dir, check=True).stdout


def test_a_script_without_orc_reports_to_nobody() -> None:
    program = ("import sys; from jobs import report; report.step(1, loss=0.5); report.checkpoint(1); "
               "report.validation(1, loss=0.5); "
               "print('torch' in sys.modules)")
    env = {name: value for name, value in os.environ.items() if not name.startswith("ORC_")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env=env)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
