"""Whole recordings of a real server through the pure core: log and scrapes in, verdict and advice out.

Time is the position in the recording; no process, no socket and no clock takes part.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

import sglang_tuning_exporter
from sglang_tuning_exporter.diagnosis.evidence import past_of
from sglang_tuning_exporter.diagnosis.findings import Finding, judge
from sglang_tuning_exporter.recordings.recording import Recording, load
from sglang_tuning_exporter.sglang.log.reader import LogReader
from sglang_tuning_exporter.sglang.metrics import page_figures as facts
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.server import ServerState
from sglang_tuning_exporter.state.signals import SIGNALS

PACKAGED = Path(sglang_tuning_exporter.__file__).parent / "recordings"
OWN = Path(__file__).parent / "recordings"
NAMES = ("retract", "steady", "big_queue", "client_limited", "dp2", "restart_append")
SOURCES = ("both", "log", "metrics")


@cache
def recording(name: str) -> Recording:
    return load((PACKAGED if (PACKAGED / name).is_dir() else OWN) / name)


@cache
def watched(name: str, profile: str = "online", sources: str = "both") -> ServerState:
    recorded, reader = recording(name), LogReader()
    state = ServerState(PROFILES[profile], 0.0)
    lines = [] if sources == "metrics" else [(line.at, 0, line.text) for line in recorded.lines]
    scrapes = [] if sources == "log" else [(scrape.at, 1, scrape.text) for scrape in recorded.scrapes]
    for at, is_scrape, text in sorted(lines + scrapes, key=lambda piece: piece[:2]):
        if is_scrape:
            state.observe_scrape(facts.read(text.decode()), at)
        else:
            for event in reader.feed(text):
                state.observe(event, at)
    state.advance(recorded.length_seconds)
    return state


def judged(name: str, profile: str = "online", sources: str = "both") -> tuple[str, tuple[Finding, ...]]:
    state, now = watched(name, profile, sources), recording(name).length_seconds
    judgement = judge(past_of(state, now))
    return judgement.verdict, judgement.findings


def advised(found: tuple[Finding, ...]) -> dict[str, tuple[float | str | None, float | str | None]]:
    return {advice.flag: (advice.current, advice.suggested) for each in found for advice in each.advice if advice.flag}


def test_the_retracting_server_is_advised_to_raise_its_conservativeness_and_nothing_against_it() -> None:
    word, found = judged("retract")
    assert word == "retracting_too_often"
    assert advised(found) == {"--schedule-conservativeness": (0.1, 1.3)}
    assert "admission_too_conservative" not in {each.diagnosis.id for each in found}


@pytest.mark.parametrize("sources", SOURCES)
def test_the_retractions_are_found_by_log_and_by_metrics_alone(sources: str) -> None:
    assert judged("retract", "online", sources)[0] == "retracting_too_often"


def test_ten_retractions_are_ten_events() -> None:
    state = watched("retract")
    assert state.totals().counts["retraction_events"] == 10
    assert state.totals().counts["native_retracted_requests"] == 10


def test_by_shares_of_time_alone_the_retracting_server_would_be_advised_to_lower_the_flag() -> None:
    shares = [watched("retract").totals().share("admission", state) or 0.0 for state in ("held_back", "recovering")]
    assert sum(shares) > 0.5


def test_the_retracting_server_mostly_waits_because_retractions_raised_its_token_ratio() -> None:
    recovering = watched("retract").totals().share("admission", "recovering")
    assert recovering is not None
    assert recovering > 0.5


def test_the_steady_server_has_nothing_to_change() -> None:
    word, found = judged("steady")
    assert word == "healthy"
    assert [each for each in found if each.diagnosis.severity != "info"] == []


@pytest.mark.parametrize("profile", ["online", "offline"])
def test_a_full_running_limit_is_not_taken_for_a_careful_admission(profile: str) -> None:
    word, found = judged("big_queue", profile)
    assert word == "running_at_limit"
    assert advised(found) == {"--max-running-requests": (2, 16)}


def test_one_request_at_a_time_is_a_slow_client_offline_and_nothing_online() -> None:
    assert judged("client_limited", "offline")[0] == "client_too_slow"
    assert judged("client_limited", "online") == ("healthy", ())


def test_two_data_parallel_ranks_are_healthy_each() -> None:
    assert judged("dp2") == ("healthy", ())
    state = watched("dp2")
    assert sorted(state.ranks, key=str) == [0, 1]
    assert all(rank.totals.serving_seconds() > 20.0 for rank in state.ranks.values())


def test_a_restart_into_the_same_log_is_two_starts_and_loses_no_count() -> None:
    state = watched("restart_append")
    assert state.starts == 2
    assert judged("restart_append") == ("healthy", ())
    only_second = ServerState(PROFILES["online"], 0.0)
    reader = LogReader()
    for line in recording("restart_append").lines:
        for event in reader.feed(line.text):
            if type(event).__name__ == "ServerArgs" and only_second.starts:
                only_second = ServerState(PROFILES["online"], line.at)
            only_second.observe(event, line.at)
    log_only = watched("restart_append", sources="log").totals().counts["eager"]
    assert 0 < only_second.totals().counts["eager"] < log_only


def test_a_restart_seen_only_in_the_metrics_is_counted_as_well() -> None:
    assert watched("restart_append", sources="metrics").starts == 1  # the second: the first was before the first scrape


@pytest.mark.parametrize("sources", SOURCES)
@pytest.mark.parametrize("name", NAMES)
def test_the_seconds_of_every_signal_add_up_to_the_time_watched(name: str, sources: str) -> None:
    state = watched(name, "online", sources)
    for rank in state.ranks.values():
        spent = [
            sum(value for (of, _), value in rank.totals.seconds.items() if of == signal and value) for signal in SIGNALS
        ]
        assert spent == pytest.approx([spent[0]] * len(SIGNALS))
        assert 0.0 < spent[0] <= recording(name).length_seconds + 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_a_cpu_server_gets_no_advice_about_its_gpu(name: str) -> None:
    state = watched(name)
    assert (state.facts.reserve_gb, state.facts.without_graph) == (None, "unsupported")
    assert state.totals().seconds["cuda_graph", "eager"] == 0.0


@pytest.mark.parametrize("name", ["retract", "steady", "client_limited"])
def test_log_and_metrics_count_the_same_decode_batches(name: str) -> None:
    by_log = watched(name, "online", "log").totals().counts["eager"]
    by_server = watched(name, "online", "metrics").totals().counts["eager"]
    assert by_log <= by_server < by_log + 80  # a line for forty batches
