"""The documented comparison with published layouts is what the planner says today."""
import pytest

from tests.benchmarks.presets import PAGE, PUBLISHED, row, written

SMOKE = {"GPT-3 175B, 768 A100", "Llama 3 405B, 8k, 16,384 H100"}  # the others take longer, and together minutes


@pytest.mark.parametrize("one", [pytest.param(p, marks=[] if p.name in SMOKE else [pytest.mark.slow], id=p.name)
                                 for p in PUBLISHED])
def test_the_documented_winner_is_the_planners(one):
    assert row(one) in written().splitlines(keepends=True), \
        f"{PAGE.name} is out of date: `python -m tests.benchmarks.presets --write`"
