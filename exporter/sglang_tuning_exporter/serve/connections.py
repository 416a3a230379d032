"""Who may stay connected: the last to ask. Connections that dawdle cannot keep a scraper out."""

from __future__ import annotations

import asyncio
from itertools import count

from sglang_tuning_exporter.serve.security.uvicorn_server import Protocol

# A Prometheus or two, the probes of an orchestrator and some browsers have a dozen.
MOST_CONNECTIONS = 64
_moments = count()


class Connection(Protocol):
    """One connection. When there are too many, the one that goes whose last whole request came longest ago.

    Not limited by time, which a scraper far away might need: half a request, an answer that nobody reads and an idle
    connection cost nothing until somebody else wants the place. A scraper whose idle connection was closed opens another.
    """

    asked_at = 0  # in the order of whole requests, and of arrivals

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn narrows it alike
        """Let it in, and another out if need be."""
        self.asked_at = next(_moments)
        super().connection_made(transport)
        others = [each for each in self.connections if isinstance(each, Connection)]
        if len(others) > MOST_CONNECTIONS:
            oldest = min(others, key=lambda each: each.asked_at)
            self.connections.discard(oldest)  # the loop may let in several before it tells that this one is lost
            oldest.transport.abort()

    def handle_events(self) -> None:
        """Note when a request has come whole."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self.asked_at = next(_moments)
