"""What the server's counters gained between two pages: requests, failures, rejections, also of streams, which only counters show."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.scrapes import Counters, RejectedStreams
from sglang_tuning_exporter.core.server import Server
from sglang_tuning_exporter.sglang.metrics.page_figures import RankFigures, Scrape


def gained(*pages: dict[str, Any]) -> dict[str, float]:
    """Return what the pages gained together, the first of them aside."""
    counters, whole = Counters(), dict[str, float]()
    for number, figures in enumerate(pages):
        for name, more in counters.take(Scrape([RankFigures()], **figures), 10.0 * number, is_new=True).counts.items():
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


# Streamed requests that a full queue rejects: SGLang answers them with status 200 and logs nothing


def rejected(
    *pages: tuple[float, float, float], longest: int | None = 10, queued: float = 10.0, unstarted: tuple[float, ...] = (), aborted: float = 0.0
) -> float:  # fmt: skip
    """Return the rejected requests of pages with so many answered, finished and refused requests, one every five seconds.

    `unstarted`: how many left the queue without a start, so far; `aborted`: how many are aborted between two pages.
    """
    server = Server(PROFILES["online"])
    server.facts.arguments["max_queued_requests"] = longest
    for number, (answered, finished, refused) in enumerate(pages):
        figures = RankFigures(None, 12.0, queued)
        if unstarted:
            figures.admitted_requests, figures.queued_requests = finished, finished + unstarted[number] + 25.0
        counts: dict[str, Any] = {
            "answered_requests": answered,
            "finished_requests": finished,
            "refused_requests": refused,
        }
        page = Scrape([figures], progress=finished, aborted_requests=aborted * number, open_requests=25.0, **counts)
        server.scrape(page, 5.0 * number)
    return server.counted["rejected"]


GROWS = (100, 100, 0), (160, 110, 0), (230, 120, 0)


@pytest.mark.parametrize(
    ("pages", "more", "expected"),
    [
        (GROWS, {}, 110),  # answers that no request was finished for
        (GROWS, {"longest": None}, 0),  # errors of another kind: the queue is not full
        (GROWS, {"queued": 0.0}, 0),
        # SGLANG_REQ_WAITING_TIMEOUT: they leave a queue of any length; prompts that are too long, the last ten here, do start.
        (((100, 100, 0), *GROWS, (250, 130, 0)), {"longest": None, "unstarted": (0.0, 0.0, 50.0, 110.0, 110.0)}, 110),
        (GROWS, {"longest": None, "unstarted": (0.0, 50.0, 110.0)}, 110),  # from the second page on
        # Both counters have ended requests a moment apart, beside a queue whose gauge is refreshed every 400 decode steps.
        (((100, 100, 0), (108, 110, 0), (120, 118, 0), (130, 128, 0)), {"longest": None, "unstarted": (-5.0, 0.0, -9.0, 0.0)}, 0),
        (GROWS[:2], {"longest": None, "unstarted": (0.0, 50.0), "aborted": 1.0}, 0),  # somebody aborts them in the queue
        (((100, 100, 0), (108, 112, 0), (124, 120, 0), (126, 130, 0), (144, 140, 0)), {}, 4),  # in one counter first
        (((5000, 100, 0),), {}, 0),
        (((100, 100, 0), (100, 100, 30)), {}, 30),  # answered with 503
    ],
)  # fmt: skip
def test_streams_that_a_queue_rejects_are_counted_by_what_was_answered_and_never_finished(
    pages: tuple[tuple[float, float, float], ...], more: dict[str, Any], expected: float
) -> None:
    assert rejected(*pages, **more) == expected


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=30))
def test_no_more_are_rejected_than_were_answered(ends: list[tuple[int, int]]) -> None:
    streams, page = RejectedStreams(), Scrape([])
    counts = [
        {"answered_requests": float(answered), "finished_requests": float(finished)} for answered, finished in ends
    ]
    assert sum(streams.take(page, each, queue_is_full=True) for each in counts) <= sum(answered for answered, _ in ends)
