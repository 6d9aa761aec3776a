"""Reading `events.jsonl`, while the supervisor may still be writing it.

Called by everything that shows a run: status, report, the goodput ledger, the progress line, W&B. Knows
nothing of what the events mean. A last line without its newline is not there yet; a line that is complete
and cannot be read is an error with its number, never skipped.
"""
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jobs.spec.events import Event
from jobs.spec.load import Problem, SpecError
from jobs.spec.wire import decode

T = TypeVar("T")


class HistoryError(ValueError):
    """The history cannot be read; the message names file, line and remedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """One line of `submissions.jsonl`: when a job of this run was handed to the scheduler."""

    t: float  # seconds since the epoch
    job_id: str


def read_history(path: Path, offset: int = 0) -> tuple[list[Event], int]:
    """Events from byte `offset` on, and the offset to go on from. A file that is not there yet is empty.

    Raises HistoryError for a complete line that is no event, or if the file is shorter than `offset`.
    """
    entries = read_entries(path, offset=offset)
    return [event for event, _ in entries], entries[-1][1] if entries else offset


def read_entries(path: Path, *, offset: int = 0) -> list[tuple[Event, int]]:
    """Like read_history, but each event comes with the byte offset of its line's end."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if offset > size:
                raise HistoryError(f"{path}: shorter ({size} bytes) than what was read of it before ({offset} bytes); "
                                   "the history is only ever appended to: has it been replaced?")
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        if offset:
            raise HistoryError(f"{path}: {offset} bytes of it were read before and now it is gone") from None
        return []
    entries: list[tuple[Event, int]] = []
    position = offset
    for line in data.split(b"\n")[:-1]:  # what follows the last newline is still being written, or torn by a crash
        position += len(line) + 1
        entries.append((_decode(line, path=path, end=position), position))
    return entries


def follow(path: Path, *, wait: Callable[[], bool], offset: int = 0) -> Iterator[list[tuple[Event, int]]]:
    """Batches of (event, end offset) as they are written, for as long as `wait()` says so.

    `wait` is called whenever everything written has been read: it waits a while for more and returns True,
    or returns False to end. After a False the file is read once more, so nothing written before is missed.
    """
    going = True
    while going:
        batch = read_entries(path, offset=offset)
        if not batch:
            going = wait()
            batch = read_entries(path, offset=offset)
        if batch:
            offset = batch[-1][1]
            yield batch


def all_of(events: Sequence[Event], kind: type[T]) -> list[T]:
    return [event for event in events if isinstance(event, kind)]


def last_of(events: Sequence[Event], kind: type[T]) -> T | None:
    """The last event of a kind; of several kinds, where `kind` is a union."""
    return next((event for event in reversed(events) if isinstance(event, kind)), None)


def read_submissions(path: Path) -> list[Submission]:
    """All submissions of a run, oldest first. Raises HistoryError for a line without `t` or `job_id`."""
    submissions = []
    try:
        lines = path.read_text().split("\n")
    except FileNotFoundError:
        return []
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline is not written yet
        try:
            record = json.loads(line)
            submissions.append(Submission(t=float(record["t"]), job_id=str(record["job_id"])))
        except (ValueError, KeyError, TypeError) as error:
            raise HistoryError(f"{path}:{number}: not a submission ({error!r}); it needs t and job_id") from error
    return sorted(submissions, key=lambda submission: submission.t)


def _decode(line: bytes, *, path: Path, end: int) -> Any:
    try:
        if not line.lstrip().startswith(b"{"):
            raise SpecError([Problem(where="line", value=line[:40], message="is not a JSON object")])
        return decode(line, Event)
    except ValueError as error:  # SpecError and JSONDecodeError are ValueErrors
        number = _line_number(path, end=end)
        raise HistoryError(f"{path}:{number}: not an event of this version: {error}\n"
                           f"  the line begins {line[:80]!r}; if a crash tore it, remove that line and look again"
                           ) from error


def _line_number(path: Path, *, end: int) -> int:
    with path.open("rb") as file:
        return file.read(end).count(b"\n")
