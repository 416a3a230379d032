"""Observations and breaches since the exporter came, and the latencies of the last minutes."""

from __future__ import annotations

import gzip
import re
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tuning_exporter.sglang.events import Scrape
from sglang_tuning_exporter.sglang.metrics import page_figures as facts
from sglang_tuning_exporter.sglang.metrics.histograms import Histogram
from sglang_tuning_exporter.state.latency import LATENCIES, LatencyLedger

RECORDINGS = Path(__file__).parent / "recordings"


def scrape(fast: float, slow: float = 0.0, *, bound: float = 1.0) -> Scrape:
    """Requests whose first token came within `bound` seconds, and others within twice as many."""
    histogram = Histogram((bound, 2 * bound, inf), (fast, fast + slow, fast + slow), 0.5 * fast + 1.5 * slow)
    return Scrape(ranks=[], time_to_first_token=histogram)


def ledger(*scrapes: Scrape, objective: float | None = 1.0, step: float = 10.0) -> LatencyLedger:
    own = LatencyLedger({"time_to_first_token": objective})
    for number, one in enumerate(scrapes):
        own.observe(one, number * step)
    return own


def counted(own: LatencyLedger) -> tuple[float | None, float | None]:
    return own.observations("time_to_first_token"), own.breaches("time_to_first_token")


def test_nothing_is_counted_before_the_first_scrape() -> None:
    assert counted(ledger()) == (None, None)


def test_observations_from_before_the_exporters_start_are_not_counted() -> None:
    assert counted(ledger(scrape(100, 50))) == (0, 0)


def test_observations_after_the_first_scrape_are_counted() -> None:
    assert counted(ledger(scrape(100, 50), scrape(108, 52))) == (10, 2)


def test_a_family_missing_from_the_first_page_counts_from_zero() -> None:
    assert counted(ledger(Scrape(ranks=[]), scrape(3, 1))) == (4, 1)


def test_a_server_that_starts_again_counts_from_nothing() -> None:
    assert counted(ledger(scrape(100, 50), scrape(110, 50), scrape(2, 1))) == (13, 1)


def test_a_server_that_starts_again_with_other_boundaries_counts_from_nothing() -> None:
    own = ledger(scrape(10, 0), scrape(10, 0), scrape(20, 0, bound=0.5))
    assert counted(own) == (20, 0)
    recent = own.recent("time_to_first_token", 20.0)
    assert recent is not None
    assert recent.observations == 20


def test_one_page_without_the_family_neither_loses_nor_doubles_a_count() -> None:
    assert counted(ledger(scrape(10), Scrape(ranks=[]), scrape(12))) == (2, 0)


def test_an_objective_inside_a_bucket_divides_it() -> None:
    assert counted(ledger(scrape(0), scrape(0, 8), objective=1.25)) == (8, 6)


def test_without_an_objective_there_are_no_breaches_but_the_latencies_are_shown() -> None:
    own = ledger(scrape(0), scrape(3, 1), objective=None)
    assert counted(own) == (4, None)
    recent = own.recent("time_to_first_token", 10.0)
    assert recent is not None
    assert (recent.observations, recent.breaches, recent.breach_share) == (4, None, None)


def test_the_last_minutes_have_a_mean_quantiles_and_a_share_of_breaches() -> None:
    own = ledger(scrape(100, 100), scrape(106, 104))
    recent = own.recent("time_to_first_token", 10.0)
    assert recent is not None
    assert (recent.observations, recent.breaches, recent.breach_share) == (10, 4, 0.4)
    assert (recent.mean_seconds, recent.p50_seconds, recent.p99_seconds) == pytest.approx((0.9, 5 / 6, 1 + 3.9 / 4))


def test_observations_older_than_the_window_are_not_recent() -> None:
    own = ledger(*(scrape(10 * number) for number in range(100)))
    recent, minute = own.recent("time_to_first_token", 990.0), own.recent("time_to_first_token", 990.0, 60.0)
    assert recent is not None
    assert minute is not None
    assert (recent.observations, minute.observations) == (600, 60)
    assert own.recent("time_to_first_token", 990.0, 7200.0) == recent


def test_without_recent_observations_the_latency_is_unknown_and_not_zero() -> None:
    own = ledger(scrape(5), *(scrape(9) for _ in range(100)))
    assert own.recent("time_to_first_token", 1000.0) is None
    assert ledger(scrape(5)).recent("time_to_first_token", 0.0) is None
    assert ledger().recent("time_to_first_token", 0.0) is None


def test_memory_is_bounded_by_the_window() -> None:
    own = ledger(*(scrape(number) for number in range(1000)), step=1.0)
    assert len(own._tallies["time_to_first_token"]._marks) <= 62


@given(
    st.lists(
        st.builds(scrape, st.floats(0, 1e6), st.floats(0, 1e6), bound=st.sampled_from([0.1, 1.0]))
        | st.builds(Scrape, st.just([])),
        max_size=12,
    )
)
def test_counters_never_fall_and_breaches_never_exceed_observations(scrapes: list[Scrape]) -> None:
    own = ledger()
    seen = [0.0, 0.0]
    for number, one in enumerate(scrapes):
        own.observe(one, number * 7.0)
        observations, breaches = counted(own)
        assert observations is not None
        assert breaches is not None
        assert observations >= seen[0]
        assert breaches >= seen[1]
        assert breaches <= observations * (1 + 1e-9)
        seen = [observations, breaches]


def pages(recording: Path) -> list[str]:
    return [gzip.decompress(path.read_bytes()).decode() for path in sorted(recording.glob("metrics-*.prom.gz"))]


def buckets(text: str, family: str, where: str = "") -> Mapping[float, float]:
    """Add up a page's buckets line by line, apart from the program's own reading."""
    found: defaultdict[float, float] = defaultdict(float)
    for labels, bound, value in re.findall(
        rf'^sglang:{family}_bucket{{(.*le="([^"]*)".*)}} (\S+)$', text, re.MULTILINE
    ):
        if where in labels:
            found[float(bound)] += float(value)
    return found


@pytest.mark.parametrize(
    ("name", "first_tokens", "slow_first_tokens", "tokens", "slow_tokens"),
    [("big_queue", 300, 284, 18900, 12), ("client_limited", 127, 0, 8001, 2), ("dp2", 69, 0, 3799, 18)],
)
def test_a_recording_has_as_many_breaches_as_its_first_and_last_page_differ_by(
    name: str, first_tokens: float, slow_first_tokens: float, tokens: float, slow_tokens: float
) -> None:
    """Objectives that are boundaries of the buckets, so that nothing is estimated."""
    own = LatencyLedger({"time_to_first_token": 2.0, "inter_token": 0.1})
    texts = pages(RECORDINGS / name)
    for number, text in enumerate(texts):
        own.observe(facts.read(text), 10.0 * number)
    for latency, family, where, objective in (
        ("time_to_first_token", "time_to_first_token_seconds", 'is_streaming="true"', 2.0),
        ("inter_token", "inter_token_latency_seconds", "", 0.1),
    ):
        first, last = buckets(texts[0], family, where), buckets(texts[-1], family, where)
        assert latency in LATENCIES
        gained = last[inf] - first[inf]
        assert own.observations(latency) == gained
        assert own.breaches(latency) == gained - (last[objective] - first[objective])
    assert (own.observations("time_to_first_token"), own.breaches("time_to_first_token")) == (
        first_tokens, slow_first_tokens,
    )  # fmt: skip
    assert (own.observations("inter_token"), own.breaches("inter_token")) == (tokens, slow_tokens)


def test_a_server_that_was_killed_and_came_back_in_a_recording_is_counted_twice_from_nothing() -> None:
    own = LatencyLedger({})
    texts = pages(RECORDINGS / "restart_append")
    totals = [buckets(text, "time_to_first_token_seconds", 'is_streaming="true"')[inf] for text in texts]
    for number, text in enumerate(texts):
        own.observe(facts.read(text), 10.0 * number)
    highest = max(now for now, then in pairwise(totals) if then < now)
    assert own.observations("time_to_first_token") == highest - totals[0] + totals[-1]


def answers(short: float, long: float) -> Scrape:
    """A page of answers of up to 100 tokens and of up to 500."""
    return Scrape(ranks=[], answer_tokens=Histogram((100.0, 500.0, inf), (short, short + long, short + long), 0.0))


@pytest.mark.parametrize(("short", "long", "within"), [(200, 0, 99.0), (0, 200, 496.0), (196, 4, 300.0)])
def test_the_longest_answer_but_one_in_a_hundred_is_estimated_inside_its_bucket(
    short: float, long: float, within: float
) -> None:
    assert ledger(answers(7, 9), answers(7 + short, 9 + long)).longest_answer(20.0) == pytest.approx(within)


def test_with_few_answers_the_longest_answer_is_unknown() -> None:
    assert ledger(answers(0, 0), answers(20, 20)).longest_answer(20.0) is None
    assert ledger(scrape(0), scrape(900)).longest_answer(20.0) is None


def test_answers_before_the_window_are_not_recent() -> None:
    seen = ledger(answers(0, 0), answers(0, 900), answers(0, 900), answers(200, 900), step=400.0)
    assert seen.longest_answer(1200.0) == pytest.approx(99.0)
