"""A run starts from Hugging Face's weights in any layout, and what it has trained goes back to such a folder."""
import dataclasses
import json

import pytest

from jobs.export import export
from jobs.safetensors import Folder
from jobs.spec.load import to_dict
from jobs.spec.rundir import RunDir
from jobs.train import first_weights
from tests.helpers.models import DEEPSEEK3, LLAMA3
from tests.helpers.training import TRAINING, commit, job, layout, train_job

pytestmark = pytest.mark.distributed

# name → (layout of the run that starts from the folder, model)
CASES = {
    "one rank": (dict(), LLAMA3),
    "tp2 × dp_shard2": (dict(tp=2, dp_shard=2), LLAMA3),
    "pp2, ZeRO-1": (dict(pp=2, dp_shard=2, zero_stage=1), LLAMA3),
    "latents and experts over tp2, ep2": (dict(tp=2, ep=2), DEEPSEEK3),
    "experts over dp_shard4, ep2": (dict(dp_shard=4, ep=2, microbatch_size=1), DEEPSEEK3),
}


def trained_and_exported(run_dir, spec) -> list[float]:
    outcome = train_job(spec)
    commit(run_dir, outcome.shards, step=spec.training.steps)
    path = RunDir(run_dir).job(1)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(to_dict(spec)))
    export(RunDir(run_dir), step=spec.training.steps, folder=run_dir / "hub")
    return outcome.losses


@pytest.mark.parametrize("case", CASES)
def test_a_run_continues_from_a_folder_in_any_layout(case, tmp_path):
    arguments, model = CASES[case]
    first = dataclasses.replace(TRAINING, steps=2, seed=3)
    trained_and_exported(tmp_path / "first", job(tmp_path / "first", layout(model=model), model=model, training=first))
    folder = tmp_path / "first" / "hub"
    training = dataclasses.replace(TRAINING, steps=3, initial_weights=str(folder))
    losses = [trained_and_exported(tmp_path / name, job(tmp_path / name, layout(model=model, **degrees), model=model,
                                                        training=training))
              for name, degrees in (("one", {}), ("many", arguments))]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5, rel=0)
    random = job(tmp_path / "random", layout(model=model), model=model,
                 training=dataclasses.replace(training, initial_weights=None))
    assert abs(trained_and_exported(tmp_path / "random", random)[0] - losses[0][0]) > 0.05
    theirs = [Folder(tmp_path / name / "hub") for name in ("one", "many")]
    for name in theirs[0].names():
        assert (theirs[0].tensor(name) - theirs[1].tensor(name)).abs().max() < 1e-3


def test_a_resumed_run_does_not_start_over(tmp_path):
    training = dataclasses.replace(TRAINING, initial_weights=str(tmp_path))
    assert first_weights(job(tmp_path, layout(), model=LLAMA3, training=training, resume_step=2)) is None
