"""The changes of a diagnosis, with reasons: SGLang's own recommendations, proven flags, and its own advice. Pure.

Values are flag values as typed. `advise` leaves out flags that the release does not have, and values that it refuses or
ignores. `diagnoses/steps` sets a flag; the value is in the diagnosis.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from sglang_tuning_exporter.core.diagnoses import ALL, Diagnosis
from sglang_tuning_exporter.core.diagnoses.base import Beside, Offer
from sglang_tuning_exporter.core.diagnoses.own_words import WAYS, recommended_change, recommended_changes
from sglang_tuning_exporter.core.diagnoses.steps import REASONS, is_accepted, most_graph, say, set_flag
from sglang_tuning_exporter.core.diagnoses.suspects import INSTEAD, proven, proven_beside
from sglang_tuning_exporter.core.findings import Change
from sglang_tuning_exporter.core.view import View
from sglang_tuning_exporter.sglang import flags

# The reasons of a change by its argument and direction: those of a remedy that lends them, else of the steps.
_REASONS: Mapping[tuple[str, str], Change] = {
    **{(reason.arg, reason.direction): reason for reason in REASONS},
    **{change: diagnosis.remedy for diagnosis in ALL for change in diagnosis.lends},
}
_OPPOSITE = {"raise": "lower", "lower": "raise", "add": "drop", "drop": "add"}


def advise(diagnosis: Diagnosis, view: View, beside: Beside) -> list[Change]:
    """Return the changes of a diagnosis, best first; `beside`: all diagnoses that hold."""
    changes = _changes(diagnosis, view, beside)
    return changes if diagnosis.any_load else _sglang_first(diagnosis, view, changes)


def _sglang_first(diagnosis: Diagnosis, view: View, offered: list[Change]) -> list[Change]:
    """Return SGLang's own recommendation about the flag of a diagnosis, then the offers that do not contradict it.

    Where SGLang recommends the same change, only ours is returned: it has a value.
    """
    arg = diagnosis.remedy.arg
    ours = {change.direction for change in offered if change.arg == arg}
    recommended = view.facts.recommended(arg) if arg else []
    other = [advice for advice in recommended if WAYS.get(advice.ways.get(diagnosis.remedy.flag, ""), "") not in ours]
    first = [_reasoned(diagnosis, view, change) for advice in other for change in recommended_change(view, advice)]
    against = {(change.arg, _OPPOSITE.get(change.direction)) for change in recommended_changes(view)}
    own = [change for change in offered if (change.arg, change.direction) not in against]
    return [*first, *(change for change in own if not first or change.arg != arg)]


def _changes(diagnosis: Diagnosis, view: View, beside: Beside) -> list[Change]:
    """Return the proven flags that cause a diagnosis, then its own changes."""
    first = [_reasoned(diagnosis, view, change) for change in _causing_flags(diagnosis, view)]
    if diagnosis.of_flags or any(change.arg in INSTEAD for change in first):
        return first  # while such a flag is set, nothing else helps
    accepted = [offer for offer in _offers(diagnosis, view, beside) if is_accepted(view, offer)]
    changes = [change for offer in accepted for change in (offer if isinstance(offer, tuple) else (offer,))]
    return [*first, *(_reasoned(diagnosis, view, change) for change in changes)]


def _causing_flags(diagnosis: Diagnosis, view: View) -> list[Change]:
    """Return the changes of the flags that figures show to cause a diagnosis."""
    proofs = proven_beside(view) if diagnosis.of_flags else proven(view)
    causing = [flag for flag, effects in proofs.items() if diagnosis.of_flags or effects & diagnosis.groups]
    return [
        replace(set_flag(view, flag.arg, flag.to, flag.gain), why=flag.why, not_if=flag.not_if, cost=flag.cost)
        for flag in causing
    ]


def _offers(diagnosis: Diagnosis, view: View, beside: Beside) -> list[Offer]:
    """Return what a diagnosis advises for this view, else its remedy; words for people where neither gives a change."""
    remedy = diagnosis.remedy
    if diagnosis.advise is not None:
        offers = [*diagnosis.advise(view, beside)]
    else:
        offers = [set_flag(view, remedy.arg, remedy.to) if remedy.arg else say()]
    if not offers and not diagnosis.needs_advice:
        return [say(words="no change of a flag is known that helps here" if remedy.arg else "")]
    return offers


def _reasoned(diagnosis: Diagnosis, view: View, change: Change) -> Change:
    """Return a change with its reasons and figures filled in.

    A change without reasons has those of the diagnosis if it sets the flag of the diagnosis or none, else those of
    `_REASONS`.
    """
    own, figures = diagnosis.remedy, figures_of(view)
    name = change.arg.removesuffix("_decode") if change.arg == view.facts.graph_arg else change.arg
    is_own = not name or (name == own.arg and change.direction in {"", own.direction})
    reasons = change if change.why else own if is_own else _REASONS.get((name, change.direction), own)
    gain = change.gain + (_spellings(view, change) if change.arg else "")
    words = change.words or (own.words if change.to is None else "")
    direction = change.direction or ("" if change.why and not change.arg else own.direction)
    return replace(
        change,
        words=fill(words, figures),
        direction=direction,
        why=fill(reasons.why, figures),
        not_if=fill(reasons.not_if, figures),
        cost=fill(reasons.cost, figures),
        gain=fill(gain, figures),
    )


def _spellings(view: View, change: Change) -> str:
    """Return both names of the graph flag where the release is not known; empty for other flags."""
    if view.facts.release is not None or not change.arg.startswith("cuda_graph_max_bs"):
        return ""
    value = f" {change.to}" if isinstance(change.to, int) else ""
    old, new = f"--cuda-graph-max-bs{value}", f"--cuda-graph-max-bs-decode{value}"
    return f"; {old} up to SGLang 0.5.13, {new} from 0.5.14 to {flags.releases()[-1]}"


def figures_of(view: View) -> dict[str, str]:
    """Return the thresholds in words, by the names that texts have for them."""
    profile, ages = view.profile, view.given_up_ages
    lower = profile.queue_lower or (50 if view.facts.is_first_edition else 100)
    after = (
        "of every age" if ages is None else "within a second" if view.cancels else f"after {ages[0]:g} to {ages[1]:g} s"
    )
    return {
        **profile.figures,
        "given_up_after": after,
        "queue_range": f"{lower:g} to {profile.queue_upper:,.0f}",
        "most_graph": str(most_graph(view)),
    }


_TEMPLATE = re.compile(r"\{([a-z_]+)\}")


def fill(text: str, figures: Mapping[str, str]) -> str:
    """Return a text with the thresholds filled in; other words in braces stay."""
    return _TEMPLATE.sub(lambda name: figures.get(name[1], name[0]), text)
