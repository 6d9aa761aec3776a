"""The whole path in a few seconds: YAML → plan → placement → job → parallel training → fault → recovery → report."""
from pathlib import Path

from tests.helpers.orc import orc, report, training_run

PARALLEL = {"tp": 2, "pp": 2, "dp_shard": 1, "microbatch_size": 1}


def test_a_run_that_loses_a_rank_ends_like_one_that_does_not(tmp_path: Path) -> None:
    fault = {"attempt": 1, "step": 4, "rank": 3, "kind": "sigkill"}
    broken = training_run(tmp_path / "broken", nodes=2, ranks=2, parallel=PARALLEL, faults=[fault],
                          wandb={"mode": "offline"})
    whole = training_run(tmp_path / "whole", nodes=1, ranks=1)
    orc("run", broken, check=True)
    orc("run", whole, check=True)
    seen, expected = report(tmp_path / "broken" / "runs" / "tiny"), report(tmp_path / "whole" / "runs" / "tiny")

    assert (seen["state"], seen["final_step"]) == ("completed", 6)
    assert [(a["diagnosis"], a["decision"], a["first_step"], a["last_step"]) for a in seen["attempts"]] \
        == [("crash", "restart", 1, 3), ("completed", "finish", 3, 6)]
    assert seen["attempts"][0]["suspects"] == ["rank 3 on node-1"]
    assert seen["losses"].keys() == expected["losses"].keys()
    assert max(abs(seen["losses"][step] - expected["losses"][step]) for step in expected["losses"]) < 1e-5
    run_dir = tmp_path / "broken" / "runs" / "tiny"
    for name in ("config.yaml", "plan.json", "submissions.jsonl", "events.jsonl", "attempts/1/placement.json",
                 "attempts/2/job.json", "attempts/2/request.json", "attempts/1/logs/rank-00003.log"):
        assert (run_dir / name).stat().st_size >= 0, name  # every arrow of the flow leaves its file
    assert len(list((Path(seen["wandb"]["dir"])).rglob("*.wandb"))) == 1  # one W&B run over both attempts
