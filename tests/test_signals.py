"""The state of each signal of a server."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tuning_exporter.state.profiles import PROFILES, Profile
from sglang_tuning_exporter.state.signals import (
    ALL_IDLE,
    ASSUMED_CAPTURED,
    NO_OTHER_WAITS,
    SIGNALS,
    STATES,
    Classifier,
    OtherWaits,
    Signal,
    named,
)


@dataclass(slots=True)
class Observation:
    """The figures of one scheduler at one moment. Usages are 0-1."""

    serving: bool
    running: float | None = None
    queued: float | None = None
    usage: float | None = None  # of the fullest pool
    prefill_full: bool = False
    graph: bool | None = None
    queue_wait_seconds: float | None = None  # inf when nothing was admitted for a whole window
    running_limit: float | None = None
    largest_captured: int = ASSUMED_CAPTURED
    without_graph: str = ""
    other_waits: OtherWaits = NO_OTHER_WAITS


def classify(seen: Observation, profile: Profile) -> dict[Signal, str]:
    """Judge one observation."""
    if not seen.serving:
        return named(ALL_IDLE)
    judge = Classifier(profile, seen.running_limit, seen.largest_captured, seen.without_graph)
    return named(
        judge.serving(
            seen.running,
            seen.queued,
            seen.usage,
            seen.graph,
            seen.prefill_full,
            lambda _: seen.queue_wait_seconds,
            0.0,
            seen.other_waits,
        )
    )


ONLINE, OFFLINE = PROFILES["online"], PROFILES["offline"]
BUSY = Observation(serving=True, running=8, queued=4, usage=0.5, graph=True, running_limit=64, largest_captured=256)


@given(
    st.builds(
        Observation,
        serving=st.booleans(),
        running=st.none() | st.floats(0, 1e5),
        queued=st.none() | st.floats(0, 1e5),
        usage=st.none() | st.floats(0, 1),
        graph=st.none() | st.booleans(),
        queue_wait_seconds=st.none() | st.floats(0, inf),
        running_limit=st.none() | st.floats(0, 1e5),
        largest_captured=st.integers(0, 1000),
        without_graph=st.sampled_from(["", "disabled", "unsupported"]),
        other_waits=st.just(NO_OTHER_WAITS)
        | st.builds(
            OtherWaits,
            grammar=st.floats(0, 1e4),
            disaggregation=st.floats(0, 1e4),
            per_second=st.none() | st.floats(0, 1e3),
            full_usage=st.none() | st.floats(0, 1),
            recovering=st.booleans(),
        ),
    ),
    st.sampled_from(list(PROFILES.values())),
)
def test_every_signal_is_always_in_one_of_its_states(seen: Observation, profile: Profile) -> None:
    states = classify(seen, profile)
    assert tuple(states) == SIGNALS
    assert all(states[signal] in STATES[signal] for signal in SIGNALS)


def test_a_server_with_nothing_to_do_is_idle_in_every_signal() -> None:
    assert set(classify(replace(BUSY, serving=False), ONLINE).values()) == {"idle"}


@pytest.mark.parametrize(
    ("queued", "state"),
    [
        (0, "empty"),
        (1, "below_range"),
        (99, "below_range"),
        (100, "in_range"),
        (2000, "in_range"),
        (2001, "above_range"),
    ],
)
def test_offline_the_queue_is_judged_by_its_length(queued: int, state: str) -> None:
    assert classify(replace(BUSY, queued=queued, queue_wait_seconds=inf), OFFLINE)["queue"] == state


@pytest.mark.parametrize(
    ("wait", "state"), [(None, "in_range"), (5.0, "in_range"), (5.1, "above_range"), (inf, "above_range")]
)
def test_online_the_queue_is_judged_by_the_wait_it_means(wait: float | None, state: str) -> None:
    assert classify(replace(BUSY, queue_wait_seconds=wait), ONLINE)["queue"] == state


def test_a_queue_that_is_not_exposed_is_unknown_and_so_is_its_cause() -> None:
    states = classify(replace(BUSY, queued=None), ONLINE)
    assert (states["queue"], states["admission"]) == ("unknown", "unknown")


@pytest.mark.parametrize(("usage", "state"), [(None, "unknown"), (0.89, "below_target"), (0.9, "at_target")])
def test_the_pool_is_well_used_from_nine_tenths_on(usage: float | None, state: str) -> None:
    assert classify(replace(BUSY, usage=usage), ONLINE)["token_usage"] == state


@pytest.mark.parametrize(
    ("seen", "state"),
    [
        (replace(BUSY, queued=0), "no_queue"),
        (BUSY, "held_back"),
        (replace(BUSY, usage=0.9), "pool_full"),
        (replace(BUSY, usage=None), "unknown"),
        (replace(BUSY, running=64), "running_limit"),
        (replace(BUSY, running=61), "running_limit"),
        (replace(BUSY, running=60), "held_back"),
        (replace(BUSY, running=64, usage=0.95), "running_limit"),
        (replace(BUSY, running=64, running_limit=None), "held_back"),
        (replace(BUSY, prefill_full=True), "prefill_bound"),
        (replace(BUSY, other_waits=OtherWaits(recovering=True)), "recovering"),
        (replace(BUSY, other_waits=OtherWaits(grammar=5)), "grammar_queue"),
        (replace(BUSY, other_waits=OtherWaits(grammar=4)), "held_back"),
        (replace(BUSY, queued=0, other_waits=OtherWaits(grammar=1)), "grammar_queue"),
        (replace(BUSY, other_waits=OtherWaits(disaggregation=8)), "held_back"),  # as many as run
        (replace(BUSY, other_waits=OtherWaits(disaggregation=9)), "pd_queue"),
        (replace(BUSY, other_waits=OtherWaits(grammar=5, disaggregation=9)), "pd_queue"),
        (replace(BUSY, other_waits=OtherWaits(disaggregation=50, per_second=10.0)), "held_back"),  # 5 s
        (replace(BUSY, other_waits=OtherWaits(disaggregation=51, per_second=10.0)), "pd_queue"),
        (replace(BUSY, other_waits=OtherWaits(disaggregation=5, per_second=0.0)), "pd_queue"),
        (replace(BUSY, queued=0, prefill_full=True, other_waits=OtherWaits(disaggregation=9)), "prefill_bound"),
        (replace(BUSY, usage=0.95, other_waits=OtherWaits(disaggregation=5)), "pool_full"),
        (replace(BUSY, usage=0.95, other_waits=OtherWaits(full_usage=0.3)), "hybrid_pool_full"),
        (replace(BUSY, usage=0.95, other_waits=OtherWaits(full_usage=0.95)), "pool_full"),
    ],
)
def test_the_reason_why_requests_wait_is_named(seen: Observation, state: str) -> None:
    assert classify(seen, ONLINE)["admission"] == state


@pytest.mark.parametrize(
    ("seen", "state"),
    [
        (BUSY, "replayed"),
        (replace(BUSY, graph=None), "unknown"),
        (replace(BUSY, graph=False), "eager"),
        (replace(BUSY, graph=False, running=256), "eager"),
        (replace(BUSY, graph=False, running=257), "beyond_captured"),
        (replace(BUSY, graph=False, running=257, without_graph="disabled"), "disabled"),
        (replace(BUSY, graph=False, running=257, without_graph="unsupported"), "unsupported"),
    ],
)
def test_a_batch_without_a_graph_is_classified_by_its_reason(seen: Observation, state: str) -> None:
    assert classify(seen, ONLINE)["cuda_graph"] == state
