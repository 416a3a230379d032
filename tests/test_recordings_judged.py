"""Recorded servers are judged by how they really ran: by log and metrics, and by each alone."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

import sglang_tuning_exporter
from sglang_tuning_exporter.core.findings import Finding, Judgement
from sglang_tuning_exporter.core.watch import Watch
from sglang_tuning_exporter.recordings.recording import Recording, load
from watched import end_of, watched

PACKAGED = Path(sglang_tuning_exporter.__file__).parent / "recordings"
OWN = Path(__file__).parent / "recordings"
NAMES = ("retract", "steady", "big_queue", "client_limited", "dp2", "restart_append")
SOURCES = ("both", "log", "metrics")


@cache
def recording(name: str) -> Recording:
    return load((PACKAGED if (PACKAGED / name).is_dir() else OWN) / name)


@cache
def watch_of(name: str, profile: str = "online", sources: str = "both") -> Watch:
    return watched(recording(name), profile, sources)


def judged(name: str, profile: str = "online", sources: str = "both") -> Judgement:
    return watch_of(name, profile, sources).judge(end_of(recording(name)))


def counted(name: str, what: str, sources: str = "both") -> float:
    return watch_of(name, "online", sources).server.counted[what]


def advised(findings: tuple[Finding, ...]) -> dict[str, tuple[object, object]]:
    return {change.flag: (change.now, change.to) for each in findings for change in each.changes if change.flag}


def test_the_retracting_server_is_advised_to_raise_its_conservativeness_and_nothing_against_it() -> None:
    found = judged("retract")
    assert found.verdict == "retracting_too_often"
    assert advised(tuple(each for each in found.findings if each.is_limit)) == {
        "--schedule-conservativeness": (0.1, 1.3)
    }
    assert "admission_too_conservative" not in {each.diagnosis for each in found.findings}


@pytest.mark.parametrize("sources", SOURCES)
def test_the_retractions_are_found_by_log_and_by_metrics_alone(sources: str) -> None:
    assert judged("retract", "online", sources).verdict == "retracting_too_often"


@pytest.mark.parametrize("sources", SOURCES)
def test_ten_retracted_requests_are_ten_by_every_source(sources: str) -> None:
    assert counted("retract", "retracted", sources) == 10


def test_ten_retractions_are_ten_events_and_none_is_doubtful() -> None:
    assert counted("retract", "retractions") == 10
    assert not watch_of("retract").doubtful


def test_the_steady_server_has_nothing_to_change() -> None:
    found = judged("steady")
    assert (found.verdict, found.findings) == ("healthy", ())


@pytest.mark.parametrize("profile", ["online", "offline"])
def test_a_full_running_limit_is_not_taken_for_a_careful_admission(profile: str) -> None:
    found = judged("big_queue", profile)
    assert found.verdict == "running_at_limit"
    assert advised(found.findings) == {"--max-running-requests": (2, 16)}


def test_one_request_at_a_time_is_a_slow_client_offline_and_nothing_online() -> None:
    assert judged("client_limited", "offline").verdict == "client_too_slow"
    assert judged("client_limited", "online").verdict == "healthy"


def test_two_data_parallel_ranks_are_healthy_each() -> None:
    assert judged("dp2").verdict == "healthy"
    assert sorted(watch_of("dp2").server.schedulers, key=str) == [0, 1]


def test_a_restart_into_the_same_log_is_two_starts() -> None:
    assert judged("restart_append").verdict == "healthy"
    assert watch_of("restart_append").server.starts == 2


def test_a_restart_seen_only_in_the_metrics_is_counted_as_well() -> None:
    # The second start: the first was before the first scrape.
    assert watch_of("restart_append", sources="metrics").server.starts == 1


@pytest.mark.parametrize("sources", SOURCES)
@pytest.mark.parametrize("name", NAMES)
def test_a_cpu_server_gets_no_advice_about_its_gpu(name: str, sources: str) -> None:
    rows = {each.diagnosis for each in judged(name, "online", sources).findings}
    assert not rows & {
        "memory_reserve_too_large",
        "memory_reserve_too_small",
        "cuda_graph_off",
        "cuda_graph_not_covering",
    }


@pytest.mark.parametrize("name", ["steady", "client_limited", "dp2", "restart_append"])
def test_by_the_log_alone_no_server_is_called_healthy(name: str) -> None:
    assert judged(name, "online", "log").verdict == "no_limit_in_log"
