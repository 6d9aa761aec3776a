"""The script that accepts a GPU, tried without one."""
import subprocess
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[1] / "gpu" / "acceptance.sh"


@pytest.mark.skipif(torch.version.cuda is not None, reason="this build of torch may find a GPU")
def test_without_a_gpu_it_says_so_and_fails():
    done = subprocess.run([SCRIPT], capture_output=True, text=True)
    assert done.returncode == 1
    assert "finds no GPU here; --device cpu --tiny tries" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_toy_on_the_cpu_is_trained_killed_resumed_and_accepted():
    done = subprocess.run([SCRIPT, "--device", "cpu", "--tiny"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "accepted: trained, killed, resumed" in done.stdout
    assert "written by hand" in done.stdout and "restart from step 16" in done.stdout
