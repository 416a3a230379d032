"""SIGHUP: the end where a terminal was closed; from a service manager it usually means reload."""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
from collections.abc import Callable


def handle_hang_up(end: Callable[[], object] | None = None) -> None:
    """Handle SIGHUP from now on: `end` with a terminal, one warning without. For the main thread only.

    Nothing changes where SIGHUP is ignored already (nohup), and where there is a terminal but nothing to end in order.
    """
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        return
    if _has_terminal():
        if end is not None:
            signal.signal(signal.SIGHUP, lambda *_: end())
    elif not callable(signal.getsignal(signal.SIGHUP)):
        # A handler must not log: it may interrupt a line that is being written, and both would be lost.
        hang_ups: queue.SimpleQueue[int] = queue.SimpleQueue()
        signal.signal(signal.SIGHUP, lambda number, _: hang_ups.put(number))
        threading.Thread(target=_warn, args=(hang_ups,), name="hang-ups", daemon=True).start()


def _warn(hang_ups: queue.SimpleQueue[int]) -> None:
    while True:
        hang_ups.get()
        logging.getLogger("sglang_tuning_exporter").warning(
            "SIGHUP: ignored; restart to change settings (rotated logs are followed without a signal)"
        )


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
