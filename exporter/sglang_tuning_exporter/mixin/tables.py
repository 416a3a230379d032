"""Markdown tables made of the program's own tables: alerts and settings for the README, sources of facts for docs/sources.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_tuning_exporter.collect.scrape import MOST_BYTES, MOST_JSON_BYTES
from sglang_tuning_exporter.config import OPTIONS, Option
from sglang_tuning_exporter.diagnosis.row import Diagnosis
from sglang_tuning_exporter.diagnosis.table import ALERTS
from sglang_tuning_exporter.sglang.metrics import catalogue as facts
from sglang_tuning_exporter.sglang.metrics.exposition import LONGEST_LINE, MOST_LINES
from sglang_tuning_exporter.state.profiles import DEFAULT
from sglang_tuning_exporter.state.schedulers import MOST_SCHEDULERS

if TYPE_CHECKING:
    from collections.abc import Sequence


def inserts() -> dict[str, dict[str, str]]:
    """Return the text for each marked place: file → name of the place → text."""
    return {"README.md": {"alerts": alerts_table(MOST_IMPORTANT), "settings": settings_table(EVERYDAY)}}


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


def alerts_table(names: Sequence[str]) -> str:
    """Return these alerts with their advice as a Markdown table."""
    rows = {row.alert: row for row in ALERTS}
    head = ["| alert | when | what to change |", "|---|---|---|"]
    return "\n".join(
        [*head, *(f"| {link(rows[name], 'alerts')} | {when(rows[name])} | {advice(rows[name])} |" for name in names)]
    )


def settings_table(names: Sequence[str]) -> str:
    """Return these settings of `serve` as a Markdown table."""
    options = {option.name: option for option in OPTIONS}
    head = ["| flag | default | meaning |", "|---|---|---|"]
    return "\n".join(
        [
            *head,
            *(
                f"| `{options[name].flag}` | {default(options[name])} | {_brief(options[name].help)} |"
                for name in names
            ),
        ]
    )


def _brief(text: str) -> str:
    """Return a help text without its list of names."""
    return text.partition(": ")[0]


def default(option: Option) -> str:
    """Return a setting's default for a table."""
    return f"`{option.default_text}`" if option.default_text else "-"


def link(row: Diagnosis, alerts: str) -> str:
    """Return an alert's name as a link to its runbook; `alerts` is the path to that folder."""
    return f"[{row.alert}]({alerts}/runbooks/{row.alert}.md)"


def when(row: Diagnosis) -> str:
    """Return when an alert fires."""
    return row.summary.removesuffix(".") + (f" (profile {', '.join(row.profiles)})" if row.profiles else "")


def advice(row: Diagnosis) -> str:
    """Return what to change, where no figure can be computed."""
    turn = row.turn.filled(DEFAULT.figures)
    flag = "`--" + turn.arg.replace("_", "-") + "`" if turn.arg else ""
    return f"{turn.direction} {flag}: {turn.fallback}" if flag else turn.fallback


# The releases whose code was read for metrics and log lines.
RELEASES = (
    "0.3.0", "0.3.6.post3", "0.4.0.post2", "0.4.3.post4", "0.4.6.post5", "0.4.9.post6", "0.5.1.post3", "0.5.3.post3", "0.5.5.post3", "0.5.7",
    "0.5.9", "0.5.12", "0.5.16", "0.5.20", "0.5.23",
)  # fmt: skip

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
    ("graph_passes", "0.4.6.post5", "`cuda graph: True` in decode lines (one line in 40 batches)"),
    ("eager_passes", "0.4.6.post5", "`cuda graph: False` in decode lines (one line in 40 batches)"),
    ("retraction_events", "0.3.0", "`Decode out of memory happened.`, `KV cache pool is full. Retract requests.`"),
    ("retracted_requests", "0.3.0", "`#retracted_reqs`"),
    ("admitted_requests", "0.3.0", "`#new-seq` in prefill lines"),
    ("available_gpu_memory_gb", "0.4.3.post4", "`available_gpu_mem=` at start-up (0.4.7 on), before that `avail mem=` after the capture"),
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
    ("starts", "0.3.0", "`server_args=`"),
    ("liveness", "0.3.0", "ready, watchdog, failed health checks, dead processes"),
)  # fmt: skip


def _order(release: str) -> tuple[int, ...]:
    """Return a release as numbers to sort by: 0.5.10.post1 → (0, 5, 10, 1)."""
    return tuple(int(part) for part in release.replace("post", "").split("."))


def _cell(fact: str, release: str) -> str:
    metric = any(
        source.fact == fact and _order(first) <= _order(release) <= _order(last)
        for source in facts.SOURCES + facts.SERVER_SOURCES
        for first, last in [source.versions.split("-")]
    )
    log = any(name == fact and _order(since) <= _order(release) for name, since, _ in LOGGED)
    return {(True, True): "M L", (True, False): "M", (False, True): "L"}.get((metric, log), "·")


def sources_page() -> str:
    """Return docs/sources.md: the source of each fact in each release."""
    names = dict.fromkeys(
        [source.fact for source in facts.SOURCES] + [name for name, _, _ in LOGGED] + ["aborted_requests"]
    )
    lines = [
        "# Where each fact comes from",
        "",
        "Made by `sglang-tuning-exporter generate` from the exporter's own tables. M: a metric, L: the log, ·: not available in this release, and its series",
        "are absent. Where both are available, graph use comes from the metrics, retraction events and memory failures from the log, and the",
        "rest from the newer of the two.",
        "",
        "| fact | " + " | ".join(RELEASES) + " |",
        "|---" * (len(RELEASES) + 1) + "|",
        *(f"| {name} | " + " | ".join(_cell(name, release) for release in RELEASES) + " |" for name in names),
        "",
        "`/server_info` (0.5.6 on; `/get_server_info` from 0.3.5) adds the version, the resolved arguments and the running limit really in force (0.5.8 on);",
        "each is asked once a start. `/v1/loads` (0.5.8 on) has that limit by DP rank. From 0.5.18 on it counts prefill and decode steps, out of a",
        "snapshot that answers without the scheduler, and is asked after each scrape, at most every five seconds: [docs/capacity.md](capacity.md).",
        "",
        f"Of a page (the largest real one has 0.2 MB) are read {MOST_BYTES >> 20} MiB, {MOST_LINES} lines of up to {LONGEST_LINE} characters, and",
        f"{MOST_SCHEDULERS} DP ranks, of an answer in JSON {MOST_JSON_BYTES >> 20} MiB. Lines and ranks past",
        "that are counted in `sglang_tuning_capped_total{what}`; a page of more bytes is not read at all (`too_large`).",
        "",
        "## Metrics",
        "",
        "| fact | metric | releases | over ranks |",
        "|---|---|---|---|",
        *(
            f"| {fact} | `{source}` | {versions} | {aggregation} |"
            for fact, source, versions, aggregation in facts.describe()
        ),
        "",
        "## Log lines",
        "",
        "| fact | since | where |",
        "|---|---|---|",
        *(f"| {name} | {since} | {where} |" for name, since, where in LOGGED),
    ]
    return "\n".join(lines) + "\n"


def inserted(text: str, places: dict[str, str]) -> str:
    """Return `text` with the part between each pair of markers replaced."""
    for name, content in places.items():
        begin, end = f"<!-- generated: {name} -->", "<!-- /generated -->"
        before, found, rest = text.partition(begin)
        if found and end in rest:
            text = before + begin + "\n" + content + "\n" + end + rest.partition(end)[2]
    return text
