"""When the rows of a judgement were seen in a span of a server's time, live and in a log of the past.

Pure; times are unix seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from sglang_tuning_exporter.core import judge
from sglang_tuning_exporter.core.diagnoses import Diagnosis
from sglang_tuning_exporter.core.findings import Finding
from sglang_tuning_exporter.core.server import Server
from sglang_tuning_exporter.core.sums import Totals


@dataclass(frozen=True, slots=True)
class Span:
    """A span of a server's time, and the counts in it."""

    server: Server
    begin: float
    end: float
    counts: Totals

    @classmethod
    def recent(cls, server: Server, now: float, counts: Totals) -> Span:
        """Return the span of a judgement beside a running server: the profile's window, or the time since the last
        start.
        """
        begin = max(server.last.get("server_starts", -inf), now - server.profile.window_seconds)
        return cls(server, begin, now, counts)

    def first_seen(self, row: Diagnosis) -> float | None:
        """Return when the subject of a row was first seen; None where it was not."""
        times = judge.first_and_last(row, self.server, self.begin, self.end)
        return None if times is None else times[0]

    def timed(self, finding: Finding, now: float) -> Finding | None:
        """Return a finding with the times at which it was seen, in the past tense where it is over by `now`; None where
        it was not seen.
        """
        return judge.timed(finding, self.server, self.begin, self.end, now=now, counts=self.counts)
