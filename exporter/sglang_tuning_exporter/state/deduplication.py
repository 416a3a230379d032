"""Count events, not lines: TP and PP ranks print the same event, and a failure is printed more than once.

Pure; times are seconds on the caller's clock.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Literal, TypeAlias, cast

from sglang_tuning_exporter.sglang.event_json import is_rank
from sglang_tuning_exporter.sglang.events import (
    MOST_RANKS,
    OUT_OF_MEMORY_PHASES,
    OutOfMemory,
    OutOfMemoryPhase,
    Rank,
    Retraction,
)
from sglang_tuning_exporter.state.saved import lists

_Shard: TypeAlias = "tuple[int | None, int | None]"  # PP and TP rank: the ranks of one scheduler
_ONLY: _Shard = (None, None)

REPEAT_SECONDS = 10.0
_MOST_KEYS = 512


def same_in_all_ranks(line: Retraction) -> tuple[float | None, ...]:
    """Return the figures of a retraction that all ranks of its scheduler print alike, its DP rank first."""
    return line.rank.dp, line.requests, line.aborted, line.new_tokens_gained, line.ratio_before, line.ratio_after


class RetractionLedger:
    """Distinguishes new retractions from repetitions by other TP ranks.

    Every TP rank of every pipeline stage prints every retraction with the same figures (srt/managers/scheduler.py). So the n-th line
    of one rank is the n-th line of another: a line is a new event only if its rank has printed these figures more often than any rank
    before. DP ranks are separate.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[float | None, ...], tuple[float, dict[_Shard, int]]] = OrderedDict()

    def is_new(self, line: Retraction, now: float) -> bool:
        """Return whether a line is an event that was not counted yet."""
        key = same_in_all_ranks(line)
        last, lines = self._seen.pop(key, (now, {}))
        if now - last > REPEAT_SECONDS:
            lines = {}
        before = max(lines.values(), default=0)
        shard = (line.rank.pp, line.rank.tp)
        lines[shard] = lines.get(shard, 0) + 1
        self._seen[key] = (now, lines)
        if len(self._seen) > _MOST_KEYS:
            self._seen.popitem(last=False)
        return lines[shard] > before

    def saved(self, now: float) -> list[Any]:
        """Return what may still be repeated, as plain JSON: figures, age in seconds, lines by PP and TP rank."""
        recent = [(key, now - last, lines) for key, (last, lines) in self._seen.items() if now - last <= REPEAT_SECONDS]
        return [[list(key), age, [[*shard, count] for shard, count in lines.items()]] for key, age, lines in recent]

    def restore(self, saved: object, now: float) -> None:
        """Go on from what `saved` returned; the time between two processes does not count."""
        for entry in saved[-_MOST_KEYS:] if isinstance(saved, list) else ():
            try:
                key, age, lines = entry
                counted = {(pp, tp): int(count) for pp, tp, count in lines}
                if 0 <= age <= REPEAT_SECONDS:
                    self._seen[tuple(key)] = (now - age, counted)
            except (TypeError, ValueError, OverflowError):
                continue


class OutOfMemoryLedger:
    """Counts a fatal failure once, however many ranks print it and however often.

    It is logged and raised, then raised again by the parent process, and not every line has its phase.
    """

    def __init__(self) -> None:
        self._last: dict[OutOfMemoryPhase, float] = {}

    def classify(self, line: OutOfMemory, now: float) -> Literal["new", "repeated", "explained"]:
        """Return what a line is: a new failure, one counted before, or the phase of one counted as unknown.

        A line without a phase repeats any recent failure.
        """
        recent = {phase for phase, at in self._last.items() if now - at <= REPEAT_SECONDS}
        if line.phase in recent or (line.phase == "unknown" and recent):
            self._last.update(dict.fromkeys(recent if line.phase == "unknown" else {line.phase}, now))
            return "repeated"
        self._last[line.phase] = now
        if recent == {"unknown"}:
            del self._last["unknown"]
            return "explained"
        return "new"

    def saved(self, now: float) -> dict[str, float]:
        """Return the age in seconds of each phase's last line."""
        return {phase: now - at for phase, at in self._last.items() if now - at <= REPEAT_SECONDS}

    def restore(self, saved: object, now: float) -> None:
        """Go on from what `saved` returned."""
        for phase, age in saved.items() if isinstance(saved, dict) else ():
            if phase in OUT_OF_MEMORY_PHASES and isinstance(age, (int, float)) and 0 <= age <= REPEAT_SECONDS:
                self._last[cast("OutOfMemoryPhase", phase)] = now - age

    def forget(self) -> None:
        """Forget the server before: the next failure repeats nothing."""
        self._last.clear()


class StatsRanks:
    """Which rank's batch lines count for a DP rank: the lowest PP rank that prints, and of that the lowest TP rank.

    Every pipeline stage prints every batch. Only its first TP rank prints, except with `--enable-metrics-for-all-schedulers` in 0.4.9
    to 0.5.9. All ranks print their start-up lines before the first batch: a rank that `exists` there counts from the first batch line
    on, whichever rank prints it first.
    """

    def __init__(self) -> None:
        self._lowest: dict[int | None, _Shard] = {}
        self._last: Rank | None = None  # whose line counted: nearly always it prints the next one

    def exists(self, rank: Rank) -> None:
        """Note a rank before it prints its first batch."""
        shard = (rank.pp, rank.tp)
        known = self._lowest.get(rank.dp)
        if shard != _ONLY and (_place(shard) < _place(known) if known else len(self._lowest) < MOST_RANKS):
            self._lowest[rank.dp] = shard
            self._last = None

    def counts(self, rank: Rank) -> bool:
        """Return whether a batch line of `rank` counts, and is no repetition."""
        if rank is self._last or (rank.tp is None and rank.pp is None):
            return True
        self.exists(rank)
        lowest = self._lowest.get(rank.dp)
        if lowest is not None and _place((rank.pp, rank.tp)) > _place(lowest):
            return False
        self._last = rank
        return True

    def forget(self) -> None:
        """Forget the server before: a new one may have other ranks."""
        self._lowest.clear()
        self._last = None

    def saved(self) -> list[list[int | None]]:
        """Return for each DP rank the PP and TP rank that count."""
        return [[dp, pp, tp] for dp, (pp, tp) in self._lowest.items()]

    def restore(self, saved: object) -> None:
        """Go on from what `saved` returned."""
        self._last = None
        for entry in lists(saved)[:MOST_RANKS]:
            if len(entry) == 3 and all(map(is_rank, entry)):
                dp, pp, tp = entry
                self.exists(Rank(dp=dp, pp=pp, tp=tp))


def _place(shard: _Shard) -> tuple[int, int]:
    return (-1 if shard[0] is None else shard[0], -1 if shard[1] is None else shard[1])
