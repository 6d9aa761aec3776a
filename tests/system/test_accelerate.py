"""A real Hugging Face Accelerate script under supervision. It runs with the Python that ORC_TEST_ACCELERATE_PYTHON
names or, without it, with this one if it has accelerate; else the test is skipped."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.spec.events import Decision, Diagnosis
from jobs.spec.reports import StepReport
from tests.helpers.orc import ROOT, command_run, events, orc

pytestmark = pytest.mark.slow
PYTHON = os.environ.get("ORC_TEST_ACCELERATE_PYTHON", sys.executable)
STEPS = 12


@pytest.fixture(scope="module", autouse=True)
def accelerate() -> None:
    if subprocess.run([PYTHON, "-c", "import accelerate"], capture_output=True).returncode:
        pytest.skip(f"{PYTHON} has no accelerate; set ORC_TEST_ACCELERATE_PYTHON to one that has")


def run(folder: Path, **more) -> Path:
    folder.mkdir()
    command = [PYTHON, str(ROOT / "configs" / "examples" / "accelerate_trainer.py"), "--steps", str(STEPS),
               "--save-every", "4", "--folder", str(folder / "saved")]
    orc("run", command_run(folder, "", nodes=1, ranks=2, command=command, **more), check=True, PYTHONPATH=str(ROOT))
    return folder / "runs" / "tiny"


def only(run_dir: Path, kind: type) -> list:
    return [event for event in events(run_dir) if isinstance(event, kind)]


def test_an_accelerate_script_that_loses_a_rank_ends_where_it_would_have_ended(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    hurt = run(tmp_path / "hurt", faults=[{"attempt": 1, "step": 7, "rank": 1, "kind": "sigkill"}])
    assert [d.kind for d in only(hurt, Diagnosis)] == ["crash", "completed"]
    assert only(hurt, Decision)[0].resume_step == 4
    assert [s.step for s in only(hurt, StepReport)] == [*range(1, 7), *range(5, STEPS + 1)]
    losses = [[s.loss for s in only(run_dir, StepReport)] for run_dir in (whole, hurt)]
    assert len(losses[0]) == STEPS and losses[1][6:] == losses[0][4:]
