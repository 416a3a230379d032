"""Findings from given figures: each row is found just above its threshold, and silent just below."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_tuning_exporter.diagnosis.conditions.memory import Failures
from sglang_tuning_exporter.diagnosis.conditions.share import STATE_WORDS, Share
from sglang_tuning_exporter.diagnosis.evidence import Past
from sglang_tuning_exporter.diagnosis.findings import Finding, judge
from sglang_tuning_exporter.diagnosis.table import BY_ID, DIAGNOSES
from sglang_tuning_exporter.diagnosis.wording import verdict_text
from sglang_tuning_exporter.sglang.events import OUT_OF_MEMORY_PHASES
from sglang_tuning_exporter.state.facts import ServerFacts
from sglang_tuning_exporter.state.latency import Latency, RecentLatency
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.signals import IDLE, SIGNALS, STATES, UNKNOWN, Signal
from sglang_tuning_exporter.state.totals import Totals

if TYPE_CHECKING:
    from collections.abc import Mapping

SHARE_ROWS = [(row.id, row.condition) for row in DIAGNOSES if isinstance(row.condition, Share)]
FAILURE_ROWS = [(row.id, row.condition) for row in DIAGNOSES if isinstance(row.condition, Failures)]
# The states in which nothing is wrong; no row is about the state `other`.
QUIET: dict[Signal, str] = {
    "activity": "serving",
    "queue": "in_range",
    "token_usage": "below_target",
    "admission": "no_queue",
    "cuda_graph": "replayed",
}
ARGS: dict[str, object] = {
    "schedule_conservativeness": 1.0,
    "mem_fraction_static": 0.85,
    "max_running_requests": 64,
    "chunked_prefill_size": 8192,
    "cuda_graph_max_bs": 160,
    "device": "cuda",
}
# Arguments that a row needs beside its state, so that there is a flag to change.
APT: dict[str, dict[str, object]] = {
    "admission_recovering": {"schedule_conservativeness": 0.1},
    "running_far_below_limit": {"max_running_requests": 4096, "kv_cache_dtype": "auto"},
}
NO_ARGS: Mapping[str, object] = {}
NO_SHARES: Mapping[tuple[Signal, str], float] = {}


def totals(
    served: float = 200.0, observations: int = 100, shares: Mapping[tuple[Signal, str], float] = NO_SHARES
) -> Totals:
    """Give totals of `served` seconds: each signal is in its quiet state, except for the given shares."""
    made = Totals()
    for signal in SIGNALS:
        spread = {state: share * served for (of, state), share in shares.items() if of == signal}
        made.seconds[signal, QUIET[signal]] = served - sum(spread.values())
        for state, spent in spread.items():
            made.seconds[signal, state] += spent
    made.integrals.update(usage=0.3 * served, usage_seconds=served, running=20 * served, running_seconds=served)
    made.running_seconds[200] = served
    made.counts["observations"] = observations
    return made


def past(
    recent: Totals | None = None,
    *,
    failures: Mapping[str, int] | None = None,
    profile: str = "offline",
    reserve: float | None = None,
    watched: float = 600.0,
    args: Mapping[str, object] = NO_ARGS,
    **more: object,
) -> Past:
    facts = ServerFacts(args={**ARGS, **args, **more})
    if reserve is not None:
        facts.available_gb[None] = reserve
        facts.memory_before_weights_gb = 80.0
    return Past(recent or totals(), failures or {}, watched, facts, PROFILES[profile])


def findings(of: Past) -> tuple[Finding, ...]:
    return judge(of).findings


def ids(of: Past) -> list[str]:
    return [finding.diagnosis.id for finding in findings(of)]


def retracted(count: float, served: float = 120.0) -> Past:
    recent = totals(served)
    recent.counts["retraction_events"] = count
    return past(recent)


def test_a_past_in_which_nothing_is_wrong_has_no_findings() -> None:
    assert ids(past()) == []


@pytest.mark.parametrize(
    ("signal", "state", "share", "slow"),
    [
        ("admission", "pool_full", 0.2, False),
        ("admission", "running_limit", 0.2, False),
        ("admission", "prefill_bound", 0.2, False),
        ("admission", "running_limit", 0.05, True),
        ("admission", "held_back", 0.2, True),
        ("token_usage", "at_target", 0.6, False),
        ("token_usage", "at_target", 0.4, True),
    ],
)
def test_clients_are_not_too_slow_where_something_else_is_reached(
    signal: Signal,
    state: str,
    share: float,
    slow: bool,  # noqa: FBT001
) -> None:
    found = ids(past(totals(shares={("queue", "empty"): 0.7, (signal, state): share})))
    assert ("client_too_slow" in found) is slow


@pytest.mark.parametrize(
    ("sizes", "limit", "held_back"),
    [
        ({2: 200.0}, None, False),  # a limit of an unknown name
        ({2: 200.0}, 64.0, True),
        ({40: 60.0, 41: 80.0, 43: 60.0}, None, True),
    ],
)
def test_where_the_running_limit_is_not_known_a_batch_of_one_size_is_not_held_back(
    sizes: dict[int, float],
    limit: float | None,
    held_back: bool,  # noqa: FBT001
) -> None:
    recent = totals(shares={("admission", "held_back"): 0.9})
    recent.running_seconds.clear()
    recent.running_seconds.update(sizes)
    found = ids(past(recent, max_running_requests=limit))
    assert ("admission_too_conservative" in found) is held_back


@pytest.mark.parametrize(("diagnosis", "condition"), SHARE_ROWS)
def test_a_state_held_more_than_half_of_the_serving_time_is_a_finding_and_half_is_none(
    diagnosis: str, condition: Share
) -> None:
    for share, expected in ((0.51, True), (0.5, False)):
        for state in condition.states:
            found = ids(past(totals(shares={(condition.signal, state): share}), args=APT.get(diagnosis, {})))
            assert (diagnosis in found) is expected


@pytest.mark.parametrize(("diagnosis", "condition"), FAILURE_ROWS)
def test_one_out_of_memory_failure_is_a_finding_even_without_load(diagnosis: str, condition: Failures) -> None:
    for phase in condition.phases:
        assert ids(past(Totals(), failures={phase: 1})) == [diagnosis]


@pytest.mark.parametrize(
    ("reserve", "expected"),
    [
        (4.99, ["memory_reserve_too_small"]),
        (5.0, []),
        (8.0, []),
        (10.0, []),
        (10.01, ["memory_reserve_too_large"]),
        (None, []),
    ],
)
def test_a_reserve_outside_the_range_is_a_finding_and_eight_to_ten_is_neither(
    reserve: float | None, expected: list[str]
) -> None:
    assert ids(past(reserve=reserve)) == expected


@pytest.mark.parametrize(("count", "expected"), [(2, []), (3, ["retracting_too_often"])])
def test_one_retraction_a_minute_is_tolerated_and_more_is_not(count: int, expected: list[str]) -> None:
    assert ids(retracted(count)) == expected


def test_one_burst_in_half_a_minute_of_load_is_judged_as_a_minute() -> None:
    assert ids(retracted(1, served=30.0)) == []


def test_with_metrics_alone_retracted_requests_are_the_rate() -> None:
    recent = totals(120.0)
    recent.counts["native_retracted_requests"] = 3
    assert ids(past(recent)) == ["retracting_too_often"]


def test_the_rate_is_the_whole_servers_however_many_schedulers_served() -> None:
    recent = totals(8 * 600.0)
    recent.counts["retraction_events"] = 13
    assert ids(past(recent)) == ["retracting_too_often"]


@pytest.mark.parametrize(
    ("served", "observations", "seen"), [(200.0, 9, "there are 200 s and 9 in"), (12.0, 80, "there are 12 s and 80 in")]
)
def test_an_undecided_verdict_names_the_missing_seconds_and_observations(
    served: float, observations: int, seen: str
) -> None:
    text = verdict_text(judge(past(totals(served, observations))), None, lambda _: None)
    assert "needs 20 s under load and 10 observations" in text.remark
    assert seen in text.remark
    assert "Too little load was seen" in text.sentence  # the load itself may be heavy


@pytest.mark.parametrize(
    ("served", "observations", "expected"),
    [(20.0, 10, ["queue_too_long"]), (19.9, 10, []), (20.0, 9, [])],
)
def test_twenty_seconds_and_ten_observations_are_enough_and_less_is_not(
    served: float, observations: int, expected: list[str]
) -> None:
    assert ids(past(totals(served, observations, {("queue", "above_range"): 0.9}))) == expected


def test_retractions_without_enough_load_are_no_finding() -> None:
    assert ids(retracted(30, served=19.0)) == []


@pytest.mark.parametrize(
    ("conservativeness", "started", "expected"),
    [
        (1.3, 801, []),
        (2.0, 801, []),
        (1.3, 799, ["retracting_too_often"]),
        (2.0, 799, ["conservativeness_ineffective"]),
        (1.0, 801, ["retracting_too_often"]),
        (0.3, 801, []),  # lowered on advice, which says that a few may appear
        (0.3, 799, ["retracting_too_often"]),
        (0.1, 801, ["retracting_too_often"]),
        (1.3, None, ["retracting_too_often"]),
    ],
)
def test_one_retraction_in_twenty_requests_without_a_remedy_by_a_flag_is_no_alert(
    conservativeness: float, started: int | None, expected: list[str]
) -> None:
    of = retracted(40)
    of.facts.args["schedule_conservativeness"] = conservativeness
    if started is not None:
        of.recent.counts["started_requests"] = started
    assert ids(of) == expected
    assert judge(of).verdict == (expected or ["no_clear_bottleneck"])[0]


def test_serving_seconds_of_eight_schedulers_are_not_more_than_the_watched_seconds() -> None:
    assert ids(past(totals(80.0, shares={("queue", "above_range"): 0.9}), watched=10.0)) == []


def test_an_empty_queue_is_a_finding_offline_only() -> None:
    empty = totals(shares={("queue", "empty"): 1.0})
    assert ids(past(empty)) == ["client_too_slow"]
    for profile in ("online", "long_context", "multi_turn"):
        assert ids(past(empty, profile=profile)) == []


def test_a_server_that_retracts_and_holds_requests_back_is_advised_only_to_raise_conservativeness() -> None:
    recent = totals(shares={("admission", "held_back"): 0.91})
    recent.counts["retraction_events"] = 15
    (finding,) = findings(past(recent, schedule_conservativeness=0.1))
    assert finding.diagnosis.id == "retracting_too_often"
    assert [(advice.flag, advice.current, advice.suggested) for advice in finding.advice] == [
        ("--schedule-conservativeness", 0.1, 1.3)
    ]


def test_requests_held_back_by_prompts_are_not_held_back_by_conservativeness() -> None:
    recent = totals(shares={("admission", "held_back"): 0.9})
    assert ids(past(recent)) == ["admission_too_conservative"]
    assert ids(past(totals(shares={("admission", "prefill_bound"): 0.9}))) == ["prefill_bound"]


def test_no_memory_is_given_to_the_pool_after_a_failure() -> None:
    assert ids(past(reserve=15.0, failures={"prefill": 1})) == ["out_of_memory_prefill"]


def test_no_memory_is_given_to_the_pool_where_larger_graphs_need_it() -> None:
    recent = totals(shares={("cuda_graph", "beyond_captured"): 0.9})
    assert ids(past(recent, reserve=15.0)) == ["cuda_graph_not_covering"]
    assert ids(past(recent, reserve=3.0)) == ["cuda_graph_not_covering", "memory_reserve_too_small"]


def test_a_failure_is_reported_even_if_no_advice_is_left() -> None:
    (finding,) = findings(past(failures={"startup": 1}, mem_fraction_static=0.1))
    assert (finding.diagnosis.id, finding.advice) == ("out_of_memory_any", ())


def test_a_flag_where_the_guide_wants_it_is_not_advised_again_for_requests_held_back() -> None:
    held_back = past(totals(shares={("admission", "held_back"): 0.9}), schedule_conservativeness=0.3)
    (finding,) = findings(held_back)
    assert finding.diagnosis.id == "admission_too_conservative"
    assert judge(held_back).changes == {}


def test_findings_come_in_the_order_of_urgency_of_the_table() -> None:
    recent = totals(shares={("queue", "above_range"): 0.9, ("admission", "running_limit"): 0.9})
    found = ids(past(recent, failures={"prefill": 1, "startup": 1}, reserve=3.0))
    places = [list(BY_ID).index(each) for each in found]
    # The reserve is left to the failure, which sets its flag already; after a failure the running limit is not raised.
    assert len(found) == 3
    assert all(before < after for before, after in pairwise(places))


@pytest.mark.parametrize(("served", "expected"), [(59.0, "low"), (60.0, "medium"), (120.0, "high")])
def test_confidence_grows_with_the_time_served(served: float, expected: str) -> None:
    (finding,) = findings(past(totals(served, shares={("queue", "above_range"): 1.0})))
    assert finding.confidence == expected


@pytest.mark.parametrize(
    ("of", "sentence"),
    [
        (
            past(totals(shares={("queue", "above_range"): 0.91})),
            "91 % of the serving time with more than 2000 requests waiting",
        ),
        (retracted(9), "4.5 retractions/min"),
        (past(failures={"prefill": 2}), "2 out-of-memory failures in prefill"),
        (past(reserve=4.64), "4.6 GB free on the GPU at start-up"),
    ],
)
def test_a_finding_has_its_evidence_with_the_figure(of: Past, sentence: str) -> None:
    (finding,) = findings(of)
    assert finding.sentence == sentence


def test_a_finding_names_the_threshold_in_force() -> None:
    of = past(totals(shares={("admission", "held_back"): 0.91}))
    of = replace(of, profile=of.profile.with_thresholds({"token_usage_target": 0.8}))
    assert "token usage below 0.8" in findings(of)[0].sentence


def judged(of: Past) -> str:
    return judge(of).verdict


def test_the_verdict_is_the_most_urgent_finding() -> None:
    recent = totals(shares={("admission", "running_limit"): 0.9, ("queue", "above_range"): 0.9})
    assert judged(past(recent)) == "running_at_limit"


def test_mere_information_is_no_verdict_but_a_slow_client_is() -> None:
    empty = totals(shares={("queue", "empty"): 1.0})
    assert judged(past(empty, reserve=15.0, profile="online")) == "healthy"
    assert judged(past(empty, reserve=15.0)) == "client_too_slow"


def test_an_empty_queue_online_is_healthy() -> None:
    assert judged(past(totals(shares={("queue", "empty"): 0.8}), profile="online")) == "healthy"


def test_a_queue_for_a_third_of_the_time_is_neither_healthy_nor_a_finding() -> None:
    recent = totals(shares={("queue", "empty"): 0.65, ("queue", "above_range"): 0.35})
    assert judged(past(recent, profile="online")) == "no_clear_bottleneck"


def test_a_queue_in_the_guides_range_is_healthy_offline_and_undecided_online() -> None:
    assert (judged(past()), judged(past(profile="online"))) == ("healthy", "no_clear_bottleneck")


def test_requests_held_back_without_a_flag_to_change_are_not_healthy() -> None:
    recent = totals(shares={("admission", "held_back"): 0.9})
    assert judged(past(recent, schedule_conservativeness=0.3)) == "admission_too_conservative"


def test_no_more_requests_are_let_in_while_some_are_taken_back() -> None:
    recent = totals(shares={("admission", "running_limit"): 0.9})
    assert ids(past(recent)) == ["running_at_limit"]
    recent.counts["retraction_events"] = 50
    assert ids(past(recent)) == ["retracting_too_often"]


def test_a_server_with_nothing_to_do_is_idle() -> None:
    recent = totals(5.0)
    recent.seconds["activity", "idle"] = 100.0
    assert judged(past(recent)) == "idle"


def test_a_server_that_served_too_little_has_not_enough_data() -> None:
    assert (judged(past(totals(5.0))), judged(past(Totals()))) == ("not_enough_data", "not_enough_data")


_args: st.SearchStrategy[dict[str, object]] = st.fixed_dictionaries(
    {
        "schedule_conservativeness": st.sampled_from([None, 0.03, 0.1, 0.3, 0.39, 1.0, 1.299, 1.3, 1.5, 4.33]),
        "mem_fraction_static": st.none() | st.floats(0.05, 0.99).map(lambda value: round(value, 3)),
        "max_running_requests": st.none() | st.integers(1, 5000),
        "chunked_prefill_size": st.sampled_from([None, -1, 512, 2048, 2049, 4096, 8192]),
        "cuda_graph_max_bs": st.none() | st.integers(1, 800),
        "enable_dp_attention": st.booleans(),
        "dp_size": st.sampled_from([1, 2, 8]),
        "tp_size": st.sampled_from([1, 8]),
    }
)


@st.composite
def _pasts(draw: st.DrawFn) -> Past:
    recent = Totals()
    for signal in SIGNALS:
        for state in STATES[signal]:
            recent.seconds[signal, state] = draw(st.sampled_from([0.0, 1.0, 50.0, 1000.0]))
    served = max(recent.serving_seconds(), 1.0)
    recent.counts.update(observations=50, retraction_events=draw(st.sampled_from([0, 1, 500])))
    if draw(st.booleans()):
        recent.integrals.update(usage=served * draw(st.floats(0, 1)), usage_seconds=served)
        recent.running_seconds[draw(st.integers(1, 4000))] = served
    facts = ServerFacts(args=draw(_args))
    if draw(st.booleans()):
        facts.running_limits = {None: draw(st.integers(1, 4096))}
    if draw(st.booleans()):
        facts.available_gb = {None: draw(st.floats(0, 100))}
        facts.memory_before_weights_gb = draw(st.none() | st.floats(8, 300))
    failures: dict[str, int] = {phase: draw(st.integers(0, 1)) for phase in OUT_OF_MEMORY_PHASES}
    return Past(recent, failures, 600.0, facts, PROFILES[draw(st.sampled_from(list(PROFILES)))])


@settings(max_examples=150)
@given(_pasts())
def test_no_flag_is_both_raised_and_lowered_nor_set_to_its_present_value(of: Past) -> None:
    found = findings(of)
    advice = [each for finding in found for each in finding.advice if each.arg]
    # What follows from a cause names the cause's flag, with the same value.
    assert len({each.arg for each in advice}) == len({(each.arg, each.suggested) for each in advice})
    assert all(each.suggested != each.current for each in advice if each.suggested is not None)
    for each in advice:
        if not isinstance(each.suggested, float) or not isinstance(each.current, float):
            continue
        if each.arg == "mem_fraction_static" and each.suggested > each.current:
            assert not any(of.event_counts.values())
        if each.arg == "schedule_conservativeness" and each.suggested < each.current:
            assert of.retractions_per_minute <= of.profile.retractions_per_minute
        assert each.suggested > 0 or each.is_switch
    assert judge(of).verdict in {*BY_ID, "healthy", "idle", "no_clear_bottleneck", "not_enough_data"}


def test_a_share_of_any_state_of_a_server_has_words() -> None:
    known = {state for states in STATES.values() for state in states} - {IDLE, UNKNOWN}
    assert known <= set(STATE_WORDS)


def test_retractions_are_shown_with_the_token_usage_just_before_them() -> None:
    of = retracted(10)
    of.recent.counts.update(usage_before_retractions=9.9, retractions_with_usage=10.0)
    (finding,) = findings(of)
    assert [(each.name, round(each.value, 2), each.threshold) for each in finding.evidence[1:]] == [
        ("token usage just before retractions, mean of 10 of 10", 0.99, 0.9)
    ]


def test_a_low_mean_token_usage_is_no_evidence_of_a_full_kv_cache() -> None:
    (finding,) = findings(retracted(10))
    assert [each.name for each in finding.evidence] == ["retractions per minute of serving time"]


def test_a_full_kv_cache_is_shown_by_a_prompt_that_does_not_fit() -> None:
    recent = totals(shares={("admission", "pool_full"): 0.9})
    recent.counts.update(computed_tokens=80_000.0, new_sequences=100.0)
    of = past(recent, max_running_requests=4096, kv_cache_dtype="auto")
    of.facts.kv_pool_tokens[None] = 1000.0
    (finding,) = [each for each in findings(of) if each.diagnosis.id == "running_far_below_limit"]
    (shown,) = [each for each in finding.evidence if "prompt" in each.name]
    assert (shown.value, shown.threshold) == (800.0, 700.0)
    assert "mean token usage" not in [each.name for each in finding.evidence]


def test_a_queue_that_is_judged_by_its_wait_is_shown_with_that_wait_and_its_limit() -> None:
    recent = totals(shares={("queue", "above_range"): 0.9})
    recent.integrals.update(queued=40 * 200.0, queued_seconds=200.0)
    recent.counts["new_sequences"] = 800.0
    (finding,) = [each for each in findings(past(recent, profile="online")) if each.diagnosis.id == "queue_too_long"]
    assert [(each.name, each.value, each.threshold) for each in finding.evidence[1:]] == [
        ("estimated wait in the queue", 10.0, 5.0)
    ]
    assert finding.sentence == "90 % of the serving time with an estimated wait above 5 s"


def test_a_kv_cache_that_is_kept_small_by_a_flag_is_named_beside_retractions() -> None:
    of = retracted(10)
    of.facts.args["max_total_tokens"] = 1500
    of.facts.kv_pool_tokens[None] = 1500.0
    (finding,) = findings(of)
    assert [each.typed or each.suggestion for each in finding.advice] == [
        "--schedule-conservativeness 1.3",
        "or enlarge the KV cache: raise --max-total-tokens, now 1500, to 3000, or remove it",
    ]
    assert "--max-total-tokens" in finding.advice[1].why
    out_of_memory = replace(of, event_counts={"decode": 1})
    advised = [each for found in findings(out_of_memory) for each in found.advice]
    assert not [each for each in advised if "--max-total-tokens" in each.suggestion]


def burning(latency: Latency = "time_to_first_token", profile: str = "online") -> Past:
    """Give a server whose queue is too long and half of whose first tokens are late."""
    recent = totals(served=600.0, shares={("queue", "above_range"): 1.0, ("admission", "running_limit"): 1.0})
    late = RecentLatency(500.0, 250.0, 9.0, 8.0, 10.0, 7.0)
    return replace(past(recent, profile=profile), latency={latency: late, "time_to_first_token": late})


def test_an_objective_that_burns_fast_is_not_listed_again_as_burning_slowly() -> None:
    found = [each.diagnosis.id for each in findings(burning())]
    assert "time_to_first_token_burning_fast" in found
    assert "time_to_first_token_burning_slow" not in found


def test_an_objective_that_burns_has_the_advice_of_its_cause() -> None:
    found = {each.diagnosis.id: each for each in findings(burning())}
    assert found["running_at_limit"].advice
    assert found["time_to_first_token_burning_fast"].advice == found["running_at_limit"].advice


def test_evidence_without_a_figure_is_a_sentence() -> None:
    words = "its /metrics could not be scraped (connection refused)"
    down = replace(past(), troubles=frozenset({"server_down"}), words={"server_down": words})
    (found,) = [each for each in findings(down) if each.diagnosis.id == "server_down"]
    assert [each.name for each in found.evidence] == [words]
    (found,) = [
        each
        for each in findings(replace(past(), troubles=frozenset({"log_silent"})))
        if each.diagnosis.id == "log_silent"
    ]
    assert [each.name for each in found.evidence] == ["the log has no new batch lines"]


LIMIT: tuple[Signal, str] = ("admission", "running_limit")


def burst(*, queued: float = 20.0) -> Past:
    """A third of the time requests wait at --max-running-requests 16; a third of the first tokens are late."""
    recent = totals(shares={("queue", "empty"): 0.65, ("queue", "above_range"): 0.35, LIMIT: 0.35})
    recent.integrals.update(queued=queued * 200.0, queued_seconds=200.0)
    recent.counts["started_requests"] = 2000.0
    of = past(recent, profile="online", max_running_requests=16)
    return replace(of, latency={"time_to_first_token": RecentLatency(2000.0, 700.0, 2.4, 0.1, 6.0, 0.05)})


def test_first_tokens_that_come_late_after_a_burst_waited_in_the_queue() -> None:
    found = {finding.diagnosis.id: finding.advice for finding in findings(burst())}
    assert found.keys() == {"latency_queue", "time_to_first_token_burning_fast"}
    assert [[each.flag for each in advice] for advice in found.values()] == 2 * [["--max-running-requests"]]


def test_late_first_tokens_beside_a_short_queue_are_put_down_to_the_prompts() -> None:
    late = {check.diagnosis.id: check.evidence for check in judge(burst(queued=1.0)).checks}
    held = {row for row, evidence in late.items() if evidence is not None and evidence.holds}
    assert held & {"latency_queue", "latency_long_prompts"} == {"latency_long_prompts"}
