"""Every pipeline schedule computes what one rank computes, with even and uneven stages, tied and untied, under every
kind of data and tensor parallelism it can be combined with."""
import dataclasses
import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules

from jobs.parallel.stage import Stage
from jobs.spec.support import layout_problems
from tests.helpers.ranks import run_ranks
from tests.helpers.training import TINY, assert_matches_single_rank, build_model, job, layout

pytestmark = pytest.mark.distributed

EIGHT = dataclasses.replace(TINY, num_layers=8)
TIED = dataclasses.replace(TINY, tie_embeddings=True)
MANY = dict(microbatch_size=1)  # eight microbatches on one replica

INTERLEAVED = dict(schedule="interleaved_1f1b", virtual_stages=2)
IZB = dict(schedule="interleaved_zero_bubble", virtual_stages=2)
ZBV = dict(schedule="zbv", virtual_stages=2)
DUALPIPEV = dict(schedule="dualpipev", virtual_stages=2)

# what is special about the case → (layout, model)
FAST = {
    "gpipe": (dict(pp=2, schedule="gpipe"), TINY),
    "interleaved": (dict(pp=2, **INTERLEAVED), TINY),
    "zero bubble": (dict(pp=2, **IZB), TINY),
    "V: first and last stage on one rank, tied": (dict(pp=2, **ZBV), TIED),
    "DualPipe's V": (dict(pp=2, **DUALPIPEV), TINY),
}
SLOW = {
    "gpipe, fewer microbatches than stages": (dict(pp=4, schedule="gpipe", microbatch_size=4), TINY),
    "gpipe, tied": (dict(pp=2, schedule="gpipe"), TIED),
    "gpipe, uneven": (dict(pp=2, layers_per_stage=(1, 3), schedule="gpipe"), TINY),
    "interleaved, four stages a rank": (dict(pp=2, schedule="interleaved_1f1b", virtual_stages=4), EIGHT),
    "interleaved, tied across ranks": (dict(pp=2, **INTERLEAVED), TIED),
    "interleaved, uneven": (dict(pp=2, layers_per_stage=(1, 3, 2, 2), **INTERLEAVED), EIGHT),
    "interleaved, a stage of the embedding alone": (dict(pp=2, layers_per_stage=(0, 2, 1, 1), **INTERLEAVED), TINY),
    "interleaved, more microbatches than a round": (dict(pp=2, **INTERLEAVED, **MANY), TINY),
    "zero bubble, tied": (dict(pp=2, **IZB), TIED),
    "zero bubble, uneven": (dict(pp=2, layers_per_stage=(1, 3, 2, 2), **IZB), EIGHT),
    "V, uneven": (dict(pp=2, layers_per_stage=(1, 2, 3, 2), **ZBV), EIGHT),
    "V over four ranks": (dict(pp=4, **ZBV, **MANY), EIGHT),
    "DualPipe's V, tied": (dict(pp=2, **DUALPIPEV), TIED),
    "DualPipe's V, uneven": (dict(pp=2, layers_per_stage=(1, 2, 3, 2), **DUALPIPEV), EIGHT),
    "DualPipe's V over four ranks": (dict(pp=4, **DUALPIPEV, **MANY), EIGHT),
    # weight gradients that go round autograd's hooks must still be reduced
    "zero bubble and replicas": (dict(pp=2, dp_replicate=2, **IZB), TINY),
    "zero bubble and ZeRO-1": (dict(pp=2, dp_shard=2, zero_stage=1, **IZB), TINY),
    "V and replicas, tied": (dict(pp=2, dp_replicate=2, **ZBV), TIED),
    "V and ZeRO-1, tied": (dict(pp=2, dp_shard=2, zero_stage=1, **ZBV), TIED),
    "DualPipe's V and ZeRO-1": (dict(pp=2, dp_shard=2, zero_stage=1, microbatch_size=1, **DUALPIPEV), TINY),
    # torch gathers whole stages ahead under these schedules, and drops some again when a rank holds more than three
    "zero bubble and ZeRO-2": (dict(pp=2, dp_shard=2, zero_stage=2, **IZB), TINY),
    "zero bubble and ZeRO-2, four stages a rank": (dict(pp=2, dp_shard=2, zero_stage=2, virtual_stages=4,
                                                        schedule="interleaved_zero_bubble"), EIGHT),
    "V and ZeRO-2, tied": (dict(pp=2, dp_shard=2, zero_stage=2, **ZBV), TIED),
    "DualPipe's V and ZeRO-2": (dict(pp=2, dp_shard=2, zero_stage=2, microbatch_size=1, **DUALPIPEV), TINY),
    "interleaved and ZeRO-3": (dict(pp=2, dp_shard=2, **INTERLEAVED), TINY),
    "interleaved and ZeRO-3, four stages a rank": (dict(pp=2, dp_shard=2, schedule="interleaved_1f1b",
                                                        virtual_stages=4), EIGHT),
    "gpipe and ZeRO-3": (dict(pp=2, dp_shard=2, schedule="gpipe"), TINY),
    "interleaved and HSDP": (dict(pp=2, dp_shard=2, dp_replicate=2, microbatch_size=1, **INTERLEAVED), TINY),
    # backward in two halves through tensor parallelism's own autograd functions
    "zero bubble and tp": (dict(pp=2, tp=2, **IZB), TINY),
    "V and tp, tied": (dict(pp=2, tp=2, **ZBV), TIED),
    "DualPipe's V and tp": (dict(pp=2, tp=2, **DUALPIPEV), TINY),
    "V, tp and ZeRO-2, tied": (dict(pp=2, tp=2, dp_shard=2, zero_stage=2, **ZBV), TIED),
    "V, tp and ZeRO-1, tied": (dict(pp=2, tp=2, dp_shard=2, zero_stage=1, **ZBV), TIED),
    # with recompute backward is not split
    "V, recompute selective": (dict(pp=2, recompute="selective", **ZBV), TINY),
    "zero bubble, recompute full, ZeRO-1": (dict(pp=2, dp_shard=2, zero_stage=1, recompute="full", **IZB), TINY),
    "V, recompute full, ZeRO-2": (dict(pp=2, dp_shard=2, zero_stage=2, recompute="full", **ZBV), TINY),
    "zero bubble, recompute full": (dict(pp=2, recompute="full", **IZB), TINY),
    "V, recompute full, tied": (dict(pp=2, recompute="full", **ZBV), TIED),
    "V, fewer microbatches than stages": (dict(pp=2, microbatch_size=4, **ZBV), TINY),
    "zero bubble, one microbatch": (dict(pp=2, microbatch_size=8, **IZB), TINY),
    "interleaved, recompute selective": (dict(pp=2, recompute="selective", **INTERLEAVED), TINY),
    "interleaved, recompute full": (dict(pp=2, recompute="full", **INTERLEAVED), TINY),
}


@pytest.mark.parametrize("case", FAST)
def test_schedule_matches_single_rank(case, tmp_path):
    arguments, model = FAST[case]
    assert_matches_single_rank(tmp_path, layout(model=model, **arguments), model=model)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_schedule_combined_matches_single_rank(case, tmp_path):
    arguments, model = SLOW[case]
    assert_matches_single_rank(tmp_path, layout(model=model, **arguments), model=model)


# ------------------------------------------------------------------ messages and computation
def events(spec) -> str:
    """What this rank does in a step, in order: F and B compute; s and r start to send and to receive; S and R wait for
    it."""
    seen, start = [], schedules._batch_p2p

    class Waited:
        def __init__(self, work, name: str) -> None:
            self.work, self.name = work, name

        def wait(self) -> None:
            seen.append(self.name)
            self.work.wait()

    def logged(ops, desc=None):
        names = ["r" if op.op is dist.irecv else "s" for op in ops]
        seen.extend(names)
        return [Waited(work, name.upper()) for work, name in zip(start(ops), names)]

    schedules._batch_p2p = logged
    for name, kind in (("forward_one_chunk", "F"), ("backward_one_chunk", "B")):
        compute = getattr(Stage, name)
        setattr(Stage, name, lambda *args, compute=compute, kind=kind, **rest:
                seen.append(kind) or compute(*args, **rest))
    batch = torch.zeros(8, 16, dtype=torch.int64)
    build_model(spec).forward_backward(batch, batch)
    return "".join(seen)


def test_the_next_activation_comes_while_a_backward_is_computed(tmp_path):
    first, last = run_ranks(events, world_size=2, args=(job(tmp_path, layout(pp=2)),))
    assert first == "Fs" "FsrRB" "FsrRB" "FsrRB" "rRB" "SSSS"
    assert last == "rRF" "rBsRF" "rBsRF" "rBsRF" "Bs" "SSSS"


@pytest.mark.parametrize("schedule", [dict(), dict(schedule="gpipe"), INTERLEAVED, IZB, ZBV, DUALPIPEV],
                         ids=lambda arguments: arguments.get("schedule", "1f1b"))
def test_nothing_is_computed_behind_a_send_that_is_waited_for(schedule, tmp_path):
    for seen in run_ranks(events, world_size=2, args=(job(tmp_path, layout(pp=2, **schedule)),)):
        assert {"F", "B", "s", "r"} <= set(seen)
        assert not set(seen.partition("S")[2]) - {"S"}


# what is wrong → (layout, message)
REFUSED = {
    "ZeRO-3 under a zero bubble": (dict(pp=2, dp_shard=2, **IZB), "zero_stage: 3 drops weights .* silently wrong"),
    "ZeRO-3 in a V": (dict(pp=2, dp_shard=2, **ZBV), "zero_stage: 3 drops weights"),
    "cp is sharding too": (dict(pp=2, cp=2, **DUALPIPEV), "zero_stage: 3 drops weights"),
    "a V of one stage": (dict(pp=2, schedule="zbv"), "virtual_stages: 1 does not go with schedule=zbv; set 2"),
    "1f1b of two stages a rank": (dict(pp=2, virtual_stages=2), "virtual_stages: 2 does not go with .*; set 1"),
    "interleaved of one": (dict(pp=2, schedule="interleaved_1f1b"), "virtual_stages: 1 .*; set 2 or more"),
    "stages without a pipeline": (dict(virtual_stages=2), "virtual_stages: 2 does not go with pp=1; set 1"),
    "too few for DualPipe": (dict(pp=2, microbatch_size=4, **DUALPIPEV), "num_microbatches: 2 .* at least 4"),
    "too few for 1f1b": (dict(pp=4, microbatch_size=4), "num_microbatches: 2 .* at least 4"),
    "unequal rounds": (dict(pp=2, global_batch_size=10, num_microbatches=5, **INTERLEAVED),
                       "num_microbatches: 5 .* 4 and 6"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_schedule_cannot_do_is_refused(case):
    arguments, message = REFUSED[case]
    changes = {name: arguments[name] for name in ("num_microbatches",) if name in arguments}
    where = dataclasses.replace(layout(**{k: v for k, v in arguments.items() if k not in changes}), **changes)
    assert any(re.search(message, str(problem)) for problem in layout_problems(where)), layout_problems(where)
