"""A run's text becomes token files: bytes in the order of the paths, whatever else lies in the folder."""
import json
import subprocess
import sys

import numpy as np
import pytest

from jobs.data.token_file import TokenFile
from jobs.spec.load import SpecError, to_dict
from jobs.spec.tokens import read_info
from jobs.spec.training import DataSpec, SourceSpec
from jobs.tokens import build_tokens

FILES = {
    "b.py": b"bee",
    "a.py": b"ay",
    "sub/c.py": b"see \xc3\xa9",
    "sub/skipped/d.py": b"never",
    "notes.txt": b"not matched",
    "empty.py": b"",
    "binary.py": b"\x00\x01",
}
TOKENS = b"ay\0bee\0see \xc3\xa9\0"

REFUSED = {
    "a missing path": (dict(path="nowhere"), "does not exist"),
    "no match": (dict(pattern="*.rst"), "holds no file that matches"),
    "all excluded": (dict(pattern="sub/**/*.py", exclude=("sub",)), "holds no file that matches"),
    "only binary": (dict(pattern="binary.py"), "holds no text"),
    "only empty": (dict(pattern="empty.py"), "holds no text"),
}


@pytest.fixture
def folder(tmp_path):
    for name, content in FILES.items():
        path = tmp_path / "text" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "text"


def test_documents_lie_in_the_order_of_their_paths(folder, tmp_path):
    (tmp_path / "data").mkdir()
    out = tmp_path / "data" / "tokens.bin"
    info = build_tokens(SourceSpec(path=str(folder), pattern="**/*.py", exclude=("skipped",)), out)
    assert out.read_bytes() == TOKENS
    assert (info.num_tokens, info.num_documents, info.dtype) == (len(TOKENS), 3, "uint8")
    assert read_info(out) == info
    assert TokenFile(out).document_starts(0, len(TOKENS)).tolist() == [0, 3, 7]
    # nothing half-written
    assert sorted(p.name for p in out.parent.iterdir()) == ["tokens.bin", "tokens.bin.json", "tokens.idx"]


def test_a_single_file_is_read_whatever_the_pattern(folder, tmp_path):
    build_tokens(SourceSpec(path=str(folder / "notes.txt"), pattern="*.nothing"), tmp_path / "t.bin")
    assert (tmp_path / "t.bin").read_bytes() == b"not matched\0"


def test_equal_inputs_have_equal_fingerprints(folder, tmp_path):
    source = SourceSpec(path=str(folder), pattern="**/*.py")
    first, second = (build_tokens(source, tmp_path / name) for name in ("1.bin", "2.bin"))
    assert first == second
    (folder / "a.py").write_bytes(b"ax")
    third = build_tokens(source, tmp_path / "3.bin")
    assert third.inputs_sha256 != first.inputs_sha256 and third.checksum != first.checksum


@pytest.mark.parametrize("case", REFUSED)
def test_data_without_text_is_refused(case, folder, tmp_path):
    changes, message = REFUSED[case]
    (tmp_path / "out").mkdir()
    out = tmp_path / "out" / "t.bin"
    with pytest.raises(SpecError, match=message) as refusal:
        build_tokens(SourceSpec(**{"path": str(folder), **changes}), out)
    assert str(refusal.value).startswith("data.path: ")
    assert list(out.parent.iterdir()) == []  # nothing left behind


def command(folder, data: DataSpec, *, check: str = "pass") -> subprocess.CompletedProcess:
    folder.mkdir(exist_ok=True)
    (folder / "data.json").write_text(json.dumps(to_dict({"data": data})))
    code = f"import sys, jobs.tokens as t; rc = t.main(sys.argv[1:]); {check}; sys.exit(rc)"
    return subprocess.run([sys.executable, "-c", code, str(folder / "data.json"), str(folder)], capture_output=True,
                          text=True)


def test_the_command_makes_what_is_text_and_loads_no_torch(folder, tmp_path):
    made = build_tokens(SourceSpec(path=str(folder / "notes.txt")), tmp_path / "made.bin")
    data = DataSpec(sources=[SourceSpec(path=str(tmp_path / "made.bin")), SourceSpec(path=str(folder), pattern="*.py")])
    done = command(tmp_path / "run", data, check="assert 'torch' not in sys.modules")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found) == ["data.sources[1]"] and found["data.sources[1]"]["num_tokens"] == len(b"ay\0bee\0")
    assert np.fromfile(tmp_path / "run" / "tokens-1.bin", np.uint8).tobytes() == b"ay\0bee\0"
    assert not (tmp_path / "run" / "tokens-0.bin").exists() and read_info(tmp_path / "made.bin") == made


def test_the_command_explains_a_refusal_without_a_traceback(tmp_path):
    done = command(tmp_path / "run", DataSpec(path=str(tmp_path / "nowhere")))
    assert done.returncode == 2
    assert "nowhere' does not exist" in done.stderr and "Traceback" not in done.stderr
