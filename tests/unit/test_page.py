"""The page of a plan: what it shows is what the planner said, and nothing in a user's names can become markup."""
import base64
import dataclasses
import hashlib
import html
import json
import math
import re
from html.parser import HTMLParser

import pytest

from jobs.spec.counts import num_params
from jobs.spec.load import SpecError
from jobs.spec.model import MoeSpec
from jobs.spec.parallel import ParallelDims
from orchestrator.planner.cost import step_timeline
from orchestrator.load import load
from orchestrator.planner.page import page, write_page
from orchestrator.planner.page.batch import batch_choices
from orchestrator.planner.page.families import FAMILIES, family_of, wishes_of
from orchestrator.planner.page.markup import json_block, tag
from orchestrator.planner.page.mesh import mesh_data
from orchestrator.planner.page.pipeline import MAX_SPANS, timeline_data
from orchestrator.planner.page.scatter import (FITS, MAX_POINTS, RULED_OUT, TOO_BIG, pareto_front, priced_points,
                                               scatter_data)
from orchestrator.planner.page.whatif import crossovers, scaled, what_ifs
from orchestrator.planner.plan import GIB
from orchestrator.planner.question import divisors
from orchestrator.planner.reasons import EQUAL
from orchestrator.planner.words import seconds, size
from orchestrator.planner.space import every_layout
from orchestrator.submission.prepare import prepare
from tests.helpers.orc import training_run
from tests.helpers.pages import FEW, HOSTILE, asked, planned
from tests.helpers.planning import LLAMA3_8B, SMALL, cpu, h100, layout_of, plan_for, training

MAX_PAGE_BYTES = 1_500_000

# dims → its axes in use, each with what its groups span on nodes of 4
MESHES = [
    (ParallelDims(dp_shard=2, tp=2, pp=2),
     {"pp": "over 2 nodes", "dp_shard": "inside one node", "tp": "inside one node"}),
    (ParallelDims(dp_replicate=4, tp=2), {"dp_replicate": "over 2 nodes, 2 GPUs on each", "tp": "inside one node"}),
    (ParallelDims(dp_shard=4, cp=2, order=("dp_replicate", "dp_shard", "pp", "cp", "tp")),
     {"dp_shard": "over 2 nodes, 2 GPUs on each", "cp": "inside one node"}),
    (ParallelDims(dp_shard=8, ep=4), {"dp_shard": "over 2 nodes, 4 GPUs on each", "ep": "inside one node"}),
    (ParallelDims(), {}),
]
# best family at each of a, b, c, … → the answer in words
CROSSOVERS = [
    ([1, 1, 1], "ZeRO throughout"),
    ([0, 1, 1, 3], "a: DP alone · b–c: ZeRO · d: PP"),
    ([None, 2, None], "a: nothing fits · b: TP · c: nothing fits"),
    ([], ""),
]
FACTORS = [1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8]
# model, schedule, microbatches, pp
PIPELINES = [("1f1b", 8, 4), ("gpipe", 8, 2), ("zbv", 8, 2), ("1f1b", 3000, 4)]


@pytest.fixture(scope="module")
def small() -> tuple:
    one = asked(**FEW)
    plan = planned(one)
    return plan, one, page(plan, one, searching=True)


class Elements(HTMLParser):
    """Elements, attributes and the text of each element's name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.text: dict[str, str] = {}
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "input", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self.open:
            self.text[self.open[-1]] = self.text.get(self.open[-1], "") + data


def data_of(text: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])


def in_html(text: str) -> str:
    return html.escape(text, quote=False)


def test_the_page_needs_nothing_from_elsewhere(small) -> None:
    text = small[2]
    assert len(text.encode()) < MAX_PAGE_BYTES
    for tag, attributes in Elements(text).found:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base"), tag
        assert "src" not in attributes and not any(name.startswith("on") for name in attributes)
        assert attributes.get("href", "#").startswith("#")
    style = re.search(r"<style>(.*?)</style>", text, re.S)[1]
    assert "url(" not in style and "@import" not in style
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|import)\s*\(", text)


def test_only_the_page_s_own_script_may_run(small) -> None:
    text = small[2]
    script = re.search(r"<script>(.*?)</script>", text, re.S)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text and "default-src 'none'" in text
    assert "innerHTML" not in script and "eval(" not in script


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_cannot_become_markup(name) -> None:
    one = asked(dataclasses.replace(SMALL, name=name), dataclasses.replace(cpu(2), name=name), **FEW)
    text = page(planned(one), one, searching=False)
    elements = Elements(text)
    tags = [tag for tag, _ in elements.found]
    assert tags.count("script") == 2 and tags.count("style") == 1 and tags.count("title") == 1 and "img" not in tags
    assert elements.text["h1"].startswith(name) and elements.text["title"].startswith(name)
    assert data_of(text)["mesh"]["world_size"] == 8


@pytest.mark.parametrize("text", HOSTILE)
def test_attributes_and_data_hold_any_text(text) -> None:
    found = Elements(tag("p", text, title=text))
    assert found.found == [("p", {"title": text})] and found.text["p"] == text
    block = json_block("data", {"name": text})
    assert block.count("<") == 2 and block.count(">") == 2 and data_of(block) == {"name": text}


def test_the_headline_is_the_plan_s(small) -> None:
    plan, _, text = small
    predicted, job = plan.predicted, plan.job
    for part in (job.model, seconds(predicted.step_time_s), f"{predicted.tokens_per_s:,.0f}", f"{predicted.mfu:.1%}",
                 f"{predicted.mfu_convention} attention", size(predicted.memory_gib * GIB), plan.layout.schedule,
                 *(reason.reason for reason in plan.rejected)):
        assert in_html(part) in text, part


def test_every_transfer_and_stage_is_in_a_table(small) -> None:
    plan, _, text = small
    assert plan.communication and plan.memory
    for transfer in plan.communication:
        assert in_html(transfer.what) in text and size(transfer.payload_bytes) in text
    for stage in plan.memory:
        assert size(stage.total_bytes) in text and size(stage.activations_bytes) in text


@pytest.mark.parametrize("dims,spans", MESHES, ids=range(len(MESHES)))
def test_strides_give_every_rank_its_coordinate(dims, spans) -> None:
    data = mesh_data(layout_of(SMALL, dims=dataclasses.asdict(dims)), cluster=cpu(2), num_nodes=2)
    assert {axis["axis"]: axis["where"].partition(":")[0] for axis in data["axes"]} == spans
    for axis in data["axes"]:
        assert axis["degree"] * axis["groups"] == data["world_size"] == dims.world_size
        if axis["axis"] != "ep":
            for rank in range(dims.world_size):
                assert rank // axis["stride"] % axis["degree"] == dims.coordinate(rank)[axis["axis"]]


@pytest.mark.parametrize("schedule,m,pp", PIPELINES)
def test_the_timeline_is_the_planner_s(schedule, m, pp) -> None:
    stages = {"virtual_stages": 2, "layers_per_stage": (1,) * 4} if schedule == "zbv" else {}
    layout = dataclasses.replace(layout_of(SMALL, dims={"pp": pp}, num_microbatches=m, schedule=schedule), **stages)
    whole = step_timeline(SMALL, layout, training=training(global_batch_size=m), cluster=cpu(1, pp))
    data = timeline_data(whole)
    kept = sum(len(row["kinds"]) for row in data["rows"])
    assert kept <= MAX_SPANS + 2
    assert kept == 2 * m * pp or data["cut"] or schedule == "zbv"
    assert not data["cut"] or kept > 0.95 * MAX_SPANS
    for rank, row in enumerate(data["rows"]):
        work = [span for span in whole.ranks[rank] if span.kind != "bubble"]
        if data["cut"]:
            first, last = (edge * data["tick_s"] for edge in data["cut"])
            tick_s = data["tick_s"]
            work = [span for span in work if span.end_s <= first + tick_s or span.start_s >= last - tick_s]
        assert row["kinds"] == "".join(span.kind for span in work)
        assert row["microbatch"] == [span.microbatch for span in work] and row["stage"] == [span.stage for span in work]
        for name in ("start", "end"):
            exact = [getattr(span, f"{name}_s") for span in work]
            assert [tick * data["tick_s"] for tick in row[name]] == pytest.approx(exact, abs=data["tick_s"])
        assert row["idle"] == pytest.approx(whole.bubble_s(rank) / whole.total_s, abs=1e-4)
    assert (data["cut"] is not None) == (m == 3000)


def test_points_hold_the_plan_its_rivals_and_an_undominated_front(small) -> None:
    plan, one, _ = small
    priced = priced_points(plan, one, sample=True)
    assert len(priced) <= MAX_POINTS + 1 + len(plan.rejected) and len({p.layout for p in priced}) == len(priced)
    assert {plan.layout, *(loser.layout for loser in plan.rejected)} <= {p.layout for p in priced}
    assert {p.predicted.memory_limit_gib for p in priced} == {plan.predicted.memory_limit_gib}
    data = scatter_data(plan, priced)
    points = data["points"]
    assert points[data["winner"]][6] == "the plan" and points[data["winner"]][1] == pytest.approx(
        plan.predicted.step_time_s, rel=1e-3)
    slowest = plan.predicted.step_time_s * (1 - EQUAL)
    legal = [p.predicted for p in priced if p.fits and p.predicted.step_time_s >= slowest]
    assert sum(point[3] == FITS for point in points) == len(legal)
    fitting = [(p.step_time_s, p.memory_gib) for p in legal]
    front = [p.predicted for p in pareto_front(sorted((p for p in priced if p.predicted in legal), key=lambda p: (
        p.predicted.step_time_s, p.predicted.memory_gib)))]
    assert len(front) == len(data["front"]) > 0
    for mine in front:
        assert not any(s <= mine.step_time_s and g < mine.memory_gib or s < mine.step_time_s and g <= mine.memory_gib
                       for s, g in fitting)
    assert all(point[6] for point in points)
    assert all(point[3] != TOO_BIG or "too big by" in point[6] for point in points)
    assert all(point[3] != RULED_OUT or "the request fixes" in point[6] for point in points)


def test_a_large_space_is_sampled_the_same_way_twice() -> None:
    one = asked(LLAMA3_8B, h100(4), batch=64, seq_len=4096, zero_stage=3, recompute="full", schedule="1f1b")
    plan = planned(one)
    assert plan.candidates > 2 * MAX_POINTS
    first, second = (priced_points(plan, one, sample=True) for _ in range(2))
    assert first == second and MAX_POINTS // 2 < len(first) <= MAX_POINTS + 1 + len(plan.rejected)
    assert len({(p.layout.dims.tp, p.layout.dims.pp, p.layout.dims.cp) for p in first}) > 10


@pytest.mark.parametrize("moe", [None, MoeSpec(num_experts=4, top_k=2, ffn_dim=128)], ids=["dense", "moe"])
def test_every_layout_has_one_family_and_wishes_leave_exactly_it(moe) -> None:
    one = asked(dataclasses.replace(SMALL, moe=moe), **FEW)
    every = set(every_layout(one.question))
    degrees = divisors(one.question.world_size)[1:]
    split = [set(every_layout(one.wishing(**wishes_of(family, degrees=degrees)).question))
             for family in range(len(FAMILIES))]
    assert sum(map(len, split)) == len(every) and set.union(*split) == every
    assert all(family_of(layout) == family for family, layouts in enumerate(split) for layout in layouts)
    assert all(split)


def test_what_ifs_contain_the_plan_itself(small) -> None:
    plan, one, _ = small
    sweeps = what_ifs(one, plan)
    assert len(sweeps) == 6
    for sweep in sweeps:
        now, count = sweep["now"], len(sweep["labels"])
        assert count > 2 and len(set(sweep["labels"])) == count
        assert all(len(series) == count for series in sweep["series"])
        best = sweep["series"][sweep["best"][now]][now]
        assert best["step_time_s"] == pytest.approx(plan.predicted.step_time_s, rel=1e-3), sweep["question"]
        for entry in (entry for series in sweep["series"] for entry in series):
            assert entry.get("why") or entry["memory_gib"] > 0 < entry["tokens_per_s_per_gpu"]


def test_dp_alone_ends_where_the_model_no_longer_fits() -> None:
    """One GPU's memory bounds DP alone and not ZeRO: the sweep over model sizes shows where."""
    one = asked(cluster=cpu(2, memory_gib=0.1), **FEW)
    sizes = what_ifs(one, planned(one))[1]
    alone, sharded = sizes["series"][0], sizes["series"][1]
    possible = ["why" not in entry for entry in alone]
    assert possible[0] and not possible[-1] and possible == sorted(possible, reverse=True)
    assert "does not fit" in alone[-1]["why"]
    assert sum("why" not in entry for entry in sharded) > sum(possible)


@pytest.mark.parametrize("best,words", CROSSOVERS)
def test_crossovers_in_words(best, words) -> None:
    assert crossovers(list("abcdefgh")[:len(best)], best) == words


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("model", [SMALL, LLAMA3_8B], ids=lambda model: model.name)
def test_a_scaled_model_has_the_size_and_legal_heads(model, factor) -> None:
    found = scaled(model, factor)
    if found is None:
        assert model.num_layers * factor < 4
        return
    blocks, own = (num_params(m) - 2 * m.vocab_size * m.dim for m in (found, model))
    assert 0.7 < blocks / own / factor < 1.45
    assert found.num_heads % found.num_kv_heads == 0 and found.head_size == model.head_size
    assert found == model or factor != 1


def test_the_batch_is_spent_as_the_layout_says(small) -> None:
    plan, one, text = small
    layout, choices = plan.layout, batch_choices(plan, one, searching=True)
    found = [int(part.replace(",", "")) for part in re.findall(r'<span>([\d,]+)</span><b>', text)]
    assert found == [layout.slots, layout.dims.dp, layout.num_microbatches, layout.microbatch_size]
    assert found[0] == math.prod(found[1:])
    degrees = [p.layout.dims.dp for p in choices.by_dp]
    assert degrees == sorted(set(degrees)) and len(degrees) > 1 and all(p.fits for p in choices.by_dp)
    assert min(p.predicted.step_time_s for p in choices.by_dp) == pytest.approx(plan.predicted.step_time_s)
    alike = [one.price(other) for other in every_layout(one.without_wishes().in_detail_like(layout).question)]
    for best in choices.by_dp:
        dims = best.layout.dims
        rivals = [p for p in alike if p.fits and p.layout.dims.dp == dims.dp and p.layout.dims.dp_shard in (1, dims.dp)
                  and p.layout.dims.world_size == dims.world_size]
        assert best.predicted.step_time_s <= min(p.predicted.step_time_s for p in rivals) * (1 + 1e-9)
    sizes = [p.layout for p in choices.by_microbatch]
    assert layout in sizes and {one.dims for one in sizes} == {layout.dims}


def test_a_run_directory_gets_its_page(tmp_path) -> None:
    config = load(training_run(tmp_path, nodes=1, ranks=2))
    plan = plan_for(config.model, config.cluster, config.training)
    text = prepare(config, plan).plan_page.read_text(encoding="utf-8")
    assert seconds(plan.predicted.step_time_s) in text and data_of(text)["mesh"]["world_size"] == 2


def test_a_page_that_cannot_be_written_is_an_explained_refusal(tmp_path) -> None:
    config = load(training_run(tmp_path, nodes=1, ranks=2))
    plan = plan_for(config.model, config.cluster, config.training)
    with pytest.raises(SpecError, match="--html: .*no/such/page.html' cannot be written: .*; give a file in a folder"):
        write_page(tmp_path / "no" / "such" / "page.html", plan, config, searching=False)


def test_the_quick_page_asks_no_further_question(small) -> None:
    plan, one, _ = small
    text = page(plan, one, searching=False)
    data = data_of(text)
    assert data["what_if"] == [] and len(data["scatter"]["points"]) == 1 + len(plan.rejected)
    assert '<section id="whatif" hidden>' in text
