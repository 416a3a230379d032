"""Asking SGLang over HTTP: never longer than a deadline, never more than 16 MiB."""

from __future__ import annotations

import errno
import http.client
import io
import os
import socket
import ssl
import time
from contextlib import closing, suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, TypeAlias
from urllib.parse import quote, urljoin, urlsplit

from sglang_tuning_exporter.config.files import NoThreadError, key_in, read_or_last
from sglang_tuning_exporter.sglang.exposition import owner_of
from sglang_tuning_exporter.sglang.metrics import RankFigures
from sglang_tuning_exporter.sglang.server_info import ServerInfo, parse_loads, parse_server_info

Reason: TypeAlias = Literal[
    "connection_refused",
    "unreachable",
    "not_ready",
    "timeout",
    "metrics_disabled",
    "http_status",
    "too_large",
    "invalid",
    "not_sglang",  # a page that names its owner
    "no_series",  # a page of nobody known: another server's, or a proxy's in SGLang's place
    "key_file",
    "own_limit",  # the exporter could not ask: it may open no file or start no thread
]
_Kinds: TypeAlias = "type[Exception] | tuple[type[Exception], ...]"
# The largest real page has 0.2 MB, one of 64 ranks 8 MB. Text with one wide character takes four times the memory.
MOST_BYTES = 16 << 20
MOST_JSON_BYTES = 4 << 20  # 64 ranks answer with 1 MB; JSON of empty lists takes thirty times its size in memory
_STATUSES: dict[int, tuple[Reason, str]] = {
    404: ("metrics_disabled", "it answers 404: start SGLang with --enable-metrics"),
    503: ("not_ready", "it answers 503: not ready yet"),
}
_CLOSED = (ConnectionResetError, BrokenPipeError)  # also RemoteDisconnected
_BROKEN_OFF = (http.client.RemoteDisconnected, http.client.IncompleteRead, OSError)
# What this process or machine lacks, whoever is asked.
_OWN_LIMITS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
# Why a request failed: the first row that its exception is of.
_FAILURES: tuple[tuple[_Kinds, Reason, str], ...] = (
    (ConnectionRefusedError, "connection_refused", "connection refused: nothing listens at that address"),
    (socket.gaierror, "unreachable", "the host name is unknown: check --sglang-url and this machine's DNS"),
    (_CLOSED, "unreachable", "it closed the connection; does it want TLS (https:// in --sglang-url)?"),
    ((ValueError, http.client.InvalidURL), "invalid", "the request cannot be made as HTTP"),  # its address or a header
    (_BROKEN_OFF, "unreachable", "the address cannot be reached or the connection broke off"),
    (http.client.HTTPException, "invalid", "the answer is not HTTP as it should be"),
)
_SAFE = "/%:@!$&'()*+,;=~?"  # of a path that stays as it was given
_PIECE_BYTES = 1 << 16
_REDIRECTS = {301, 302, 303, 307, 308}
_HEADERS = {"User-Agent": "sglang-tuning-exporter", "Accept-Encoding": "identity", "Connection": "close"}
# Continues "it answers HTTP 401", by whether a key was sent.
_REFUSED = {
    True: ": the key that was sent is not the server's --api-key; check --api-key-file or SGLANG_TUNING_API_KEY",
    False: ": it wants a key; give --api-key-file FILE with the server's --api-key",
}


class ScrapeError(Exception):
    """SGLang returned no metrics; `reason` is a label value, the message is for people."""

    def __init__(self, reason: Reason, message: str, *, serves: bool = False) -> None:
        super().__init__(message)
        self.reason: Reason = reason
        self.serves = serves  # the server answers, but has no metrics yet


class Client:
    """HTTP client of one SGLang. No proxies, no redirects to other servers, no compression (against bombs).

    Each request opens a connection: SGLang closes idle ones after 5 s, which could look like an outage. One request at
    a time; `end` ends it from another thread.
    """

    def __init__(
        self, base_url: str, metrics_url: str, api_key: str | None = None, api_key_file: Path | None = None
    ) -> None:
        """Send `api_key`, or the content of `api_key_file`, which is read for each request because keys are rotated."""
        self._base_url, self._metrics_url = base_url, metrics_url
        self._api_key, self._api_key_file = api_key, api_key_file
        self._socket: socket.socket | None = None
        self._has_ended = False

    def metrics(self, timeout: float) -> str:
        """Return the exposition as SGLang writes it; `timeout` in seconds. Raise `ScrapeError`."""
        text = self._get(self._metrics_url, timeout, "text/plain;version=0.0.4")
        if not text.strip():
            # Before 0.5 a server has no metrics until its first request.
            raise ScrapeError("not_ready", "its page is empty: it has written no figure yet", serves=True)
        owner = owner_of(text)
        if owner is None:
            raise ScrapeError("no_series", "its page holds no series of SGLang's: check --sglang-url")
        if owner:
            raise ScrapeError("not_sglang", f"it is not an SGLang server: its /metrics is {owner}; check --sglang-url")
        return text

    def page(self, timeout: float) -> str | ScrapeError:
        """Return the exposition, or why there is none."""
        try:
            return self.metrics(timeout)
        except ScrapeError as failed:
            return failed
        except Exception as failed:  # noqa: BLE001 - whatever the world sends, a scrape ends with an answer
            return ScrapeError("invalid", f"the answer cannot be read ({type(failed).__name__})")

    def server_info(self, timeout: float) -> ServerInfo | None:
        """Return `/server_info`, from the present path first (the old one logs a warning
        from 0.5.6); None without one.
        """
        for path in ("/server_info", "/get_server_info"):
            try:
                return parse_server_info(self._get(self._base_url + path, timeout, "application/json", MOST_JSON_BYTES))
            except ScrapeError as error:
                if error.reason != "metrics_disabled":  # only after a 404 may the other path exist
                    return None
        return None

    def health(self, timeout: float) -> bool | None:
        """Ask for one generated token; False if none comes within `timeout` seconds, None if it has no such check."""
        try:
            self._get(self._base_url + "/health_generate", timeout, "application/json")
        except ScrapeError as error:
            return False if error.reason in {"timeout", "not_ready"} else None
        return True

    def loads(self, timeout: float) -> list[RankFigures]:
        """Return load and limits of each scheduler (`/v1/loads`, 0.5.8 on). Raise `ScrapeError`."""
        return parse_loads(self._get(self._base_url + "/v1/loads", timeout, "application/json", MOST_JSON_BYTES))

    def answer(self, path: str, timeout: float) -> str:
        """Return the raw answer at `path`, JSON that may hold secrets. Raise `ScrapeError`."""
        return self._get(self._base_url + path, timeout, "application/json")

    def end(self) -> None:
        """End the current request and refuse new ones."""
        self._has_ended = True
        if (open_now := self._socket) is not None:
            _shut(open_now)

    def _get(self, url: str, timeout: float, accept: str, most: int = MOST_BYTES) -> str:
        late, deadline = _late(timeout), time.monotonic() + timeout
        if self._has_ended:
            raise late
        try:
            text = self._ask(url, deadline, accept, most)
        except ScrapeError:
            raise
        except (http.client.HTTPException, ValueError, OSError) as error:
            if self._has_ended or isinstance(error, TimeoutError) or time.monotonic() >= deadline:
                raise late from None
            raise _failure(error, is_tls=url.startswith("https:")) from None
        finally:
            self._socket = None
        # An answer without a length ends when its connection is cut.
        if self._has_ended or time.monotonic() >= deadline:
            raise late
        return text

    def _ask(self, url: str, deadline: float, accept: str, most: int) -> str:
        for _ in range(2):
            headers = {**_HEADERS, "Accept": accept, **self._authorization()}
            with closing(_connected(url, deadline)) as connection:
                self._socket = connection.sock
                where = urlsplit(url)
                query = f"?{quote(where.query, safe=_SAFE)}" if where.query else ""
                connection.request("GET", quote(where.path or "/", safe=_SAFE) + query, headers=headers)
                with closing(connection.getresponse()) as answer:
                    if answer.status in _REDIRECTS:
                        url = self._checked_redirect(urljoin(url, answer.headers.get("Location", "")))
                        continue
                    _check(answer, with_key="Authorization" in headers)
                    return _body(answer, most)
        raise ScrapeError("http_status", "it answers with redirects only")

    def _authorization(self) -> dict[str, str]:
        if self._api_key_file is not None:
            try:
                key = key_in(self._api_key_file, read_or_last)
            except OSError as error:
                reason: Reason = "own_limit" if isinstance(error, NoThreadError) else "key_file"
                words = "it was not asked, because the file of --api-key-file cannot be read"
                raise ScrapeError(reason, f"{words}: {error.strerror or error}") from None
            self._api_key = key or self._api_key  # the previous one, while the file is replaced
        return {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}

    def _checked_redirect(self, url: str) -> str:
        if urlsplit(url)[:2] != urlsplit(self._base_url)[:2]:
            raise ScrapeError("http_status", "it redirects to another server")
        return url


def _connected(url: str, deadline: float) -> http.client.HTTPConnection:
    """Return an open connection that reads no proxy and no password from the environment and keeps no cookies."""
    where, timeout = urlsplit(url), max(deadline - time.monotonic(), 0.001)
    host: Any = where.hostname or ""
    answer: Any = partial(_Answer, deadline)
    if where.scheme == "https":
        import certifi  # noqa: PLC0415 - most servers are beside their exporter, without TLS

        file = certifi.where()
        context = _trusting(file, os.stat(file).st_mtime_ns)  # noqa: PTH116 -- each scrape
        secure = http.client.HTTPSConnection(host, where.port, timeout=timeout, context=context)
        secure.connect()
        secure.response_class = answer
        return secure
    plain = http.client.HTTPConnection(host, where.port, timeout=timeout)
    plain.response_class = answer
    # The name as bytes: for text Python loads its table of international names, 1.5 MB.
    plain.sock = socket.create_connection((host.encode() if host.isascii() else host, plain.port), timeout)
    return plain


class _Answer(http.client.HTTPResponse):
    """An answer that is read until a deadline."""

    def __init__(self, deadline: float, connection: socket.socket, **more: Any) -> None:
        super().__init__(connection, **more)
        self.fp = io.BufferedReader(_Until(deadline, connection, self.fp.detach()))


class _Until(io.RawIOBase):
    """What a connection brings until a deadline.

    Its own timeout begins anew with each byte: one that drips would never reach it.
    """

    def __init__(self, deadline: float, connection: socket.socket, raw: io.RawIOBase) -> None:
        self._deadline, self._connection, self._raw = deadline, connection, raw

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int | None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._raw.readinto(into)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _shut(open_now: socket.socket) -> None:
    """End a connection that another thread reads."""
    with suppress(OSError):  # already closed
        open_now.shutdown(socket.SHUT_RDWR)


@lru_cache(maxsize=1)
def _trusting(file: str, modified: int) -> ssl.SSLContext:  # noqa: ARG001 - a changed file is read again
    """Return the context that trusts the authorities of a file: it is kept, since reading them takes 40 ms."""
    return ssl.create_default_context(cafile=file)


def _check(response: http.client.HTTPResponse, *, with_key: bool) -> None:
    status = response.status
    if status != 200:
        refused = _REFUSED[with_key] if status in {401, 403} else ""
        raise ScrapeError(*_STATUSES.get(status, ("http_status", f"it answers HTTP {status}{refused}")))
    if "html" in response.headers.get("Content-Type", "").lower():
        raise ScrapeError("no_series", "it answers with a web page, not with metrics: check --sglang-url")
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise ScrapeError("invalid", "it answers compressed, which was not asked for")


def _body(response: http.client.HTTPResponse, most: int) -> str:
    pieces, size = [], 0
    while piece := response.read(_PIECE_BYTES):
        size += len(piece)
        if size > most:
            raise ScrapeError("too_large", f"the answer is larger than {most >> 20} MiB")
        pieces.append(piece)
    if response.length:  # of its Content-Length, which a read in pieces does not enforce
        raise http.client.IncompleteRead(b"", response.length)
    return b"".join(pieces).decode("utf-8", "replace")


def _failure(error: Exception, *, is_tls: bool) -> ScrapeError:
    """Return why a request failed."""
    if isinstance(error, ssl.SSLError):
        return ScrapeError("unreachable", _tls_failure(error))
    if isinstance(error, OSError) and error.errno in _OWN_LIMITS:
        return ScrapeError(
            "own_limit", f"it was not asked: {error.strerror}; raise the exporter's limit of open files or memory"
        )
    return next(
        ScrapeError(reason, words)
        for kinds, reason, words in _FAILURES
        if isinstance(error, kinds) and not (is_tls and kinds is _CLOSED)
    )


def _tls_failure(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if error.reason in {"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "UNKNOWN_PROTOCOL"}:
        return "it does not speak TLS: give --sglang-url with http://"
    return f"the TLS connection failed ({error.reason or 'no reason given'})"


def _late(timeout: float) -> ScrapeError:
    return ScrapeError("timeout", f"no complete answer within {timeout:.1f} s")
