"""What attention chooses on CUDA is attention: against the definition's arithmetic in float64 on CPU."""
import pytest
import torch

from jobs.model.attention import algorithm, causal_attention
from jobs.model.blockwise import Partial, block_gradients
from jobs.model.chunked import chunked_attention
from jobs.model.places import Places, document_starts, locate, sequence_keys
from jobs.model.rule import AttentionKind, Block, Rule
from tests.helpers.device import rank_device
from tests.helpers.ranks import run_ranks

BATCH, SEQ, HEADS, KV_HEADS = 2, 640, 4, 2
# Of the largest element: a few roundings of the inputs' dtype. The same comparisons on CPU come out at 1e-6 and 2e-2.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-5}
LENGTHS = ((640,), (3, 300, 4, 200, 133))

# (options of AttentionKind, with documents, size of a head, of a value) → the algorithm on CUDA
CASES = {
    "causal": (dict(), False, 64, 64, "fused"),
    "causal, values of another size": (dict(), False, 192, 128, "fused"),
    "a window": (dict(window=100), False, 64, 64, "flex"),
    "capped": (dict(softcap=2.0), False, 64, 64, "flex"),
    "capped, in a window, documents": (dict(softcap=2.0, window=100), True, 64, 64, "flex"),
    "documents": (dict(), True, 128, 128, "flex"),
    "documents, values of another size": (dict(), True, 192, 128, "flex"),
    "small heads": (dict(window=100), False, 8, 8, "chunked"),
    "dropped": (dict(dropout=0.3), True, 64, 64, "chunked"),
}


def rule_on(device: torch.device, *, documents: bool, head_dim: int, **options) -> Rule:
    starts = None if not documents else document_starts(
        torch.tensor([[i for i, n in enumerate(of) for _ in range(n)] for of in LENGTHS]))
    keys = sequence_keys(torch.arange(BATCH, device=device), seed=1, step=2)
    tokens = locate(torch.empty(BATCH, SEQ, 1, device=device), places=Places(), keys=keys, weights=None, starts=starts)
    return Rule(kind=AttentionKind(scale=head_dim**-0.5, **options), tokens=tokens)


def inputs(dtype: torch.dtype, head_dim: int, value: int) -> list[torch.Tensor]:
    """q, k, v and a gradient, [batch, seq, heads, size], on CPU."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(HEADS, head_dim), (KV_HEADS, head_dim), (KV_HEADS, value), (HEADS, value)]
    return [torch.randn(BATCH, SEQ, *shape, generator=generator).to(dtype) for shape in shapes]


def with_gradients(attention, tensors, grad) -> list[torch.Tensor]:
    wrt = [t.detach().requires_grad_() for t in tensors]
    out = attention(*wrt)
    return [out.detach(), *torch.autograd.grad(out, wrt, grad)]


def wanted(tensors: list[torch.Tensor], **options) -> list[torch.Tensor]:
    *tensors, grad = [t.double() for t in tensors]
    rule = rule_on(torch.device("cpu"), **options)

    def attention(*qkv):
        return chunked_attention(*(t.transpose(1, 2) for t in qkv), rule=rule).transpose(1, 2)

    return with_gradients(attention, tensors, grad)


def errors(found: list[torch.Tensor], expected: list[torch.Tensor], *, dtype: torch.dtype) -> list[float]:
    """Of output and gradients, relative to the largest element."""
    assert all(t.dtype == dtype for t in found)
    return [((a.cpu().double() - b).abs().max() / b.abs().max()).item() for a, b in zip(found, expected, strict=True)]


# ------------------------------------------------------------------ in a rank
def attention_errors(case: str, dtype: torch.dtype) -> tuple[str, list[float]]:
    """The algorithm chosen, and how far off it is."""
    options, documents, head_dim, value, _ = CASES[case]
    options = options | {"documents": documents, "head_dim": head_dim}
    rule, tensors = rule_on(rank_device(), **options), inputs(dtype, head_dim, value)
    *here, grad = [t.to(rank_device()) for t in tensors]
    found = with_gradients(lambda *qkv: causal_attention(*qkv, rule=rule), here, grad)
    chosen = algorithm(rule, seq_len=SEQ, head_dim=head_dim, device_type=rank_device().type)
    return chosen, errors(found, wanted(tensors, **options), dtype=dtype)


def block_errors(head_dim: int, dtype: torch.dtype) -> list[float]:
    """Of what ring attention does with each block: the fused kernel's log-sum-exp and its backward, where it takes the
    dtype and the size of a head."""
    half, tensors = SEQ // 2, inputs(dtype, head_dim, head_dim)
    rule = rule_on(rank_device(), documents=False, head_dim=head_dim)
    q, k, v, grad = (t.to(rank_device()).transpose(1, 2) for t in tensors)
    first, second = slice(0, half), slice(half, SEQ)
    blocks = [Block(queries=first, keys=first, first_query=0, first_key=0),
              Block(queries=second, keys=second, first_query=half, first_key=half),
              Block(queries=second, keys=first, first_query=half, first_key=0)]
    total, gradients = Partial(q, v), tuple(torch.zeros_like(t, dtype=torch.float32) for t in (q, k, v))
    for block in blocks:
        total.add(block, q, k, v, rule=rule)
    out = total.out.to(dtype)
    for block in blocks:
        block_gradients(block, grad, q, k, v, out, total.lse, into=gradients, rule=rule)
    found = [t.to(dtype).transpose(1, 2) for t in (out, *gradients)]
    return errors(found, wanted(tensors, documents=False, head_dim=head_dim), dtype=dtype)


# ------------------------------------------------------------------ of a rank: this process must stay without CUDA
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_attention_on_cuda_is_attention(case, dtype):
    chosen, found = run_ranks(attention_errors, world_size=1, args=(case, dtype))[0]
    assert chosen == CASES[case][-1]
    assert max(found) < TOLERANCE[dtype], found


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head_dim", [64, 36, 8])
def test_blocks_on_cuda_add_up_to_attention(head_dim, dtype):
    found = run_ranks(block_errors, world_size=1, args=(head_dim, dtype))[0]
    assert max(found) < TOLERANCE[dtype], found
