"""Rows about the data sources: metrics, log, and the exporter itself."""

from __future__ import annotations

from sglang_tuning_exporter.diagnosis.conditions.source import SourceTrouble
from sglang_tuning_exporter.diagnosis.evidence import UNRECOGNISED
from sglang_tuning_exporter.diagnosis.promql import (
    LONGEST_LOOKBACK,
    LOOKBACK,
    ON,
    SHORT_LOOKBACK,
    firing,
    largest_before,
    last_known,
)
from sglang_tuning_exporter.diagnosis.row import Diagnosis, Remedy, look
from sglang_tuning_exporter.diagnosis.rows.liveness import disabled

# Half an hour has 15 scrapes at two minutes, the longest interval that the rules support.
FEWEST_SCRAPES = 14

SOURCE_DIAGNOSES: tuple[Diagnosis, ...] = (
    Diagnosis(
        id="metrics_disabled",
        alert="SGLangMetricsDisabled",
        condition=SourceTrouble(
            f"{disabled(LOOKBACK)} == 1\nunless {ON} {firing('SGLangServerDown')}", trouble="metrics_disabled"
        ),
        summary="SGLang runs without metrics: only its log is available.",
        seen="/metrics answers 404",
        guide="SGLang's tuning guide: start with --enable-metrics --enable-cache-report",
        remedy=Remedy(
            "enable_metrics",
            "add",
            "add --enable-metrics --enable-cache-report",
            "Latency, prefix cache hits and aborted requests are only in the metrics.",
            "the release is older than 0.3.5: it has no metrics",
        ),
        hold="10m",
        keep_firing="5m",  # two missed scrapes at two minutes
    ),
    Diagnosis(
        id="log_silent",
        alert="SGLangLogSilent",
        severity="warning",
        condition=SourceTrouble(
            # Work that the metrics show long after the last batch line. It fires until a line comes.
            f"{last_known('sglang_tuning_log_up', SHORT_LOOKBACK)} == 0\nor {last_known('sglang_tuning_log_silent_seconds', SHORT_LOOKBACK)} > 60",
            trouble="log_silent",
            words="the log has no new batch lines",
        ),
        summary="SGLang's log is unreadable or has no new lines while the server works.",
        seen="{value}",
        guide="not in SGLang's guide: retractions and out-of-memory failures are only in the log",
        remedy=look(
            "check that the file grows, that the exporter may read it, and that --log-level is info",
            "Without the log the exporter misses out-of-memory failures and cannot count retractions.",
            "the server runs with --log-level warning on purpose: then it logs retractions and failures, but no batch lines",
        ),
        hold="2m",
        keep_firing="5m",  # a restarted exporter counts from zero
    ),
    Diagnosis(
        id="sources_disagree",
        alert="SGLangSourcesDisagree",
        severity="warning",
        condition=SourceTrouble(
            f"max without (fact) ({last_known('sglang_tuning_sources_disagree', SHORT_LOOKBACK)}) == 1"
        ),
        summary="SGLang's log and its metrics disagree.",
        seen="KV cache size or retractions differ between log and metrics",
        guide="not in SGLang's guide: figures of two servers, or an incomplete log, lead to wrong advice",
        remedy=look(
            "check that --log-file is the complete log of the server at --sglang-url",
            "--log-file is another server's log, or retraction lines do not reach the file.",
            "several servers write into one log: give each its own",
        ),
        keep_firing="5m",
    ),
    Diagnosis(
        id="format_drift",
        alert="SGLangFormatDrift",
        condition=SourceTrouble(
            "sum without (kind) (increase(sglang_tuning_log_unrecognised_total[1h])) > 0\n"
            f"or {last_known('sglang_tuning_metrics_unrecognised_families')} > 0",
            events=(UNRECOGNISED,),
            window="1h",
        ),
        summary="SGLang logs or exposes something that this exporter does not support.",
        seen="unknown log lines, keys or metric names",
        guide="not in SGLang's guide: a newer SGLang may log or expose a figure differently",
        remedy=Remedy(
            "",
            "update",
            "update the exporter; if that does not help, report your SGLang version",
            "All other figures stay available; a renamed one is absent.",
            "a plug-in of yours logs such lines",
        ),
        hold="10m",
    ),
    Diagnosis(
        id="exporter_down",
        alert="SGLangTuningExporterDown",
        severity="critical",
        condition=SourceTrouble(
            # Not `up == 0`: an exporter that answers every other scrape is useless too. It fires until the exporter
            # answers again.
            f"avg_over_time(up[5m]) < 0.5\nand {ON} ({last_known('sglang_tuning_build_info', LONGEST_LOOKBACK)} or {firing('SGLangTuningExporterDown')})"
        ),
        summary="Prometheus cannot scrape the SGLang exporter.",
        seen="most scrapes of the exporter's /metrics fail",
        guide="not in SGLang's guide: without the exporter there is no diagnosis",
        remedy=look(
            "check that the exporter runs, and read its log",
            "While the exporter is down, no other alert about this server can fire.",
            "server and exporter were taken out of service together",
        ),
        about="exporter",
        inhibits="warning",
    ),
    Diagnosis(
        id="exporter_gone",
        alert="SGLangTuningExporterGone",
        severity="critical",
        condition=SourceTrouble(
            f"count by (job) (last_over_time(sglang_tuning_build_info[{LONGEST_LOOKBACK}] offset {LOOKBACK})) > 0\n"
            f"unless on (job) group by (job) ({last_known('sglang_tuning_build_info')})\n"
            f"unless on (job) group by (job) ({last_known('up')})"
        ),
        summary="Prometheus has no SGLang exporter left to scrape in this job.",
        seen="the last target left service discovery within the last day",
        guide="not in SGLang's guide: without a target no scrape fails and no alert can fire",
        remedy=look(
            "check Prometheus' targets page and the system that runs the servers",
            "A target that leaves service discovery has no series, so no alert about its server can fire.",
            "the servers were taken out of service on purpose: silence the alert; it resolves a day later",
        ),
        about="job",
    ),
    Diagnosis(
        id="scraped_too_seldom",
        alert="SGLangScrapedTooSeldom",
        condition=SourceTrouble(
            # Failed scrapes count: this is about the interval.
            f"count_over_time(up[30m]) < {FEWEST_SCRAPES}\n"
            # The same target with the same labels for as long.
            f"and {largest_before('up', '30m')} >= 0\n"
            f"and {last_known('up', '10m')} >= 0\nand {ON} {last_known('sglang_tuning_build_info', LONGEST_LOOKBACK)}"
        ),
        summary="Prometheus scrapes the exporter too rarely for its alerts.",
        seen="more than two minutes between two scrapes",
        guide="not in SGLang's guide: the rules use windows of minutes and need two scrapes in each",
        remedy=look(
            "set scrape_interval of this job to 15s, at most 2m",
            "A rate needs two samples in its window; with fewer, most alerts never fire.",
            "the interval was just changed: the alert resolves within half an hour",
        ),
        hold="10m",
    ),
)
