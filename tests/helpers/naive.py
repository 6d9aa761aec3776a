"""The decoder from its definitions alone: one token, one head, one expert at a time, with none of jobs.model's code.

What the tests of jobs.model compare with. Slow, and meant to be read beside the papers that jobs.model names.
"""
import math

import torch
from torch import Tensor

from jobs.spec.model import ModelSpec


class Naive:
    """`weights`: parameters and buffers of a jobs.model.Transformer by name. `masks`: what dropout multiplies with, by
    site (0 embedding, then two per layer), each [seq, dim]; none: nothing is dropped. `attention_masks`: the same of
    attention's weights, by layer, each [heads, queries, keys]."""

    def __init__(self, weights: dict[str, Tensor], spec: ModelSpec, *, masks: dict[int, Tensor] | None = None,
                 attention_masks: dict[int, Tensor] | None = None) -> None:
        self.w = weights
        self.spec = spec
        self.masks = masks
        self.attention_masks = attention_masks
        self.chosen: dict[int, list[list[int]]] = {}  # experts of each token by layer

    def logits(self, tokens: list[int]) -> Tensor:
        """[seq, vocab]"""
        spec = self.spec
        xs = [self._embed(token, position) for position, token in enumerate(tokens)]
        xs = self._drop(xs, site=0)
        for i in range(spec.num_layers):
            layer = f"layers.{i}"
            normed = [self._norm(x, f"{layer}.attention_norm") for x in xs]
            out = self._latent(normed, i) if spec.mla else self._attention(normed, i)
            xs = self._residual(xs, out, f"{layer}.attention_post_norm", site=2 * i + 1)
            normed = [self._norm(x, f"{layer}.ffn_norm") for x in xs]
            out = [self._experts(x, i) if spec.is_moe(i) else self._ffn(x, f"{layer}.ffn") for x in normed]
            xs = self._residual(xs, out, f"{layer}.ffn_post_norm", site=2 * i + 2)
        table = self.w["embedding.weight" if spec.tie_embeddings else "output.weight"]
        logits = torch.stack([table @ self._norm(x, "norm") for x in xs])
        cap = spec.output_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    # -------------------------------------------------------------- the residual stream
    def _embed(self, token: int, position: int) -> Tensor:
        x = self.w["embedding.weight"][token]
        if self.spec.embedding_scale:
            x = x * math.sqrt(self.spec.dim)
        return x + self.w["position_embedding.weight"][position] if self.spec.positions == "learned" else x

    def _residual(self, xs: list[Tensor], out: list[Tensor], post_norm: str, *, site: int) -> list[Tensor]:
        out = [self._norm(o, post_norm) for o in out] if self.spec.post_norms else out
        return [x + o for x, o in zip(xs, self._drop(out, site=site))]

    def _drop(self, xs: list[Tensor], *, site: int) -> list[Tensor]:
        return xs if self.masks is None else [x * mask for x, mask in zip(xs, self.masks[site])]

    def _norm(self, x: Tensor, name: str, *, rms: bool = False) -> Tensor:
        weight = self.w[f"{name}.weight"]
        if self.spec.norm == "layernorm" and not rms:
            spread = torch.sqrt(((x - x.mean()) ** 2).mean() + self.spec.norm_eps)
            return (x - x.mean()) / spread * weight + self.w[f"{name}.bias"]
        return x / torch.sqrt((x * x).mean() + self.spec.norm_eps) * (weight + self.spec.norm_offset)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        y = self.w[f"{name}.weight"] @ x
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    # -------------------------------------------------------------- feed-forward
    def _ffn(self, x: Tensor, name: str) -> Tensor:
        gate = self._linear(x, f"{name}.gate") if self.spec.ffn != "gelu" else None
        return self._linear(self._act(gate, self._linear(x, f"{name}.up")), f"{name}.down")

    def _act(self, gate: Tensor | None, up: Tensor) -> Tensor:
        def gelu(x):
            return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

        if self.spec.ffn == "gelu":
            return gelu(up)
        return (gelu(gate) if self.spec.ffn == "geglu" else gate / (1 + torch.exp(-gate))) * up

    def _experts(self, x: Tensor, layer: int) -> Tensor:
        moe, name = self.spec.moe, f"layers.{layer}.ffn"
        logits = self.w[f"{name}.router.weight"] @ x
        scores = torch.exp(logits) / torch.exp(logits).sum() if moe.score == "softmax" else 1 / (1 + torch.exp(-logits))
        ranked = (scores + self.w[f"{name}.router.bias"] if moe.balance == "bias" else scores).tolist()
        size = moe.num_experts // moe.num_groups
        groups = [ranked[g * size:(g + 1) * size] for g in range(moe.num_groups)]
        best = sorted(range(moe.num_groups), key=lambda g: -sum(sorted(groups[g])[-2:]))[:moe.top_groups]
        allowed = [e for e in range(moe.num_experts) if e // size in best or moe.top_groups >= moe.num_groups]
        chosen = sorted(allowed, key=lambda e: -ranked[e])[:moe.top_k]
        self.chosen.setdefault(layer, []).append(chosen)
        total = sum(scores[e] for e in chosen) if moe.normalize_weights else 1.0
        out = torch.zeros_like(x)
        for e in chosen:
            gate = self.w[f"{name}.experts.gate"][e] @ x if self.spec.ffn != "gelu" else None
            hidden = self._act(gate, self.w[f"{name}.experts.up"][e] @ x)
            out = out + moe.scale * scores[e] / total * (self.w[f"{name}.experts.down"][e] @ hidden)
        return out + self._ffn(x, f"{name}.shared") if moe.num_shared_experts else out

    # -------------------------------------------------------------- attention
    def _turn(self, x: Tensor, position: int) -> Tensor:
        out, half = torch.empty_like(x), len(x) // 2
        for i in range(half):
            angle = position * self.spec.rope_theta ** (-2 * i / len(x))
            out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
            out[i + half] = x[i] * math.sin(angle) + x[i + half] * math.cos(angle)
        return out

    def _attend(self, q: list[Tensor], k: list[Tensor], v: list[Tensor], *, layer: int, head: int) -> list[Tensor]:
        """One head: queries, keys and values by position."""
        spec, out = self.spec, []
        window = spec.window(layer) or len(q)
        for position, query in enumerate(q):
            seen = range(max(0, position - window + 1), position + 1)
            scale = spec.attention_scale or 1 / math.sqrt(len(query))
            scores = torch.stack([query @ k[past] * scale for past in seen])
            if spec.attention_softcap is not None:
                scores = spec.attention_softcap * torch.tanh(scores / spec.attention_softcap)
            shares = torch.softmax(scores, dim=0)
            if self.attention_masks is not None:
                shares = shares * self.attention_masks[layer][head, position, seen.start:seen.stop]
            out.append(sum(share * v[past] for share, past in zip(shares, seen)))
        return out

    def _attention(self, xs: list[Tensor], layer: int) -> list[Tensor]:
        spec, name = self.spec, f"layers.{layer}.attention"
        d, group = spec.head_size, spec.num_heads // spec.num_kv_heads

        def project(kind: str, head: int) -> list[Tensor]:
            parts = [self._linear(x, f"{name}.w{kind}")[head * d:head * d + d] for x in xs]
            if spec.qk_norm and kind in "qk":
                parts = [self._norm(part, f"{name}.{kind}_norm", rms=True) for part in parts]
            turned = spec.positions == "rotary" and kind in "qk"
            return [self._turn(part, position) if turned else part for position, part in enumerate(parts)]

        heads = [self._attend(project("q", h), project("k", h // group), project("v", h // group), layer=layer,
                              head=h)
                 for h in range(spec.num_heads)]
        return [self._linear(torch.cat(of_position), f"{name}.wo") for of_position in zip(*heads)]

    def _latent(self, xs: list[Tensor], layer: int) -> list[Tensor]:
        spec, mla, name = self.spec, self.spec.mla, f"layers.{layer}.attention"
        nope, rope, value = mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim
        downs = [self._linear(x, f"{name}.wkv_a") for x in xs]
        latents = [self._norm(down[:mla.kv_lora_rank], f"{name}.kv_norm", rms=True) for down in downs]
        shared = [self._turn(down[mla.kv_lora_rank:], position) for position, down in enumerate(downs)]
        if mla.q_lora_rank is not None:
            xs = [self._norm(self._linear(x, f"{name}.wq_a"), f"{name}.q_norm", rms=True) for x in xs]
        heads = []
        for h in range(spec.num_heads):
            queries = [self._linear(x, f"{name}.wq")[h * (nope + rope):(h + 1) * (nope + rope)] for x in xs]
            q = [torch.cat((query[:nope], self._turn(query[nope:], i))) for i, query in enumerate(queries)]
            up = [self._linear(c, f"{name}.wkv_b")[h * (nope + value):(h + 1) * (nope + value)] for c in latents]
            k = [torch.cat((part[:nope], s)) for part, s in zip(up, shared)]
            heads.append(self._attend(q, k, [part[nope:] for part in up], layer=layer, head=h))
        return [self._linear(torch.cat(of_position), f"{name}.wo") for of_position in zip(*heads)]
