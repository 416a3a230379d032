"""What happened in a log: the live state, driven by the times of the lines, over the whole log. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import inf

from sglang_tuning_exporter.diagnosis.evidence import RESERVE, WATCHDOG
from sglang_tuning_exporter.diagnosis.json_findings import Document
from sglang_tuning_exporter.report.phases import PhaseTracker
from sglang_tuning_exporter.report.runs import JudgedRun, Runs, Sightings
from sglang_tuning_exporter.report.series import Sampler
from sglang_tuning_exporter.sglang.events import (
    ENDS,
    DecodeBatch,
    Event,
    Limits,
    Liveness,
    OutOfMemory,
    PrefillBatch,
    Rank,
    Rejection,
    Retraction,
    ServerArgs,
)
from sglang_tuning_exporter.sglang.log.fast_path import BatchRun
from sglang_tuning_exporter.state.arguments import is_whole
from sglang_tuning_exporter.state.history import added_up
from sglang_tuning_exporter.state.journal import REJECTION, RETRACTION, START
from sglang_tuning_exporter.state.profiles import Profile
from sglang_tuning_exporter.state.server import ServerState

# Seconds without a batch line that may be a pause.
QUIET_SECONDS = 2.0
PASS_SECONDS = 10.0  # as often as a window keeps its totals
_KINDS = ("decode", "prefill")


@dataclass(slots=True)
class LastLine:
    """The figures of the last batch lines of one DP rank; `None` where none was printed."""

    running: int | None = None
    queued: int | None = None
    usage: float | None = None


class _Ranks:
    """Batch lines and start-up memory of one start, by rank. Only the lowest PP and TP rank of a scheduler counts.

    All ranks of a start are known before its figures are asked for, so repetitions never count, whichever rank prints first.
    """

    def __init__(self) -> None:
        self.batches: dict[Rank, list[int]] = {}  # decode and prefill lines
        self._last: Rank | None = None
        self._of_last = [0, 0]
        self.available: list[tuple[Rank, float]] = []

    def count(self, rank: Rank, decodes: int, prefills: int) -> None:
        if rank is not self._last:  # mostly the same: hashing a rank costs more than the rest
            self._last, self._of_last = rank, self.batches.setdefault(rank, [0, 0])
        self._of_last[0] += decodes
        self._of_last[1] += prefills

    def own_batches(self, kind: str) -> int:
        place = _KINDS.index(kind)
        counted = {rank: numbers[place] for rank, numbers in self.batches.items() if numbers[place]}
        own = _own(set(counted), of_stages=False)
        return sum(number for rank, number in counted.items() if rank in own)

    def own_available(self) -> list[float]:
        own = _own({rank for rank, _ in self.available}, of_stages=True)
        return [gigabytes for rank, gigabytes in self.available if rank in own]


def _is_busy(line: DecodeBatch | PrefillBatch) -> bool:
    joining = line.new_sequences or 0 if isinstance(line, PrefillBatch) else 0
    return (line.running or 0) + joining > 1 or (line.queued or 0) > 0


def _own(ranks: set[Rank], *, of_stages: bool) -> set[Rank]:
    """Return the lowest TP rank of each scheduler, or of each pipeline stage: stages share batches, not memory."""
    lowest: dict[tuple[int | None, int | None], Rank] = {}
    for rank in sorted(ranks, key=_place):
        lowest.setdefault((rank.dp, rank.pp if of_stages else None), rank)
    return set(lowest.values())


def _place(rank: Rank) -> tuple[int, bool, int, bool]:
    """Return a sort key for a rank; a rank that is not printed sorts before a printed 0."""
    return rank.pp or 0, rank.pp is not None, rank.tp or 0, rank.tp is not None


class Analysis:
    """The state, phases, starts and figures over time of a log, from its events in time order. Times never run backwards."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.state = ServerState(profile, 0.0, self)
        self.graph: bool | None = None  # of the last decode line
        self.begin: float | None = None  # the first time; None without printed times
        self._now = 0.0
        self._last_event_at = 0.0  # the time of a line without meaning, which ends or begins a file, is not one
        self._before_start = 0.0  # when the event before the last start was printed
        self._counts: Counter[str] = Counter()
        self._available: list[float] = []
        self._ranks = _Ranks()
        self._last: dict[int | None, LastLine | BatchRun] = {}
        self._restarted = False
        self._seen = Sightings()
        self.course = PhaseTracker(lambda: self.state.served_seconds)
        self._sampler = Sampler(self.state)
        self.series = self._sampler.series
        self._serves_until: float | None = None  # by the last batch line, which came at the next
        self._ends_after = self._pass_due = -inf
        self._runs = Runs(self.state, self._sampler, self.course)
        self._judged: JudgedRun | None = None

    def take(self, moment: float, event: Event | BatchRun | None) -> None:
        """Take an event printed at `moment` (-inf: not known yet); without an event only time passes."""
        before = self._last_event_at
        if moment > self._now or (self.begin is None and moment != -inf):
            self._pass(moment, lightly=event is None or isinstance(event, BatchRun))
        if event is None:
            return
        self._last_event_at = self._now
        if isinstance(event, BatchRun):
            self.state.observe(event, self._now)
            self._note_run(event)
            return
        if self._now > self.course.last_load and self.course.serves:
            self._end_of_service()
        if isinstance(event, ServerArgs) and is_whole(event):
            if self.course.is_another_node(event.args, self._now):
                return
            self._before_start = before
        if self.state.observe(event, self._now) and isinstance(event, (DecodeBatch, PrefillBatch)):
            self._note_batch(event)

    def wait(self, moment: float) -> None:
        """Let time pass without a line, so that the state at `moment` can be read."""
        if self.begin is None or moment <= self._now:
            return
        self._see_end_of_service(moment)
        self.state.advance(moment)
        hang = self.state.hang(moment)
        if hang is not None:
            self._runs.see_hang(hang)
            self.course.hung = hang.stage
            self._seen.see(WATCHDOG, moment)

    def _see_end_of_service(self, moment: float) -> None:
        """Note until when the server serves by its last batch line, if a pause follows in which it may become idle."""
        if moment - self.course.last_load > QUIET_SECONDS and self.course.serves:
            until = self._end_of_service()
            if until is not None:
                self.course.served_until = until

    def _end_of_service(self) -> float | None:
        """Return until when the server serves by its last batch line; asked before another line changes the state that it left."""
        if self._ends_after != self.course.last_load:
            ends = [until for rank in self.state.schedulers if (until := rank.time.serves_until) is not None]
            self._ends_after, self._serves_until = self.course.last_load, max(ends, default=None)
        return self._serves_until

    def _pass(self, moment: float, *, lightly: bool) -> None:
        """Let time pass for all ranks at once, so that seconds in which any of them served can be counted.

        `lightly`: a run lets time pass for its own rank, which is enough for a while under the load of one rank.
        """
        if self.begin is None:
            self.begin = self._now = self._last_event_at = moment
            self._sampler.begin(moment)
            self._runs.begin(moment, 0.0)
            self.course.begin(moment)
        elif self._now >= self._sampler.due:
            self._sampler.take(self._now, moment)
        self._see_end_of_service(moment)
        if not (lightly and moment < self._pass_due and moment - self.course.last_load <= QUIET_SECONDS):
            self.state.advance(moment)
            self._pass_due = moment + PASS_SECONDS if self.state.is_steady else -inf
        self._now = moment

    def takes(self, event: Event, at: float) -> None:
        """Note an event that the state accepted, at the time when it was printed."""
        if isinstance(event, Limits) and event.memory_device == "gpu" and event.available_gb is not None:
            self._ranks.available.append((event.rank, event.available_gb))
            self._see(RESERVE, at)
        elif isinstance(event, Retraction):
            self._see(RETRACTION, at)
        elif isinstance(event, OutOfMemory):
            self._see(event.phase, at)
            self.course.out_of_memory = event.phase
        elif isinstance(event, Rejection):
            self._see(REJECTION, at)
        elif isinstance(event, ServerArgs):
            self._see(START, at)
        elif isinstance(event, Liveness):
            self._see(event.what, at)
            if event.what == "ready":
                self.course.ready(at)
            elif event.what == "draining":
                self.course.stopping(at)
            elif event.what in ENDS:
                self.course.died(at, event.what, event.detail)

    def _note_run(self, run: BatchRun) -> None:
        # Only the last line of a second counts as seen: the lines before it held for no time.
        self._ranks.count(run.rank, run.decodes, run.prefills)
        if run.decodes:
            self.graph = run.graph
        self._see_line(run.rank.dp, run)
        if not self.course.goes_on(self._now, waits=run.queued > 0):
            for line in run.events():
                self._note_load(line)

    def _note_batch(self, line: DecodeBatch | PrefillBatch) -> None:
        decodes = int(isinstance(line, DecodeBatch))
        self._ranks.count(line.rank, decodes, 1 - decodes)
        if isinstance(line, DecodeBatch):
            self.graph = line.graph
        dp = line.rank.dp
        before = None if self._restarted else self._last.get(dp)
        last = LastLine() if before is None else LastLine(before.running, before.queued, before.usage)
        last.running = line.running if line.running is not None else last.running
        last.queued = line.queued if line.queued is not None else last.queued
        last.usage = line.full_usage if line.full_usage is not None else last.usage
        self._see_line(dp, last)
        self._note_load(line)

    def _note_load(self, line: DecodeBatch | PrefillBatch) -> None:
        is_load = isinstance(line, DecodeBatch) or not line.is_health_probe
        if is_load and not self.course.goes_on(self._now, waits=bool(line.queued)):
            self.course.served(self._now, busy=_is_busy(line), waits=bool(line.queued))

    def _see_line(self, dp: int | None, line: LastLine | BatchRun) -> None:
        """Note the last line of a scheduler, and its states."""
        if self._restarted:
            self._last, self._restarted = {}, False
        self._last[dp] = line
        rank = self.state.ranks.get(dp)
        if rank is not None and self.begin is not None:
            self._seen.see_states(dp, rank.time.snapshot[0], self._now)

    def _see(self, what: str, at: float) -> None:
        if self.begin is not None:
            self._seen.see(what, at)

    def starts(self, event: ServerArgs, at: float) -> None:
        """Begin a new run: the run before ended with the line before."""
        served = self.state.served_seconds
        self._runs.end(self._before_start, served, self._seen, restarted=True)
        self._seen = Sightings()
        self._end_start()
        self._runs.begin(at, served)
        self.course.start(at, event.args)

    def _end_start(self) -> None:
        for kind in _KINDS:
            self._counts[kind] += self._ranks.own_batches(kind)
        self._available += self._ranks.own_available()
        self._ranks = _Ranks()
        self._restarted = True

    @property
    def seconds(self) -> float:
        """How long the span is; 0 without printed times."""
        return 0.0 if self.begin is None else self._now - self.begin

    def batches(self, kind: str) -> int:
        """Return the number of `decode` or `prefill` lines, without the repetitions of other TP and PP ranks."""
        return self._counts[kind] + self._ranks.own_batches(kind)

    @property
    def available_gb(self) -> list[float]:
        """`available_gpu_mem` of every start and scheduler as printed, GB."""
        return self._available + self._ranks.own_available()

    @property
    def last(self) -> Document:
        """The last lines of all DP ranks together: the sum of the requests, the highest usage."""
        lines = self._last.values()
        usages = [line.usage for line in lines if line.usage is not None]
        return {
            "running_requests": added_up(line.running for line in lines),
            "queued_requests": added_up(line.queued for line in lines),
            "token_usage": max(usages, default=None),
        }

    def conclude(self) -> JudgedRun:
        """End the log; return the judgement of the last start with enough load, or of the last one that failed."""
        if self._judged is None:
            self.state.settle(self._now)
            if self.begin is not None:
                self._sampler.end(self._now)
            served = self.state.served_seconds
            self._runs.end(self._now, served, self._seen, restarted=False)
            self.course.finish(self._now)
            self._judged = self._runs.judged or self._runs.whole(self._now, served, self._seen)
        return self._judged
