"""A large log from before the exporter's start: no scrape sees its counters before all of it has been read."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import Page, config, running_exporter, wait_for
from faults import decode, retraction
from sglang_tuning_exporter.collect import log as logbook
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.serve.metrics import collect
from sglang_tuning_exporter.serve.metrics.families import text_format
from sglang_tuning_exporter.sglang.metrics import Scrape

START = b"[2025-11-20 10:00:00] server_args={'tp_size': 1, 'port': 30000}\n"
OOM = b"[2025-11-20 11:50:00] Decode out of memory. Try to lower your batch size.\n"
OF_THE_LOG = (
    "sglang_tuning_server_starts_total",
    "sglang_tuning_retraction_events_total",
    "sglang_tuning_retracted_requests_total",
    "sglang_tuning_decode_batches_total",
    "sglang_tuning_out_of_memory_total",
    "sglang_tuning_liveness_events_total",
    "sglang_tuning_rejected_requests_total",
    "sglang_tuning_state_seconds_total",
    "sglang_tuning_log_lines_total",
)
PARTS = 6  # of 2 MB each, with a start and ten retractions
READING = "sglang_tuning_log_reading_past"


def part(number: int) -> bytes:
    return START + b"".join(retraction(10 * number + each) for each in range(10)) + decode() * 12_000


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "server.log"
    with path.open("wb") as file:
        for number in range(PARTS):
            file.write(part(number))
        file.write(OOM)
    return path


def counters(page: Page) -> tuple[float | None, ...]:
    return (
        page.value("sglang_tuning_server_starts_total"),
        page.value("sglang_tuning_retraction_events_total"),
        page.value("sglang_tuning_out_of_memory_total", phase="decode"),
    )


def test_no_scrape_sees_the_counters_of_half_a_log_also_after_a_restart(log: Path, tmp_path: Path) -> None:
    flags = ("--log-file", str(log), "--from-start", "--state-file", str(tmp_path / "state.json"))
    for parts in (PARTS, 2 * PARTS):
        seen, read = [], (0.0, (float(parts), 10.0 * parts, 1.0))
        with running_exporter(*flags) as exporter:

            def is_read() -> bool:
                page = exporter.page()
                seen.append((page.value(READING), counters(page)))  # noqa: B023
                return seen[-1] == read  # noqa: B023

            wait_for(is_read, 60)
            assert exporter.get("/-/healthy").status_code == 200
        assert set(seen) <= {(1.0, (None, None, None)), read}
        with log.open("ab") as file:
            file.writelines(part(number) for number in range(PARTS, 2 * PARTS))


def watched(log: Path) -> Sidecar:
    """A sidecar after its first look at the log."""
    sidecar = Sidecar(config(log_file=(str(log),), from_start=True, sglang_url="http://127.0.0.1:9"))
    assert sidecar.log is not None
    sidecar.log.poll()
    return sidecar


def test_every_counter_that_a_line_moves_waits_and_those_of_the_metrics_do_not(log: Path) -> None:
    sidecar = watched(log)
    sidecar.watch.take_page(Scrape([], aborted_requests=3.0), sidecar.now())
    page = Page(text_format(collect(sidecar)))
    assert page.value(READING) == 1
    assert [name for name in OF_THE_LOG if page.labels(name)] == []
    assert page.value("sglang_tuning_aborted_requests_total") == 0
    assert page.labels("sglang_tuning_verdict_info")
    assert sidecar.log is not None
    while sidecar.log.poll():
        pass
    page = Page(text_format(collect(sidecar)))
    assert page.value(READING) == 0
    assert [name for name in OF_THE_LOG if not page.labels(name)] == []


def test_counters_wait_ten_minutes_at_most(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sidecar = watched(log)
    assert sidecar.log is not None
    assert sidecar.log.is_catching_up
    assert logbook.FIRST_READ_SECONDS == 600
    monkeypatch.setattr(logbook, "FIRST_READ_SECONDS", 0.0)
    assert not sidecar.log.is_catching_up
    assert Page(text_format(collect(sidecar))).labels("sglang_tuning_out_of_memory_total")


def test_counters_wait_from_the_first_full_block_on(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sidecar = Sidecar(config(log_file=(str(log),), from_start=True, sglang_url="http://127.0.0.1:9"))
    assert sidecar.log is not None
    seen = []
    book = sidecar.log
    monkeypatch.setattr("sglang_tuning_exporter.collect.log.time.sleep", lambda _: seen.append(book.is_catching_up))
    sidecar.log.poll()
    assert seen
    assert all(seen)
