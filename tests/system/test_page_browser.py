"""The page in a real browser: charts are drawn, answer to pointer and keyboard, fit a phone, and run nothing of a
user's. Needs Debian's `chromium`."""
import dataclasses
import time
from pathlib import Path

import pytest

from orchestrator.planner.page import page
from tests.helpers.browser import Browser, find_chromium
from tests.helpers.pages import FEW, HOSTILE, asked, planned
from tests.helpers.planning import LLAMA3_8B, SMALL, cpu, h100

CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not here and could not be installed with apt-get")

LAPTOP, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844, "phone": True}
VIEWS = [("laptop", LAPTOP), ("dark", LAPTOP | {"dark": True}), ("phone", PHONE),
         ("phone dark", PHONE | {"dark": True})]
# page → question, what is fixed, with what-ifs
PAGES = {
    "pipeline": (asked(**FEW | {"tp": 2, "pp": 2, "dp_shard": 2, "dp_replicate": 1}), True),
    "chunks": (asked(schedule="zbv", pp=2, zero_stage=2, layers_per_unit=1, recompute="none"), False),
    "single rank": (asked(cluster=cpu(1, 1), **FEW), True),
    "many nodes": (asked(LLAMA3_8B, h100(2048), batch=16384, seq_len=8192, tp=8, pp=8, cp=1, dp_replicate=16,
                         schedule="1f1b", zero_stage=2, recompute="selective", microbatch_size=1, layers_per_unit=1,
                         mesh_order=["dp_replicate", "pp", "dp_shard", "cp", "tp"]), False),
    "hostile": (asked(dataclasses.replace(SMALL, name=" ".join(HOSTILE)), **FEW), False),
}
# JavaScript: labels of charts that lie over each other, as pairs of texts
OVERLAPS = """[...document.querySelectorAll('svg')].flatMap(svg => {
  const boxes = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
  return boxes.flatMap(([a, p], i) => boxes.slice(i + 1).filter(([b, q]) =>
    p.left < q.right - 1 && q.left < p.right - 1 && p.top < q.bottom - 3 && q.top < p.bottom - 3).map(([b]) => [a, b]));
})"""
COLOURS = """(() => { const c = document.getElementById('%s');
  const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
  const found = new Map(); for (let i = 0; i < d.length; i += 4) if (d[i + 3] === 255) {
    const k = d[i] << 16 | d[i + 1] << 8 | d[i + 2]; found.set(k, (found.get(k) || 0) + 1); }
  return [...found].filter(([, n]) => n > 40).map(([k]) => k); })()"""
TIP = "document.getElementById('tip').hidden ? '' : document.getElementById('tip').innerText"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(CHROMIUM, tmp_path_factory.mktemp("profile")) as one:
        yield one


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    folder, found = tmp_path_factory.mktemp("pages"), {}
    for name, (question, searching) in PAGES.items():
        found[name] = folder / f"{name}.html"
        found[name].write_text(page(planned(question), question, searching=searching), encoding="utf-8")
    return found


def box(browser: Browser, element: str) -> dict[str, float]:
    """Of an element, scrolled into view, in the viewport."""
    browser.ask(f"document.getElementById('{element}').scrollIntoView({{block: 'center', behavior: 'instant'}})")
    return browser.ask(f"document.getElementById('{element}').getBoundingClientRect().toJSON()")


@pytest.mark.parametrize("view", [v for _, v in VIEWS], ids=[n for n, _ in VIEWS])
@pytest.mark.parametrize("name", PAGES)
def test_every_page_is_drawn_without_complaint_or_overflow(browser, pages, name, view) -> None:
    browser.open(pages[name], **view)
    assert browser.complaints() == [] and browser.ask("document.querySelectorAll('.error').length") == 0
    assert browser.requests() == [pages[name].resolve().as_uri()]
    assert browser.ask("document.documentElement.scrollWidth") <= view["width"]
    assert browser.ask(OVERLAPS) == []
    for canvas in ("grid", "timeline"):
        assert browser.ask(COLOURS % canvas), f"{canvas} is blank"
    shown = "JSON.parse(document.getElementById('data').textContent).scatter.points.length"
    assert 0 < browser.ask("document.querySelectorAll('#scatter circle').length") <= browser.ask(shown) + 2


def test_dark_and_light_differ_and_text_is_legible(browser, pages) -> None:
    seen = []
    contrast = """(() => { const l = s => { const [r, g, b] = s.match(/[\\d.]+/g).map(v => v / 255)
      .map(v => v <= 0.04 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
      const card = l(getComputedStyle(document.querySelector('section')).backgroundColor);
      const texts = document.querySelectorAll('main p, main td, main th, main li span, main h2, main summary');
      return [...texts].filter(e => e.innerText)
        .map(e => l(getComputedStyle(e).color)).map(t => (Math.max(t, card) + 0.05) / (Math.min(t, card) + 0.05))
        .reduce((a, b) => Math.min(a, b)); })()"""
    for dark in (False, True):
        browser.open(pages["pipeline"], **LAPTOP, dark=dark)
        seen.append(set(browser.ask(COLOURS % "grid")))
        assert browser.ask(contrast) >= 4.5  # WCAG AA for body text
    assert seen[0] and seen[1] and not seen[0] & seen[1]


def test_the_axis_switch_colours_by_that_axis(browser, pages) -> None:
    browser.open(pages["pipeline"], **LAPTOP)
    names = browser.ask("[...document.querySelectorAll('#axis input')].map(i => i.value)")
    assert sorted(names) == ["dp_shard", "pp", "tp"]
    pictures, notes = set(), set()
    for name in names:
        browser.ask(f"document.querySelector('#axis input[value={name}]').click()")
        pictures.add(browser.ask("document.getElementById('grid').toDataURL()"))
        notes.add(browser.ask("document.getElementById('axis-note').textContent"))
    assert len(pictures) == len(notes) == 3


@pytest.mark.parametrize("view", [LAPTOP, PHONE], ids=["laptop", "phone"])
def test_a_gpu_under_the_pointer_tells_its_coordinate(browser, pages, view) -> None:
    dims = planned(PAGES["pipeline"][0]).layout.dims
    browser.open(pages["pipeline"], **view)
    grid = box(browser, "grid")
    seen = set()
    for step in range(60):
        browser.point(grid["left"] + grid["width"] * (step + 0.5) / 60, grid["top"] + 34)
        if tip := browser.ask(TIP):
            rank = int(tip.split()[1])
            seen.add(rank)
            for axis in ("pp", "dp_shard", "tp"):
                assert f"{axis} {dims.coordinate(rank)[axis]}" in tip
            assert f"node {rank // 4}, GPU {rank % 4}" in tip
    assert len(seen) >= 4


def test_the_grid_is_walked_with_the_keyboard_and_read_aloud(browser, pages) -> None:
    browser.open(pages["pipeline"], **LAPTOP)
    browser.ask("document.getElementById('grid').focus()")
    said = []
    for _ in range(3):
        browser.key("ArrowRight")
        said.append(browser.ask("document.getElementById('grid-say').textContent"))
    assert [text.split()[1] for text in said] == ["0", "1", "2"] and "pp group: ranks" in said[0]


def test_two_thousand_nodes_are_drawn_fast_and_fit(browser, pages) -> None:
    assert pages["many nodes"].stat().st_size < 1_500_000
    started = time.monotonic()
    browser.open(pages["many nodes"], **LAPTOP)
    assert time.monotonic() - started < 20
    grid = box(browser, "grid")
    assert grid["height"] < 500 and grid["width"] <= 1240
    redraw_ms = browser.ask("(() => { const t = performance.now();"
                            " document.querySelector('#axis input:not(:checked)').click();"
                            " return performance.now() - t; })()")
    assert redraw_ms < 1000
    seen = []
    for down in range(1, 16):  # through the two rows of node 0
        browser.point(grid["left"] + 3, grid["top"] + down)
        seen += browser.ask(TIP).split()[1:2]
    assert list(dict.fromkeys(seen))[:2] == ["0", "4"]


def test_the_timeline_zooms_and_names_what_is_under_the_pointer(browser, pages) -> None:
    browser.open(pages["chunks"], **LAPTOP)
    whole = browser.ask("document.getElementById('timeline').toDataURL()")
    canvas = box(browser, "timeline")
    browser.point(canvas["left"] + 60, canvas["top"] + 30)
    assert "pp rank 0" in browser.ask(TIP) and "forward of microbatch 0" in browser.ask(TIP)
    browser.ask("document.getElementById('zoom-in').click()")
    assert browser.ask("document.getElementById('timeline-scroll').scrollWidth") > 1.7 * canvas["width"]
    assert browser.ask("document.getElementById('timeline').toDataURL()") != whole
    browser.ask("document.getElementById('zoom-fit').click()")
    assert browser.ask("document.getElementById('timeline').toDataURL()") == whole


def test_candidates_are_walked_from_the_plan_on(browser, pages) -> None:
    plan = planned(PAGES["pipeline"][0])
    browser.open(pages["pipeline"], **LAPTOP)
    browser.ask("document.getElementById('scatter').focus()")
    said = []
    for _ in range(2):
        browser.key("ArrowRight")
        said.append(browser.ask("document.getElementById('scatter-say').textContent"))
    assert said[0].startswith(str(plan.layout)) and said[0].endswith("the plan")
    assert said[1] != said[0] and ("slower" in said[1] or "as fast" in said[1] or "does not fit" in said[1])
    browser.key("Escape")
    assert browser.ask(TIP) == ""


def test_a_slider_reads_the_sweep_at_its_value(browser, pages) -> None:
    browser.open(pages["pipeline"], **LAPTOP)
    read = "document.querySelector('.sweep caption').textContent"
    assert "as planned" in browser.ask(read)
    browser.ask("(() => { const s = document.querySelector('.sweep input'); s.value = 0;"
                " s.dispatchEvent(new Event('input')); })()")
    labels = browser.ask("JSON.parse(document.getElementById('data').textContent).what_if[0].labels")
    assert browser.ask(read).startswith(f"at {labels[0]}") and "as planned" not in browser.ask(read)


def test_nothing_of_a_user_s_runs(browser, pages) -> None:
    browser.open(pages["hostile"], **LAPTOP)
    assert browser.ask("document.hacked") is None and browser.ask("document.images.length") == 0
    assert browser.ask("document.querySelector('h1').textContent").startswith(HOSTILE[0])


def test_it_prints_in_light_colours(browser, pages) -> None:
    browser.open(pages["pipeline"], **LAPTOP, dark=True)
    browser.ask("dispatchEvent(new Event('beforeprint'))")
    assert browser.ask("getComputedStyle(document.body).backgroundColor") == "rgb(247, 246, 242)"
    pdf = browser.call("Page.printToPDF", printBackground=True)["data"]
    assert len(pdf) > 50_000
    browser.ask("dispatchEvent(new Event('afterprint'))")
    assert browser.ask("getComputedStyle(document.body).backgroundColor") == "rgb(17, 19, 21)"
