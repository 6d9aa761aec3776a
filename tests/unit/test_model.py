"""The decoder against an independent, naive one; its weights against slices of themselves."""
import dataclasses
import math

import pytest
import torch

from jobs.loss import IGNORED, cross_entropy
from jobs.model.transformer import INIT_ROWS, Transformer, initial_rows
from jobs.spec.model import ModelSpec, num_params

SPEC = ModelSpec(name="small", vocab_size=64, dim=24, num_layers=3, num_heads=6, num_kv_heads=2, ffn_dim=40, head_dim=4)
SPECS = {
    "grouped": SPEC,
    "all heads of their own": dataclasses.replace(SPEC, num_kv_heads=6),
    "one kv head, tied": dataclasses.replace(SPEC, num_kv_heads=1, tie_embeddings=True),
    "wide heads": dataclasses.replace(SPEC, head_dim=8),
}


def build(spec: ModelSpec, *, layers: range | None = None, is_first=True, is_last=True, seed=0) -> Transformer:
    model = Transformer(spec, layers=layers or range(spec.num_layers), is_first=is_first, is_last=is_last)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(initial_rows(name, tuple(p.shape), rows=range(p.shape[0]), spec=spec, seed=seed))
            if p.ndim == 1:  # ones would hide a norm that is skipped or used twice
                p.mul_(1 + 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))))
    return model


def naive(model: Transformer, spec: ModelSpec, tokens: list[int]) -> torch.Tensor:
    """One position, one head at a time, from the definitions alone. Logits [seq, vocab]."""
    weights = dict(model.named_parameters())

    def norm(x, name):
        return x / torch.sqrt((x * x).mean() + spec.norm_eps) * weights[f"{name}.weight"]

    def turn(x, position):
        out, half = torch.empty_like(x), len(x) // 2
        for i in range(half):
            angle = position * spec.rope_theta ** (-2 * i / len(x))
            out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
            out[i + half] = x[i] * math.sin(angle) + x[i + half] * math.cos(angle)
        return out

    def attend(xs, layer):
        d, group = spec.head_size, spec.num_heads // spec.num_kv_heads
        q, k, v = ([weights[f"{layer}.attention.w{c}.weight"] @ x for x in xs] for c in "qkv")
        for position in range(len(xs)):
            heads = []
            for head in range(spec.num_heads):
                mine = slice(head * d, head * d + d)
                shared = slice(head // group * d, head // group * d + d)
                query = turn(q[position][mine], position)
                scores = torch.stack([query @ turn(k[past][shared], past) for past in range(position + 1)])
                shares = torch.softmax(scores / math.sqrt(d), dim=0)
                heads.append(sum(share * v[past][shared] for past, share in enumerate(shares)))
            yield weights[f"{layer}.attention.wo.weight"] @ torch.cat(heads)

    def feed(x, layer):
        gate, up, down = (weights[f"{layer}.ffn.{part}.weight"] for part in ("gate", "up", "down"))
        g = gate @ x
        return down @ (g / (1 + torch.exp(-g)) * (up @ x))

    xs = [weights["embedding.weight"][token] for token in tokens]
    for i in range(spec.num_layers):
        layer = f"layers.{i}"
        xs = [x + out for x, out in zip(xs, attend([norm(x, f"{layer}.attention_norm") for x in xs], layer))]
        xs = [x + feed(norm(x, f"{layer}.ffn_norm"), layer) for x in xs]
    output = weights["embedding.weight" if spec.tie_embeddings else "output.weight"]
    return torch.stack([output @ norm(x, "norm") for x in xs])


@pytest.mark.parametrize("name", SPECS)
@torch.no_grad()
def test_logits_match_the_definition(name):
    model = build(SPECS[name])
    tokens = [3, 1, 4, 1, 5, 9, 2]
    assert torch.allclose(model(torch.tensor([tokens]))[0], naive(model, SPECS[name], tokens), atol=1e-5, rtol=0)


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


def test_loss_counts_targets_that_are_there():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[1, 2, 3], [IGNORED, IGNORED, IGNORED]])
    by_hand = -torch.log_softmax(logits, -1)[0, range(3), [1, 2, 3]].sum() / 6
    assert cross_entropy(logits, targets, global_tokens=6).item() == pytest.approx(by_hand.item(), abs=1e-6)
