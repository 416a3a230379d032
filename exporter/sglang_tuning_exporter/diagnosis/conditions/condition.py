"""What every kind of condition can do, and what it may ask of the samples that a Prometheus would hold. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, TypeAlias

from sglang_tuning_exporter.diagnosis.promql import LATELY, LONG, SHORT

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable

    from sglang_tuning_exporter.diagnosis.evidence import Evidence, Past
    from sglang_tuning_exporter.state.facts import ServerFacts
    from sglang_tuning_exporter.state.profiles import Profile
    from sglang_tuning_exporter.state.signals import Signal

# `limit`: it can be what limits the server, the verdict. `chance`: to be tried by itself, nothing is wrong. `remark`: neither.
Kind: TypeAlias = Literal["limit", "chance", "remark"]
# What no advice may take while a condition holds: GPU memory, or room for more requests at once.
Resource: TypeAlias = Literal["memory", "requests"]
# The windows of rules and report: that of a share or a rate, half of it, and the one that says that it still goes on.
WINDOW, HALF, RECENTLY = LONG[0], SHORT[0], LATELY[0]
# Less serving time than this in ten minutes is no load that could be "frequently" anything to an alert. In PromQL stands the
# name in its place: a stack whose time runs faster has fewer seconds.
SERVING_SECONDS = 60.0


class Samples(Protocol):
    """What a Prometheus would hold of a server at one evaluation of the rules. Windows are written as in PromQL."""

    @property
    def limits(self) -> Profile:
        """The thresholds in force."""

    @property
    def facts(self) -> ServerFacts:
        """What is known of the server."""

    @property
    def hangs(self) -> bool:
        """Whether a stage hangs."""

    @property
    def reserves(self) -> Collection[float]:
        """GPU memory left after the start of each DP rank, GB, as last known."""

    def busy(self, signal: Signal) -> float:
        """Seconds of the window in which the busiest scheduler served."""

    def share(self, signal: Signal, states: tuple[str, ...], window: str) -> float | None:
        """Part of the serving time in these states; None without any."""

    def waiting(self, window: str) -> Collection[float]:
        """Part of the time in which requests waited, of each DP rank."""

    def increase(self, event: str, window: str, ago: str = "0s") -> float:
        """How often an event happened."""


class Condition(ABC):
    """One kind of condition: it measures itself, writes its PromQL, evaluates it over samples, and has its own words."""

    __slots__ = ()

    kind: ClassVar[Kind] = "limit"
    # Bad by itself: a finding even where no advice is left. And the opposite: nothing without advice.
    is_event: ClassVar[bool] = False
    is_only_advice: ClassVar[bool] = False
    # What must have happened in the window for its rule to fire: one of its `counted` events, or a second in a state of its
    # `traces`. A report evaluates it only then.
    fires_on: ClassVar[Literal["anything", "events", "states"]] = "anything"
    # Its advice may be to leave everything as it is (`guide.sizing.tolerated`): then it is no finding.
    can_be_tolerated: ClassVar[bool] = False
    # A flag that cures it leaves nothing else to look for; late answers can have more causes than one.
    is_whole_cause: ClassVar[bool] = True
    # The exporter has no advice of its own for it; the row's words are all there is.
    is_advice_fixed: ClassVar[bool] = False
    has_figure: ClassVar[bool] = True  # against a threshold
    figure: ClassVar[str] = "{{ $value }}"  # the value of the rule, as an annotation writes it
    figure_of: ClassVar[str] = ""  # what a title says behind the figure; empty where a title has no figure

    @property
    def is_end(self) -> bool:
        """Whether the server has ended, so that its log may say of what."""
        return False

    @property
    def spares(self) -> Resource | None:
        """What no advice may take while it holds."""
        return None

    @property
    def is_measured(self) -> bool:
        """Whether the exporter can measure it; else Prometheus alone does."""
        return True

    @property
    def is_in_logs(self) -> bool:
        """Whether a log alone can say when its rule holds."""
        return self.is_measured

    @property
    def seen_as(self) -> str:
        """The value of an alert's description, as a Prometheus template."""
        return self.figure

    @property
    @abstractmethod
    def needs(self) -> str:
        """What is needed to measure it, in words."""

    @abstractmethod
    def measure(self, past: Past) -> Evidence | None:
        """Give the figure that decides it against its threshold; None where it is not known or too little was seen."""

    @property
    def traces(self) -> tuple[Hashable, ...]:
        """What it rests on, as `Past.last_seen` knows it: events by name, states by signal and state."""
        return ()

    def last_seen(self, past: Past) -> float | None:
        """Give when what it rests on was last seen, on the past's clock; None where that is not known."""
        seen = (past.last_seen(trace) for trace in self.traces)
        return max((at for at in seen if at is not None), default=None)

    def supporting(self, past: Past) -> list[Evidence]:
        """Give the other figures that a person asks for next."""
        return []

    def promql(self) -> list[str]:
        """Write it as PromQL, in lines; empty where no alert is written for it."""
        return []

    def excuse(self, other: Condition) -> list[str]:
        """Write that it explains what `other` is seen by."""
        return self.promql()

    @property
    def counted(self) -> tuple[tuple[str, str], ...]:
        """The events that `fires` counts, and how far back."""
        return ()

    def fires(self, samples: Samples) -> bool:
        """Evaluate its PromQL over samples."""
        return False

    def excuses(self, other: Condition, samples: Samples) -> bool:
        """Evaluate the PromQL of its excuse."""
        return self.fires(samples)

    @property
    @abstractmethod
    def described(self) -> str:
        """What must be seen, for the table of diagnoses."""

    def bound(self, profile: Profile) -> tuple[str, str]:
        """Say from which value on its rule holds, and over which time, for the runbook."""
        return "more than the limit", ""
