"""What an attempt is before it starts: who computes what where, and what its ranks are told; files of its folder.

Called by the supervisor, before each attempt. Knows nothing of what becomes of it.
"""
import json
import os
from pathlib import Path

from jobs.spec.job import JobSpec
from jobs.spec.load import to_dict
from jobs.spec.parallel import Layout
from jobs.spec.rundir import RunDir
from orchestrator.config import RunConfig
from orchestrator.placement import Placement, place, place_command
from orchestrator.planner import layout_from_flat
from orchestrator.submission.assemble import assemble_job, assemble_request


def read_layout(run_dir: RunDir) -> Layout:
    """The plan's."""
    return layout_from_flat(json.loads(run_dir.plan.read_text())["layout"])


def write_attempt(config: RunConfig, *, layout: Layout | None, nodes: tuple[str, ...], run_dir: RunDir, attempt: int,
                  resume_step: int | None) -> tuple[Placement, JobSpec]:
    """On `nodes`, in topology order. `layout` None: a trainer of the user's own, which lays itself out. Raises
    PlacementError."""
    where = {"cluster": config.cluster, "nodes": nodes, "excluded": (), "spares": config.placement.spares}
    placement = place_command(**where) if layout is None else place(
        layout, allow_tp_across_nodes=config.placement.allow_tp_across_nodes, **where)
    job = assemble_job(config, layout=layout, world_size=placement.world_size, run_dir=run_dir.path, attempt=attempt,
                       resume_step=resume_step)
    for path, content in ((run_dir.placement(attempt), placement), (run_dir.job(attempt), job),
                          (run_dir.request(attempt), assemble_request(config))):
        write_json(path, to_dict(content))
    return placement, job


def write_json(path: Path, data) -> None:
    """Atomically: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(data, indent=1) + "\n")
    os.replace(temporary, path)
