"""The W&B reader's process: started again when killed, not for ever, and not at all where it is not wanted."""
import os
from pathlib import Path

import psutil
import pytest

from jobs.spec.rundir import RunDir
from orchestrator.supervision.reader import RESTARTS, WandbReader


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    (tmp_path / "logs").mkdir()
    return RunDir(tmp_path)


def kill_the_reader() -> None:
    for child in psutil.Process().children():
        if "orchestrator.monitoring.wandb" in child.cmdline():
            child.kill()
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and left for the reader's owner to reap


def test_a_killed_reader_is_started_again_but_not_for_ever(run_dir: RunDir) -> None:
    reader = WandbReader(run_dir, wanted=True)
    reader.start()
    try:
        assert reader.revive() is None  # alive: nothing to do
        for restart in range(1, RESTARTS + 1):
            kill_the_reader()
            assert f"started again ({restart} of {RESTARTS})" in reader.revive()
        kill_the_reader()
        assert reader.revive() is None
    finally:
        kill_the_reader()
    assert reader.wait() is None


def test_no_reader_where_wandb_is_disabled(run_dir: RunDir) -> None:
    reader = WandbReader(run_dir, wanted=False)
    reader.start()
    assert reader.revive() is None and reader.wait() is None and not run_dir.wandb.exists()
