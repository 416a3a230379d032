"""Recorded servers: record, scrub, replay, and the whole chain on loopback. Each is loaded by its own command."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stopped_by_signal(stop: Callable[[], object]) -> Iterator[None]:
    """Call `stop` on SIGINT and SIGTERM while the block runs. For the main thread only."""
    previous = {number: signal.signal(number, lambda *_: stop()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
