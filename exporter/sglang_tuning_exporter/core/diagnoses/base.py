"""A diagnosis as one object: what is measured, in which words, what to change, and its place beside the others. Pure.

The figure of a diagnosis is a function of a `View`: None where the log does not show it. Its `When` says beside which limit the figure is bad.
A diagnosis is measured only after enough load, unless `any_load` is set. Families of diagnoses are the modules beside this one; the order of
all of them is the list of the package. Guide: SGLang's hyperparameter tuning guide.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
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
    """Diagnoses that others treat alike. A diagnosis joins a group; whoever follows from any of a group names the group."""

    OUT_OF_MEMORY = "memory ran out, or will"
    FAILURE = "a server can end by it"
    RETRACTION = "running requests are retracted"
    WAIT = "a reason why requests wait"
    # By the trouble that a flag can cause, as `suspects` proves it.
    QUEUES = "requests queue"
    FILLS = "the KV cache fills up or stays free"
    PREFILLS = "prompts take the time"
    ADMITS = "admission holds requests back"
    REJECTS = "requests are rejected"


@dataclass(frozen=True, slots=True, kw_only=True)
class When:
    """A condition: a figure on a side of a limit, which is a number, a threshold's name, or a function of the view.

    kind: a `share` of the serving time, a `rate` per minute of it, an `event` in the stretch, or another `fact`. counts: the sums that the
    figure is made of. name: of the figure, in words. needs: for readers, the source without which it is not measured. in_log: False where no
    line of the log dates it, only pages or the sources themselves.
    """

    kind: Literal["share", "rate", "event", "fact"]
    measure: Measure = lambda _: None  # what no exporter sees
    counts: tuple[str, ...] = ()
    side: Side = "above"
    limit: float | str | Callable[[View], float] = 0.0
    name: str = ""
    unit: Unit = "count"
    needs: str = "load"
    in_log: bool = True

    def bound(self, view: View) -> float | None:
        """Return the limit in force; None where the profile has none."""
        if callable(self.limit):
            return self.limit(view)
        limit: float | None = getattr(view.profile, self.limit) if isinstance(self.limit, str) else self.limit
        return limit


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Diagnosis:
    """One diagnosis, whole. Its texts are templates over the thresholds and figures in force."""

    id: str
    when: When
    # Words
    summary: str
    guide: str
    seen: str = ""  # what was seen; `{value}` is the figure with its unit. Without it by the figure's name
    trouble: str = ""  # the trouble of a source, whose words in the view are its value
    sign: str = ""  # the same where there is no figure to compare, or where it would say less
    past: str = (
        ""  # the summary of a trouble that is over, with `{until}` and `{times}`; without a time only of an alert
    )
    short: str = ""  # its title in a few words, where the id is not
    says: Callable[[View], str] = lambda _: ""  # the words for `{value}`, where more than the figure is known
    remark: Callable[[View], str] = lambda _: ""  # what speaks against it, or was assumed
    headline: Callable[[View], str] = lambda _: ""  # in place of the summary
    sentence: Callable[[View, Event | None], str] = lambda _view, _line: ""  # in place of `seen`
    supporting: Callable[[View], list[Figure]] = lambda _: []  # figures beside the one that decides
    # What to change
    remedy: Change  # without an argument advice to people; its words stand where no value can be computed
    advise: Advise | None = None  # the changes by what was seen; without it the remedy
    lends: tuple[
        tuple[str, str], ...
    ] = ()  # argument and direction: others that change it so give the remedy's reasons
    borrows: Literal["", "instead", "as well"] = ""  # the changes of its causes, in place of its own or before them
    of_flags: bool = False  # its changes are the flags that figures show to be a cause
    lends_beside: bool = False  # whoever borrows its changes adds its own
    needs_advice: bool = False  # without a change that is left it is no finding
    protects: Literal["", "memory", "requests"] = ""  # what no other finding's change may take while this one holds
    replica: Literal["no", "helps", "after a flag", "unknown"] = "no"  # whether another server would relieve this one
    # How urgent it is
    severity: Severity = "info"
    chance: bool = False  # an opportunity
    limits: Callable[[View], bool] | None = None  # when it can be the verdict; without it, unless it is a chance
    confidence: Callable[[View], Confidence | None] = lambda _: None  # where it is not that of the serving time
    # When it is measured
    profiles: tuple[str, ...] = ()
    any_load: bool = False  # it is about a start or an event, and needs no load
    enough: Callable[[View], bool] | None = None  # what is enough, where load is not
    at_once: bool = False  # it heads the answer to too little load
    matters: Callable[[View, tuple[Diagnosis, ...]], bool] = lambda _view, _others: True  # beside the others that hold
    # Its place beside the others
    groups: frozenset[Group] = frozenset()
    causes: tuple[Group | Diagnosis, ...] = ()  # it can follow from these
    unless: tuple[Group | Diagnosis, ...] = ()  # these explain the same evidence better
    wait: str = ""  # the state of admission that it explains
    # An end of the server
    death: Literal["", "down", "crash", "repeated"] = ""
    worked: str = ""  # the last sign of work before this end, by its name in `View.last`
    ends_as: str = ""  # the class of an end that is this failure
    feared: Callable[[View], bool] = lambda _: False  # a failure that is only predicted
    deniable: bool = False  # an end whose line denies that memory ran out denies it
    # Its time
    span: Callable[[Server, float, float], tuple[float, float] | None] = lambda _server, _begin, _end: None
    began: Callable[[Server, float], float] | None = None  # when its event happened, where no sum's last time has it
    since: Callable[[View], float | None] = lambda _: None  # when it began, where a page has it
    goes_on: Callable[[View], bool] = lambda _: False  # it is not over, whatever was seen last
    denied: Callable[[View, Beside], bool] = lambda _view, _beside: False  # in a past log, by a whole run beside others
    denied_in_part: Callable[[View], bool] = lambda _: False  # the same for a part of a run
    # Its alert
    title: str = ""  # of a notification, a few words; without it there is no alert
    alert: str = ""  # its name; by the id where it is not given
    after: float = 300.0  # seconds of the alert clock, as `until`
    until: float = 300.0
    notified_beside_causes: bool = False
    held_back_by: tuple[Group | Diagnosis, ...] = ()  # Alertmanager does not notify of it while one of these fires
    silences: Literal["", "target", "pool and diagnosis"] = ""  # Alertmanager holds back all others that agree in it
    scope: Literal["server", "job", "pool"] = "server"  # what its alert is about
    notified: str = ""  # the words of a notification, where `seen` needs the view
    # How boards show it
    shade: int = 0  # of the colours of its level
    fleet: int = 0  # thousands by which its server goes first on the Fleet board
    native: Native | None = None  # its rule for servers without the exporter

    def __post_init__(self) -> None:
        """Fill in what follows from other fields."""
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
        """Whether it can be the verdict where it holds."""
        return not self.chance if self.limits is None else self.limits(view)

    def over(self, until: str = "", times: str = "") -> str:
        """Return what had happened, in words: until when and how often, where that is given."""
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
    """Return the condition of states in which a signal is for most of the serving time."""
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
    """Return the condition of a reason why requests wait: less is enough where only several together make most of the time."""
    when = share("admission", reason, name=name, needs=needs, in_log=in_log)
    return replace(when, limit=lambda view: view.reason_limit)


def event(*counts: str, name: str) -> When:
    """Return the condition of an event that one line of the log shows."""
    return When(
        kind="event",
        measure=lambda view: sum(view.totals[count] for count in counts),
        counts=counts,
        name=name,
        needs="a log",
    )


def retracts(where: Callable[[View], bool] = lambda _: True, needs: str = "load") -> When:
    """Return the condition of many retractions, `where` they are those of this diagnosis."""
    return fact(
        measure=lambda view: view.retractions_a_minute if where(view) else None,
        limit=lambda view: view.retractions_tolerated,
        counts=("retraction_events",),
        name="retractions per minute of serving time",
        unit="per_minute",
        needs=needs,
    )


def trouble(name: str) -> Measure:
    """Return a measure of whether a source is in trouble."""
    return lambda view: float(name in view.troubles)


# Measures that several families ask for


def waits_often(view: View) -> bool:
    """Whether requests wait for most of the serving time."""
    return view.waited_share > view.profile.frequent_share


def mostly(view: View, signal: str, state: str) -> bool:
    """Whether a signal is in a state for most of the serving time."""
    return (view.share(signal, state) or 0.0) > view.profile.frequent_share


def figures(*shown: tuple[str, float | None, Unit, float | None]) -> list[Figure]:
    """Return the figures that are known."""
    return [Figure(name, value, unit, bound) for name, value, unit, bound in shown if value is not None]


def usage_figures(view: View) -> list[Figure]:
    """Return the mean token usage beside its target."""
    return figures(("mean token usage", view.mean("usage"), "ratio", view.profile.token_usage_target))


def waiting_figures(view: View) -> list[Figure]:
    """Return how many requests wait and how long, and how full the KV cache is meanwhile."""
    return [
        *figures(
            ("requests waiting, mean", view.sum("queued"), "count", None),
            ("mean wait in the queue", view.wait, "seconds", view.profile.queue_wait_seconds),
        ),
        *usage_figures(view),
    ]
