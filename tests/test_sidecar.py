"""The log and the metrics of one server, watched together and alone, by the running program and in this process."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from conftest import (
    DECODE,
    RETRACTION,
    FakeSGLang,
    config,
    hang,
    reply,
    running_exporter,
    wait_for,
)
from sglang_tuning_exporter.collect import sidecar as watching_module
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.core.lines import Reader
from sglang_tuning_exporter.core.progress import Progress
from test_tail import append

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SERVER_ARGS = b"[2025-11-20 11:38:20] server_args=ServerArgs(model_path='tiny', schedule_conservativeness=1.0)\n"
EVENTS = "sglang_tuning_retraction_events_total"
INFO = {"model_path": "tiny", "version": "0.5.23", "schedule_conservativeness": 0.7, "internal_states": [{}]}


def info(**more: object) -> Callable[[Any], None]:
    return reply(json.dumps(INFO | more).encode(), content_type="application/json")


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


def _another(number: int) -> bytes:
    """A retraction with new figures, so that it is no repetition of the last one by another rank."""
    return RETRACTION.replace(b"8950", b"%d" % (9000 + number))


def test_without_a_log_its_families_are_absent_and_the_key_is_sent_but_never_shown(
    sglang: FakeSGLang, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("sk-very-secret\n")
    sglang.answers["/server_info"] = info(
        api_key="sk-very-secret", admin_api_key="sk-admin", launch_command="--api-key sk-admin"
    )
    flags = ("--sglang-url", sglang.url, "--api-key-file", str(tmp_path / "key"))
    with running_exporter(*flags) as exporter:
        wait_for(lambda: exporter.page().value("sglang_tuning_server_arg", arg="schedule_conservativeness") == 0.7, 30)
        page = exporter.page()
        shown = page.text + exporter.get("/").text + "".join(exporter.said)
    names = {sample.name for sample in page.samples}
    assert page.labels("sglang_tuning_sources_info") == [{"metrics": "yes", "log": "no"}]
    assert not {name for name in names if name.startswith("sglang_tuning_log_")}
    assert not {EVENTS, "sglang_tuning_out_of_memory_total"} & names
    assert {"sglang_tuning_up", "sglang_tuning_queued_requests"} <= names
    assert all("Authorization: Bearer sk-very-secret\r\n" in head for head in sglang.asked)
    assert "sk-" not in shown


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


def test_a_scrape_does_not_wait_until_the_log_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, read = threading.Event(), Reader.read
    monkeypatch.setattr(Reader, "read", lambda *given: read(*given) if goes_on.wait(60) else ())
    log = tmp_path / "server.log"
    log.touch()
    with watching(log_file=(str(log),)) as sidecar:
        append(log, DECODE)
        sidecar.scrape(10)
        assert sidecar.log is not None
        assert sidecar.log.lines["decode"] == 0
        goes_on.set()
        wait_for(lambda: sidecar.log is not None and sidecar.log.lines["decode"] == 1)


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


def test_a_server_that_came_back_without_metrics_is_not_down(sglang: FakeSGLang) -> None:
    sglang.answers["/server_info"] = info()
    with watching(sglang_url=sglang.url) as sidecar:
        wait_for(lambda: sidecar.watch.is_up is True)
        del sglang.answers["/metrics"]
        wait_for(lambda: reason_of(sidecar) == "metrics_disabled")
        assert sglang.count("/server_info") == 2


def test_a_server_that_hangs_on_its_arguments_does_not_stop_the_scrapes(sglang: FakeSGLang) -> None:
    sglang.answers["/server_info"] = hang
    with watching(sglang_url=sglang.url, scrape_timeout=0.3):
        wait_for(lambda: sglang.count("/server_info") == 1)
        seen = sglang.count("/metrics")
        wait_for(lambda: sglang.count("/metrics") > seen)


def test_a_server_whose_requests_stand_still_is_asked_for_a_token_now_and_then(
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
