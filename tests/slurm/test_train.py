"""The main job on a real cluster: four nodes of two ranks train in three dimensions, lose a rank, and end right."""
import json
from pathlib import Path

import pytest

from jobs.spec.events import AgentJoined
from jobs.spec.rundir import RunDir
from tests.helpers.orc import MODEL, events, orc, report, training_run
from tests.helpers.slurm import wait_until_over

pytestmark = pytest.mark.slurm

CLUSTER = {"include": "slurm", "num_nodes": 4, "gpus_per_node": 2,
           "slurm": {"time_min": 5, "cpus_per_node": 2, "gres": "gpu:2", "signal_lead_s": 60}}
PARALLEL = {"tp": 2, "pp": 2, "dp_shard": 2, "dp_replicate": 1, "microbatch_size": 1}


def test_four_nodes_train_lose_a_rank_and_end_with_the_single_ranks_losses(slurm_cluster, tmp_path: Path) -> None:
    faults = [{"attempt": 1, "step": 4, "rank": 5, "kind": "sigkill"}]
    on_slurm = training_run(tmp_path / "slurm", nodes=4, ranks=2, cluster=CLUSTER, parallel=PARALLEL, faults=faults,
                            wandb={"mode": "offline"}, model=MODEL)
    alone = training_run(tmp_path / "alone", nodes=1, ranks=1)
    orc("submit", on_slurm, check=True)
    orc("run", alone, check=True)
    run_dir = tmp_path / "slurm" / "runs" / "tiny"
    job_id = json.loads(RunDir(run_dir).submissions.read_text().splitlines()[0])["job_id"]
    assert wait_until_over(job_id) == "COMPLETED|0:0", RunDir(run_dir).supervisor_log.read_text()

    seen, expected = report(run_dir), report(tmp_path / "alone" / "runs" / "tiny")
    assert (seen["state"], seen["final_step"]) == ("completed", 6)
    assert [(a["diagnosis"], a["decision"], a["suspects"]) for a in seen["attempts"]] == [
        ("crash", "restart", ["rank 5 on n3"]), ("completed", "finish", [])]
    assert seen["losses"].keys() == expected["losses"].keys()
    assert max(abs(seen["losses"][step] - expected["losses"][step]) for step in expected["losses"]) < 1e-5
    joined = [e for e in events(run_dir) if isinstance(e, AgentJoined)]
    assert {e.node: e.host for e in joined} == {n: n for n in ("n1", "n2", "n3", "n4")}
    assert all(e.gpus == 2 for e in joined)
    assert len(list(Path(seen["wandb"]["dir"]).rglob("*.wandb"))) == 1
