"""What a rank's process is given: a device of its own, and groups that do not wait for ever."""
import os
import resource
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from jobs import runtime
from jobs.mesh import build_mesh
from jobs.node import pick_port
from jobs.parallel.expert import build_expert_mesh
from jobs.spec.parallel import ParallelDims
from tests.helpers.ranks import RanksFailed, run_ranks

pytestmark = pytest.mark.distributed

DIMS = ParallelDims(dp_shard=2, cp=2, tp=1, ep=2)
AXES = ("dp_shard", "cp", "fsdp", "ep", "expert_fsdp")


def seconds_waited_for_an_absent_rank() -> dict[str, float]:
    """By axis; on the ranks that wait for rank 3."""
    cpu = torch.device("cpu")
    mesh, experts = build_mesh(DIMS, device=cpu), build_expert_mesh(DIMS, device=cpu)
    groups = {axis: (mesh if axis in mesh.mesh_dim_names or axis == "fsdp" else experts)[axis].get_group()
              for axis in AXES}
    runtime.limit_waiting(timeout_s=0.5)
    waited = {}
    if dist.get_rank() == 3:
        return waited  # it lives on, and is asked in vain
    for axis, group in groups.items():
        if 3 in dist.get_process_group_ranks(group):
            start = time.monotonic()
            with pytest.raises(RuntimeError):
                dist.all_reduce(torch.zeros(1), group=group)
            waited[axis] = time.monotonic() - start
    return waited


def test_no_group_waits_longer_than_it_is_told():
    found = {axis: s for waited in run_ranks(seconds_waited_for_an_absent_rank, world_size=4)
             for axis, s in waited.items()}
    assert set(found) == set(AXES)
    assert max(found.values()) < 60.0, found  # torch's own limit is half an hour


def makes_a_group_late() -> None:
    port = [pick_port()]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port[0]))
    with runtime.process_group("cpu", timeout_s=60.0, seed=0):
        if dist.get_rank() == 1:
            time.sleep(0.5)
            dist.new_group([1], use_local_synchronization=True)


def test_no_rank_leaves_before_all_have_made_their_groups():
    """As in a run that is resumed at its last step: the first rank, which holds the store, has nothing to do."""
    run_ranks(makes_a_group_late, world_size=2)


def network_threads_of_a_mesh() -> int:
    build_mesh(DIMS, device=torch.device("cpu"))
    return sum((task / "comm").read_text().startswith("gloo_tcp") for task in Path("/proc/self/task").iterdir())


def test_all_groups_of_a_rank_share_one_network_thread():
    assert run_ranks(network_threads_of_a_mesh, world_size=4) == [1] * 4


def test_groups_use_the_interface_that_is_named(monkeypatch):
    """A host's own name is often 127.0.1.1: other nodes would not find the rank there."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-one")
    with pytest.raises(RanksFailed, match="no-such-one"):
        run_ranks(dist.get_rank, world_size=1)


def faults_by_step() -> list[int]:
    """Of steps that take and free 200 MiB: 50,000 each, as glibc is by itself."""
    runtime.keep_memory()
    counts = []
    for _ in range(8):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        held = [torch.ones(2**20) for _ in range(50)]
        del held
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return counts


def test_what_a_step_frees_is_not_faulted_in_again():
    assert run_ranks(faults_by_step, world_size=1)[0][-1] < 100


def test_a_rank_without_a_gpu_says_so(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "200")
    with (pytest.raises(ValueError, match=r"cluster.gpus_per_node: local rank 200 finds \d+ GPUs .*; lower it"),
          runtime.process_group("cuda", timeout_s=1.0, seed=0)):
        pass


def processes_when_the_slowest_ends() -> list[str]:
    ranks: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(ranks, os.getpid())
    if dist.get_rank() == 0:
        time.sleep(0.3)  # the others have sent their value by now
    return [psutil.Process(pid).status() for pid in ranks]


def test_a_rank_of_a_test_stays_until_all_are_done():
    """Gone before, it would fail those that are still connecting to it, in a group that itself has already made."""
    assert psutil.STATUS_ZOMBIE not in run_ranks(processes_when_the_slowest_ends, world_size=3)[0]
