"""Work that strangers can ask for, in a thread of its own: a bounded number at once, so that it delays nothing else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, ClassVar, TypeVar

_T = TypeVar("_T")


async def ended(work: Future[Any], seconds: float | None = None) -> None:
    """Wait until the work of another thread has ended, for at most so many seconds; `asyncio.wrap_future` takes twice the turns of the event loop."""
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


class FullError(Exception):
    """So many wait already that there is no place for another one."""


class Lane:
    """One thread, and at most `most` pieces of work that run or wait. Work whose task is cancelled before its turn is left out.

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
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
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
