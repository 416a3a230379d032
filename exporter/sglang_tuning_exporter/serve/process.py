"""Settings of a serving process: it survives SIGHUP, listens on a socket, and returns freed memory to the system.

The module loads little, because the command line asks it before anything else.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from contextlib import ExitStack, suppress

from sglang_tuning_exporter.config.values import UsageError

BACKLOG = 128
# https://man7.org/linux/man-pages/man3/mallopt.3.html, numbers from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_LARGE = 64 << 10  # bytes


def outlive_hang_up() -> None:
    """Ignore SIGHUP from now on, unless this process has a terminal. Call it in the main thread."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def bind(address: str, key: str = "--listen-address") -> socket.socket:
    """Return a listening TCP socket. Raise `UsageError`, for example where the port is in use or IPv6 is off."""
    name, _, port = address.rpartition(":")
    host = name.strip("[]")
    with ExitStack() as on_error:
        try:
            listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
            on_error.callback(listener.close)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, int(port)))
            listener.listen(BACKLOG)  # before listen(), another process can bind the same port
        except (OSError, ValueError) as error:  # ValueError: not a host name
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"{key}={address}: {reason}; give another port or address") from None
        on_error.pop_all()
    return listener


def return_freed_memory() -> None:
    """Have glibc return freed memory to the system, such as that of a large page after a scrape.

    By default glibc keeps a heap for each thread, and freed blocks up to the size of the largest one so far. Call this
    function before threads are started.
    """
    with suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        for key, value in ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, _LARGE), (_TRIM_THRESHOLD, _LARGE)):
            mallopt(key, value)
