"""The W&B reader, with the real SDK offline: its process is started, killed and restarted, and what it wrote is
read back from W&B's own files."""
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from jobs.spec.events import AttemptStarted, CheckpointCommitted, Decision, Diagnosis
from jobs.spec.reports import NodeSample, StepReport, ValidationReport
from jobs.spec.rundir import RunDir
from orchestrator.monitoring.wandb_files import (HIDDEN, OFFSET_KEY, Note, delivered_offset, read_note, read_records,
                                                 wandb_location, wandb_mode, without_secrets, write_note)
from tests.helpers.histories import two_attempts, write

API_KEY = "5ec2e7" + "0123456789abcdef" * 2 + "fe"  # of the right form; must be found nowhere
CHANNEL_SECRET = "the-secret-of-the-channel-7781"
WANDB_ID = "demo-3f9c2a1b"
# each becomes a row
TOLD = StepReport | ValidationReport | NodeSample | CheckpointCommitted | AttemptStarted | Diagnosis | Decision
EVENTS = two_attempts(validating=8)
PATIENCE_S = 120.0  # far beyond what a reader needs on a busy machine

# wandb.mode, environment → mode
MODES = [
    ("auto", {}, "offline"),
    ("auto", {"WANDB_API_KEY": "k"}, "online"),
    ("auto", {"WANDB_IDENTITY_TOKEN_FILE": "f"}, "online"),
    ("auto", {"WANDB_MODE": "offline", "WANDB_API_KEY": "k"}, "offline"),
    ("auto", {"WANDB_MODE": "disabled", "WANDB_API_KEY": "k"}, "disabled"),
    ("auto", {"WANDB_MODE": "online"}, "online"),
    ("offline", {"WANDB_MODE": "online", "WANDB_API_KEY": "k"}, "offline"),
    ("online", {}, "online"),
    ("disabled", {"WANDB_API_KEY": "k"}, "disabled"),
]
# name, value → hidden?
VALUES = [
    ("api_key", "abc", True), ("WANDB_API_KEY", "abc", True), ("hf_token", "abc", True), ("token", "abc", True),
    ("password", "abc", True), ("secret", 12345, True), ("aws_secret_access_key", "abc", True),
    ("credentials", ["abc"], True), ("url", f"https://me:{API_KEY}@host", True),
    ("num_kv_heads", 4, False), ("tokens_per_s", 3.5, False), ("tokens_path", "data/tokens.bin", False),
    ("key", "value", False), ("api_key", None, False), ("seed", 0, False), ("tie_embeddings", True, False),
]


@pytest.fixture
def run_dir(tmp_path) -> RunDir:
    return make_run_dir(tmp_path / "demo")


@pytest.fixture(scope="module")
def told_run(tmp_path_factory) -> RunDir:
    """A whole run of two attempts, told by one reader; tests only look at it."""
    run_dir = make_run_dir(tmp_path_factory.mktemp("told") / "demo")
    write(EVENTS, run_dir.events)
    output = finish(start(run_dir))
    (run_dir.path / "reader.log").write_text(output)
    return run_dir


def make_run_dir(path: Path) -> RunDir:
    run_dir = RunDir(path)
    run_dir.path.mkdir()
    run_dir.config.write_text(yaml.safe_dump({
        "run": "demo", "wandb": {"mode": "offline", "project": "orc", "entity": None, "tags": ["test"]},
        "training": {"steps": 40}, "data": {"path": f"https://user:{API_KEY}@host/data"},
        "hub": {"hf_token": API_KEY}}))
    run_dir.plan.write_text(json.dumps({"layout": {"tp": 2}, "predicted": {"mfu": 0.2}, "rejected": ["x"] * 100}))
    run_dir.secret.write_text(CHANNEL_SECRET)
    return run_dir


def start(run_dir: RunDir, **env) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "orchestrator.monitoring.wandb", str(run_dir.path)],
                            env=os.environ | {"WANDB_API_KEY": API_KEY} | env, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True)


def finish(reader: subprocess.Popen) -> str:
    output, _ = reader.communicate(timeout=PATIENCE_S)
    assert reader.returncode == 0, output
    return output


def await_note(run_dir: RunDir, *, offset: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while read_note(run_dir.wandb / "reader.json").offset < offset:
        assert time.monotonic() < deadline, "the reader did not get so far"
        time.sleep(0.02)


def records(run_dir: RunDir) -> list:
    paths = sorted(run_dir.wandb.glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    return [record for path in paths for record in read_records(path)]


def rows(run_dir: RunDir) -> list[dict]:
    """Every row that carries an event, without what the SDK adds."""
    found = []
    for record in records(run_dir):
        if record.HasField("history"):
            row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            found += [{key: value for key, value in row.items() if not key.startswith("_")}] * (OFFSET_KEY in row)
    return found


def axes_of(run_dir: RunDir) -> set[tuple[str, str]]:
    """(metrics, their x axis)"""
    found = [record.metric for record in records(run_dir) if record.HasField("metric")]
    return {(metric.name or metric.glob_name, metric.step_metric) for metric in found}


def values_of(run_dir: RunDir, kind: str) -> dict:
    """The newest value of each key of all `kind` (config or summary) updates."""
    found = {}
    for record in records(run_dir):
        message = record.run.config if kind == "config" and record.HasField("run") else getattr(record, kind)
        found |= {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in message.update}
    return found


def test_one_run_holds_all_steps_of_both_attempts(told_run):
    events = EVENTS
    assert {record.run.run_id for record in records(told_run) if record.HasField("run")} == {WANDB_ID}
    told = rows(told_run)
    steps = [(row["attempt"], row["train/step"], row["train/loss"]) for row in told if "train/step" in row]
    assert steps == [(e.attempt, e.step, e.loss) for e in events if isinstance(e, StepReport)]
    assert len(told) == sum(isinstance(event, TOLD) for event in events)
    tokens = {(row["attempt"], row["train/step"]): row["tokens"] for row in told if "train/step" in row}
    assert (tokens[1, 26], tokens[2, 21], tokens[2, 40]) == (26 * 2048, 21 * 2048, 40 * 2048)
    assert sum(row.get("node/node-1/gpu0/utilization_percent") == 97.0 for row in told) > 5
    assert [row["checkpoint/step"] for row in told if "checkpoint/step" in row] == [10, 20, 30, 40]
    validated = [(row["attempt"], row["val/step"], row["val/loss"]) for row in told if "val/step" in row]
    assert validated == [(e.attempt, e.step, e.loss) for e in events if isinstance(e, ValidationReport)]
    assert [step for _, step, _ in validated] == [8, 16, 24, 24, 32, 40]
    assert ("val/*", "val/step") in axes_of(told_run)


def test_summary_config_alert_and_end_are_told(told_run):
    config, summary = values_of(told_run, "config"), values_of(told_run, "summary")
    assert config["plan"] == {"layout": {"tp": 2}, "predicted": {"mfu": 0.2}}
    assert config["training"] == {"steps": 40}
    assert config["data"] == {"path": HIDDEN} and config["hub"] == {"hf_token": HIDDEN}
    assert (summary["state"], summary["final_step"]) == ("completed", 40)
    assert summary["last_decision"] == "finish: the last step is done"
    assert 0.3 < summary["goodput/goodput"] < 0.9 and summary["goodput/steps_lost"] == 6
    assert summary["attempts.nrows"] == 2
    alerts = [record.alert for record in records(told_run) if record.HasField("alert")]
    assert [(alert.title, alert.level) for alert in alerts] == [("demo: attempt 1: crash", "ERROR")]
    assert [record.exit.exit_code for record in records(told_run) if record.HasField("exit")] == [0]
    axes = {record.metric.name or record.metric.glob_name: record.metric.step_metric for record in records(told_run)
            if record.HasField("metric")}
    assert axes["train/*"] == "train/step" and axes["by_tokens/*"] == "tokens"


def test_no_secret_is_written_anywhere(told_run):
    written = [path for path in told_run.wandb.rglob("*") if path.is_file()]
    assert len(written) >= 5
    for secret in (API_KEY, CHANNEL_SECRET):
        assert secret not in (told_run.path / "reader.log").read_text()
        assert [path for path in written if secret.encode() in path.read_bytes()] == []


def test_killed_reader_neither_loses_nor_doubles(run_dir):
    events = two_attempts(steps=900, crash_step=800, interval=100)
    half = 700
    write(events[:half], run_dir.events)
    reader = start(run_dir)
    await_note(run_dir, offset=run_dir.events.stat().st_size)
    reader.send_signal(signal.SIGKILL)
    reader.communicate(timeout=PATIENCE_S)
    write(events[half:], run_dir.events, append=True)
    finish(start(run_dir))
    assert len(list(run_dir.wandb.glob("offline-run-*"))) == 2  # offline, each reader has a folder of its own
    steps = [(row["attempt"], row["train/step"]) for row in rows(run_dir) if "train/step" in row]
    assert steps == [(event.attempt, event.step) for event in events if isinstance(event, StepReport)]
    offsets = [row[OFFSET_KEY] for row in rows(run_dir)]
    assert offsets == sorted(set(offsets))
    assert len(offsets) == sum(isinstance(event, TOLD) for event in events)


def test_reader_follows_a_run_and_a_second_one_has_nothing_to_tell(run_dir):
    events = two_attempts()
    reader = start(run_dir)  # before the first line is there
    write(events[:10], run_dir.events)
    await_note(run_dir, offset=run_dir.events.stat().st_size)
    write(events[10:], run_dir.events, append=True)
    finish(reader)
    before = rows(run_dir)
    finish(start(run_dir))
    assert rows(run_dir) == before
    assert len(list(run_dir.wandb.glob("offline-run-*"))) == 1


def test_reader_ends_when_its_parent_dies(run_dir):
    write(two_attempts()[:30], run_dir.events)  # no end: it would wait for ever
    code = ("import subprocess, sys\n"
            "child = subprocess.Popen([sys.executable, '-m', 'orchestrator.monitoring.wandb', sys.argv[1]])\n"
            "print(child.pid, flush=True)\nsys.stdin.read()\n")
    parent = subprocess.Popen([sys.executable, "-c", code, str(run_dir.path)], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True)
    reader = psutil.Process(int(parent.stdout.readline()))
    await_note(run_dir, offset=run_dir.events.stat().st_size)
    parent.kill()
    parent.communicate(timeout=PATIENCE_S)
    psutil.wait_procs([reader], timeout=PATIENCE_S)
    assert not reader.is_running() or reader.status() == psutil.STATUS_ZOMBIE
    assert [record.exit.exit_code for record in records(run_dir) if record.HasField("exit")] == [1]


def test_reader_ends_on_sigterm_with_everything_told(run_dir):
    events = two_attempts()[:30]
    write(events, run_dir.events)
    reader = start(run_dir)
    await_note(run_dir, offset=run_dir.events.stat().st_size)
    reader.terminate()
    finish(reader)
    assert len(rows(run_dir)) == sum(isinstance(event, TOLD) for event in events)


def test_disabled_reader_writes_nothing_and_ends(run_dir):
    write(two_attempts()[:30], run_dir.events)
    config = yaml.safe_load(run_dir.config.read_text())
    config["wandb"]["mode"] = "auto"
    run_dir.config.write_text(yaml.safe_dump(config))
    finish(start(run_dir, WANDB_MODE="disabled"))
    assert not run_dir.wandb.exists()


def test_corrupt_history_is_an_error_that_names_the_line(run_dir):
    run_dir.events.write_bytes(b"what?\n")
    reader = start(run_dir)
    output, _ = reader.communicate(timeout=PATIENCE_S)
    assert reader.returncode == 1
    assert "events.jsonl:1: not an event" in output and "Traceback" not in output


@pytest.mark.parametrize("wanted, env, mode", MODES)
def test_mode(wanted, env, mode, tmp_path):
    assert wandb_mode(wanted, env=env | {"NETRC": str(tmp_path / "none")}) == mode


def test_key_in_netrc_means_online(tmp_path):
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password abc\n")
    env = {"NETRC": str(tmp_path / "netrc")}
    assert wandb_mode("auto", env=env) == "online"
    assert wandb_mode("auto", env=env | {"WANDB_BASE_URL": "https://wandb.example.org"}) == "offline"


def test_unknown_wandb_mode_is_refused():
    with pytest.raises(ValueError, match="WANDB_MODE: 'ofline' is not one of online, offline, disabled"):
        wandb_mode("auto", env={"WANDB_MODE": "ofline"})


@pytest.mark.parametrize("name, value, hidden", VALUES)
def test_secrets_are_hidden_and_nothing_else(name, value, hidden):
    (cleaned,) = without_secrets({"section": {name: value}}, secrets=frozenset({API_KEY}))["section"].values()
    assert cleaned == (([HIDDEN] if isinstance(value, list) else HIDDEN) if hidden else value)


def test_note_survives_and_is_zero_where_there_is_none(tmp_path):
    assert read_note(tmp_path / "reader.json") == Note()
    write_note(tmp_path / "reader.json", Note(offset=12, opened=3))
    assert read_note(tmp_path / "reader.json") == Note(offset=12, opened=3)
    assert [path.name for path in tmp_path.iterdir()] == ["reader.json"]


def test_log_torn_at_any_byte_gives_the_rows_before(told_run, tmp_path):
    (log,) = told_run.wandb.glob("offline-run-*/*.wandb")
    whole = list(read_records(log))
    torn = tmp_path / "torn.wandb"
    for length in range(0, log.stat().st_size, 997):
        torn.write_bytes(log.read_bytes()[:length] if length > 7 else b"")
        part = list(read_records(torn))
        assert part == whole[:len(part)]
    torn.write_bytes(b"PK\x03\x04")
    with pytest.raises(ValueError, match="not a W&B transaction log"):
        list(read_records(torn))


def test_delivered_offset_is_zero_for_an_empty_log_and_unknown_without_one(run_dir, told_run):
    assert delivered_offset(told_run, run_id=WANDB_ID) == sum(
        len(line) for line in told_run.events.read_bytes().splitlines(keepends=True)[:-2])  # after it: ends, no rows
    assert delivered_offset(run_dir, run_id=WANDB_ID) is None
    log = run_dir.wandb / f"offline-run-20260101_000000-{WANDB_ID}" / f"run-{WANDB_ID}.wandb"
    log.parent.mkdir(parents=True)
    log.touch()
    assert delivered_offset(run_dir, run_id=WANDB_ID) == 0


def test_location_says_how_to_open_and_upload(run_dir):
    nowhere = wandb_location(run_dir, run_id=None)
    assert nowhere == {"id": None, "dir": str(run_dir.wandb), "how_to_open": "nothing written yet",
                       "how_to_upload": None}
    folder: Path = run_dir.wandb / f"offline-run-20260101_000000-{WANDB_ID}"
    folder.mkdir(parents=True)
    place = wandb_location(run_dir, run_id=WANDB_ID)
    assert place["how_to_open"] == f"wandb leet {folder}"
    assert place["how_to_upload"].startswith(f"wandb sync --id {WANDB_ID} ")
