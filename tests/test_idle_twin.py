"""A server alone and the same server beside an idle DP rank get the same diagnosis."""

from __future__ import annotations

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from sglang_tuning_exporter.diagnosis.evidence import past_of
from sglang_tuning_exporter.diagnosis.findings import Judgement, judge
from sglang_tuning_exporter.sglang.events import (
    DecodeBatch,
    Limits,
    PrefillBatch,
    Rank,
    RankFigures,
    Retraction,
    Scrape,
    ServerArgs,
)
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.server import ServerState

# A server with a DP rank has that in its arguments: both have, and only one has the second rank.
ARGS = {"dp_size": 2, "schedule_conservativeness": 1.0, "chunked_prefill_size": 2048, "max_running_requests": 64}
STEPS = st.lists(
    st.tuples(
        st.sampled_from([1.0, 2.0, 5.0, 15.0]),
        st.integers(0, 64),  # running
        st.sampled_from([0, 0, 1, 30, 500]),  # queued
        st.sampled_from([0.02, 0.3, 0.6, 0.95]),
        st.sampled_from(["decode", "prefill", "full prefill", "retraction", "decode"]),
    ),
    min_size=5,
    max_size=80,
)


def lines(steps: list[tuple[float, int, int, float, str]], dp: int | None) -> list[tuple[float, object]]:
    now = 0.0
    events: list[tuple[float, object]] = []
    rank = Rank(dp=dp)
    for step, running, queued, usage, kind in steps:
        now += step
        event: object
        if kind == "retraction":
            event = Retraction(None, rank, 1, ratio_before=0.2, ratio_after=0.7)
        elif kind == "decode":
            event = DecodeBatch(None, rank, running, queued, 100, usage, generation_throughput=100.0, graph=True)
        else:
            event = PrefillBatch(None, rank, 2, 2048 if "full" in kind else 60, 0, running, queued, full_usage=usage)
        events.append((now, event))
    return events


def judged(events: list[tuple[float, object]], profile: str, twin: bool) -> Judgement:  # noqa: FBT001
    state = ServerState(PROFILES[profile], 0.0)
    state.observe(ServerArgs(None, Rank(), dict(ARGS)), 0.0)
    for dp in (0, 1) if twin else (0,):
        state.observe(Limits(None, Rank(dp=dp), 10_000, 32, available_gb=6.5, memory_device="gpu"), 0.0)
    now = 0.0
    for now, event in events:
        state.observe(event, now)  # type: ignore[arg-type]  # each is an event
        if twin:
            state.observe_scrape(Scrape([RankFigures(1, 0.0, 0.0, full_usage=0.0)]), now)
        state.advance(now)
    return judge(past_of(state, now))


@settings(max_examples=60)
@example(  # a request waits for a short time, on the one rank whose rate of admission is known
    [(1.0, 0, 0, 0.02, "decode") for _ in range(6)]
    + [(1.0, 0, 0, 0.02, "full prefill"), (5.0, 0, 0, 0.02, "prefill"), (5.0, 0, 1, 0.02, "full prefill")]
    + [(15.0, 0, 0, 0.02, "decode")],
    "long_context",
)
@given(STEPS, st.sampled_from(sorted(PROFILES)))
def test_an_idle_rank_changes_neither_verdict_nor_findings_nor_figures(
    steps: list[tuple[float, int, int, float, str]], profile: str
) -> None:
    events = lines(steps, 0)
    alone, beside = judged(events, profile, twin=False), judged(events, profile, twin=True)
    # An idle rank beside one whose requests wait is a finding of its own.
    assume("dp_imbalanced" not in {found.diagnosis.id for found in beside.findings})
    assert _found(beside) == _found(alone)
    assert beside.past.served_seconds == pytest.approx(alone.past.served_seconds)


def _found(judgement: Judgement) -> tuple[str, list[tuple[str, float, list[str]]]]:
    found = [
        (f.diagnosis.id, round(f.evidence[0].value, 9), [a.typed or a.suggestion for a in f.advice])
        for f in judgement.findings
    ]
    return judgement.verdict, found
