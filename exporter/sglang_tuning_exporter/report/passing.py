"""Which runs of batch lines must be read line by line: those with a line that tells what the run's last one does not.

A report says when a diagnosis' evidence was first and last printed. Of a run only the last line is judged, and the
lines before it may have printed evidence that no time was spent in. Pure; cautious: a run that is called plain is.
"""

from __future__ import annotations

import re
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

from sglang_tuning_exporter.scheduler import FULL_PREFILL_SHARE
from sglang_tuning_exporter.signals import AT_LIMIT_SHARE

if TYPE_CHECKING:
    from sglang_tuning_exporter.guide.profiles import Profile
    from sglang_tuning_exporter.scheduler import RankState
    from sglang_tuning_exporter.server import ServerFacts
    from sglang_tuning_exporter.sglang.usual import BatchRun
    from sglang_tuning_exporter.signals import Signal

_Key = tuple["Signal", str]
_EMPTY: Final[_Key] = ("queue", "empty")
_ABOVE: Final[_Key] = ("queue", "above_range")
_AT_LIMIT: Final[_Key] = ("admission", "running_limit")
_HELD_BACK: Final[_Key] = ("admission", "held_back")
_BEYOND: Final[_Key] = ("cuda_graph", "beyond_captured")
KEYS: Final = frozenset({_EMPTY, _ABOVE, _AT_LIMIT, _HELD_BACK, _BEYOND})
"""What a run can be asked about: every state that a diagnosis rests on."""

_NO_QUEUE = re.compile(rb"#queue-req: 0\b")
_DECODES = re.compile(
    rb"Decode batch[.,] #running-req: (\d+), #token: \d+, token usage: ([\d.]+), [^\n]*?#queue-req: (\d+)"
)
_PREFILLS = re.compile(
    rb"#new-seq: (\d+), #new-token: \d+, #cached-token: \d+, token usage: ([\d.]+), #running-req: (\d+), "
    rb"#queue-req: (\d+)"
)
# A rate is watched for ten seconds before it is told (`AdmissionRate`), so a request more adds a tenth at most.
_WATCHED_SECONDS = 10.0
_ROUNDING = 1e-9


class _Bounds(NamedTuple):
    """What one scheduler's figures are judged by; `inf` where nothing is known."""

    facts: ServerFacts
    revision: int
    limit: float  # running requests from which on it is at its limit
    largest: float  # captured batch size
    full: float  # prompt tokens of a full prefill batch


class _Figures(NamedTuple):
    """What the lines of a run lie between, from the least to the most."""

    running: tuple[int, int]
    queued: tuple[int, int]
    usage: float  # the least


class Plainness:
    """Tells whether a run's last line says all that the report asks of any of its lines."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._bounds: dict[int | None, _Bounds] = {}

    def of(self, run: BatchRun, rank: RankState | None, facts: ServerFacts, now: float) -> bool:
        """Judge a run before its scheduler takes it at `now`, seconds on the scheduler's clock."""
        lines = run.decodes + run.prefills
        if lines == 1:
            return True
        # Without a word of it nothing is known to hold; a usage of another pool hides the one printed.
        if rank is None or rank.usages.keys() != {"full"}:
            return False
        bounds = self._bounds.get(run.rank.dp)
        if bounds is None or bounds.facts is not facts or bounds.revision != facts.revision:
            bounds = self._bounds[run.rank.dp] = _bounds(facts, run.rank.dp)
        text = b"\n".join(run.lines)
        never_beyond = bounds.largest == inf or (rank.graph is not False and run.graph is not False)
        if not run.queued and never_beyond and len(_NO_QUEUE.findall(text)) == lines:
            return True
        figures = _figures(text)
        return self._told(figures, run, rank, bounds, now) <= self._told_last(run, rank, bounds, now)

    def _told(self, lines: _Figures, run: BatchRun, rank: RankState, bounds: _Bounds, now: float) -> set[_Key]:
        """Everything that one of the lines may tell."""
        told: set[_Key] = set()
        most = lines.queued[1]
        if lines.queued[0] == 0:
            told.add(_EMPTY)
        if most:
            objective = self._profile.queue_wait_seconds
            if most > self._profile.queue_upper:
                told.add(_ABOVE)
            elif objective is not None:
                rate = rank.admission.per_second(now)
                if rate is not None and most * (1 + _ROUNDING) > objective * rate:
                    told.add(_ABOVE)
            if lines.running[1] >= bounds.limit:
                told.add(_AT_LIMIT)
            if lines.running[0] < bounds.limit and lines.usage < self._profile.token_usage_target:
                told.add(_HELD_BACK)
        if (rank.graph is False or run.graph is False) and lines.running[1] > bounds.largest:
            told.add(_BEYOND)
        return told

    def _told_last(self, run: BatchRun, rank: RankState, bounds: _Bounds, now: float) -> set[_Key]:
        """What the last line tells for certain."""
        told: set[_Key] = set()
        running = run.running + run.joined_sequences
        if not run.queued:
            told.add(_EMPTY)
        else:
            objective = self._profile.queue_wait_seconds
            if run.queued > self._profile.queue_upper:
                told.add(_ABOVE)
            elif objective is not None:
                rate = rank.admission.per_second(now)
                if rate is not None:
                    fastest = rate + run.new_sequences / _WATCHED_SECONDS
                    if run.queued * (1 - _ROUNDING) > objective * fastest:
                        told.add(_ABOVE)
            if running >= bounds.limit:
                told.add(_AT_LIMIT)
            elif run.usage < self._profile.token_usage_target and run.new_tokens < bounds.full:
                told.add(_HELD_BACK)
        graph = rank.graph if run.graph is None else run.graph
        if graph is False and running > bounds.largest:
            told.add(_BEYOND)
        return told


def _bounds(facts: ServerFacts, dp: int | None) -> _Bounds:
    largest, full = facts.largest_captured, facts.prefill_batch_tokens
    return _Bounds(
        facts,
        facts.revision,
        AT_LIMIT_SHARE * (facts.running_limit(dp) or inf),
        inf if largest is None or facts.graphs_disabled else largest,
        inf if full is None else FULL_PREFILL_SHARE * full,
    )


def _figures(text: bytes) -> _Figures:
    running: list[int] = []
    queued: list[bytes] = []
    usages: list[bytes] = []
    for figure, usage, waiting in _DECODES.findall(text):
        running.append(int(figure))
        usages.append(usage)
        queued.append(waiting)
    for joined, usage, figure, waiting in _PREFILLS.findall(text):
        running.append(int(figure) + int(joined))
        usages.append(usage)
        queued.append(waiting)
    waits = list(map(int, queued))
    return _Figures((min(running), max(running)), (min(waits), max(waits)), float(min(usages)))
