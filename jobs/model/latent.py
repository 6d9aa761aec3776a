"""Multi-head latent attention: keys and values expanded from one small latent per token (DeepSeek-V2,
arXiv:2405.04434, §2.1; DeepSeek-V3, arXiv:2412.19437, eq. 1–11).

Built by jobs.model.transformer instead of jobs.model.attention. Knows nothing of parallelism: heads are
inferred from the expansions' width, and what lies before the expansions (`wq_a`, `wkv_a`, their norms)
works on any part of the tokens.
"""
import torch
import torch.nn as nn
from torch import Tensor

from jobs.model.attention import Inner, causal_attention, rotate
from jobs.model.layers import Norm
from jobs.model.places import Tokens
from jobs.model.rule import AttentionKind, Rule
from jobs.spec.model import ModelSpec


class LatentAttention(nn.Module):
    """[batch, seq, dim] → [batch, seq, dim]. Each head's query and key have a part without position and a
    rotary part; the rotary part of the key is one for all heads."""

    def __init__(self, spec: ModelSpec, *, layer: int) -> None:
        super().__init__()
        mla = spec.mla
        self.nope, self.rope, self.value = mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim
        self.latent = mla.kv_lora_rank
        self.kind = AttentionKind.of(spec, layer=layer, head_dim=self.nope + self.rope)
        self.inner: Inner = causal_attention
        compressed = mla.q_lora_rank is not None
        self.wq_a = nn.Linear(spec.dim, mla.q_lora_rank, bias=False) if compressed else None
        self.q_norm = Norm(mla.q_lora_rank, spec=spec, rms=True) if compressed else None
        self.wq = nn.Linear(mla.q_lora_rank if compressed else spec.dim, spec.num_heads * (self.nope + self.rope),
                            bias=False)
        self.wkv_a = nn.Linear(spec.dim, self.latent + self.rope, bias=False)
        self.kv_norm = Norm(self.latent, spec=spec, rms=True)
        self.shared_key = nn.Identity()  # the rotary part, on its way to the heads: a place for a hook
        self.wkv_b = nn.Linear(self.latent, spec.num_heads * (self.nope + self.value), bias=False)
        self.wo = nn.Linear(spec.num_heads * self.value, spec.dim, bias=False)

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        q = self.wq(x if self.wq_a is None else self.q_norm(self.wq_a(x))).unflatten(-1, (-1, self.nope + self.rope))
        latent, shared = self.wkv_a(x).split((self.latent, self.rope), dim=-1)
        shared = self.shared_key(shared)[:, :, None]  # [batch, seq, 1, rope]
        k, v = self.wkv_b(self.kv_norm(latent)).unflatten(-1, (-1, self.nope + self.value)).split(
            (self.nope, self.value), dim=-1)  # [batch, seq, heads, …]
        q_nope, q_rope = q.split((self.nope, self.rope), dim=-1)
        q = torch.cat((q_nope, rotate(q_rope, *tokens.angles)), dim=-1)
        k = torch.cat((k, rotate(shared, *tokens.angles).expand(-1, -1, k.shape[2], -1)), dim=-1)
        return self.wo(self.inner(q, k, v, rule=Rule(kind=self.kind, tokens=tokens)).flatten(-2))
