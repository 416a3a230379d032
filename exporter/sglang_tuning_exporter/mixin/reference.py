"""Documentation made of the program's own tables: every metric, alert, flag, profile, diagnosis and source; tables of
the README.
"""

from __future__ import annotations

import re

from sglang_tuning_exporter import config
from sglang_tuning_exporter.collect import scrape
from sglang_tuning_exporter.config import profiles
from sglang_tuning_exporter.core import runbooks, server, sums
from sglang_tuning_exporter.core.diagnoses import ALL, Diagnosis, better_explained_by
from sglang_tuning_exporter.core.findings import STATE_WORDS
from sglang_tuning_exporter.mixin import alerts
from sglang_tuning_exporter.mixin._rendering import filled, render
from sglang_tuning_exporter.mixin.boards.looks import ADVICE_IN_WORDS
from sglang_tuning_exporter.serve.metrics import reference_sections
from sglang_tuning_exporter.serve.metrics.families import Family
from sglang_tuning_exporter.sglang import exposition, metrics

# The unit by the end of a name, as Prometheus's naming guide has it.
_UNITS = {
    "_timestamp_seconds": "unix seconds",
    "_tokens_per_second": "tokens/s",
    "_seconds": "seconds",
    "_bytes": "bytes",
    "_ratio": "0-1",
    "_tokens": "tokens",
    "_requests": "requests",
    "_requests_limit": "requests",
    "_batches": "batches",
    "_lines": "lines",
    "_files": "files",
    "_batch_size": "requests",
}
_BOTH = "metrics, else log"
# Where the figures of a section come from; a family that differs has its own `source`.
_SOURCES = {
    "Data sources": "exporter",
    "Server": _BOTH,
    "GPU memory": "log, else `/server_info`",
    "Scheduler": _BOTH,
    "Failures": "log",
    "Findings": "computed",
    "Profile": "`--profile`, `--threshold`",
    "Serving": "exporter",
}
# What a workload must be like for a profile to suit it.
_SUITS = {
    "online": (
        "Users or programs wait for each answer. An empty queue is good; the limit of a queue is its estimated wait."
    ),
    "offline": "Batch jobs: throughput matters, latency does not. An empty queue wastes capacity.",
    "long_context": "As `online`, with prompts of tens of thousands of tokens: time to first token may be longer.",
    "multi_turn": (
        "As `online`, with conversations or agents that send the same prefix again: the prefix cache matters."
    ),
}
assert _SUITS.keys() == profiles.PROFILES.keys()
# Facts in the log, since which release, and where. The fixtures under tests/data/logs have such lines.
LOGGED: tuple[tuple[str, str, str], ...] = (
    ("running", "0.3.0", "`#running-req` in decode and prefill lines"),
    ("queued", "0.3.0", "`#queue-req` in decode and prefill lines"),
    ("full_usage", "0.3.0", "`token usage`, `full token usage`"),
    ("swa_usage", "0.4.9.post6", "`swa token usage`"),
    ("mamba_usage", "0.5.3.post3", "`mamba usage`"),
    ("used_tokens", "0.3.0", "`#token`"),
    ("kv_pool_tokens", "0.3.0", "`max_total_num_tokens=` at start-up"),
    ("generation_throughput", "0.3.0", "`gen throughput (token/s)`"),
    ("new_token_ratio", "0.3.0", "`#new_token_ratio: a -> b`, with a retraction only"),
    ("replayed_batches", "0.4.6.post5", "`cuda graph: True` in decode lines (one line in 40 batches)"),
    ("eager_batches", "0.4.6.post5", "`cuda graph: False` in decode lines (one line in 40 batches)"),
    ("retraction_events", "0.3.0", "`Decode out of memory happened.`, `KV cache pool is full. Retract requests.`"),
    ("retracted_requests", "0.3.0", "`#retracted_reqs`"),
    ("admitted_requests", "0.3.0", "`#new-seq` in prefill lines"),
    ("available_gpu_memory_gb", "0.4.3.post4",
        "`available_gpu_mem=` at start-up (0.4.7 on), before that `avail mem=` after the capture"),
    ("graph_memory_gb", "0.4.3.post4", "`Capture … end. … mem usage=` at start-up"),
    ("weight_memory_gb", "0.4.3.post4", "`Load weight end. … mem usage=` at start-up"),
    ("kv_memory_gb", "0.4.3.post4", "`KV Cache is allocated. … size:` at start-up"),
    ("queues.bootstrap", "0.5.12", "`#bootstrap-req`"),
    ("queues.prealloc", "0.5.3.post3", "`#prealloc-req`"),
    ("queues.inflight", "0.5.3.post3", "`#inflight-req`"),
    ("queues.transfer", "0.5.3.post3", "`#transfer-req`"),
    ("queues.host_receive", "0.5.23", "`#host-receive-req`"),
    ("arguments", "0.3.0", "`server_args=` at start-up"),
    ("out_of_memory", "0.3.0", "`… out of memory. Try to lower …`, `OutOfMemoryError`, `Capture cuda graph failed`"),
    ("server_starts", "0.3.0", "`server_args=`"),
    ("liveness", "0.3.0", "ready, watchdog, failed health checks, dead processes"),
)  # fmt: skip

# The alerts and the settings that the README shows.
MOST_IMPORTANT = (
    "SGLangServerDown",
    "SGLangSchedulerStuck",
    "SGLangOutOfMemoryDecode",
    "SGLangRetractingTooOften",
    "SGLangQueueTooLong",
    "SGLangTimeToFirstTokenBurningFast",
)
EVERYDAY = ("sglang_url", "log_file", "profile", "listen_address", "threshold", "state_file", "web_config")


def files() -> dict[str, str]:
    """Return every page: repository path → Markdown."""
    words = {
        "advice": _advice,
        "default": _default,
        "link": _link,
        "when": _when,
        "escaped": _escaped,
        "duration": _duration,
        "unit": _condition_unit,
    }
    return {
        "docs/sources.md": _sources(),
        "docs/diagnoses.md": render(
            "diagnoses.md.j2",
            diagnoses=ALL,
            evidence=_evidence,
            better=better_explained_by,
            states=sums.STATES,
            state_words=STATE_WORDS,
            **words,
        ),
        "docs/reference/profiles.md": render(
            "profiles.md.j2", profiles=profiles.PROFILES, thresholds=profiles.THRESHOLDS, suits=_SUITS, typed=_typed
        ),
        "docs/reference/alerts.md": render("alerts.md.j2", alerts=runbooks.MOST_SEVERE_FIRST, **words),
        "docs/reference/metrics.md": _metrics(),
        "docs/reference/flags.md": render(
            "flags.md.j2",
            options=config.OPTIONS,
            prefix=config.ENVIRONMENT_PREFIX,
            api_key=config.API_KEY_VARIABLE,
            **words,
        ),
    }


def _default(option: config.Option) -> str:
    return f"`{option.default_text}`" if option.default_text else "-"


def _link(row: Diagnosis, alerts: str) -> str:
    """Return an alert's name as a link to its runbook; `alerts` is the path to that folder."""
    return f"[{row.alert}]({alerts}/runbooks/{row.alert}.md)"


def _when(row: Diagnosis) -> str:
    of = f" (profile {', '.join(row.profiles)})" if row.profiles else ""
    return filled(row.summary).removesuffix(".") + of


def _advice(row: Diagnosis) -> str:
    """Return what to change, where no figure can be computed, with its flag as code."""
    words = ADVICE_IN_WORDS[row.id]
    return words.replace(row.remedy.flag, f"`{row.remedy.flag}`", 1) if row.remedy.flag else words


def _evidence(row: Diagnosis) -> str:
    """Return what is measured, and its limit where that is the same for every server."""
    when = row.when
    named = filled(when.name) or filled(row.summary).removesuffix(".")
    if when.kind == "fact" and (callable(when.limit) or not when.limit):
        return named
    limit = f"{when.limit:g}" if isinstance(when.limit, float) else f"`{when.limit}`"
    of = ""
    if when.kind == "share":
        signal, limit = when.counts[0].partition("/")[0], "`frequent_share`"
        states = " or ".join(f"`{each.partition('/')[2]}`" for each in when.counts)
        of = f" (`{signal}` in {states})"
    return f"{named}{of} {when.side} {limit}"


def _duration(seconds: float) -> str:
    return f"{seconds / 60:g} min" if seconds else "at once"


def _condition_unit(row: Diagnosis) -> str:
    """Return the unit of a condition. Where low is bad it is what is missing: above its limit is always bad."""
    unit = {"per_minute": "per minute", "words": "-"}.get(row.when.unit, row.when.unit)
    return f"{unit} missing" if row.when.side == "below" else unit


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _typed(setting: profiles.Setting) -> str:
    flag = "--" + setting.arg.replace("_", "-")
    if setting.is_switch:
        return f"`{flag}`" if setting.value else f"no `{flag}`"
    return f"`{flag} {setting.value if isinstance(setting.value, str) else f'{setting.value:g}'}`"


def with_tables(readme: str) -> str:
    """Return the README with its tables of alerts and settings, each between its markers."""
    alerts = [runbooks.BY_ALERT[name] for name in MOST_IMPORTANT]
    options = [option for name in EVERYDAY for option in config.OPTIONS if option.name == name]
    tables = {
        "alerts": [
            ("alert", "when", "what to change"),
            *((_link(row, "alerts"), _when(row), _advice(row)) for row in alerts),
        ],
        "settings": [
            ("flag", "default", "meaning"),
            # a help text without its list of names
            *((f"`{each.flag}`", _default(each), each.help.partition(": ")[0]) for each in options),
        ],
    }
    for name, table_rows in tables.items():
        head, *lines = (f"| {' | '.join(row)} |" for row in table_rows)
        table = "\n".join([head, "|---" * len(table_rows[0]) + "|", *lines])
        begin, end = f"<!-- generated: {name} -->", "<!-- /generated -->"
        before, found, rest = readme.partition(begin)
        if found and end in rest:
            readme = f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}"
    return readme


def _sources() -> str:
    """Write the sources of each fact, with the releases that have them."""
    facts: dict[str, tuple[list[str], list[str]]] = {}
    for fact, metric, label, versions in metrics.describe():
        names, _ = facts.setdefault(fact, ([], []))
        names.append(_escaped(f"`{metric}{label}` {versions}"))
    for fact, since, where in LOGGED:
        _, lines = facts.setdefault(fact, ([], []))
        lines.append(f"{where} {since}+")
    return render(
        "sources.md.j2",
        facts=facts,
        most_bytes=scrape.MOST_BYTES,
        most_lines=exposition.MOST_LINES,
        longest_line=exposition.LONGEST_LINE,
        most_schedulers=server.MOST_SCHEDULERS,
    )


def _metrics() -> str:
    """Write every family that the exporter can expose."""
    return render(
        "metrics.md.j2",
        sections=reference_sections(),
        columns=_columns,
        recorded=sorted(set(re.findall(r"record: (\S+)", alerts.files()["alerts/rules/sglang-tuning.rules.yml"]))),
    )


def _columns(title: str, family: Family) -> tuple[str, ...]:
    """Return a family as the columns of a table."""
    labels = ", ".join(f"`{label}`" for label in family.names)
    unit = next((unit for end, unit in _UNITS.items() if family.name.endswith(end)), "-")
    meaning = _escaped(family.documentation)
    return f"`{family.sample_name}`", family.type, labels or "-", unit, meaning, family.source or _SOURCES[title]
