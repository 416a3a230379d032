"""A clock that is moved by hand, for a process and all its threads; a module that is imported after this one takes it
for the real one.

Waits with a time-out end when the clock has come to it, and asyncio keeps the real time. A client of the stand-in that
gets no answer times out as soon as the clock has moved by as much.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import select
import socket
import threading
import time
from typing import Any

NOW: list[float | None] = [None]  # seconds on the moved clock; None: the real one
PATIENCE: dict[int, float] = {}  # by port of a client: how many seconds it waits for an answer
HUNG: set[int] = set()  # clients that have waited so long, on the moved clock
ASLEEP: dict[threading.Thread, tuple[float, Any]] = {}  # until when, on the moved clock, and the lock that wakes
_real, _real_wait, _real_receive = time.time, threading.Condition.wait, socket.socket.recv_into


def now() -> float:
    """Return the time in unix seconds."""
    return _real() if NOW[0] is None else NOW[0]


def _wait(self: Any, timeout: float | None = None) -> bool:
    if timeout is None or timeout <= 0 or NOW[0] is None:
        return _real_wait(self, timeout)
    me, waiter = threading.current_thread(), threading.Lock()
    waiter.acquire()
    self._waiters.append(waiter)  # as the standard library's, but woken by `pass_to` instead of the real clock
    ASLEEP[me], held = (now() + timeout, waiter), self._release_save()
    try:
        waiter.acquire()
    finally:
        ASLEEP.pop(me, None)
        self._acquire_restore(held)
    if expired := waiter in self._waiters:  # `notify` takes those out that it wakes
        self._waiters.remove(waiter)
    return not expired


def pass_to(moment: float) -> list[threading.Thread]:
    """Set the clock and wake those who sleep until then; return them."""
    NOW[0], woken = moment, {thread: waiter for thread, (until, waiter) in list(ASLEEP.items()) if until <= moment}
    for waiter in woken.values():
        with contextlib.suppress(RuntimeError):  # notified at the same time
            waiter.release()
    return list(woken)


def _receive(self: Any, *args: Any) -> int:
    limit, begin = self.gettimeout(), time.perf_counter()
    if not limit or NOW[0] is None:
        return _real_receive(self, *args)
    PATIENCE[port := self.getsockname()[1]] = limit
    while not select.select([self], [], [], 0.02)[0]:
        if port in HUNG or time.perf_counter() - begin > limit:
            raise TimeoutError("timed out")
    return _real_receive(self, *args)


def hang(port: int) -> None:
    """Let as much time go by as that client waits for an answer that does not come."""
    while port not in PATIENCE:
        time.sleep(0.001)
    for _ in range(int(PATIENCE.pop(port) * 10)):
        pass_to(now() + 0.1)
        time.sleep(0.001)
    HUNG.add(port)


def move(to: float) -> None:
    """Set the clock, and wait until each thread that this wakes is done and sleeps again."""
    woken, begin = pass_to(to), time.perf_counter()
    while any(thread.is_alive() and ASLEEP.get(thread, (to, None))[0] <= to for thread in woken):
        if time.perf_counter() - begin > 5.0:
            return
        time.sleep(0.0005)


asyncio.BaseEventLoop.time = lambda _self, steady=time.perf_counter: steady()  # type: ignore[method-assign,misc]
time.time = time.monotonic = now
threading._time = queue.time = now  # type: ignore[attr-defined] # noqa: SLF001 - taken from `time` before this file could replace it
threading.Condition.wait = _wait  # type: ignore[method-assign]
queue.SimpleQueue = queue._PySimpleQueue  # type: ignore[attr-defined,misc] # noqa: SLF001 - the one in C waits by the real clock
socket.socket.recv_into = _receive  # type: ignore[assignment,method-assign]
