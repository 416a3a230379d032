"""Checks before the application: method, body size, rate limit, password; the headers of every answer; and what becomes
of an error.

What strangers can ask for is done in a thread of its own, a bounded number at once, so that it delays nothing else.
Whoever hangs up is not waited for: his request is dropped, wherever it is.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import logging
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang_tuning_exporter.collect.threads import described

if TYPE_CHECKING:
    from sglang_tuning_exporter.serve.web_config import ActiveConfig

_T = TypeVar("_T")

METHODS = ("GET", "HEAD")
# No request needs a body. A body up to this size is ignored, since some clients send one; a larger one closes the
# connection.
MOST_BODY_BYTES = 64 << 10
MOST_CHECKS = 4  # of passwords that are not known yet; the next one is answered at once
MOST_CACHED = 100
BCRYPT_BYTES = 72  # of a password that bcrypt uses; tools that hash longer ones cut them here
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
_REFUSALS = {401: "Unauthorized", 403: "Forbidden: the web configuration is not in force", 429: "Too Many Requests"}
_ASKING = {"WWW-Authenticate": 'Basic realm="sglang-tuning-exporter", charset="UTF-8"'}
_LATER = {"Retry-After": "1"}

logger = logging.getLogger("sglang_tuning_exporter")


def headers(own: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the headers of every response: the defaults, overridden by the web configuration; an empty value removes
    one.
    """
    return [(name, value) for name, value in {**SAFE_HEADERS, **own}.items() if value]


async def ended(work: Future[Any], seconds: float | None = None) -> None:
    """Wait until the work of another thread has ended, for at most so many seconds; `asyncio.wrap_future` takes twice
    the turns of the event loop.
    """
    if work.done():
        return
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()

    def end() -> None:
        if not over.done():
            over.set_result(None)

    def tell(_: Future[Any]) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(end)

    work.add_done_callback(tell)
    timer = None if seconds is None else loop.call_later(seconds, end)
    try:
        await over
    finally:
        if timer is not None:
            timer.cancel()


class FullError(HTTPException):
    """So many wait already that there is no place for another one: a page's application answers it as it answers every
    `HTTPException`.
    """

    def __init__(self) -> None:
        super().__init__(503, "Too many wait already", _LATER)


class Lane:
    """One thread, and at most `most` pieces of work that run or wait.

    Work whose task is cancelled before its turn is left out.

    The thread ends with the process, whatever it does: Python's own pools would make the end wait for it.
    """

    busy: ClassVar[set[str]] = set()  # names of those that work now

    def __init__(self, name: str, most: int) -> None:
        self._name, self._most, self._present = name, most, 0
        self._waiting: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    async def run(self, work: Callable[[], _T]) -> _T:
        """Return the result of `work`. Raise `FullError` at once where there is no place."""
        if self._present >= self._most:
            raise FullError
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the process may start none at the moment
                raise FullError from None
            self._thread = thread
        done: Future[_T] = Future()
        self._present += 1
        self._waiting.put((done, work))
        try:
            await ended(done)
        finally:
            done.cancel()  # of no effect once its turn has come
            self._present -= 1
        return done.result()

    def _run(self) -> None:
        while True:
            done, work = self._waiting.get()
            if not done.set_running_or_notify_cancel():
                continue
            self.busy.add(self._name)
            try:
                done.set_result(work())
            except BaseException as error:  # noqa: BLE001 - whoever asked gets it
                done.set_exception(error)
            self.busy.discard(self._name)


class Guard:
    """ASGI middleware.

    Without a `web_config` there is no authentication and no rate limit. `answered` counts answers by status.

    A request that is let in has `admitted` in its scope, by which its connection is no stranger's.
    """

    def __init__(self, app: ASGIApp, web_config: ActiveConfig | None, answered: Counter[int]) -> None:
        self._app, self._web_config, self.answered = app, web_config, answered
        self._passwords = Passwords()
        self._checks = Lane("passwords", MOST_CHECKS)
        self._rate, self._filled, self._at = (0.0, 0), 0.0, 0.0  # a bucket of requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request, for as long as its client waits."""
        task, gone = asyncio.current_task(), asyncio.ensure_future(_gone(receive))
        gone.add_done_callback(lambda done: task is None or done.cancelled() or task.cancel())
        try:
            await self._answer(scope, receive, send)
        except asyncio.CancelledError:
            if not gone.done() and not scope.get("begun"):  # the process ends, and waits no longer
                await PlainTextResponse("Service Unavailable\n", 503)(scope, receive, send)
        finally:
            gone.cancel()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                scope["begun"] = True
                self.answered[message["status"]] += 1
            await send(message)

        try:
            refusal = await self._refusal(scope)
            scope["admitted"] = refusal is None
            await (refusal or self._app)(scope, receive, counted)
        except FullError as full:
            await PlainTextResponse(f"{full.detail}\n", 503, headers=_LATER)(scope, receive, counted)
        except Exception as error:  # noqa: BLE001 - whatever it is, other requests go on
            logger.error("%s: unexpected error, please report it: %s", scope["path"][:80], described(error))  # noqa: TRY400 - one line
            if not scope.get("begun"):
                await PlainTextResponse("Internal Server Error", 500)(scope, receive, counted)

    async def _refusal(self, scope: Scope) -> PlainTextResponse | None:
        given = {name: value.decode("latin-1") for name, value in reversed(scope["headers"])}
        closing = {"Connection": "close"} if _has_large_body(given) else {}
        if self._web_config is not None:
            status, more = await self._judged(self._web_config, given.get(b"authorization"))
            if status:
                return PlainTextResponse(f"{_REFUSALS[status]}\n", status, headers={**more, **closing})
        if scope["method"] not in METHODS:
            return PlainTextResponse("Method Not Allowed\n", 405, headers={"Allow": ", ".join(METHODS)} | closing)
        if closing:
            return PlainTextResponse("Content Too Large\n", 413, headers=closing)
        return None

    async def _judged(self, web_config: ActiveConfig, authorization: str | None) -> tuple[int, Mapping[str, str]]:
        """Return the status of a refusal by the web configuration, with its headers; 0 if the request is let in."""
        if not web_config.is_open:
            return 403, {}
        users, rate = web_config.users, web_config.rate
        if rate is not None and not self.take(rate, time.monotonic()):
            return 429, {}
        given = credentials(authorization)
        if not users or (given is not None and self._passwords.is_cached(users, *given)):
            return 0, {}
        if given is None:
            return 401, _ASKING
        try:
            is_right = await self._checks.run(lambda: self._passwords.verify(users, *given))
        except FullError:
            return 429, _LATER
        return (0, {}) if is_right else (401, _ASKING)

    def take(self, rate: tuple[float, int], now: float) -> bool:
        """Take one request at `now`, in seconds, out of a bucket that fills by one each interval; False when none is
        left.

        A new rate, of an interval and the most requests at once, starts with a full bucket.
        """
        interval, burst = rate
        if rate != self._rate:
            self._rate, self._filled, self._at = rate, float(burst), now
        self._filled = min(float(burst), self._filled + (now - self._at) / interval)
        self._at = now
        if self._filled < 1:
            return False
        self._filled -= 1
        return True


async def _gone(receive: Receive) -> None:
    """Wait until the client hangs up. What else it sends is a body, which no request needs."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _has_large_body(given: Mapping[bytes, str]) -> bool:
    """Whether a request's body is too large, or of unknown length."""
    length = given.get(b"content-length", "0")
    # int() accepts at most 4,300 digits.
    return (
        b"transfer-encoding" in given or not length.isdecimal() or int(length.lstrip("0")[:20] or "0") > MOST_BODY_BYTES
    )


class Passwords:
    """Checks credentials. Right ones are cached as keyed digests, never as text."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._verified: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()  # never held during a bcrypt: cached users do not wait for guesses
        self._dummy_hashes: dict[int, bytes] = {}

    def is_cached(self, users: Mapping[str, str], name: str, password: bytes) -> bool:
        """Return whether this password was found right before; else bcrypt has to decide."""
        known = self._digest(name, users.get(name, ""), password)
        with self._lock:
            is_known = name in users and known in self._verified
            if is_known:
                self._verified.move_to_end(known)
        return is_known

    def verify(self, users: Mapping[str, str], name: str, password: bytes) -> bool:
        """Return whether bcrypt finds the password right. An unknown name takes as long as a wrong password."""
        import bcrypt  # noqa: PLC0415 - only where passwords are set

        hashed = users.get(name)
        against = hashed.encode() if hashed is not None else self._dummy_hash(users)
        try:
            is_right = bcrypt.checkpw(password[:BCRYPT_BYTES], against)
        except ValueError:  # a NUL, which bcrypt refuses
            is_right = False
        if hashed is None or not is_right:
            return False
        with self._lock:
            self._verified[self._digest(name, hashed, password)] = None
            if len(self._verified) > MOST_CACHED:
                self._verified.popitem(last=False)
        return True

    def _digest(self, name: str, hashed: str, password: bytes) -> bytes:
        """Return a digest that is valid only while the user's hash is unchanged."""
        digest = hashlib.blake2b(key=self._key)
        for part in (name.encode("utf-8", "surrogatepass"), hashed.encode(), password):
            digest.update(len(part).to_bytes(8, "big") + part)
        return digest.digest()

    def _dummy_hash(self, users: Mapping[str, str]) -> bytes:
        """Return a hash with the highest cost of all users' hashes, which no password matches."""
        import bcrypt  # noqa: PLC0415 - as above

        cost = max(int(hashed[4:6]) for hashed in users.values())
        if cost not in self._dummy_hashes:
            self._dummy_hashes[cost] = bcrypt.gensalt(cost) + b"." * 31
        return self._dummy_hashes[cost]


def credentials(header: str | None) -> tuple[str, bytes] | None:
    """Parse an Authorization header into name and password; None for anything but Basic."""
    scheme, _, encoded = (header or "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        name, colon, password = base64.b64decode(encoded, validate=True).partition(b":")
        return (name.decode("utf-8"), password) if colon else None
    except (binascii.Error, ValueError):  # ValueError: not ASCII, or a name that is not UTF-8
        return None
