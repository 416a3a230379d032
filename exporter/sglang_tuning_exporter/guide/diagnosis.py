"""What a row of the table of diagnoses is made of: what must be seen, and what to turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from sglang_tuning_exporter.sglang.events import OutOfMemoryPhase
from sglang_tuning_exporter.signals import Signal

if TYPE_CHECKING:
    from sglang_tuning_exporter.guide.profiles import Profile

Severity: TypeAlias = Literal["critical", "warning", "info"]
# `limit`: it can be what limits the server, the verdict. `chance`: to be tried by itself, nothing is wrong. `remark`: neither.
Kind: TypeAlias = Literal["limit", "chance", "remark"]
# A latency is bad where this many times the budget of its objective is missed.
LATE_TIMES = 10.0


@dataclass(frozen=True, slots=True)
class Beside:
    """More than `above` of a signal's serving time was spent in one of these states: then something else is the case."""

    signal: Signal
    states: tuple[str, ...]
    above: float


@dataclass(frozen=True, slots=True)
class Share:
    """More than the profile's frequent share of the window's serving time was spent in one of these states."""

    signal: Signal
    states: tuple[str, ...]
    unless: tuple[Beside, ...] = ()


@dataclass(frozen=True, slots=True)
class RetractionRate:
    """Retractions came more often than the profile tolerates.

    `capped`: the admission ratio is at its cap already (conservativeness above 1.43), so that raising the flag changes nothing.
    """

    capped: bool = False


@dataclass(frozen=True, slots=True)
class Rejections:
    """Requests were turned away more often than the profile tolerates, or too large a part was given up for a reason.

    A reason is that requests waited for too long, or that more than `times` the budget of first tokens came late.
    """

    times: float = LATE_TIMES


@dataclass(frozen=True, slots=True)
class Reserve:
    """GPU memory left at start-up lies on this side of the profile's range."""

    side: Literal["above", "below"]


@dataclass(frozen=True, slots=True)
class GraphMemory:
    """Graph capture ran out of memory within the window, or almost nothing was left after it."""


@dataclass(frozen=True, slots=True)
class Failures:
    """The server ran out of memory in one of these phases within the window."""

    phases: tuple[OutOfMemoryPhase, ...]


@dataclass(frozen=True, slots=True)
class Stuck:
    """Something runs or waits and nothing moves, or the server's own watchdog said so within the window."""


@dataclass(frozen=True, slots=True)
class Starts:
    """The server started this often within half an hour."""

    at_least: int


@dataclass(frozen=True, slots=True)
class Spread:
    """One DP rank has requests waiting for more than the frequent share of the time, another hardly ever."""

    hardly: float = 0.1


@dataclass(frozen=True, slots=True)
class Slow:
    """More observations of a latency than `times` the budget lie above the profile's objective, and `state` says why."""

    latency: Literal["time_to_first_token", "inter_token"]
    because: Literal["queue", "prompts", "batch"]
    times: float = LATE_TIMES


@dataclass(frozen=True, slots=True)
class Suits:
    """A change of set-up that would suit what is known of this server: `guide.suitability` has the test of that name.

    `names_suspects`: the advice is the flags that were set away from their defaults (`guide.suspects`).
    """

    kind: ClassVar[Kind] = "chance"

    test: str
    names_suspects: bool = False


@dataclass(frozen=True, slots=True)
class Source:
    """Something is wrong with where the figures come from. The expression tells Prometheus; `trouble` is the exporter's word for it, if it can know."""

    kind: ClassVar[Kind] = "remark"

    expression: str
    trouble: str = ""
    words: str = ""  # what is seen, where the exporter cannot say more


@dataclass(frozen=True, slots=True)
class BurnRate:
    """An objective's error budget is used up `times` too fast over both windows, told by Prometheus alone.

    The value is the share of observations of the `long` window that missed the objective, 0-1. `settled` is twice the
    `short` one: what a server does in the first minutes after its start (kernels compiled, caches filled) is not judged,
    nor by an exporter that has just come and cannot know of a start.
    """

    kind: ClassVar[Kind] = "remark"

    latency: Literal["time_to_first_token", "inter_token"]
    times: float
    long: str
    short: str
    settled: str


Condition: TypeAlias = (
    Share
    | RetractionRate
    | Rejections
    | Reserve
    | GraphMemory
    | Failures
    | Stuck
    | Starts
    | Spread
    | Slow
    | Suits
    | Source
    | BurnRate
)
# Met by events that are bad by themselves: a finding even where no advice is left.
EVENTFUL = (Failures, GraphMemory, RetractionRate, Rejections, Stuck, Starts, Source)
# Less serving time than this in ten minutes is no load that could be "frequently" anything to an alert.
SERVING_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Turn:
    """What to turn. `arg` is the SGLang argument (empty: the advice is to people); `fallback` is said where no figure can be computed."""

    arg: str
    direction: str
    fallback: str
    why: str
    will_not_help_if: str
    cost: str = ""  # what the change takes away; empty where it takes nothing


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One row.

    `alert` is empty where none is deserved, and `no_alert` says why. `seen` is one sentence with the figures, as a
    template over the evidence. `hold` is the rule's `for`; `profiles` empty means all; `unless` are diagnoses that
    explain the same evidence better. `causes` are those whose consequence it can be: it comes after them, and is not
    notified while one of them is, unless it is `notified_beside` them. A row that `borrows` asks people for less where no cause
    has advice, and else gives that. One that `hides` explains everything else of its server up to that severity, but for its
    own causes: none of it is notified meanwhile. `about` a job, its alert has no instance. `kind` is that of its condition
    unless it is given. `summary_past` says the same of what has not been seen for minutes, as a template over `until` and
    `times`; empty where that is not told.
    """

    id: str
    alert: str
    severity: Severity
    condition: Condition
    summary: str
    seen: str
    guide: str
    turn: Turn
    hold: str = "5m"
    keep_firing: str = ""
    profiles: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    notified_beside: bool = False
    borrows: bool = False
    hides: Severity | None = None
    about: Literal["server", "job"] = "server"
    kind: Kind | None = None
    summary_past: str = ""
    no_alert: str = ""

    def sentence(self, value: str, profile: Profile) -> str:
        """Say what is seen, with its figure and the thresholds of the profile."""
        return self.seen.format(value=value, **profile.figures)

    @property
    def role(self) -> Kind:
        """What a finding of it is: a limit, a chance or a remark."""
        usual: Kind = getattr(self.condition, "kind", "limit")
        return self.kind or usual

    @property
    def is_chance(self) -> bool:
        """Whether it names a chance to do better, to be tried by itself, and nothing that is wrong."""
        return self.role == "chance"

    @property
    def needs_advice(self) -> bool:
        """Whether it is no finding where no advice is left (`guide.findings`)."""
        if isinstance(self.condition, Suits):
            return True
        return bool(self.turn.arg) and not isinstance(self.condition, (*EVENTFUL, BurnRate))

    @property
    def names_suspects(self) -> bool:
        """Whether its advice is the flags that were set away from their defaults."""
        return isinstance(self.condition, Suits) and self.condition.names_suspects

    @property
    def is_limit(self) -> bool:
        """Whether it can be what limits the server: the verdict."""
        return self.role == "limit"
