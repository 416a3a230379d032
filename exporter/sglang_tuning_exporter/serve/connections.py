"""Limit of open connections: the one that was idle longest is closed, so that slow clients cannot block a scraper."""

from __future__ import annotations

import asyncio
from itertools import count

from sglang_tuning_exporter.serve.security.uvicorn_server import Protocol

# Two Prometheus servers, probes and some browsers need about a dozen.
MOST_CONNECTIONS = 64
_moments = count()


class Connection(Protocol):
    """One connection. When there are too many, the one with the oldest complete request is closed.

    There is no time limit, since a distant scraper may be slow: an idle connection costs nothing until another one needs
    its place. A scraper whose idle connection was closed opens a new one.
    """

    asked_at = 0  # order of complete requests and of new connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn narrows it alike
        """Accept it, and close another one if there are too many."""
        self.asked_at = next(_moments)
        super().connection_made(transport)
        others = [each for each in self.connections if isinstance(each, Connection)]
        if len(others) > MOST_CONNECTIONS:
            oldest = min(others, key=lambda each: each.asked_at)
            self.connections.discard(oldest)  # the loop may accept several before it reports this one as closed
            oldest.transport.abort()

    def handle_events(self) -> None:
        """Record when a request is complete."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self.asked_at = next(_moments)
