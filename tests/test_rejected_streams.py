"""Streamed requests that a full queue rejects: SGLang answers them with status 200 and logs nothing, so only its counters show them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tuning_exporter.sglang.events import Rank, RankFigures, Rejection, Scrape, ServerArgs
from sglang_tuning_exporter.sglang.metrics import page_figures
from sglang_tuning_exporter.state.counters import RejectedStreams
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.server import ServerState

PAGE = """\
sglang:num_running_reqs 12.0
sglang:num_queue_reqs 10.0
sglang:per_stage_req_latency_seconds_count{{stage="request_process"}} 70.0
sglang:per_stage_req_latency_seconds_count{{stage="prefill_forward"}} 49.0
sglang:queue_time_seconds_count 50.0
sglang:e2e_request_latency_seconds_count {finished}
sglang:http_responses_total{{endpoint="/generate",method="POST",status_code="200"}} {answered}
sglang:http_responses_total{{endpoint="/v1/chat/completions",method="POST",status_code="503"}} {refused}
sglang:http_responses_total{{endpoint="/metrics",method="GET",status_code="200"}} 55.0
sglang:http_responses_total{{endpoint="/flush_cache",method="POST",status_code="200"}} 7.0
"""


def rejected(
    *scrapes: tuple[float, float, float],
    longest: int | None = 10,
    queued: float = 10.0,
    log_is_read: bool = True,
    unstarted: tuple[float, ...] = (),
    aborted: float = 0.0,
) -> float:
    """Give the rejected requests of scrapes with so many answered, finished and refused requests, one every five seconds.

    `unstarted`: how many left the queue without a start, so far; `aborted`: how many are aborted between two scrapes.
    """
    state = ServerState(PROFILES["online"], 0.0)
    state.log_is_read = log_is_read
    state.observe(ServerArgs(None, Rank(), {"max_queued_requests": longest}), 0.0)
    for number, (answered, finished, refused) in enumerate(scrapes):
        figures = RankFigures(None, 12.0, queued)
        if unstarted:
            figures.admitted_requests, figures.queued_requests = finished, finished + unstarted[number] + 25.0
        state.observe_scrape(
            Scrape(
                [figures],
                progress=finished,
                answered_requests=answered,
                finished_requests=finished,
                refused_requests=refused,
                aborted_requests=aborted * number,
                open_requests=25.0,
            ),
            5.0 * number,
        )
    return state.server_totals.counts["rejected_requests"]


def test_answers_that_no_request_was_finished_for_are_rejected_streams() -> None:
    assert rejected((100, 100, 0), (160, 110, 0), (230, 120, 0)) == 110


@pytest.mark.parametrize("more", [{"longest": None}, {"queued": 0.0}])
def test_without_a_full_queue_they_are_errors_of_another_kind(more: dict[str, float]) -> None:
    assert rejected((100, 100, 0), (160, 110, 0), (230, 120, 0), **more) == 0  # type: ignore[arg-type] # fields by name


def test_requests_that_leave_the_queue_unstarted_are_rejected_streams_beside_a_queue_of_any_length() -> None:
    """SGLANG_REQ_WAITING_TIMEOUT; prompts that are too long (the last ten here) do start."""
    scrapes = (100, 100, 0), (160, 110, 0), (230, 120, 0), (250, 130, 0)
    assert rejected(*scrapes, longest=None, unstarted=(0.0, 50.0, 110.0, 110.0)) == 110


def test_requests_that_wait_are_no_rejections_however_old_the_gauge_of_the_queue_is() -> None:
    """Both counters have ended requests a moment apart, beside a queue whose gauge is refreshed every 400 decode steps."""
    waiting = -5.0, 0.0, -9.0, 0.0
    assert rejected((100, 100, 0), (108, 110, 0), (120, 118, 0), (130, 128, 0), longest=None, unstarted=waiting) == 0


def test_requests_that_somebody_aborts_in_the_queue_are_no_rejections() -> None:
    assert rejected((100, 100, 0), (160, 110, 0), longest=None, unstarted=(0.0, 50.0), aborted=1.0) == 0


def test_requests_that_end_in_one_counter_first_are_no_rejections() -> None:
    assert rejected((100, 100, 0), (108, 112, 0), (124, 120, 0), (126, 130, 0), (144, 140, 0)) == 4


def test_answers_before_the_first_scrape_are_not_counted() -> None:
    assert rejected((5000, 100, 0)) == 0


def test_counters_that_begin_again_are_no_rejections() -> None:
    assert rejected((5000, 100, 0), (3, 2, 0)) == 1


@pytest.mark.parametrize("log_is_read", [True, False])
def test_answers_with_503_are_counted_by_the_servers_counter(log_is_read: bool) -> None:  # noqa: FBT001 - a case
    assert rejected((100, 100, 0), (100, 100, 30), log_is_read=log_is_read) == 30


def served(steps: str, *, has_counter: bool = True) -> float:
    """Give the rejected requests of a server that does one step a second.

    `r`: it rejects one request; `l`: it logs one; `f`: a line that says so is forged; `s`: it is scraped; `x`: nothing answers.
    """
    state, refused = ServerState(PROFILES["online"], 0.0), 0
    for now, step in enumerate(steps):
        refused += step == "r"
        if step in "rlf":
            state.observe(Rejection(None, Rank()), float(now))
        elif step == "s":
            answered = 100.0 if has_counter else None
            state.observe_scrape(
                Scrape([RankFigures()], answered_requests=answered, refused_requests=refused or None), float(now)
            )
        else:
            state.lost_scrape(float(now))
    return state.server_totals.counts["rejected_requests"]


@pytest.mark.parametrize("forged", ["f", "ffff"])
def test_forged_lines_of_rejections_count_nothing_beside_the_servers_counter(forged: str) -> None:
    assert served(f"srr{forged}srs{forged}s") == 3


@pytest.mark.parametrize("steps", ["rrsrr", "srrxrrs", "srrx", "rsxrrsxsrs", "xrrxsrs", "srsrsx"])
def test_each_rejection_counts_once_while_some_scrapes_fail(steps: str) -> None:
    counted = (
        steps.count("r") if steps[-1] != "r" else len(steps[: steps.rindex("s")].replace("s", "").replace("x", ""))
    )
    assert served(steps) == counted


def test_without_the_counter_lines_count() -> None:
    assert served("srrsrx", has_counter=False) == 3


def test_lines_that_wait_for_a_scrape_are_not_lost_in_a_restart() -> None:
    state = ServerState(PROFILES["online"], 0.0)
    state.observe_scrape(Scrape([RankFigures()], answered_requests=1.0), 0.0)
    state.observe(Rejection(None, Rank()), 1.0)
    again = ServerState(PROFILES["online"], 2.0)
    again.restore(state.saved(2.0), 2.0)
    assert again.server_totals.counts["rejected_requests"] == 1


def test_only_endpoints_that_generate_are_counted() -> None:
    scrape = page_figures.read(PAGE.format(finished=40, answered=60, refused=3))
    assert (scrape.answered_requests, scrape.finished_requests, scrape.refused_requests) == (60, 40, 3)
    assert (scrape.ranks[0].queued_requests, scrape.ranks[0].admitted_requests) == (70, 50)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=30))
def test_no_more_are_rejected_than_were_answered(ends: list[tuple[int, int]]) -> None:
    streams = RejectedStreams()
    assert sum(streams.take(*each, queue_is_full=True) for each in ends) <= sum(answered for answered, _ in ends)
