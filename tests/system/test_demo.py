"""`make demo`'s own commands, whole: what the README promises is what happens."""
import json
from pathlib import Path

from tests.helpers.orc import ROOT, orc, report

DEMO = ROOT / "configs" / "runs" / "demo.yaml"


def test_the_demo_plans_trains_loses_a_rank_recovers_and_reports(tmp_path: Path) -> None:
    plan = orc("plan", DEMO, check=True).stdout
    for word in ("dp_shard=2", "tp=2", "pp=2", "memory", "communication", "bubble", "rejected"):
        assert word in plan

    seen = orc("run", DEMO, f"root={tmp_path}", "policy.settle_s=3600", check=True).stdout  # every rank ends by itself
    assert "rank 3 on node-0 was killed by SIGKILL" in seen
    assert "restart from step 30" in seen

    run_dir = tmp_path / "demo"
    summary = report(run_dir)
    assert (summary["state"], summary["final_step"]) == ("completed", 60)
    assert [(a["n"], a["diagnosis"], a["first_step"], a["last_step"]) for a in summary["attempts"]] == [
        (1, "crash", 1, 34), (2, "completed", 31, 60)]
    assert list(map(int, summary["losses"])) == list(range(1, 61))
    assert summary["losses"]["1"] > 5 and summary["final_loss"] < 3
    assert list(summary["validation_losses"]) == ["20", "40", "60"] and "validation after step 20  loss " in seen
    assert summary["validation_losses"]["20"] > summary["validation_losses"]["60"] > 1
    assert 0 < summary["goodput"]["validation_s"] < summary["goodput"]["wall_s"] / 2
    assert summary["tokens_per_s"] > 0 and 0 < summary["mfu"] < 1

    status = orc("status", run_dir, check=True).stdout
    for word in ("completed", "crash", "restart", "goodput", "checkpoints", "W&B", "MFU", "validation after step 60"):
        assert word in status
    assert orc("report", run_dir, check=True).stdout.count(".png") >= 1
    pictures = list((run_dir / "report").glob("*.png"))
    assert pictures and all(p.read_bytes().startswith(b"\x89PNG") for p in pictures)
    manifest = json.loads((run_dir / "checkpoints" / "step-00000060" / "manifest.json").read_text())
    assert manifest["world_size"] == 8
