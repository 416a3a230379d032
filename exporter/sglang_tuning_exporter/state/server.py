"""One server over time: events and scrapes in; gauges, counters and the seconds in each state out.

Pure: `now` is seconds on one monotonic clock (live: the moment of arrival; offline: the line's own time). An observation holds until
the next one, at most 60 s; the seconds after that are `unknown`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any, get_args

from sglang_tuning_exporter.sglang.event_json import is_rank
from sglang_tuning_exporter.sglang.events import (
    NO_RANK,
    OUT_OF_MEMORY_PHASES,
    LivenessKind,
    OutOfMemory,
    RankFigures,
    Scrape,
)
from sglang_tuning_exporter.sglang.metrics.catalogue import SERVER_COUNTS
from sglang_tuning_exporter.state.counters import RejectedStreams, ServerCounters, increase, unstarted_requests
from sglang_tuning_exporter.state.journal import HUNG, RETRACTION, WATCHDOG
from sglang_tuning_exporter.state.latency import LATENCIES, Latency, LatencyLedger, RecentLatency
from sglang_tuning_exporter.state.logged import LoggedServer
from sglang_tuning_exporter.state.profiles import Profile
from sglang_tuning_exporter.state.saved import counts, mappings
from sglang_tuning_exporter.state.stages import Hang
from sglang_tuning_exporter.state.totals import Totals

QUEUE_FULL = 0.5  # of --max-queued-requests: gauges are older than the rejections


class ServerState(LoggedServer):
    """One server: its facts, its schedulers, and what happened to it, from log and metrics."""

    def __init__(self, profile: Profile, now: float) -> None:
        super().__init__(profile, now)
        objectives: dict[Latency, float | None] = {
            "time_to_first_token": profile.time_to_first_token_seconds,
            "inter_token": profile.inter_token_seconds,
        }
        self.latency = LatencyLedger(objectives, profile.window_seconds)
        self._counters = ServerCounters()
        self._rejected_streams = RejectedStreams()
        self._scraped = False
        self._progress: float | None = None
        self._looked_at: float | None = None  # the last scrape
        self._worked_at: float | None = None  # begin of the last interval between scrapes in which tokens came out

    def observe_scrape(self, scrape: Scrape, now: float) -> None:
        """Take one successful scrape."""
        self.facts.model_name = scrape.model_name or self.facts.model_name
        self.facts.engine_type = scrape.engine_type or self.facts.engine_type
        if scrape.counters_invalid:  # its counters say nothing
            nothing: dict[str, Any] = dict.fromkeys(("sent", *SERVER_COUNTS))
            scrape = replace(scrape, progress=self._progress, **nothing)
        restarted = scrape.progress is not None and self._progress is not None and scrape.progress < self._progress
        busy = bool(scrape.open_requests) or any((each.running or 0) + (each.queued or 0) > 0 for each in scrape.ranks)
        self._confirm(self.unconfirmed.scraped(now, scrape.progress, scrape.sent, busy=busy, restarted=restarted))
        if restarted:
            self._begin_counters(now)
        is_stalled = scrape.progress is not None and scrape.progress == self._progress
        self._progress = scrape.progress if scrape.progress is not None else self._progress
        found = self._counters.take(scrape, is_first=not self._scraped)
        for name, more in found.items():
            self.server_totals.counts[name] += more
            if more:
                self.journal.see(name, now)
        self.latency.observe(scrape, now)
        # Progress is the whole server's: with several schedulers it says nothing of one.
        progress = scrape.progress if len(scrape.ranks) == 1 else None
        if not self._schedulers.hide(scrape.ranks):
            for figures in scrape.ranks:
                if scrape.counters_invalid:
                    self._schedulers.keep_counters(figures)
                if self._schedulers.has_room(figures.dp):
                    self._see_figures(figures, progress, now, is_stalled=is_stalled)
        if not scrape.counters_invalid:
            self._count_rejected(scrape, found, now)
        self._scraped = True
        self._look(scrape, now)

    def _count_rejected(self, scrape: Scrape, found: Mapping[str, float], now: float) -> None:
        """Count rejected requests, streamed or not."""
        longest = self.facts.arg("max_queued_requests")
        full = longest is not None and any((rank.queued or 0.0) >= QUEUE_FULL * longest for rank in self.schedulers)
        answered, finished = (found.get(name, 0.0) for name in ("answered_requests", "finished_requests"))
        # Whoever aborts requests takes them out of the queue as well.
        unstarted = None if found.get("aborted_requests") else unstarted_requests(scrape)
        rejected = self._rejected_streams.take(answered, finished, queue_is_full=full, unstarted=unstarted)
        refused = int(found.get("refused_requests", 0.0))
        rejected += self._rejections.count(refused, now, counts=scrape.answered_requests is not None)
        self._count_rejections(rejected, now)

    def _begin_counters(self, now: float) -> None:
        """Take a restart that the server's counters show."""
        if self._starts.counters_fell(log_is_read=self.log_is_read):
            self.advance(now)
            self._restart(now, is_new=True)
        for rank in self.ranks.values():
            rank.counters.begin_again()
        self._counters.begin_again()
        self._rejected_streams = RejectedStreams()
        self.stages.restarted()

    def _see_figures(self, figures: RankFigures, progress: float | None, now: float, *, is_stalled: bool) -> None:
        """Take what a scrape shows of one scheduler."""
        self.facts.apply_figures(figures)
        # A scheduler that the scrapes before did not have had done nothing then: its counters count from 0.
        base = RankFigures(figures.dp) if self._scraped else None
        rank = self.rank(figures.dp, now)
        has_base = self._scraped or rank.counters.last is not None
        before = rank.counters.figure("retracted_requests")
        rank.see_figures(figures, progress, now, base, is_stalled=is_stalled)
        counter = rank.counters.figure("retracted_requests")
        more = increase(before, counter) if has_base else None
        if more:
            self.journal.see(RETRACTION, now)
        # From 0.5.7 on the counter is written with the line; before, with the next decode line.
        written = rank.counters.has_passes
        self._count_retractions(self.forgeries.scraped(figures.dp, now, counter, more, counts=written), now)

    def _look(self, scrape: Scrape, now: float) -> None:
        """Show the scrape to the stages."""
        if self.stages.came_out(scrape.sent):
            self._worked_at = self._looked_at
        self._looked_at = now
        self.stages.observe(scrape, self.ranks, self.facts, now)
        if self.hang(now) is not None:
            self.journal.see(HUNG, now)

    def lost_scrape(self, now: float | None = None, *, gone: bool = True) -> None:
        """Note that SGLang could not be scraped; `gone`: nothing answers at its address."""
        now = self._now if now is None else now
        self._count_retractions(self.forgeries.unscraped(), now)
        self._count_rejections(self._rejections.lose_counter(), now)
        self._confirm(self.unconfirmed.lost(now, gone=gone))

    @property
    def has_dp_ranks(self) -> bool:
        """Whether the server has DP ranks of its own."""
        return self._schedulers.has_dp_ranks

    @property
    def log_silent_seconds(self) -> float:
        """How long after the last batch line the server was still seen at work; 0 until the next line is overdue."""
        line = self.begun if self.stages.batch_at is None else max(self.stages.batch_at, self.begun)
        silent = 0.0 if self._worked_at is None else max(self._worked_at - line, 0.0)
        overdue = max((rank.overdue_seconds for rank in self.schedulers), default=0.0)
        return silent if silent > overdue else 0.0

    def hang(self, now: float) -> Hang | None:
        """Return which stage of the server hangs; None where none does."""
        since = [rank.time.stuck_since for rank in self.schedulers if rank.time.stuck_since is not None]
        return self.stages.hang(now, min(since, default=None))

    def server_count(self, name: str) -> float | None:
        """Return one of `SERVER_COUNTS` since the exporter started; None where the server does not expose it."""
        return self.server_totals.counts[name] if self._counters.has(name) else None

    def latencies(self, now: float, seconds: float | None = None) -> dict[Latency, RecentLatency]:
        """Return the latencies of the last `seconds`, those that the server exposes."""
        recent = ((latency, self.latency.recent(latency, now, seconds)) for latency in LATENCIES)
        return {latency: found for latency, found in recent if found is not None}

    def knows_waits(self, now: float) -> bool:
        """Whether it is known how fast requests start on every scheduler with a queue, and so how long they wait."""
        queues = (rank.time.admission for rank in self.schedulers if rank.totals.integrals.get("queued"))
        return all(admission.per_second(now) is not None for admission in queues)

    @property
    def served_seconds(self) -> float:
        """Seconds in which any scheduler served."""
        return self._schedulers.served_seconds()

    def totals(self) -> Totals:
        """Return the totals of all schedulers together, since the exporter started."""
        return self._schedulers.totals()

    def recent(self, now: float, seconds: float | None = None) -> Totals:
        """Return the totals of all schedulers together, over the last `seconds` (by default the profile's window)."""
        return self._schedulers.recent(now, seconds)

    def recent_marks(self, now: float, seconds: float) -> Counter[str]:
        """Count what happened in the last `seconds`: out-of-memory failures by phase, `start`, and liveness by its kind.

        A failure before a start with other arguments is not counted: it says nothing about those.
        """
        since = now - seconds
        found = self.journal.count(since, max(since, self._starts.settings_since))
        # With metrics, a hang shows in them; without, the line stands until another one contradicts it.
        if not self._scraped and self.journal.is_last_word(WATCHDOG):
            found[WATCHDOG] = max(found[WATCHDOG], 1)
        return found

    def last_seen(self, what: Hashable, now: float) -> float | None:
        """Return when an event, by name, or a state, by signal and state, was last seen; None where it never was."""
        if not isinstance(what, tuple):
            return self.journal.last_seen(str(what))
        seen = (rank.window.last_seen(now, rank.totals, *what) for rank in self.schedulers)
        return max((at for at in seen if at is not None), default=None)

    def begin_window(self, now: float) -> None:
        """Look at what comes from now on, as in `LoggedServer`; latencies of before are not recent either."""
        super().begin_window(now)
        self.latency.begin_window()

    def counted(self) -> tuple[object, ...]:
        """Return all that `saved` keeps and that can change without a line: two equal ones need not be saved twice."""
        self._schedulers.count_retracted(by_log=self._counts_by_log)
        ranks = tuple((rank.dp, *rank.counters.saved().values()) for rank in self.ranks.values())
        rejected = self.server_totals.counts["rejected_requests"]
        failures, lives = tuple(self.out_of_memory.items()), tuple(self.liveness.items())
        return ranks, failures, lives, tuple(self.forgeries.suspicious.items()), self.starts, rejected

    def saved(self, now: float) -> dict[str, Any]:
        """Return what a later process needs to count the rest of the log once: plain JSON, read by `restore`."""
        self._schedulers.count_retracted(by_log=self._counts_by_log)
        return {
            "ranks": [{"dp": rank.dp, "counts": rank.counters.saved()} for rank in self.ranks.values()],
            "out_of_memory": dict(self.out_of_memory),
            "unexplained": self._unexplained is not None,
            "starts": self.starts,
            "rejected_requests": self.server_totals.counts["rejected_requests"] + self._rejections.waiting,
            "liveness": dict(self.liveness),
            "ages": self.journal.saved(now),
            "witness": self.forgeries.saved(),
            "claims": self.unconfirmed.saved(now),
            "retractions": self._retractions.saved(now),
            "failures": self._failures.saved(now),
            "stats_ranks": self._stats_ranks.saved(),
        }

    def restore(self, saved: dict[str, Any], now: float, ago: float = 0.0) -> None:
        """Go on from what an earlier process saved `ago` seconds before now; what cannot be read is left out.

        Restored counts go on in the counters; none of them belongs to the window.
        """
        then = now - ago
        for entry in mappings(saved.get("ranks")):
            if is_rank(entry.get("dp")):
                self.rank(entry.get("dp"), now).restore(counts(entry.get("counts")))
        failures, lives = counts(saved.get("out_of_memory")), counts(saved.get("liveness"))
        self.out_of_memory.update({phase: failures[phase] for phase in OUT_OF_MEMORY_PHASES if phase in failures})
        if saved.get("unexplained") is True:
            self._unexplained = (then, OutOfMemory(None, NO_RANK, "unknown"))
        self.liveness.update({what: lives[what] for what in get_args(LivenessKind) if what in lives})
        self.journal.restore(saved.get("ages"), then, now)
        self._starts.count = counts(saved).get("starts", 0)
        self.server_totals.counts["rejected_requests"] += counts(saved).get("rejected_requests", 0)
        self._retractions.restore(saved.get("retractions"), then)
        self._failures.restore(saved.get("failures"), then)
        self._stats_ranks.restore(saved.get("stats_ranks"))
        self.forgeries.restore(saved.get("witness"), then)
        self.unconfirmed.restore(saved.get("claims"), then)
        self.begin_window(now)
