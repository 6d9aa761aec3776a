"""The decoder against an independent, naive one; its weights against slices of themselves."""
import dataclasses
import math

import pytest
import torch

from jobs.loss import IGNORED, cross_entropy
from jobs.model.attention import algorithm, causal_attention
from jobs.model.flex import mask_mod, score_mod
from jobs.model.initial import INIT_ROWS, initial_rows, initial_slice
from jobs.model.places import Places, document_starts, dropped, locate, mix, sequence_keys
from jobs.model.rule import AttentionKind, Block, Rule
from jobs.model.transformer import Transformer
from jobs.spec.counts import num_params
from jobs.spec.model import MlaSpec, ModelSpec
from tests.helpers.naive import Naive

# large weights: attention is far from uniform, and every option tells
SPEC = ModelSpec(name="small", vocab_size=64, dim=24, num_layers=3, num_heads=6, num_kv_heads=2, ffn_dim=40, head_dim=4,
                 init_std=0.2)
MLA = MlaSpec(kv_lora_rank=10, q_lora_rank=14, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
SPECS = {
    "grouped": SPEC,
    "all heads of their own": dataclasses.replace(SPEC, num_kv_heads=6),
    "one kv head, tied": dataclasses.replace(SPEC, num_kv_heads=1, tie_embeddings=True),
    "wide heads": dataclasses.replace(SPEC, head_dim=8),
    "LayerNorm": dataclasses.replace(SPEC, norm="layernorm"),
    "biases": dataclasses.replace(SPEC, bias=True),
    "GELU, two matrices": dataclasses.replace(SPEC, ffn="gelu", bias=True),
    "GeGLU": dataclasses.replace(SPEC, ffn="geglu"),
    "learned positions": dataclasses.replace(SPEC, positions="learned", max_positions=9),
    "post norms": dataclasses.replace(SPEC, post_norms=True),
    "norms of 1 + weight": dataclasses.replace(SPEC, norm_offset=True, qk_norm=True),
    "scaled embedding": dataclasses.replace(SPEC, embedding_scale=True, tie_embeddings=True),
    "norms of queries and keys": dataclasses.replace(SPEC, qk_norm=True),
    "scale of attention": dataclasses.replace(SPEC, attention_scale=0.3),
    "capped scores": dataclasses.replace(SPEC, attention_softcap=0.5),
    "capped logits": dataclasses.replace(SPEC, output_softcap=0.2),
    "every second layer in a window": dataclasses.replace(SPEC, sliding_window=3, global_every=2),
    "capped scores in a window": dataclasses.replace(SPEC, sliding_window=3, global_every=3, attention_softcap=0.5),
    "Megatron-LM's GPT": dataclasses.replace(SPEC, num_kv_heads=6, norm="layernorm", ffn="gelu", bias=True,
                                             positions="learned", max_positions=9, tie_embeddings=True),
    "Gemma 2": dataclasses.replace(SPEC, head_dim=8, ffn="geglu", post_norms=True, norm_offset=True,
                                   embedding_scale=True, tie_embeddings=True, attention_scale=0.4,
                                   attention_softcap=0.5, output_softcap=0.2, sliding_window=3, global_every=2),
    "latent attention": dataclasses.replace(SPEC, mla=MLA),
    "latent attention, queries not compressed": dataclasses.replace(SPEC, mla=dataclasses.replace(MLA,
                                                                                                 q_lora_rank=None)),
}


def build(spec: ModelSpec, *, layers: range | None = None, is_first=True, is_last=True, seed=0) -> Transformer:
    model = Transformer(spec, layers=layers or range(spec.num_layers), is_first=is_first, is_last=is_last)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(initial_rows(name, tuple(p.shape), rows=range(p.shape[0]), spec=spec, seed=seed))
            if p.ndim == 1:  # ones and zeros would hide a norm or a bias that is skipped or used twice
                p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))))
    return model


@pytest.mark.parametrize("name", SPECS)
@torch.no_grad()
def test_logits_match_the_definition(name):
    model = build(SPECS[name])
    tokens = [3, 1, 4, 1, 5, 9, 2]
    wanted = Naive(dict(model.named_parameters()), SPECS[name]).logits(tokens)
    assert torch.allclose(model(torch.tensor([tokens]))[0], wanted, atol=1e-5, rtol=0)
    assert wanted.std() > 0.01  # not all alike


# seq_len, window, softcap, lengths of documents in two sequences, dropout; chunks are of 256 queries
PACKED = ((700,), (3, 250, 4, 300, 143))
ATTENTIONS = [(700, None, 2.0, None, 0), (700, 100, 2.0, None, 0), (600, 300, 2.0, None, 0), (700, 100, None, None, 0),
              (600, 300, None, None, 0), (256, 5, None, None, 0), (257, 256, 3.0, None, 0),
              (700, None, None, PACKED, 0), (700, 100, None, PACKED, 0), (700, 100, 2.0, PACKED, 0),
              (300, None, None, None, 0.3), (700, 100, 2.0, PACKED, 0.3)]
KEYS = sequence_keys(torch.tensor([4, 9]), seed=1, step=2)


def rule_of(seq_len, window, softcap, lengths, dropout) -> Rule:
    starts = None if lengths is None else document_starts(
        torch.tensor([[i for i, n in enumerate(of) for _ in range(n)] for of in lengths]))
    tokens = locate(torch.empty(2, seq_len, 1), places=Places(), keys=KEYS if dropout else None, weights=None,
                    starts=starts)
    return Rule(kind=AttentionKind(scale=0.7, softcap=softcap, window=window, dropout=dropout, layer=3), tokens=tokens)


def seen_by_definition(seq_len, window, lengths) -> torch.Tensor:
    """Bool [2, queries, keys]"""
    seen = torch.ones(seq_len, seq_len).tril().triu(-seq_len if window is None else 1 - window).bool()
    if lengths is None:
        return seen.expand(2, -1, -1)
    blocks = [torch.block_diag(*(torch.ones(n, n) for n in of)).bool() for of in lengths]
    return torch.stack([block & seen for block in blocks])


def kept_by_definition(seq_len, *, layer: int, p: float) -> torch.Tensor:
    """Multipliers [2, 4 heads, queries, keys]; each from its own four coordinates."""
    q, k, h = torch.arange(seq_len)[:, None], torch.arange(seq_len), torch.arange(4)[:, None, None]
    rows = mix(mix(mix(KEYS[:, None, None, None] + q) ^ (-1 - layer)) + h)
    number = (mix(rows + k // 4) >> (16 * (k % 4))) & 0xFFFF
    number = torch.where(number >= 2**15, number - 2**16, number)
    threshold = round(p * 2**16)
    return (number >= threshold - 2**15) / (1 - threshold / 2**16)


@pytest.mark.parametrize("seq_len, window, softcap, lengths, dropout", ATTENTIONS)
def test_attention_in_chunks_is_attention(seq_len, window, softcap, lengths, dropout):
    """Values and gradients, against the whole matrix of scores."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, upstream = (torch.randn(2, seq_len, heads, 8, generator=generator, dtype=torch.float64)
                         for heads in (4, 2, 2, 4))
    wrt = [t.requires_grad_() for t in (q, k, v)]

    def whole():
        scores = 0.7 * torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, dim=2))
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        seen = seen_by_definition(seq_len, window, lengths)
        shares = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
        if dropout:
            shares = shares * kept_by_definition(seq_len, layer=3, p=dropout)
        return torch.einsum("bhqk,bkhd->bqhd", shares, v.repeat_interleave(2, dim=2))

    rule = rule_of(seq_len, window, softcap, lengths, dropout)
    assert algorithm(rule, seq_len=seq_len, head_dim=8, device_type="cpu") == "chunked"
    found, wanted = causal_attention(q, k, v, rule=rule), whole()
    assert torch.allclose(found, wanted, atol=1e-10)
    gradients = [torch.autograd.grad((out * upstream).sum(), wrt) for out in (found, wanted)]
    assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(*gradients))


# what is computed (window, softcap, documents, dropout) → with what on CPU, on CUDA
ALGORITHMS = {
    "causal": ((None, None, None, 0), "fused", "fused"),
    "a window that is never reached": ((600, None, None, 0), "fused", "fused"),
    "a window": ((100, None, None, 0), "chunked", "flex"),
    "capped": ((None, 2.0, None, 0), "chunked", "flex"),
    "documents": ((None, None, PACKED, 0), "chunked", "flex"),
    "dropped": ((None, None, None, 0.3), "chunked", "chunked"),
}


@pytest.mark.parametrize("case", ALGORITHMS)
def test_each_kind_has_its_algorithm(case):
    options, on_cpu, on_cuda = ALGORITHMS[case]
    rule = rule_of(600, *options)
    assert algorithm(rule, seq_len=600, head_dim=64, device_type="cpu") == on_cpu
    assert algorithm(rule, seq_len=600, head_dim=64, device_type="cuda") == on_cuda
    assert algorithm(rule, seq_len=600, head_dim=8, device_type="cuda") != "flex"


@pytest.mark.parametrize("seq_len, window, softcap, lengths, dropout", [case for case in ATTENTIONS if not case[-1]])
def test_what_flex_attention_is_given_is_the_rule(seq_len, window, softcap, lengths, dropout):
    """The functions that a kernel is generated from on CUDA, here evaluated pair by pair."""
    rule = rule_of(seq_len, window, softcap, lengths, dropout)
    visible = mask_mod(rule, seq_len=seq_len, device=torch.device("cpu"))
    batch, q, k = torch.arange(2)[:, None, None], torch.arange(seq_len)[:, None], torch.arange(seq_len)
    assert torch.equal(visible(batch, 0, q, k).expand(2, -1, -1), seen_by_definition(seq_len, window, lengths))
    scores = torch.linspace(-9, 9, 50)
    capped = score_mod(rule)
    assert (capped is None) == (softcap is None)
    if softcap is not None:
        assert torch.allclose(capped(scores, 0, 0, 0, 0), softcap * torch.tanh(scores / softcap))


@torch.no_grad()
def test_flex_attention_itself_computes_the_rule():
    """torch's own evaluation of FlexAttention without a compiler, forward: what CPU has of it."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    seq_len, window, softcap, lengths, dropout = 700, 100, 2.0, PACKED, 0
    rule = rule_of(seq_len, window, softcap, lengths, dropout)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, seq_len, heads, 16, generator=generator) for heads in (4, 2, 2))
    visible = mask_mod(rule, seq_len=seq_len, device=q.device)
    blocks = create_block_mask(visible, 2, None, seq_len, seq_len, device="cpu")
    found = flex_attention(*(t.transpose(1, 2) for t in (q, k, v)), score_mod=score_mod(rule), block_mask=blocks,
                           scale=0.7, enable_gqa=True).transpose(1, 2)
    assert torch.allclose(found, causal_attention(q, k, v, rule=rule), atol=2e-6)


def test_documents_begin_where_they_do():
    documents = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0], [3, 4, 4, 5, 6, 6]], dtype=torch.int32)
    starts = document_starts(documents)
    assert starts.dtype == torch.int32
    assert starts.tolist() == [[0, 0, 2, 2, 2, 5], [0] * 6, [0, 1, 1, 3, 4, 4]]
    tokens = locate(torch.empty(3, 6, 1), places=Places(), keys=None, weights=None, starts=starts,
                    rotary=lambda positions: (positions, positions))
    restarted = [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5], [0, 0, 1, 0, 0, 1]]
    assert tokens.positions.tolist() == tokens.angles[0].tolist() == restarted


@pytest.mark.parametrize("name", ["grouped", "learned positions", "every second layer in a window", "capped scores",
                                  "latent attention"])
@torch.no_grad()
def test_packed_documents_are_the_documents_alone(name):
    model, lengths = build(SPECS[name]), (2, 1, 4, 2)
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5]])
    documents = torch.tensor([[i for i, n in enumerate(lengths) for _ in range(n)]])
    packed = model(tokens, starts=document_starts(documents))
    alone = torch.cat([model(part) for part in tokens.split(lengths, dim=1)], dim=1)
    assert torch.allclose(packed, alone, atol=1e-5)
    assert (packed - model(tokens))[:, 2:].abs().max() > 1e-2  # the mask matters


def test_where_documents_begin_is_fetched_once_if_it_does_not_come_from_the_host():
    """As under FSDP on a GPU, which moves all that the model is given to the device."""
    starts = document_starts(torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]]))
    tokens = locate(torch.empty(2, 6, 1), places=Places(), keys=None, weights=None, starts=starts)
    assert tokens.starts_on_host is starts
    moved = dataclasses.replace(tokens, starts=starts.clone(), shared={})
    assert moved.starts_on_host is moved.starts_on_host and torch.equal(moved.starts_on_host, starts)
    rule = Rule(kind=AttentionKind(scale=1.0), tokens=moved)
    assert [rule.lowest(position) for position in range(6)] == [(0, 0), (0, 1), (1, 2), (1, 2), (1, 2), (1, 5)]


def test_dropped_weights_draw_like_independent_coins():
    """Rate, and agreement between any two of: neighbouring queries, keys and heads, layers, sequences, steps, seeds."""
    n, p = 256, 0.25
    block = Block(queries=slice(0, n), keys=slice(0, n), first_query=0, first_key=0)

    def draw(*, seed=0, step=1, slot=5, layer=0, share=0):
        keys = sequence_keys(torch.tensor([slot]), seed=seed, step=step)
        tokens = locate(torch.empty(1, n, 1), places=Places(), keys=keys, weights=None)
        kind = AttentionKind(scale=1.0, dropout=p, layer=layer, head_share=share)
        return Rule(kind=kind, tokens=tokens).kept(block, num_heads=2, dtype=torch.float64)[0] * (1 - p)

    base = draw()
    others = [draw(seed=1), draw(step=2), draw(slot=6), draw(layer=1), draw(share=1), base.roll(1, 0), base.roll(1, 1),
              *(base.roll(shift, 2) for shift in range(1, 5))]
    count = base.numel()
    assert base.unique().tolist() == [0, 1]
    assert base.mean().item() == pytest.approx(1 - p, abs=5 * math.sqrt(p * (1 - p) / count))
    for other in others:
        together = ((base - base.mean()) * (other - other.mean())).mean().item()
        assert abs(together) < 5 * p * (1 - p) / math.sqrt(count)
    for dim in (1, 2):  # no query and no key is luckier than chance
        assert base.mean(dim).std().item() == pytest.approx(math.sqrt(p * (1 - p) / n), rel=0.2)


def test_a_part_of_the_weights_is_dropped_like_the_whole():
    """Any block of any rank's heads."""
    whole = rule_of(64, None, None, None, 0.3)
    at = (slice(5, 42), slice(3, 39))
    block = Block(queries=slice(0, 37), keys=slice(0, 36), first_query=5, first_key=3)
    everything = Block(queries=slice(0, 64), keys=slice(0, 64), first_query=0, first_key=0)
    wanted = whole.kept(everything, num_heads=4, dtype=torch.float32)
    for share in (0, 1):
        part = dataclasses.replace(whole, kind=dataclasses.replace(whole.kind, head_share=share))
        found = part.kept(block, num_heads=2, dtype=torch.float32)
        assert torch.equal(found, wanted[:, 2 * share:2 * share + 2, at[0], at[1]])


# options that leave the parameters as they are
OPTIONS = [dict(norm_offset=True), dict(ffn="geglu"), dict(embedding_scale=True), dict(attention_scale=0.3),
           dict(attention_softcap=0.5), dict(output_softcap=0.2), dict(sliding_window=3, global_every=2),
           dict(rope_theta=100.0), dict(norm_eps=0.1)]


@pytest.mark.parametrize("option", OPTIONS, ids=[" ".join(option) for option in OPTIONS])
@torch.no_grad()
def test_no_option_is_without_effect(option):
    plain, tokens = build(SPEC), torch.tensor([[3, 1, 4, 1, 5, 9, 2]])
    changed = Transformer(dataclasses.replace(SPEC, **option), layers=range(SPEC.num_layers), is_first=True,
                          is_last=True)
    changed.load_state_dict(plain.state_dict())
    assert (changed(tokens) - plain(tokens)).abs().max() > 1e-2


@pytest.mark.parametrize("name", SPECS)
def test_parameters_are_those_that_are_counted(name):
    assert sum(p.numel() for p in build(SPECS[name]).parameters()) == num_params(SPECS[name])


@torch.no_grad()
def test_no_position_sees_the_future():
    model = build(SPEC)
    tokens = torch.tensor([[5, 6, 7, 8, 9]])
    changed = tokens.clone()
    changed[0, 3] = 1
    assert torch.equal(model(tokens)[0, :3], model(changed)[0, :3])
    assert not torch.allclose(model(tokens)[0, 3:], model(changed)[0, 3:])


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_chunks_in_a_row_are_the_whole(tied):
    spec = dataclasses.replace(SPEC, tie_embeddings=tied)
    whole = build(spec)
    chunks = [build(spec, layers=range(0, 1), is_last=False), build(spec, layers=range(1, 2), is_first=False,
                                                                    is_last=False),
              build(spec, layers=range(2, 3), is_first=False)]
    names = [name for chunk in chunks for name, _ in chunk.named_parameters()]
    assert set(names) == {name for name, _ in whole.named_parameters()}
    assert len(names) - len(set(names)) == (1 if tied else 0)  # the tied embedding is on both ends
    x = tokens = torch.tensor([[1, 2, 3]])
    for chunk in chunks:
        x = chunk(x)
    assert torch.equal(x, whole(tokens))


def test_weights_depend_on_seed_and_name_alone():
    shape, ask = (3 * INIT_ROWS + 17, 5), dict(spec=SPEC, seed=7)
    whole = initial_rows("a.weight", shape, rows=range(shape[0]), **ask)
    for rows in (range(0, 1), range(10, INIT_ROWS), range(INIT_ROWS - 1, 2 * INIT_ROWS + 1), range(700, shape[0])):
        assert torch.equal(initial_rows("a.weight", shape, rows=rows, **ask), whole[rows.start:rows.stop])
    assert not torch.equal(initial_rows("b.weight", shape, rows=range(4), **ask), whole[:4])
    assert not torch.equal(initial_rows("a.weight", shape, rows=range(4), spec=SPEC, seed=8), whole[:4])


def test_residual_projections_start_smaller():
    def std(name):
        return initial_rows(name, (2048, 32), rows=range(2048), spec=SPEC, seed=0).std().item()

    assert std("layers.0.ffn.up.weight") == pytest.approx(SPEC.init_std, rel=0.02)
    for name in ("layers.0.ffn.down.weight", "layers.2.attention.wo.weight"):
        assert std(name) == pytest.approx(SPEC.init_std / math.sqrt(2 * SPEC.num_layers), rel=0.02)


def test_a_box_of_a_weight_is_cut_out_of_the_whole():
    for shape, sizes, offsets in [((300, 8), (5, 3), (290, 2)), ((4, 300, 8), (2, 200, 8), (1, 50, 0)),
                                  ((9,), (4,), (5,))]:
        whole = initial_slice("a.weight", shape, sizes=shape, offsets=(0,) * len(shape), spec=SPEC, seed=3)
        box = initial_slice("a.weight", shape, sizes=sizes, offsets=offsets, spec=SPEC, seed=3)
        assert torch.equal(box, whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes))])
    experts = initial_slice("a", (4, 5, 6), sizes=(4, 5, 6), offsets=(0, 0, 0), spec=SPEC, seed=3)
    assert len({round(float(e.sum()), 4) for e in experts}) == 4  # no two alike


# ------------------------------------------------------------------ dropout
DROPOUT = dataclasses.replace(SPEC, dropout=0.25, attention_dropout=0.4)


def masks(keys: torch.Tensor, seq_len: int) -> dict[int, torch.Tensor]:
    """What dropout multiplies with in DROPOUT, from the model's own random numbers: by site, [seq, dim]."""
    places = Places()
    tokens = locate(torch.empty(1, seq_len, 1), places=places, keys=keys, weights=None)
    return {site: (~dropped(tokens.keys, site=site, size=SPEC.dim, p=0.25)[0]) / 0.75
            for site in range(2 * SPEC.num_layers + 1)}


def attention_masks(keys: torch.Tensor, seq_len: int, *, num_heads: int) -> dict[int, torch.Tensor]:
    """By layer, [heads, queries, keys]."""
    block = Block(queries=slice(0, seq_len), keys=slice(0, seq_len), first_query=0, first_key=0)
    tokens = locate(torch.empty(1, seq_len, 1), places=Places(), keys=keys, weights=None)
    return {layer: Rule(kind=AttentionKind.of(DROPOUT, layer=layer, head_dim=4), tokens=tokens).kept(
        block, num_heads=num_heads, dtype=torch.float32)[0] for layer in range(SPEC.num_layers)}


@pytest.mark.parametrize("mla", [None, MLA], ids=["grouped", "latent"])
@torch.no_grad()
def test_dropout_is_where_the_definition_has_it(mla):
    spec, tokens = dataclasses.replace(DROPOUT, mla=mla), [3, 1, 4, 1, 5, 9, 2]
    model, keys = build(spec), sequence_keys(torch.tensor([17]), seed=1, step=2)
    of_attention = attention_masks(keys, len(tokens), num_heads=spec.num_heads)
    wanted = Naive(dict(model.named_parameters()), spec, masks=masks(keys, len(tokens)),
                   attention_masks=of_attention).logits(tokens)
    found = model(torch.tensor([tokens]), keys=keys)[0]
    assert torch.allclose(found, wanted, atol=1e-5, rtol=0)
    assert not torch.allclose(found, model(torch.tensor([tokens]))[0], atol=1e-2)  # without keys nothing is dropped


def test_dropout_draws_like_independent_coins():
    """Rate, and agreement between any two of: neighbouring tokens, sequences, steps, seeds, sites, units."""
    n, p = 400, 0.25

    def draw(*, seed=0, step=1, slot=5, site=3, token=0):
        keys = sequence_keys(torch.tensor([slot]), seed=seed, step=step)
        keys = locate(torch.empty(1, token + n, 1), places=Places(), keys=keys, weights=None).keys[0, token:]
        return 1 - dropped(keys, site=site, size=n, p=p).float()

    base = draw()
    others = [draw(seed=1), draw(step=2), draw(slot=6), draw(site=4), draw(token=n), base.roll(1, 0), base.roll(1, 1)]
    assert base.mean().item() == pytest.approx(1 - p, abs=5 * math.sqrt(p * (1 - p)) / n)
    for other in others:
        together = ((base - base.mean()) * (other - other.mean())).mean().item()
        assert abs(together) < 5 * p * (1 - p) / n  # five standard deviations of n² products
    for dim in (0, 1):  # no token and no unit is luckier than chance
        assert base.mean(dim).std().item() == pytest.approx(math.sqrt(p * (1 - p) / n), rel=0.2)


def test_loss_counts_targets_that_are_there():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[1, 2, 3], [IGNORED, IGNORED, IGNORED]])
    by_hand = -torch.log_softmax(logits, -1)[0, range(3), [1, 2, 3]].sum() / 6
    assert cross_entropy(logits, targets, global_tokens=6).item() == pytest.approx(by_hand.item(), abs=1e-6)
