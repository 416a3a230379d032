"""The answer: what limits a server, its findings with evidence and changes, and the figures beside them. Pure.

Report, page, API and `/metrics` all read this data and its words; none of them measures or judges anew.
"""

from __future__ import annotations

import datetime as dt
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from sglang_tuning_exporter.core.events import Event

Severity: TypeAlias = Literal["critical", "warning", "info"]
Confidence: TypeAlias = Literal["high", "medium", "low"]
Unit: TypeAlias = Literal["share", "ratio", "per_minute", "count", "seconds", "GB", "tokens", "words"]
Value: TypeAlias = "float | str | bool | None"
Series: TypeAlias = "tuple[tuple[float, float | None], ...]"  # times with a figure; None while nothing was served
URGENCY: Mapping[Severity, int] = {"info": 0, "warning": 1, "critical": 2}
TONES = {"critical": "bad", "warning": "warn", "info": "info", "none": "calm"}
FIRST_DATED_SECOND = 30 * 86400.0  # below it a time is of a log without dates: seconds since its first midnight
# The states in words, for people.
STATE_WORDS: dict[str, str] = {
    "above_range": "the queue longer than its limit",
    "in_range": "the queue in its range",
    "below_range": "the queue shorter than its range",
    "empty": "an empty queue",
    "no_queue": "no request waiting",
    "held_back": "requests waiting and free KV cache",
    "running_limit": "--max-running-requests reached and requests waiting",
    "pool_full": "a full KV cache and requests waiting",
    "hybrid_pool_full": "a full sliding-window or mamba cache and requests waiting",
    "prefill_bound": "full prefill batches and requests waiting",
    "grammar_queue": "requests waiting for a grammar",
    "pd_queue": "requests waiting for the other server of a prefill/decode pair",
    "standing_still": "requests waiting, the next ones fit, and none started",
    "beyond_captured": "decode batches larger than the largest captured CUDA graph",
    "eager": "decode batches without a CUDA graph",
    "disabled": "CUDA graphs disabled",
    "replayed": "decode batches that replay a CUDA graph",
    "unsupported": "no CUDA graphs by device or role",
    "at_target": "token usage at its target",
    "below_target": "token usage below its target",
}
_SIDES = {"above": "limit", "below": "at least", "": "threshold"}


def amount(value: float, unit: Unit | str) -> str:
    """Return a figure with its unit."""
    if unit == "share":
        return f"{100 * value:.0f} %"
    if unit == "GB":
        return f"{value:.3g} GB"
    if unit == "seconds":
        return duration(value) if value >= 180 else f"{value:.3g} s"
    if unit == "ratio":
        return f"{value:.2f}"
    number = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}".removesuffix(".0")
    return number + {"per_minute": "/min", "tokens": " tokens"}.get(unit, "")


def duration(seconds: float) -> str:
    """Return seconds in words, such as `15 min`."""
    if seconds < 180:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def capitalised(words: str) -> str:
    """Return the words with a capital first letter, unless they begin with a flag or a path."""
    return words[:1].upper() + words[1:]


def ended(words: str) -> str:
    """Return the words with a full stop, unless they end with a mark."""
    return words if not words or words[-1] in ".!?…:" else f"{words}."


def typed_value(value: Value) -> str:
    """Return a value as it is typed after its flag."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float | int):
        return f"{value:.0f}" if float(value).is_integer() else f"{value:.6g}"
    return "" if value is None else value


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
        """Whether the figure is on the bad side of its limit."""
        if self.limit is None or not self.side:
            return False
        return self.value > self.limit if self.side == "above" else self.value < self.limit

    @property
    def value_words(self) -> str:
        """The value with its unit; empty where the name says all."""
        return "" if self.unit == "words" else amount(self.value, self.unit)

    @property
    def limit_words(self) -> str:
        """The limit, such as `at least 0.90`; empty where there is none."""
        if self.limit is None or self.unit == "words":
            return ""
        is_none = self.limit == 0 and self.unit == "count" and self.side != "below"
        return f"{_SIDES[self.side]} {'none' if is_none else amount(self.limit, self.unit)}"

    @property
    def line(self) -> str:
        """The figure in one line: `Token usage: 0.95 (limit 0.90)`."""
        value, limit = self.value_words, self.limit_words
        return f"{capitalised(self.name)}{f': {value}' if value else ''}{f' ({limit})' if limit else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change to a flag. In a diagnosis it is a template, not yet filled in for a server.

    Values are as typed: numbers, words, True and False for switches; None where a value is not known or not set. For
    advice to people `arg` and `flag` are empty, and `words` hold the advice. Where no value can be computed, `to` is
    None and `words` say what to try. `removes`: the flag is removed from the command line.
    """

    arg: str = ""
    direction: str = ""  # raise, lower, set, add, drop, try
    words: str = ""
    why: str = ""
    not_if: str = ""  # when it will not help
    cost: str = ""
    flag: str = ""
    now: Value = None
    to: Value = None
    gain: str = ""
    removes: bool = False

    @property
    def target(self) -> Value:
        """The value to reach; that of a switch that is removed is False."""
        return False if self.removes and self.to is None else self.to

    @property
    def verb(self) -> str:
        """Remove or Try; empty for advice to people."""
        if not self.flag:
            return ""
        return "Remove" if self.removes or self.to is False else "Try"

    @property
    def typed(self) -> str:
        """The flag and its value as typed: `--x 2`, or a switch alone; empty for advice to people."""
        if not self.flag or self.removes or isinstance(self.to, bool) or self.to is None:
            return self.flag
        return f"{self.flag} {shlex.quote(typed_value(self.to))}"

    @property
    def after(self) -> str:
        """The words after what is typed."""
        if not self.flag:
            return ended(capitalised(self.words))
        return self.words if self.to is None else ""

    @property
    def present(self) -> str:
        """The present value, such as `now 1`; empty where it is not known or a switch."""
        is_switch = isinstance(self.now, bool) or isinstance(self.to, bool)
        return "" if self.now is None or is_switch or self.verb != "Try" else f"now {typed_value(self.now)}"

    @property
    def line(self) -> str:
        """The change in one line: `Try --x 2, now 1`."""
        return ", ".join(filter(None, (" ".join(filter(None, (self.verb, self.typed, self.after))), self.present)))

    @property
    def reasons(self) -> dict[str, str]:
        """The gain, the reason, the cost, and when the change will not help: label → sentence."""
        labelled = {
            "": capitalised(ended(self.gain)),
            "Why:": capitalised(ended(self.why)),
            "It costs:": capitalised(ended(self.cost)),
            "It will not help if": ended(self.not_if),
        }
        return {label: text for label, text in labelled.items() if text}


@dataclass(frozen=True, slots=True)
class Finding:
    """A diagnosis that holds. The first figure of `evidence` decided it."""

    diagnosis: str
    alert: str  # such as SGLangQueueTooLong; empty where the diagnosis has no alert
    severity: Severity
    is_limit: bool  # it can be the verdict; else it is an opportunity
    headline: str  # one sentence, in the present or past tense
    sentence: str  # the same with its figure
    guide: str
    confidence: Confidence
    evidence: tuple[Figure, ...]
    changes: tuple[Change, ...]
    because: tuple[str, ...] = ()  # diagnoses that cause it
    since: float | None = None  # unix seconds
    until: float | None = None
    seconds: float = 0.0  # of the judged time, in which it held
    notes: tuple[str, ...] = ()
    over: bool = False  # it held, and does not hold any more
    explained_by: Event | None = None  # the line of the log that explains an end

    @property
    def tone(self) -> str:
        """The class in the page's style sheet, and the colour on a terminal."""
        return TONES[self.severity]

    @property
    def is_main(self) -> bool:
        """Whether the finding limits the server or calls somebody; otherwise it is an opportunity."""
        return self.is_limit or self.severity != "info"

    @property
    def more(self) -> str:
        """The sentence; empty where the headline says the same."""
        is_new = self.sentence.rstrip(".") != self.headline.rstrip(".")
        return ended(capitalised(self.sentence)) if is_new else ""


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

    @property
    def line(self) -> str:
        """The name of the stretch with its words."""
        return f"{self.what}: {self.words}" if self.words else self.what


@dataclass(frozen=True, slots=True)
class Start:
    """One start of the server, with the figures from then until the next start."""

    time: float | None
    release: str | None
    arguments: Mapping[str, object]  # as printed, without secrets
    changed: Mapping[str, tuple[object, object]]  # arguments that differ from the previous start: before, now
    figures: Mapping[str, float]  # by name: running_requests, queued_requests, token_usage, share_cached, …
    end: str = ""  # how the server ended, in words; empty while it runs
    # GB of one rank: before_weights_gb, weights_gb, kv_pool_gb, graphs_gb, left_gb; and the device.
    memory: Mapping[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Judgement:
    """What limits a server over a stretch of time, and the figures that are shown beside the verdict.

    The verdict is the diagnosis of a finding, or one of the words of `judge`. For a whole log it is the worst diagnosis
    that held for its `after` (in a shorter log: for half of the serving time), with every finding of the log. `mostly`:
    the verdict of most of the serving time, with its share.
    """

    verdict: str
    sentence: str  # the verdict in one sentence
    severity: Severity | Literal["none"]
    findings: tuple[Finding, ...]
    checks: Mapping[str, Figure | None]  # by diagnosis; None where the log does not show it, or the load was too little
    notes: tuple[str, ...] = ()  # those about the input first
    # Shown beside the verdict: `answer` and the readers of the input add these fields
    profile: str = ""
    begin: float | None = None  # unix seconds as printed
    end: float | None = None
    serving_seconds: float = 0.0
    idle_seconds: float = 0.0
    mostly: tuple[str, float] | None = None
    alerts: tuple[Alert, ...] = ()
    course: tuple[Stretch, ...] = ()
    series: Mapping[str, Series] = field(
        default_factory=dict
    )  # means of ten seconds: running, queued, usage, retractions
    running_limit: float | None = None  # how many may run at once, of all schedulers together
    starts: tuple[Start, ...] = ()
    # retraction_events, retracted_requests, out_of_memory.prefill, rejected_requests, server_errors, …
    counts: Mapping[str, float] = field(default_factory=dict)
    marked: Mapping[str, float] = field(default_factory=dict)  # of these, the ones beside text of clients
    shares: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # signal, state: share of serving time
    last: Mapping[str, float | None] = field(default_factory=dict)  # figures of the last line
    # The command line with the changes, a piece for each flag; empty where the arguments are not known.
    command: tuple[str, ...] = ()
    command_changes: tuple[tuple[str, str, str], ...] = ()  # flag, value before, value after
    command_notes: tuple[str, ...] = ()
    # Pool tokens, limits and memory as the start printed them.
    facts: Mapping[str, float | str | None] = field(default_factory=dict)
    available_gb: tuple[float, ...] = ()  # available_gpu_mem of every start and scheduler as printed
    sources: tuple[str, ...] = ()  # the files read, in time order

    @property
    def own(self) -> Finding | None:
        """The finding that is the verdict."""
        return next((finding for finding in self.findings if finding.diagnosis == self.verdict), None)

    @property
    def is_dated(self) -> bool:
        """Whether the log prints dates."""
        return self.begin is not None and self.begin >= FIRST_DATED_SECOND

    def at(self, time: float, *, with_date: bool = False) -> str:
        """Return a time such as `03:12:05`, with the date if `with_date` or if the log covers several days.

        Without dates in the log it is the time since the log begins, such as `+0:01:30`.
        """
        if not self.is_dated:
            seconds = int(time - (self.begin or 0.0))
            return f"+{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        moments = (time, self.begin, self.end)
        when, first, last = (_utc(time if moment is None else moment) for moment in moments)
        return f"{when:%Y-%m-%d %H:%M:%S}" if with_date or first.date() != last.date() else f"{when:%H:%M:%S}"

    def period(self, begin: float | None, end: float | None) -> str:
        """Return `from 03:12:05 to 03:37:00`; empty where a time is not known."""
        if begin is None or self.begin is None:
            return ""
        if end is None:
            return f"since {self.at(begin)}"
        return f"from {self.at(begin)} to {self.at(end)}" if end > begin else f"at {self.at(begin)}"


def _utc(time: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(min(max(time, 0.0), 253402300799.0), dt.timezone.utc)
