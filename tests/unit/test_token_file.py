"""Token files are Megatron-LM's .bin/.idx: read as others write them, refused by name where they are damaged."""
import json
import struct
from pathlib import Path

import numpy as np
import pytest

from jobs.data.token_file import TokenFile
from jobs.data.writer import TokenWriter
from jobs.spec.load import SpecError
from jobs.spec.tokens import absolute_source, info_path, read_info

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}
DOCUMENTS = [[[5, 6, 7], [8]], [[9]], [[1, 2, 3, 4, 5, 6]]]  # the first is of two sequences
STARTS = [0, 4, 5]
NUM_TOKENS = 11

# What is written about documents: with every mark, with none, with the leading 0 alone (seen in the wild), and with
# what multimodal files have behind the marks.
MARKS = {
    "marks": ([0, 2, 3, 4], b"", STARTS),
    "no marks": ([], b"", [0, 3, 4, 5]),
    "one mark": ([0], b"", [0, 3, 4, 5]),
    "modes behind": ([0, 2, 3, 4], b"\0\0\0\0", STARTS),
    "an empty last document": ([0, 2, 3, 4, 4], b"", STARTS),
}

DAMAGE = {
    "no index": (lambda t: t.with_suffix(".idx").unlink(), "needs both"),
    "nothing": (lambda t: empty(t), "holds no token"),
    "no tokens": (lambda t: t.unlink(), "needs both"),
    "tokens cut short": (lambda t: t.write_bytes(t.read_bytes()[:-1]), "do not belong together"),
    "index cut short": (lambda t: cut(t.with_suffix(".idx"), -1), "cut short"),
    "header cut short": (lambda t: cut(t.with_suffix(".idx"), 20), "no index of tokens"),
    "another format": (lambda t: t.with_suffix(".idx").write_bytes(b"x" * 200), "no index of tokens"),
    "the old format": (lambda t: t.with_suffix(".idx").write_bytes(b"TNTIDX\0\0" + b"\0" * 100), "TNTIDX"),
    "another version": (lambda t: patch(t.with_suffix(".idx"), 9, b"\2"), "version 2"),
    "floats": (lambda t: patch(t.with_suffix(".idx"), 17, b"\6"), "numbers of kind 6"),
    "another file's description": (lambda t: info_path(t).write_text(json.dumps(
        {"num_tokens": 12, "dtype": "uint16", "num_documents": 3})), "is not what"),
    "a description that is none": (lambda t: info_path(t).write_text('{"num_token": 11}'), "did you mean"),
    "a torn description": (lambda t: info_path(t).write_text("{"), "a description that is not JSON"),
    "a binary description": (lambda t: info_path(t).write_bytes(b"\xff\xd1"), "a description that is not JSON"),
    "a list as description": (lambda t: info_path(t).write_text("[]"), "expected"),
}


def empty(tokens: Path) -> None:
    with TokenWriter(tokens, dtype="uint8") as writer:
        writer.commit(vocab_size=1, tokenizer="t", eod=None, inputs_sha256="")


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def patch(path: Path, place: int, content: bytes) -> None:
    whole = bytearray(path.read_bytes())
    whole[place:place + len(content)] = content
    path.write_bytes(whole)


def as_others_write(tokens: Path, *, dtype: str = "uint16", marks=(0, 2, 3, 4), behind: bytes = b"") -> Path:
    """From the format's description alone, with none of our writer's code."""
    sequences = [np.array(s, dtype=dtype) for document in DOCUMENTS for s in document]
    lengths = [len(s) for s in sequences]
    offsets = [sum(lengths[:i]) * sequences[0].itemsize for i in range(len(lengths))]
    tokens.write_bytes(b"".join(s.tobytes() for s in sequences))
    tokens.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", CODES[dtype]) + struct.pack("<Q", len(lengths))
        + struct.pack("<Q", len(marks)) + b"".join(struct.pack("<i", n) for n in lengths)
        + b"".join(struct.pack("<q", o) for o in offsets) + b"".join(struct.pack("<q", m) for m in marks) + behind)
    return tokens


@pytest.mark.parametrize("dtype", CODES)
def test_files_of_others_are_read(dtype, tmp_path):
    file = TokenFile(as_others_write(tmp_path / "t.bin", dtype=dtype))
    assert (file.info.num_tokens, file.info.dtype, file.info.num_documents) == (NUM_TOKENS, dtype, 3)
    assert file.info.vocab_size is None and file.info.tokenizer is None  # nobody has said
    assert file.window(3, 4).tolist() == [8, 9, 1, 2] and file.window(3, 4).dtype == np.int64
    file.will_need(3, 4)


@pytest.mark.parametrize("case", MARKS)
def test_documents_begin_where_the_marks_say(case, tmp_path):
    marks, behind, starts = MARKS[case]
    file = TokenFile(as_others_write(tmp_path / "t.bin", marks=marks, behind=behind))
    for start in range(NUM_TOKENS + 1):
        for stop in range(start, NUM_TOKENS + 1):
            wanted = [s for s in starts if start <= s < stop]
            assert file.document_starts(start, stop).tolist() == wanted, (start, stop)


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_file_is_refused(case, tmp_path):
    damage, message = DAMAGE[case]
    tokens = as_others_write(tmp_path / "t.bin")
    damage(tokens)
    with pytest.raises(SpecError, match=message):
        read_info(tokens)


def test_what_is_written_is_what_others_would_write(tmp_path):
    theirs = as_others_write(tmp_path / "theirs.bin")
    with TokenWriter(tmp_path / "ours.bin", dtype="uint16") as writer:
        writer.write(np.array([5, 6, 7, 8]), lengths=np.array([3, 1]), opens=np.array([True, False]))
        writer.write(np.array([9, 1, 2]), lengths=np.array([1, 2]), opens=np.array([True, True]))
        writer.write(np.array([3, 4, 5, 6]), lengths=np.array([4]), opens=np.array([False]))
        info = writer.commit(vocab_size=10, tokenizer="t", eod=None, inputs_sha256="")
    assert (tmp_path / "ours.bin").read_bytes() == theirs.read_bytes()
    assert TokenFile(tmp_path / "ours.bin").document_starts(0, NUM_TOKENS).tolist() == STARTS
    assert read_info(tmp_path / "ours.bin") == info and info.vocab_size == 10
    assert len(list(tmp_path.iterdir())) == 5  # two of theirs, three of ours


def test_a_long_index_is_written_in_blocks_and_read_in_place(tmp_path, monkeypatch):
    monkeypatch.setattr("jobs.data.writer.BLOCK", 7)
    with TokenWriter(tmp_path / "t.bin", dtype="int32") as writer:
        for i in range(100):
            writer.write(np.arange(i % 5), lengths=np.array([i % 5]), opens=np.array([True]))  # some are empty
        writer.commit(vocab_size=5, tokenizer="t", eod=None, inputs_sha256="")
    starts = np.cumsum([0] + [i % 5 for i in range(100)])
    found = TokenFile(tmp_path / "t.bin").document_starts(0, 10**6)
    assert found.tolist() == sorted(set(starts[:-1].tolist()))


def test_an_error_leaves_what_was_there(tmp_path):
    as_others_write(tmp_path / "t.bin")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(KeyboardInterrupt), TokenWriter(tmp_path / "t.bin", dtype="uint8") as writer:
        writer.write(np.array([1]), lengths=np.array([1]), opens=np.array([True]))
        raise KeyboardInterrupt
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_prefix_or_an_index_names_the_token_file(tmp_path):
    tokens = as_others_write(tmp_path / "t.bin")
    (tmp_path / "text").write_text("x")
    assert {absolute_source(str(tmp_path / name)) for name in ("t", "t.idx", "t.bin")} == {str(tokens)}
    assert absolute_source(str(tmp_path / "text")) == str(tmp_path / "text")
