"""The phases of a log (start-up, load, idle, end) and its runs, one for each start. Pure; times in seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from typing import Generic, TypeVar

from sglang_tuning_exporter.diagnosis.json_findings import Document, iso, number
from sglang_tuning_exporter.report.comparison import RunFigures, StartArgs

# A shorter pause between two bursts is part of the load (docs/decisions.md, "Reports").
IDLE_SECONDS = 60.0
# A shorter rest at the end of a load comes from the rounding of printed times and is no idle phase.
_TAIL_SECONDS = 5.0
# A load that serves for a smaller share of its time comes in bursts.
_STEADY_SHARE = 0.8
# SGLang sends itself a request before it is ready: that is no load.
OWN_WARM_UP_LINES = 20
# The processes of several nodes print their arguments one after the other.
_SAME_START_SECONDS = 600.0
_KEPT = 100  # of the first and of the last: a server in a crash loop starts without end

_DIED = {
    "process_died": "a process of the server died",
    "scheduler_exception": "the scheduler raised an exception",
    "launch_failed": "the server could not be started",
}

_Item = TypeVar("_Item")


@dataclass(slots=True)
class Run:
    """A run: from one start to the next. `start` is None where the log begins in the middle of it."""

    number: int
    start: float | None
    begin: float  # of its part in the log
    args: StartArgs = field(default_factory=lambda: StartArgs({}))
    ready: float | None = None
    end: float = 0.0
    ending: str = "log_ends"  # or crash, stop, silence
    memory: Document | None = None
    figures: RunFigures | None = None
    verdict: str = ""
    limits: Mapping[str | None, Collection[str]] = field(
        default_factory=dict
    )  # diagnoses (None: a crash) with the advice's arguments
    changed: list[Document] = field(default_factory=list)
    against_last: Document | None = None


def stretch(start: float, end: float, begin: float | None) -> Document:
    """Return when something began, and for how long it lasted; `at`: seconds since the log began, known without dates too."""
    return {
        "start": iso(start),
        "end": iso(end),
        "at": number(round(start - (begin or 0.0), 3)),
        "seconds": number(round(end - start, 3)),
    }


class FirstAndLast(Generic[_Item]):
    """The first and the last of many items."""

    def __init__(self, limit: int = _KEPT) -> None:
        self._limit = limit
        self._first: list[_Item] = []
        self._last: deque[_Item] = deque(maxlen=limit)

    def append(self, item: _Item) -> None:
        """Add an item."""
        (self._first if len(self._first) < self._limit else self._last).append(item)

    def __iter__(self) -> Iterator[_Item]:
        return chain(self._first, self._last)


class PhaseTracker:
    """The phases and runs of a log, from its events in time order."""

    def __init__(self, serving_seconds: Callable[[], float]) -> None:
        """`serving_seconds` returns how long the server has served until now."""
        self._serving_seconds = serving_seconds
        self.phases: FirstAndLast[Document] = FirstAndLast()
        self.runs: FirstAndLast[Run] = FirstAndLast()
        self.run: Run | None = None
        self.last_load = -inf  # when a request was last seen running or waiting
        self.served_until: float | None = None  # the server served until then before a pause of the log
        self._waited = False  # requests were waiting then
        self.hung = ""  # the stage that hangs
        self._starts = 0
        self._begin = 0.0  # of the log
        self._kind = ""  # of the present phase: start_up, load, idle, crash, stop, silence
        self._since = 0.0
        self._detail = ""
        self._served_before = 0.0  # serving seconds before the present phase
        self._bursts = 0
        self._own_lines = 0
        self._node_ranks: set[object] = set()
        self.out_of_memory = ""

    @property
    def serves(self) -> bool:
        """Whether the present phase is load."""
        return self._kind == "load"

    def begin(self, now: float) -> None:
        """Begin the log."""
        self._begin = now
        if self.run is None:
            self.run = Run(0, None, now)

    def is_another_node(self, args: Mapping[str, object], now: float) -> bool:
        """Whether these arguments are of the present start, printed by another of its nodes."""
        run, nodes, rank = self.run, args.get("nnodes"), args.get("node_rank")
        if run is None or run.start is None or not isinstance(nodes, int) or nodes < 2:
            return False
        if self._kind != "start_up" or now - run.start > _SAME_START_SECONDS or rank in self._node_ranks:
            return False
        self._node_ranks.add(rank)
        return args.get("model_path") == run.args.printed.get("model_path")

    def start(self, now: float, args: Mapping[str, object]) -> Run:
        """Begin a start and return its run. The run before must be closed with `close`."""
        self._end_phase(now)
        self._starts += 1
        self.run = Run(self._starts, now, now, StartArgs(args))
        self._enter("start_up", now)
        self.last_load = -inf
        self._own_lines = 0
        self._node_ranks = {args.get("node_rank")}
        self.out_of_memory = ""
        return self.run

    def close(self, last: float, *, restarted: bool) -> Run | None:
        """End the run, whose last line was printed at `last`; return it if the log has any of it."""
        run = self.run
        if run is None or (run.start is None and not self._kind):
            return None
        self._end_load(last)
        run.end, run.ending = last, self._kind if self._kind in {"crash", "stop", "silence"} else "log_ends"
        if run.ending == "log_ends" and restarted:
            self._end_phase(last)
            self._enter(
                "silence",
                last,
                "the log of this start ends without a message: the server was killed, or the end of its log is missing",
            )
            run.ending = "silence"
        self.runs.append(run)
        return run

    def ready(self, now: float) -> None:
        """Note that the server is ready."""
        if self.run is not None and self.run.ready is None and self._kind in {"start_up", ""}:
            self.run.ready = now
            self._end_phase(now)
            self._enter("idle", now, "ready, and no request comes")

    def served(self, now: float, *, busy: bool, waits: bool = False) -> None:
        """Take a batch line; `busy`: more than one request runs, or some wait."""
        if self._kind == "start_up":
            self._own_lines += 1
            if not busy and self._own_lines < OWN_WARM_UP_LINES:
                return
        if self._kind == "load" and now - self._end_of_load(now) > IDLE_SECONDS:
            self._end_load(now)
        if self._kind == "load":
            self._go_on(now, waits=waits)
            return
        if self._kind == "idle" and now - self._since < IDLE_SECONDS:
            self._detail = ""
        self._end_phase(now)
        self._enter("load", now)
        self.last_load, self._waited, self.served_until = now, waits, None

    def goes_on(self, now: float, *, waits: bool) -> bool:
        """Take a batch line where the load goes on; False where this line may begin one."""
        if self._kind != "load" or now - self.last_load > IDLE_SECONDS:
            return False
        self._go_on(now, waits=waits)
        return True

    def _go_on(self, now: float, *, waits: bool) -> None:
        if self.served_until is not None:
            self._bursts += now > self._end_of_load(now)
            self.served_until = None
        self.last_load, self._waited = now, waits

    def died(self, now: float, what: str, crash: str = "") -> None:
        """Take the end of a process of the server, or a start that failed; `crash` says which process ended and how."""
        if self._kind == "crash":
            # The line that names the process often follows one that only says that a process died.
            if crash and self._detail.startswith(_DIED["process_died"]):
                self._detail = self._detail.replace(_DIED["process_died"], crash, 1)
            return
        self._end_load(now)
        self._end_phase(now)
        words = crash or _DIED.get(what, what)
        after = f", after running out of memory in {self.out_of_memory}" if self.out_of_memory else ""
        self._enter("crash", now, words + after)

    def stopping(self, now: float) -> None:
        """Note that the server was asked to end."""
        if self._kind not in {"crash", "stop"}:
            self._end_load(now)
            self._end_phase(now)
            self._enter("stop", now, "the server was asked to end")

    def finish(self, now: float) -> None:
        """End the log."""
        self._end_load(now)
        if self._kind == "load" and self._end_of_load(now) >= now:
            self._detail = "the log ends under load: it is cut here, goes on, or the server was killed"
        self._end_phase(now)

    def _enter(self, kind: str, now: float, detail: str = "") -> None:
        self._kind, self._since, self._detail = kind, now, detail
        self._served_before, self._bursts, self.hung = self._serving_seconds(), 1, ""

    def _end_of_load(self, now: float) -> float:
        """Return until when the present load was served."""
        until = self.last_load if self.served_until is None else max(self.served_until, self.last_load)
        return min(until, now) if self.served_until is not None or now - until > _TAIL_SECONDS else now

    def _end_load(self, now: float) -> None:
        """End the load where it was last served; what follows is idle, or silence if requests were waiting."""
        end = self._end_of_load(now)
        if self._kind != "load" or now - end <= _TAIL_SECONDS:
            return
        self._end_phase(end)
        if self.hung:
            self._enter("silence", end, f"the {self.hung} hung")
        elif self._waited:
            self._enter("silence", end, "requests were waiting, and nothing was printed")
        else:
            self._enter("idle", end)

    def _end_phase(self, now: float) -> None:
        kind, detail, length = self._kind, self._detail, max(now - self._since, 0.0)
        if kind and self.run is not None and (length or kind != "idle"):
            served = min(self._serving_seconds() - self._served_before, length) if kind == "load" else 0.0
            if kind == "load" and self._bursts > 1 and served < _STEADY_SHARE * length:
                bursts = f"in {self._bursts} bursts, serving {served:.0f} s of them together"
                detail = f"{bursts}; {detail}" if detail else bursts
            phase = {"phase": kind, **stretch(self._since, self._since + length, self._begin), "run": self.run.number}
            self.phases.append({**phase, "serving_seconds": number(round(served, 3)), "detail": detail or None})
        self._kind = ""
