"""Faults of the SGLang server that the exporter watches. docs/faults.md says what happens under each."""

from __future__ import annotations

import gzip
import itertools
import re
import secrets
import socket
import time
from typing import TYPE_CHECKING, NamedTuple

import pytest
import requests

from conftest import SERVING, Answer, FakeSGLang, Page, drip, hang, raw, reply, running_exporter, wait_for
from faults import (
    OK_HEAD,
    Totals,
    Watched,
    complaints,
    endless,
    forget_peak,
    found,
    grace,
    resident,
    server_info,
    serving,
    torn,
    totals,
)
from sglang_tuning_exporter.collect.scrape import MOST_BYTES
from sglang_tuning_exporter.collect.sidecar import TWO_SERVERS
from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.lines import Reader
from sglang_tuning_exporter.core.server import MOST_SCHEDULERS
from sglang_tuning_exporter.core.watch import Watch
from sglang_tuning_exporter.serve.metrics.families import LONGEST_LABEL
from sglang_tuning_exporter.sglang.exposition import LONGEST_LINE, MOST_LINES
from sglang_tuning_exporter.sglang.metrics import MOST_RANKS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# What a fault may cost: the largest page that is read, as bytes, as text and in lines. A container has 512 MiB.
MOST_MIB = 160
JSON = "application/json"
CHUNKED = OK_HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
CHUNK = b"10000\r\n" + b"sglang:num_queue_reqs 1\n".ljust(32, b"\n") * 2048 + b"\r\n"
BOMB = gzip.compress(b"\n" * (16 << 20), 9) * 64  # 1 MB that unfolds to 1 GB
PAGE = serving(1)


class Fault(NamedTuple):
    """An answer of SGLang, and the reason that the exporter must report."""

    answer: Answer
    reason: str
    finding: str | None = "server_down"


def length(size: int) -> bytes:
    return OK_HEAD + b"Content-Length: %d\r\n\r\n" % size


# Answers without figures.
FAULTS: dict[str, Fault] = {
    "slow": Fault(hang, "timeout"),
    "dripping_body": Fault(drip(length(100_000)), "timeout"),
    "dripping_body_of_no_length": Fault(drip(OK_HEAD + b"\r\n" + PAGE), "timeout"),
    "dripping_headers": Fault(drip(b"HTTP/1.1 200 OK\r\nX: "), "timeout"),
    "endless_100_continue": Fault(drip(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), "timeout"),
    "500": Fault(reply(b"Internal Server Error", "500 Internal Server Error"), "http_status"),
    "503": Fault(reply(b"", "503 Service Unavailable"), "http_503"),
    "403": Fault(reply(b"", "403 Forbidden"), "http_status"),
    # It had metrics: a server that is gone, until its /server_info has answered.
    "404": Fault(reply(b"{}", "404 Not Found", JSON), "metrics_disabled", "metrics_disabled"),
    "redirect_to_itself": Fault(reply(b"", "302 Found", more="Location: /metrics\r\n"), "http_status"),
    "html": Fault(reply(b"<html>sglang:num_queue_reqs 1</html>", content_type="text/html"), "invalid"),
    "json": Fault(reply(b'{"sglang:num_queue_reqs": 1}', content_type=JSON), "invalid"),
    "redirect_to_nowhere": Fault(reply(b"", "301 Moved Permanently", more="Location: http://[::1/\r\n"), "invalid"),
    "noise": Fault(reply(bytes(range(256)) * 20, content_type="application/octet-stream"), "invalid"),
    "no_http": Fault(raw(b"SSH-2.0-OpenSSH_9.2\r\n\r\n"), "invalid"),
    "another_program": Fault(reply(b"up 1\n"), "invalid"),
    "empty": Fault(reply(b""), "not_ready", None),
    "gzip_unasked": Fault(reply(gzip.compress(PAGE), more="Content-Encoding: gzip\r\n"), "invalid"),
    "gzip_bomb": Fault(reply(BOMB, more="Content-Encoding: gzip\r\n"), "invalid"),
    "1_gb": Fault(endless(length(1 << 30), PAGE * 100), "too_large"),
    "endless_chunks": Fault(endless(CHUNKED, CHUNK), "too_large"),
    "line_of_100_mb": Fault(endless(length(100 << 20) + b"sglang:x", b"x" * (1 << 20), 100 << 20), "too_large"),
    "half_a_page": Fault(raw(length(2 * len(PAGE)) + PAGE), "unreachable"),
    "reset_in_the_body": Fault(torn(length(2 * len(PAGE)) + PAGE), "unreachable"),
    "hangs_up": Fault(raw(b""), "unreachable"),
    "endless_headers": Fault(endless(OK_HEAD, b"X: y\r\n" * 10_000), "invalid"),
    "giant_header": Fault(endless(OK_HEAD + b"X: ", b"x" * (1 << 20), 100 << 20), "invalid"),
}


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeSGLang]:
    server = FakeSGLang({"/metrics": reply(serving(1000)), "/server_info": reply(server_info(), content_type=JSON)})
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def watched(fake: FakeSGLang) -> Iterator[Watched]:
    """One exporter for all rows, so that a lasting effect of one fault fails the next row."""
    with running_exporter("--sglang-url", fake.url, "--scrape-timeout", "3") as exporter:
        watched = Watched(exporter, fake)
        watched.well()
        yield watched


@pytest.fixture(autouse=True)
def well(request: pytest.FixtureRequest) -> Iterator[None]:
    """Before and after each row the exporter counts what the server counts, once, and its
    memory and output stay small.
    """
    if "watched" not in request.fixturenames:
        yield
        return
    watched: Watched = request.getfixturevalue("watched")
    watched.before = watched.well()
    forget_peak(watched.exporter)
    before = resident(watched.exporter)
    yield
    assert watched.well(7) == watched.before.more(7)
    assert complaints(watched.exporter) == []
    assert resident(watched.exporter, "VmHWM") - before < MOST_MIB


@pytest.mark.parametrize("row", FAULTS)
def test_an_answer_without_figures_is_said_in_time_and_costs_nothing(row: str, watched: Watched) -> None:
    fault = FAULTS[row]
    watched.answer(fault.answer)
    watched.page(within=2.0)
    # Whoever waits less than --scrape-timeout has his page in time, and the reason when the shared scrape has ended.
    deadline = time.monotonic() + 30
    while (page := watched.page(within=2.0)).error != fault.reason:
        assert time.monotonic() < deadline, page.error
    assert page.value("sglang_tuning_up") == 0
    assert found(watched.exporter) == ({fault.finding} if fault.finding else set())
    assert totals(page) == watched.before
    assert "sglang:" not in page.text


ODD = b"# TYPE sglang:odd gauge\n"
COOKIES = f"Set-Cookie: {secrets.token_hex(8)}={'x' * 4000}; Path=/\r\n" * 9
# Answers with figures that are odd, each with what is counted as cut. The server's count is put in.
ODD_BUT_READ: dict[str, tuple[Callable[[int], Answer], str]] = {
    "wrong_content_type": (lambda n: reply(serving(n), content_type="image/png"), ""),
    "http_1_0": (lambda n: raw(b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\n" + serving(n)), ""),
    "invalid_utf8": (lambda n: reply(ODD + b'sglang:odd{odd="\xff\xfe"} 1\nsglang:\xff 2\n' + serving(n)), ""),
    "nul_bytes": (lambda n: reply(b"\0" * 1000 + b"\n" + serving(n) + b'sglang:odd{odd="\0"} 1\n'), ""),
    "line_of_10_mb": (lambda n: reply(b"sglang:odd{%b} 1\n" % (b"x" * (10 << 20)) + serving(n)), "long_metric_lines"),
    "label_of_64_kb": (lambda n: reply(b'sglang:odd{a="%b"} 1\n' % (b"x" * 65536) + serving(n)), "long_metric_lines"),
    "long_model_name": (lambda n: reply(serving(n).replace(b'"tiny"', b'"%s"' % (b"m" * 3000))), ""),
    "cookies": (lambda n: reply(serving(n), more=COOKIES), ""),
}


@pytest.mark.parametrize("row", ODD_BUT_READ)
def test_an_odd_page_is_read_for_what_it_is_worth(row: str, watched: Watched) -> None:
    make, cut = ODD_BUT_READ[row]
    watched.count += 5
    watched.answer(make(watched.count))
    page = watched.page()
    assert (page.value("sglang_tuning_up"), page.error) == (1, None)
    assert found(watched.exporter) == set()
    assert totals(page) == watched.before.more(5)
    assert not cut or (page.value("sglang_tuning_capped_total", what=cut) or 0) > 0
    assert max(len(value) for s in page.samples for value in s.labels.values()) <= max(LONGEST_LINE, LONGEST_LABEL)
    assert len(page.labels("sglang_tuning_server_info")[0]["model_name"]) <= LONGEST_LABEL
    watched.before = totals(page)


def test_a_million_series_are_cut_and_the_cut_is_counted(sglang: FakeSGLang) -> None:
    odd = b"".join(b'sglang:odd{a="%d"} 1\n' % i for i in range(1_000_000))[: MOST_BYTES - 9999]
    sglang.answers["/metrics"] = reply(serving(1000))
    with running_exporter("--sglang-url", sglang.url, "--scrape-timeout", "60") as exporter:
        exporter.page()
        before = resident(exporter)
        sglang.answers["/metrics"] = reply(serving(1005) + ODD + odd[: odd.rindex(b"\n") + 1])
        page = Page(requests.get(exporter.url + "/metrics", timeout=60).text)
        assert page.value("sglang_tuning_up") == 1
        assert (page.value("sglang_tuning_capped_total", what="metric_lines") or 0) > 0
        assert MOST_LINES - 20 < sum(s.name == "sglang:odd" for s in page.samples) <= MOST_LINES
        assert totals(page) == Totals(5, 5, 0)
        assert resident(exporter, "VmHWM") - before < MOST_MIB
        assert complaints(exporter) == []


WHOLE = SERVING.decode()
TOKENS = re.compile(r"(?m)^(sglang:generation_tokens_total\{[^}]*\}) (\S+)$")


@pytest.mark.parametrize(
    "corrupt",
    [
        re.sub(r"(?m)^(sglang:[^ ]*) \S+$", r"\1 -1", WHOLE),
        TOKENS.sub(r"\1 1e15", WHOLE),
    ],
    ids=["each value -1", "a counter of 1e15"],
)
def test_one_corrupt_page_is_counted_and_changes_nothing_else(corrupt: str, sglang: FakeSGLang) -> None:
    with running_exporter("--sglang-url", sglang.url) as exporter:
        before = exporter.page()
        for _ in range(3):
            sglang.answers["/metrics"] = reply(corrupt.encode())
            exporter.page()
            sglang.answers["/metrics"] = reply(SERVING)
            exporter.page()
        after = exporter.page()
        assert after.value("sglang_tuning_capped_total", what="pages") == 3
        assert after.value("sglang_tuning_server_starts_total") == before.value("sglang_tuning_server_starts_total")
        for page in (before, after):
            alerts = {s.labels["diagnosis"] for s in page.samples if s.name == "sglang_tuning_alert" and s.value}
            assert alerts == set()
        assert totals(after) == totals(before)


def test_two_servers_behind_one_address_are_said_on_the_page_and_once_in_a_line(sglang: FakeSGLang) -> None:
    asked = itertools.count()

    def in_turn(connection: socket.socket) -> None:
        number = next(asked)
        reply(serving(1000 * (1 + number % 2) + number))(connection)

    sglang.answers["/metrics"] = in_turn
    with running_exporter("--sglang-url", sglang.url) as exporter:
        for _ in range(12):
            page = exporter.page()
        assert page.value("sglang_tuning_server_starts_total") == 0
        assert TWO_SERVERS in exporter.get("/").text
        assert sum(TWO_SERVERS in line for line in exporter.said) == 1


def test_many_dp_ranks_are_cut_and_the_cut_is_counted(sglang: FakeSGLang) -> None:
    sglang.answers["/metrics"] = reply(serving(10, ranks=range(MOST_SCHEDULERS + 50)))
    with running_exporter("--sglang-url", sglang.url) as exporter:
        page = Page(requests.get(exporter.url + "/metrics", timeout=60).text)  # of 26,000 series
        assert page.value("sglang_tuning_up") == 1
        shown = {labels["dp_rank"] for labels in page.labels("sglang_tuning_queued_requests")}
        assert len(shown) == MOST_SCHEDULERS
        assert (page.value("sglang_tuning_capped_total", what="dp_ranks") or 0) >= 50
        assert complaints(exporter) == []


def test_401_is_said_until_the_key_is_right(sglang: FakeSGLang, tmp_path: Path) -> None:
    right, wrong = secrets.token_hex(16), secrets.token_hex(16)
    (tmp_path / "key").write_text(wrong)

    def guarded(connection: socket.socket) -> None:
        allowed = f"Authorization: Bearer {right}\r\n" in sglang.asked[-1]
        (reply(serving(1000)) if allowed else reply(b"", "401 Unauthorized"))(connection)

    sglang.answers["/metrics"] = guarded
    with running_exporter("--sglang-url", sglang.url, "--api-key-file", str(tmp_path / "key")) as it:
        page = it.page()
        assert (page.value("sglang_tuning_up"), page.error) == (0, "http_status")
        assert found(it) == {"server_down"}
        assert any("the key that was sent is not the server's --api-key" in line for line in it.said)
        (tmp_path / "key").write_text(right)
        assert it.page().value("sglang_tuning_up") == 1
        assert not found(it)
        assert not any(secret in "".join(it.said) for secret in (right, wrong))


HOSTILE_INFO: dict[str, Answer] = {
    "1_gb": endless(length(1 << 30), b'{"a":' * 10_000),
    "deep_json": reply(b'{"model_path":"tiny","version":"9","x":' + b"[" * 500_000, content_type=JSON),
    "many_small_lists": reply(b"[" + b"[]," * 5_000_000 + b"1]", content_type=JSON),
    "long_version": reply(server_info("9" * 1_000_000), content_type=JSON),
    "500": reply(b"Internal Server Error", "500 Internal Server Error"),
}


def _asked_anew(watched: Watched) -> None:
    """The exporter asks a server that was down for its arguments again."""
    before = watched.sglang.count("/server_info")
    watched.sglang.stop()
    watched.page()
    watched.sglang.start()
    watched.page()
    wait_for(lambda: watched.sglang.count("/server_info") > before)


@pytest.mark.parametrize("row", HOSTILE_INFO)
def test_hostile_server_info_costs_only_itself(row: str, watched: Watched) -> None:
    watched.sglang.answers["/server_info"] = HOSTILE_INFO[row]
    _asked_anew(watched)
    time.sleep(0.3)
    page = watched.page()
    assert page.value("sglang_tuning_up") == 1
    assert totals(page) == watched.before
    assert watched.exporter.get("/").status_code == watched.exporter.get("/api/v1/findings").status_code == 200
    (info,) = page.labels("sglang_tuning_server_info")
    assert len(info["version"]) <= LONGEST_LABEL
    release = f"0.5.{secrets.randbelow(1000)}"
    watched.sglang.answers["/server_info"] = reply(server_info(release), content_type=JSON)
    _asked_anew(watched)
    wait_for(lambda: watched.page().labels("sglang_tuning_server_info")[0]["version"] == release, 8)


def publish(server: FakeSGLang, page: bytes, version: str) -> None:
    """Replace the served page and the arguments."""
    server.answers |= {"/metrics": reply(page), "/server_info": reply(server_info(version), content_type=JSON)}


def test_a_killed_server_is_down_and_counts_on_as_another_release(
    sglang: FakeSGLang,
) -> None:
    publish(sglang, serving(1000), "0.5.20")
    with running_exporter("--sglang-url", sglang.url) as exporter:
        assert exporter.page().value("sglang_tuning_up") == 1
        publish(sglang, serving(1010), "0.5.20")
        before = totals(exporter.page())
        sglang.stop()
        page = exporter.page()
        assert (before, totals(page)) == (Totals(10, 10, 0), before)
        assert (page.value("sglang_tuning_up"), page.error) == (0, "connection_refused")
        assert found(exporter) == {"server_down"}
        publish(sglang, serving(3, ranks=(0, 1)), "0.5.23")
        sglang.start()
        page = exporter.page()
        assert (page.value("sglang_tuning_up"), found(exporter)) == (1, set())
        assert totals(page) == before.more(6, starts=1)
        assert {labels.get("dp_rank") for labels in page.labels("sglang_tuning_queued_requests")} >= {"0", "1"}
        wait_for(lambda: exporter.page().labels("sglang_tuning_server_info")[0]["version"] == "0.5.23")
        publish(sglang, serving(5, ranks=(0, 1)), "0.5.23")
        assert totals(exporter.page()) == before.more(10, starts=1)
        assert complaints(exporter) == []


def test_a_name_that_does_not_resolve_is_unreachable(fake: FakeSGLang) -> None:
    """An impossible name: the resolver may take longer than the scrape."""
    with running_exporter("--sglang-url", f"http://no-such-host.invalid:{fake.port}") as exporter:
        begin = time.monotonic()
        page = exporter.page(within="3")
        assert time.monotonic() - begin < 3 + grace()
        assert page.value("sglang_tuning_up") == 0
        # A server that was never up may be starting: its name may appear with its container. The reason is reported
        # anyway.
        assert page.error in {"not_ready", "timeout"}
        assert found(exporter) <= {"server_down"}
        assert "no-such-host.invalid" in exporter.get("/").text
        assert any("the host name is unknown: check --sglang-url" in line for line in exporter.said)
        assert complaints(exporter) == []


def test_both_sides_speak_ipv6() -> None:
    server = FakeSGLang({"/metrics": reply(serving(1000))}, host="::1")
    try:
        server.start()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    with running_exporter("--sglang-url", server.url, "--listen-address", "[::1]:0") as exporter:
        assert exporter.url.startswith("http://[::1]:")
        assert exporter.page().value("sglang_tuning_up") == 1
        server.stop()
        assert exporter.page().error == "connection_refused"
        server.answers["/metrics"] = reply(serving(2))
        server.start()
        assert totals(exporter.page()) == Totals(2, 2, 1)
    server.stop()


def test_many_dp_ranks_in_a_log_are_cut_and_the_cut_is_counted() -> None:
    watch, reader = Watch(PROFILES["online"], 0.0, reads=True, scrapes=False), Reader()
    for rank in range(3000):
        stamp = f"[2025-11-20 11:40:10 DP{rank} TP{rank}] "
        text = (
            f"{stamp}max_total_num_tokens=1040384, chunked_prefill_size=8192, max_running_requests=400\n"
            f"{stamp}Decode batch, #running-req: 2, #token: 9, token usage: 0.10, cuda graph: True, "
            "gen throughput (token/s): 4.10, #queue-req: 0\n"
        )
        for line in text.encode().splitlines():
            for event in reader.read(line):
                watch.take_line(event)
    assert len(watch.server.schedulers) == MOST_SCHEDULERS
    assert len(watch.server.facts.limits) <= MOST_RANKS + 1
    assert watch.server.capped["dp_ranks"] >= MOST_RANKS - MOST_SCHEDULERS
