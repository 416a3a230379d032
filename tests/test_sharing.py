"""Shared prefixes are distinguished from requests that find their own tokens in the cache after a retraction or a preemption."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from scenarios import Story, repeated, retraction, started
from sglang_tuning_exporter.diagnosis.evidence import Past, past_of
from sglang_tuning_exporter.diagnosis.findings import judge
from sglang_tuning_exporter.diagnosis.prefix_sharing import PrefixSharing, sharing
from sglang_tuning_exporter.sglang.events import NO_RANK, PrefillBatch, Rank, Retraction, Scrape
from sglang_tuning_exporter.sglang.metrics import page_figures as facts
from sglang_tuning_exporter.sglang.metrics.histograms import Histogram
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.server import ServerState

END = 200.0
UNUSED, WASTED = "shared_prefixes_unused", "prefix_policy_wasted"


def batches(cached: int, *, new: int = 700, sequences: int = 2, queued: int = 20) -> Story:
    """Print a prefill batch every ten seconds; of the KV cache, 1,900 tokens belong to each running request."""
    return repeated(PrefillBatch(None, NO_RANK, sequences, new, cached, 200, queued, 0, 0.95), 10.0, end=END)


MANY = batches(12_000, new=8000, sequences=400)  # requests of 50 tokens


def requests(
    each: float = 20.0, *, prompt: float = 500.0, cached: float | None = None, posted: float | None = None
) -> Story:
    """Scrape every ten seconds: so many requests began and ended, of so many prompt tokens, so many cached.

    `posted`: HTTP requests for each of them.
    """

    def scrape(count: float) -> Scrape:
        histogram = Histogram((1.0, inf), (count, count), count)
        return Scrape(
            [],
            progress=count,
            started_requests=count,
            finished_requests=count,
            finished_prompt_tokens=count * prompt,
            finished_cached_tokens=None if cached is None else count * cached,
            posted_requests=None if posted is None else count * posted,
            time_to_first_token=histogram,
        )

    return [(10.0 * step, scrape(each * step)) for step in range(20)]


def lived(story: Story, version: str = "0.5.23", policy: str = "fcfs", **args: Any) -> Past:
    state = ServerState(PROFILES["online"], 0.0)
    state.facts.version = version
    for at, what in sorted(started(schedule_policy=policy, **args) + story, key=lambda pair: pair[0]):
        if isinstance(what, Scrape):
            state.observe_scrape(what, at)
        else:
            state.observe(what, at)  # type: ignore[arg-type]  # the rest are events here
    state.advance(END)
    return past_of(state, END)


def ids(past: Past) -> set[str]:
    return {finding.diagnosis.id for finding in judge(past).findings}


def test_prompts_that_share_prefixes_are_found_in_the_log_alone() -> None:
    assert UNUSED in ids(lived(batches(300)))


def test_cached_tokens_of_preempted_requests_are_no_shared_prefixes() -> None:
    # Two are prefilled for each that starts: the second time a request finds what it computed before.
    past = lived(batches(300) + requests(1.0), "0.5.5", enable_priority_scheduling=True)
    assert UNUSED not in ids(past)


def test_prompts_that_share_prefixes_are_found_beside_preemptions() -> None:
    story = MANY + requests(421.0, prompt=50.0)  # the first scrape is the base
    shared = sharing(lived(story, "0.5.5", enable_priority_scheduling=True))
    assert shared is not None
    assert shared.proven == pytest.approx(0.6, abs=0.05)


def test_without_a_count_of_preemptions_there_is_no_finding_about_shared_prefixes() -> None:
    past = lived(batches(300), enable_priority_scheduling=True)
    assert sharing(past) == PrefixSharing(0.3, None)
    assert UNUSED not in ids(past)


def test_priorities_without_preemption_bring_no_request_back() -> None:
    past = lived(batches(300), enable_priority_scheduling=True, disable_priority_preemption=True)
    assert sharing(past) == PrefixSharing(0.3, 0.0)


def test_an_order_by_prefixes_is_not_advised_where_priorities_make_sglang_refuse_it() -> None:
    past = lived(batches(300), enable_priority_scheduling=True, disable_priority_preemption=True)
    assert UNUSED not in ids(past)


def test_cached_tokens_of_retracted_requests_are_no_shared_prefixes() -> None:
    story = batches(300) + repeated(Retraction(None, Rank(), 1), 10.0, end=END)
    assert UNUSED not in ids(lived(story))


def test_a_few_retractions_do_not_hide_shared_prefixes() -> None:
    past = lived(MANY + repeated(retraction(), 65.0, end=END))
    assert UNUSED in ids(past)


def test_the_evidence_has_all_that_was_cached_and_what_came_back() -> None:
    past = lived(MANY + repeated(retraction(), 65.0, end=END))
    [found] = [finding for finding in judge(past).findings if finding.diagnosis.id == UNUSED]
    proven, cached, from_own_runs = found.evidence
    assert cached.value == pytest.approx(0.6)
    assert proven.value == pytest.approx(cached.value - from_own_runs.value)
    assert proven.name == "share of prompt tokens from the prefix cache, computed by other requests"


def test_metrics_alone_show_sharing() -> None:
    past = lived(requests(cached=200.0))
    assert sharing(past) == PrefixSharing(0.4, 0.0)


def test_from_0_5_9_on_the_counter_of_cached_tokens_leaves_out_requests_that_came_back() -> None:
    story = batches(300) + requests(cached=200.0) + repeated(retraction(), 10.0, end=END)
    assert sharing(lived(story, "0.5.9", enable_priority_scheduling=True)) == PrefixSharing(0.4, 0.0)
    older = sharing(lived(story, "0.5.5"))
    assert older is not None
    assert older.from_own_runs


def samples(repeated_batches: int, new: int = 0) -> Story:
    """Print prefill batches of eight answers to one prompt each: one token of each computed, `new` of other prompts."""
    return repeated(PrefillBatch(None, NO_RANK, 8, 8 + new, 300, 200, 20, 0, 0.95), 10.0, end=10.0 * repeated_batches)


@pytest.mark.parametrize(("answers", "is_shared"), [(samples(19), False), (samples(19, new=80), True)])
@pytest.mark.parametrize("counted", [[], requests(cached=200.0)])
def test_several_answers_to_one_prompt_are_no_shared_prefix(answers: Story, counted: Story, *, is_shared: bool) -> None:
    # As on a real engine with n 6 and n 8: the first request of each prompt computes it, the others one token each.
    first = repeated(PrefillBatch(None, NO_RANK, 1, 40, 0, 200, 20, 0, 0.95), 10.0, end=END)
    assert (UNUSED in ids(lived(first + answers + counted))) is is_shared


@pytest.mark.parametrize(("posted", "proven"), [(1.0, 0.4), (1 / 7, 0.0), (None, 0.4)])
def test_metrics_alone_show_several_answers_to_one_prompt(posted: float | None, proven: float) -> None:
    shared = sharing(lived(requests(cached=200.0, posted=posted)))
    assert shared is not None
    assert shared.proven == pytest.approx(proven)


def test_a_prompt_that_goes_on_in_another_chunk_did_not_come_back() -> None:
    # Forty lines of a full chunk, each counting the prompt of 40,000 tokens once more.
    story = batches(1000, new=8192, sequences=1) + requests(0.1, prompt=40_000.0)
    past = lived(story, "0.5.5", enable_priority_scheduling=True)
    shared = sharing(past)
    assert shared is not None
    assert shared.from_own_runs == 0.0


def test_without_a_radix_cache_nothing_is_known_of_sharing() -> None:
    assert sharing(lived(batches(0), disable_radix_cache=True)) is None


def test_an_order_by_prefixes_is_wasted_where_nothing_is_cached() -> None:
    assert WASTED in ids(lived(batches(0, new=1000), policy="lpm"))
    assert WASTED not in ids(lived(batches(300), policy="lpm"))


def test_without_waiting_requests_there_is_no_finding_about_their_order() -> None:
    assert not {UNUSED, WASTED} & ids(lived(batches(300, queued=0)))
    assert not {UNUSED, WASTED} & ids(lived(batches(0, queued=0), policy="lpm"))


@pytest.mark.parametrize(
    ("page", "cached"),
    [
        ('sglang:cached_tokens_total{cache_source="device"} 30.0\nsglang:cached_tokens_total{cache_source="host"} 5.0\n', 35.0),
        ('sglang:cached_tokens_total{model_name="m"} 30.0\n', 30.0),
        ("", 0.0),
    ],
)  # fmt: skip
def test_cached_tokens_are_those_of_all_sources(page: str, cached: float) -> None:
    counted = "sglang:time_to_first_token_seconds_count 4.0\nsglang:prompt_tokens_total 100.0\n"
    assert facts.read(counted + page).finished_cached_tokens == cached
