"""Advice to clients: how many requests to send at once, computed from what the server did."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_tuning_exporter.diagnosis.clients import advise_fewer, advise_more
from sglang_tuning_exporter.diagnosis.evidence import Past
from sglang_tuning_exporter.state.facts import ServerFacts
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.totals import Totals

MINUTE = 60.0


def past(
    profile: str,
    *,
    running: float,
    queued: float = 0.0,
    usage: float = 0.3,
    started: float | None = None,
    limit: float | None = None,
) -> Past:
    recent = Totals()
    for figure, value in (("running", running), ("queued", queued), ("usage", usage)):
        recent.integrals[figure], recent.integrals[figure + "_seconds"] = MINUTE * value, MINUTE
    recent.seconds["activity", "serving"] = MINUTE
    facts = ServerFacts(version=None, args={}, running_limits={} if limit is None else {None: limit})
    if started is not None:
        recent.counts["started_requests"] = started
    return Past(recent, {}, MINUTE, facts, PROFILES[profile])


def test_slow_clients_are_advised_how_many_fit_and_how_many_should_wait() -> None:
    words = advise_more(past("offline", running=10, usage=0.3))
    assert words.startswith(
        "send about 130 requests at once (now 10): about 30 can run, 100 more keep the queue filled"
    )


def test_no_more_are_asked_for_than_the_server_may_run_and_the_range_lets_wait() -> None:
    assert "about 116 requests" in advise_more(past("offline", running=10, usage=0.3, limit=16))


def test_no_more_are_asked_for_than_the_server_lets_wait() -> None:
    known = past("offline", running=10, usage=0.3, limit=16)
    short = replace(known, facts=replace(known.facts, args={"max_queued_requests": 24}))
    assert "about 40 requests" in advise_more(short)


@pytest.mark.parametrize("profile", ["online", "long_context"])
def test_where_an_empty_queue_is_healthy_no_advice_is_to_send_more(profile: str) -> None:
    assert advise_more(past(profile, running=10)) == ""


def test_clients_that_send_enough_already_are_not_advised_to_send_more() -> None:
    assert advise_more(past("offline", running=30, queued=200, usage=0.9)) == ""


def test_a_queue_is_shortened_to_what_is_started_within_half_the_time_to_the_first_token() -> None:
    # Four a second, two seconds to the first token: four may wait beside the forty that run.
    words = advise_fewer(past("online", running=40, queued=24, started=4 * MINUTE))
    assert words == (
        "send at most 44 requests at once (now about 64), or add a replica: SGLang starts about 4 requests/s,"
        " and none should wait longer than 1 s"
    )


def test_one_running_request_counts_as_one() -> None:
    words = advise_fewer(past("online", running=1, queued=7, started=0.5 * MINUTE))
    assert words.startswith("send at most 1 request at once (now about 8)")


def test_a_batch_of_two_with_gaps_between_its_requests_counts_as_two() -> None:
    # Seen on a real server: two answers of 5,000 tokens fill the KV cache, and a third waits for one of them to end.
    words = advise_fewer(past("online", running=1.97, queued=0.98, started=0.08 * MINUTE))
    assert words.startswith("send at most 2 requests at once (now about 3)")


def test_where_nobody_waits_the_queue_may_be_as_long_as_its_range() -> None:
    assert "at most 2,040 requests" in advise_fewer(past("offline", running=40, queued=3000))


@pytest.mark.parametrize(("queued", "started"), [(2.0, 240.0), (24.0, None)])
def test_no_figure_is_invented_where_the_queue_is_short_or_starts_are_unknown(
    queued: float, started: float | None
) -> None:
    assert advise_fewer(past("online", running=40, queued=queued, started=started)) == ""


def test_a_server_with_ranks_shows_the_sum_over_them() -> None:
    one = past("offline", running=10, usage=0.3)
    both = one.recent + one.recent
    both.counts["served_seconds"] = MINUTE
    two = replace(one, recent=both, by_rank={0: one.recent, 1: one.recent})
    assert "about 260 requests at once (now 20)" in advise_more(two)


def test_an_idle_rank_beside_it_changes_no_figure() -> None:
    one = past("offline", running=10, usage=0.3, queued=2)
    beside = Totals()
    beside.seconds["activity", "idle"] = MINUTE
    both = one.recent + beside
    both.counts["served_seconds"] = MINUTE
    assert advise_more(replace(one, recent=both, by_rank={0: one.recent, 1: beside})) == advise_more(one)
