"""What lies on disk: raw bytes and a JSON index that a person, or another program, can read without torch."""
import json
import zlib

import numpy as np
import pytest
import torch

from jobs import checkpoint
from jobs.checkpoint import CheckpointCorrupt, Progress, TrainingState
from jobs.spec.rundir import MANIFEST

STEP = 7
TENSORS = {
    "model.a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "model.half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "optim.a.step": torch.tensor(3.0),
    "model.empty": torch.empty(0, 3),
}


class State:
    """The part of TrainingState that save and load use, over a dict of plain tensors."""

    rank = 3

    def __init__(self, tensors: dict) -> None:
        self._tensors = tensors
        self.restored: dict = {}

    def tensors(self) -> dict:
        return self._tensors

    owned = tensors

    def repeat_aliases(self) -> None: ...

    def random(self) -> dict:
        return {"random.00003.cpu": torch.tensor([1, 2, 3], dtype=torch.uint8)}

    def set_random(self, states: dict) -> None:
        self.restored = states


@pytest.fixture
def saved(tmp_path):
    files = checkpoint.save(tmp_path, State(TENSORS), progress=Progress(step=STEP, data_cursor=9), layout={"tp": 1})
    manifest = {"files": [{"name": f.name, "size_bytes": f.size_bytes, "checksum": f.checksum} for f in files]}
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    return tmp_path, files


def blank() -> State:
    return State({name: torch.zeros_like(t) for name, t in TENSORS.items()})


def test_the_reported_files_are_the_files(saved):
    folder, files = saved
    assert [f.name for f in files] == ["rank-00003.bin", "rank-00003.json"]
    for file in files:
        content = (folder / file.name).read_bytes()
        assert file.size_bytes == len(content)
        assert file.checksum == f"crc32:{zlib.crc32(content):08x}"


def test_a_tensor_can_be_read_without_torch(saved):
    folder, _ = saved
    index = json.loads((folder / "rank-00003.json").read_text())
    chunk = next(c for c in index["chunks"] if c["tensor"] == "model.a")
    raw = (folder / "rank-00003.bin").read_bytes()[chunk["byte_offset"]:][:chunk["num_bytes"]]
    assert [chunk[key] for key in ("dtype", "shape", "offsets", "sizes")] == ["torch.float32", [2, 3], [0, 0], [2, 3]]
    assert np.frombuffer(raw, "<f4").tolist() == [0, 1, 2, 3, 4, 5]
    assert zlib.crc32(raw) == chunk["crc32"]
    assert (index["step"], index["data_cursor"], index["rank"], index["layout"]) == (STEP, 9, 3, {"tp": 1})


def test_what_was_saved_is_loaded_bit_for_bit(saved):
    state = blank()
    progress = checkpoint.load(saved[0], state, step=STEP, layout={"tp": 1})
    assert progress == Progress(step=STEP, data_cursor=9)
    for name, tensor in TENSORS.items():
        assert torch.equal(state.tensors()[name], tensor), name
    assert state.restored["random.00003.cpu"].tolist() == [1, 2, 3]


def test_random_states_are_restored_in_the_same_layout_only(saved):
    state = blank()
    checkpoint.load(saved[0], state, step=STEP, layout={"tp": 2})
    assert state.restored == {}


def test_a_generator_goes_on_where_it_was_saved():
    state = TrainingState({}, None, rank=0, device=torch.device("cpu"), copies=frozenset(), aliases={})
    torch.manual_seed(3)
    saved = {name: value.clone() for name, value in state.random().items()}
    expected = torch.rand(4)
    torch.manual_seed(4)
    state.set_random(saved)
    assert torch.equal(torch.rand(4), expected)


REFUSED = {
    "another step": (dict(step=STEP + 1), {}, "expected format 1, step 8"),
    "a tensor it does not hold": ({}, {"model.new": torch.zeros(2)}, "covers no tensor 'model.new'"),
    "another shape": ({}, {"model.a": torch.zeros(3, 2)}, r"shape \(2, 3\), the model needs \(3, 2\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case, saved):
    arguments, tensors, message = REFUSED[case]
    with pytest.raises(CheckpointCorrupt, match=message):
        checkpoint.load(saved[0], State(blank().tensors() | tensors), **{"step": STEP, "layout": {}, **arguments})


@pytest.mark.parametrize("position", [0, 20, -1])
def test_no_byte_of_a_shard_can_change_unnoticed(position, saved):
    path = saved[0] / "rank-00003.bin"
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)
    with pytest.raises(CheckpointCorrupt, match=f"step {STEP}.*rank-00003.bin"):
        checkpoint.load(saved[0], blank(), step=STEP, layout={"tp": 1})


def test_a_shard_holds_the_tensors_bytes_and_nothing_else(saved):
    folder, _ = saved
    chunks = json.loads((folder / "rank-00003.json").read_text())["chunks"]
    raw = b"".join(t.reshape(-1).view(torch.uint8).numpy().tobytes() for t in (TENSORS | State({}).random()).values())
    assert (folder / "rank-00003.bin").stat().st_size == sum(c["num_bytes"] for c in chunks) == len(raw)
    assert sorted((folder / "rank-00003.bin").read_bytes()) == sorted(raw)
