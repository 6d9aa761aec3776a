"""`orc validate`: what is read, what is refused and why, what a row says about software, statistics by hand."""
import csv
import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from jobs.spec.load import SpecError
from orchestrator.cli import app
from orchestrator.planner.constants import FITTED_GROUPS
from orchestrator.validation import validate
from orchestrator.validation.model import model_of
from orchestrator.validation.predict import Predicted
from orchestrator.validation.report import report_of
from orchestrator.validation.settle import USABLE_MEMORY, settle
from orchestrator.validation.setup import gpu_of, setup_of
from orchestrator.validation.show import show_report
from orchestrator.validation.table import Row
from tests.benchmarks import accuracy

# A GPT of 39.1 billion parameters on 512 A100, full recompute, published in Megatron-LM (arXiv:2104.04473, table 1):
# t=8, p=2, 138 TFLOP/s of hardware FLOPs per GPU.
MEGATRON = {"id": "a", "group": "g", "model": "gpt-39.1b", "layers": 48, "hidden": 8192, "heads": 64, "kv_heads": 64,
            "ffn": 32768, "vocab": 51200, "seq_len": 2048, "gpu": "A100-80GB", "peak": 312, "gpus_per_node": 8,
            "n_gpus": 512, "tp": 8, "pp": 2, "dp": 32, "mbs": 4, "gbs": 1536, "recompute": "full", "precision": "fp16",
            "status": "ok", "tflops_per_gpu": 138, "flop_kind": "hardware"}
LLAMA = {"id": "l", "group": "g", "model": "llama3-8b", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8,
         "ffn": 14336, "vocab": 128256, "seq_len": 8192, "params_b": 8.03, "gpu": "H100-80GB", "peak": 989,
         "gpus_per_node": 8, "n_gpus": 8, "tp": 1, "pp": 1, "dp": 8, "zero_stage": 3, "mbs": 1, "gbs": 8,
         "recompute": "full", "precision": "bf16+compile", "status": "ok"}

UNKNOWN = {"model": "somebody's", "seq_len": ""}  # how long its sequences are is not public

# Published by Megatron-LM and by NVIDIA: changes of MEGATRON or LLAMA → measured figure, error that is allowed
PUBLISHED = {
    "megatron 2021, 39.1b": (MEGATRON, {}, 0.06),
    "megatron 2021, 18.4b": (MEGATRON, {"layers": 40, "hidden": 6144, "heads": 48, "kv_heads": 48, "ffn": 24576,
                                        "n_gpus": 256, "pp": 1, "mbs": 8, "gbs": 1024, "tflops_per_gpu": 135}, 0.06),
    "korthikanti 2022, 22b": (MEGATRON, {"layers": 48, "hidden": 6144, "ffn": 24576, "n_gpus": 8, "pp": 1, "dp": 1,
                                         "mbs": 4, "gbs": 4, "recompute": "selective(core-attention)",
                                         "tflops_per_gpu": "", "step_time_s": 1.10}, 0.06),
    "megatron bridge, 8b in fp8": (LLAMA, {"zero_stage": "", "gbs": 128, "recompute": "", "precision": "FP8-CS",
                                           "tokens_per_s_per_gpu": 14451}, 0.08),
}

# changes of LLAMA → what the refusal must say
REFUSED = {
    "far too many layers": ({"layers": 10**12}, "layers=1000000000000 are more than 4096"),
    "no sizes": ({"layers": "", "heads": 0}, "sizes not stated: layers, heads"),
    "no sequence": ({"model": "somebody's", "seq_len": ""}, "sequence length not stated"),
    "no layout": ({"tp": ""}, "layout not stated: tp"),
    "no batch": ({"gbs": ""}, "global batch not stated"),
    "world": ({"dp": 4}, "tp·pp·cp·dp = 1·1·1·4 = 4 is not n_gpus=8"),
    "batch": ({"gbs": 12}, "gbs=12 is not a multiple of dp × mbs = 8 × 1"),
    "accumulation": ({"gbs": 16, "grad_accum": 5}, "contradicts gbs=16"),
    "experts": ({"model": "unheard-of", "moe": "True"}, "expert sizes of unheard-of are neither in the table"),
    "expert ranks": ({"ep": 3}, "ep=3 does not divide dp·cp·tp=8"),
    "gpu": ({"gpu": "TPUv5"}, "unknown GPU TPUv5"),
    "nodes": ({"n_gpus": 12, "dp": 12, "gbs": 12}, "n_gpus=12 are not whole nodes of 8"),
    "rounds": ({"n_gpus": 32, "pp": 4, "dp": 8, "vpp": 2, "gbs": 72}, "interleaving needs rounds of pp=4"),
    "stages": ({"n_gpus": 64, "pp": 8, "dp": 8, "vpp": 8, "gbs": 64}, "32 layers are fewer than 64 stages"),
}

# A Llama of 3.57 billion parameters on H100 nodes of eight, one replica split over tp: Hugging Face's nanotron,
# scripts/scaling_benchmarks.py. tp → microbatch, tokens/s/GPU
LLAMA_3B = {"id": "n", "group": "g", "layers": 28, "hidden": 3072, "heads": 32, "kv_heads": 32, "ffn": 8192,
            "vocab": 131072, "seq_len": 4096, "params_b": 3.57, "gpu": "H100-80GB", "peak": 989, "gpus_per_node": 8,
            "pp": 1, "dp": 1, "zero_stage": 0, "precision": "bf16", "status": "ok"}
TENSOR_PARALLEL = {2: (3, 14167), 4: (9, 13460), 8: (18, 10889), 16: (40, 6159), 32: (90, 3610)}
# from → to: share of the throughput that is lost; leaving the node costs 43%, and two thirds over four nodes
LOSSES = [(2, 4), (4, 8), (8, 16), (8, 32)]

# columns → facts of the software that follow
SOFTWARE = [
    (MEGATRON, {}, {"flash_attention": False, "overlaps_data_parallel": False, "matmul_dtype": "float16"}),
    (MEGATRON, {"gpu": "H100-80GB", "precision": "bf16"}, {"flash_attention": True, "overlaps_tensor_parallel": True}),
    (LLAMA, {}, {"fused_kernels": True, "keeps_half_weights": False, "matmul_dtype": "bfloat16"}),
    (LLAMA, {"precision": "bf16"}, {"fused_kernels": False}),
    (LLAMA, {"precision": "float8+compile+asynctp"}, {"matmul_dtype": "float8", "overlaps_tensor_parallel": True}),
    (LLAMA, {"precision": "NVFP4", "zero_stage": ""}, {"matmul_dtype": "float4", "keeps_half_weights": True}),
]

GPUS = [("A100", None, "a100-80gb"), ("A100", 40, "a100-40gb"), ("A100-40GB", 40, "a100-40gb"),
        ("H100-80GB", 80, "h100"), ("H100-96GB-HBM2e-500W", 96, "h100-96gb"), ("GB200-186GB", 186, "gb200"),
        ("B300-288GB", 288, "b300"), ("MI300X-192GB", 192, "mi300x"), ("H200", None, "h200")]


def table(path: Path, *rows: dict) -> Path:
    columns = sorted({name for row in rows for name in row})
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    return path


def one(tmp_path: Path, row: dict, **changes) -> Predicted:
    return validate(table(tmp_path / "t.csv", row | changes)).rows[0]


def row_of(base: dict, changes: dict) -> Row:
    return Row(**{name: value for name, value in (base | changes).items() if value != ""})


@pytest.mark.parametrize("case", PUBLISHED)
def test_published_runs_are_met(tmp_path, case):
    base, changes, allowed = PUBLISHED[case]
    found = one(tmp_path, base, **changes)
    assert found.refused is None and found.ape < allowed, (found.predicted_step_time_s, found.measured_step_time_s)


@pytest.mark.parametrize("case", REFUSED)
def test_rows_that_cannot_be_priced_say_why(tmp_path, case):
    changes, reason = REFUSED[case]
    found = one(tmp_path, LLAMA, **changes)
    assert reason in found.refused and found.predicted_step_time_s is None and found.fits is None


@pytest.mark.parametrize("base,changes,facts", SOFTWARE)
def test_software_follows_from_columns(base, changes, facts):
    row = row_of(base, changes)
    software = setup_of(row, model=model_of(row, gated_table=False)).software
    assert {name: getattr(software, name) for name in facts} == facts


@pytest.mark.parametrize("name,memory,gpu", GPUS)
def test_gpus_are_recognised(name, memory, gpu):
    assert gpu_of(name, memory_gb=memory) == gpu


def test_names_enter_no_prediction(tmp_path):
    rows = [MEGATRON | {"id": "x"}, MEGATRON | {"id": "y", "model": "another", "group": "elsewhere", "source": "them"}]
    first, second = validate(table(tmp_path / "t.csv", *rows)).rows
    assert first.predicted_step_time_s == second.predicted_step_time_s


def test_tensor_parallel_loses_what_was_measured_in_a_node_and_beyond(tmp_path):
    rows = [LLAMA_3B | {"tp": tp, "n_gpus": tp, "mbs": size, "gbs": size, "tokens_per_s_per_gpu": measured}
            for tp, (size, measured) in TENSOR_PARALLEL.items()]
    found = validate(table(tmp_path / "t.csv", *rows)).rows
    speed = {one.row.tp: one.row.mbs * 4096 / one.row.tp / one.predicted_step_time_s for one in found}
    for before, after in LOSSES:
        measured = 1 - TENSOR_PARALLEL[after][1] / TENSOR_PARALLEL[before][1]
        assert 1 - speed[after] / speed[before] == pytest.approx(measured, abs=0.1), (before, after)


def test_predictions_stand_beside_a_fitted_rooflines(tmp_path, capsys):
    """The benchmark's own path; it runs on the table of published runs, which does not come with orc."""
    fitted = {"group": FITTED_GROUPS[1]}
    path = table(tmp_path / "t.csv", MEGATRON | fitted, MEGATRON | fitted | {"mbs": 2, "tflops_per_gpu": 135}, LLAMA |
                 {"tokens_per_s_per_gpu": 6000})
    accuracy.main(path)
    shown = capsys.readouterr().out
    assert f"{FITTED_GROUPS[1]:28s} fit    2" in shown and "not fitted, dense" in shown
    # of both rows that were fitted, by four constants
    theirs = next(line for line in shown.splitlines() if line.startswith("fitted, dense")).split()[-1]
    assert float(theirs.rstrip("%")) < 5


# what a row states → seconds of a step of 8 · 8192 tokens on 8 GPUs
MEASURED = [({"step_time_s": 2.5}, 2.5), ({"tokens_per_s_per_gpu": 4096}, 2.0),
            ({"step_time_s": 2.5, "status": "OOM"}, None), ({}, None)]


@pytest.mark.parametrize("states,seconds", MEASURED)
def test_what_was_measured(tmp_path, states, seconds):
    assert one(tmp_path, LLAMA, **states).measured_step_time_s == seconds


def test_utilisation_and_tflops_agree_with_tokens_under_their_convention(tmp_path):
    """14,451 tokens/s/GPU were printed as 744 TFLOP/s with causal attention, 13,812 as 800 with full attention."""
    for tokens, tflops, convention in ((14451, 744, "causal-half 6N+6LHQT"), (13812, 800, "full-attention 6N+12LHQT")):
        by_tokens = one(tmp_path, LLAMA, tokens_per_s_per_gpu=tokens)
        by_tflops = one(tmp_path, LLAMA, tflops_per_gpu=tflops, convention=convention)
        by_mfu = one(tmp_path, LLAMA, mfu_pct=100 * tflops / 989, convention=convention)
        assert by_tflops.measured_step_time_s == pytest.approx(by_tokens.measured_step_time_s, rel=0.01)
        assert by_mfu.measured_step_time_s == pytest.approx(by_tflops.measured_step_time_s)


def test_blank_recompute_is_the_least_with_which_all_rows_of_the_job_fit(tmp_path):
    rows = [MEGATRON | {"id": f"m{size}", "mbs": size, "recompute": "", "step_time_s": 10, "gpu": "A100-80GB"}
            for size in (1, 16)]
    alone = validate(table(tmp_path / "a.csv", rows[0])).rows[0]
    together = validate(table(tmp_path / "t.csv", *rows)).rows[0]
    assert together.predicted_memory_gib < alone.predicted_memory_gib
    assert together.predicted_step_time_s > alone.predicted_step_time_s


# changes of LLAMA, with which nothing fits as it is → what of it stays as it was stated
TIGHT = [{"recompute": "", "mbs": 3, "gbs": 24}, {"recompute": "selective(op)", "mbs": 3, "gbs": 24}]


@pytest.mark.parametrize("changes", TIGHT)
def test_as_many_layers_are_recomputed_as_memory_asks_for(tmp_path, changes):
    """Between a microbatch that fits without, and recomputing everything."""
    path = table(tmp_path / "t.csv", LLAMA | changes, LLAMA | changes | {"recompute": "full"},
                 LLAMA | changes | {"gpu": "H200"})
    some, all_layers, none = validate(path).rows
    assert all_layers.predicted_memory_gib < some.predicted_memory_gib == pytest.approx(USABLE_MEMORY * 80)
    assert none.predicted_memory_gib > 80 and some.fits == (changes["recompute"] == "")
    assert none.predicted_step_time_s < some.predicted_step_time_s < all_layers.predicted_step_time_s


def test_torch_pipelines_have_as_many_microbatches_as_stages(tmp_path):
    row = row_of(LLAMA, {"pp": 4, "n_gpus": 32, "mbs": "", "gbs": 128, "zero_stage": 3})
    layout = settle((row,))[0][1].layout
    assert (layout.microbatch_size, layout.num_microbatches) == (4, 4)


def fake(name: str, predicted: float, measured: float, **rest) -> Predicted:
    return Predicted(row=Row(id=name, group="g", status=rest.pop("status", "ok"), memory_gb=rest.pop("memory", None)),
                     job=("job",), predicted_step_time_s=predicted, measured_step_time_s=measured,
                     **{"fits": True, "predicted_memory_gib": 1.0} | rest)


def test_statistics_by_hand():
    """Pairs: (a,b) agree, (a,c) agree, (b,c) disagree → τ = (2 − 1)/3. The pick is a, the best measured too."""
    report = report_of((fake("a", 1.0, 1.0), fake("b", 3.0, 2.0), fake("c", 2.0, 4.0)))
    group = report.groups[0]
    assert group.mape == pytest.approx((0 + 0.5 + 0.5) / 3) and group.max_ape == 0.5 and group.worst == "b"
    assert group.tau == pytest.approx(1 / 3) and group.regret == 1.0
    report = report_of((fake("a", 3.0, 1.0), fake("b", 1.0, 1.1), fake("c", 2.0, 4.0)))
    assert report.groups[0].regret == pytest.approx(1.1)


def test_fewer_than_three_comparable_rows_have_no_order():
    group = report_of((fake("a", 1.0, 1.0), fake("b", 2.0, 2.0))).groups[0]
    assert group.tau is None and group.regret is None and group.mape == 0.0


def test_fits_are_counted_and_failures_named():
    fits = report_of((fake("ran", 1, 1), fake("ran big", 1, 1, fits=False),
                      fake("oom", 1, 1, status="OOM (fragmentation)"),
                      fake("oom big", 1, 1, status="OOM", fits=False))).fits
    assert (fits.precision, fits.recall) == (0.5, 0.5)
    assert fits.failed_but_fits == ("oom: OOM (fragmentation)",) and fits.failed_and_refused == 1


def test_json_has_the_published_form(tmp_path):
    path = table(tmp_path / "t.csv", MEGATRON, LLAMA | UNKNOWN, LLAMA | {"memory_gb": 70})
    done = CliRunner().invoke(app, ["validate", str(path), "--json"])
    assert done.exit_code == 0, done.output
    data = json.loads(done.output)
    assert data["groups"][0].keys() >= {"group", "rows", "refused", "mape", "max_ape", "tau", "regret", "fitted"}
    assert data["groups"][0]["rows"] == 3 and data["groups"][0]["refused"] == 1 and data["groups"][0]["fitted"] is False
    for row in data["rows"]:
        assert row.keys() == {"id", "predicted_step_time_s", "measured_step_time_s", "predicted_memory_gib",
                              "measured_memory_gb", "fits", "refused"}
    assert data["rows"][1]["refused"] == "sequence length not stated" and data["rows"][2]["measured_memory_gb"] == 70


def test_the_report_reads_well(tmp_path):
    path = table(tmp_path / "t.csv", MEGATRON, LLAMA | UNKNOWN)
    done = CliRunner().invoke(app, ["validate", str(path)])
    assert done.exit_code == 0
    for word in ("MAPE", "regret", "not fitted, dense: 1 rows", "1 refused: sequence length not stated", "precision"):
        assert word in done.output


def test_any_column_groups(tmp_path):
    rows = [MEGATRON | {"id": "a", "source": "x"}, MEGATRON | {"id": "b", "source": "y"}]
    report = validate(table(tmp_path / "t.csv", *rows), group_by="source")
    assert [group.group for group in report.groups] == ["x", "y"]


# file → what the error must say
UNREADABLE = {"": "no such column", "\x00,\udcff": "cannot be read",
              "id,gpu,n_gpus,group\nx,H100,inf,g\n": "n_gpus: 'inf'",
              "id,gpu,n_gpus,group,heads\nx,H100,8,g,-1\n": "heads: '-1' is below 0",
              "id,gpu,n_gpus,group,step_time_s\nx,H100,8,g,nan\n": "step_time_s: 'nan' is not a number",
              "id,gpu,n_gpus,group,layers\nx,H100,8,g,many\n": "layers: 'many' is not a number",
              "id,gpu,n_gpus,group,layers\nx,H100,8,g,1.5\n": "layers: '1.5' is not a number"}


@pytest.mark.parametrize("content", UNREADABLE)
def test_what_is_no_table_is_refused(tmp_path, content):
    path = tmp_path / "t.csv"
    path.write_text(content, errors="surrogateescape")
    with pytest.raises(SpecError, match=UNREADABLE[content]):
        validate(path)
    with pytest.raises(SpecError, match="does not exist"):
        validate(tmp_path / "none.csv")
    with pytest.raises(SpecError, match="is no file"):
        validate(tmp_path)


def test_brackets_in_the_table_are_shown_and_are_no_markup(tmp_path):
    report = validate(table(tmp_path / "t.csv", MEGATRON | {"id": "[b]-1", "group": "[red]"}))
    screen = io.StringIO()
    show_report(report, Console(file=screen, width=200))
    assert "[red]" in screen.getvalue() and "[b]-1" in screen.getvalue()


def test_fitted_groups_are_named_once():
    assert len(set(FITTED_GROUPS)) == len(FITTED_GROUPS) > 0
