"""The schedulers of one server, one for each DP rank, and their sums. Pure."""

from __future__ import annotations

from collections import Counter

from sglang_tuning_exporter.sglang.events import RankFigures
from sglang_tuning_exporter.state.dp_attention import AttentionRanks
from sglang_tuning_exporter.state.facts import ServerFacts
from sglang_tuning_exporter.state.profiles import Profile
from sglang_tuning_exporter.state.rank import RankState
from sglang_tuning_exporter.state.totals import Totals, Window

# The largest public deployments have 320 DP ranks; each rank here is sixty series, and as many marks of the past.
MOST_SCHEDULERS = 384
_COUNTERS = ("graph_passes", "eager_passes", "decoded_tokens", "retracted_requests", "admitted_requests")


class Schedulers:
    """All schedulers, those of earlier starts among them; `capped` counts what was dropped because there were too many."""

    def __init__(self, profile: Profile, facts: ServerFacts, capped: Counter[str]) -> None:
        self.ranks: dict[int | None, RankState] = {}
        self.server_totals = Totals()  # `counts` of the whole server, which no scheduler has
        self._window = Window(profile.window_seconds)
        self._profile, self._facts, self._capped = profile, facts, capped
        self._attention = AttentionRanks()
        self._counting: list[RankState] | None = (
            None  # what `counting` returned, until a scheduler comes or works again
        )
        self._beyond: RankState | None = None
        self._served_by: dict[int | None, float] = {}  # serving seconds of each scheduler that are in `served_seconds`

    def of(self, dp: int | None, now: float) -> RankState:
        """Return the scheduler of a DP rank, made on first use; past `MOST_SCHEDULERS` one that nobody reads."""
        known = self.ranks.get(dp)
        if known is not None:
            return known
        if self.has_room(dp):
            made = self.ranks[dp] = self._new(dp, now)
            return made
        self._beyond = self._beyond or self._new(dp, now)
        return self._beyond

    def _new(self, dp: int | None, now: float) -> RankState:
        self._counting = None
        return RankState(dp, self._profile, self._facts, now, others=self._attention, on_first_work=self._recount)

    def _recount(self) -> None:
        self._counting = None

    def has_room(self, dp: int | None) -> bool:
        """Whether this DP rank has, or may have, a scheduler of its own; where not, that is counted."""
        if dp in self.ranks or len(self.ranks) < MOST_SCHEDULERS:
            return True
        self._capped["dp_ranks"] += 1
        return False

    def use(self, facts: ServerFacts) -> None:
        """Take the facts of a new start."""
        self._facts = facts
        for rank in self.ranks.values():
            rank.thresholds.use(facts)

    def restart(self, facts: ServerFacts) -> None:
        """Begin with a new server."""
        self.use(facts)
        if None in self.ranks and self.ranks[None].served and not self.has_dp_ranks:
            self.ranks[None].alone = True
        for rank in self.ranks.values():
            rank.reset()
        self._attention.forget()
        self._counting = None

    def counting(self) -> list[RankState]:
        """Return the schedulers that count.

        Where there are DP ranks, lines and figures without a rank belong to none of them; unless a start had none.
        """
        if self._counting is None:
            ranks, ranked = self.ranks.values(), self.has_dp_ranks and len(self.ranks) > 1
            self._counting = [rank for rank in ranks if rank.dp is not None or rank.alone or not ranked]
        return self._counting

    @property
    def has_dp_ranks(self) -> bool:
        """Whether the server has DP ranks of its own: a start with fewer GPUs may have none where the one before had."""
        seen = [rank.dp for rank in self.ranks.values() if rank.served] or list(self.ranks)
        return any(dp is not None for dp in seen)

    def hide(self, figures: list[RankFigures]) -> bool:
        """Whether figures without a rank are those of one of several DP ranks of this start.

        0.4.3 to 0.4.8 have no rank labels: all DP ranks write one series, and only the last writer is seen.
        """
        if [each.dp for each in figures] != [None]:
            return False
        seen = [rank.dp for rank in self.ranks.values() if rank.served]
        seen += [*self._facts.logged_pool_tokens, *self._facts.running_limits]
        return any(dp is not None for dp in seen)

    def keep_counters(self, figures: RankFigures) -> None:
        """Put the last counters in place of those of a spoiled page: what they gained is counted at the next one."""
        known = self.ranks.get(figures.dp)
        for name in _COUNTERS:
            setattr(figures, name, None if known is None else known.counters.figure(name))

    def advance(self, now: float, *, by_log: bool) -> None:
        """Count the seconds up to `now`, and the retracted requests from the log or from the server's counters."""
        if len(self.ranks) != len(self._served_by):
            self._add_served()  # of those that were there before a new one came
        for rank in self.ranks.values():
            rank.advance(now)
            rank.counters.count_retracted(by_log=by_log)

    def mark(self, now: float) -> None:
        """Keep the sums of the whole server for `recent`."""
        if len(self._served_by) > 1:
            self._add_served()
        if now >= self._window.due:
            self._window.mark(now, self.server_totals)

    def count_retracted(self, *, by_log: bool) -> None:
        """Count the retracted requests up to now."""
        for rank in self.ranks.values():
            rank.counters.count_retracted(by_log=by_log)

    def begin_window(self) -> None:
        """Leave everything up to now out of what is recent."""
        self._window.begin(self.server_totals)
        for rank in self.ranks.values():
            rank.window.begin(rank.totals)

    def served_seconds(self) -> float:
        """Return the seconds in which any scheduler served."""
        self._add_served()
        return self.server_totals.counts["served_seconds"]

    def _add_served(self) -> None:
        """Add what the server served since the last call; with several schedulers that is a short interval.

        Of those that served in it each had something to do at its beginning, so the longest covers the others.
        """
        gained = 0.0
        for dp, rank in self.ranks.items():
            served = rank.time.served_seconds
            gained = max(gained, served - self._served_by.get(dp, 0.0))
            self._served_by[dp] = served
        self.server_totals.counts["served_seconds"] += gained

    def totals(self) -> Totals:
        """Add all schedulers together, since the exporter started."""
        total = self.server_totals.copy()
        for rank in self.counting():
            total += rank.totals
        return total

    def recent(self, now: float, seconds: float | None) -> Totals:
        """Add all schedulers together, over the last `seconds` (by default the profile's window)."""
        total = self._window.recent(now, self.server_totals, seconds)
        for rank in self.counting():
            total += rank.window.recent(now, rank.totals, seconds)
        return total
