"""The fork server's duty: everything is imported before it forks, and it is still fit to fork."""
import json
import os
import subprocess
import sys

# In a fresh process: preload, then a first step, optimizer update and checkpoint on forked ranks.
PROGRAM = """
import json, os, sys, tempfile
from pathlib import Path
from jobs.runtime import preload

preload()
threads = len(os.listdir("/proc/self/task"))
import torch
cuda = torch.cuda.is_initialized()
before = set(sys.modules)

def new_modules(spec):
    from tests.helpers.training import train_here
    helpers = set(sys.modules) - before
    train_here(spec)
    return sorted(set(sys.modules) - before - helpers)

from tests.helpers.ranks import run_ranks
from tests.helpers.training import job, layout
with tempfile.TemporaryDirectory() as folder:
    spec = job(Path(folder), layout(tp=2, pp=2, dp_shard=2))
    late = run_ranks(new_modules, world_size=8, args=(spec,))
print(json.dumps({"threads": threads, "cuda": cuda, "late": sorted({m for ms in late for m in ms})}))
"""


def test_after_preload_a_rank_imports_nothing_and_the_parent_can_fork():
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"threads": 1, "cuda": False, "late": []}
