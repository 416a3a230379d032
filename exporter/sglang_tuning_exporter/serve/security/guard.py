"""Checks before the application: method, body size, rate limit, password; and the headers of every response."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang_tuning_exporter.serve.security.passwords import Passwords, credentials

if TYPE_CHECKING:
    from sglang_tuning_exporter.serve.security.active_config import ActiveConfig
    from sglang_tuning_exporter.serve.security.web_config import RateLimit

METHODS = ("GET", "HEAD")
# No request needs a body. A body up to this size is ignored, since some clients send one; a larger one closes the connection.
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
    """Return the headers of every response: the defaults, overridden by the web configuration; an empty value removes one."""
    return [(name, value) for name, value in {**SAFE_HEADERS, **own}.items() if value]


class Guard:
    """ASGI middleware. Without a `web_config` there is no authentication and no rate limit."""

    def __init__(self, app: ASGIApp, web_config: ActiveConfig | None = None) -> None:
        self._app, self._web_config = app, web_config
        self._passwords = Passwords()
        self._bucket = TokenBucket()
        # A thread of its own: guessing passwords delays only other guesses.
        self._verifier = ThreadPoolExecutor(1, thread_name_prefix="passwords")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it on to the application."""
        if scope["type"] == "http":
            refusal = await self._refusal(scope)
            if refusal is not None:
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _refusal(self, scope: Scope) -> PlainTextResponse | None:
        given = {name: value.decode("latin-1") for name, value in reversed(scope["headers"])}
        closing = {"Connection": "close"} if _has_large_body(given) else {}
        if self._web_config is not None:
            config = self._web_config.loaded.config
            if config.rate_limit is not None and not self._bucket.take(config.rate_limit, time.monotonic()):
                return PlainTextResponse("Too Many Requests\n", 429, headers=closing)
            if config.users and not await self._is_authenticated(config.users, given.get(b"authorization")):
                asking = {"WWW-Authenticate": 'Basic realm="sglang-tuning-exporter", charset="UTF-8"'}
                return PlainTextResponse("Unauthorized\n", 401, headers=asking | closing)
        if scope["method"] not in METHODS:
            return PlainTextResponse("Method Not Allowed\n", 405, headers={"Allow": ", ".join(METHODS)} | closing)
        if closing:
            return PlainTextResponse("Content Too Large\n", 413, headers=closing)
        return None

    async def _is_authenticated(self, users: Mapping[str, str], header: str | None) -> bool:
        given = credentials(header)
        if given is None or self._passwords.is_cached(users, *given):
            return given is not None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._verifier, self._passwords.verify, users, *given)


class TokenBucket:
    """Token bucket of a rate limit; full at first."""

    def __init__(self) -> None:
        self._limit: RateLimit | None = None
        self._filled, self._at = 0.0, 0.0

    def take(self, limit: RateLimit, now: float) -> bool:
        """Take one token at `now`, in seconds; False when none is left. A new limit starts with a full bucket."""
        if limit != self._limit:
            self._limit, self._filled, self._at = limit, float(limit.burst), now
        self._filled = min(float(limit.burst), self._filled + (now - self._at) / limit.interval)
        self._at = now
        if self._filled < 1:
            return False
        self._filled -= 1
        return True


def _has_large_body(given: Mapping[bytes, str]) -> bool:
    """Whether a request's body is too large, or of unknown length."""
    length = given.get(b"content-length", "0")
    # int() accepts at most 4,300 digits.
    return (
        b"transfer-encoding" in given or not length.isdecimal() or int(length.lstrip("0")[:20] or "0") > MOST_BODY_BYTES
    )
