"""The closed loop without an engine: its table of starts, its measurements, how it follows the exporter's JSON, its
page, and kept captures.
"""

from __future__ import annotations

import json

import pytest

from closed_loop.results import KEPT, PAGE, page, spread

# --- results ----------------------------------------------------------------------------------------------------------


def test_the_committed_page_is_what_the_committed_figures_say_and_one_screen() -> None:
    committed = PAGE.read_text(encoding="utf-8")
    assert committed == page(json.loads(KEPT.read_text(encoding="utf-8")), committed)
    assert len(committed.splitlines()) <= 50


KNOWN = json.loads(KEPT.read_text(encoding="utf-8"))["starts"]


@pytest.mark.parametrize("name", KNOWN)
def test_the_committed_advice_ends_within_a_tenth_of_the_setting_by_hand(name: str) -> None:
    reached = spread(run["steps"][-1] for run in KNOWN[name])
    by_hand = spread(run["by_hand"] for run in KNOWN[name])
    assert reached is not None
    assert by_hand is not None
    assert reached[0] >= 0.9 * by_hand[0]
