"""The base class of conditions, and the samples that a Prometheus would hold. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable
from typing import ClassVar, Literal, Protocol, TypeAlias

from sglang_tuning_exporter.diagnosis.evidence import Evidence, Past
from sglang_tuning_exporter.diagnosis.promql import LONG_WINDOWS, RECENT_WINDOWS, SHORT_WINDOWS
from sglang_tuning_exporter.state.facts import ServerFacts
from sglang_tuning_exporter.state.profiles import Profile
from sglang_tuning_exporter.state.signals import Signal

# `limit`: can be the verdict. `chance`: nothing is wrong, something could be better; no finding without advice. `remark`: neither.
Kind: TypeAlias = Literal["limit", "chance", "remark"]
# What no advice may take while a condition holds: GPU memory, or capacity for more requests at once.
Resource: TypeAlias = Literal["memory", "requests"]
# Windows of rules and report: of a share or a rate, half of it, and the short one that shows that it continues.
WINDOW, HALF, RECENTLY = LONG_WINDOWS[0], SHORT_WINDOWS[0], RECENT_WINDOWS[0]
# With less serving time in ten minutes no share is judged. In PromQL the name stands in its place, because a stack
# whose time runs faster has fewer seconds.
SERVING_SECONDS = 60.0


class Samples(Protocol):
    """The samples of a server at one evaluation of the rules. Windows are written as in PromQL."""

    @property
    def limits(self) -> Profile:
        """The thresholds in force."""

    @property
    def facts(self) -> ServerFacts:
        """The facts of the server."""

    @property
    def hangs(self) -> bool:
        """Whether a stage hangs."""

    @property
    def reserves(self) -> Collection[float]:
        """GPU memory left after the start of each DP rank, in GB, as last known."""

    def busy(self, signal: Signal) -> float:
        """Seconds of the window in which the busiest scheduler served."""

    def share(self, signal: Signal, states: tuple[str, ...], window: str) -> float | None:
        """Share of the serving time in these states; None without serving time."""

    def waiting(self, window: str) -> Collection[float]:
        """Share of the time in which requests waited, for each DP rank."""

    def increase(self, event: str, window: str, ago: str = "0s") -> float:
        """Number of times an event happened."""


class Condition(ABC):
    """One kind of condition: its measure, its PromQL, the same over samples, and its words."""

    __slots__ = ()

    kind: ClassVar[Kind] = "limit"
    is_event: ClassVar[bool] = False  # a fault in itself: a finding even without advice
    # What must have happened in the window for its rule to fire: one of its `counted` events, or a second in a state of its
    # `measured_by`. A report evaluates it only then.
    fires_on: ClassVar[Literal["anything", "events", "states"]] = "anything"
    # The best advice may be to change nothing (`sizing.admission.tolerated`): then it is no finding.
    can_be_tolerated: ClassVar[bool] = False
    # A flag that cures it leaves no other cause to find; late answers can have several.
    is_whole_cause: ClassVar[bool] = True
    # The exporter has no advice of its own, only the row's words.
    is_advice_fixed: ClassVar[bool] = False
    has_figure: ClassVar[bool] = True  # compared with a threshold
    figure: ClassVar[str] = "{{ $value }}"  # the rule's value in an annotation
    title_unit: ClassVar[str] = ""  # words after the figure in a title; empty if a title has no figure

    @property
    def is_end(self) -> bool:
        """Whether the server has ended, so that its log may show how."""
        return False

    @property
    def protects(self) -> Resource | None:
        """What no advice may take while it holds."""
        return None

    @property
    def is_measured(self) -> bool:
        """Whether the exporter can measure it; otherwise only Prometheus can."""
        return True

    @property
    def is_in_logs(self) -> bool:
        """Whether a log alone can show that its rule holds."""
        return self.is_measured

    @property
    def annotation_value(self) -> str:
        """The value of an alert's description, as a Prometheus template."""
        return self.figure

    @property
    @abstractmethod
    def needs(self) -> str:
        """What is needed to measure it, in words."""

    @abstractmethod
    def measure(self, past: Past) -> Evidence | None:
        """Return the figure that decides, with its threshold; None if not known, or too little was seen."""

    @property
    def measured_by(self) -> tuple[Hashable, ...]:
        """What it is measured by, as in `Past.last_seen`: states (by signal and state), or the events that are counted."""
        return tuple(event for event, _ in self.counted)

    def last_seen(self, past: Past) -> float | None:
        """Return when its evidence was last seen, on the past's clock; None if not known."""
        seen = (past.last_seen(trace) for trace in self.measured_by)
        return max((at for at in seen if at is not None), default=None)

    def supporting(self, past: Past) -> list[Evidence]:
        """Return further figures that support it."""
        return []

    def promql(self) -> list[str]:
        """Return its PromQL, in lines; empty if it has no alert."""
        return []

    def promql_as_cause(self, other: Condition) -> list[str]:
        """Return the PromQL for explaining the evidence of `other`."""
        return self.promql()

    @property
    def counted(self) -> tuple[tuple[str, str], ...]:
        """The events that `fires` counts, and their windows."""
        return ()

    def fires(self, samples: Samples) -> bool:
        """Evaluate its PromQL over samples."""
        return self.has_happened(samples)

    def has_happened(self, samples: Samples) -> bool:
        """Return whether one of the counted events happened in its window."""
        return any(samples.increase(event, window) > 0 for event, window in self.counted)

    def holds_as_cause(self, other: Condition, samples: Samples) -> bool:
        """Evaluate the PromQL of `promql_as_cause` over samples."""
        return self.fires(samples)

    @property
    def description(self) -> str:
        """What must be seen, for the table of diagnoses; empty where the row's summary says it."""
        return ""

    def bound(self, profile: Profile) -> tuple[str, str]:
        """Return from which value its rule holds, and over which time, for the runbook."""
        return "more than the limit", ""
