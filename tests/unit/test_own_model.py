"""Own models: what is wrong with their code or plan table is said with value, origin and remedy; what is measured of
them is what they do."""
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from jobs.own.build import OwnModelError, build, load_entrypoint
from jobs.own.chain import read
from jobs.own.measure import measure
from jobs.parallel.fill import allocated
from jobs.spec.load import SpecError
from jobs.spec.own_model import OwnModel
from orchestrator.config import to_yaml
from orchestrator.load import load, load_traced, read_stored
from orchestrator.planning import make_plan
from orchestrator.planning_own import ask
from tests.helpers import own_models
from tests.helpers.fake import in_child
from tests.helpers.orc import ROOT, orc

VOCAB, SEQ = 16, 8
MODELS = "tests.helpers.own_models"
MIXER = OwnModel(entrypoint="configs.examples.mixer:build", vocab_size=32,
                 arguments={"dim": 32, "depth": 3, "head_dim": 8, "width": 3})


def own(function: str, /, **arguments) -> OwnModel:
    entrypoint = function if ":" in function or "." in function else f"{MODELS}:{function}"
    return OwnModel(entrypoint=entrypoint, vocab_size=VOCAB, arguments=arguments)


# what is wrong → (entry point, its arguments, parts of the message)
REFUSED = {
    "no function": ("no_function", {}, ["model.entrypoint", "has no 'no_function'", "plain"]),
    "no module": ("nosuch.module:build", {}, ["no module 'nosuch'", "`workdir`"]),
    "no colon": ("tests.helpers.own_models", {}, ["is not package.module:function"]),
    "not a function": (f"{MODELS}:DIM", {}, ["is a int, not a function"]),
    "an exception inside": ("raising", {}, ["raised KeyError: 'dim'", "own_models.py:", "in raising"]),
    "an exit inside": ("leaving", {}, ["raised SystemExit: 0", "in leaving"]),
    "a message of two lines": ("raising_lines", {}, ["raised ValueError: one two: three (", "in raising_lines"]),
    "blocks that are none": ("plain", {"blocks": 5}, ["blocks is 5; give a pattern"]),
    "styles that are none": ("plain", {"styles": ["head"]}, ["styles is ['head']; give a dict"]),
    "an unknown argument": ("returning", {"depht": 3}, ["raised TypeError", "depht"]),
    "no table": ("returning", {}, ["returned Small", "(nn.Module, plan table)"]),
    "a weight of two blocks": ("altered", {"what": "tied"}, ["blocks.1.up.weight and blocks.0.up.weight are one"]),
    "dropout of channels": ("altered", {"what": "dropout"}, ["blocks.0.drop is a Dropout1d", "nn.Dropout"]),
    "random numbers of no module": ("kind", {"name": "noisy"}, ["draws random numbers, aten::", "own_models.py:"]),
    "blocks that are never called": ("kind", {"name": "opened"}, ["uses blocks.0.norm.weight at ", "own_models.py:"]),
    "a block's weight elsewhere": ("kind", {"name": "borrowed"}, [
        "uses blocks.1.up.weight at ", "in forward while that block is not called"]),
    "dropout of what is no token": ("kind", {"name": "misplaced"}, [f"drop: dropout of [1, {VOCAB}, {SEQ}]"]),
    "batch norm": ("altered", {"what": "batch norm"}, ["blocks.0.bn is a batch norm"]),
    "a frozen weight": ("altered", {"what": "frozen"}, ["head.weight is not trained", "make it a buffer"]),
    "a plain tensor": ("altered", {"what": "tensor"}, ["Small.table is a tensor", "register_buffer"]),
    "a scalar": ("altered", {"what": "scalar"}, ["head.gain is a scalar", "nn.Parameter(torch.ones(1))"]),
    "a scalar in every block": ("altered", {"what": "scalars"}, [
        "blocks.0.gain is a scalar, which cannot be cut over ranks; give it one dimension, as "
        "nn.Parameter(torch.ones(1)) has (and 1 more like it)"]),
    "no elements": ("altered", {"what": "empty"}, ["head.extra has no elements, [0, 3]; leave it out"]),
    "a running mean by hand": ("running", {"once": False}, ["forward writes to buffer mean", "in no checkpoint"]),
    "two parameters of one memory": ("altered", {"what": "one memory"},
                                     ["head.weight and embedding.weight are two parameters of one memory"]),
    "a generator that nobody seeds": ("altered", {"what": "its own generator"},
                                      ["makes other weights each time", "np.random.default_rng"]),
    "a generator seeded by the clock": ("altered", {"what": "a generator of the time"},
                                        ["makes other weights each time", "torch.Generator"]),
    "numbers of the clock": ("altered", {"what": "the clock"}, ["makes other weights each time"]),
    "a lazy module": ("altered", {"what": "lazy"}, ["head.weight has no shape yet"]),
    "a copy that is written to": ("altered", {"what": "a copy written to"}, ["read-only", "own_models.py:"]),
    "an unknown key": ("plain", {"block": "x"}, ["unknown key 'block'", "blocks and styles"]),
    "blocks of nothing": ("plain", {"blocks": "layers.*"}, ["'layers.*' (blocks) matches no module", "blocks.0"]),
    "blocks in blocks": ("plain", {"blocks": ["blocks.*", "blocks.*.norm"]},
                         ["'blocks.0.norm' lies in block 'blocks.0'"]),
    "no such style": ("restyled", {"styles": {"head": "colum"}}, ["'head': 'colum' is no style", "column, row"]),
    "a pattern of nothing": ("restyled", {"styles": {"blocks.*.upp": "row"}},
                             ["'blocks.*.upp' (row) matches no module", "did you mean 'blocks.0.up'"]),
    "two patterns": ("restyled", {"styles": {"blocks.0.up": "row"}},
                     ["'blocks.0.up' is matched by 'blocks.*.up' (column) and by 'blocks.0.up' (row); leave one"]),
    "a style of others": ("restyled", {"styles": {"blocks.*.norm": "column"}},
                          ["'blocks.0.norm' is a LayerNorm; column is for linear layers (and 1 more like it)"]),
    "two heads": ("restyled", {"styles": {"blocks.*.up": "head"}}, ["head is the style of more than one module"]),
    "silence in a split": ("restyled", {"styles": {"blocks.*": "split", "blocks.*.norm": None}},
                           ["'blocks.0.norm' lies in the split 'blocks.0' and has no style"]),
    "no logits": ("kind", {"name": "hidden"}, [f"gave [1, {SEQ}, 8], not logits [1, {SEQ}, model.vocab_size={VOCAB}]"]),
    "enters and never leaves": ("restyled", {"styles": {"blocks.*.down": None}},
                                 ["blocks.0, split over tp=2, raised RuntimeError: mat1 and mat2"]),
}


@pytest.mark.parametrize("name, arguments, parts", REFUSED.values(), ids=REFUSED)
def test_what_is_wrong_is_said_with_its_remedy(name: str, arguments: dict, parts: list[str]) -> None:
    with pytest.raises(OwnModelError) as refused:
        in_child(measure, own(name, **arguments), seq_len=SEQ, degrees=(1, 2))
    assert all(part in str(refused.value) for part in parts), str(refused.value)


# model → why it cannot be cut into stages; None: it can
CHAINS = {
    "plain": (own("plain"), None),
    "mixer": (MIXER, None),
    "something between": (own("kind", name="scaled"), "blocks.0 gets something else than embedding's output"),
    "a cache that the first forward fills": (own("running", once=True), None),
    "another order": (own("kind", name="backwards"), "not called in the order of the model"),
    "twice": (own("kind", name="looped"), "is called more than once"),
    "a part and the whole": (own("kind", name="nested"), "tail.0 is called by itself, and is a part of tail"),
    "a weight lent": (own("kind", name="peeking"), "head.weight is used while its module is not called, at "),
}


@pytest.mark.parametrize("spec, broken", CHAINS.values(), ids=CHAINS)
def test_whether_a_model_can_be_cut_is_seen_in_its_forward(spec: OwnModel, broken: str | None) -> None:
    found = read(spec, seq_len=SEQ).chain.broken
    assert found is None if broken is None else broken in found


def test_flops_and_parameters_are_counted() -> None:
    found = in_child(measure, own("plain"), seq_len=SEQ, degrees=(1, 2, 3, 5))
    one, two, two_sp, *_ = found.measured
    linear = 2 * (2 * 8 * 12) + 8 * VOCAB  # multiplications of one token: up and down of both blocks, head
    assert found.flops_per_token == 3 * 2 * linear
    assert found.num_params == VOCAB * 8 + 2 * (16 + 8 * 12 + 12 + 12 * 8 + 8) + 8 * VOCAB + VOCAB
    assert sum(p.params for p in (one.before, *one.blocks, one.behind)) == found.num_params
    assert (two.tp, two_sp.sequence_parallel) == (2, True)
    assert two.blocks[0].params == 16 + 48 + 6 + 48 + 8 and two.blocks[0].flops == one.blocks[0].flops / 2
    # x enters in front of up and leaves behind down: all tokens, whole
    assert (two.blocks[0].entered, two.blocks[0].left, two.blocks[0].entries, two.blocks[0].exits) == (64, 64, 1, 1)
    assert {m.tp for m in found.measured} == {1, 2} and set(found.no_tp) == {3, 5}


def test_weights_made_one_by_one_are_those_that_the_code_makes_of_the_same_draws() -> None:
    with own_models.SeededDraws(5), torch.random.fork_rng():
        wanted = own_models.Initial()
    model, _, recipe = build(own("initial"), seq_len=SEQ, seed=5)
    named = dict([*wanted.named_parameters(), *wanted.named_buffers()])
    held = [*model.parameters(), *model.buffers()]
    assert all(tensor.is_meta and tensor.is_contiguous() for tensor in held) and len(named) == 17
    for name in reversed(named):  # in whatever order they are asked for
        assert torch.equal(recipe.value(name), named[name]), name
    assert not torch.equal(build(own("initial"), seq_len=SEQ, seed=6)[2].value("mixed"), named["mixed"])


def test_generators_of_one_seed_make_the_same_weights() -> None:
    value = build(own("drawing"), seq_len=SEQ, seed=5)[2].value
    assert torch.equal(value("blocks.0.up.weight"), value("blocks.1.up.weight"))
    assert torch.equal(value("blocks.0.down.weight"), value("blocks.1.down.weight"))
    assert not torch.equal(value("blocks.0.up.weight"), value("blocks.0.down.weight").T)


def test_a_constructor_that_gives_the_same_each_time_is_measured() -> None:
    assert in_child(measure, own("bare"), seq_len=SEQ, degrees=(1, 2)).no_pp is None


def test_numpy_and_random_are_seeded_for_the_users_code_and_put_back() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    first, again, other = (build(own("bare"), seq_len=SEQ, seed=seed)[2] for seed in (5, 5, 6))
    for name in ("blocks.0.out.weight", "blocks.3.out.bias", "blocks.0.gain"):
        assert torch.equal(first.value(name), again.value(name)), name
        assert not torch.equal(first.value(name), other.value(name)), name
    assert torch.equal(first.value("blocks.0.unset"), torch.zeros(8))  # not what lay in memory
    assert before[:2] == (random.getstate(), np.random.get_state()[1].tolist())
    assert torch.equal(before[2], torch.get_rng_state())


def test_a_parameter_of_two_modules_is_cut_in_one_way_or_not_at_all() -> None:
    found = in_child(measure, own("tied_otherwise"), seq_len=SEQ, degrees=(1, 2))
    assert "cuts head.weight and embedding.weight, one parameter, in two ways (head and None)" in found.no_tp[2]
    one, two, *_ = in_child(measure, own("tied"), seq_len=SEQ, degrees=(1, 2)).measured
    assert (one.tied, two.tied) == (VOCAB * 16, VOCAB * 8)
    assert (one.before.params, one.behind.params) == (SEQ * 16, VOCAB * 16 + 2 * 16)  # the matrix counts once, behind


def test_rows_of_a_fused_weight_in_another_order_are_refused() -> None:
    with pytest.raises(OwnModelError, match=r"blocks\.0, split over tp=2, computes something else than whole: .*%; "):
        in_child(measure, own("fused", by_head=False), seq_len=SEQ, degrees=(1, 2))
    assert in_child(measure, own("fused", by_head=False), seq_len=SEQ, degrees=(1,)).num_blocks == 2
    right = in_child(measure, own("fused", by_head=True), seq_len=SEQ, degrees=(1, 2))
    assert right.no_sequence_parallel is None and not right.no_tp


def test_blocks_of_several_widths_are_checked_and_can_be_split() -> None:
    found = in_child(measure, own("widening"), seq_len=SEQ, degrees=(1, 2))
    assert not found.no_tp and "different shapes" in found.no_pp


def test_memory_is_taken_in_the_usual_order() -> None:
    transposed = torch.empty(2, 3, device="meta").t()
    taken = allocated(transposed, device=torch.device("cpu"), param_dtype=torch.float32)
    assert taken.is_contiguous() and taken.shape == (3, 2)


def test_tokens_mixed_between_splits_rule_out_sequence_parallelism() -> None:
    found = in_child(measure, own("fused", by_head=True, shifts=True), seq_len=SEQ, degrees=(1, 2))
    assert "blocks.0, split over tp=2, computes something else than whole" in found.no_sequence_parallel
    assert [(m.tp, m.sequence_parallel) for m in found.measured] == [(1, False), (2, False)]


def test_bytes_kept_for_the_backward_are_those_of_a_real_forward() -> None:
    saved = in_child(measure, MIXER, seq_len=SEQ, degrees=(1,)).measured[0]
    model, _ = load_entrypoint(MIXER.entrypoint)(vocab_size=MIXER.vocab_size, seq_len=SEQ, **MIXER.arguments)
    held = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if (where := tensor.untyped_storage().data_ptr()) not in held:
            kept[where] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        logits = model(torch.zeros(1, SEQ, dtype=torch.int64))
    real = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert logits.requires_grad
    assert 4 * sum(p.saved for p in (saved.before, *saved.blocks, saved.behind)) == pytest.approx(real, rel=0.05)


RUN = {"run": "mixer", "model": {"entrypoint": "configs.examples.mixer:build", "vocab_size": 256, "name": "mixer",
                                 "arguments": {"dim": 32, "depth": 4, "head_dim": 8}},
       "cluster": {"name": "desk", "kind": "local", "num_nodes": 2, "gpus_per_node": 2, "gpu": "cpu"},
       "data": {"path": str(ROOT / "orchestrator")}, "training": {"steps": 3, "seq_len": 16, "global_batch_size": 8},
       "workdir": str(ROOT)}


def run_file(folder: Path, **changes) -> Path:
    path = folder / "run.yaml"
    path.write_text(json.dumps(RUN | changes))
    return path


def test_a_run_with_an_own_model_is_stored_and_read_back(tmp_path: Path) -> None:
    config = load(run_file(tmp_path), ["model.arguments.dim=64"])
    assert config.model.arguments == {"dim": 64, "depth": 4, "head_dim": 8} and config.workdir == str(ROOT)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert read_stored(tmp_path / "config.yaml") == config


# what is wrong → (changes of the run file, parts of the message)
CONFIGS = {
    "unknown key": ({"model": RUN["model"] | {"vocab": 3}}, ["model.vocab", "did you mean 'vocab_size'?"]),
    "no vocabulary": ({"model": {"entrypoint": "a.b:c"}}, ["model.vocab_size: is missing"]),
    "no colon": ({"model": RUN["model"] | {"entrypoint": "a.b.c"}}, ["model.entrypoint: 'a.b.c' is not package"]),
    "no workdir": ({"workdir": "/no/such/place"}, ["workdir: '/no/such/place' is no directory"]),
    "weights": ({"training": RUN["training"] | {"initial_weights": str(ROOT)}},
                ["training.initial_weights", "`build`"]),
    "two trainers": ({"command": ["sh"], "entrypoint": "a:b"}, ["entrypoint: 'a:b' and `command:` are two trainers"]),
    "arguments of none": ({"arguments": ["--x"]}, ["arguments", "`entrypoint:`'s"]),
}


@pytest.mark.parametrize("changes, parts", CONFIGS.values(), ids=CONFIGS)
def test_a_wrong_config_is_refused(tmp_path: Path, changes: dict, parts: list[str]) -> None:
    with pytest.raises(SpecError) as refused:
        load(run_file(tmp_path, **changes))
    assert all(part in str(refused.value) for part in parts), str(refused.value)


# wishes → what the plan has, or parts of the refusal
PLANS = {
    "free": ({}, None),
    "everything at once": ({"tp": 2, "pp": 2, "recompute": "full", "zero_stage": 3}, None),
    "interleaved": ({"pp": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2}, None),
    "cp": ({"cp": 2}, ["parallel.cp: 2 needs a seam"]),
    "tp that does not divide": ({"tp": 3}, ["parallel.tp: 3 does not divide dimension 0 of", "these can be: 1"]),
    "more stages than blocks": ({"pp": 4, "virtual_stages": 2, "schedule": "interleaved_1f1b"}, ["parallel"]),
}


@pytest.mark.parametrize("wishes, refused", PLANS.values(), ids=PLANS)
def test_plan_keeps_to_what_is_asked_and_possible(tmp_path: Path, wishes: dict, refused: list[str] | None) -> None:
    loaded = load_traced(run_file(tmp_path, parallel=wishes))
    if refused is not None:
        with pytest.raises(SpecError) as error:
            make_plan(loaded, trainable=True)
        assert all(part in str(error.value) for part in refused), str(error.value)
        return
    made = make_plan(loaded, trainable=True)
    dims = made.layout.dims
    assert dims.world_size == 4 and sum(made.layout.layers_per_stage) == 4
    for name, value in wishes.items():
        assert getattr(dims, name, None) == value or getattr(made.layout, name, None) == value
    parts = made.predicted
    assert parts.compute_s + parts.exposed_communication_s + parts.bubble_s + parts.optimizer_s == \
        pytest.approx(parts.step_time_s)


def test_a_broken_model_is_refused_before_anything_is_left_behind(tmp_path: Path) -> None:
    path = run_file(tmp_path, root=str(tmp_path / "runs"), model=RUN["model"] | {"entrypoint": f"{MODELS}:raising"})
    done = orc("run", path)
    assert done.returncode == 2 and "Traceback" not in done.stderr and not (tmp_path / "runs").exists()
    assert "model.entrypoint" in done.stderr


# what a child of the orchestrator does → what is heard of it
CHILDREN = {
    "answers, and the user's code prints behind it": ("print('{\"a\": 1}'); print('bye'); print('[2]')", {"a": 1}),
    "prints what is no UTF-8": ("import os; os.write(1, bytes([255, 10])); print('{}')", {}),
    "ends without a word": ("import os; os._exit(0)", "it ended with code 0 and no answer"),
    "raises": ("raise KeyError('dim')", "KeyError: 'dim'"),
}


@pytest.mark.parametrize("case", CHILDREN)
def test_whatever_a_child_does_is_an_answer_or_one_line(case: str, tmp_path: Path, monkeypatch) -> None:
    code, heard = CHILDREN[case]
    (tmp_path / "a_child.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert ask("a_child") == heard


def test_the_orchestrator_does_not_import_the_users_code() -> None:
    check = ("import sys; from orchestrator.load import load_traced; from orchestrator.planning import make_plan; "
             "make_plan(load_traced(__import__('pathlib').Path('configs/runs/own_model.yaml')), trainable=True); "
             "print([m for m in sys.modules if m.startswith(('torch', 'configs.examples'))])")
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
