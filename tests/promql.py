"""Read queries without Prometheus: which of them can have a sample, by the series that there are."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

Labels = Mapping[str, str]
_COUNTER = re.compile(r"_(?:total|count|sum|bucket)$")
_QUOTED = r'"(?:[^"\\]|\\.)*"'
_SAMPLE = re.compile(rf"([a-zA-Z_:][\w:]*)\{{((?:{_QUOTED}|[^\"}}])*)\}} (\S+) (\S+)")
_MATCHER = re.compile(rf"(\w+)(=~|!~|!=|=)({_QUOTED})")
_SELECTOR = re.compile(rf"(?<![:\w$])(sglang:\w+|sglang_tuning_\w+|ALERTS\w*|up)\b(?:\{{((?:{_QUOTED}|[^\"}}])*)\}})?")


def moving(exposition: str, begin: float) -> dict[str, list[Labels]]:
    """Return the series that show something from `begin` on, by metric: counters that grow, gauges that are not always
    0.
    """
    values: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for line in exposition.splitlines():
        sample = _SAMPLE.fullmatch(line)
        if sample is not None and float(sample[4]) >= begin:
            values[sample[1], sample[2]].append(float(sample[3]))
    found: defaultdict[str, list[Labels]] = defaultdict(list)
    for (name, labels), samples in values.items():
        if _COUNTER.search(name):
            moves = samples[-1] > samples[0]
        else:
            moves = any(value and not math.isnan(value) for value in samples)
        if moves:
            found[name].append({label: value[1:-1] for label, _, value in _MATCHER.findall(labels)})
    return found


def can_draw(query: str, series: Mapping[str, Collection[Labels]]) -> bool:
    """Return whether a query can have a sample: each of its operands has one, or one of those joined by `or`.

    What follows `unless` only takes samples away. NaN is no sample. This reads neither comparisons nor the labels that
    operands are matched by: Prometheus must find something wherever both operands have a series that moves.
    """

    def operand(selector: re.Match[str]) -> str:
        matchers = [(name, sign, quoted[1:-1]) for name, sign, quoted in _MATCHER.findall(selector[2] or "")]
        return " some " if any(_matches(matchers, labels) for labels in series.get(selector[1], ())) else " none "

    text = _SELECTOR.sub(operand, query.replace("vector(NaN)", "none"))
    text = re.sub(rf"{_QUOTED}|\[[^\]]*\]", "", text)
    while "(" in text:
        text = re.sub(r"\(([^()]*)\)", lambda group: " some " if _is_some(group[1]) else " none ", text)
    return _is_some(text)


def _is_some(operands: str) -> bool:
    alternatives = (part.partition(" unless ")[0] for part in operands.split(" or "))
    return any("none" not in part.split() for part in alternatives)


def _matches(matchers: Iterable[tuple[str, str, str]], labels: Labels) -> bool:
    """Return whether a series has these labels. A label that it lacks is empty, as for Prometheus."""
    return all(_holds(sign, wanted, labels.get(name, "")) for name, sign, wanted in matchers)


def _holds(sign: str, wanted: str, value: str) -> bool:
    is_equal = re.fullmatch(wanted, value) is not None if "~" in sign else wanted == value
    return is_equal == (sign[0] == "=")
