"""What latent attention and experts send is what the tables of jobs.parallel.tensor and jobs.parallel.expert say,
counted in a real step."""
import collections
import dataclasses

import pytest
import torch

from jobs.verify.collectives import CollectiveLog
from tests.helpers.communication import sent
from tests.helpers.models import DEEPSEEK3, MIXTURE
from tests.helpers.ranks import run_ranks
from tests.helpers.training import TRAINING, build_model, job, layout

pytestmark = pytest.mark.distributed

F32, I64 = 4, 8
BATCH, SEQ, DIM = 2, TRAINING.seq_len, DEEPSEEK3.dim
A = BATCH * SEQ * DIM * F32
LATENT = dataclasses.replace(DEEPSEEK3, moe=None)
UNCOMPRESSED = dataclasses.replace(LATENT, mla=dataclasses.replace(LATENT.mla, q_lora_rank=None))
BIASED, LOSS = dataclasses.replace(DEEPSEEK3, num_layers=2), dataclasses.replace(MIXTURE, num_layers=2)


def communicate(spec) -> dict[tuple[str, int], int]:
    parallel = build_model(spec)
    where = spec.layout
    rows = where.microbatch_size * where.num_microbatches
    tokens = (torch.arange(rows * SEQ) * 7 % 256).view(rows, SEQ)
    parallel.forward_backward(tokens, tokens)
    with CollectiveLog() as log:
        parallel.forward_backward(tokens, tokens)
    return sent(log.collectives())


def latent(model, *, sequence_parallel: bool, recompute: bool) -> dict[tuple[str, int], int]:
    """Of tp2 and one microbatch: four layers of latent attention and FFN, embedding, output, loss."""
    mla, layers, again = model.mla, model.num_layers, model.num_layers * recompute
    latents = [mla.q_lora_rank or DIM, mla.kv_lora_rank, mla.qk_rope_head_dim]
    seen: collections.Counter[tuple[str, int]] = collections.Counter()
    if sequence_parallel:
        for size in latents:
            seen["all_gather", A * size // DIM] += layers + again
            seen["reduce_scatter", A * size // DIM] += layers
        # ffn in (once more in the backward, recomputed or not), both backwards, embedding's back, output
        seen["all_gather", A] += 2 * layers + 2 * layers + 2
        seen["reduce_scatter", A] += 2 * layers + again + layers + 2  # both outs (ffn's not again), ffn in's back
        replicated = sum(s + size for s, size in ((DIM * (mla.q_lora_rank or 0), mla.q_lora_rank or 0),
                                                  (DIM * (mla.kv_lora_rank + mla.qk_rope_head_dim), mla.kv_lora_rank)))
        seen["all_reduce", F32 * (layers * (2 * DIM + replicated) + DIM)] += 1
    else:
        for size in latents:
            seen["all_reduce", A * size // DIM] += layers
        seen["all_reduce", A] += 2 * layers + again + layers + 2  # outs (ffn's not again), ffn in's back, ends
    seen["all_reduce", F32 * BATCH * SEQ] += 1
    seen["all_reduce", 2 * F32 * BATCH * SEQ] += 1
    return dict(seen)


# model, further fields of a tp2 layout
TENSOR = {
    "sequence parallel": (LATENT, {}),
    "without": (LATENT, dict(sequence_parallel=False)),
    "queries not compressed": (UNCOMPRESSED, {}),
    "queries not compressed, without": (UNCOMPRESSED, dict(sequence_parallel=False)),
    "recompute full": (LATENT, dict(recompute="full")),
}


@pytest.mark.parametrize("case", TENSOR)
def test_latent_attention_sends_what_the_table_says(case, tmp_path):
    model, rest = TENSOR[case]
    training = dataclasses.replace(TRAINING, global_batch_size=BATCH)
    where = layout(model=model, global_batch_size=BATCH, tp=2, **rest)
    wanted = latent(model, sequence_parallel=rest.get("sequence_parallel", True), recompute="recompute" in rest)
    spec = job(tmp_path, where, model=model, training=training)
    assert run_ranks(communicate, world_size=2, args=(spec,)) == [wanted, wanted]


# model, layout with ep, forwards per layer and microbatch, axes that share a sequence, axes with other tokens
EXPERTS = {
    "bias": (BIASED, dict(dp_shard=2, ep=2), 1, 0, 1),
    "loss": (LOSS, dict(dp_shard=2, ep=2), 1, 0, 0),
    "loss, tokens of a sequence on both tp ranks": (LOSS, dict(tp=2, ep=2), 1, 1, 0),
    "bias, replicas": (BIASED, dict(dp_replicate=2, dp_shard=2, ep=2), 1, 0, 2),
    "bias, recompute full": (BIASED, dict(dp_shard=2, ep=2, recompute="full"), 2, 0, 1),
    "loss, recompute selective": (LOSS, dict(tp=2, ep=2, recompute="selective"), 1, 1, 0),
}


@pytest.mark.parametrize("case", EXPERTS)
def test_experts_send_what_the_table_says(case, tmp_path):
    model, arguments, forwards, sharing, others = EXPERTS[case]
    where = layout(model=model, **arguments)
    layers = sum(model.is_moe(i) for i in range(model.num_layers))
    times = layers * where.num_microbatches
    choices = BATCH * SEQ // where.dims.tp * model.moe.top_k
    experts = model.moe.num_experts
    measured = run_ranks(communicate, world_size=where.dims.world_size, args=(job(tmp_path, where, model=model),))
    for seen in measured:
        assert seen["all_to_all", I64 * experts] == forwards * times
        assert sum(n for (op, _), n in seen.items() if op == "all_to_all") == (3 * forwards + 2) * times
        if model.moe.balance == "loss":
            assert seen.get(("all_reduce", I64 * BATCH * experts), 0) == sharing * forwards * times
        else:
            assert seen.get(("all_reduce", I64 * experts * layers), 0) == others
    # what a rank gets, and sends back, depends on the routing; over all ranks it is as much as is sent
    total = sum(size * n for seen in measured for (op, size), n in seen.items() if op == "all_to_all")
    tokens, counts = (2 * forwards + 2) * times * F32 * choices * DIM, forwards * times * I64 * experts
    assert total == len(measured) * (tokens + counts)
