"""Weights from and to Hugging Face checkpoints: names, and the few places where the same weight is laid out
otherwise.

`HubWeights` is what jobs.parallel fills a rank's shards from instead of random values; `to_hub` is called by
jobs.export. Covers the Llama family (Llama, Mistral, Qwen 3), Mixtral, Qwen 3's mixtures, Gemma 2 and DeepSeek-V3.
Knows no mesh.
"""
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jobs.safetensors import Folder, SafetensorsError
from jobs.spec.model import ModelSpec

ENDS = {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight"}
ATTENTION = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj", "q_norm": "q_norm", "k_norm": "k_norm"}
LATENT = {"wq_a": "q_a_proj", "q_norm": "q_a_layernorm", "wq": "q_b_proj", "wkv_a": "kv_a_proj_with_mqa",
          "kv_norm": "kv_a_layernorm", "wkv_b": "kv_b_proj", "wo": "o_proj"}
FFN = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
MIXTRAL_FFN = {"gate": "w1", "up": "w3", "down": "w2"}
NORMS = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
SANDWICH_NORMS = {"attention_norm": "input_layernorm", "attention_post_norm": "post_attention_layernorm",
                  "ffn_norm": "pre_feedforward_layernorm", "ffn_post_norm": "post_feedforward_layernorm"}


# What each family's own code takes for granted; other options it has a word for, or they leave weights alone.
_LLAMA = {"norm": "rmsnorm", "positions": "rotary", "ffn": "swiglu", "post_norms": False, "norm_offset": False,
          "embedding_scale": False, "attention_scale": None, "attention_softcap": None, "output_softcap": None,
          "sliding_window": None}
_PLAIN_MOE = {"score": "softmax", "scale": 1.0, "num_groups": 1, "num_shared_experts": 0}
GRANTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of ModelSpec, of MoeSpec
    "llama": (_LLAMA, {}),
    "qwen3": (_LLAMA, {}),
    "mixtral": (_LLAMA, _PLAIN_MOE | {"normalize_weights": True, "first_layer": 0}),
    "qwen3_moe": (_LLAMA, _PLAIN_MOE),
    "deepseek_v3": (_LLAMA | {"bias": False, "qk_norm": False}, {"score": "sigmoid", "balance": "bias"}),
    "gemma2": (_LLAMA | {"ffn": "geglu", "post_norms": True, "norm_offset": True, "embedding_scale": True,
                         "bias": False, "qk_norm": False, "moe": None}, {}),
}
_FREE = {"gemma2": ("attention_scale", "attention_softcap", "output_softcap", "sliding_window")}


def family(spec: ModelSpec) -> str:
    """The `model_type` there that is closest."""
    if spec.mla is not None:
        return "deepseek_v3"
    if spec.post_norms:
        return "gemma2"
    if spec.moe is None:
        return "qwen3" if spec.qk_norm else "llama"
    return "qwen3_moe" if spec.qk_norm else "mixtral"


def hub_problems(spec: ModelSpec) -> list[str]:
    """Options that the closest family does not have; empty if it computes the same as ours."""
    name = family(spec)
    model, moe = GRANTED[name]
    wanted = [("model", spec, {k: v for k, v in model.items() if k not in _FREE.get(name, ())})]
    if spec.moe is not None:
        wanted.append(("model.moe", spec.moe, moe))
    problems = [f"{where}.{field}: {getattr(owner, field)} is not what Hugging Face's {name} computes: {value}"
                for where, owner, fields in wanted for field, value in fields.items() if getattr(owner, field) != value]
    scale = spec.attention_scale
    if name == "gemma2" and scale is not None and abs(scale**-2 - round(scale**-2)) > 1e-6 * scale**-2:
        problems.append(f"model.attention_scale: {scale} is not 1/√n of a whole n, as Hugging Face's {name} has it")
    return problems


def hub_name(name: str, spec: ModelSpec, *, expert: int | None = None) -> str:
    """The name of our parameter `name` there; of one expert's matrix where ours is a stack of all."""
    if name in ENDS:
        return ENDS[name]
    number, rest = re.fullmatch(r"layers\.(\d+)\.(.+)", name).groups()
    part, _, kind = rest.rpartition(".")
    layer = f"model.layers.{number}"
    norms = SANDWICH_NORMS if spec.post_norms else NORMS
    if part in norms:
        return f"{layer}.{norms[part]}.{kind}"
    if part.startswith("attention."):
        table = ATTENTION if spec.mla is None else LATENT
        found = table[part.removeprefix("attention.")]
        if found == "q_b_proj" and spec.mla.q_lora_rank is None:
            found = "q_proj"
        return f"{layer}.self_attn.{found}.{kind}"
    mixtral = family(spec) == "mixtral"  # names its experts otherwise than the mixtures that came after it
    block = f"{layer}.block_sparse_moe" if mixtral else f"{layer}.mlp"
    if part == "ffn.router":
        return f"{block}.gate.{'e_score_correction_bias' if kind == 'bias' else kind}"
    if part == "ffn.experts":
        return f"{block}.experts.{expert}.{(MIXTRAL_FFN if mixtral else FFN)[kind]}.weight"
    shared = part.startswith("ffn.shared.")
    return f"{block}.{'shared_experts.' if shared else ''}{FFN[part.rpartition('.')[2]]}.{kind}"


def row_order(name: str, spec: ModelSpec, *, rows: int) -> Tensor | None:
    """Which of their rows each of our rows is; None where the order is the same. DeepSeek turns neighbouring elements
    of a head against each other, we turn its two halves."""
    if spec.mla is None or not name.endswith(("attention.wq.weight", "attention.wkv_a.weight")):
        return None
    rope = spec.mla.qk_rope_head_dim
    turned = torch.cat((torch.arange(0, rope, 2), torch.arange(1, rope, 2)))
    plain = spec.mla.kv_lora_rank if "wkv_a" in name else spec.mla.qk_nope_head_dim
    block = torch.cat((torch.arange(plain), plain + turned))
    return (torch.arange(0, rows, len(block))[:, None] + block).flatten()


# ------------------------------------------------------------------ in
class HubWeights:
    """The weights of a folder of safetensors files, under our names and in our layout."""

    def __init__(self, folder: Path, *, spec: ModelSpec) -> None:
        if problems := hub_problems(spec):
            raise SafetensorsError(f"{folder}: " + "; ".join(problems))
        self.folder = Folder(folder)
        self.spec = spec

    def slice(self, name: str, shape: tuple[int, ...], *, sizes: tuple[int, ...], offsets: tuple[int, ...]) -> Tensor:
        """The box of `sizes` at `offsets` of our parameter `name`, float32. Reads little more than the box."""
        if len(shape) == 3:  # a stack of experts
            return torch.stack([self._box(hub_name(name, self.spec, expert=e), shape[1:], name=name, sizes=sizes[1:],
                                          offsets=offsets[1:]) for e in range(offsets[0], offsets[0] + sizes[0])])
        return self._box(hub_name(name, self.spec), shape, name=name, sizes=sizes, offsets=offsets)

    def _box(self, theirs: str, shape: tuple[int, ...], *, name: str, sizes: tuple[int, ...],
             offsets: tuple[int, ...]) -> Tensor:
        tensor = self.folder.tensor(theirs)
        if tuple(tensor.shape) != tuple(shape):
            raise SafetensorsError(f"{self.folder.path}: {theirs!r} has shape {list(tensor.shape)}, the model needs "
                                   f"{list(shape)} for {name!r}")
        order = row_order(name, self.spec, rows=shape[0])
        rows = slice(offsets[0], offsets[0] + sizes[0])
        tensor = tensor[rows] if order is None else tensor[order[rows]]
        for dim in range(1, len(shape)):
            tensor = tensor.narrow(dim, offsets[dim], sizes[dim])
        return tensor.float()


# ------------------------------------------------------------------ out
def to_hub(named: Iterator[tuple[str, Tensor]], *, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """Our whole parameters, one by one → theirs."""
    for name, tensor in named:
        if tensor.ndim == 3:
            for expert, matrix in enumerate(tensor):
                yield hub_name(name, spec, expert=expert), matrix
            continue
        order = row_order(name, spec, rows=tensor.shape[0])
        if order is not None:
            theirs = torch.empty_like(tensor)
            theirs[order] = tensor
            tensor = theirs
        yield hub_name(name, spec), tensor
