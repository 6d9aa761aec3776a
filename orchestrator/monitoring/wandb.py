"""The W&B reader: `python -m orchestrator.monitoring.wandb RUN_DIR`, a process of its own.

Started by the supervisor once its RunStarted is written, and never waited for: `wandb.init` may block for a
minute, and no fault of W&B may touch training. It follows `events.jsonl` over all attempts and feeds one W&B
run, whose id the history gives. It ends with the run, on SIGTERM, or when its parent dies.
"""
import json
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from jobs.spec.events import Decision, Diagnosis, Event, RunEnded, RunStarted
from jobs.spec.load import from_dict
from jobs.spec.rundir import RunDir
from orchestrator.config import WandbSpec
from orchestrator.monitoring.history import HistoryError, follow, last_of, read_submissions
from orchestrator.monitoring.summary import summarize
from orchestrator.monitoring.wandb_files import (OFFSET_KEY, Note, delivered_offset, known_secrets, read_note,
                                                 wandb_mode, without_secrets, write_note)
from orchestrator.monitoring.wandb_rows import ATTEMPT_COLUMNS, AXES, Rows, attempts_table

POLL_S = 0.5
INIT_TIMEOUT_S = 60.0
FINISH_TIMEOUT_S = 120.0
ALERTS = {"completed": None, "stopped": "INFO", "preemption": "WARN", "time_limit": "WARN"}  # others: ERROR


def main(argv: list[str]) -> int:
    if len(argv) != 1 or not Path(argv[0]).is_dir():
        print("usage: python -m orchestrator.monitoring.wandb RUN_DIR", file=sys.stderr)
        return 2
    try:
        feed(RunDir(Path(argv[0]).resolve()), wait=_Wait())
    except (HistoryError, ValueError) as error:
        print(f"W&B reader: {error}", file=sys.stderr)
        return 1
    return 0


def feed(run_dir: RunDir, *, wait: "_Wait") -> None:
    """Feed the run's W&B run until the history ends, or `wait` says that nobody needs it any more."""
    delivery: Delivery | None = None
    for batch in follow(run_dir.events, wait=wait):
        if delivery is None:
            first = batch[0][0]
            if not isinstance(first, RunStarted):
                raise HistoryError(f"{run_dir.events}:1: a history begins with run_started, not {type(first).__name__}")
            delivery = Delivery(run_dir, wandb_id=first.wandb_id)
        for event, end in batch:
            delivery.visit(event, end=end)
        delivery.note()
        if delivery.ended:
            break
    if delivery is not None:
        delivery.finish()


class Delivery:
    """Events → one W&B run, each told once over all readers there ever were."""

    def __init__(self, run_dir: RunDir, *, wandb_id: str) -> None:
        self.run_dir, self.wandb_id = run_dir, wandb_id
        self.note_path = run_dir.wandb / "reader.json"
        self.rows = Rows()
        self.events: list[Event] = []
        self.seen = 0  # byte offset of what has been visited
        self.config = yaml.safe_load(run_dir.config.read_text())
        self.spec = from_dict(WandbSpec, self.config.get("wandb") or {}, origin=str(run_dir.config))
        self.run: Any = None  # opened by the first event that is news
        self.told = self.opened = self._told_offline()
        self.off = wandb_mode(self.spec.mode, env=os.environ) == "disabled"

    @property
    def ended(self) -> bool:
        """Nothing more will come of this supervisor."""
        return self.off or isinstance(last_of(self.events, RunStarted | RunEnded), RunEnded)

    def visit(self, event: Event, *, end: int) -> None:
        self.events.append(event)
        self.seen = end
        row = self.rows.row(event)
        verdict = isinstance(event, Diagnosis | Decision)
        if self.off or end <= self.told or not (row or verdict):
            return
        if self.run is None:
            self._open()
            if end <= self.told:  # the server knew more than we did
                return
        if verdict:
            self._tell(event)
        # The offset travels in the row itself: a row that is lost takes its offset with it.
        self.run.log(row | {OFFSET_KEY: end})

    def note(self) -> None:
        if self.run is not None:
            write_note(self.note_path, Note(offset=self.seen, opened=self.opened))

    def finish(self) -> None:
        """Tables and goodput at the end; a run whose supervisor died is left as failed, to be resumed."""
        if self.run is None:
            return
        import wandb

        submissions = read_submissions(self.run_dir.submissions)
        summary = summarize(self.events, run_dir=self.run_dir, submissions=submissions)
        self.run.log({"attempts": wandb.Table(columns=ATTEMPT_COLUMNS, data=attempts_table(summary))})
        self.run.summary.update({
            "state": summary.state if self.ended else "unknown",
            "final_step": summary.final_step,
            "final_loss": summary.final_loss,
            **{f"goodput/{name}": value for name, value in asdict(summary.goodput).items()},
        })
        self.run.finish(exit_code=0 if self.ended and summary.state in ("completed", "stopped") else 1)

    def _told_offline(self) -> int:
        note = read_note(self.note_path)
        delivered = delivered_offset(self.run_dir, run_id=self.wandb_id)
        if delivered is None:  # never offline, or the logs were uploaded and cleaned away
            return note.offset
        return max(delivered, note.opened)

    def _open(self) -> None:
        import wandb

        mode = wandb_mode(self.spec.mode, env=os.environ)
        try:
            self.run = self._init(mode)
        except wandb.Error as error:  # no network, a wrong key: told, and the data are kept for `wandb sync`
            if mode != "online":
                raise
            print(f"W&B reader: online is not possible ({error}); going on offline", file=sys.stderr, flush=True)
            wandb.teardown()  # the SDK's process still holds the run id
            self.run = self._init("offline")
        if self.run.resumed:
            delivered = delivered_offset(self.run_dir, run_id=self.wandb_id) or 0
            self.told = self.opened = max(int(self.run.summary.get(OFFSET_KEY, 0)), delivered)
        write_note(self.note_path, Note(offset=self.told, opened=self.opened))
        for metric, axis in AXES.items():
            self.run.define_metric(axis)
            self.run.define_metric(metric, step_metric=axis)

    def _init(self, mode: str) -> Any:
        import wandb

        # Logs and staging areas of the SDK stay in the run directory too: a node may have no home.
        for name in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
            os.environ.setdefault(name, str(self.run_dir.wandb / "cache"))
        self.run_dir.wandb.mkdir(parents=True, exist_ok=True)
        return wandb.init(
            id=self.wandb_id, name=self.config["run"], resume="allow", mode=mode, dir=self.run_dir.path,
            project=self.spec.project, entity=self.spec.entity, tags=self.spec.tags, config=self._public_config(),
            settings=wandb.Settings(init_timeout=INIT_TIMEOUT_S, finish_timeout=FINISH_TIMEOUT_S, silent=True,
                                    console="off", disable_git=True, disable_code=True, x_disable_stats=True,
                                    x_save_requirements=False))

    def _public_config(self) -> dict[str, Any]:
        plan = json.loads(self.run_dir.plan.read_text()) if self.run_dir.plan.is_file() else {}
        public = self.config | {"plan": {key: plan[key] for key in ("layout", "predicted") if key in plan}}
        return without_secrets(public, secrets=known_secrets(self.run_dir, env=os.environ))

    def _tell(self, event: Diagnosis | Decision) -> None:
        if isinstance(event, Decision):
            self.run.summary["last_decision"] = f"{event.act}: {event.reason}"
            return
        self.run.summary["last_diagnosis"] = f"attempt {event.attempt}: {event.kind}: {event.summary}"
        level = ALERTS.get(event.kind, "ERROR")
        if level is not None:
            text = "\n".join([event.summary, *event.suspects, *event.evidence])
            self.run.alert(f"{self.config['run']}: attempt {event.attempt}: {event.kind}"[:64], text, level=level)


class _Wait:
    """Pauses between looks at the history; False once the parent is gone or SIGTERM has come."""

    def __init__(self) -> None:
        self.parent = os.getppid()
        self.terminated = False
        signal.signal(signal.SIGTERM, self._terminate)
        # Ctrl-C reaches the whole foreground group; what it means is the supervisor's to decide.
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _terminate(self, *_: Any) -> None:
        self.terminated = True

    def __call__(self) -> bool:
        time.sleep(POLL_S)
        return not self.terminated and os.getppid() == self.parent


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
