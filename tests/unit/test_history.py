"""Reading events.jsonl while it is being written, and when it is damaged."""
import json

import pytest

from jobs.spec.wire import encode
from orchestrator.monitoring.history import HistoryError, Submission, follow, read_history, read_submissions
from tests.helpers.histories import two_attempts, write

EVENTS = two_attempts(steps=8, interval=4, crash_step=6)

# what stands in the middle of a history → what the error says about it
CORRUPT = {
    "torn json": (b'{"kind": "step_re\n', "not an event of this version"),
    "not an object": (b"[1, 2]\n", "is not a JSON object"),
    "empty": (b"\n", "is not a JSON object"),
    "unknown kind": (b'{"kind": "comet"}\n', "comet"),
    "not text": (b'{"kind": "\xff\xfe"}\n', "not an event of this version"),
}


def test_what_was_written_is_read_back(tmp_path):
    path = tmp_path / "events.jsonl"
    write(EVENTS, path)
    events, offset = read_history(path)
    assert events == EVENTS
    assert offset == path.stat().st_size
    assert read_history(path, offset) == ([], offset)


@pytest.mark.parametrize("cut", [1, 10, 40])
def test_torn_last_line_is_left_until_it_is_whole(tmp_path, cut):
    path = tmp_path / "events.jsonl"
    write(EVENTS[:-1], path)
    whole = path.stat().st_size
    last = encode(EVENTS[-1])
    with path.open("ab") as file:
        file.write(last[:-cut])
    events, offset = read_history(path)
    assert (events, offset) == (EVENTS[:-1], whole)
    with path.open("ab") as file:
        file.write(last[-cut:])
    assert read_history(path, offset) == (EVENTS[-1:], whole + len(last))


@pytest.mark.parametrize("line, message", CORRUPT.values(), ids=CORRUPT)
@pytest.mark.parametrize("from_offset", [False, True])
def test_corrupt_line_is_named_by_its_number(tmp_path, line, message, from_offset):
    path = tmp_path / "events.jsonl"
    write(EVENTS[:3], path)
    offset = path.stat().st_size if from_offset else 0
    with path.open("ab") as file:
        file.write(line)
    write(EVENTS[3:], path, append=True)
    with pytest.raises(HistoryError, match=r"events\.jsonl:4: ") as caught:
        read_history(path, offset)
    assert message in str(caught.value)


def test_history_that_does_not_exist_yet_is_empty(tmp_path):
    assert read_history(tmp_path / "events.jsonl") == ([], 0)


@pytest.mark.parametrize("content", [None, b"", b"{}\n"], ids=["gone", "emptied", "shorter"])
def test_history_that_shrank_is_refused(tmp_path, content):
    path = tmp_path / "events.jsonl"
    write(EVENTS, path)
    _, offset = read_history(path)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(HistoryError, match="events.jsonl"):
        read_history(path, offset)


def test_follow_gives_every_event_once_and_what_came_before_the_end(tmp_path):
    path = tmp_path / "events.jsonl"
    portions = [EVENTS[:2], [], EVENTS[2:9], EVENTS[9:]]  # written while the reader waits; the last at the end

    def wait() -> bool:
        write(portions.pop(0), path, append=path.exists())
        return bool(portions)

    seen = [entry for batch in follow(path, wait=wait) for entry in batch]
    assert [event for event, _ in seen] == EVENTS
    assert seen[-1][1] == path.stat().st_size
    assert portions == []


def test_submissions_are_read_oldest_first(tmp_path):
    path = tmp_path / "submissions.jsonl"
    assert read_submissions(path) == []
    lines = [{"t": 20.0, "job_id": "12", "request": {"num_nodes": 2}}, {"t": 10.0, "job_id": "11"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"t": 3')
    assert read_submissions(path) == [Submission(t=10.0, job_id="11"), Submission(t=20.0, job_id="12")]


@pytest.mark.parametrize("line", ["{}", '{"t": 1}', '{"t": "soon", "job_id": "1"}', "[]", "x"])
def test_line_that_is_no_submission_is_named(tmp_path, line):
    path = tmp_path / "submissions.jsonl"
    path.write_text('{"t": 1, "job_id": "1"}\n' + line + "\n")
    with pytest.raises(HistoryError, match=r"submissions\.jsonl:2: not a submission"):
        read_submissions(path)
