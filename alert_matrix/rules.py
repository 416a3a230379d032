"""The rules that decide about one alert, and the series that they can read. Nothing else can change the alert."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from alert_matrix.story import Shown
from sglang_tuning_exporter.state.signals import IDLE, UNKNOWN

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NAME = re.compile(r"(?<![\w:\"$.])[a-zA-Z_:][\w:]*")
_QUOTED = re.compile(r'"([^"]*)"')
# These series differ by a label, and a rule reads only the values that it names.
_SECONDS = "sglang_tuning_state_seconds_total"
_DIFFER_BY = {
    _SECONDS: "signal",
    "sglang_tuning_state": "signal",
    "sglang_tuning_diagnosis_active": "diagnosis",
    "sglang_tuning_threshold": "signal",
    "sglang_tuning_server_arg": "arg",
    "sglang_tuning_liveness_events_total": "event",
}


@dataclass(frozen=True)
class Chosen:
    """Groups of rules, without annotations, and the series that they can read."""

    groups: list[dict[str, Any]]
    names: frozenset[str]
    words: frozenset[str]

    def reads(self, shown: Shown) -> bool:
        """Whether a series could change their result."""
        if shown.name not in self.names:
            return False
        if shown.name == _SECONDS and shown.series is not None and shown.series.constant == 0:
            # Nothing is added by it; a rule that names its state may still miss it.
            return shown.labels["state"] in self.words - {IDLE, UNKNOWN} and shown.labels["signal"] in self.words
        label = _DIFFER_BY.get(shown.name)
        return label is None or shown.labels[label] in self.words


@cache
def load(text: str) -> list[dict[str, Any]]:
    """Read a rule file's groups."""
    return list(yaml.load(text, Loader=_LOADER)["groups"])


def choose(groups: list[dict[str, Any]], alerts: Iterable[str] | None = None) -> Chosen:
    """Give the rules that these alerts rest on, in their order; all for None."""
    rules = [rule for group in groups for rule in group["rules"]]
    wanted = {rule["alert"] for rule in rules if "alert" in rule} if alerts is None else set(alerts)
    records: set[str] = set()
    read: set[str] = set()
    words: set[str] = set()
    recorded = {rule["record"] for rule in rules if "record" in rule}
    named = {rule["alert"] for rule in rules if "alert" in rule}
    while True:
        before = len(wanted) + len(records)
        for rule in rules:
            if rule.get("alert") in wanted or rule.get("record") in records:
                expression = _without_strings(rule["expr"])
                found = set(_NAME.findall(expression))
                read |= found
                records |= found & recorded
                quoted = {word for text in _QUOTED.findall(rule["expr"]) for word in re.split(r"[|()]", text)}
                words |= quoted
                wanted |= quoted & named
        if len(wanted) + len(records) == before:
            break
    kept = []
    for group in groups:
        chosen = [
            {name: value for name, value in rule.items() if name != "annotations"}
            for rule in group["rules"]
            if rule.get("alert") in wanted or rule.get("record") in records
        ]
        if chosen:
            kept.append({"name": group["name"], "rules": chosen})
    # A label that no rule names is read whatever it is.
    return Chosen(kept, frozenset(read), frozenset(words))


def _without_strings(expression: str) -> str:
    return _QUOTED.sub('""', expression)
