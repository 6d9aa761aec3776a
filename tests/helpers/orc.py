"""The command line as a person uses it: a process, its output and its exit code. And small run files."""
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from jobs.spec.events import Event
from jobs.spec.rundir import RunDir
from orchestrator.monitoring.history import read_history

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 900  # for what hangs: no machine is so slow

MODEL = {"name": "tiny", "vocab_size": 256, "dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
         "ffn_dim": 64}
# waits shortened to what one machine needs, so that a lost agent does not cost a test 15 s
POLICY = {"heartbeat_s": 0.3, "heartbeat_timeout_s": 60.0, "reconnect_s": 1.0, "settle_s": 0.5, "backoff_s": 0.1,
          "kill_grace_s": 1.0, "sample_s": 2.0}
# of ranks that end by themselves when one is lost: all that they have to tell is told, however slow the machine is
ALL_END = POLICY | {"settle_s": 4.0 * TIMEOUT_S}


def orc(*args: str | Path, check: bool = False, timeout: float = TIMEOUT_S, **env: str) -> subprocess.CompletedProcess:
    """Run `orc ARGS`. `check` fails with everything it printed."""
    done = subprocess.run([sys.executable, "-m", "orchestrator.cli", *map(str, args)], capture_output=True, text=True,
                          timeout=timeout, cwd=ROOT, env=os.environ | {"COLUMNS": "120"} | env)
    if check:
        assert done.returncode == 0, f"orc {' '.join(map(str, args))}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def report(run_dir: Path) -> dict:
    return json.loads(orc("report", run_dir, "--json", check=True).stdout)


def events(run_dir: Path) -> list[Event]:
    return read_history(RunDir(run_dir).events)[0]


def training_run(folder: Path, *, nodes: int, ranks: int, steps: int = 6, **more) -> Path:
    """A run file that trains a tiny model on a few source files; `more` are further sections."""
    (folder / "text").mkdir(parents=True, exist_ok=True)
    source = ROOT / "orchestrator" / "config.py"
    (folder / "text" / "some.py").write_text(source.read_text() * 4)
    config = {
        "run": "tiny", "root": str(folder / "runs"), "model": MODEL, "policy": ALL_END,
        "cluster": {"name": "test", "kind": "local", "num_nodes": nodes, "gpus_per_node": ranks, "gpu": "cpu"},
        "data": {"path": str(folder / "text")},
        "training": {"steps": steps, "seq_len": 16, "global_batch_size": 4},
        "checkpoint": {"interval_steps": 2}, "wandb": {"mode": "disabled"}} | more
    return _write(folder, config)


def command_run(folder: Path, program: str, *, nodes: int = 2, ranks: int = 2, **more) -> Path:
    """A run file whose ranks execute a Python program instead of the trainer."""
    config = {
        "run": "tiny", "root": str(folder / "runs"), "policy": POLICY, "wandb": {"mode": "disabled"},
        "command": [sys.executable, "-c", program],
        "cluster": {"name": "test", "kind": "local", "num_nodes": nodes, "gpus_per_node": ranks, "gpu": "cpu"}} | more
    return _write(folder, config)


def wait_for(condition: Callable[[], object], *, what: str):
    """Poll until the condition gives something true; returns it."""
    end = time.monotonic() + TIMEOUT_S
    while not (found := condition()):
        assert time.monotonic() < end, f"waited {TIMEOUT_S:.0f} s for {what}"
        time.sleep(0.05)
    return found


def _write(folder: Path, config: dict) -> Path:
    path = folder / "run.yaml"  # JSON is YAML
    path.write_text(json.dumps(config, indent=1))
    return path
