"""Faults caused by clients that scrape the exporter: what they can do to it, and to each other."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import requests
import yaml
from requests.adapters import HTTPAdapter

from conftest import Exporter, FakeSGLang, Page, config, reply, running_exporter, wait_for, web
from faults import (
    RESET,
    Totals,
    complaints,
    forget_peak,
    resident,
    server_info,
    serving,
    totals,
)
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.recordings.demo import Process, free_port, program
from sglang_tuning_exporter.serve.run import MOST_CONNECTIONS, MOST_STRANGERS

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT_HEADER = "X-Prometheus-Scrape-Timeout-Seconds"
LARGE = b"# TYPE sglang:odd gauge\n" + b"".join(b'sglang:odd{a="%d"} 1\n' % i for i in range(20_000))


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeSGLang]:
    server = FakeSGLang({"/metrics": reply(serving(1000)), "/server_info": reply(server_info())})
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def exporter(fake: FakeSGLang) -> Iterator[Exporter]:
    """One exporter for all rows."""
    with running_exporter("--sglang-url", fake.url, "--scrape-timeout", "5") as running:
        running.page()
        yield running


@pytest.fixture(autouse=True)
def unharmed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Before and after each row a normal scraper is served, and the exporter has neither grown nor logged an error."""
    if "exporter" not in request.fixturenames:
        yield
        return
    fake: FakeSGLang = request.getfixturevalue("fake")
    exporter: Exporter = request.getfixturevalue("exporter")
    fake.answers["/metrics"] = reply(serving(1000))
    exporter.page()  # counters that are smaller than those of the row before are a start from the second page on
    before = totals(exporter.page())
    forget_peak(exporter)
    held = resident(exporter)
    yield
    fake.answers["/metrics"] = reply(serving(1000))
    page = exporter.page()
    assert (page.value("sglang_tuning_up"), totals(page)) == (1, before)
    assert complaints(exporter) == []
    assert resident(exporter, "VmHWM") - held < 100


def connected(exporter: Exporter, first: bytes = b"", *, buffer: int | None = None) -> socket.socket:
    """A connection that has sent these bytes, with a small receive buffer where `buffer` is given."""
    host, port = exporter.url.removeprefix("http://").split(":")
    connection = socket.socket()
    if buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.settimeout(10)
    connection.connect((host, int(port)))
    connection.sendall(first)
    return connection


def asked(exporter: Exporter, request: bytes) -> bytes:
    """The answer to these bytes, until the exporter closes the connection."""
    with connected(exporter) as connection:
        with suppress(ConnectionError):  # it need not read all of them
            connection.sendall(request)
        answer = b""
        with suppress(ConnectionError):
            while piece := connection.recv(65536):
                answer += piece
        return answer


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def test_two_prometheus_at_once_each_get_a_whole_page_of_one_moment(fake: FakeSGLang) -> None:
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
    with running_exporter("--sglang-url", fake.url) as exporter:
        exporter.page()
        questions = fake.count("/metrics")
        fake.answers["/metrics"] = counting

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
    assert 15 <= fake.count("/metrics") - questions <= 31


def test_a_scraper_with_a_short_timeout_does_not_spoil_the_scrape_of_another(
    fake: FakeSGLang, exporter: Exporter
) -> None:
    def slowly(connection: socket.socket) -> None:
        time.sleep(0.8)
        reply(serving(1000))(connection)

    fake.answers["/metrics"] = slowly
    hasty = threading.Thread(target=exporter.page, kwargs={"within": "0.2"})
    hasty.start()
    time.sleep(0.05)
    assert exporter.page(within="8").value("sglang_tuning_up") == 1
    hasty.join()


def test_scrapers_that_read_slowly_hold_nobody_up(fake: FakeSGLang, exporter: Exporter) -> None:
    fake.answers["/metrics"] = reply(serving(1000) + LARGE)
    with ExitStack() as slow:
        readers = [
            slow.enter_context(connected(exporter, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", buffer=2048))
            for _ in range(10)
        ]
        for _ in range(3):
            for reader in readers:
                assert len(reader.recv(1)) == 1
            assert exporter.page().value("sglang_tuning_up") == 1


def test_scrapers_that_disconnect_half_way_leave_nothing_behind(fake: FakeSGLang, exporter: Exporter) -> None:
    fake.answers["/metrics"] = reply(serving(1000) + LARGE)
    descriptors = Path(f"/proc/{exporter.process.pid}/fd")
    before = len(list(descriptors.iterdir()))
    for number in range(20):
        connection = connected(exporter, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"[: 39 if number % 2 else 20])
        if number % 4 == 1:
            connection.recv(1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        connection.close()
    assert exporter.page().value("sglang_tuning_up") == 1
    wait_for(lambda: len(list(descriptors.iterdir())) <= before + 2, 10)


@pytest.mark.parametrize(
    ("row", "begun"),
    [
        ("idle", b""),
        ("unfinished_headers", b"GET /metrics HTTP/1.1\r\nHost: x\r\nX-Slow:"),
        ("unfinished_body", b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\nx"),
        ("kept_alive", b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n"),
        ("unread", b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"),
    ],
)
def test_connections_that_dawdle_do_not_lock_the_scraper_out(row: str, begun: bytes, exporter: Exporter) -> None:
    del row  # names the row
    with ExitStack() as all_of_them, requests.Session() as prometheus:
        prometheus.mount("http://", HTTPAdapter(max_retries=2))  # an idle connection may be let go: Go asks again, too
        for number in range(MOST_STRANGERS + MOST_CONNECTIONS):
            all_of_them.enter_context(connected(exporter, begun, buffer=2048))
            if number % 32 == 0:
                answer = prometheus.get(exporter.url + "/metrics", headers={TIMEOUT_HEADER: "5"}, timeout=12)
                assert answer.status_code == 200
                assert "\nsglang_tuning_up 1" in answer.text
        assert exporter.get("/-/healthy").status_code == 200
        assert exporter.page().value("sglang_tuning_up") == 1
        assert len(list(Path(f"/proc/{exporter.process.pid}/fd").iterdir())) < MOST_STRANGERS + MOST_CONNECTIONS + 32


def test_nobody_scrapes_for_a_while_and_the_exporter_looks_for_itself(fake: FakeSGLang) -> None:
    fake.answers["/metrics"] = reply(serving(1000))
    sidecar = Sidecar(config(sglang_url=fake.url), self_scrape_seconds=0.05)
    sidecar.start()
    with web(sidecar) as address:
        before = fake.count("/metrics")
        wait_for(lambda: fake.count("/metrics") > before + 3, 10)
        fake.answers["/metrics"] = reply(serving(1040))
        wait_for(lambda: sidecar.watch.server.counted["retracted"] == 40, 10)
        assert requests.get(address + "/-/ready", timeout=5).status_code == 200


OVERSIZED: dict[str, bytes] = {
    "path": b"GET /" + b"x" * (10 << 20) + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "query": b"GET /metrics?" + b"x=1&" * (2 << 20) + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    "header": b"GET /metrics HTTP/1.1\r\nHost: x\r\nX: " + b"x" * (10 << 20) + b"\r\n\r\n",
    "headers": b"GET /metrics HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * (1 << 20) + b"\r\n",
    "patience": b"GET /metrics HTTP/1.1\r\nHost: x\r\n"
    + TIMEOUT_HEADER.encode()
    + b": "
    + b"9" * (10 << 20)
    + b"\r\n\r\n",
    "noise": bytes(range(256)) * 40_000,
}


@pytest.mark.parametrize("row", OVERSIZED)
def test_an_oversized_request_is_refused(row: str, fake: FakeSGLang, exporter: Exporter) -> None:
    before = fake.count("/metrics")
    answer = asked(exporter, OVERSIZED[row])
    assert not answer or 400 <= status(answer) < 500
    assert fake.count("/metrics") == before


@pytest.mark.parametrize(
    "host",
    [
        b"",
        b"<script>alert(1)</script>",
        b"q w",
        b"$(reboot)",
        b"x" * 5000,
        b"\xff\xfe",
        b"evil.example:99999999",
        b"[::1",
    ],
)
@pytest.mark.parametrize("path", ["/metrics", "/", "/runbooks/SGLangServerDown"])
def test_a_host_that_is_none_changes_nothing(path: str, host: bytes, exporter: Exporter) -> None:
    answer = asked(exporter, b"GET %b HTTP/1.1\r\nHost: %b\r\nConnection: close\r\n\r\n" % (path.encode(), host))
    assert status(answer) in {200, 400}
    assert len(host) < 2 or host not in answer


class Prometheus:
    """Debian's, scraping an exporter every second."""

    def __init__(self, directory: Path, exporter: Exporter) -> None:
        path = program("prometheus")
        if path is None:
            pytest.fail("prometheus is missing: install it (Debian: apt install prometheus)", pytrace=False)
        (directory / "prometheus.yml").write_text(
            yaml.safe_dump(
                {
                    "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
                    "scrape_configs": [
                        {
                            "job_name": "sglang",
                            "static_configs": [{"targets": [exporter.url.removeprefix("http://")]}],
                        }
                    ],
                }
            )
        )
        self.url = f"http://127.0.0.1:{free_port()}"
        self._process = Process(
            "prometheus",
            [
                path,
                f"--config.file={directory}/prometheus.yml",
                f"--storage.tsdb.path={directory}/data",
                f"--web.listen-address={self.url.removeprefix('http://')}",
                "--log.level=error",
            ],
            directory / "prometheus.log",
        )

    def query(self, expression: str) -> list[Any]:
        answer = requests.get(self.url + "/api/v1/query", params={"query": expression}, timeout=5)
        return list(answer.json()["data"]["result"])

    def value(self, expression: str) -> float | None:
        """The single value of an instant query; None before there is one."""
        with suppress(requests.RequestException):
            found = self.query(expression)
            return float(found[0]["value"][1]) if found else None
        return None

    def stop(self) -> None:
        self._process.stop()


@pytest.fixture
def chain(sglang: FakeSGLang, tmp_path: Path) -> Iterator[tuple[FakeSGLang, Exporter, Prometheus]]:
    sglang.answers["/metrics"] = reply(serving(1000))
    with running_exporter("--sglang-url", sglang.url) as exporter:
        prometheus = Prometheus(tmp_path, exporter)
        try:
            yield sglang, exporter, prometheus
        finally:
            prometheus.stop()


def test_prometheus_sees_a_kill_and_a_recovery_and_no_gap_in_the_counters(
    chain: tuple[FakeSGLang, Exporter, Prometheus],
) -> None:
    server, exporter, prometheus = chain
    counter = "sglang_tuning_retracted_requests_total"
    wait_for(lambda: prometheus.value("sglang_tuning_up") == 1, 40)
    server.answers["/metrics"] = reply(serving(1030))
    wait_for(lambda: prometheus.value(counter) == 30, 20)
    server.stop()
    wait_for(lambda: prometheus.value("sglang_tuning_up") == 0, 20)
    assert prometheus.query("sglang_tuning_scrape_error_info")[0]["metric"]["reason"] == "connection_refused"
    assert prometheus.value('sglang_tuning_condition{diagnosis="server_down"}') == 1
    server.answers["/metrics"] = reply(serving(12))
    server.start()
    wait_for(lambda: prometheus.value(counter) == 42, 20)
    wait_for(lambda: prometheus.value("sglang_tuning_up") == 1, 20)
    assert prometheus.value(f"resets({counter}[5m])") == 0
    assert prometheus.value(f"max_over_time({counter}[5m]) - min_over_time({counter}[5m])") == 42
    assert prometheus.value("min_over_time(up[5m])") == 1, "the exporter itself was never away"
    (series,) = prometheus.query(f"{counter}[5m]")
    assert {float(value) for _, value in series["values"]} == {0, 30, 42}
    moments = [float(at) for at, _ in series["values"]]
    assert max(later - earlier for earlier, later in pairwise(moments)) < 5
    assert totals(exporter.page()) == Totals(42, 42, 1)
    assert complaints(exporter) == []
