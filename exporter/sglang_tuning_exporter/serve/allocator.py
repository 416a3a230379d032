"""What glibc's allocator keeps of memory that was freed: a sidecar's peak is one page, its rest should not be."""

from __future__ import annotations

import ctypes

# https://man7.org/linux/man-pages/man3/mallopt.3.html, numbers from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_LARGE = 64 << 10  # bytes


def give_back() -> bool:
    """Have pages read and written go back to the system once they are done with, from all threads; False where that cannot be said.

    Unasked, glibc keeps a heap for each thread, and from the first large block that is freed on keeps what is as large.
    To be called before threads are started. MALLOC_ARENA_MAX and its kin in the environment do the same for a process
    that somebody else starts.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    settings = {_ARENA_MAX: 1, _MMAP_THRESHOLD: _LARGE, _TRIM_THRESHOLD: _LARGE}
    return [mallopt(key, value) for key, value in settings.items()] == [1] * len(settings)
