"""The collectives of one optimizer step, per axis: operation, bytes, times, link, seconds.

Called by the cost model with one stage of one layout. The formulas are those of the tables that open
the modules of jobs.parallel; a test counts a real step against them. Which link a group crosses and how long that
takes is in links; what data parallelism sends is in sharding; what compute hides is decided in stages.
"""
from collections.abc import Iterable

from jobs.spec.counts import embedding_params, norm_params, position_params
from jobs.spec.model import ModelSpec
from jobs.spec.parallel import Layout
from jobs.spec.training import TrainingSpec
from orchestrator.cluster import ClusterSpec
from orchestrator.planner.activations import keys_width
from orchestrator.planner.book import Book, hidden_bytes
from orchestrator.planner.links import axis_group
from orchestrator.planner.plan import Phase, Transfer
from orchestrator.planner.sharding import data_parallel, gather_passes
from orchestrator.planner.software import OURS, Selective, Software
from orchestrator.planner.weights import whole_block_params

__all__ = ["axis_group", "gather_passes", "hidden_bytes", "moved_bytes", "stage_transfers"]


INPUTS_AGAIN = "attention's and ffn's inputs, again"  # a layer keeps only the rank's own tokens of them


def moved_bytes(transfers: Iterable[Transfer], *, axis: str, phase: Phase | None = None) -> float:
    """Bytes per step of the tensors that `axis` communicates. With phase="forward" this is the convention
    `payload_forward` of textbooks: each all-reduce once, the backward not counted."""
    return sum(one.moved_bytes for one in transfers if one.axis == axis and phase in (None, one.phase))


def stage_transfers(model: ModelSpec, layout: Layout, *, training: TrainingSpec, cluster: ClusterSpec,
                    stage: int, software: Software = OURS, inner: bool = False) -> tuple[Transfer, ...]:
    """Everything a rank sends in one step for `stage`; `exposed_s` is left at the full time. `inner`: only what every
    microbatch sends inside its layers."""
    book = Book(model, layout, training=training, cluster=cluster, stage=stage, software=software)
    _tensor_parallel(book)
    _context_parallel(book)
    _experts(book)
    if not inner:
        _pipeline(book)
        data_parallel(book)
    return tuple(book.transfers)


def _tensor_parallel(book: Book) -> None:
    """Megatron's f and g around attention and FFN. With sequence parallelism each all-reduce becomes an
    all-gather and a reduce-scatter of the same bytes, forward and backward. Recomputing a layer repeats its
    forward's collectives but for the last: once the FFN's output projection has its input again, torch stops, unless
    dropout or a norm follows. Experts see the tokens of their rank's sequence shard: nothing to gather."""
    model, layout, m = book.model, book.layout, book.m
    payload = hidden_bytes(model, layout, training=book.training)
    # blocks between an f and a g: attention and FFN of every layer, but experts without a shared one
    shared = model.moe is not None and model.moe.num_shared_experts > 0
    blocks = (2 * book.layers - (0 if shared else book.moe_layers)) * m
    latent = book.layers * m if model.mla is not None else 0  # attentions that gather their latents instead
    repeats = _repeats(book, "all but matmuls")
    # once more, forward, with the backward: a feed-forward's reduction only if something behind it wants the result
    behind = model.dropout > 0 or model.post_norms
    enters, leaves = (blocks - latent, blocks if behind else book.layers * m) if repeats else (0, 0)
    sequence = layout.sequence_parallel
    # of other trainers it is part of what they hide
    if sequence and not repeats and book.software.regathers_inputs and book.software.overlaps_input_gradients:
        book.add("tp", "all_gather", INPUTS_AGAIN, payload_bytes=payload, times=blocks - latent, phase="backward")
    for op in ("all_gather", "reduce_scatter") if sequence else ("all_reduce",):
        gathers = op == "all_gather"
        forward = blocks - (latent if gathers else 0)
        backward = blocks - (0 if gathers else latent) + (enters if gathers else leaves)
        book.add("tp", op, "attention and ffn", payload_bytes=payload, times=forward, phase="forward")
        book.add("tp", op, "attention and ffn", payload_bytes=payload, times=backward, phase="backward")
        for what, here in (("embedding", book.first), ("output", book.last)):
            # without sequence parallelism one direction is free: the embedding's backward, the output's forward
            forward = layout.sequence_parallel and (op == "reduce_scatter") == (what == "embedding")
            if op == "all_reduce":
                forward = what == "embedding"
            book.add("tp", op, what, payload_bytes=payload, times=m * here, phase="forward" if forward else "backward")
    if book.last:
        book.add("tp", "all_reduce", "loss: maximum", payload_bytes=4 * book.tokens, times=m, phase="forward")
        book.add("tp", "all_reduce", "loss: sum, target", payload_bytes=8 * book.tokens, times=m, phase="forward")
    for width in _latent_widths(model) if latent else ():
        part = {"payload_bytes": payload * width / model.dim}
        if sequence:
            book.add("tp", "all_gather", "latents", times=latent, phase="forward", **part)
            book.add("tp", "all_gather", "latents", times=latent * repeats, phase="backward", **part)
        reduction = "reduce_scatter" if sequence else "all_reduce"
        book.add("tp", reduction, "latents", times=latent, phase="backward", **part)
    if sequence:
        whole = sum(count * whole_block_params(model, layer) for layer, count in book.kinds)
        whole += norm_params(model) * book.last + position_params(model) * book.first
    else:
        whole = book.layers * 2 * model.head_size if model.qk_norm and model.mla is None else 0
    book.add("tp", "all_reduce", "gradients of what is not split", payload_bytes=4 * whole / book.dims.fsdp,
             times=whole > 0)


def _repeats(book: Book, *selective: Selective) -> bool:
    """Whether a part of a layer is computed again: in full recompute, and in these selective ones."""
    how = book.layout.recompute
    return how == "full" or (how == "selective" and book.software.selective in selective)


def _latent_widths(model: ModelSpec) -> tuple[int, ...]:
    """Channels of what latent attention gathers, one message each: queries' latent or input, keys' and values' latent,
    the rotary key."""
    mla = model.mla
    return (mla.q_lora_rank or model.dim, mla.kv_lora_rank, mla.qk_rope_head_dim)


def _context_parallel(book: Book) -> None:
    """Keys and values of every layer reach all ranks: round a ring in cp − 1 hops, with their gradients on the way
    back; or by an all-gather, whose backward is a reduce-scatter."""
    model, dims = book.model, book.dims
    elements = book.tokens * keys_width(model) / dims.tp
    block, gradients = book.element * elements, 4 * elements  # gradients are summed in float32
    layers = book.layers * book.m
    again = layers if _repeats(book, "all but matmuls", "attention", "attention, feed-forward") else 0
    if book.layout.cp_method == "ring":
        book.add("cp", "send_recv", "keys and values", payload_bytes=block, times=layers * (dims.cp - 1),
                 phase="forward")
        # the keys and values once more, and their gradients, which come home with one hop more
        book.add("cp", "send_recv", "keys and values", payload_bytes=block, times=(layers + again) * (dims.cp - 1),
                 phase="backward")
        book.add("cp", "send_recv", "keys' and values' gradients", payload_bytes=gradients, phase="backward",
                 times=layers * dims.cp if dims.cp > 1 else 0)
    else:
        book.add("cp", "all_gather", "keys and values", payload_bytes=block * dims.cp, times=layers, phase="forward")
        book.add("cp", "all_gather", "keys and values", payload_bytes=block * dims.cp, times=layers + again,
                 phase="backward")
        book.add("cp", "reduce_scatter", "keys' and values' gradients", payload_bytes=gradients * dims.cp, times=layers,
                 phase="backward")


def _experts(book: Book) -> None:
    """Tokens go to the ranks of their experts and come back, forward and backward, and forward again where the layer is
    recomputed; before them how many go where. Counts for the balance: with the microbatch over the ranks that share
    its sequences, or once per step over all."""
    model, moe = book.model, book.model.moe
    if moe is None or book.moe_layers == 0:
        return
    payload = book.element * book.tokens / book.dims.tp * _copies_sent(moe.top_k, book) * model.dim
    passes = book.moe_layers * book.m
    again = passes if _repeats(book, "all but matmuls", "attention, feed-forward") else 0
    for what, size, forward, backward in (("tokens to experts and back", payload, 2 * passes, 2 * (passes + again)),
                                          ("experts: counts", 8 * moe.num_experts, passes, again)):
        book.add("ep", "all_to_all", what, payload_bytes=size, times=forward, phase="forward")
        book.add("ep", "all_to_all", what, payload_bytes=size, times=backward, phase="backward")
    if moe.balance == "loss":
        counts = 8 * book.layout.microbatch_size * moe.num_experts
        for axis in ("tp", "cp"):
            book.add(axis, "all_reduce", "balance: counts", payload_bytes=counts, times=passes, phase="forward")
            book.add(axis, "all_reduce", "balance: counts", payload_bytes=counts, times=again, phase="backward")
    elif moe.balance == "bias":
        for axis in ("dp_replicate", "dp_shard", "cp", "tp"):
            book.add(axis, "all_reduce", "balance: load", payload_bytes=8 * moe.num_experts * book.moe_layers, times=1)


def _copies_sent(top_k: int, book: Book) -> float:
    """Of one token: one per expert; or one per island that has any of its experts, where the trainer dispatches so and
    experts are on several. Of n islands top_k experts lie on n(1 − (1 − 1/n)^top_k), were they drawn at random."""
    islands, moe = book.group("ep").nodes, book.model.moe
    if not book.software.dispatches_once or islands == 1:
        return top_k
    islands = min(islands, moe.top_groups) if moe.num_groups > 1 else islands
    return islands * (1 - (1 - 1 / islands) ** top_k)


def _pipeline(book: Book) -> None:
    """Hidden states forward and their gradients backward over each boundary; a tp rank sends its own part
    of the sequence under sequence parallelism, else the whole. The turn of a V stays on one rank."""
    layout, dims, model = book.layout, book.dims, book.model
    whole = hidden_bytes(model, layout, training=book.training)
    scatters = book.software.scatters_messages and not layout.sequence_parallel
    payload = whole / dims.tp if layout.sequence_parallel or scatters else whole
    home = _rank(layout, book.stage)
    onward = not book.last and _rank(layout, book.stage + 1) != home
    back = not book.first and _rank(layout, book.stage - 1) != home
    book.add("pp", "send_recv", "hidden states", payload_bytes=payload, times=book.m * onward, phase="forward")
    book.add("pp", "send_recv", "hidden states' gradients", payload_bytes=payload, times=book.m * back,
             phase="backward")
    if scatters:
        book.add("tp", "all_gather", "messages", payload_bytes=whole, times=book.m * back, phase="forward")
        book.add("tp", "all_gather", "messages", payload_bytes=whole, times=book.m * onward, phase="backward")
    if model.tie_embeddings and (book.first or book.last) and _rank(layout, 0) != _rank(layout, layout.num_stages - 1):
        book.add("pp", "send_recv", "tied embedding: gradient", times=1,
                 payload_bytes=4 * embedding_params(model) / (dims.tp * dims.fsdp))


def _rank(layout: Layout, stage: int) -> int:
    return next(rank for rank in range(layout.dims.pp) if stage in layout.stages(rank))
