"""What an operator changes in the generated rules without editing them: `generate --config rules.yml`.

Severity and labels of alerts, alerts that are switched off, pools that must exist, links, and the head of a PrometheusRule. How long an
alert waits is the exporter's to decide (`--wait`), and so is what is accepted (`--accept`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from sglang_tuning_exporter.config import files
from sglang_tuning_exporter.config.values import UsageError, suggestion
from sglang_tuning_exporter.core.findings import Severity
from sglang_tuning_exporter.core.runbooks import BY_ALERT
from sglang_tuning_exporter.mixin.native import NATIVE

SEVERITIES: tuple[str, ...] = get_args(Severity)
_ALERTS = (*BY_ALERT, *(each.alert for each in NATIVE))
_LOKI = re.compile(r"[A-Za-z0-9_-]{1,40}(:\{[^{}\n]+(?:\$\{[\w.]+\}[^{}\n]*)*\})?")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_KUBERNETES_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_OWN = frozenset({"alertname", "severity", "diagnosis"})  # labels that rules, templates and inhibition rely on


@dataclass(frozen=True, slots=True)
class Wish:
    """What is wished for one alert."""

    severity: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    off: bool = False


@dataclass(frozen=True, slots=True)
class Wishes:
    """What is wished for all rules. `expected`: jobs whose last target may not leave, idle or not."""

    alerts: Mapping[str, Wish] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    expected: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    runbook_url: str | None = None
    grafana_url: str | None = None
    loki: str = ""  # a data source of Grafana's that has the servers' logs, and `:{…}`, how to find them

    def severity(self, alert: str, usual: str) -> str:
        """Return the severity of an alert."""
        return self.of(alert).severity or usual

    def of(self, alert: str) -> Wish:
        """Return what is wished for an alert."""
        return self.alerts.get(alert, Wish())

    def labels_of(self, alert: str, usual: str) -> dict[str, str]:
        """Return the labels of an alert's rule; without `usual` it has no severity of its own."""
        severity = self.severity(alert, usual)
        return {**({"severity": severity} if severity else {}), **self.labels, **self.of(alert).labels}


NONE = Wishes()


def read(path: Path) -> Wishes:
    """Return what a file wishes. Raise `UsageError`."""
    where = f"--config={path}: "
    found = _mapping(where, "", files.mapping_in(path), _KEYS)
    made = {key: _KEYS[key](f"{where}{key}", value) for key, value in found.items() if value is not None}
    return Wishes(**made)


def _mapping(where: str, key: str, value: Any, known: Collection[str]) -> dict[str, Any]:
    """Return a mapping whose keys are known ones."""
    if not isinstance(value, dict):
        raise UsageError(f"{where}{key or 'the file'}: give a mapping of keys to values")
    named = {str(each): word for each, word in value.items()}
    for each in named:
        if each not in known:
            near = suggestion(each, known)
            few = f"; known are {', '.join(known)}" if len(known) < 10 else "; docs/reference/alerts.md lists them"
            raise UsageError(f"{where}{f'{key}: ' if key else ''}{each}: unknown{near or few}")
    return named


def _labels(where: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise UsageError(f"{where}: give a mapping, such as {{team: inference}}")
    found = {}
    for name, word in value.items():
        if not _LABEL.fullmatch(str(name)) or str(name).startswith("__"):
            raise UsageError(f"{where}: {name}: give a label of letters, digits and _")
        if name in _OWN:
            raise UsageError(f"{where}: {name}: a label of the rules' own; set `severity` of an alert in its own entry")
        if isinstance(word, dict | list) or word is None or "{{" in str(word):
            raise UsageError(f"{where}: {name}={word}: give a plain word")
        found[str(name)] = str(word)
    return found


def _alerts(where: str, value: Any) -> dict[str, Wish]:
    return {name: _wish(f"{where}: {name}", wish) for name, wish in _mapping(f"{where}: ", "", value, _ALERTS).items()}


def _wish(where: str, value: Any) -> Wish:
    if value is False or value == "off":  # YAML reads `off` as false
        return Wish(off=True)
    if value in SEVERITIES:
        return Wish(severity=value)
    if not isinstance(value, dict):
        raise UsageError(f"{where}={value}: give off, {', '.join(SEVERITIES)}, or a mapping with severity and labels")
    found = _mapping(where + ": ", "", value, ("severity", "labels"))
    severity = found.get("severity") or ""
    if severity and severity not in SEVERITIES:
        raise UsageError(f"{where}: severity={severity}: give one of {', '.join(SEVERITIES)}")
    return Wish(severity, _labels(f"{where}: labels", found.get("labels") or {}))


def _expected(where: str, value: Any) -> tuple[str, ...]:
    jobs = value if isinstance(value, list) else [value]
    for job in jobs:
        if not isinstance(job, str) or not job.strip() or not job.isprintable() or '"' in job or "\\" in job:
            raise UsageError(f"{where}={job}: give names of jobs, such as [sglang]")
    return tuple(jobs)


def _metadata(where: str, value: Any) -> dict[str, Any]:
    found = _mapping(where + ": ", "", value, ("name", "namespace", "labels", "annotations"))
    for key in ("name", "namespace"):
        if key in found and not _KUBERNETES_NAME.fullmatch(str(found[key])):
            raise UsageError(
                f"{where}: {key}={found[key]}: give a name as Kubernetes has it: small letters, digits, - and ."
            )
    for key in ("labels", "annotations"):
        if key in found:
            if not isinstance(found[key], dict):
                raise UsageError(f"{where}: {key}: give a mapping, such as {{release: prometheus}}")
            found[key] = {str(name): str(word) for name, word in found[key].items()}
    return found


def _address(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{where}={value}: give an address that begins with http:// or https://")
    return value


def _loki(where: str, value: Any) -> str:
    if not isinstance(value, str) or not _LOKI.fullmatch(value):
        raise UsageError(
            f"{where}={value}: give the uid of a data source, or a uid and a selector, such as 'loki:{{pod=\"sglang-0\"}}'"
        )
    return value


_KEYS: dict[str, Callable[[str, Any], Any]] = {
    "alerts": _alerts,
    "labels": _labels,
    "expected": _expected,
    "metadata": _metadata,
    "runbook_url": _address,
    "grafana_url": _address,
    "loki": _loki,
}
