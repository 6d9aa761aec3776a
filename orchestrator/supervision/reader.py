"""The W&B reader's process, as the supervisor keeps it: started, started again when killed, waited for.

A process of its own, in a session of its own, so that no W&B fault can stop or slow supervision. What it
does is orchestrator.monitoring.wandb's business.
"""
import asyncio
import subprocess
import sys
from collections.abc import Callable

from jobs.spec.rundir import RunDir

RESTARTS = 3  # a W&B that cannot be fed is not tried for ever
REVIVE_S = 30.0  # between looks
FINISH_S = 60.0  # for its last lines after the run's end; they cannot hold that end up


class WandbReader:
    """`wanted` False: there is none, and every call does nothing."""

    def __init__(self, run_dir: RunDir, *, wanted: bool) -> None:
        self.run_dir = run_dir
        self.wanted = wanted
        self._process: subprocess.Popen | None = None
        self._restarts = 0

    def start(self) -> None:
        if not self.wanted:
            return
        self.run_dir.wandb.mkdir(exist_ok=True)
        with (self.run_dir.path / "logs" / "wandb.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "orchestrator.monitoring.wandb", str(self.run_dir.path)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

    async def keep_alive(self, say: Callable[[str], None]) -> None:
        """Start it again whenever it has died, RESTARTS times; it goes on where it was."""
        while True:
            if message := self.revive():
                say(message)
            await asyncio.sleep(REVIVE_S)

    def revive(self) -> str | None:
        """Start it again if it has died; returns what there is to say about that."""
        if self._process is None or self._process.poll() in (None, 0) or self._restarts == RESTARTS:
            return None
        self._restarts += 1
        code = self._process.returncode
        self.start()
        return (f"the W&B reader ended with code {code}, see logs/wandb.log; started again ({self._restarts} of "
                f"{RESTARTS})")

    def wait(self) -> str | None:
        """Blocking, at most FINISH_S; returns what there is to say if it was still busy then."""
        if self._process is not None:
            try:
                self._process.wait(FINISH_S)
            except subprocess.TimeoutExpired:
                return f"the W&B reader was still busy after {FINISH_S:.0f} s: left to itself"
        return None
