"""What the server's counters gained between two pages: requests, failures, rejections, also of streams, which only counters show."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_tuning_exporter.core.scrapes import Counters
from sglang_tuning_exporter.sglang.metrics.page_figures import RankFigures, Scrape


def gained(*pages: dict[str, Any]) -> dict[str, float]:
    """Return what the pages gained together, the first of them aside."""
    counters, whole = Counters(), dict[str, float]()
    for figures in pages:
        for name, more in counters.take(Scrape([RankFigures()], **figures), is_new=True).counts.items():
            whole[name] = whole.get(name, 0.0) + more
    return whole


def test_a_page_with_an_invalid_counter_counts_nothing_and_loses_nothing() -> None:
    spoiled = {"finished_requests": 0.0, "counters_invalid": True}
    pages = [{"finished_requests": 171.0}, spoiled, {"finished_requests": 181.0}]
    assert gained(*pages)["finished_requests"] == 10


@pytest.mark.parametrize(
    ("answered", "opened", "failed"),
    [(8.0, 0.0, 2.0), (10.0, 0.0, 0.0), (8.0, 2.0, 0.0)],  # the last two are still open
)
def test_requests_that_end_without_an_answer_failed(answered: float, opened: float, failed: float) -> None:
    pages = [
        {"generation_posts": 10.0 * n, "generation_responses": answered * n, "open_requests": opened * n}
        for n in range(2)
    ]
    assert gained(*pages)["failed_requests"] == failed
