"""Routing, experts and their balance against the definition; gradients against autograd's own on the same formula."""
import dataclasses

import pytest
import torch
import torch.nn.functional as F

from jobs.model.initial import initial_slice
from jobs.model.moe import MoE, dispatch_here, grouped_linear
from jobs.model.places import Tokens
from jobs.model.transformer import Transformer
from jobs.spec.counts import num_params
from jobs.spec.model import MlaSpec, ModelSpec, MoeSpec
from tests.helpers.naive import Naive

MOE = MoeSpec(num_experts=6, top_k=2, ffn_dim=10, balance="none")
SPEC = ModelSpec(name="mixture", vocab_size=64, dim=24, num_layers=3, num_heads=6, num_kv_heads=2, ffn_dim=40,
                 head_dim=4, init_std=0.2, moe=MOE)
# name → changes of MOE, changes of SPEC
SPECS = {
    "softmax": ({}, {}),
    "sigmoid": (dict(score="sigmoid"), {}),
    "weights as they come": (dict(normalize_weights=False), {}),
    "scaled": (dict(scale=2.5), {}),
    "shared experts": (dict(num_shared_experts=2), {}),
    "first layer dense": (dict(first_layer=1), {}),
    "sizes for the grouped kernel": (dict(ffn_dim=12), {}),
    "one expert": (dict(top_k=1, normalize_weights=False), {}),
    "all experts": (dict(top_k=6), {}),
    "groups of experts": (dict(num_groups=3, top_groups=1), {}),
    "bias on the selection": (dict(balance="bias"), {}),
    "GELU": ({}, dict(ffn="gelu")),
    "GeGLU": ({}, dict(ffn="geglu")),
    "DeepSeek-V3": (dict(score="sigmoid", balance="bias", scale=2.5, num_shared_experts=1, first_layer=1, num_groups=3,
                         top_groups=2), dict(mla=MlaSpec(kv_lora_rank=10, q_lora_rank=14, qk_nope_head_dim=6,
                                                         qk_rope_head_dim=4, v_head_dim=5))),
}


def changed(name: str) -> ModelSpec:
    moe, spec = SPECS[name]
    return dataclasses.replace(SPEC, moe=dataclasses.replace(MOE, **moe), **spec)


def build(spec: ModelSpec) -> Transformer:
    model = Transformer(spec, layers=range(spec.num_layers), is_first=True, is_last=True)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(initial_slice(name, tuple(p.shape), sizes=tuple(p.shape), offsets=(0,) * p.ndim, spec=spec, seed=0))
        for layer in model.layers.values():
            if isinstance(layer.ffn, MoE) and layer.ffn.router.bias is not None:
                layer.ffn.router.bias.copy_(torch.linspace(-0.5, 0.5, spec.moe.num_experts))
    return model


def block(spec: ModelSpec = SPEC) -> MoE:
    return build(spec).layers["1"].ffn


@pytest.mark.parametrize("name", SPECS)
@torch.no_grad()
def test_logits_match_the_definition(name):
    spec, tokens = changed(name), [3, 1, 4, 1, 5, 9, 2, 6]
    model = build(spec)
    naive = Naive(dict(model.named_parameters()) | dict(model.named_buffers()), spec)
    assert torch.allclose(model(torch.tensor([tokens]))[0], naive.logits(tokens), atol=2e-5, rtol=0)
    used = {expert for layer in naive.chosen.values() for choice in layer for expert in choice}
    assert len(used) > 1  # or the wrong expert could not be told


@pytest.mark.parametrize("name", SPECS)
def test_parameters_are_those_that_are_counted(name):
    assert sum(p.numel() for p in build(changed(name)).parameters()) == num_params(changed(name))


@torch.no_grad()
def test_the_bias_changes_who_is_chosen_but_no_weight():
    spec = changed("bias on the selection")
    moe, x = block(spec), torch.randn(50, SPEC.dim, generator=torch.Generator().manual_seed(0))
    scores, chosen, weights = moe.router(x)
    moe.router.bias.zero_()
    _, unbiased, _ = moe.router(x)
    assert not torch.equal(chosen, unbiased)
    wanted = scores.gather(-1, chosen)
    assert torch.equal(weights, wanted / wanted.sum(-1, keepdim=True))


def test_dispatch_has_the_gradients_of_plain_indexing():
    torch.manual_seed(0)
    moe, x = block(), torch.randn(7, SPEC.dim, requires_grad=True)
    chosen = torch.tensor([[0, 5], [5, 3], [0, 3], [3, 0], [5, 0], [0, 5], [3, 5]])  # some experts get nothing
    upstream = torch.randn(7, 2, SPEC.dim)

    def plain():
        out = []
        for token, experts in zip(x, chosen.tolist()):
            for e in experts:
                hidden = F.silu(moe.experts.gate[e] @ token) * (moe.experts.up[e] @ token)
                out.append(moe.experts.down[e] @ hidden)
        return torch.stack(out).view(7, 2, -1)

    wrt = [x, *moe.experts.parameters()]
    found = torch.autograd.grad((dispatch_here(x, chosen, moe.experts) * upstream).sum(), wrt)
    wanted = torch.autograd.grad((plain() * upstream).sum(), wrt)
    for a, b in zip(found, wanted, strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    assert found[1][1].abs().max() == 0  # of an expert without tokens: zero, and there


@pytest.mark.parametrize("counts", [[3, 0, 4], [0, 0, 7], [7, 0, 0]])
@pytest.mark.parametrize("sizes", [(4, 8), (5, 7)], ids=["grouped kernel", "loop"])
def test_grouped_linear_is_one_linear_per_group(sizes, counts):
    torch.manual_seed(0)
    x, weights = torch.randn(7, sizes[1]), torch.randn(3, *sizes)
    wanted = torch.cat([F.linear(part, w) for part, w in zip(x.split(counts), weights)])
    assert torch.allclose(grouped_linear(x, weights, torch.tensor(counts)), wanted, atol=1e-6)


@pytest.mark.parametrize("sizes, kernels", [((4, 8), 1), ((5, 7), 0)], ids=["rows of 16 bytes", "others"])
def test_the_grouped_kernel_computes_what_it_can(sizes, kernels):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        grouped_linear(torch.randn(7, sizes[1]), torch.randn(3, *sizes), torch.tensor([3, 0, 4]))
    assert [event.name for event in profile.events()].count("aten::_grouped_mm") == kernels


# ------------------------------------------------------------------ balance
BATCH, SEQ = 3, 8
WEIGHTS = torch.tensor([0.5, 0.5, 0.0])  # the last slot is empty


def tokens_of(weights: torch.Tensor = WEIGHTS) -> Tokens:
    rows = torch.arange(BATCH)[:, None].expand(BATCH, SEQ)
    return Tokens(rows=rows, positions=torch.arange(SEQ).expand(BATCH, SEQ), keys=None, weights=weights)


def balance_loss(moe: MoE, x: torch.Tensor) -> torch.Tensor:
    """rate · Σ_e f_e·P_e of each sequence, weighted (DeepSeek-V3, eq. 17–20), one expert at a time."""
    total = torch.zeros(())
    for sequence, weight in zip(x, WEIGHTS):
        scores, chosen, _ = moe.router(sequence)
        for e in range(scores.shape[1]):
            f = (chosen == e).sum() * scores.shape[1] / (chosen.shape[1] * SEQ)
            total = total + weight * moe.balance_rate * f * (scores[:, e] / scores.sum(-1)).mean()
    return total


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_backward_descends_the_load_balance_loss(score):
    torch.manual_seed(0)
    moe = block(dataclasses.replace(SPEC, moe=dataclasses.replace(MOE, balance="loss", balance_rate=0.1, score=score)))
    x, upstream = torch.randn(BATCH, SEQ, SPEC.dim), torch.randn(BATCH, SEQ, SPEC.dim)
    without = torch.autograd.grad((moe(x) * upstream).sum(), moe.router.weight)[0]
    found = torch.autograd.grad((moe(x, tokens_of()) * upstream).sum(), moe.router.weight)[0]
    wanted = torch.autograd.grad(balance_loss(moe, x), moe.router.weight)[0]
    assert wanted.abs().max() > 1e-3
    assert torch.allclose(found - without, wanted, atol=1e-6)


def test_the_load_is_counted_once_and_without_empty_slots():
    torch.manual_seed(0)
    moe = block(changed("bias on the selection"))
    x = torch.randn(BATCH, SEQ, SPEC.dim)
    out = moe(x, tokens_of())
    moe(x, tokens_of())  # a forward alone, as recompute adds one, does not count
    assert moe.router.load.sum() == 0
    out.sum().backward()
    _, chosen, _ = moe.router(x[:2].flatten(0, 1))
    assert moe.router.load.tolist() == torch.bincount(chosen.flatten(), minlength=MOE.num_experts).tolist()


def test_the_bias_moves_against_the_load():
    router = block(changed("bias on the selection")).router
    before = router.bias.clone()
    router.update_bias(torch.tensor([9, 3, 0, 6, 6, 6]))  # mean 5
    assert torch.equal(torch.sign(router.bias - before), torch.tensor([-1.0, 1.0, 1.0, -1.0, -1.0, -1.0]))
    assert torch.allclose((router.bias - before).abs(), torch.tensor(MOE.balance_rate))
    router.update_bias(torch.full((6,), 5))
    assert torch.allclose(router.bias[1], before[1] + MOE.balance_rate)  # even: nothing moves


def test_bias_balancing_evens_out_a_lopsided_router():
    """Selection alone, tokens fixed: the most loaded expert comes down close to the mean."""
    torch.manual_seed(0)
    spec = dataclasses.replace(SPEC, moe=dataclasses.replace(MOE, balance="bias", balance_rate=0.002))
    router, x = block(spec).router, torch.randn(600, SPEC.dim) + 1.0

    def load():
        return torch.bincount(router(x)[1].flatten(), minlength=MOE.num_experts)

    router.bias.zero_()
    mean, first = 600 * MOE.top_k / MOE.num_experts, load().max().item()
    for _ in range(1000):
        router.update_bias(load())
    assert first > 1.5 * mean and load().max() < 1.1 * mean
