"""What an operator changes in the generated rules without editing them: `generate --config rules.yml`.

Severity and labels of alerts, alerts that are switched off, pools that must exist, links, and the head of a
PrometheusRule. How long an alert waits is the exporter's to decide (`--wait`), and so is what is accepted (`--accept`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from sglang_tuning_exporter.config import files, values
from sglang_tuning_exporter.core import findings, runbooks
from sglang_tuning_exporter.core.diagnoses import ALL

SEVERITIES: tuple[str, ...] = get_args(findings.Severity)
_ALERTS = (*runbooks.BY_ALERT, *(row.native.alert for row in ALL if row.native is not None))
_LOKI = re.compile(r"[A-Za-z0-9_-]{1,40}(:\{[^{}\n]+(?:\$\{[\w.]+\}[^{}\n]*)*\})?")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_KUBERNETES_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
# Templates that work for every alert: an error in one makes Prometheus refuse all rules, or put the error into the
# address.
_TEMPLATE = re.compile(
    r"\{\{-? *\$(?:labels|externalLabels)\.[a-zA-Z_][a-zA-Z0-9_]*(?: *\|"
    r" *(?:urlquery|toLower|toUpper|stripPort|stripDomain))* *-?\}\}"
)
_OWN = frozenset({"alertname", "severity", "diagnosis"})  # labels that rules, templates and inhibition rely on


@dataclass(frozen=True, slots=True)
class Wishes:
    """What is wished for all rules. `expected`: jobs whose last target may not leave, idle or not."""

    # By alert: its `severity` and `labels`; None for one that is off.
    alerts: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    expected: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    # For the links in notifications; without an address there is no link. `{alert}` in the runbooks' is the alert's
    # name; else it is appended.
    # Both may hold Prometheus templates over the alert's labels: `http://{{ $labels.instance }}/runbooks` leads to the
    # exporter, which serves them.
    runbook_url: str = ""
    grafana_url: str = ""
    loki: str = ""  # a data source of Grafana's that has the servers' logs, and `:{…}`, how to find them

    def severity(self, alert: str, usual: str) -> str:
        """Return the severity of an alert."""
        word: str = (self.alerts.get(alert) or {}).get("severity", usual)
        return word

    def is_off(self, alert: str) -> bool:
        """Return whether an alert is not wanted."""
        return self.alerts.get(alert, {}) is None

    def labels_of(self, alert: str, usual: str) -> dict[str, str]:
        """Return the labels of an alert's rule; without `usual` it has no severity of its own."""
        severity = self.severity(alert, usual)
        own = (self.alerts.get(alert) or {}).get("labels", {})
        return {**({"severity": severity} if severity else {}), **self.labels, **own}


NONE = Wishes()


def read(path: Path | None, **flags: str | None) -> Wishes:
    """Return what a file wishes, and the addresses that flags give. Raise `UsageError`."""
    given = {
        key: values.check(_address, f"--{key.replace('_', '-')}", url) for key, url in flags.items() if url is not None
    }
    content = {} if path is None else files.mapping_in(path)
    try:
        return Wishes(**{**_FILE(content), **given})
    except values.UsageError as error:
        raise values.UsageError(f"--config={path}: {error}") from None


# Each of the following checks a value of the file, or raises `UsageError`.


def _labels(value: Any) -> dict[str, str]:
    found = values.mapping(value)
    for name, word in found.items():
        if not _LABEL.fullmatch(name) or name.startswith("__"):
            raise values.UsageError("give a label of letters, digits and _", "", name)
        if name in _OWN:
            raise values.UsageError("a label of the rules' own; set `severity` of an alert in its own entry", "", name)
        if isinstance(word, dict | list) or word is None or "{{" in str(word):
            raise values.UsageError("give a plain word", str(word), name)
    return {name: str(word) for name, word in found.items()}


def _wish(value: Any) -> dict[str, Any] | None:
    if value is False or value == "off":  # YAML reads `off` as false
        return None
    if isinstance(value, dict):
        return _WISH(value)
    if value not in SEVERITIES:
        raise values.UsageError(f"give off, {', '.join(SEVERITIES)}, or a mapping with severity and labels")
    return {"severity": value}


def _expected(value: Any) -> tuple[str, ...]:
    jobs = value if isinstance(value, list) else [value]
    for job in jobs:
        if not isinstance(job, str) or not job.strip() or not job.isprintable() or '"' in job or "\\" in job:
            raise values.UsageError("give names of jobs, such as [sglang]", str(job))
    return tuple(jobs)


def _matching(pattern: re.Pattern[str], remedy: str) -> Callable[[Any], str]:
    def convert(value: Any) -> str:
        if not pattern.fullmatch(values.as_word(value)):
            raise values.UsageError(remedy)
        return values.as_word(value)

    return convert


def _address(value: Any) -> str:
    """Check an address that may hold templates over the alert's labels."""
    plain = _TEMPLATE.sub("x", values.as_word(value))
    if "{{" in plain or "}}" in plain:
        raise values.UsageError("give templates over the alert's labels alone, such as {{ $labels.instance }}")
    if not values.is_address(plain.replace("{alert}", "x")):
        raise values.UsageError("give an address that begins with http:// or https://")
    return values.as_word(value)


def _texts(value: Any) -> dict[str, str]:
    return {name: str(word) for name, word in values.mapping(value).items()}


_NAMED = _matching(_KUBERNETES_NAME, "give a name as Kubernetes has it: small letters, digits, - and .")
_SOURCE = "give the uid of a data source, or a uid and a selector, such as 'loki:{pod=\"sglang-0\"}'"
_WISH = values.section({"severity": values.one_of(SEVERITIES), "labels": _labels})
_FILE = values.section(
    {
        "alerts": values.section(dict.fromkeys(_ALERTS, _wish)),
        "labels": _labels,
        "expected": _expected,
        "metadata": values.section({"name": _NAMED, "namespace": _NAMED, "labels": _texts, "annotations": _texts}),
        "runbook_url": _address,
        "grafana_url": _address,
        "loki": _matching(_LOKI, _SOURCE),
    }
)
