"""Whatever SGLang answers, a scrape ends in time with one word for the reason."""

from __future__ import annotations

import errno
import os
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest
import trustme

from conftest import (
    SERVING,
    Answer,
    FakeSGLang,
    config,
    hang,
    reply,
    running_exporter,
)
from sglang_tuning_exporter.collect.scrape import Client, ScrapeError
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.config import files
from sglang_tuning_exporter.serve.app import scrape_timeout

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_one_scrape_of_us_is_one_scrape_of_sglang(sglang: FakeSGLang) -> None:
    with running_exporter("--sglang-url", sglang.url) as exporter:
        exporter.page()
        before = sglang.count("/metrics")
        for _ in range(5):
            exporter.page()
        assert sglang.count("/metrics") == before + 5


def test_a_proxy_of_the_environment_is_not_used(sglang: FakeSGLang) -> None:
    proxy = dict.fromkeys(("http_proxy", "HTTP_PROXY"), "http://127.0.0.1:9")
    with running_exporter("--sglang-url", sglang.url, variables=proxy) as exporter:
        assert exporter.page().value("sglang_tuning_up") == 1


def test_callers_share_the_scrape_that_runs_and_the_next_one_begins_after_it(sglang: FakeSGLang) -> None:
    sglang.answers["/metrics"] = hang
    sidecar = Sidecar(config(sglang_url=sglang.url, scrape_timeout=0.5))
    first = sidecar.refresh()[1]
    assert first is not None
    assert sidecar.refresh()[1] is first
    assert first.result(5) == ""
    sglang.answers["/metrics"] = reply(SERVING)
    second = sidecar.refresh()[1]
    assert second is not None
    assert second.result(5).startswith("#")
    sidecar.stop()
    assert sglang.count("/metrics") == 2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (os.mkfifo, "not a regular file"),
        (os.mkdir, "Is a directory"),
        (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
        (lambda path: path.write_bytes(b"x" * (2 << 20)), "larger than"),
    ],
    ids=["a FIFO", "a directory", "a device", "2 MiB"],
)
def test_a_key_file_that_is_none_is_the_reason_why_the_server_was_not_asked(
    make: Callable[[Path], object], words: str, sglang: FakeSGLang, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("first")
    client = Client(sglang.url, sglang.url + "/metrics", "first", key)
    assert client.metrics(5)
    key.unlink()
    make(key)
    with pytest.raises(ScrapeError, match=f"the file of --api-key-file cannot be read: {words}") as caught:
        client.metrics(5)
    assert (caught.value.reason, sglang.count("/metrics")) == ("key_file", 1)
    key.rmdir() if key.is_dir() else key.unlink()
    key.write_text("second")
    assert client.metrics(5), "it is read again when it answers"
    assert "Bearer second" in sglang.asked[-1]


@pytest.mark.parametrize(
    ("error", "reason"),
    [(files.NoThreadError(), "own_limit"), (OSError(errno.ETIMEDOUT, "no answer for 2 s"), "key_file")],
)
def test_a_key_is_sent_while_its_file_is_late_if_it_was_ever_read(
    error: OSError, reason: str, sglang: FakeSGLang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(_: Path) -> bytes:
        raise error

    key, other = tmp_path / "key", tmp_path / "other"
    key.write_text("first")
    known, unknown = (Client(sglang.url, sglang.url + "/metrics", None, file) for file in (key, other))
    assert known.metrics(5)
    monkeypatch.setattr(files, "read", late)
    assert known.metrics(5)
    assert "Bearer first" in sglang.asked[-1]
    with pytest.raises(ScrapeError, match="it was not asked") as caught:
        unknown.metrics(5)
    assert caught.value.reason == reason


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_an_exporter_without_files_or_memory_does_not_call_sglang_down(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("socket.create_connection", refuses)
    sidecar = Sidecar(config(sglang_url="http://127.0.0.1:9"))
    sidecar.scrape(5)
    with sidecar.view() as now:
        found = [each.diagnosis for each in sidecar.judged(now).findings]
    sidecar.stop()
    assert sidecar.watch.failure is not None
    assert sidecar.watch.failure.reason == "own_limit"
    assert sidecar.watch.failure.message.startswith(
        f"it was not asked: {os.strerror(number)}; raise the exporter's limit"
    )
    assert "server_down" not in found


def test_a_scrape_starts_no_thread(sglang: FakeSGLang, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(sglang.url, sglang.url + "/metrics")
    here = threading.current_thread()

    def start(thread: threading.Thread) -> None:
        assert threading.current_thread() is not here, "the scrape needs one"
        real(thread)

    real = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", start)
    assert client.metrics(5)


@pytest.mark.parametrize(
    ("announced", "most", "seconds"),
    [
        (None, 10, 10),
        ("10", 10, 9.5),
        ("1", 10, 0.9),
        ("30", 10, 10),
        ("0.01", 10, 0.05),
        ("soon", 10, 10),
        ("nan", 10, 10),
        ("-1", 10, 10),
        ("inf", 10, 10),
        ("0", 10, 10),
        ("", 10, 10),
        ("1e-300", 10, 0.05),
        ("٣", 10, 2.7),  # digits of other scripts are digits
    ],
)
def test_our_timeout_is_the_scrapers_less_a_margin(announced: str | None, most: float, seconds: float) -> None:
    assert scrape_timeout(announced, most) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("answer", "healthy"),
    [
        (reply(b""), True),
        (reply(b"", "503 Service Unavailable"), False),
        (hang, False),
        (reply(b"{}", "404 Not Found"), None),
        (reply(b"", "401 Unauthorized"), None),
    ],
    ids=["200", "503", "no answer", "404", "401"],
)
def test_a_health_check_succeeds_fails_or_is_not_made(answer: Answer, healthy: bool | None) -> None:  # noqa: FBT001 - a case
    server = FakeSGLang({"/health_generate": answer})
    server.start()
    try:
        assert Client(server.url, server.url + "/metrics").health(0.5) is healthy
    finally:
        server.stop()


@pytest.mark.parametrize("trusted", [True, False])
def test_a_server_with_tls_is_scraped_where_its_certificate_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, trusted: bool
) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    if trusted:
        monkeypatch.setattr("certifi.where", lambda: str(tmp_path / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Page)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"https://localhost:{server.server_address[1]}"
    client = Client(address, f"{address}/metrics")
    try:
        if trusted:
            assert client.metrics(10.0) == _Page.text
        else:
            with pytest.raises(ScrapeError, match="its certificate is not trusted") as caught:
                client.metrics(10.0)
            assert caught.value.reason == "unreachable"
    finally:
        server.shutdown()
        server.server_close()


class _Page(BaseHTTPRequestHandler):
    text = "sglang:num_running_reqs 1\n"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.text)))
        self.end_headers()
        self.wfile.write(self.text.encode())

    def log_message(self, *_: object) -> None:
        pass
