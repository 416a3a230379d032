"""A server that does not answer yet: how long it counts as starting, when as down, and what a 404, a 503 or an empty
page means.
"""

from __future__ import annotations

import pytest

from sglang_tuning_exporter.core.watch import STARTING_SECONDS, UNSEEN_SECONDS
from sglang_tuning_exporter.sglang.server_info import ServerInfo
from test_core_course import BEGIN, decode, stamp, start
from test_core_watch import CRASH, Beside


def failed(
    beside: Beside, seconds: float, reason: str = "connection_refused", begin: float = 20.0, *, serves: bool = False
) -> tuple[str, str]:
    """Return the reason and the verdict after scrapes that failed for so long."""
    for at in (begin, begin + seconds):
        found = beside.watch.lose(reason, "as it is", BEGIN + at, serves=serves)
    return found.reason, beside.judge(begin + seconds).verdict


def seen(*lines: str, answered: bool = False, release: str = "0.5.23") -> Beside:
    """A server that printed these lines, and answered or not."""
    beside = Beside()
    beside.watch.take_facts(ServerInfo(release, {}))
    beside.lines(*lines)
    if answered:
        beside.scrape(12)
    return beside


LOADING = start()[:2]
ENDED = [*LOADING, f"{stamp(12)}{CRASH}"]


@pytest.mark.parametrize(
    ("lines", "answered", "seconds", "told"),
    [
        ([], False, 0.0, ("not_ready", "starting")),
        ([], False, UNSEEN_SECONDS - 15, ("not_ready", "starting")),
        ([], False, UNSEEN_SECONDS + 30, ("connection_refused", "server_down")),
        (LOADING, False, STARTING_SECONDS - 100, ("not_ready", "starting")),
        (LOADING, False, STARTING_SECONDS + 50, ("connection_refused", "server_down")),
        (ENDED, False, 0.0, ("connection_refused", "crashed")),  # an end in the log wins at once
        (
            [*start(), decode(15)],
            False,
            0.0,
            ("connection_refused", "server_down"),
        ),  # it served before the exporter came
        ([], True, 0.0, ("connection_refused", "server_down")),
    ],
)
def test_a_server_that_is_away_is_starting_for_as_long_as_a_start_can_last(
    lines: list[str],
    answered: bool,  # noqa: FBT001 - a case
    seconds: float,
    told: tuple[str, str],
) -> None:
    assert failed(seen(*lines, answered=answered), seconds) == told


def test_a_server_that_takes_connections_and_does_not_answer_hangs() -> None:
    beside = seen(answered=True)
    failed(beside, 0.0, "timeout")
    assert "takes connections and does not answer" in beside.judge(20).findings[0].sentence


@pytest.mark.parametrize(
    ("lines", "answered", "seconds", "told"),
    [
        ([], False, 1700.0, ("not_ready", "starting")),
        ([], False, 1850.0, ("http_503", "server_down")),  # a proxy also answers 503 for a server that is down
        ([], True, 0.0, ("http_503", "server_down")),
        ([*start(), decode(15)], False, 0.0, ("http_503", "server_down")),
        (LOADING, False, 1700.0, ("not_ready", "starting")),
    ],
)
def test_a_503_counts_as_starting_for_as_long_as_a_start_can_last(
    lines: list[str],
    answered: bool,  # noqa: FBT001 - a case
    seconds: float,
    told: tuple[str, str],
) -> None:
    assert failed(seen(*lines, answered=answered), seconds, "not_ready") == told


@pytest.mark.parametrize(
    ("release", "seconds", "lines", "told"),
    [
        ("0.3.6", 7200.0, [], "not_ready"),  # up to 0.4 the page is empty until the first request, even for days
        ("0.4.6.post5", 7200.0, [], "not_ready"),
        ("0.5.23", 1700.0, [], "not_ready"),
        ("0.5.23", 1900.0, [], "invalid"),
        ("0.5.23", 0.0, ENDED, "invalid"),
    ],
)
def test_an_empty_page_is_excused_for_as_long_as_a_start(
    release: str, seconds: float, lines: list[str], told: str
) -> None:
    reason, verdict = failed(seen(*lines, release=release), seconds, "not_ready", serves=True)
    assert reason == told
    assert (verdict == "not_enough_data") is (told == "not_ready")


# A 404: SGLang without --enable-metrics, or a proxy whose server is down


@pytest.mark.parametrize(
    ("lines", "answered", "told"),
    [
        ([], False, "metrics_disabled"),
        ([], True, "http_404"),  # there were metrics
        (ENDED, False, "http_404"),
    ],
)
def test_a_404_is_a_server_without_metrics_where_none_were_ever_seen(
    lines: list[str],
    answered: bool,  # noqa: FBT001 - a case
    told: str,
) -> None:
    reason, _ = failed(seen(*lines, answered=answered), 0.0, "metrics_disabled")
    assert reason == told


def test_a_server_that_answers_other_requests_has_no_metrics_for_as_long_as_it_does() -> None:
    beside = seen(answered=True)
    beside.watch.answered(answered=True)
    assert failed(beside, 0.0, "metrics_disabled")[0] == "metrics_disabled"
    beside.watch.answered(answered=False)
    assert failed(beside, 0.0, "metrics_disabled", 40.0)[0] == "http_404"
    beside.watch.answered(answered=True)
    failed(beside, 0.0, begin=60.0)  # gone, so that it may be a proxy that answers
    assert failed(beside, 0.0, "metrics_disabled", 80.0)[0] == "http_404"
