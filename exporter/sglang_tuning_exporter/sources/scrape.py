"""Asking SGLang over HTTP: one scrape when one is wanted, never two at once, never longer than its deadline, never more than 64 MiB."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias
from urllib.parse import urljoin, urlsplit

import requests

from sglang_tuning_exporter.sglang.serverinfo import ServerInfo, parse_server_info

Reason: TypeAlias = Literal[
    "connection_refused", "unreachable", "not_ready", "timeout", "metrics_disabled", "http_status", "too_large", "invalid"
]  # fmt: skip
MOST_BYTES = 64 << 20  # the largest real page is 0.2 MB, an 8-rank page 1 MB
_STATUS_REASONS: dict[int, Reason] = {404: "metrics_disabled", 503: "not_ready"}
_REDIRECTS = {301, 302, 303, 307, 308}


class ScrapeError(Exception):
    """SGLang gave no exposition; `reason` is one word for a label, the message a sentence for people."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


@dataclass(frozen=True, slots=True)
class Outcome:
    """One finished scrape: the page, or why there is none; seconds it took."""

    text: str | None
    error: ScrapeError | None
    seconds: float


class Client:
    """HTTP to one SGLang. No proxies, no redirects to elsewhere, no compression (a page from an untrusted port must not unfold)."""

    def __init__(self, base_url: str, metrics_url: str, api_key: str | None = None) -> None:
        self._base_url, self._metrics_url = base_url, metrics_url
        self._session = requests.Session()
        self._session.trust_env = False
        self._session.headers.update({"User-Agent": "sglang-tuning-exporter", "Accept-Encoding": "identity"})
        if api_key:
            self._session.headers["Authorization"] = f"Bearer {api_key}"

    def metrics(self, timeout: float) -> str:
        """The exposition as SGLang writes it. Raises `ScrapeError`."""
        return self._get(self._metrics_url, timeout, "text/plain;version=0.0.4")

    def server_info(self, timeout: float) -> ServerInfo | None:
        """What the server says of itself, asked at its present name first (the old one logs a warning from 0.5.6); None when it does not tell."""
        for path in ("/server_info", "/get_server_info"):
            try:
                return parse_server_info(self._get(self._base_url + path, timeout, "application/json"))
            except ScrapeError as error:
                if error.reason != "metrics_disabled":  # anything but a 404 will not be better under the other name
                    return None
        return None

    def _get(self, url: str, timeout: float, accept: str) -> str:
        deadline = time.monotonic() + timeout
        try:
            for _ in range(2):
                with self._session.get(
                    url, headers={"Accept": accept}, timeout=timeout, stream=True, allow_redirects=False
                ) as response:
                    if response.status_code in _REDIRECTS:
                        url = self._same_server(urljoin(url, response.headers.get("Location", "")))
                        continue
                    self._check(response)
                    return self._body(response, deadline)
        except requests.Timeout:
            raise ScrapeError("timeout", f"no answer within {timeout:.1f} s") from None
        except requests.ConnectionError as error:
            if "refused" in str(error).lower():
                raise ScrapeError("connection_refused", "connection refused: nothing listens at that address") from None
            raise ScrapeError("unreachable", "the address cannot be reached or the connection broke off") from None
        except (requests.RequestException, ValueError, OSError):
            raise ScrapeError("invalid", "the answer is not HTTP as it should be") from None
        raise ScrapeError("http_status", "it answers with redirects only")

    def _same_server(self, url: str) -> str:
        if urlsplit(url)[:2] != urlsplit(self._base_url)[:2]:
            raise ScrapeError("http_status", "it redirects to another server")
        return url

    @staticmethod
    def _check(response: requests.Response) -> None:
        status = response.status_code
        if status != 200:
            reason = _STATUS_REASONS.get(status, "http_status")
            words = {
                "metrics_disabled": "it answers 404: start SGLang with --enable-metrics",
                "not_ready": "it answers 503: not ready yet",
            }.get(reason, f"it answers HTTP {status}" + (": give --api-key-file" if status in {401, 403} else ""))
            raise ScrapeError(reason, words)
        if "html" in response.headers.get("Content-Type", ""):
            raise ScrapeError("invalid", "it answers with a web page, not with an exposition")

    @staticmethod
    def _body(response: requests.Response, deadline: float) -> str:
        pieces, size = [], 0
        for piece in response.iter_content(1 << 16):
            size += len(piece)
            if size > MOST_BYTES:
                raise ScrapeError("too_large", f"the answer is larger than {MOST_BYTES >> 20} MiB")
            if time.monotonic() > deadline:
                raise ScrapeError("timeout", "the answer did not end in time")
            pieces.append(piece)
        return b"".join(pieces).decode("utf-8", "replace")


class Scraper:
    """Scrapes on demand in a thread of its own, so that a server that never answers cannot hold its caller.

    Callers that overlap share one scrape. A scrape that outlives its caller's patience goes on; the next caller waits for that one instead of a second.
    """

    def __init__(self, fetch: Callable[[float], str], then: Callable[[Outcome], None]) -> None:
        self._fetch, self._then = fetch, then
        self._lock = threading.Lock()
        self._running: _Flight | None = None

    def scrape(self, timeout: float) -> Outcome:
        """The outcome of a scrape made now, or of the one under way; `timeout` in seconds. Never raises."""
        with self._lock:
            flight = self._running
            if flight is None:
                flight = self._running = _Flight()
                threading.Thread(target=self._fly, args=(flight, timeout), name="scrape", daemon=True).start()
        if flight.done.wait(timeout) and flight.outcome is not None:
            return flight.outcome
        late = ScrapeError("timeout", f"no answer within {timeout:.1f} s")
        return Outcome(None, late, timeout)

    def _fly(self, flight: _Flight, timeout: float) -> None:
        begin = time.monotonic()
        text: str | None = None
        error: ScrapeError | None = None
        try:
            text = self._fetch(timeout)
        except ScrapeError as failed:
            error = failed
        except Exception as failed:  # noqa: BLE001 - whatever the world sends, a scrape ends with an outcome
            error = ScrapeError("invalid", f"the answer cannot be read ({type(failed).__name__})")
        flight.outcome = Outcome(text, error, time.monotonic() - begin)
        try:
            self._then(flight.outcome)
        finally:
            with self._lock:
                self._running = None
            flight.done.set()


class _Flight:
    def __init__(self) -> None:
        self.done = threading.Event()
        self.outcome: Outcome | None = None
