"""A diagnosis as one object: its figure, its words, the change it asks for, and its place beside the others. Pure.

The figure of a diagnosis is a function of a `View`, None where the log does not show it. `When` has the limit beside
which the figure is bad. A diagnosis is measured only after enough load, unless `any_load` is set. Families of diagnoses
are the modules beside this one; the package lists all diagnoses in their order. Guide: SGLang's hyperparameter tuning
guide.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Literal, TypeAlias

from sglang_tuning_exporter.core.diagnoses.native import Native
from sglang_tuning_exporter.core.events import Event
from sglang_tuning_exporter.core.findings import Change, Confidence, Figure, Severity, Unit, capitalised
from sglang_tuning_exporter.core.server import Server
from sglang_tuning_exporter.core.view import View

Measure: TypeAlias = Callable[[View], "float | None"]
Side: TypeAlias = Literal["above", "below"]
Beside: TypeAlias = "frozenset[Diagnosis]"  # all diagnoses that hold at the same time
Offer: TypeAlias = "Change | tuple[Change, ...]"  # changes in a tuple are made together
Advise: TypeAlias = Callable[[View, Beside], Iterable[Offer]]  # the best offer first

ONLINE = ("online", "long_context", "multi_turn")
CONSERVATIVENESS, LIMIT, FRACTION, CHUNK = (
    "schedule_conservativeness",
    "max_running_requests",
    "mem_fraction_static",
    "chunked_prefill_size",
)
OFTEN = "frequent_share"
QUEUES = ("queue/in_range", "queue/above_range", "queue/below_range")
NOT_IN_GUIDE = "not in SGLang's guide: "


class Group(Enum):
    """Diagnoses that others treat alike.

    A diagnosis joins groups; a diagnosis that can follow from any member names the group as its cause.
    """

    OUT_OF_MEMORY = "memory ran out, or will"
    FAILURE = "a server can end by it"
    RETRACTION = "running requests are retracted"
    WAIT = "a reason why requests wait"
    # Groups that a flag can cause, as `suspects` proves.
    QUEUES = "requests queue"
    FILLS = "the KV cache fills up or stays free"
    PREFILLS = "prompts take the time"
    ADMITS = "admission holds requests back"
    REJECTS = "requests are rejected"


@dataclass(frozen=True, slots=True, kw_only=True)
class When:
    """A condition: a figure on one side of a limit.

    kind: the figure is a `share` of the serving time, a `rate` per minute of it, an `event` in the stretch, or another
    `fact`. counts: the sums that the figure is made of. limit: a number, the name of a threshold, or a function of the
    view. name: the name of the figure, in words. needs: the source without which the figure is not measured, for
    readers. in_log: False where no line of the log has its time, only pages or the sources themselves.
    """

    kind: Literal["share", "rate", "event", "fact"]
    measure: Measure = lambda _: None  # no exporter can measure it
    counts: tuple[str, ...] = ()
    side: Side = "above"
    limit: float | str | Callable[[View], float] = 0.0
    name: str = ""
    unit: Unit = "count"
    needs: str = "load"
    in_log: bool = True

    def is_possible(self, view: View) -> bool:
        """Whether the figure can be on the bad side of its limit.

        A share, a rate or an event is made of sums, and is good where all of them are 0.
        """
        return self.kind == "fact" or not view.counted.isdisjoint(self.counts)

    def last_at(self, last: Mapping[str, float]) -> float | None:
        """Return when the sums of the figure last moved; None where none has. `last`: the time of each sum."""
        return max((last[name] for name in self.counts if name in last), default=None)

    def bound(self, view: View) -> float | None:
        """Return the limit in force; None where the profile has none."""
        if callable(self.limit):
            return self.limit(view)
        limit: float | None = getattr(view.profile, self.limit) if isinstance(self.limit, str) else self.limit
        return limit


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Diagnosis:
    """Everything about one diagnosis. Its texts are templates over the thresholds and figures in force."""

    id: str
    when: When
    # Words
    summary: str
    guide: str
    seen: str = ""  # the finding in a sentence; `{value}` is the figure with its unit. Default: the figure and its name
    trouble: str = ""  # the trouble of a source; its words in the view are the value
    sign: str = ""  # the condition in a sentence, where no figure is compared or the figure would say less
    # The summary after the trouble is over, with `{until}` and `{times}`; only an alert has it without a time.
    past: str = ""
    short: str = ""  # a title in a few words, where the id is none
    says: Callable[[View], str] = lambda _: ""  # words for `{value}`, where the view has more than the figure
    remark: Callable[[View], str] = lambda _: ""  # an objection, or an assumption that was made
    headline: Callable[[View], str] = lambda _: ""  # in place of the summary
    sentence: Callable[[View, Event | None], str] = lambda _view, _line: ""  # in place of `seen`
    supporting: Callable[[View], list[Figure]] = lambda _: []  # figures beside the one that decides
    # What to change
    remedy: Change  # without an argument advice to people; its words are used where no value can be computed
    advise: Advise | None = None  # the changes for a view; default: the remedy
    lends: tuple[tuple[str, str], ...] = ()  # changes (argument, direction) that get the reasons of the remedy
    borrows: Literal["", "instead", "as well"] = ""  # the changes of its causes, in place of its own or before them
    of_flags: bool = False  # its changes are those of the flags that figures show to be a cause
    lends_beside: bool = False  # a diagnosis that borrows its changes adds its own
    needs_advice: bool = False  # it is no finding where no change is left
    protects: Literal["", "memory", "requests"] = ""  # taken by no change of another finding while this one holds
    replica: Literal["no", "helps", "after a flag", "unknown"] = "no"  # whether another server would take load off
    # How urgent it is
    severity: Severity = "info"
    severity_over: Severity | None = None  # of its finding once the server answers again; default: the same
    chance: bool = False  # an opportunity
    limits: Callable[[View], bool] | None = None  # whether it can be the verdict; default: unless it is a chance
    confidence: Callable[[View], Confidence | None] = lambda _: None  # in place of that of the serving time
    # When it is measured
    profiles: tuple[str, ...] = ()
    any_load: bool = False  # it is about a start or an event, and needs no load
    enough: Callable[[View], bool] | None = None  # whether it can be measured; default: after enough load
    at_once: bool = False  # its headline opens the answer to too little load
    matters: Callable[[View, tuple[Diagnosis, ...]], bool] = lambda _view, _others: True  # beside the others that hold
    # Its place beside the others
    groups: frozenset[Group] = frozenset()
    causes: tuple[Group | Diagnosis, ...] = ()  # these can cause it
    unless: tuple[Group | Diagnosis, ...] = ()  # these explain the same evidence better
    wait: str = ""  # the state of admission that it explains
    # An end of the server
    death: Literal["", "down", "crash", "repeated"] = ""
    worked: str = ""  # the last sign of work before this end, by its name in `View.last`
    ends_as: str = ""  # the class of an end by this failure
    feared: Callable[[View], bool] = lambda _: False  # whether the failure is only predicted
    deniable: bool = False  # it does not hold where the line of an end denies that memory ran out
    # Its time
    span: Callable[[Server, float, float], tuple[float, float] | None] = lambda _server, _begin, _end: None
    began: Callable[[Server, float], float] | None = None  # when its event happened; default: the last time of its sums
    since: Callable[[View], float | None] = lambda _: None  # when it began, where a page shows it
    goes_on: Callable[[View], bool] = lambda _: False  # whether it holds on without a new sign
    denied: Callable[[View, Beside], bool] = lambda _view, _beside: False  # whether a complete run of a log refutes it
    denied_in_part: Callable[[View], bool] = lambda _: False  # whether a part of a run refutes it
    # Its alert
    title: str = ""  # of a notification, in a few words; without a title there is no alert
    alert: str = ""  # the name of the alert; default: from the id
    after: float = 300.0  # seconds for which it holds before the alert begins
    until: float = 300.0  # seconds for which it does not hold before the alert ends
    notified_beside_causes: bool = False
    held_back_by: tuple[Group | Diagnosis, ...] = ()  # Alertmanager does not notify of it while one of these fires
    silences: Literal["", "target", "pool and diagnosis"] = ""  # label in which it holds back all others that agree
    scope: Literal["server", "job", "pool"] = "server"  # the subject of its alert
    notified: str = ""  # the words of a notification, where `seen` needs a view
    # How boards show it
    shade: int = 0  # of the colours of its level
    fleet: int = 0  # thousands in the order of servers on the Fleet board: the highest first
    native: Native | None = None  # its rule for servers without the exporter

    def __post_init__(self) -> None:
        """Fill in the fields that follow from others."""
        words = (_CAPITALS.get(word, word.capitalize()) for word in self.id.split("_"))
        is_share = self.when.unit == "count" and self.when.name.startswith(("share of", "serving time"))
        flag = f"--{self.remedy.arg.replace('_', '-')}" if self.remedy.arg else ""
        derived: dict[str, object] = {
            "sign": self.sign or (self.seen if self.seen and "{value}" not in self.seen else ""),
            "seen": self.seen or f"{{value}} of the {self.when.name}",
            "alert": self.alert or (f"SGLang{''.join(words)}" if self.title else ""),
            "short": self.short or self.id.replace("_", " ").capitalize().replace("Cuda", "CUDA"),
            "remedy": replace(self.remedy, flag=flag),
            "when": replace(self.when, unit="share") if is_share else self.when,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"Diagnosis({self.id})"

    def is_limit(self, view: View) -> bool:
        """Whether the diagnosis can be the verdict where it holds."""
        return not self.chance if self.limits is None else self.limits(view)

    def is_end(self, view: View) -> bool:
        """Whether the diagnosis is of a failure by which a server ends, and not only of one that is feared."""
        return (self.death == "crash" or Group.FAILURE in self.groups) and not self.feared(view)

    def severity_in(self, view: View) -> Severity:
        """Return how urgent the finding is in a view."""
        return self.severity if view.is_away else self.severity_over or self.severity

    def over(self, until: str = "", times: str = "") -> str:
        """Return the past words: until when and how often, where these are given."""
        words = self.past if times else self.past.replace(" {times}", "").replace(", the last time at {until}", "")
        words = words if until else _UNTIL.sub("", words)
        return capitalised(words.replace("{until}", until).replace("{times}", times))


_UNTIL = re.compile(r"^Until \{until\} |,? until \{until\}")
_CAPITALS = {"kv": "KV", "dp": "DP"}

# Kinds of diagnoses
failure = partial(
    Diagnosis,
    severity="critical",
    after=0.0,
    until=600.0,
    any_load=True,
)
limit = partial(Diagnosis, severity="warning")
hint = partial(Diagnosis, chance=True)
chance = partial(hint, needs_advice=True)

# Kinds of remedies and conditions
look = partial(Change, direction="look")
fact = partial(When, kind="fact")


def share(signal: str, *states: str, name: str, needs: str = "load", in_log: bool = True) -> When:
    """Return the condition that a signal is in one of these states for most of the serving time."""
    return When(
        kind="share",
        measure=lambda view: view.share(signal, *states),
        counts=tuple(f"{signal}/{state}" for state in states),
        limit=OFTEN,
        name=name,
        unit="share",
        needs=needs,
        in_log=in_log,
    )


def waits(reason: str, name: str, needs: str = "load", *, in_log: bool = True) -> When:
    """Return the condition that requests wait for this reason.

    Its limit is lower where only several reasons together make up most of the time.
    """
    when = share("admission", reason, name=name, needs=needs, in_log=in_log)
    return replace(when, limit=lambda view: view.reason_limit)


def event(*counts: str, name: str) -> When:
    """Return the condition that an event happened, which one line of the log shows."""
    return When(
        kind="event",
        measure=lambda view: sum(view.totals[count] for count in counts),
        counts=counts,
        name=name,
        needs="a log",
    )


def retracts(where: Callable[[View], bool] = lambda _: True, needs: str = "load") -> When:
    """Return the condition of many retractions; it is measured only `where` they belong to this diagnosis."""
    return fact(
        measure=lambda view: view.retractions_a_minute if where(view) else None,
        limit=lambda view: view.retractions_tolerated,
        counts=("retraction_events",),
        name="retractions per minute of serving time",
        unit="per_minute",
        needs=needs,
    )


def trouble(name: str) -> Measure:
    """Return a measure that is 1 while a source has this trouble, else 0."""
    return lambda view: float(name in view.troubles)


# Measures and figures that several families use


def waits_often(view: View) -> bool:
    """Whether requests wait for most of the serving time."""
    return view.waited_share > view.profile.frequent_share


def mostly(view: View, signal: str, state: str) -> bool:
    """Whether a signal is in a state for most of the serving time."""
    return (view.share(signal, state) or 0.0) > view.profile.frequent_share


def figures(*shown: tuple[str, float | None, Unit, float | None]) -> list[Figure]:
    """Return figures from (name, value, unit, limit), without those whose value is not known."""
    return [Figure(name, value, unit, bound) for name, value, unit, bound in shown if value is not None]


def usage_figures(view: View) -> list[Figure]:
    """Return the mean token usage beside its target."""
    return figures(("mean token usage", view.mean("usage"), "ratio", view.profile.token_usage_target))


def waiting_figures(view: View) -> list[Figure]:
    """Return the number of waiting requests, their mean wait, and the token usage."""
    return [
        *figures(
            ("requests waiting, mean", view.sum("queued"), "count", None),
            ("mean wait in the queue", view.wait, "seconds", view.profile.queue_wait_seconds),
        ),
        *usage_figures(view),
    ]
