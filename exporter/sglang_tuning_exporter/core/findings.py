"""What a judgement says: findings with their evidence and changes. Pure data; whoever shows it words nothing anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from sglang_tuning_exporter.core.endings import Explanation

Severity: TypeAlias = Literal["critical", "warning", "info"]
Confidence: TypeAlias = Literal["high", "medium", "low"]
Unit: TypeAlias = Literal["share", "ratio", "per_minute", "count", "seconds", "GB", "tokens", "words"]
Value: TypeAlias = "float | str | bool | None"
URGENCY: Mapping[Severity, int] = {"info": 0, "warning": 1, "critical": 2}


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure beside its limit: `side` says on which side of the limit it is bad."""

    name: str
    value: float
    unit: Unit
    limit: float | None = None
    side: Literal["above", "below", ""] = ""

    @property
    def holds(self) -> bool:
        """Whether it is on the bad side of its limit."""
        if self.limit is None or not self.side:
            return False
        return self.value > self.limit if self.side == "above" else self.value < self.limit


@dataclass(frozen=True, slots=True)
class Change:
    """One change to make. Values are as typed: numbers, words, True and False for switches; None is not known or not set.

    `arg` and `flag` are empty for advice to people, which stands in `words`; where no value can be computed `to` is None and `words`
    say what to try. `removes`: the flag is taken from the command line.
    """

    arg: str
    flag: str
    now: Value
    to: Value
    words: str
    direction: str = ""  # raise, lower, set, add, drop, try
    why: str = ""
    cost: str = ""
    gain: str = ""
    will_not_help_if: str = ""
    removes: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """A diagnosis that holds. The first figure of `evidence` decided it."""

    diagnosis: str
    alert: str  # SGLangQueueTooLong; empty where it has none
    severity: Severity
    is_limit: bool  # it can be the verdict; else it is an opportunity
    headline: str  # one sentence, in the present or past tense
    sentence: str  # what was seen, with its figure
    guide: str
    confidence: Confidence
    evidence: tuple[Figure, ...]
    changes: tuple[Change, ...]
    because: tuple[str, ...] = ()  # diagnoses that cause it
    since: float | None = None  # unix seconds
    until: float | None = None
    seconds: float = 0.0  # how long it held, of the judged time
    notes: tuple[str, ...] = ()
    over: bool = False  # it was seen, and is not any more
    explained_by: Explanation | None = None  # the line of the log that explains an end


@dataclass(frozen=True, slots=True)
class Judgement:
    """What limits a server over a stretch of time: a finding's diagnosis, or one of the words of `judge`."""

    verdict: str
    sentence: str  # the verdict in one sentence
    severity: Severity | Literal["none"]
    findings: tuple[Finding, ...]
    checks: Mapping[str, Figure | None]  # every row; None where the log does not show it, or too little was seen
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Alert:
    """A notification that would have been sent."""

    alert: str
    diagnosis: str
    severity: Severity
    at: float
    until: float | None  # None: still firing at the end of the log


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of the run: `starting`, `serving`, `idle`, `silent` (nothing was logged), `stopped`."""

    what: str
    begin: float
    end: float
    words: str = ""


@dataclass(frozen=True, slots=True)
class Point:
    """Means of ten seconds, for a chart; None where nothing served."""

    time: float
    running: float | None
    queued: float | None
    usage: float | None
    retractions: float


@dataclass(frozen=True, slots=True)
class Start:
    """One start of the server, and what it did until the next."""

    time: float | None
    release: str | None
    arguments: Mapping[str, object]  # as printed, without secrets
    changed: Mapping[str, tuple[object, object]]  # arguments that differ from the start before: before, now
    figures: Mapping[str, float]  # by name: running_requests, queued_requests, token_usage, share_cached, …
    end: str = ""  # how it ended, in words; empty while it runs
    # GB of one rank: before_weights_gb, weights_gb, kv_pool_gb, graphs_gb, left_gb; and the device.
    memory: Mapping[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Judged:
    """A whole log, judged as its time passed.

    `judgement` is the worst verdict that held for its `after` (in a shorter log: for half of the serving time), with every finding of the
    log. `mostly`: the verdict of most of the serving time, with its share.
    """

    profile: str
    begin: float | None  # unix seconds as printed
    end: float | None
    serving_seconds: float
    idle_seconds: float
    judgement: Judgement
    mostly: tuple[str, float] | None
    alerts: tuple[Alert, ...]
    course: tuple[Stretch, ...]
    points: tuple[Point, ...]
    starts: tuple[Start, ...]
    counts: Mapping[
        str, float
    ]  # retraction_events, retracted_requests, out_of_memory.prefill, rejected_requests, server_errors, …
    marked: Mapping[str, float]  # of these, how many stood beside text of clients
    shares: Mapping[str, Mapping[str, float]]  # signal, state: share of the serving time
    last: Mapping[str, float | None]  # figures of the last line
    command: str = ""  # the command line with the changes; empty where arguments are not known
    command_changes: tuple[str, ...] = ()
    command_notes: tuple[str, ...] = ()
    marked_note: str = ""
    facts: Mapping[str, float | str | None] = field(
        default_factory=dict
    )  # pool tokens, limits, memory: what the start printed
    available_gb: tuple[float, ...] = ()  # available_gpu_mem of every start and scheduler as printed
    sources: tuple[str, ...] = ()  # the files read, in time order; set by `report`
    notes: tuple[str, ...] = ()  # problems of the input; set by `report`
