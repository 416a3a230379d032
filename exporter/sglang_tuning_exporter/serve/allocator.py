"""Settings of glibc's allocator, so that memory of a large page is returned to the system after a scrape."""

from __future__ import annotations

import ctypes

# https://man7.org/linux/man-pages/man3/mallopt.3.html, numbers from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_LARGE = 64 << 10  # bytes


def return_freed_memory() -> bool:
    """Return freed memory to the system, from all threads; False where the C library has no such setting.

    By default glibc keeps a heap for each thread, and keeps freed blocks up to the largest one so far. Call it before
    threads are started. The environment variable MALLOC_ARENA_MAX and similar ones do the same for another process.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    settings = {_ARENA_MAX: 1, _MMAP_THRESHOLD: _LARGE, _TRIM_THRESHOLD: _LARGE}
    return [mallopt(key, value) for key, value in settings.items()] == [1] * len(settings)
