"""A server that does not answer yet: how long it counts as starting, and when it counts as down."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from conftest import DECODE, SERVING, config
from sglang_tuning_exporter.collect.scrape import Outcome, Reason, ScrapeError
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.serve.metrics import collect
from sglang_tuning_exporter.serve.pages.page import render

START = "[2025-11-20 11:38:20] server_args=ServerArgs(model_path='tiny', schedule_conservativeness=1.0)\n"
CRASH = "[2025-11-20 11:39:20] Scheduler hit an exception: Traceback (most recent call last):\n"


class SteppedExporter:
    """An exporter whose clock is moved by hand, next to a server that answers as the test says."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch, *, log: str | None) -> None:
        self.now = time.monotonic()
        patch.setattr(time, "monotonic", lambda: self.now)
        self.path = directory / "server.log"
        if log is not None:
            self.path.write_text(log)
        files = () if log is None else (str(self.path),)
        self.sidecar = Sidecar(config(sglang_url="http://127.0.0.1:9", log_file=files))
        if self.sidecar.log is not None:
            self.sidecar.log._clock = lambda: self.now
        self.read()

    def read(self) -> None:
        if self.sidecar.log is not None:
            self.sidecar._read_log()

    def prints(self, text: str) -> None:
        with self.path.open("a") as file:
            file.write(text)
        self.read()

    def fails(self, reason: Reason = "connection_refused", *, serves: bool = False) -> None:
        self.sidecar._receive_outcome(Outcome(None, ScrapeError(reason, "as it is", serves=serves), 0.1))

    def answers(self) -> None:
        self.sidecar._receive_outcome(Outcome(SERVING.decode(), None, 0.1))

    def verdict(self, *, after: float = 0.0, reason: Reason = "connection_refused") -> str:
        """Give the verdict after so many seconds in which every scrape failed."""
        for _ in range(int(after / 15.0)):
            self.now += 15.0
            self.fails(reason)
        with self.sidecar.view() as now:
            return self.sidecar.judge(now).verdict

    def reason(self) -> str:
        return self.sidecar.health.reason


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SteppedExporter:
    """No log."""
    return SteppedExporter(tmp_path, monkeypatch, log=None)


@pytest.fixture
def exporter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SteppedExporter:
    """A log that is still empty."""
    return SteppedExporter(tmp_path, monkeypatch, log="")


def test_a_server_never_seen_up_is_starting_from_the_first_look(
    alone: SteppedExporter, exporter: SteppedExporter
) -> None:
    for each in (alone, exporter):
        each.fails()
        assert (each.verdict(), each.reason()) == ("starting", "not_ready")


@pytest.mark.parametrize(("seconds", "verdict"), [(300.0, "starting"), (885.0, "starting"), (930.0, "server_down")])
def test_it_is_down_after_a_quarter_of_an_hour_without_a_sign_of_a_start(
    alone: SteppedExporter, seconds: float, verdict: str
) -> None:
    alone.fails()
    assert alone.verdict(after=seconds) == verdict


def test_after_that_the_reason_is_exposed_to_prometheus(alone: SteppedExporter) -> None:
    alone.fails()
    alone.verdict(after=930.0)
    reasons = {
        sample.labels.get("reason")
        for family in collect(alone.sidecar)
        for sample in family.samples
        if sample.name == "sglang_tuning_scrape_error_info"
    }
    assert reasons == {"connection_refused"}


def test_a_start_in_the_log_is_waited_for_half_an_hour(exporter: SteppedExporter) -> None:
    exporter.fails()
    exporter.prints(START)
    assert exporter.verdict(after=1700.0) == "starting"
    assert exporter.verdict(after=150.0) == "server_down"


def test_a_start_that_was_printed_before_the_exporter_came_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = SteppedExporter(tmp_path, monkeypatch, log=START)
    exporter.fails()
    assert exporter.verdict(after=1500.0) == "starting"


def test_an_end_in_the_log_wins_at_once(exporter: SteppedExporter) -> None:
    exporter.fails()
    exporter.prints(START)
    assert exporter.verdict() == "starting"
    exporter.prints(CRASH)
    exporter.fails()
    assert (exporter.verdict(), exporter.reason()) == ("server_down", "connection_refused")


def test_an_end_that_was_printed_before_the_exporter_came_wins_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = SteppedExporter(tmp_path, monkeypatch, log=START + CRASH)
    exporter.fails()
    assert exporter.verdict() == "server_down"


def test_a_server_that_served_before_the_exporter_came_is_not_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = SteppedExporter(tmp_path, monkeypatch, log=START + DECODE.decode())
    exporter.fails()
    assert exporter.verdict() == "server_down"


def test_a_server_that_was_up_is_down_at_once(alone: SteppedExporter) -> None:
    alone.answers()
    alone.now += 15.0
    alone.fails()
    assert (alone.verdict(), alone.reason()) == ("server_down", "connection_refused")


def test_a_server_that_is_up_is_not_starting(alone: SteppedExporter) -> None:
    alone.fails()
    alone.answers()
    assert alone.verdict() not in {"starting", "server_down"}


@pytest.mark.parametrize("reason", ["timeout", "http_status", "invalid", "too_large"])
def test_a_server_that_accepts_connections_is_not_starting(alone: SteppedExporter, reason: Reason) -> None:
    alone.fails(reason)
    assert (alone.verdict(), alone.reason()) == ("server_down", reason)


def test_a_server_that_takes_connections_and_does_not_answer_hangs_at_its_tokenizer(alone: SteppedExporter) -> None:
    alone.answers()
    alone.now += 15.0
    alone.fails("timeout")
    with alone.sidecar.view() as now:
        judgement = alone.sidecar.judge(now)
    assert judgement.past.stage == "tokenizer"
    assert judgement.findings[0].sentence == (
        "it takes connections and does not answer (as it is): its HTTP server or its tokenizer hangs"
    )


def test_a_503_counts_as_starting_for_as_long_as_a_start_can_last(alone: SteppedExporter) -> None:
    """A proxy also answers 503 for a server that is down."""
    alone.fails("not_ready")
    assert alone.verdict(after=1700.0, reason="not_ready") == "starting"
    assert alone.verdict(after=150.0, reason="not_ready") == "server_down"
    assert alone.reason() == "http_503"


def test_a_503_of_a_server_that_was_up_is_no_start_unless_its_log_shows_one(exporter: SteppedExporter) -> None:
    exporter.answers()
    exporter.fails("not_ready")
    assert (exporter.verdict(), exporter.reason()) == ("server_down", "http_503")
    exporter.prints(START)
    exporter.fails("not_ready")
    assert (exporter.verdict(after=1700.0, reason="not_ready"), exporter.reason()) == ("starting", "not_ready")
    assert exporter.verdict(after=150.0, reason="not_ready") == "server_down"


def test_a_503_of_a_server_that_has_served_by_its_log_is_no_start(exporter: SteppedExporter) -> None:
    exporter.prints(START + DECODE.decode())
    exporter.fails("not_ready")
    assert (exporter.verdict(), exporter.reason()) == ("server_down", "http_503")


def test_another_kind_of_failure_does_not_restart_the_time(alone: SteppedExporter) -> None:
    """A name server that answers sometimes."""
    for _ in range(120):
        alone.now += 10.0
        alone.fails("timeout")
        alone.now += 10.0
        alone.fails("unreachable")
    assert (alone.verdict(), alone.reason()) == ("server_down", "unreachable")


@pytest.mark.parametrize("release", ["0.3.6", "0.4.6.post5"])
def test_an_empty_page_is_no_outage_up_to_0_4(alone: SteppedExporter, release: str) -> None:
    """In these releases the page is empty until the first request, even for days."""
    alone.sidecar.state.facts.apply_info(release, {}, None)
    for _ in range(200):
        alone.now += 15.0
        alone.fails("not_ready", serves=True)
    assert (alone.verdict(), alone.reason()) == ("not_enough_data", "not_ready")


@pytest.mark.parametrize("release", [None, "0.5.23"])
def test_an_empty_page_is_excused_for_as_long_as_a_start_on_every_other_server(
    alone: SteppedExporter, release: str | None
) -> None:
    alone.sidecar.state.facts.apply_info(release, {}, None)
    for _ in range(118):
        alone.now += 15.0
        alone.fails("not_ready", serves=True)
    assert (alone.verdict(), alone.reason()) == ("not_enough_data", "not_ready")
    for _ in range(4):
        alone.now += 15.0
        alone.fails("not_ready", serves=True)
    assert (alone.verdict(), alone.reason()) == ("server_down", "invalid")


def test_an_empty_page_is_no_excuse_for_a_server_that_died(exporter: SteppedExporter) -> None:
    exporter.prints(START + CRASH)
    exporter.fails("not_ready", serves=True)
    assert (exporter.verdict(), exporter.reason()) == ("server_down", "invalid")


class TestA404:
    """SGLang without --enable-metrics, or a proxy whose server is down."""

    def test_it_is_a_server_without_metrics_where_none_were_ever_seen(self, alone: SteppedExporter) -> None:
        alone.fails("metrics_disabled")
        assert alone.verdict(after=7200.0, reason="metrics_disabled") == "not_enough_data"
        assert alone.reason() == "metrics_disabled"

    def test_it_is_a_server_that_is_gone_where_they_were(self, alone: SteppedExporter) -> None:
        alone.answers()
        alone.fails("metrics_disabled")
        assert (alone.verdict(), alone.reason()) == ("server_down", "http_404")

    def test_a_start_in_the_log_may_be_one_without_metrics(self, exporter: SteppedExporter) -> None:
        exporter.answers()
        exporter.prints(START)
        exporter.fails("metrics_disabled")
        assert exporter.reason() == "metrics_disabled"

    def test_a_start_that_never_ends_stops_counting_as_a_start(self, exporter: SteppedExporter) -> None:
        exporter.prints(START)
        exporter.fails("metrics_disabled")
        assert exporter.verdict(after=1900.0, reason="metrics_disabled") == "server_down"
        assert exporter.reason() == "http_404"

    def test_an_end_in_the_log_wins(self, exporter: SteppedExporter) -> None:
        exporter.prints(START + CRASH)
        exporter.fails("metrics_disabled")
        assert (exporter.verdict(), exporter.reason()) == ("server_down", "http_404")

    def test_a_server_that_answers_otherwise_has_no_metrics_for_as_long_as_it_does(
        self, alone: SteppedExporter
    ) -> None:
        alone.answers()
        alone.fails("metrics_disabled")
        outage = alone.sidecar._outage
        outage.asked(answered=True)
        alone.fails("metrics_disabled")
        assert alone.reason() == "metrics_disabled"
        outage.asked(answered=False)
        alone.fails("metrics_disabled")
        assert (alone.verdict(), alone.reason()) == ("server_down", "http_404")

    def test_one_that_never_answered_otherwise_stays_one_without_metrics(self, alone: SteppedExporter) -> None:
        alone.fails("metrics_disabled")
        alone.sidecar._outage.asked(answered=False)
        alone.fails("metrics_disabled")
        assert alone.reason() == "metrics_disabled"


def test_the_page_and_the_metrics_say_that_it_is_starting(alone: SteppedExporter) -> None:
    alone.fails()
    assert "SGLang is starting." in render(alone.sidecar)
    (family,) = (f for f in collect(alone.sidecar) if f.name == "sglang_tuning_verdict")
    assert [sample.labels for sample in family.samples] == [{"verdict": "starting", "severity": "none"}]


class TestASilentLog:
    """Of an exporter that has both, the metrics show what the log leaves out."""

    @staticmethod
    def found(exporter: SteppedExporter) -> list[str]:
        with exporter.sidecar.view() as now:
            return [f.sentence for f in exporter.sidecar.judge(now).findings if f.diagnosis.id == "log_silent"]

    @staticmethod
    def serves(exporter: SteppedExporter, seconds: float) -> None:
        begin = exporter.now
        while exporter.now < begin + seconds:
            exporter.now += 15.0
            page = SERVING.decode() + f'\nsglang:num_requests_total{{n="mine"}} {exporter.now}\n'
            exporter.sidecar._receive_outcome(Outcome(page, None, 0.1))

    def test_a_log_that_died_under_load_is_found(self, exporter: SteppedExporter) -> None:
        exporter.prints(DECODE.decode())
        self.serves(exporter, 600.0)
        assert self.found(exporter) == ["no batch line has come from the log for 10 minutes, and tokens were generated"]

    def test_it_is_found_after_two_minutes(self, exporter: SteppedExporter) -> None:
        exporter.prints(DECODE.decode())
        self.serves(exporter, 105.0)
        assert self.found(exporter) == []
        self.serves(exporter, 30.0)
        assert self.found(exporter) == ["no batch line has come from the log for 2 minutes, and tokens were generated"]

    def test_the_level_of_the_log_is_named_where_it_is_why(self, exporter: SteppedExporter) -> None:
        exporter.sidecar.state.facts.args["log_level"] = "warning"
        self.serves(exporter, 600.0)
        assert self.found(exporter)[0].endswith("; the server runs with --log-level warning")

    def test_a_log_that_is_written_is_not_silent(self, exporter: SteppedExporter) -> None:
        for _ in range(40):
            exporter.prints(DECODE.decode())
            self.serves(exporter, 15.0)
        assert self.found(exporter) == []

    def test_a_log_of_an_idle_server_is_not_silent(self, exporter: SteppedExporter) -> None:
        exporter.prints(DECODE.decode())
        self.serves(exporter, 15.0)
        for _ in range(200):
            exporter.now += 15.0
            exporter.answers()
        assert self.found(exporter) == []

    def test_without_metrics_it_is_unknown(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        exporter = SteppedExporter(tmp_path, monkeypatch, log=DECODE.decode())
        exporter.sidecar._scraper = None
        assert exporter.sidecar.log_silent_seconds is None
