"""Alert rules, Alertmanager configuration and notification templates, from the table of diagnoses.

The texts of an alert say what was measured and its limit, which flag to change from what to what, why, and when it will
not help; and links.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import partial
from textwrap import indent
from typing import Any

from sglang_tuning_exporter.config import profiles
from sglang_tuning_exporter.core import runbooks
from sglang_tuning_exporter.core.advice import fill
from sglang_tuning_exporter.core.diagnoses import CHANCES, EXPORTER, FAILURES, LIMITS, OBJECTIVES, Diagnosis
from sglang_tuning_exporter.core.diagnoses.native import POOL
from sglang_tuning_exporter.mixin import native
from sglang_tuning_exporter.mixin._rendering import SERVER, TARGET, listed, render
from sglang_tuning_exporter.mixin.wishes import NONE, SEVERITIES, Wishes

MOST_RULES = 14  # of a group, which is evaluated one rule after the other
_SECONDS_IN = {"s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(?<![\w.])(\d+)([smh])(?![\w.])")
_OF_RULES = re.compile(r"(?<=\[)\d+[smh](?=\])|(?<=\boffset )\d+[smh]|(?<=for: )\d+[smh]")  # the rest is prose
FLEET_BOARD, SERVER_BOARD = "sglang-tuning-fleet", "sglang-tuning-server"  # the boards that notifications link to
# A label that the alert lacks is rendered as "", which matches.
_SELECTOR = ", ".join(f"{name}=%q" for name in SERVER)
_LABELS = " ".join(f"$labels.{name}" for name in SERVER)
_LONG = 'reReplaceAll "([0-9]{2})[.][0-9]+" "$1"'  # 40.31% is 40%, and 5.25% stays
NOT_IF, COSTS = "It will not help if", "It costs:"
_MODEL = "{{ or $labels.model_name `a model without a name` }}"
_DIAGNOSIS = '{{ $labels.diagnosis | reReplaceAll "_" " " }}'
# A figure as a template's pipeline, and the unit after it where the sentence has none.
_FORMS = {
    "share": ("humanizePercentage", ""),
    "per_minute": ('printf "%.1f"', ""),
    "seconds": ("humanizeDuration", ""),
    "GB": ('printf "%.1f"', " GB"),
    "count": ('printf "%.0f"', ""),
}
# Words where a threshold stands in a sentence of the table: one file is for servers of every profile.
_WORDS = {
    **runbooks.figures(profiles.DEFAULT),
    "queue_limit": "a longer queue than its profile allows",
    "token_usage_target": "its profile's target",
}


def _alert_annotations(row: Diagnosis, wishes: Wishes) -> dict[str, str]:
    """Return the annotations of a row's alert by name; empty ones are left out.

    Two queries at most, because each is asked for each alert at each evaluation: the limit, and the exporter's advice.
    """
    found = {
        "title": _title(row),
        "summary": runbooks.summary(row),
        "past": runbooks.past(row),
        "description": f"{{{{ {'$labels.instance' if row.scope == 'server' else '$labels.job'} }}}}: {_seen(row)}.",
        "advice": _advice(row),
        "runbook_url": _runbook(row, wishes.runbook_url),
        "dashboard_url": _dashboard(row, wishes.grafana_url),
    }
    return {name: text for name, text in found.items() if text}


def _runbook(row: Diagnosis, url: str) -> str:
    """Return the address of an alert's runbook, empty without one."""
    if row.scope != "server" and "$labels.instance" in url:
        return ""  # it is about no one exporter
    return url.replace("{alert}", row.alert) if "{alert}" in url or not url else f"{url.rstrip('/')}/{row.alert}"


def _dashboard(row: Diagnosis, grafana: str) -> str:
    """Return the address of the board of an alert's server, or of its job's servers; empty without Grafana."""
    if not grafana:
        return ""
    boards, job = f"{grafana.rstrip('/')}/d", "var-job={{ $labels.job | urlquery }}"
    # Where the alert lacks one of these labels, there is nothing to choose on the board.
    cluster, server = (
        f"{{{{ with $labels.{name} }}}}&var-{name}={{{{ . | urlquery }}}}{{{{ end }}}}"
        for name in ("cluster", "server")
    )
    if row.scope != "server":
        return f"{boards}/{FLEET_BOARD}?{job}{cluster}"
    return f"{boards}/{SERVER_BOARD}?{job}&var-instance={{{{ $labels.instance | urlquery }}}}{cluster}{server}"


def _query(asked: str, labels: str = _LABELS) -> str:
    """Write a query in a template; its `%q` stand for these labels of the alert."""
    return f"printf `{asked}` {labels} | query"


def _series(name: str, row: Diagnosis) -> str:
    """Write the last word of an exporter's series about a diagnosis."""
    return f'last_over_time({name}{{{_SELECTOR}, diagnosis="{row.id}"}}[15m])'


def _title(row: Diagnosis) -> str:
    if row.scope == "pool":
        return f"{{{{ $value }}}} servers of {_MODEL}: {_DIAGNOSIS}"
    form, unit = _FORMS[row.when.unit]
    if row.when.unit == "share":
        form = f"{form} | {_LONG}"
    return row.title.replace("{value}", f"{{{{ $value | {form} }}}}{unit}")


def _seen(row: Diagnosis) -> str:
    """Write what was measured, beside its limit."""
    if row.scope == "pool":
        known = ", ".join(f"{name}=%q" for name in (*POOL, "model_name"))
        labels = " ".join(f"$labels.{name}" for name in (*POOL, "model_name"))
        of = _query(f"count(sglang_tuning:server_info{{{known}}})", labels)
        return (
            f"{{{{ $value }}}}{{{{ with {of} }}}} of {{{{ . | first | value }}}}{{{{ end }}}} servers of {_MODEL}:"
            f" {_DIAGNOSIS}"
        )
    if row.death in {"crash", "down"}:  # the line of its log that explains the end
        said = _query(f"last_over_time(sglang_tuning_end_info{{{_SELECTOR}}}[15m])")
        return f"{row.sign}{{{{ with {said} }}}}. In its log: “{{{{ . | first | label `words` }}}}”{{{{ end }}}}"
    if row.sign:
        return row.sign
    form, unit = _FORMS[row.when.unit]
    value = f"{{{{ $value | {form} }}}}{unit}"
    plural = f'{{{{ if ne ($value | {form}) "1" }}}}s{{{{ end }}}}'
    words = fill(row.notified or row.seen, {**_WORDS, "value": value, "s": plural})
    if row.when.kind == "event" or row.when.side == "below":
        return words  # the limit is none: below it the condition is turned into what is missing
    limit = f"{{{{ . | first | value | {form} }}}}{unit}{'/min' if row.when.unit == 'per_minute' else ''}"
    query = _query(_series("sglang_tuning_condition_limit", row))
    return f"{words}{{{{ with {query} }}}} (limit {limit}){{{{ end }}}}"


def _advice(row: Diagnosis) -> str:
    """Write the exporter's advice of one series: flag, present value, value to try, reason, when it will not help, and
    what it costs.

    Without it the table's.
    """
    remedy = row.remedy
    words = f"{f'{remedy.flag} → ' if remedy.flag else ''}{fill(remedy.words, _WORDS)}: {fill(remedy.why, _WORDS)}"
    words += f" {NOT_IF} {fill(remedy.not_if, _WORDS)}." + (
        f" {COSTS} {fill(remedy.cost, _WORDS)}" if remedy.cost else ""
    )
    if row.scope == "pool":
        pool = ", ".join(f"{name}=%q" for name in (*POOL, "diagnosis"))
        asked = (
            "topk(1, count by (flag, suggested, text)"
            f" (last_over_time(sglang_tuning_advice_timestamp_seconds{{{pool}}}[15m])))"
        )
        query = _query(asked, " ".join(f"$labels.{name}" for name in (*POOL, "diagnosis")))
        told = _told(("flag", "suggested", "text"))
        return (
            f"{{{{ with {query} }}}}{told} (advised to {{{{ . | first | value }}}} of them){{{{ else }}}}{words}{{{{"
            " end }}"
        )
    if row in EXPORTER:
        return words
    query = _query(f"topk(1, {_series('sglang_tuning_advice_timestamp_seconds', row)})")
    more = (
        f'{{{{ with $a | label "not_if" }}}} {NOT_IF} {{{{ . }}}}.{{{{ end }}}}{{{{ with $a | label "cost" }}}} {COSTS}'
        " {{ . }}{{ end }}"
    )
    return (
        f"{{{{ with {query} }}}}{_told(('flag', 'current', 'suggested', 'text'))}{more}{{{{ else }}}}{words}{{{{ end"
        " }}"
    )


def _told(labels: tuple[str, ...]) -> str:
    """Write a change of a series with these labels."""
    current = '{{ with $a | label "current" }}{{ . }} {{ end }}' if "current" in labels else ""
    return (
        f'{{{{ $a := . | first }}}}{{{{ with $a | label "flag" }}}}{{{{ . }}}} {current}→ {{{{ end }}}}'
        '{{ $a | label "suggested" }}: {{ $a | label "text" }}'
    )


def scaled(text: str, time_scale: float) -> str:
    """Return `text` with every duration divided by `time_scale`, in milliseconds where that is not a whole second."""
    if time_scale == 1:
        return text

    def shorter(match: re.Match[str]) -> str:
        milliseconds = round(1000 * int(match[1]) * _SECONDS_IN[match[2]] / time_scale)
        return f"{milliseconds // 1000}s" if milliseconds % 1000 == 0 else f"{milliseconds}ms"

    return _DURATION.sub(shorter, text)


def groups(wishes: Wishes = NONE) -> dict[str, list[Diagnosis]]:
    """Return the rows that have an alert by the name of their group."""
    found: dict[str, list[Diagnosis]] = {}
    named = {"failures": FAILURES, "limits": LIMITS, "objectives": (*OBJECTIVES, *CHANCES)}
    for name, of_group in named.items():
        notified = [row for row in of_group if row.alert and not wishes.is_off(row.alert)]
        for begin in range(0, len(notified), MOST_RULES):
            part = notified[begin : begin + MOST_RULES]
            found[f"{name}-{begin // MOST_RULES + 1}" if len(notified) > MOST_RULES else name] = part
    return found


# Two alerts are of the same server where these labels agree; a label that both lack agrees.
_SAME = {"target": TARGET, "server": SERVER, "pool and diagnosis": (*POOL, "diagnosis")}


def _inhibitions() -> Iterator[tuple[str, str, str]]:
    """Give which alerts hold back which: matchers of both, and the labels that agree."""
    exporters = {row.alert for row in EXPORTER}
    for of, causes, held in runbooks.INHIBITIONS:
        matchers = [f'alertname =~ "{"|".join(held)}"']
        if {*held} == {row.alert for row in runbooks.ALERTS} - {*causes}:
            matchers = ['alertname =~ "SGLang.+"', f'alertname != "{causes[0]}"']
        elif {*held} == {row.alert for row in runbooks.ALERTS} - exporters:
            matchers = ['alertname =~ "SGLang.+"', 'diagnosis != ""', f'alertname != "{causes[0]}"']
        quoted = ", ".join(f"'{matcher}'" for matcher in matchers)
        yield "|".join(causes), f"[{quoted}]", listed(_SAME[of])


FORMATS = ("prometheus", "prometheusrule", "mimir")
_RULE_FILES = {"sglang-tuning": "alerts/rules/sglang-tuning.rules.yml", "sglang-native": native.FILE}
_WITHOUT = "-without-exporter"  # ends the name of each folder whose rules are for servers without the exporter


def _formatted(name: str, text: str, kind: str, metadata: Mapping[str, Any]) -> tuple[str, str]:
    """Return path and text of a rule file in one of the formats.

    Each format has a folder of its own, because no program reads another's; and each has another one for servers
    without the exporter, because people load a folder as a whole.
    """
    if kind == "prometheus":
        return _RULE_FILES[name], text
    comments, _, rules = text.partition("groups:\n")
    path = f"alerts/{kind}{_WITHOUT if name == 'sglang-native' else ''}/{name}.yml"
    if kind == "mimir":
        return path, f"{comments}namespace: {name}\ngroups:\n{rules}"
    own = str(metadata.get("name") or "sglang-tuning")
    named = {**metadata, "name": name.replace("sglang-tuning", own) if name == "sglang-tuning" else f"{own}-native"}
    head = "".join(f"  {key}: {json.dumps(value)}\n" for key, value in named.items())
    document = f"apiVersion: monitoring.coreos.com/v1\nkind: PrometheusRule\nmetadata:\n{head}spec:\n  groups:\n"
    return path, f"{comments}{document}{indent(rules, '  ')}"


def at_former_paths(made: Mapping[str, str]) -> dict[str, str]:
    """Return the rules for servers without the exporter once more, where they lay beside the others until 0.1.0: for
    one release.
    """
    return {
        path.replace(_WITHOUT, ""): f"# Load {path} instead: the next release leaves this path out.\n{text}"
        for path, text in made.items()
        if f"{_WITHOUT}/" in path
    }


def files(time_scale: float = 1.0, wishes: Wishes = NONE, kind: str = "prometheus") -> dict[str, str]:
    """Return rules, Alertmanager configuration and notification templates: repository path → text."""
    expected = [wishes.expected[begin : begin + MOST_RULES] for begin in range(0, len(wishes.expected), MOST_RULES)]
    filling = {
        "wishes": wishes,
        "expected": expected,
        "scaled": partial(scaled, time_scale=time_scale),
        "seconds": lambda number: f"{number / time_scale:g}",
        "groups": groups(wishes),
        "prometheus": {row.id: row for row in EXPORTER},
        "annotations": lambda row: _alert_annotations(row, wishes),
        "severe": sorted(
            runbooks.MOST_SEVERE_FIRST, key=lambda row: SEVERITIES.index(wishes.severity(row.alert, row.severity))
        ),
        "inhibitions": list(_inhibitions()),
        "pool": listed(POOL),
        "server": listed(SERVER),
    }
    rules = render("rules.yml.j2", **filling)
    made = {
        "sglang-tuning": _OF_RULES.sub(lambda match: scaled(match[0], time_scale), rules),
        "sglang-native": native.text(wishes),
    }
    return {
        **dict(_formatted(name, text, kind, wishes.metadata) for name, text in made.items()),
        "alerts/alertmanager.yml": render("alertmanager.yml.j2", **filling),
        "alerts/templates/sglang-tuning.tmpl": render("notification.tmpl.j2", **filling),
    }
