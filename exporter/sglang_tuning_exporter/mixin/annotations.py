"""The annotations of alerts: what is seen, which flag to change, its value now and the value to try, and links."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from sglang_tuning_exporter.config.values import UsageError, is_address
from sglang_tuning_exporter.diagnosis.expectation import is_predictable
from sglang_tuning_exporter.diagnosis.promql import if_found, query_in_template
from sglang_tuning_exporter.diagnosis.row import Diagnosis
from sglang_tuning_exporter.state.profiles import DEFAULT, GIGABYTE, LONG_QUEUE, LONG_WAIT

GRAFANA_URL = "http://localhost:3000"
FLEET, SERVER = "sglang-tuning-fleet", "sglang-tuning-server"  # the boards that notifications link to
_VALUE = "{{ . | first | value }}"
_SWITCHED = frozenset({"add", "drop"})  # a switch has no value
_INSTANCE_LABEL = "{{ $labels.instance }}"
# The series of the value in force where an argument has its default.
_IN_FORCE = {"max_running_requests": "sglang_tuning_running_requests_limit"}


# Templates that work for every alert: an error in one makes Prometheus refuse all rules, or put the error into the address.
_TEMPLATE = re.compile(
    r"\{\{-? *\$(?:labels|externalLabels)\.[a-zA-Z_][a-zA-Z0-9_]*(?: *\| *(?:urlquery|toLower|toUpper|stripPort|stripDomain))* *-?\}\}"
)


def _metric_query(row: Diagnosis, metric: str) -> str:
    """Write the query of a series of the exporter that serves an alert's page; where it is down, of any other."""
    if row.about == "exporter":
        return f'printf "{metric}{{job=%q}}" $labels.job | query'
    return f'query "{metric}"' if row.about == "job" else query_in_template(metric)


def _instance(row: Diagnosis) -> str:
    """Write the `instance` of that exporter."""
    if row.about not in {"exporter", "job"}:
        return _INSTANCE_LABEL
    return if_found(
        _metric_query(row, "sglang_tuning_build_info"), '{{ . | first | label "instance" }}', _INSTANCE_LABEL
    )


def _exporter(row: Diagnosis) -> str:
    """Write the address of that exporter: its `--external-url`, else the one that Prometheus scrapes."""
    scraped = '{{ $web | label "scheme" }}://{{ $web | label "instance" }}'
    known = f'{{{{ $web := . | first }}}}{{{{ with $web | label "external_url" }}}}{{{{ . }}}}{{{{ else }}}}{scraped}{{{{ end }}}}'
    return if_found(_metric_query(row, "sglang_tuning_web_info"), known, f"http://{_instance(row)}")


@dataclass(frozen=True, slots=True)
class Links:
    """Addresses for the links in notifications: of the runbooks and of Grafana.

    `{alert}` in `runbooks` is the alert's name; else it is appended. Without `runbooks` the link leads to the exporter, which
    serves the pages. Both may hold Prometheus templates over the alert's labels.
    """

    runbooks: str | None = None
    grafana: str = GRAFANA_URL

    def __post_init__(self) -> None:
        for key, url in (("--runbook-url", self.runbooks), ("--grafana-url", self.grafana)):
            if url is None:
                continue
            plain = _TEMPLATE.sub("x", url)
            if "{{" in plain or "}}" in plain:
                raise UsageError(
                    f"{key}={url}: give templates over the alert's labels alone, such as {{{{ $labels.instance }}}}"
                )
            if not is_address(plain.replace("{alert}", "x")):
                raise UsageError(f"{key}={url}: give an address that begins with http:// or https://")

    def runbook(self, row: Diagnosis) -> str:
        """Return the address of an alert's page."""
        if self.runbooks is None:
            return f"{_exporter(row)}/runbooks/{row.alert}"
        has_place = "{alert}" in self.runbooks
        url = self.runbooks.replace("{alert}", row.alert) if has_place else f"{self.runbooks.rstrip('/')}/{row.alert}"
        return url.replace(_INSTANCE_LABEL, _instance(row))

    def dashboard(self, row: Diagnosis) -> str:
        """Return the address of the board of an alert's server, or of its job's servers."""
        boards, job = f"{self.grafana.rstrip('/')}/d", "var-job={{ $labels.job | urlquery }}"
        if row.about == "job":
            return f"{boards}/{FLEET}?{job}"
        return f"{boards}/{SERVER}?{job}&var-instance={{{{ $labels.instance | urlquery }}}}"


DEFAULT_LINKS = Links()


def _threshold(words: str, default: str, signal: str, bound: str, scale: str = "") -> str:
    """Write words with a threshold of the server's profile; without it the default."""
    return if_found(query_in_template("sglang_tuning_threshold", scale, signal=signal, bound=bound), words, default)


@cache
def threshold_templates() -> dict[str, str]:
    """Return each threshold as a template: the exporter's, else the default profile's."""
    figures = DEFAULT.figures
    least, lower, target = (figures[name] for name in ("reserve_least_gb", "reserve_lower_gb", "token_usage_target"))
    length = _threshold(LONG_QUEUE.format(_VALUE), figures["queue_limit"], "queue", "upper")
    return figures | {
        "token_usage_target": _threshold(_VALUE, target, "token_usage", "target"),
        "reserve_least_gb": _threshold(_VALUE, least, "available_gpu_memory_bytes", "least", f" / {GIGABYTE}"),
        "reserve_lower_gb": _threshold(_VALUE, lower, "available_gpu_memory_bytes", "lower", f" / {GIGABYTE}"),
        "queue_limit": _threshold(LONG_WAIT.format(_VALUE), length, "queue", "wait_seconds"),
    }


def alert_annotations(row: Diagnosis, links: Links) -> dict[str, str]:
    """Return the annotations of a row's alert by name; empty ones are left out.

    Advice is the exporter's, all of it from one series, so that flag, present value and value to try belong together. Without
    that series it is the guide's.
    """
    remedy, is_computed = row.remedy.with_figures(threshold_templates()), not row.condition.is_advice_fixed
    own_flag = remedy.flag
    has_flag = bool(own_flag or row.uses_advice_of_causes)
    # The newest series, where the advice changed within the last minutes.
    series = query_in_template("sglang_tuning_recommendation_timestamp_seconds", newest=True, diagnosis=row.id)

    def advised(label: str, words: str) -> str:
        return if_found(series, f'{{{{ . | first | label "{label}" }}}}', words) if is_computed else words

    def of_own_flag(words: str, else_words: str = "") -> str:
        """Return words about the row's own flag; where the exporter advises another flag, `else_words`."""
        if not is_computed or not words:
            return words
        flag = f'{{{{ $flag := "" }}}}{{{{ with {series} }}}}{{{{ $flag = . | first | label "flag" }}}}{{{{ end }}}}'
        is_own = f'match "^({own_flag}.*)?$" $flag' if own_flag else 'eq $flag ""'
        return f"{flag}{{{{ if {is_own} }}}}{words}{{{{ else }}}}{else_words}{{{{ end }}}}"

    seen = row.sentence(row.condition.annotation_value, threshold_templates())
    found = {
        "summary": row.summary,
        "description": f"{{{{ $labels.{'job' if row.about == 'job' else 'instance'} }}}}: {seen}.",
        "flag": advised("flag", own_flag) if has_flag else "",
        "current": advised("current", _present_value(row)) if has_flag and is_computed else "",
        "suggested": advised("suggested", remedy.fallback),
        "direction": advised("direction", remedy.direction),
        "expected": advised("expected", "") if is_predictable(row) else "",
        "why": of_own_flag(remedy.why, "The exporter's page gives the reason, the cost and the limits of this change."),
        "cost": of_own_flag(remedy.cost),
        "will_not_help_if": of_own_flag(remedy.will_not_help_if),
        "guide": row.guide,
        "runbook_url": links.runbook(row),
        "dashboard_url": links.dashboard(row),
    }
    return {name: text for name, text in found.items() if text}


def _present_value(row: Diagnosis) -> str:
    """Write the value of the row's own argument, or the one in force without it; empty where it has no value."""
    arg, default = row.remedy.arg, "not set"
    if not arg or row.remedy.direction in _SWITCHED:
        return ""
    if arg in _IN_FORCE:
        default = if_found(query_in_template(_IN_FORCE[arg]), _VALUE + " (default)", default)
    return if_found(query_in_template("sglang_tuning_server_arg", arg=arg), _VALUE, default)
