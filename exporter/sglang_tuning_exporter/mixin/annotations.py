"""The texts of alerts: what was measured and its limit, which flag to change from what to what, why, and when it will not help; and links."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from sglang_tuning_exporter.config.profiles import DEFAULT
from sglang_tuning_exporter.config.values import UsageError, is_address
from sglang_tuning_exporter.core.rows import Row
from sglang_tuning_exporter.core.runbooks import PROMETHEUS, SEEN, figures, filled, flag_of, summary

GRAFANA_URL = "http://localhost:3000"
FLEET, SERVER = "sglang-tuning-fleet", "sglang-tuning-server"  # the boards that notifications link to
# Templates that work for every alert: an error in one makes Prometheus refuse all rules, or put the error into the address.
_TEMPLATE = re.compile(
    r"\{\{-? *\$(?:labels|externalLabels)\.[a-zA-Z_][a-zA-Z0-9_]*(?: *\| *(?:urlquery|toLower|toUpper|stripPort|stripDomain))* *-?\}\}"
)
# A label that the alert lacks is rendered as "", which matches.
_TARGET = ("job", "instance", "cluster", "namespace", "pod")
_SELECTOR = ", ".join(f"{name}=%q" for name in _TARGET)
_LABELS = " ".join(f"$labels.{name}" for name in _TARGET)
_LONG = 'reReplaceAll "([0-9]{2})[.][0-9]+" "$1"'  # 40.31% is 40%, and 5.25% stays
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
    **figures(DEFAULT),
    "queue_limit": "a longer queue than its profile allows",
    "token_usage_target": "its profile's target",
}
# The condition is turned so that above its limit is bad: what is missing.
_MISSING = {"memory_reserve_too_small": "{value} less left on the GPU at start-up than its profile asks for"}
_ACTS = {
    "raise": "Raising",
    "lower": "Lowering",
    "set": "Setting",
    "add": "Adding",
    "drop": "Removing",
    "try": "Changing",
}


class Title(NamedTuple):
    """Words of a notification's title before its figure, and after it; without `after` it has no figure."""

    words: str
    after: str = ""


_TIME = " of the time"
TITLES: dict[str, Title] = {
    "out_of_memory_prefill": Title("out of GPU memory in prefill"),
    "out_of_memory_decode": Title("out of GPU memory in decode"),
    "graph_memory_short": Title("CUDA graphs leave no GPU memory"),
    "out_of_memory_any": Title("out of GPU memory"),
    "restart_loop": Title("restarts again and again,", " times in 30 min"),
    "scheduler_stuck": Title("stuck: requests wait, nothing moves"),
    "crashed": Title("crashed"),
    "server_down": Title("server down"),
    "often_down": Title("often down,", _TIME),
    "conservativeness_ineffective": Title("retracting", "/min"),
    "retracting_too_often": Title("retracting", "/min"),
    "hybrid_pool_full": Title("second KV cache full", _TIME),
    "dp_imbalanced": Title("DP ranks imbalanced"),
    "running_at_limit": Title("running limit reached", _TIME),
    "grammar_queue": Title("grammars hold requests up", _TIME),
    "pd_queue": Title("the other side holds requests up", _TIME),
    "admission_recovering": Title("admission recovering", _TIME),
    "admission_standing_still": Title("no request starts though there is room", _TIME),
    "prefill_bound": Title("prefill bound", _TIME),
    "admission_too_conservative": Title("requests wait beside free KV cache", _TIME),
    "cuda_graph_not_covering": Title("CUDA graph not covering", _TIME),
    "cuda_graph_off": Title("CUDA graph off", _TIME),
    "memory_reserve_too_small": Title("memory reserve too small"),
    "latency_batch_too_large": Title("tokens slow,", " apart"),
    "requests_rejected": Title("requests rejected,", "/min"),
    "queue_too_long": Title("queue too long", _TIME),
    "clients_time_out": Title("clients time out,", " of requests"),
    "latency_queue": Title("TTFT too long by the queue for", " of requests"),
    "latency_prefill_between": Title("prefill interrupts decoding,", " of tokens late"),
    "latency_long_prompts": Title("TTFT too long by long prompts for", " of requests"),
    "client_too_slow": Title("client too slow", _TIME),
    "unexplained": Title("requests wait for no known reason", _TIME),
    "requests_failed": Title("requests fail,", " of them"),
    "time_to_first_token_burning_fast": Title("TTFT too long for", " of requests (1 h)"),
    "time_to_first_token_burning_slow": Title("TTFT too long for", " of requests (6 h)"),
    "inter_token_latency_burning_fast": Title("ITL too long for", " of tokens (1 h)"),
    "inter_token_latency_burning_slow": Title("ITL too long for", " of tokens (6 h)"),
    "metrics_disabled": Title("metrics disabled"),
    "log_silent": Title("log silent"),
    "sources_disagree": Title("sources disagree"),
    "memory_reserve_too_large": Title("memory reserve too large"),
    "format_drift": Title("format drift"),
    "exporter_down": Title("exporter down"),
    "exporter_gone": Title("exporter gone"),
    "scraped_too_seldom": Title("scraped too seldom"),
}


@dataclass(frozen=True, slots=True)
class Links:
    """Addresses for the links in notifications: of the runbooks and of Grafana. Without an address there is no link.

    `{alert}` in `runbooks` is the alert's name; else it is appended. Both may hold Prometheus templates over the alert's labels:
    `http://{{ $labels.instance }}/runbooks` leads to the exporter, which serves the pages.
    """

    runbooks: str | None = None
    grafana: str | None = None

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

    def runbook(self, row: Row) -> str:
        """Return the address of an alert's runbook, empty without one."""
        url = self.runbooks or ""
        return url.replace("{alert}", row.alert) if "{alert}" in url or not url else f"{url.rstrip('/')}/{row.alert}"

    def dashboard(self, row: Row) -> str:
        """Return the address of the board of an alert's server, or of its job's servers; empty without Grafana."""
        if self.grafana is None:
            return ""
        boards, job = f"{self.grafana.rstrip('/')}/d", "var-job={{ $labels.job | urlquery }}"
        if row.id == "exporter_gone":
            return f"{boards}/{FLEET}?{job}"
        return f"{boards}/{SERVER}?{job}&var-instance={{{{ $labels.instance | urlquery }}}}"


DEFAULT_LINKS = Links()


def alert_annotations(row: Row, links: Links) -> dict[str, str]:
    """Return the annotations of a row's alert by name; empty ones are left out.

    Two queries at most, because each is asked for each alert at each evaluation: the limit, and the exporter's advice.
    """
    who = "$labels.job" if row.id == "exporter_gone" else "$labels.instance"
    found = {
        "title": _title(row),
        "summary": summary(row),
        "description": f"{{{{ {who} }}}}: {_seen(row)}.",
        "advice": _advice(row),
        "will_not_help": _with_flag(row, f"will not help if {filled(row.remedy.not_if, _WORDS)}."),
        "cost": _with_flag(row, f"costs: {filled(row.remedy.cost, _WORDS)}") if row.remedy.cost else "",
        "runbook_url": links.runbook(row),
        "dashboard_url": links.dashboard(row),
    }
    return {name: text for name, text in found.items() if text}


def _query(series: str, row: Row, *, newest: bool = False) -> str:
    """Write the query of the last word of an exporter's series about a diagnosis, in a template."""
    asked = f'last_over_time({series}{{{_SELECTOR}, diagnosis="{row.id}"}}[15m])'
    return f"printf `{f'topk(1, {asked})' if newest else asked}` {_LABELS} | query"


def _title(row: Row) -> str:
    title = TITLES[row.id]
    if not title.after:
        return title.words
    form, unit = _FORMS[row.when.unit]
    if row.when.unit == "share":
        form = f"{form} | {_LONG}"
    gap = "" if title.after.startswith("/") else unit
    return f"{title.words} {{{{ $value | {form} }}}}{gap}{title.after}"


def _seen(row: Row) -> str:
    """Write what was measured, beside its limit."""
    if row.id in SEEN:
        return SEEN[row.id]
    form, unit = _FORMS[row.when.unit]
    value = f"{{{{ $value | {form} }}}}{unit}"
    plural = f'{{{{ if ne ($value | {form}) "1" }}}}s{{{{ end }}}}'
    words = filled(_MISSING.get(row.id, row.seen), {**_WORDS, "value": value, "s": plural})
    if row.when.kind == "event" or row.id in _MISSING:
        return words  # the limit is none
    limit = f"{{{{ . | first | value | {form} }}}}{unit}{'/min' if row.when.unit == 'per_minute' else ''}"
    return f"{words}{{{{ with {_query('sglang_tuning_condition_limit', row)} }}}} (limit {limit}){{{{ end }}}}"


def _advice(row: Row) -> str:
    """Write the exporter's advice, flag, present value, value to try and reason of one series; without it the table's."""
    flag = flag_of(row)
    words = f"{f'{flag} → ' if flag else ''}{filled(row.remedy.words, _WORDS)}: {filled(row.remedy.why, _WORDS)}"
    if row in PROMETHEUS:
        return words
    query = _query("sglang_tuning_advice_timestamp_seconds", row, newest=True)
    told = (
        '{{ $a := . | first }}{{ with $a | label "flag" }}{{ . }} {{ with $a | label "current" }}{{ . }} {{ end }}→ {{ end }}'
        '{{ $a | label "suggested" }}: {{ $a | label "text" }}'
    )
    return f"{{{{ with {query} }}}}{told}{{{{ else }}}}{words}{{{{ end }}}}"


def _with_flag(row: Row, words: str) -> str:
    """Write words about the row's own change: the exporter may advise another flag."""
    flag = flag_of(row)
    return f"{_ACTS[row.remedy.direction]} {flag} {words}" if flag else f"It {words}"
