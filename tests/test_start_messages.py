"""What the exporter logs when an address, a key or a log cannot work: one warning with what is wrong and what to do."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import pytest
import trustme

from conftest import FakeSGLang, reply, running_exporter, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def warning(*flags: str, of: str) -> str:
    """The first line at WARNING that holds these words, of an exporter that is scraped once."""
    with running_exporter(*flags) as exporter:
        exporter.page()
        wait_for(lambda: any(of in line for line in exporter.said))
        found = [line for line in exporter.said if of in line]
        assert "WARNING" in found[0], found
        return found[0]


@contextmanager
def answering(answer: Callable[[socket.socket], object]) -> Iterator[int]:
    """A server that does this with each connection; its port."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)

        def serve() -> None:
            while not ended.is_set():
                with suppress(TimeoutError):
                    connection, _ = listener.accept()
                    with connection, suppress(OSError):
                        connection.settimeout(2)
                        answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield int(listener.getsockname()[1])
        finally:
            ended.set()
            thread.join()


def in_the_clear(connection: socket.socket) -> None:
    """Refuse bytes that are not HTTP, as uvicorn does."""
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")


def by_tls(connection: socket.socket) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    context.wrap_socket(connection, server_side=True).close()


def test_an_unknown_host_is_logged_with_what_to_check() -> None:
    said = warning("--sglang-url", "http://no-such-host.invalid:30000", of="cannot scrape")
    assert "the host name is unknown: check --sglang-url" in said


def test_a_missing_key_is_logged_with_its_flag(sglang: FakeSGLang) -> None:
    sglang.answers["/metrics"] = reply(b"", "401 Unauthorized")
    said = warning("--sglang-url", sglang.url, of="cannot scrape")
    assert "it answers HTTP 401: it wants a key; give --api-key-file" in said


def test_a_wrong_key_is_logged_without_the_key(sglang: FakeSGLang, tmp_path: Path) -> None:
    sglang.answers["/metrics"] = reply(b"", "401 Unauthorized")
    (tmp_path / "key").write_text("guessed-key\n")
    said = warning("--sglang-url", sglang.url, "--api-key-file", str(tmp_path / "key"), of="cannot scrape")
    assert "the key that was sent is not the server's --api-key" in said
    assert "guessed-key" not in said


def test_tls_to_a_server_without_tls_is_logged() -> None:
    with answering(in_the_clear) as port:
        said = warning("--sglang-url", f"https://127.0.0.1:{port}", of="cannot scrape")
    assert "it does not speak TLS: give --sglang-url with http://" in said


def test_plain_http_to_a_server_with_tls_is_logged() -> None:
    with answering(by_tls) as port:
        said = warning("--sglang-url", f"http://127.0.0.1:{port}", of="cannot scrape")
    assert "it closed the connection; does it want TLS (https:// in --sglang-url)?" in said


def test_a_certificate_of_an_unknown_authority_is_logged() -> None:
    with answering(by_tls) as port:
        said = warning("--sglang-url", f"https://127.0.0.1:{port}", of="cannot scrape")
    assert "its certificate is not trusted: " in said


def test_a_log_that_is_a_directory_is_logged_with_what_to_give(tmp_path: Path) -> None:
    said = warning("--log-file", str(tmp_path), of=f"log {tmp_path}")
    assert "is a directory; name the file in it, or a pattern such as DIR/*.log" in said


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_an_unreadable_log_file_is_logged_with_what_to_change(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.touch(mode=0)
    assert "permission denied; let this user read it" in warning("--log-file", str(log), of=f"log {log}")


def test_a_log_that_is_not_there_yet_is_waited_for_and_no_warning(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with running_exporter("--log-file", str(log)) as exporter:
        wait_for(lambda: any("missing; waiting for it" in line for line in exporter.said))
        assert not any("WARNING" in line for line in exporter.said)


def test_a_followed_log_is_logged_without_a_warning(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.touch()
    with running_exporter("--log-file", str(log)) as exporter:
        wait_for(lambda: any(f"log {log}: following" in line for line in exporter.said))
        assert not any("WARNING" in line for line in exporter.said)
