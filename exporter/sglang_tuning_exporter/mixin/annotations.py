"""The annotations of alerts: what is seen, which flag to change, its value now and the value to try, and links."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from sglang_tuning_exporter.config import UsageError
from sglang_tuning_exporter.diagnosis.expectation import is_predictable
from sglang_tuning_exporter.diagnosis.promql import asked, otherwise
from sglang_tuning_exporter.mixin.boards.common import FLEET, SERVER
from sglang_tuning_exporter.state.profiles import DEFAULT, GIGABYTE, LONG_QUEUE, LONG_WAIT

if TYPE_CHECKING:
    from sglang_tuning_exporter.diagnosis.row import Diagnosis

GRAFANA_URL = "http://localhost:3000"
_MEMORY, _IN_GB = "available_gpu_memory_bytes", f" / {GIGABYTE}"
_SWITCHED = frozenset({"add", "drop"})  # a switch has no value
_OWN = "{{ $labels.instance }}"
# The series of the value in force where an argument has its default.
_IN_FORCE = {"max_running_requests": "sglang_tuning_running_requests_limit"}


# Templates that work for every alert: an error in one makes Prometheus refuse all rules, or put the error into the address.
_TEMPLATE = re.compile(
    r"\{\{-? *\$(?:labels|externalLabels)\.[a-zA-Z_][a-zA-Z0-9_]*(?: *\| *(?:urlquery|toLower|toUpper|stripPort|stripDomain))* *-?\}\}"
)


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return (
            parts.scheme in {"http", "https"}
            and bool(parts.hostname)
            and (parts.port or 1) > 0
            and text.isprintable()
            and " " not in text
        )
    except ValueError:  # an invalid IPv6 address or port
        return False


def _living(row: Diagnosis, metric: str) -> str:
    """Write the query of a series of the exporter that serves an alert's page; where it is down, of any other."""
    if row.about == "exporter":
        return f'printf "{metric}{{job=%q}}" $labels.job | query'
    return f'query "{metric}"' if row.about == "job" else asked(metric)


def _instance(row: Diagnosis) -> str:
    """Write the `instance` of that exporter."""
    if row.about not in {"exporter", "job"}:
        return _OWN
    return otherwise(_living(row, "sglang_tuning_build_info"), '{{ . | first | label "instance" }}', _OWN)


def _exporter(row: Diagnosis) -> str:
    """Write the address of that exporter: its `--external-url`, else the one that Prometheus scrapes."""
    scraped = '{{ $web | label "scheme" }}://{{ $web | label "instance" }}'
    known = f'{{{{ $web := . | first }}}}{{{{ with $web | label "external_url" }}}}{{{{ . }}}}{{{{ else }}}}{scraped}{{{{ end }}}}'
    return otherwise(_living(row, "sglang_tuning_web_info"), known, f"http://{_instance(row)}")


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
            if not _is_address(plain.replace("{alert}", "x")):
                raise UsageError(f"{key}={url}: give an address that begins with http:// or https://")

    def runbook(self, row: Diagnosis) -> str:
        """Return the address of an alert's page."""
        if self.runbooks is None:
            return f"{_exporter(row)}/runbooks/{row.alert}"
        has_place = "{alert}" in self.runbooks
        url = self.runbooks.replace("{alert}", row.alert) if has_place else f"{self.runbooks.rstrip('/')}/{row.alert}"
        return url.replace(_OWN, _instance(row))

    def dashboard(self, row: Diagnosis) -> str:
        """Return the address of the board of an alert's server, or of its job's servers."""
        boards, job = f"{self.grafana.rstrip('/')}/d", "var-job={{ $labels.job | urlquery }}"
        if row.about == "job":
            return f"{boards}/{FLEET}?{job}"
        return f"{boards}/{SERVER}?{job}&var-instance={{{{ $labels.instance | urlquery }}}}"


DEFAULT_LINKS = Links()


@cache
def in_force() -> dict[str, str]:
    """Return each threshold as a template: the exporter's, else the default profile's."""
    shown = {
        "token_usage_target": ("", "token_usage", "target"),
        "reserve_least_gb": (_IN_GB, _MEMORY, "least"),
        "reserve_lower_gb": (_IN_GB, _MEMORY, "lower"),
    }
    figures = DEFAULT.figures
    return (
        figures
        | {
            name: otherwise(
                asked("sglang_tuning_threshold", scale, signal=signal, bound=bound),
                "{{ . | first | value }}",
                figures[name],
            )
            for name, (scale, signal, bound) in shown.items()
        }
        | {"queue_limit": _queue_limit()}
    )


def _queue_limit() -> str:
    """Write what a queue that is too long means to the server's profile."""
    value, limit = "{{ . | first | value }}", DEFAULT.figures["queue_limit"]
    length = otherwise(asked("sglang_tuning_threshold", signal="queue", bound="upper"), LONG_QUEUE.format(value), limit)
    return otherwise(
        asked("sglang_tuning_threshold", signal="queue", bound="wait_seconds"), LONG_WAIT.format(value), length
    )


def description(row: Diagnosis) -> str:
    """Return the description: what is seen, with its figure."""
    seen = row.sentence(row.condition.seen_as, in_force())
    return f"{{{{ $labels.{'job' if row.about == 'job' else 'instance'} }}}}: {seen}."


@dataclass(frozen=True, slots=True)
class AdviceAnnotations:
    """The annotations with advice: the exporter's, else the guide's words.

    All of them come from one series, so that flag, present value and value to try belong together.
    """

    row: Diagnosis

    @property
    def flag(self) -> str:
        """The flag to change, as the running release spells it; empty when the advice is to people."""
        arg = self.row.turn.arg
        if not arg and not self.row.borrows:
            return ""
        return self._advice("flag", "--" + arg.replace("_", "-") if arg else "")

    @property
    def current(self) -> str:
        """The flag's present value."""
        arg = self.row.turn.arg
        if not self.flag or not self._computed:
            return ""
        return self._advice("current", self._set if arg and self.row.turn.direction not in _SWITCHED else "")

    @property
    def _set(self) -> str:
        """The value of the row's own argument, or the one in force without it."""
        arg, value = self.row.turn.arg, "{{ . | first | value }}"
        default = "not set"
        if arg in _IN_FORCE:
            default = otherwise(asked(_IN_FORCE[arg]), value + " (default)", default)
        return otherwise(asked("sglang_tuning_server_arg", arg=arg), value, default)

    @property
    def suggested(self) -> str:
        """The value to try, or the advice to people."""
        return self._advice("suggested", self.row.turn.filled(in_force()).fallback)

    @property
    def direction(self) -> str:
        """Raise, lower, set, add or drop."""
        return self._advice("direction", self.row.turn.direction)

    def of_own_flag(self, words: str, else_words: str = "") -> str:
        """Write words about the row's own flag: where the exporter advises another flag, `else_words`."""
        if not self._computed or not words:
            return words
        arg = self.row.turn.arg
        own = f"--{arg.replace('_', '-')}" if arg else ""
        series = asked("sglang_tuning_recommendation_timestamp_seconds", newest=True, diagnosis=self.row.id)
        flag = f'{{{{ $flag := "" }}}}{{{{ with {series} }}}}{{{{ $flag = . | first | label "flag" }}}}{{{{ end }}}}'
        is_own = f'match "^({own}.*)?$" $flag' if own else 'eq $flag ""'
        return f"{flag}{{{{ if {is_own} }}}}{words}{{{{ else }}}}{else_words}{{{{ end }}}}"

    @property
    def expected(self) -> str:
        """What the change is expected to bring, by the measured step times; empty where that cannot be predicted."""
        return self._advice("expected", "") if is_predictable(self.row) else ""

    @property
    def _computed(self) -> bool:
        """Whether the exporter computes advice for the row."""
        return not self.row.condition.is_advice_fixed

    def _advice(self, label: str, words: str) -> str:
        if not self._computed:
            return words
        # The newest series, where the advice changed within the last minutes.
        series = asked("sglang_tuning_recommendation_timestamp_seconds", newest=True, diagnosis=self.row.id)
        return otherwise(series, f'{{{{ . | first | label "{label}" }}}}', words)
