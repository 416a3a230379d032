"""docs/reference/: every metric, alert and flag, from the tables and families that the exporter itself runs on."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.config import API_KEY_VARIABLE, ENVIRONMENT_PREFIX, OPTIONS, Option, add_arguments, resolve
from sglang_tuning_exporter.diagnosis.table import ALERTS
from sglang_tuning_exporter.mixin.records import records
from sglang_tuning_exporter.mixin.tables import advice, default, link, when
from sglang_tuning_exporter.serve.metrics import OF_METRICS, sections
from sglang_tuning_exporter.serve.metrics.families import PREFIX
from sglang_tuning_exporter.serve.metrics.web import web
from sglang_tuning_exporter.serve.security.active_config import up_family

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sglang_tuning_exporter.diagnosis.row import Diagnosis
    from sglang_tuning_exporter.serve.metrics.families import Family

_MADE = "Made by `sglang-tuning-exporter generate`"
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
# Where the figures of a section come from; of families that differ, by the beginning of their names.
_SOURCES = {
    "Data sources": "exporter",
    "Server": _BOTH,
    "GPU memory": "log, else `/server_info`",
    "Scheduler": _BOTH,
    "Capacity": "`/v1/loads`, metrics and log",
    "Failures": "log",
    "Findings": "computed",
    "Profile": "`--profile`, `--threshold`",
}
_OTHER_SOURCES = {
    "log_": "log",
    "scrape_": "metrics",
    "up": "metrics",
    "metrics_": "metrics",
    "capped": "metrics",
    "sources_disagree": "metrics and log",
    "state_file_up": "exporter",
    "server_arg": "log, else `/server_info`",
    "server_starts": "log, else metrics",
    "rejected_requests": "log",
    "liveness_": "log",
    "retraction_events": "log",
    "retracted_requests": "log, else metrics",
    "cuda_graph_max_batch_size": "log, else `/server_info`",
    "new_token_ratio": "log, else metrics",
    "state": "computed",
    "queue_wait_seconds": "computed",
    "cuda_graph_coverage_ratio": "computed",
}


def metrics_page() -> str:
    """Write every family that the exporter can expose, as Markdown."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    config = resolve(parser.parse_args(["--sglang-url", "http://127.0.0.1:30000", "--log-file", "server.log"]), {})
    sidecar = Sidecar(config)  # never started: its families have no samples, and their names, labels and help
    with sidecar.view() as now:
        found = sections(sidecar, now)
    lines = [
        "# Metrics",
        "",
        f"{_MADE} from the families that the exporter exposes at `/metrics`. A figure that this server does not expose or log is absent, never 0.",
        "Families of the sections Scheduler, Capacity and GPU memory also have the label `dp_rank` where the server has several DP ranks.",
        "SGLang's own series follow on the same page (`--no-passthrough` leaves them out), so a Prometheus that scrapes SGLang as well has each",
        "`sglang:*` series twice: scrape the exporter alone. `process_*` and `python_info` are the exporter's own process.",
        "",
    ]
    for title, families in found.items():
        lines += [f"## {title}", "", *_families(title, families), ""]
    lines += ["## Serving", "", *_families("Data sources", [web(None, is_tls=False), up_family()]), ""]
    lines += _recorded()
    return "\n".join(lines) + "\n"


def _families(title: str, families: Iterable[Family]) -> list[str]:
    head = ["| name | type | labels | unit | meaning | source |", "|---|---|---|---|---|---|"]
    return head + [_family(title, family) for family in families]


def _family(title: str, family: Family) -> str:
    labels = ", ".join(f"`{label}`" for label in family.names)
    unit = next((unit for end, unit in _UNITS.items() if family.name.endswith(end)), "-")
    meaning = family.documentation.replace("|", "\\|")
    return f"| `{family.sample_name}` | {family.type} | {labels or '-'} | {unit} | {meaning} | {_source(title, family.name)} |"


def _source(title: str, name: str) -> str:
    short = name.removeprefix(PREFIX)
    if name in OF_METRICS:
        return "metrics"
    return next((source for start, source in _OTHER_SOURCES.items() if short.startswith(start)), _SOURCES[title])


def _recorded() -> list[str]:
    names = sorted({record.name for record in records()})
    return [
        "## Recorded by the rules",
        "",
        "`alerts/rules/sglang-tuning.rules.yml` records these for its alerts and the boards:",
        "",
        *(f"- `{name}`" for name in names),
    ]


def alerts_page() -> str:
    """Write every alert with its advice, as Markdown."""
    lines = [
        "# Alerts",
        "",
        f"{_MADE} from the table of diagnoses, most urgent first. Each name leads to the alert's runbook.",
        "",
        "| alert | severity | for | when | what to change | it will not help if |",
        "|---|---|---|---|---|---|",
        *(_alert(row) for row in ALERTS),
    ]
    return "\n".join(lines) + "\n"


def _alert(row: Diagnosis) -> str:
    will_not = row.turn.will_not_help_if
    return f"| {link(row, '../../alerts')} | {row.severity} | {row.hold} | {when(row)} | {advice(row)} | {will_not or '-'} |"


def flags_page() -> str:
    """Write every setting of `serve`, as Markdown."""
    lines = [
        "# Settings",
        "",
        f"{_MADE} from the settings of `serve`. A flag wins over the environment variable, that over the file of `--config`, that over the",
        "default. The key in that file is the flag without dashes in front; lists and mappings are written as YAML has them.",
        "",
        "| flag | environment variable | key in the file | default | meaning |",
        "|---|---|---|---|---|",
        *(_flag(option) for option in OPTIONS),
        f"| `--config FILE.yml` | `{ENVIRONMENT_PREFIX}CONFIG` | - | - | a YAML file with the keys above |",
        f"| - | `{API_KEY_VARIABLE}` | - | - | SGLang's `--api-key`; `--api-key-file` wins over it |",
        "",
        "`report` and `backfill` also read `SGLANG_TUNING_PROFILE` and `SGLANG_TUNING_THRESHOLD`, `report` `SGLANG_TUNING_FORMAT`.",
        "The flags of the other commands: `sglang-tuning-exporter COMMAND --help`.",
    ]
    return "\n".join(lines) + "\n"


def _flag(option: Option) -> str:
    metavar = f" {option.metavar}" if option.metavar else ""
    names = ", ".join(f"`{flag}{metavar}`".replace("|", "\\|") for flag in (option.flag, *option.aliases))
    fallback = f"`{str(option.default).lower()}`" if option.switch else default(option)
    return (
        f"| {names} | `{option.variable}` | `{option.name}` | {fallback} | {option.help.replace('|', chr(92) + '|')} |"
    )
