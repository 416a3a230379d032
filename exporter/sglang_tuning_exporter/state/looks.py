"""What one scrape shows of the stages of a server, and what was done since the scrape before. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_tuning_exporter.state.counters import gained
from sglang_tuning_exporter.state.stages import Look

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sglang_tuning_exporter.sglang.events import Scrape
    from sglang_tuning_exporter.state.facts import ServerFacts
    from sglang_tuning_exporter.state.rank import RankState

# With speculative decoding a step gives several tokens, and releases that send every fiftieth token may skip some of these.
SPECULATED_STEPS = 250.0


class Looks:
    """Makes a `Look` of each scrape."""

    def __init__(self) -> None:
        self._counted: dict[int | None, tuple[float | None, ...]] = {}  # by scheduler, at the last scrape

    def take(self, scrape: Scrape, ranks: Mapping[int | None, RankState], facts: ServerFacts) -> Look:
        """Return what a scrape shows; the ranks have taken it already."""
        steps, tokens, joined = self._done(ranks, facts.decode_log_interval)
        figures = scrape.ranks
        outside = sum((f.grammar_queued or 0) + sum(f.queues.values()) for f in figures)
        works = sum((f.running or 0) + (f.queued or 0) for f in figures)
        speculates = bool(facts.args.get("speculative_algorithm"))
        return Look(
            scrape.sent,
            scrape.scheduled,
            steps,
            facts.decode_log_interval,
            tokens,
            joined,
            max(facts.arg("stream_interval") or 0.0, SPECULATED_STEPS if speculates else 0.0),
            scrape.aborted_requests,
            scrape.open_requests,
            works,
            tuple(figure for f in figures for figure in (f.running, f.used_tokens, f.generation_throughput)),
            idle=not works and any(f.running is not None for f in figures),
            excused=outside > 0,
        )

    def _done(self, ranks: Mapping[int | None, RankState], interval: float) -> tuple[float, float, float]:
        """Return decode steps, decoded tokens and requests that began to run since the last scrape.

        The server's own counters are used where it has them, else the lines of the log.
        """
        steps = tokens = joined = 0.0
        before, self._counted = self._counted, {}
        for dp, rank in ranks.items():
            counts = rank.totals.counts
            of_server = rank.counters.figure("decoded_tokens"), rank.counters.figure("admitted_requests")
            now = (counts["replayed"] + counts["eager"], counts["decoded"], counts["joined"], *of_server)
            batches, lines, sequences, decoded, admitted = map(gained, before.get(dp, now), now)
            self._counted[dp] = now
            steps = max(steps, batches)
            tokens += lines * interval if of_server[0] is None else decoded
            joined += sequences if of_server[1] is None else admitted
        return steps, tokens, joined
