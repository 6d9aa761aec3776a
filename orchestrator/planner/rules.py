"""What makes a layout legal. Each rule gives value, axis and the nearest legal values.

The same rules refuse what a user fixed and what the enumeration proposes, so that nothing is legal in one place and
illegal in the other. A rule looks at a few degrees; it knows nothing of memory or time. Those of
pipelines are in pipeline_rules.py.
"""
from collections.abc import Iterator

from jobs.spec.load import Problem
from jobs.spec.model import ModelSpec
from orchestrator.planner.question import Question, divisors, listed

VOCABULARY_MULTIPLE = 128  # padded vocabularies are a multiple of this times tp, so that no tp rank has a ragged matmul
# Tensor cores take operands in these multiples; below 16 bits a ragged one is an error and not only slow.
ROW_MULTIPLE = {"float8": 16}


# ------------------------------------------------------------------ the model alone
def model_problems(model: ModelSpec) -> list[Problem]:
    """Heads and experts that no layout can compute."""
    problems = []

    def refuse(name: str, value: int, message: str) -> None:
        problems.append(Problem(where=f"model.{name}", value=value, message=message))

    if model.mla is None:
        if model.head_dim is None and model.dim % model.num_heads:
            refuse("num_heads", model.num_heads, f"does not divide model.dim={model.dim}; try "
                   f"{listed(divisors(model.dim))}, or set model.head_dim")
        elif model.head_size % 2 and model.positions == "rotary":
            refuse("head_dim", model.head_size, f"is odd, but rotary positions turn pairs; try {model.head_size + 1}")
        if model.num_heads % model.num_kv_heads:
            refuse("num_kv_heads", model.num_kv_heads, f"does not divide model.num_heads={model.num_heads}; try "
                   f"{listed(divisors(model.num_heads))}")
    if model.moe is not None and not 1 <= model.moe.top_k <= model.moe.num_experts:
        refuse("moe.top_k", model.moe.top_k, f"is not between 1 and model.moe.num_experts={model.moe.num_experts}")
    if model.positions == "learned" and not model.max_positions:
        refuse("max_positions", model.max_positions or 0, "is needed by learned positions: at least training.seq_len")
    return problems


def sequence_problems(question: Question) -> list[Problem]:
    model, seq_len = question.model, question.training.seq_len
    if model.positions == "learned" and model.max_positions and seq_len > model.max_positions:
        return [Problem(where="training.seq_len", value=seq_len, message=f"is above model.max_positions="
                        f"{model.max_positions}, the rows of its learned positions; try {model.max_positions}")]
    return []


# ------------------------------------------------------------------ tp
def tp_problems(tp: int, question: Question) -> list[Problem]:
    """Why this tp cannot be computed, or must not be placed."""
    messages = list(_tp_messages(tp, question))
    if not messages:
        return []
    legal = [d for d in divisors(question.model.num_heads) if not any(True for _ in _tp_messages(d, question))]
    remedy = f"try {listed(legal)}" if legal else "no tp is legal"
    return [Problem(where="parallel.tp", value=tp, message=f"{message}; {remedy}") for message in messages]


def _tp_messages(tp: int, question: Question) -> Iterator[str]:
    model, vocabulary = question.model, question.model.vocab_size
    split = {"model.num_heads": model.num_heads}
    if model.mla is None:  # every head of latent attention makes its own key and value
        split["model.num_kv_heads"] = model.num_kv_heads
    if model.moe is None or model.moe.first_layer > 0:
        split["model.ffn_dim"] = model.ffn_dim
    if model.moe is not None and model.moe.num_shared_experts:
        split["the shared experts' width"] = model.moe.num_shared_experts * model.moe.ffn_dim
    for name, size in split.items():
        if size % tp:
            yield f"does not divide {name}={size}"
    if vocabulary % tp:
        yield f"does not divide model.vocab_size={vocabulary} (padded, {padded_vocabulary(vocabulary, tp=tp)} would do)"
    if needs_sequence_parallel(model, tp=tp) and question.request.options("sequence_parallel") == (False,):
        yield ("needs sequence_parallel=true with a mixture of experts, whose tp ranks each dispatch tokens of their "
               "own")
    elif split_by_sequence(question, tp=tp) and question.training.seq_len % tp:
        yield f"does not divide training.seq_len={question.training.seq_len} under sequence parallelism"
    cluster = question.cluster
    domain = cluster.domain_gpus
    if domain % tp and not question.allow_tp_across_nodes:
        permit = "placement.allow_tp_across_nodes=true permits it"
        here = (f"cluster.gpus_per_node={domain}" if domain == cluster.gpus_per_node
                else f"an NVLink domain of {domain} GPUs")
        if tp < domain:
            yield f"does not divide {here}: some groups would span nodes ({permit})"
        else:
            yield (f"crosses nodes of {here}, {cluster.link_gb_s:g} GB/s inside and {cluster.inter_node_gb_s:g} GB/s "
                   f"per GPU between them ({permit})")


def needs_sequence_parallel(model: ModelSpec, *, tp: int) -> bool:
    """Routed experts are not split over tp: its ranks must hold different tokens."""
    return model.moe is not None and tp > 1


def split_by_sequence(question: Question, *, tp: int) -> bool:
    """Whether tp ranks must each hold a part of the sequence."""
    return (question.request.options("sequence_parallel") == (True,)
            or needs_sequence_parallel(question.model, tp=tp))


def padded_vocabulary(vocab_size: int, *, tp: int) -> int:
    """The next multiple of 128·tp: less than that many rows are added, never a doubling."""
    multiple = VOCABULARY_MULTIPLE * tp
    return -(-vocab_size // multiple) * multiple


# ------------------------------------------------------------------ cp and ep
def cp_problems(cp: int, tp: int, question: Question) -> list[Problem]:
    """The causal mask is balanced by giving each cp rank two chunks of the sequence, one early and one late."""
    seq_len = question.training.seq_len
    found = []
    if cp > 1 and seq_len % (2 * cp):
        legal = [d for d in divisors(seq_len // 2) if seq_len % (2 * d) == 0] if seq_len % 2 == 0 else [1]
        found.append(f"needs training.seq_len={seq_len} to be a multiple of 2·cp = {2 * cp}; try {listed(legal)}, or "
                     f"seq_len={-(-seq_len // (2 * cp)) * 2 * cp}")
    elif cp > 1 and tp > 1 and split_by_sequence(question, tp=tp) and seq_len % (2 * cp * tp):
        found.append(f"needs training.seq_len={seq_len} to be a multiple of 2·cp·tp = {2 * cp * tp} under sequence "
                     f"parallelism; try seq_len={-(-seq_len // (2 * cp * tp)) * 2 * cp * tp}, or "
                     + ("tp=1" if needs_sequence_parallel(question.model, tp=tp) else "sequence_parallel=false"))
    multiple = ROW_MULTIPLE.get(question.training.param_dtype)
    if not found and multiple and seq_len // cp % multiple:
        found.append(f"leaves {seq_len // cp} tokens per rank, which {question.training.param_dtype} needs to be a "
                     f"multiple of {multiple}; try seq_len={-(-seq_len // (multiple * cp)) * multiple * cp}")
    return [Problem(where="parallel.cp", value=cp, message=message) for message in found]


def ep_problems(ep: int, question: Question) -> list[Problem]:
    """What is wrong about this ep for the model alone."""
    moe = question.model.moe
    if ep == 1 or (moe is not None and moe.num_experts % ep == 0):
        return []
    if moe is None:
        message = f"needs a mixture of experts, and {question.model.name} has none (model.moe); try 1"
    else:
        message = (f"does not divide model.moe.num_experts={moe.num_experts}: every rank of the axis holds as many "
                   f"experts; try {listed(divisors(moe.num_experts))}")
    return [Problem(where="parallel.ep", value=ep, message=message)]


def ep_group_problems(ep: int, *, dp_shard: int, cp: int, tp: int) -> list[Problem]:
    """ep is carved out of dp_shard × cp × tp: whole cp × tp groups at a time, since each rank of those holds other
    tokens of the same sequences."""
    if ep == 1:
        return []
    whole, inner = dp_shard * cp * tp, cp * tp
    if ep % inner == 0 and whole % ep == 0:
        return []
    legal = [1] + [d for d in divisors(whole) if d > 1 and d % inner == 0]
    which = (f"is not a multiple of cp × tp = {cp} × {tp}" if ep % inner
             else f"does not divide dp_shard × cp × tp = {dp_shard} × {cp} × {tp} = {whole}")
    return [Problem(where="parallel.ep", value=ep, message=f"{which}, the ranks it is carved out of; try "
                                                           f"{listed(legal)}")]


# ------------------------------------------------------------------ data parallelism and the batch
def shard_problems(dp_shard: int, tp: int, question: Question) -> list[Problem]:
    """FSDP2 shards the first dimension of every parameter: beyond its size ranks hold nothing but padding."""
    model = question.model
    rows = {"model.dim": model.dim, "model.vocab_size/tp": model.vocab_size // tp,
            "model.ffn_dim/tp": model.ffn_dim // tp}
    if model.mla is None:
        rows["model.num_kv_heads·head_dim/tp"] = model.num_kv_heads * model.head_size // tp
    name, smallest = min(rows.items(), key=lambda item: item[1])
    if dp_shard <= smallest:
        return []
    return [Problem(where="parallel.dp_shard", value=dp_shard, message=f"is above {name}={smallest}, the rows of the "
                    f"smallest weight; try at most {smallest} and the rest as dp_replicate")]


def batch_problems(dp: int, microbatch_size: int, question: Question) -> list[Problem]:
    """Every replica computes something; beyond that, slots may stay empty if the request allows it."""
    batch, rows = question.training.global_batch_size, dp * microbatch_size
    if batch % rows == 0 or (question.request.uneven_batch and (dp <= batch and microbatch_size <= -(-batch // dp))):
        return []
    below, above = batch // rows * rows, -(-batch // rows) * rows
    nearest = f"{below} or {above}" if below else f"{above}"
    with_dp = max((d for d in divisors(batch) if d <= dp and batch % (d * microbatch_size) == 0), default=None)
    remedy = f"try {nearest}" + (f", or dp={with_dp}" if with_dp else "")
    if below and not question.request.uneven_batch:
        remedy += ", or parallel.uneven_batch=true"
    what = "is below" if not below else "is not a multiple of"
    return [Problem(where="training.global_batch_size", value=batch,
                    message=f"{what} dp × microbatch_size = {dp} × {microbatch_size} = {rows}; {remedy}")]


def count_problems(num_microbatches: int, least: int, dp: int, microbatch_size: int,
                   question: Question) -> list[Problem]:
    """A number of microbatches that the user fixed: enough slots for the batch, and no empty microbatch too many."""
    batch, rows = question.training.global_batch_size, dp * microbatch_size
    slots = rows * num_microbatches
    if slots == batch or (question.request.uneven_batch and num_microbatches == least):
        return []
    what = "cannot hold" if slots < batch else "are more than"
    exact = "" if batch % rows == 0 else f" (of {rows * least} slots {rows * least - batch} stay empty)"
    return [Problem(where="parallel.num_microbatches", value=num_microbatches, message=f"× microbatch_size × dp = "
                    f"{num_microbatches} × {microbatch_size} × {dp} = {slots} slots {what} training.global_batch_size="
                    f"{batch}; try num_microbatches={least}{exact}, or global_batch_size={slots}")]
