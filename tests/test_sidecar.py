"""The log and the metrics of one server, watched together and alone, by the running program and in this process."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from conftest import (
    DECODE,
    RETRACTION,
    SERVING,
    Exporter,
    FakeSGLang,
    config,
    hang,
    reply,
    running_exporter,
    wait_for,
)
from sglang_tuning_exporter.collect import sidecar as watching_module
from sglang_tuning_exporter.collect.scrape import InfoSchedule
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.core.scrapes import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SERVER_ARGS = b"[2025-11-20 11:38:20] server_args=ServerArgs(model_path='tiny', schedule_conservativeness=1.0)\n"
EVENTS = "sglang_tuning_retraction_events_total"
INFO = {"model_path": "tiny", "version": "0.5.23", "schedule_conservativeness": 0.7, "internal_states": [{}]}


def info(**more: object) -> Callable[[Any], None]:
    return reply(json.dumps(INFO | more).encode(), content_type="application/json")


def append(path: Path, text: bytes) -> None:
    with path.open("ab") as log:
        log.write(text)


@contextmanager
def watching(self_scrape_seconds: float = 0.3, **settings: Any) -> Iterator[Sidecar]:
    """A started sidecar that scrapes by itself after this long without a scrape."""
    sidecar = Sidecar(config(**settings), self_scrape_seconds=self_scrape_seconds)
    sidecar.start()
    try:
        yield sidecar
    finally:
        sidecar.stop()


def reason_of(sidecar: Sidecar) -> str:
    """Why the last scrape failed."""
    return sidecar.watch.failure.reason if sidecar.watch.failure is not None else ""


def queued(sidecar: Sidecar) -> float | None:
    scheduler = sidecar.watch.server.schedulers.get(None)
    return None if scheduler is None else scheduler.queued


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def following(directory: Path) -> Iterator[Exporter]:
    """One exporter on the log alone: a file that is there, and one that is not yet."""
    (directory / "server.log").write_bytes(RETRACTION)  # before its time: not counted
    flags = ("--log-file", str(directory / "server.log"), "--log-file", str(directory / "late.log"))
    with running_exporter(*flags) as exporter:
        yield exporter


def test_what_was_in_the_log_before_is_not_counted(following: Exporter) -> None:
    assert following.page().value(EVENTS) == 0


def _another(number: int) -> bytes:
    """A retraction with new figures, so that it is no repetition of the last one by another rank."""
    return RETRACTION.replace(b"8950", b"%d" % (9000 + number))


def test_without_metrics_their_families_are_absent(following: Exporter) -> None:
    of_metrics = {"sglang_tuning_up", "sglang_tuning_scrape_duration_seconds", "sglang_tuning_scrape_error_info"}
    page = following.page()
    assert page.labels("sglang_tuning_sources_info") == [{"metrics": "no", "log": "yes"}]
    assert not of_metrics & {sample.name for sample in page.samples}
    assert "sglang:" not in page.text


def test_without_a_log_its_families_are_absent_and_the_key_is_sent_but_never_shown(
    sglang: FakeSGLang, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("sk-very-secret\n")
    sglang.answers["/server_info"] = info(
        api_key="sk-very-secret", admin_api_key="sk-admin", launch_command="--api-key sk-admin"
    )
    flags = ("--sglang-url", sglang.url, "--api-key-file", str(tmp_path / "key"))
    with running_exporter(*flags) as exporter:
        wait_for(lambda: exporter.page().value("sglang_tuning_server_arg", arg="schedule_conservativeness") == 0.7)
        page = exporter.page()
        shown = page.text + exporter.get("/").text + "".join(exporter.said)
    names = {sample.name for sample in page.samples}
    assert page.labels("sglang_tuning_sources_info") == [{"metrics": "yes", "log": "no"}]
    assert not {name for name in names if name.startswith("sglang_tuning_log_")}
    assert not {EVENTS, "sglang_tuning_out_of_memory_total"} & names
    assert {"sglang_tuning_up", "sglang_tuning_queued_requests"} <= names
    assert all("Authorization: Bearer sk-very-secret\r\n" in head for head in sglang.asked)
    assert "sk-" not in shown


def test_with_log_and_metrics_the_page_has_both(sglang: FakeSGLang, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.touch()
    with running_exporter("--sglang-url", sglang.url, "--log-file", str(log)) as exporter:
        page = exporter.page()
    assert page.labels("sglang_tuning_sources_info") == [{"metrics": "yes", "log": "yes"}]
    assert page.value(EVENTS) == 0
    assert page.value("sglang_tuning_up") == 1


def test_it_scrapes_by_itself_only_while_nobody_else_does(sglang: FakeSGLang) -> None:
    with watching(sglang_url=sglang.url, self_scrape_seconds=1.0) as sidecar:
        wait_for(lambda: sglang.count("/metrics") == 1)
        sidecar.scrape(5)  # may still be that one, and share its answer
        before = sglang.count("/metrics")
        for _ in range(10):
            sidecar.scrape(5)
            time.sleep(0.1)
        assert sglang.count("/metrics") == before + 10
        wait_for(lambda: sglang.count("/metrics") == before + 11)


def test_a_scrape_has_the_log_read_first(sglang: FakeSGLang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for pause in ("POLL_SECONDS", "QUIET_POLL_SECONDS"):
        monkeypatch.setattr(watching_module, pause, 3600.0)
    monkeypatch.setattr(watching_module, "FRESH_SECONDS", 10.0)
    log = tmp_path / "server.log"
    log.touch()
    with watching(sglang_url=sglang.url, log_file=(str(log),)) as sidecar:
        for number in range(3):
            append(log, _another(number))
            sidecar.scrape(10)
            assert sidecar.log is not None
            assert sidecar.log.lines["retraction"] == number + 1


def test_a_scrape_does_not_wait_for_a_flood_to_be_read(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.touch()
    flood = DECODE * (12_000_000 // len(DECODE))
    with watching(log_file=(str(log),)) as sidecar:
        append(log, flood)
        sidecar.scrape(10)
        assert sidecar.log is not None
        assert sidecar.log.lines["decode"] < flood.count(b"\n")
        wait_for(lambda: sidecar.log is not None and sidecar.log.lines["decode"] == flood.count(b"\n"), seconds=120)


def test_without_an_address_nothing_is_scraped(tmp_path: Path, sglang: FakeSGLang) -> None:
    log = tmp_path / "server.log"
    log.touch()
    with watching(log_file=(str(log),)) as sidecar:
        assert sidecar.scrape(5) == ""
        time.sleep(0.6)
    assert sidecar.watch.is_up is None
    assert sglang.asked == []


def test_the_servers_arguments_are_asked_for_once_a_start(sglang: FakeSGLang, tmp_path: Path) -> None:
    sglang.answers["/server_info"] = info()
    log = tmp_path / "server.log"
    log.touch()
    with watching(sglang_url=sglang.url, log_file=(str(log),)) as sidecar:
        wait_for(lambda: sidecar.watch.server.facts.version == "0.5.23")
        wait_for(lambda: sglang.count("/metrics") >= 4)
        assert sglang.count("/server_info") == 1
        append(log, SERVER_ARGS)
        wait_for(lambda: sglang.count("/server_info") == 2)
        wait_for(lambda: sidecar.watch.server.facts.number("schedule_conservativeness") == 0.7)


def test_a_server_that_is_gone_is_starting_only_until_it_has_answered(sglang: FakeSGLang, tmp_path: Path) -> None:
    # Seen on a real 0.4.9: its first batch took long, so its log said neither ready nor a token when it was killed.
    sglang.stop()
    log = tmp_path / "server.log"
    log.touch()
    with watching(sglang_url=sglang.url, log_file=(str(log),)) as sidecar:
        wait_for(lambda: sidecar.watch.failure is not None and sidecar.watch.failure.starting)
        append(log, SERVER_ARGS)
        wait_for(lambda: sidecar.watch.server.starting)
        assert reason_of(sidecar) == "not_ready"
        sglang.start()
        wait_for(lambda: sidecar.watch.is_up is True)
        sglang.stop()
        wait_for(lambda: sidecar.watch.is_up is False)
        assert reason_of(sidecar) == "connection_refused"


def test_a_server_that_comes_back_is_asked_again(sglang: FakeSGLang) -> None:
    sglang.answers["/server_info"] = info()
    with watching(sglang_url=sglang.url) as sidecar:
        wait_for(lambda: sglang.count("/server_info") == 1)
        sglang.stop()
        wait_for(lambda: sidecar.watch.is_up is False)
        sglang.answers["/server_info"] = info(version="0.5.24")
        sglang.start()
        wait_for(lambda: sidecar.watch.server.facts.version == "0.5.24")
        assert sglang.count("/server_info") == 2


def test_a_late_answer_is_no_restart(sglang: FakeSGLang) -> None:
    sglang.answers["/server_info"] = info()
    with watching(sglang_url=sglang.url, scrape_timeout=0.3) as sidecar:
        wait_for(lambda: sglang.count("/server_info") == 1)
        sglang.answers["/metrics"] = hang
        wait_for(lambda: sidecar.watch.is_up is False)
        sglang.answers["/metrics"] = reply(SERVING)
        wait_for(lambda: sidecar.watch.is_up is True)
        time.sleep(0.6)
        assert sglang.count("/server_info") == 1


def test_an_old_server_is_asked_under_the_old_name(sglang: FakeSGLang) -> None:
    sglang.answers["/get_server_info"] = info(version="0.4.6")
    with watching(sglang_url=sglang.url) as sidecar:
        wait_for(lambda: sidecar.watch.server.facts.version == "0.4.6")


def test_a_server_without_metrics_is_asked_for_its_arguments_all_the_same(sglang: FakeSGLang) -> None:
    sglang.answers = {"/server_info": info()}
    with watching(sglang_url=sglang.url) as sidecar:
        wait_for(lambda: sidecar.watch.server.facts.version == "0.5.23")
        assert reason_of(sidecar) == "metrics_disabled"


def test_a_server_that_came_back_without_metrics_is_not_down(sglang: FakeSGLang) -> None:
    sglang.answers["/server_info"] = info()
    with watching(sglang_url=sglang.url) as sidecar:
        wait_for(lambda: sidecar.watch.is_up is True)
        del sglang.answers["/metrics"]
        wait_for(lambda: reason_of(sidecar) == "metrics_disabled")
        assert sglang.count("/server_info") == 2


def test_a_proxy_that_answers_for_a_server_that_is_gone_is_no_server_without_metrics(sglang: FakeSGLang) -> None:
    with watching(sglang_url=sglang.url) as sidecar:
        wait_for(lambda: sidecar.watch.is_up is True)
        del sglang.answers["/metrics"]
        asked = sglang.count("/server_info")
        wait_for(lambda: sglang.count("/server_info") > asked)
        seen = sglang.count("/metrics")
        wait_for(lambda: sglang.count("/metrics") > seen + 1)
        assert reason_of(sidecar) == "http_404"


def test_a_server_that_hangs_on_its_arguments_does_not_stop_the_scrapes(sglang: FakeSGLang) -> None:
    sglang.answers["/server_info"] = hang
    with watching(sglang_url=sglang.url, scrape_timeout=0.3):
        wait_for(lambda: sglang.count("/server_info") == 1)
        seen = sglang.count("/metrics")
        wait_for(lambda: sglang.count("/metrics") > seen)


def test_a_server_whose_requests_stand_still_is_asked_for_a_token_and_not_all_the_time(
    sglang: FakeSGLang, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watching(sglang_url=sglang.url) as sidecar:
        wait_for(lambda: sidecar.watch.is_up is True)
        time.sleep(0.5)
        assert sglang.count("/health_generate") == 0
        monkeypatch.setattr(Progress, "is_suspicious", lambda _self, _now: True)
        wait_for(lambda: sglang.count("/health_generate") == 1)
        time.sleep(1.0)
        assert sglang.count("/health_generate") == 1


def test_the_pauses_between_failed_requests_grow() -> None:
    inquiry, now, asked = InfoSchedule(), 0.0, []
    while now < 1000:
        if inquiry.start_if_due(now):
            asked.append(now)
            inquiry.note_no_answer(now)
        now += 1
    assert asked == [0, 15, 45, 105, 225, 465, 765]


def test_a_start_during_the_question_is_not_forgotten() -> None:
    inquiry = InfoSchedule()
    assert inquiry.start_if_due(5)
    inquiry.ask_again()
    inquiry.note_no_answer(6)
    assert inquiry.start_if_due(6)


def test_a_log_that_works_while_sglang_hangs_feeds_the_state(sglang: FakeSGLang, tmp_path: Path) -> None:
    sglang.answers["/metrics"] = hang
    log = tmp_path / "server.log"
    log.touch()
    with watching(sglang_url=sglang.url, log_file=(str(log),), scrape_timeout=30.0) as sidecar:
        wait_for(lambda: sglang.count("/metrics") == 1)
        append(log, DECODE)
        wait_for(lambda: queued(sidecar) == 4)
        begin = time.monotonic()
    assert time.monotonic() - begin < 2, "stopping does not wait for the scrape"


@pytest.mark.parametrize("name", ["/nowhere/\ud800.log", "/nowhere/a\0b.log", "/nowhere/\ud800*.log"])
def test_a_log_with_a_name_that_no_file_can_have_is_a_log_that_is_not_there(name: str) -> None:
    sidecar = Sidecar(config(log_file=(name,)))
    assert sidecar.log is not None
    assert not any(status.up for status in sidecar.log.files)
