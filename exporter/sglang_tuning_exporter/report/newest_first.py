"""Texts with the newest line first, as log stores return them: reversed before they are read."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise

from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.report.unfolded import LONGEST_DOCUMENT, gathered
from sglang_tuning_exporter.sglang.log.forms import own_times, printed_time

_LOOKED_AT = 1 << 20  # bytes
_SAMPLE = 200  # lines of them
_FALLS = 2  # at least: a clock that was set back falls once
_FALLS_PER_RISE = 4  # ranks print a little out of order


def oldest_first(chunks: Iterator[bytes], name: str) -> Iterator[bytes]:
    """Return the lines of a text, the oldest first. Raises `UsageError` where it must be reversed and is too large."""
    first = next(chunks, b"")
    chunks = chain([first], chunks)
    if not _falls(first[:_LOOKED_AT]):
        yield from chunks
        return
    text = gathered(chunks)
    if len(text) > LONGEST_DOCUMENT:
        raise UsageError(
            f"{name}: its newest line comes first, and it is larger than {LONGEST_DOCUMENT >> 20} MiB;"
            " give it with the oldest line first, as tac writes it"
        )
    yield b"".join(line + b"\n" for line in reversed(text.removesuffix(b"\n").split(b"\n")))


def _falls(text: bytes) -> bool:
    """Whether times fall from line to line."""
    lines = text.split(b"\n")
    sample = lines[:: len(lines) // _SAMPLE + 1]
    own = own_times(text)
    times = [time for line in sample for time in printed_time(line, own) if time is not None]
    falls = sum(later < earlier for earlier, later in pairwise(times))
    rises = sum(later > earlier for earlier, later in pairwise(times))
    return falls >= _FALLS and falls > _FALLS_PER_RISE * rises
