"""The W&B side of a run directory: which mode to use, where runs lie, and what they already hold.

Called by the W&B reader, status and report. Never imports the SDK, which takes a second to load; only
`delivered_offset` borrows its record type when there is something to read back.
"""
import json
import netrc
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from jobs.spec.load import from_dict, to_dict
from jobs.spec.rundir import RunDir

Mode = Literal["online", "offline", "disabled"]
OFFSET_KEY = "event_offset"  # in every row: the byte of events.jsonl up to which W&B has been told
HIDDEN = "(hidden)"
_SECRET_NAME = re.compile(r"(api|access|private|secret)_?key|secret|passw(or)?d|credential|(^|_)token$", re.IGNORECASE)
_BLOCK, _HEADER, _FULL, _LAST = 32768, 7, 1, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """How far the W&B readers of a run came, in bytes of events.jsonl."""

    offset: int = 0  # handed to the SDK
    opened: int = 0  # where the newest reader began: what lies before is safe


def wandb_mode(wanted: str, *, env: Mapping[str, str]) -> Mode:
    """`wanted` is wandb.mode of the YAML. auto: WANDB_MODE if set, else online with an API key, else offline.

    Raises ValueError for a WANDB_MODE that is none of the three.
    """
    if wanted != "auto":
        return wanted
    named = env.get("WANDB_MODE", "").lower()
    if named in ("online", "offline", "disabled"):
        return named
    if named:
        raise ValueError(f"WANDB_MODE: {named!r} is not one of online, offline, disabled")
    return "online" if _has_key(env) else "offline"


def wandb_location(run_dir: RunDir, *, run_id: str | None) -> dict[str, str | None]:
    """Where the W&B run of a run directory lies and the commands that open it."""
    offline = sorted(run_dir.wandb.glob(f"offline-run-*-{run_id}"))
    online = sorted(run_dir.wandb.glob(f"run-*-{run_id}"))
    how, upload = "nothing written yet", None
    if offline:
        how = f"wandb leet {offline[-1]}"
        upload = f"wandb sync --id {run_id} {run_dir.wandb}/offline-run-*-{run_id}"
    elif online:
        how = f"online as run {run_id}; local copy: wandb leet {online[-1]}"
    return {"id": run_id, "dir": str(run_dir.wandb), "how_to_open": how, "how_to_upload": upload}


def delivered_offset(run_dir: RunDir, *, run_id: str) -> int | None:
    """The offset of the newest row in the run's offline logs: 0 if they hold none, None if there are no logs.

    These logs are the truth about what W&B holds. The reader's own note cannot be: when a reader is killed,
    the SDK's process loses the last rows it was handed (measured: up to 60 of 1,600).
    """
    paths = sorted(run_dir.wandb.glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
    offsets = [int(json.loads(item.value_json)) for path in paths for record in read_records(path)
               for item in record.history.item if OFFSET_KEY in (item.key, *item.nested_key)]
    return max(offsets, default=0) if paths else None


def read_records(path: Path) -> Iterator[Any]:
    """Records of a .wandb file: a LevelDB log (blocks of 32 KiB, records in fragments) after a 7-byte header.

    Stops at a record that was torn by a crash. Raises ValueError for a file of another kind.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    if not data:
        return  # just made
    if not data.startswith(b":W&B"):
        raise ValueError(f"{path}: not a W&B transaction log")
    position, record = _HEADER, b""
    while position + _HEADER <= len(data):
        if (left := _BLOCK - position % _BLOCK) < _HEADER:
            position += left  # a block's tail too short for a record
            continue
        _, length, part = struct.unpack_from("<IHB", data, position)
        position += _HEADER
        if part == 0 or position + length > len(data):
            return
        record += data[position:position + length]
        position += length
        if part in (_FULL, _LAST):
            yield Record.FromString(record)
            record = b""


def without_secrets(data: Any, *, secrets: frozenset[str], name: str = "") -> Any:
    """`data` with every value hidden whose name says that it is secret, or that contains one of `secrets`."""
    if isinstance(data, dict):
        return {key: without_secrets(value, secrets=secrets, name=str(key)) for key, value in data.items()}
    if isinstance(data, list):
        return [without_secrets(value, secrets=secrets, name=name) for value in data]
    if data is not None and not isinstance(data, bool) and _SECRET_NAME.search(name):
        return HIDDEN
    if isinstance(data, str) and any(secret in data for secret in secrets):
        return HIDDEN
    return data


def known_secrets(run_dir: RunDir, *, env: Mapping[str, str]) -> frozenset[str]:
    """What must not leave this machine: secret-looking environment values and the channel's secret."""
    secrets = {value for name, value in env.items() if _SECRET_NAME.search(name)}
    if run_dir.secret.is_file():
        secrets.add(run_dir.secret.read_text().strip())
    return frozenset(secret for secret in secrets if len(secret) >= 8)  # shorter ones are words, not secrets


def read_note(path: Path) -> Note:
    """The reader's own note; Note() where there is none."""
    try:
        return from_dict(Note, json.loads(path.read_text()), origin=str(path))
    except FileNotFoundError:
        return Note()


def write_note(path: Path, note: Note) -> None:
    """Atomic: a reader killed here leaves the old note or the new one."""
    fresh = path.with_suffix(".tmp")
    with fresh.open("w") as file:
        json.dump(to_dict(note), file)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def _has_key(env: Mapping[str, str]) -> bool:
    if env.get("WANDB_API_KEY") or env.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(env.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname
    path = Path(env.get("NETRC") or "~/.netrc").expanduser()
    try:
        return host is not None and netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):  # none, or none that the SDK could use
        return False
