"""Weights from and to Hugging Face's layout. Against `transformers` itself where it is installed (with tiny random
weights): its logits are ours, its files are read, ours are read by it."""
import dataclasses
import json

import pytest
import torch

from jobs.hub_config import hub_config
from jobs.model.initial import initial_slice
from jobs.model.transformer import Transformer
from jobs.safetensors import Folder, SafetensorsError, write, write_folder
from jobs.spec.model import MlaSpec, ModelSpec, MoeSpec
from jobs.weights import HubWeights, hub_problems, to_hub

BASE = ModelSpec(name="base", vocab_size=64, dim=32, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=48,
                 init_std=0.3)
MLA = MlaSpec(kv_lora_rank=16, q_lora_rank=24, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
DEEPSEEK = dataclasses.replace(
    BASE, num_kv_heads=4, norm_eps=1e-6, mla=MLA,  # the eps of its latents' norms is fixed there
    moe=MoeSpec(num_experts=8, top_k=2, ffn_dim=16, num_shared_experts=1, first_layer=1, score="sigmoid", scale=2.5,
                balance="bias", num_groups=4, top_groups=2))
SPECS = {
    "llama": BASE,
    "llama with biases, wide heads, tied": dataclasses.replace(BASE, bias=True, head_dim=12, tie_embeddings=True),
    "qwen3": dataclasses.replace(BASE, qk_norm=True, head_dim=12),
    "gemma2": dataclasses.replace(BASE, head_dim=12, ffn="geglu", post_norms=True, norm_offset=True,
                                  embedding_scale=True, tie_embeddings=True, attention_scale=20**-0.5,
                                  attention_softcap=2.0, output_softcap=3.0, sliding_window=5, global_every=2),
    "mixtral": dataclasses.replace(BASE, moe=MoeSpec(num_experts=4, top_k=2, ffn_dim=24)),
    "qwen3_moe": dataclasses.replace(BASE, qk_norm=True,
                                     moe=MoeSpec(num_experts=4, top_k=2, ffn_dim=24, first_layer=1)),
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3, queries not compressed": dataclasses.replace(DEEPSEEK,
                                                               mla=dataclasses.replace(MLA, q_lora_rank=None)),
}


def state_of(model: Transformer) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters()) | {n: b for n, b in model.named_buffers() if n.endswith("router.bias")}


@torch.no_grad()
def build(spec: ModelSpec) -> Transformer:
    model = Transformer(spec, layers=range(spec.num_layers), is_first=True, is_last=True)
    for name, p in state_of(model).items():
        p.copy_(initial_slice(name, tuple(p.shape), sizes=tuple(p.shape), offsets=(0,) * p.ndim, spec=spec, seed=0))
        if p.ndim == 1:
            p.add_(0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))))
    return model


def whole(weights: HubWeights, model: Transformer) -> dict[str, torch.Tensor]:
    return {name: weights.slice(name, tuple(p.shape), sizes=tuple(p.shape), offsets=(0,) * p.ndim)
            for name, p in state_of(model).items()}


@pytest.mark.parametrize("name", SPECS)
def test_what_was_written_is_read_back(name, tmp_path):
    model = build(SPECS[name])
    write_folder(tmp_path, to_hub(iter(state_of(model).items()), spec=SPECS[name]), max_file_bytes=20_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for key, value in whole(HubWeights(tmp_path, spec=SPECS[name]), model).items():
        assert torch.equal(value, state_of(model)[key]), key


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_a_rank_reads_its_box_of_each_weight(name, tmp_path):
    model = build(SPECS[name])
    write_folder(tmp_path, to_hub(iter(state_of(model).items()), spec=SPECS[name]))
    weights = HubWeights(tmp_path, spec=SPECS[name])
    for key, value in state_of(model).items():
        sizes = tuple(max(1, size // 3) for size in value.shape)
        offsets = tuple(size // 2 for size in value.shape)
        sizes = tuple(min(n, size - o) for n, o, size in zip(sizes, offsets, value.shape))
        box = value[tuple(slice(o, o + n) for o, n in zip(offsets, sizes))]
        assert torch.equal(weights.slice(key, tuple(value.shape), sizes=sizes, offsets=offsets), box), key


# ------------------------------------------------------------------ against the real thing
@pytest.mark.parametrize("name", SPECS)
@torch.no_grad()
def test_transformers_loads_what_we_write_and_has_our_logits(name, tmp_path):
    transformers = pytest.importorskip("transformers", reason="a test extra: pip install transformers")
    spec, model = SPECS[name], build(SPECS[name])
    write_folder(tmp_path, to_hub(iter(state_of(model).items()), spec=spec))
    (tmp_path / "config.json").write_text(json.dumps(hub_config(spec, seq_len=64, dtype="float32")))
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    tokens = torch.randint(0, spec.vocab_size, (3, 12), generator=torch.Generator().manual_seed(1))
    wanted = theirs.eval()(tokens).logits
    assert wanted.std() > 0.1
    assert torch.allclose(model(tokens), wanted, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("name", SPECS)
@torch.no_grad()
def test_we_load_what_transformers_writes(name, tmp_path):
    transformers = pytest.importorskip("transformers", reason="a test extra: pip install transformers")
    spec, model = SPECS[name], build(SPECS[name])
    config = transformers.AutoConfig.for_model(**hub_config(spec, seq_len=64, dtype="float32"))
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    theirs.save_pretrained(tmp_path, max_shard_size="30KB")
    weights = HubWeights(tmp_path, spec=spec)
    for key, value in whole(weights, model).items():
        state_of(model)[key].copy_(value)
    back = dict(to_hub(iter(state_of(model).items()), spec=spec))
    assert set(back) == set(weights.folder.names())
    assert all(torch.equal(back[key], weights.folder.tensor(key)) for key in back)
    tokens = torch.randint(0, spec.vocab_size, (3, 12), generator=torch.Generator().manual_seed(1))
    assert torch.allclose(model(tokens), theirs(tokens).logits, atol=5e-5, rtol=1e-5)


# ------------------------------------------------------------------ what is wrong is said
REFUSED = {
    "LayerNorm": (dict(norm="layernorm"), "model.norm: layernorm"),
    "learned positions": (dict(positions="learned", max_positions=8), "model.positions"),
    "GELU": (dict(ffn="gelu"), "model.ffn: gelu"),
    "capped scores without Gemma's norms": (dict(attention_softcap=3.0), "model.attention_softcap"),
    "sigmoid scores without latent attention": (dict(moe=MoeSpec(num_experts=4, top_k=2, ffn_dim=8, score="sigmoid")),
                                                "model.moe.score: sigmoid"),
    "latent attention and softmax scores": (dict(mla=MLA, moe=MoeSpec(num_experts=4, top_k=2, ffn_dim=8)),
                                            "model.moe.balance: loss"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_no_family_computes_is_refused(case, tmp_path):
    changes, message = REFUSED[case]
    assert any(message in problem for problem in hub_problems(dataclasses.replace(BASE, **changes)))
    assert hub_problems(BASE) == []


def test_missing_and_misshapen_tensors_are_named(tmp_path):
    write(tmp_path / "model.safetensors", {"lm_head.weight": torch.zeros(64, 31)})
    weights = HubWeights(tmp_path, spec=BASE)
    with pytest.raises(SafetensorsError, match=r"'lm_head.weight' has shape \[64, 31\], the model needs \[64, 32\]"):
        weights.slice("output.weight", (64, 32), sizes=(1, 1), offsets=(0, 0))
    with pytest.raises(SafetensorsError, match="holds no tensor 'model.norm.weight'"):
        weights.slice("norm.weight", (32,), sizes=(1,), offsets=(0,))


DAMAGE = {
    "no file": (lambda path: path.unlink(), "holds no .safetensors file"),
    "cut in its header": (lambda path: path.write_bytes(path.read_bytes()[:20]), "its header alone would take"),
    "cut in a tensor": (lambda path: path.write_bytes(path.read_bytes()[:-4]), "does not fit its bytes"),
    "not JSON": (lambda path: path.write_bytes((4).to_bytes(8, "little") + b"oops"), "header is not JSON"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_file_is_named(case, tmp_path):
    path = tmp_path / "model.safetensors"
    write(path, {"a": torch.zeros(8)})
    damage, message = DAMAGE[case]
    damage(path)
    with pytest.raises(SafetensorsError, match=message) as error:
        Folder(tmp_path)
    assert str(tmp_path) in str(error.value)
