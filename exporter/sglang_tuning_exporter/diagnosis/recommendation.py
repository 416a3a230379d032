"""The main advice of each finding in the words of a notification, and since when it has been the same. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from sglang_tuning_exporter.diagnosis.advice import Advice, as_typed
from sglang_tuning_exporter.diagnosis.command import typed_args
from sglang_tuning_exporter.diagnosis.expectation import Expected
from sglang_tuning_exporter.diagnosis.findings import Finding, Judgement
from sglang_tuning_exporter.state.facts import ServerFacts

NOT_SET, SET = "not set", "set"


class Recommendation(NamedTuple):
    """What to do about one diagnosis; `flag` is empty for advice to people."""

    diagnosis: str
    flag: str
    current: str
    suggested: str
    direction: str


class RecommendedSince(NamedTuple):
    """Since when a recommendation has been given, and what it is expected to bring."""

    since: float
    expected: Expected | None


# Share by which a predicted gain, and a figure in advice to people, may change before the words do.
SAME_GAIN_WITHIN, SAME_FIGURE_WITHIN = 0.1, 0.2
_FIGURE = re.compile(r"[0-9][0-9,]*(?:\.[0-9]+)?")


def recommendations(judgement: Judgement) -> dict[Recommendation, Expected | None]:
    """Return one for each finding with advice, in the order of the findings, with what it is expected to bring."""
    facts = judgement.past.facts
    return {recommendation(found, facts): main_advice(found).expected for found in judgement.findings if found.advice}


def recommendation(finding: Finding, facts: ServerFacts) -> Recommendation:
    """Return the finding's main advice."""
    advice = main_advice(finding)
    suggested = advice.direction if advice.is_switch else as_typed(advice.suggested) or advice.suggestion
    return Recommendation(finding.diagnosis.id, advice.flag, current_words(advice, facts), suggested, advice.direction)


def main_advice(finding: Finding) -> Advice:
    """Return the advice on the row's own argument if there are several, else the first.

    A flag that figures show to be the cause is first, and is the main advice.
    """
    first, own = finding.advice[0], finding.diagnosis.remedy.arg
    if first.explains or not own:
        return first
    # Releases rename arguments: cuda_graph_max_bs_decode.
    return next((each for each in finding.advice if each.arg == own or each.arg.startswith(f"{own}_")), first)


def since(
    before: Mapping[Recommendation, RecommendedSince], given: Mapping[Recommendation, Expected | None], now: float
) -> dict[Recommendation, RecommendedSince]:
    """Return since when each has been given: as before, in the words of before, or `now`."""
    found = {}
    for each, expected in given.items():
        same = each if each in before else next((old for old in before if _is_alike(old, each)), None)
        if same is None:
            found[each] = RecommendedSince(now, expected)
        else:
            found[same] = RecommendedSince(before[same].since, _keep_similar(before[same], expected))
    return found


def _is_alike(before: Recommendation, now: Recommendation) -> bool:
    """Return whether these are advice to people about one diagnosis in the same words, with figures that hardly differ."""
    if before.flag or before._replace(suggested="") != now._replace(suggested=""):
        return False
    if _FIGURE.sub("", before.suggested) != _FIGURE.sub("", now.suggested):
        return False
    figures = zip(_FIGURE.findall(before.suggested), _FIGURE.findall(now.suggested), strict=True)
    pairs = [(float(old.replace(",", "")), float(new.replace(",", ""))) for old, new in figures]
    return all(abs(old - new) <= SAME_FIGURE_WITHIN * max(old, new) for old, new in pairs)


def _keep_similar(known: RecommendedSince, expected: Expected | None) -> Expected | None:
    if known.expected is None or expected is None:
        return known.expected or expected
    moved = abs(expected.gain - known.expected.gain) > SAME_GAIN_WITHIN * (1.0 + known.expected.gain)
    return expected if moved else known.expected


def current_words(advice: Advice, facts: ServerFacts) -> str:
    """Return the flag's value in force; empty for advice to people, and where it is not known."""
    value, unset = advice.current, NOT_SET if facts.knows(advice.arg) else ""
    if not advice.flag:
        return ""
    if advice.is_switch or isinstance(facts.args.get(advice.arg), bool):
        return SET if value else unset
    if value is None and advice.arg == "max_running_requests":
        limit = max(facts.running_limits.values(), default=None)
        value = None if limit is None else limit * facts.attention_ranks
    if value is None:
        return unset
    return f"{as_typed(value)} (default)" if _is_default(advice.arg, facts) else as_typed(value)


def _is_default(arg: str, facts: ServerFacts) -> bool:
    """Return whether a value in force was not typed; False if the arguments are not known."""
    typed = typed_args(facts)
    if typed is not None:
        return arg not in typed
    return facts.knows(arg) and facts.args.get(arg) is None
