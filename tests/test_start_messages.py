"""What the exporter logs when an address, a key or a log cannot work: one warning with what is wrong and what to do."""

from __future__ import annotations

import re
import socket
import ssl
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import pytest
import trustme

from conftest import FakeSGLang, reply, running_exporter, wait_for
from sglang_tuning_exporter.collect.scrape import Client, ScrapeError

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


def test_a_missing_key_is_logged_with_its_flag(sglang: FakeSGLang) -> None:
    sglang.answers["/metrics"] = reply(b"", "401 Unauthorized")
    said = warning("--sglang-url", sglang.url, of="cannot scrape")
    assert "it answers HTTP 401: it wants a key; give --api-key-file" in said


@pytest.mark.parametrize(
    ("answer", "scheme", "words"),
    [
        (in_the_clear, "https", "it does not speak TLS: give --sglang-url with http://"),
        (by_tls, "http", "it closed the connection; does it want TLS (https:// in --sglang-url)?"),
    ],
)
def test_tls_on_one_side_alone_is_said(answer: Callable[[socket.socket], None], scheme: str, words: str) -> None:
    with answering(answer) as port:
        client = Client(f"{scheme}://127.0.0.1:{port}", f"{scheme}://127.0.0.1:{port}/metrics")
        with pytest.raises(ScrapeError, match=re.escape(words)):
            client.metrics(5)


def test_a_log_that_is_a_directory_is_logged_with_what_to_give(tmp_path: Path) -> None:
    said = warning("--log-file", str(tmp_path), of=f"log {tmp_path}")
    assert "is a directory; name the file in it, or a pattern such as DIR/*.log" in said
