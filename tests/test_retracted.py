"""The count of retracted requests while the log is unreadable: the server's counter takes over, and no request counts twice."""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import requests

from conftest import RETRACTION, SERVING, FakeSGLang, Page, config, reply, wait_for, web
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.recordings.recording import Recording, load
from sglang_tuning_exporter.recordings.replay import packaged
from sglang_tuning_exporter.sglang.events import Scrape
from sglang_tuning_exporter.sglang.log.reader import LogReader
from sglang_tuning_exporter.sglang.metrics import page_figures as facts
from sglang_tuning_exporter.state.lifecycle import LATE_SECONDS
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.server import ServerState

EVENTS = "sglang_tuning_retraction_events_total"
REQUESTS = "sglang_tuning_retracted_requests_total"


class Seen(NamedTuple):
    """The counters after a scrape: from the log, from the server, and as exposed."""

    logged: float
    native: float
    shown: float


@cache
def scraped(text: bytes) -> Scrape:
    """A page, read once."""
    return facts.read(text.decode())


def played(recording: Recording, dead: tuple[float, float], *, lines_come_late: bool) -> list[Seen]:
    """The counts over a real server's log and scrapes, with a time in which the log cannot be read."""
    state, reader, kept, seen = ServerState(PROFILES["online"], 0.0), LogReader(), [], []
    moments: list[tuple[float, bytes, bool]] = [(line.at, line.text, True) for line in recording.lines]
    moments += [(scrape.at, scrape.text, False) for scrape in recording.scrapes]
    for at, text, is_line in sorted(moments, key=lambda moment: moment[0]):
        is_read = not dead[0] <= at < dead[1]
        if is_line and not is_read:
            kept.append(text)
        elif is_line:
            for late in (*(kept if lines_come_late else ()), text):
                state.observe_all(reader.feed(late), at)
            kept = []
        else:
            state.observe_scrape(scraped(text), at)
            state.log_is_read = is_read
            state.advance(at)
            counts = state.totals().counts
            seen.append(
                Seen(
                    counts["log_retracted_requests"], counts["native_retracted_requests"], counts["retracted_requests"]
                )
            )
    return seen


@pytest.fixture(scope="module")
def recording() -> Recording:
    """Of a real 0.5.23 that retracts."""
    return load(packaged("retract"))


def test_while_the_log_is_read_its_count_is_used(recording: Recording) -> None:
    seen = played(recording, (1e9, 1e9), lines_come_late=False)
    assert [each.shown for each in seen] == [each.logged for each in seen]
    assert seen[-1].shown == seen[-1].native == 10


@pytest.mark.parametrize("begin", range(0, 150, 30))
def test_after_the_logs_end_the_servers_counter_goes_on_from_there(recording: Recording, begin: int) -> None:
    whole = played(recording, (1e9, 1e9), lines_come_late=False)
    seen = played(recording, (float(begin), 1e9), lines_come_late=False)
    for before, now in pairwise(seen):
        moved = now.shown - before.shown
        assert moved in (now.logged - before.logged, now.native - before.native)
    assert seen[-1].shown <= whole[-1].shown
    lost = max(now.native - before.native for before, now in pairwise(whole))
    assert seen[-1].shown >= whole[-1].shown - lost  # what came between the last line and the next scrape


@pytest.mark.parametrize("lines_come_late", [False, True])
@pytest.mark.parametrize("begin", range(0, 120, 20))
@pytest.mark.parametrize("length", [15, 60])
def test_a_log_that_comes_back_is_not_counted_over_the_servers_counter(
    recording: Recording, begin: int, length: int, *, lines_come_late: bool
) -> None:
    whole = played(recording, (1e9, 1e9), lines_come_late=False)
    seen = played(recording, (float(begin), float(begin + length)), lines_come_late=lines_come_late)
    shown = [each.shown for each in seen]
    assert shown == sorted(shown)
    most = max(now.native - before.native for before, now in pairwise(whole))
    assert all(now - before <= most for before, now in pairwise(shown))
    assert whole[-1].shown - 2 * most <= shown[-1] <= whole[-1].shown


def test_the_total_continues_after_a_restart_from_either_source() -> None:
    old = ServerState(PROFILES["online"], 0.0)
    rank = old.rank(None, 0.0)
    rank.counters.has_retractions = True
    rank.totals.counts.update({"log_retracted_requests": 7, "native_retracted_requests": 4})
    old.advance(1.0)
    old.log_is_read = False
    old.advance(2.0)
    rank.totals.counts["native_retracted_requests"] += 30
    old.advance(3.0)
    new = ServerState(PROFILES["online"], 0.0)
    new.restore(old.saved(3.0), 0.0)
    new.advance(1.0)
    assert old.totals().counts["retracted_requests"] == new.totals().counts["retracted_requests"] == 37


def test_counts_saved_between_two_looks_are_in_the_total() -> None:
    old = ServerState(PROFILES["online"], 0.0)
    old.advance(1.0)
    old.rank(None, 1.0).totals.counts["log_retracted_requests"] += 8
    saved = old.saved(1.0)
    new = ServerState(PROFILES["online"], 0.0)
    new.restore(saved, 0.0)
    new.advance(1.0)
    assert new.totals().counts["retracted_requests"] == 8


def test_without_metrics_the_log_is_used_even_while_it_cannot_be_read() -> None:
    state = ServerState(PROFILES["online"], 0.0)
    state.log_is_read = False
    state.advance(1.0)
    state.rank(None, 1.0).totals.counts["log_retracted_requests"] += 4  # of a rotated file
    state.advance(2.0)
    assert state.totals().counts["retracted_requests"] == 4


def test_a_state_file_of_before_has_the_logs_total() -> None:
    new = ServerState(PROFILES["online"], 0.0)
    saved = new.saved(0.0) | {"ranks": [{"dp": None, "counts": {"retraction_events": 3, "log_retracted_requests": 9}}]}
    new.restore(saved, 0.0)
    new.advance(1.0)
    assert new.totals().counts["retracted_requests"] == 9


START = b"[2025-11-20 11:38:20] server_args=ServerArgs(model_path='tiny', tp_size=8)\n"


def restarted(state: ServerState, at: float) -> None:
    """The server counts from 0."""
    state.observe_scrape(Scrape([], progress=1000.0), at)
    state.observe_scrape(Scrape([], progress=3.0), at + 5.0)
    state.advance(at + 5.0)


def test_a_restart_is_counted_from_the_metrics_while_the_log_is_dead() -> None:
    state = ServerState(PROFILES["online"], 0.0)
    state.observe_all(LogReader().feed(START), 1.0)
    restarted(state, 10.0)
    assert state.starts == 1  # the log is expected to show it
    state.log_is_read = False
    restarted(state, 20.0)
    assert state.starts == 2


@pytest.mark.parametrize(("later", "starts"), [(10.0, 2), (100.0, 3)])
def test_a_log_that_comes_back_counts_no_start_again(later: float, starts: int) -> None:
    state = ServerState(PROFILES["online"], 0.0)
    state.observe_all(LogReader().feed(START), 1.0)
    state.log_is_read = False
    state.advance(5.0)
    restarted(state, 10.0)
    state.log_is_read = True
    state.advance(15.0 + later)
    if later > LATE_SECONDS:  # no record of the earlier count: it is a start if the server was down
        state.lost_scrape()
    state.observe_all(LogReader().feed(START), 15.0 + later)
    assert state.starts == starts
    state.lost_scrape()
    state.observe_all(LogReader().feed(START), 16.0 + later)
    assert state.starts == starts + 1


def serving(retracted: int) -> bytes:
    page, found = re.subn(rb"(?m)^(sglang:num_retracted_requests_total\{.*\}) .*$", rb"\1 %d" % retracted, SERVING)
    assert found
    return page


def page(url: str) -> Page:
    return Page(requests.get(url + "/metrics", timeout=10).text)


def test_a_log_that_is_missing_does_not_hide_what_the_server_counts(
    sglang: FakeSGLang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "server.log"
    sglang.answers["/metrics"] = reply(serving(100))
    sidecar = Sidecar(config(sglang_url=sglang.url, log_file=(str(log),)))
    sidecar.start()
    with web(sidecar) as url:
        first = page(url)
        sglang.answers["/metrics"] = reply(serving(110))
        second = page(url)
        assert (first.value(REQUESTS), second.value(REQUESTS)) == (0, 10)
        assert second.labels(EVENTS) == []
        assert second.value("sglang_tuning_sources_disagree", fact="retracted_requests") is None
        log.touch()
        wait_for(lambda: page(url).value(EVENTS) == 0)
        with log.open("ab") as file:
            file.write(RETRACTION)
        sglang.answers["/metrics"] = reply(serving(115))
        wait_for(lambda: page(url).value(EVENTS) == 1)
        assert page(url).value(REQUESTS) == 15
        log.unlink()
        wait_for(lambda: page(url).value("sglang_tuning_log_up") == 0)
        assert page(url).value(EVENTS) == 1  # as in a rotation
        monkeypatch.setattr("sglang_tuning_exporter.collect.sidecar.ROTATION_SECONDS", 0.5)
        wait_for(lambda: page(url).labels(EVENTS) == [])
        assert page(url).value(REQUESTS) == 15


def test_without_a_log_the_servers_counter_is_shown_as_it_is(sglang: FakeSGLang) -> None:
    sglang.answers["/metrics"] = reply(serving(100))
    with web(Sidecar(config(sglang_url=sglang.url))) as url:
        page(url)
        sglang.answers["/metrics"] = reply(serving(110))
        assert page(url).value(REQUESTS) == 10
        assert page(url).labels(EVENTS) == []


def test_at_level_warning_the_log_has_retractions_though_it_has_no_batch(
    sglang: FakeSGLang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "server.log"
    log.touch()
    sidecar = Sidecar(config(sglang_url=sglang.url, log_file=(str(log),)))
    sidecar.state.facts.args["log_level"] = "warning"
    monkeypatch.setattr(sidecar, "_log_trouble", lambda _: "no batch line has come")
    with sidecar.view():
        assert sidecar.state.log_is_read
    sidecar.state.facts.args["log_level"] = "error"
    with sidecar.view():
        assert not sidecar.state.log_is_read
