"""Why requests wait: each reason on a sample where it is the one, and what must be true of any sample."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tuning_exporter.core.reasons import EARLY, REASONS, Sample, reason
from sglang_tuning_exporter.core.sums import STATES, UNKNOWN

shares = st.floats(0.0, 1.0)
seconds = st.sampled_from([0.0, 29.0, 31.0, 59.0, 61.0, 600.0, inf])
SAMPLES = st.builds(
    Sample,
    running=st.none() | st.integers(0, 70).map(float),
    joining=st.sampled_from([0.0, 3.0]),
    limit=st.none() | st.sampled_from([1.0, 8.0, 64.0]),
    at_limit_seconds=seconds,
    full_batch=st.booleans(),
    continues=st.booleans(),
    usage=st.none() | shares,
    full_usage=shares,
    target=st.just(0.9),
    free=st.sampled_from([0.0, 1e4, 1e6]),
    reserved=st.sampled_from([8192.0, 5e5]),
    fits=st.booleans(),
    for_grammar=st.booleans(),
    elsewhere=st.booleans(),
    waits_by=st.sampled_from(["", "prefill", "other"]),
    passes=st.booleans(),
    idle_seconds=seconds,
    ended_seconds=st.sampled_from([-inf, 0.0, 40.0]),
    early=st.booleans(),
)
# Room in the cache, and far from the limit.
ROOMY = Sample(running=20.0, limit=64.0, usage=0.4, full_usage=0.4, target=0.9, free=1e5)
AT_LIMIT = ROOMY._replace(running=64.0, at_limit_seconds=0.0)
# One place is free, and it was for long.
NEAR_LIMIT = ROOMY._replace(running=62.0, idle_seconds=120.0, free=1e5, reserved=8192.0)
FULL = ROOMY._replace(usage=0.95, full_usage=0.95)


EXAMPLES = [
    (AT_LIMIT._replace(for_grammar=True, elsewhere=True, full_batch=True), "grammar_queue"),
    (FULL._replace(elsewhere=True, full_batch=True), "prefill_bound"),
    (FULL._replace(elsewhere=True), "pool_full"),
    (AT_LIMIT._replace(elsewhere=True), "pd_queue"),
    (ROOMY._replace(idle_seconds=61.0, ended_seconds=31.0, full_batch=True, fits=False), "standing_still"),
    (ROOMY._replace(idle_seconds=61.0, free=1e6, reserved=5e5, waits_by="prefill"), "standing_still"),
    (AT_LIMIT._replace(full_batch=True, fits=False), "running_limit"),
    (NEAR_LIMIT._replace(running=59.0, joining=3.0, idle_seconds=29.0, full_batch=True), "running_limit"),
    (NEAR_LIMIT._replace(reserved=5e5), "running_limit"),
    (NEAR_LIMIT._replace(limit=62.0, reserved=1e4), "standing_still"),
    (NEAR_LIMIT._replace(continues=True, full_batch=True), UNKNOWN),
    (NEAR_LIMIT._replace(running=7.0, limit=8.0, idle_seconds=0.0), UNKNOWN),
    (FULL._replace(full_batch=True), "prefill_bound"),
    (ROOMY._replace(usage=None, waits_by="prefill"), "prefill_bound"),
    (ROOMY._replace(usage=None, early=True), UNKNOWN),
    (FULL._replace(full_usage=0.5, running=64.0), "hybrid_pool_full"),
    (FULL._replace(running=64.0), "pool_full"),
    (ROOMY._replace(fits=False, early=True), "pool_full"),
    (ROOMY._replace(running=None, idle_seconds=61.0, ended_seconds=31.0, early=True), "standing_still"),
    (ROOMY._replace(passes=True), UNKNOWN),
    (ROOMY._replace(waits_by="other"), UNKNOWN),
    (ROOMY._replace(early=True), UNKNOWN),
    (ROOMY, "held_back"),
]


@pytest.mark.parametrize(("sample", "state"), EXAMPLES)
def test_the_first_reason_that_holds_is_why_requests_wait(sample: Sample, state: str) -> None:
    assert reason(sample).state == state


def test_every_reason_is_the_first_for_one_of_the_examples() -> None:
    assert {reason(sample) for sample, _ in EXAMPLES} == set(REASONS)


@given(SAMPLES)
def test_a_reason_is_always_one_state_of_admission(sample: Sample) -> None:
    assert reason(sample).state in {*STATES["admission"], UNKNOWN} - {"no_queue"}


@given(SAMPLES)
def test_nothing_waits_by_the_limit_or_the_ratio_beside_a_full_cache(sample: Sample) -> None:
    full = sample._replace(usage=0.95, for_grammar=False)
    assert reason(full).state in {"prefill_bound", "pool_full", "hybrid_pool_full", "pd_queue"}


@given(SAMPLES)
def test_the_ratio_is_blamed_where_nothing_else_can_be(sample: Sample) -> None:
    if reason(sample).state == "held_back":
        assert sample.usage is not None
        assert sample.usage < sample.target
        assert sample.fits
        others = (sample.full_batch, sample.for_grammar, sample.elsewhere, sample.waits_by, sample.passes, sample.early)
        assert not any(others)


@given(SAMPLES)
def test_the_limit_is_blamed_where_at_most_a_few_places_are_free(sample: Sample) -> None:
    if reason(sample).state == "running_limit":
        assert sample.running is not None
        assert sample.limit is not None
        assert sample.running + sample.joining >= min(0.95 * sample.limit, max(sample.limit - 1, 1))


@given(SAMPLES)
def test_standing_still_is_half_a_minute_without_a_start_and_no_long_prompt(sample: Sample) -> None:
    if reason(sample).state == "standing_still":
        assert sample.idle_seconds > 30
        assert not sample.continues


@given(SAMPLES)
def test_that_requests_wait_too_early_to_know_is_said_where_they_would_be_held_back(sample: Sample) -> None:
    if reason(sample) is EARLY:
        assert reason(sample._replace(early=False)).state == "held_back"
