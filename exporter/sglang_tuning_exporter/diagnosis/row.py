"""A row of the table of diagnoses: the condition, its words, and what to change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

from sglang_tuning_exporter.diagnosis.conditions.condition import Condition, Kind
from sglang_tuning_exporter.diagnosis.sizing.advised_value import AdvisedValue, SizingInput

Severity: TypeAlias = Literal["critical", "warning", "info"]
URGENCY: dict[Severity, int] = {"info": 0, "warning": 1, "critical": 2}
# `flag_first`: a replica helps where no flag is left to set.
ScaleOut: TypeAlias = Literal["replica", "flag_first", "neither"]


class Title(NamedTuple):
    """Words of a notification's title before its figure; `unit` stands after the figure, and is empty where there is none."""

    words: str
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change to make. `arg` is the SGLang argument (empty: advice to people); `fallback` is used where no value can be computed."""

    arg: str
    direction: str
    fallback: str
    why: str
    will_not_help_if: str
    cost: str = ""  # empty where the change costs nothing

    @property
    def flag(self) -> str:
        """The flag of the argument, empty where it has none."""
        return "--" + self.arg.replace("_", "-") if self.arg else ""

    def with_figures(self, figures: Mapping[str, str]) -> Remedy:
        """Return it with the thresholds in its texts; all but the argument and the direction are templates."""
        texts = {
            name: getattr(self, name).format(**figures) for name in ("fallback", "why", "will_not_help_if", "cost")
        }
        return replace(self, **texts)


# Advice to people: to find the reason out.
look = partial(Remedy, "", "look")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One row of the table.

    alert: empty where there is none; `no_alert` says why, except for a chance.
    seen: one sentence, a template over the evidence and the thresholds (`Profile.figures`).
    label: a few words for boards; derived from the id where empty.
    title: for notifications; the label where it is None.
    sizes: computes the values to set; without it only `remedy.fallback` is known.
    scale_out: whether another replica helps while this row is the verdict.
    hold, keep_firing: the alert rule's `for` and `keep_firing_for`.
    profiles: the profiles in which the row is used; empty for all.
    unless: rows that explain the same evidence better.
    causes: rows that this one can be a consequence of. It is listed after them, and not notified while one of them is,
        except where it is `notified_as_well`.
    uses_advice_of_causes: takes the advice of a cause that has some.
    superseded_by: the row that says the same more urgently; while that one is found, this one is not.
    inhibits: while it fires, no alert of the same server up to this severity is notified, except its own causes.
    about: what the alert is about. An alert about a job has no instance; one about the exporter has none to serve its page.
    kind: the condition's, where None.
    names_suspects: its advice is the flags that differ from their defaults (`diagnosis.suspects`).
    summary_past: the summary of what was not seen for minutes, a template over `until` and `times`; empty where the
        summary stays in the present tense.
    """

    id: str
    condition: Condition
    summary: str
    seen: str
    guide: str
    remedy: Remedy
    alert: str = ""
    severity: Severity = "info"
    label: str = ""
    title: Title | None = None
    sizes: Callable[[SizingInput], list[AdvisedValue]] | None = None
    scale_out: ScaleOut | None = None
    hold: str = "5m"
    keep_firing: str = ""
    profiles: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    notified_as_well: bool = False
    uses_advice_of_causes: bool = False
    superseded_by: str = ""
    inhibits: Severity | None = None
    about: Literal["server", "exporter", "job"] = "server"
    kind: Kind | None = None
    names_suspects: bool = False
    summary_past: str = ""
    no_alert: str = ""

    def sentence(self, value: str, figures: Mapping[str, str]) -> str:
        """Return what is seen, with its figure (or the template of one) and the thresholds in force."""
        plural = f'{{{{ if ne ({value.strip("{ }")}) "1" }}}}s{{{{ end }}}}' if value.startswith("{{") else "s"
        return self.seen.format(value=value, s="" if value in {"1", "at least one"} else plural, **figures)

    @property
    def comes_first(self) -> bool:
        """Whether it is a failure, to be mended before anything is tuned; a missed objective is none."""
        return self.severity == "critical" and self.condition.is_in_logs

    @property
    def headline(self) -> str:
        """The diagnosis in a few words: cuda_graph_off becomes "CUDA graph off"."""
        words = self.label or self.id.replace("_", " ").capitalize()
        for name in ("CUDA", "DP"):
            words = words.replace(f"{name.capitalize()} ", f"{name} ")
        return words

    @property
    def notification_title(self) -> Title:
        """The words of a notification's title."""
        words = self.headline
        words = words if words[:2].isupper() else words[:1].lower() + words[1:]
        return self.title or Title(words, self.condition.title_unit)

    @property
    def why_no_alert(self) -> str:
        """The reason why it has no alert; empty if it has one."""
        chance = "an opportunity, not a fault: it needs no notification" if self.is_chance and not self.alert else ""
        return self.no_alert or chance

    @property
    def is_chance(self) -> bool:
        """Whether it names an opportunity, not a fault."""
        return (self.kind or self.condition.kind) == "chance"

    @property
    def needs_advice(self) -> bool:
        """Whether it is a finding only where some advice is left."""
        return self.condition.kind == "chance" or (bool(self.remedy.arg) and not self.condition.is_event)

    @property
    def is_limit(self) -> bool:
        """Whether it can be the verdict."""
        return (self.kind or self.condition.kind) == "limit"
