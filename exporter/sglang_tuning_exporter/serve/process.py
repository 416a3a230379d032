"""What a serving process asks of the system: to survive SIGHUP, a listening socket, freed memory back. Loads little: it is asked first."""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress

from sglang_tuning_exporter.config.values import Address, UsageError

BACKLOG = 128
# https://man7.org/linux/man-pages/man3/mallopt.3.html, numbers from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_LARGE = 64 << 10  # bytes


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


def bind(address: Address, key: str = "--listen-address") -> socket.socket:
    """Return a listening TCP socket. Raises `UsageError`, such as for a port in use or a kernel without IPv6."""
    with ExitStack() as on_error:
        try:
            listener = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET, socket.SOCK_STREAM)
            on_error.callback(listener.close)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address.host, address.port))
            listener.listen(BACKLOG)  # before listen(), another process can bind the same port
        except (OSError, ValueError) as error:  # ValueError: not a host name
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"{key}={address}: {reason}; give another port or address") from None
        on_error.pop_all()
    return listener


def return_freed_memory() -> None:
    """Return freed memory to the system, from all threads: the memory of a large page after a scrape.

    By default glibc keeps a heap for each thread, and keeps freed blocks up to the largest one so far. Call it before
    threads are started. The environment variable MALLOC_ARENA_MAX and similar ones do the same for another process.
    """
    with suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        for key, value in ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, _LARGE), (_TRIM_THRESHOLD, _LARGE)):
            mallopt(key, value)
