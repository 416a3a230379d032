"""What stands before the application: methods, bodies, rates and passwords, and the headers of every answer."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from starlette.responses import PlainTextResponse

from sglang_tuning_exporter.serve.security.passwords import Passwords

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from starlette.types import ASGIApp, Receive, Scope, Send

    from sglang_tuning_exporter.serve.security.active_config import Door
    from sglang_tuning_exporter.serve.security.web_config import RateLimit

METHODS = ("GET", "HEAD")
# Nothing here reads a body. One of this size is let past, as some clients send it; a larger one ends the connection.
MOST_BODY_BYTES = 64 << 10
SAFE_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
        "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    ),
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cache-Control": "no-store",
}


def headers(own: Mapping[str, str]) -> list[tuple[str, str]]:
    """Give the headers of every answer: ours, in their place those of the web configuration; a blank one is left out."""
    return [(name, value) for name, value in {**SAFE_HEADERS, **own}.items() if value]


class Guard:
    """An ASGI application around ours. Without a `door` nobody is asked who they are."""

    def __init__(self, app: ASGIApp, door: Door | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._app, self._door, self._clock = app, door, clock
        self._passwords = Passwords()
        self._bucket = TokenBucket()
        # One thread, apart from those that answer: who guesses passwords holds up nobody but other guessers.
        self._verifier = ThreadPoolExecutor(1, thread_name_prefix="passwords")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer in the application's stead, or let it answer."""
        if scope["type"] == "http":
            refusal = await self._refusal(scope)
            if refusal is not None:
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _refusal(self, scope: Scope) -> PlainTextResponse | None:
        given = {name: value.decode("latin-1") for name, value in reversed(scope["headers"])}
        closing = {"Connection": "close"} if _is_heavy(given) else {}
        if self._door is not None:
            config = self._door.rules.config
            if config.rate_limit is not None and not self._bucket.gives(config.rate_limit, self._clock()):
                return PlainTextResponse("Too Many Requests\n", 429, headers=closing)
            if config.users and not await self._is_known(config.users, given.get(b"authorization")):
                asking = {"WWW-Authenticate": 'Basic realm="sglang-tuning-exporter", charset="UTF-8"'}
                return PlainTextResponse("Unauthorized\n", 401, headers=asking | closing)
        if scope["method"] not in METHODS:
            return PlainTextResponse("Method Not Allowed\n", 405, headers={"Allow": ", ".join(METHODS)} | closing)
        if closing:
            return PlainTextResponse("Content Too Large\n", 413, headers=closing)
        return None

    async def _is_known(self, users: Mapping[str, str], header: str | None) -> bool:
        known = self._passwords.remembers(users, header)
        if known is None:
            loop = asyncio.get_running_loop()
            known = await loop.run_in_executor(self._verifier, self._passwords.verify, users, header)
        return known


class TokenBucket:
    """Requests that may still come; full at first."""

    def __init__(self) -> None:
        self._limit: RateLimit | None = None
        self._filled, self._at = 0.0, 0.0

    def gives(self, limit: RateLimit, now: float) -> bool:
        """Take one at `now`, in seconds; False when there is none. A new limit begins with a full bucket."""
        if limit != self._limit:
            self._limit, self._filled, self._at = limit, float(limit.burst), now
        self._filled = min(float(limit.burst), self._filled + (now - self._at) / limit.interval)
        self._at = now
        if self._filled < 1:
            return False
        self._filled -= 1
        return True


def _is_heavy(given: Mapping[bytes, str]) -> bool:
    """Whether a request's body is larger than is let past, or of a length that it does not say."""
    length = given.get(b"content-length", "0")
    # int() takes 4,300 digits at most.
    return (
        b"transfer-encoding" in given or not length.isdecimal() or int(length.lstrip("0")[:20] or "0") > MOST_BODY_BYTES
    )
