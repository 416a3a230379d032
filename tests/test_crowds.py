"""What one client does changes nothing for others: guesses, pages, scrapes and connections wait apart, in bounded
numbers.
"""

from __future__ import annotations

import asyncio
import http.client
import signal
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
import requests
from requests.adapters import HTTPAdapter

from conftest import Exporter, FakeSGLang, Page, config, hang, reply, running_exporter, wait_for, web
from faults import RESET, Totals, complaints, forget_peak, open_files, resident, serving, totals
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.serve.guard import MOST_CHECKS, FullError, Lane, Passwords
from sglang_tuning_exporter.serve.probe import is_alive
from sglang_tuning_exporter.serve.run import MOST_CONNECTIONS, MOST_STRANGERS
from web_access import ask, basic, hashed, ours

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from web_access import Ours

TIMEOUT_HEADER = "X-Prometheus-Scrape-Timeout-Seconds"
RIGHT = basic("prometheus", "right")
SCRAPE = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
LARGE = b"".join(b'sglang:odd{number="%d",words="%s"} 1\n' % (number, b"x" * 200) for number in range(20_000))


class Held:
    """Passwords whose check does not end while it is held."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.goes_on, self.checked = threading.Event(), 0
        self._real = Passwords.verify
        monkeypatch.setattr(Passwords, "verify", lambda *given: self._verify(*given))  # noqa: PLW0108 - a function takes its instance

    def _verify(self, *given: object) -> bool:
        self.checked += 1
        self.goes_on.wait(60)
        return self._real(*given)  # type: ignore[arg-type]


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Ours]:
    file = tmp_path / "web.yml"
    file.write_text(f"basic_auth_users: {{prometheus: '{hashed('right')}'}}")
    with ours(file) as exporter:
        assert ask(exporter.url, None, RIGHT, "/-/healthy").status == 200
        yield exporter


def connected(port: int, sent: bytes = b"", *, buffer: int | None = None) -> socket.socket:
    """A connection that has sent these bytes, with a small receive buffer where `buffer` is given."""
    made = socket.socket()
    if buffer is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    made.settimeout(60)
    made.connect(("127.0.0.1", port))
    made.sendall(sent)
    return made


def guess(port: int, number: int) -> socket.socket:
    """A connection on which a wrong password was sent."""
    credentials = basic("prometheus", f"guess {number}").encode()
    return connected(port, b"GET /-/healthy HTTP/1.1\r\nHost: x\r\nAuthorization: %b\r\n\r\n" % credentials)


def test_a_handful_of_guesses_is_checked_and_the_next_one_is_answered_at_once(
    guarded: Ours, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    with ExitStack() as stack:
        waiting = []
        for number in range(MOST_CHECKS):
            waiting.append(stack.enter_context(guess(guarded.port, number)))
            wait_for(lambda: held.checked == 1)
            time.sleep(0.1)
        with guess(guarded.port, 99) as one_more:
            answer = one_more.recv(65536)
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert b"retry-after: 1" in answer
        held.goes_on.set()
        assert {each.recv(12) for each in waiting} == {b"HTTP/1.1 401"}


def test_a_guess_whose_client_has_left_is_dropped_and_its_place_is_free(
    guarded: Ours, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    for number in range(5 * MOST_CHECKS):
        guess(guarded.port, number).close()
        time.sleep(0.02)
    held.goes_on.set()
    wait_for(lambda: ask(guarded.url, None, basic("prometheus", "another"), "/-/healthy").status == 401)
    assert held.checked <= MOST_CHECKS, "those that waited were checked although nobody waited for them"


def test_the_probe_and_a_remembered_client_do_not_notice_a_hundred_guesses_a_second(guarded: Ours) -> None:
    ends = threading.Event()

    def flood(number: int) -> None:
        while not ends.is_set():
            guess(guarded.port, number).close()
            number += 1
            time.sleep(0.02)

    with ThreadPoolExecutor(2) as pool:
        for number in (0, 1_000_000):
            pool.submit(flood, number)
        try:
            met = Counter(ask(guarded.url, None, RIGHT, "/metrics").status for _ in range(10))
            assert is_alive("127.0.0.1", guarded.port, 10)
        finally:
            ends.set()
    assert met == {200: 10}


def test_a_guess_under_way_neither_delays_nor_breaks_the_end(tmp_path: Path) -> None:
    file, log = tmp_path / "web.yml", tmp_path / "server.log"
    file.write_text(f"basic_auth_users: {{prometheus: '{hashed('right', 13)}'}}")
    log.touch()
    with running_exporter("--log-file", str(log), "--web-config", str(file)) as exporter, ExitStack() as stack:
        for number in range(MOST_CHECKS):
            stack.enter_context(guess(exporter.port, number))
        time.sleep(0.3)
        exporter.process.send_signal(signal.SIGTERM)
        assert exporter.process.wait(30) == 0
    assert "FATAL" not in "".join(exporter.said)


def test_strangers_never_take_the_place_of_a_client_that_was_let_in(guarded: Ours) -> None:
    known = {"Authorization": RIGHT}
    with ExitStack() as stack:
        scraper = http.client.HTTPConnection("127.0.0.1", guarded.port, timeout=10)
        stack.callback(scraper.close)
        scraper.request("GET", "/-/healthy", headers=known)
        assert scraper.getresponse().read()
        scraper.auto_open = 0  # so that it would fail on a connection that was closed
        for number in range(MOST_STRANGERS + 50):
            asked = b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n" if number % 2 else b""
            made = stack.enter_context(connected(guarded.port, asked))
            assert not asked or made.recv(12) == b"HTTP/1.1 401"
        scraper.request("GET", "/-/healthy", headers=known)
        assert scraper.getresponse().read()


def test_a_crowd_of_waiting_scrapes_delays_neither_a_page_nor_the_probe_nor_the_end(sglang: FakeSGLang) -> None:
    sglang.answers["/metrics"] = hang
    with running_exporter("--sglang-url", sglang.url, "--scrape-timeout", "60") as exporter, ExitStack() as stack:
        for _ in range(MOST_CONNECTIONS - 14):
            stack.enter_context(connected(exporter.port, SCRAPE))
        wait_for(lambda: sglang.count("/metrics") == 1, 20)
        for path in ("/", "/api/v1/findings", "/-/healthy", "/runbooks/"):
            assert exporter.get(path).status_code == 200
        assert exporter.page(within="0.2").value("sglang_tuning_up") == 0
        assert sglang.count("/metrics") == 1, "they share one scrape"
        exporter.process.send_signal(signal.SIGTERM)
        assert exporter.process.wait(30) == 0


DAWDLING = {
    "idle": b"",
    "unfinished headers": SCRAPE[:-2] + b"X-Slow:",
    "unfinished body": b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\nx",
    "kept alive": SCRAPE.replace(b"/metrics", b"/-/healthy"),
    "unread": SCRAPE,
}


@pytest.fixture(scope="module")
def scraped() -> Iterator[Exporter]:
    """One exporter for all rows."""
    server = FakeSGLang({"/metrics": reply(serving(1000))})
    server.start()
    with running_exporter("--sglang-url", server.url) as exporter:
        exporter.page()
        yield exporter
    server.stop()


@pytest.mark.parametrize("begun", DAWDLING.values(), ids=DAWDLING)
def test_connections_that_dawdle_do_not_lock_the_scraper_out(begun: bytes, scraped: Exporter) -> None:
    forget_peak(scraped)
    before = resident(scraped)
    with ExitStack() as all_of_them, requests.Session() as prometheus:
        prometheus.mount("http://", HTTPAdapter(max_retries=2))  # an idle connection may be let go: Go asks again, too
        for number in range(MOST_STRANGERS + MOST_CONNECTIONS):
            all_of_them.enter_context(connected(scraped.port, begun, buffer=2048))
            if number % 32 == 0:
                answer = prometheus.get(scraped.url + "/metrics", headers={TIMEOUT_HEADER: "5"}, timeout=12)
                assert answer.status_code == 200
                assert "\nsglang_tuning_up 1" in answer.text
        assert scraped.get("/-/healthy").status_code == 200
        assert scraped.page().value("sglang_tuning_up") == 1
        assert open_files(scraped) < MOST_STRANGERS + MOST_CONNECTIONS + 32
    assert complaints(scraped) == []
    assert resident(scraped, "VmHWM") - before < 100


def test_scrapers_that_disconnect_half_way_leave_nothing_behind(sglang: FakeSGLang) -> None:
    sglang.answers["/metrics"] = reply(serving(1000) + LARGE)
    with running_exporter("--sglang-url", sglang.url) as exporter:
        exporter.page()
        before = open_files(exporter)
        for number in range(8):
            connection = connected(exporter.port, SCRAPE[: len(SCRAPE) if number % 2 else 20], buffer=2048)
            if number % 4 == 1:
                connection.recv(1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            connection.close()
        assert exporter.page().value("sglang_tuning_up") == 1
        wait_for(lambda: open_files(exporter) <= before + 2, 10)
        assert complaints(exporter) == []


@pytest.mark.parametrize("path", ["/", "/api/v1/findings", "/runbooks/", "/runbooks/SGLangServerDown"])
def test_a_reader_without_a_place_is_asked_to_come_again_and_leaves_no_line(
    path: str, sglang: FakeSGLang, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full, take = threading.Event(), Lane.run

    async def run(lane: Lane, work: Any) -> Any:
        if full.is_set():
            raise FullError
        return await take(lane, work)

    monkeypatch.setattr(Lane, "run", run)
    sidecar = Sidecar(config(sglang_url=sglang.url))
    with web(sidecar) as url:
        assert requests.get(url + path, timeout=60).status_code == 200
        full.set()
        caplog.clear()
        answer = requests.get(url + path, timeout=60)
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    assert "Too many wait already" in answer.text
    assert len(answer.text.splitlines()) == 1
    assert caplog.messages == []


def test_forty_readers_at_once_get_a_page_or_are_asked_to_come_again(scraped: Exporter) -> None:
    scraped.get("/")
    with ThreadPoolExecutor(40) as pool:
        met = Counter(each.status_code for each in pool.map(scraped.get, ["/", "/api/v1/findings"] * 60))
    assert met.keys() <= {200, 503}
    assert met[200] > 0
    assert complaints(scraped) == []


def test_invalid_requests_are_counted_and_write_a_line_a_minute(sglang: FakeSGLang) -> None:
    upgrade = b"GET /-/healthy HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    with running_exporter("--sglang-url", sglang.url) as exporter:
        for sent, status in ((b"\x16\x03\x01\r\n\r\n", b"HTTP/1.1 400"), (upgrade, b"HTTP/1.1 200")):
            for _ in range(30):
                with connected(exporter.port, sent) as stranger:
                    assert stranger.recv(12) == status
        page = exporter.page()
        assert page.value("sglang_tuning_http_requests_total", code="400") == 30
        assert sum("WARNING" in line for line in exporter.said) <= 3


def test_a_page_that_no_thread_can_write_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = Lane("pages", 1)

    def limited(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(threading.Thread, "start", limited)
        with pytest.raises(FullError):
            asyncio.run(lane.run(lambda: "page"))
    assert asyncio.run(lane.run(lambda: "page")) == "page"


def test_two_prometheus_at_once_each_get_a_whole_page_of_one_moment(sglang: FakeSGLang) -> None:
    """The fake SGLang counts each scrape; clients that ask during a scrape share its result."""
    count = 1000
    lock = threading.Lock()

    def counting(connection: socket.socket) -> None:
        nonlocal count
        with lock:
            count += 1
            body = serving(count)
        time.sleep(0.05)
        reply(body)(connection)

    pages: dict[int, list[Page]] = {0: [], 1: []}
    sglang.answers["/metrics"] = reply(serving(count))
    with running_exporter("--sglang-url", sglang.url) as exporter:
        exporter.page()
        questions = sglang.count("/metrics")
        sglang.answers["/metrics"] = counting

        def prometheus(number: int) -> None:
            for _ in range(15):
                pages[number].append(exporter.page())

        threads = [threading.Thread(target=prometheus, args=(number,)) for number in pages]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert totals(exporter.page()) == Totals(count - 1000, count - 1000, 0)
        assert complaints(exporter) == []
    for own in pages.values():
        assert len(own) == 15
        for page in own:
            native = {page.value(f"sglang:{name}_total") for name in ("num_retracted_requests", "cuda_graph_passes")}
            assert len(native) == 1, "the series of one page are of one moment"
        counted = [totals(page).retracted for page in own]
        assert counted == sorted(counted)
    assert 15 <= sglang.count("/metrics") - questions <= 31


def test_a_callers_patience_is_his_own(sglang: FakeSGLang) -> None:
    """Beside a proper scraper: SGLang answers in 0.3 s, and nobody reads that it does not."""

    def slow(connection: socket.socket) -> None:
        time.sleep(0.3)
        reply(serving(1000))(connection)

    sglang.answers["/metrics"] = slow
    sidecar = Sidecar(config(sglang_url=sglang.url))
    sidecar.start()
    with web(sidecar) as url:
        for header in ("10", "0.01", "0", "-1", "nan", "inf", "1e309", "", "soon", "9" * 5000, "1e-300", "10"):
            answer = requests.get(url + "/metrics", headers={TIMEOUT_HEADER: header}, timeout=20).text
            assert "sglang_tuning_up 1.0" in answer
        assert "\nsglang:" in answer
        assert sidecar.watch.failure is None


def test_answers_that_nobody_reads_are_let_go_before_they_fill_the_memory(sglang: FakeSGLang) -> None:
    sglang.answers["/metrics"] = reply(serving(1000) + LARGE)
    with running_exporter("--sglang-url", sglang.url, "--scrape-timeout", "30") as exporter, ExitStack() as stack:
        exporter.page()
        readers = [stack.enter_context(connected(exporter.port, SCRAPE, buffer=2048)) for _ in range(12)]
        assert all(reader.recv(1) for reader in readers)
        before = resident(exporter)
        wait_for(lambda: resident(exporter) <= before + 30, 20)
        wait_for(lambda: any(is_closed(reader) for reader in readers), 20)
        assert exporter.page().value("sglang_tuning_up") == 1


def is_closed(reader: socket.socket) -> bool:
    reader.setblocking(False)  # noqa: FBT003 - the library's own
    try:
        while piece := reader.recv(65536):
            del piece
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True
