"""orc data inspect: what a token file holds, decoded where the tokenizer is at hand."""
import numpy as np
import pytest

from jobs.data.inspect import main
from jobs.data.writer import TokenWriter
from jobs.spec.tokens import info_path
from tests.helpers.orc import orc


@pytest.fixture
def tokens(tmp_path):
    text = b"first\0second\0"
    with TokenWriter(tmp_path / "t.bin", dtype="uint8") as writer:
        writer.write(np.frombuffer(text, np.uint8), lengths=np.array([6, 7]), opens=np.array([True, True]))
        writer.commit(vocab_size=256, tokenizer="bytes", eod=0, inputs_sha256="")
    return tmp_path / "t.bin"


@pytest.mark.parametrize("name", ["t", "t.bin", "t.idx"])
def test_the_facts_are_printed_under_any_name(name, tokens, capsys):
    assert main([str(tokens.with_name(name)), "--check"]) == 0
    said = capsys.readouterr().out
    rows = {line[:17].strip(): line[17:] for line in said.splitlines()}
    assert rows["tokens"] == "13" and rows["documents"] == "2" and rows["vocabulary"] == "256"
    assert rows["per token"] == "uint8" and rows["tokenizer"] == "bytes" and rows["end of document"] == "token 0"
    assert rows["document 0"] == repr("first\0") and rows["document 1"] == repr("second\0")
    assert rows["largest token"] == "116"


def test_what_nobody_has_said_is_unknown(tokens, capsys):
    info_path(tokens).unlink()
    assert main([str(tokens)]) == 0
    said = capsys.readouterr().out
    assert "unknown: no description" in said and "102 105 114 115 116 0" in said


def test_damage_is_found(tokens, capsys):
    content = bytearray(tokens.read_bytes())
    content[3] ^= 1
    tokens.write_bytes(content)
    assert main([str(tokens)]) == 0  # only --check reads all of it
    assert main([str(tokens), "--check"]) == 2
    assert "is damaged: its checksum is" in capsys.readouterr().err


def test_sequences_out_of_order_are_found(tokens, capsys):
    index = bytearray(tokens.with_suffix(".idx").read_bytes())
    offsets = 34 + 2 * 4
    index[offsets:offsets + 8] = (7).to_bytes(8, "little")  # the first behind the second
    tokens.with_suffix(".idx").write_bytes(index)
    assert main([str(tokens), "--check"]) == 2
    assert "do not lie in the order of its index" in capsys.readouterr().err


def test_the_command_line_passes_everything_on(tokens, tmp_path):
    (tmp_path / "a.txt").write_text("ab")
    done = orc("data", "tokenize", tmp_path / "a.txt", "-o", tmp_path / "new", "--no-append-eod")
    assert done.returncode == 0 and (tmp_path / "new.bin").read_bytes() == b"ab"
    done = orc("data", "inspect", tmp_path / "nowhere")
    assert done.returncode == 2 and "needs both" in done.stderr and "Traceback" not in done.stderr
