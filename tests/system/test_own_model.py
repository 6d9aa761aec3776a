"""A model of the user's own through the whole path: planned, trained, killed, resumed on what was saved."""
import json
from pathlib import Path

import pytest

from jobs.spec.events import Diagnosis
from jobs.spec.reports import StepReport
from jobs.spec.rundir import RunDir
from tests.helpers.orc import ROOT, events, orc, training_run

MODEL = {"name": "mixer", "entrypoint": "my_models:build", "vocab_size": 256,
         "arguments": {"dim": 32, "depth": 4, "head_dim": 8}}


def run(folder: Path, *, ranks: int, **more) -> Path:
    folder.mkdir()
    (folder / "my_models.py").write_text((ROOT / "configs" / "examples" / "mixer.py").read_text())
    orc("run", training_run(folder, nodes=1, ranks=ranks, model=MODEL, workdir=str(folder), **more), check=True)
    return folder / "runs" / "tiny"


def test_verify_runs_an_own_models_ranks_and_agrees_with_its_plan(tmp_path: Path) -> None:
    (tmp_path / "my_models.py").write_text((ROOT / "configs" / "examples" / "mixer.py").read_text())
    wide = MODEL | {"arguments": {"dim": 128, "depth": 4, "head_dim": 16}}
    run_file = training_run(tmp_path, nodes=1, ranks=8, model=wide, workdir=str(tmp_path),
                            training={"steps": 1, "seq_len": 64, "global_batch_size": 16},
                            parallel={"tp": 2, "pp": 2, "dp_shard": 2})
    assert "every rank fits, and does what the plan says" in orc("verify", run_file, check=True).stdout


def losses(run_dir: Path) -> dict[int, float]:
    return {event.step: event.loss for event in events(run_dir) if isinstance(event, StepReport)}


def test_an_own_model_survives_a_fault_and_ends_where_one_rank_ends(tmp_path: Path) -> None:
    fault = {"attempt": 1, "step": 4, "rank": 1, "kind": "sigkill"}
    hurt = run(tmp_path / "hurt", ranks=4, parallel={"tp": 2, "pp": 2}, faults=[fault])
    alone = run(tmp_path / "alone", ranks=1)
    assert [e.kind for e in events(hurt) if isinstance(e, Diagnosis)] == ["crash", "completed"]
    assert losses(hurt) == pytest.approx(losses(alone), abs=1e-5)
    plan = json.loads((hurt / "plan.json").read_text())
    assert (plan["layout"]["tp"], plan["layout"]["pp"], plan["job"]["model"]) == (2, 2, "mixer")
    assert RunDir(hurt).committed_steps()[-1] == 6
    step = next(e for e in events(hurt) if isinstance(e, StepReport))
    assert step.mfu_convention == "full" and step.mfu > 0
