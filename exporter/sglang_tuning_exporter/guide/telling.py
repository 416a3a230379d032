"""Rows about where the figures come from: metrics, log, and the exporter itself."""

from __future__ import annotations

from sglang_tuning_exporter.guide.diagnosis import Diagnosis, Source, Turn

SOURCE_DIAGNOSES: tuple[Diagnosis, ...] = (
    Diagnosis(
        id="metrics_disabled",
        alert="SGLangMetricsDisabled",
        severity="info",
        condition=Source('sglang_tuning_scrape_error_info{reason="metrics_disabled"} == 1', trouble="metrics_disabled"),
        summary="SGLang runs without metrics: only its log can be read.",
        seen="/metrics answers 404",
        guide="start with --enable-metrics --enable-cache-report (E5)",
        turn=Turn(
            "enable_metrics",
            "add",
            "add --enable-metrics --enable-cache-report",
            "Latency, cache and abort figures exist only in the metrics.",
            "the server is older than 0.3.5, which has no metrics at all",
        ),
        hold="10m",
    ),
    Diagnosis(
        id="log_silent",
        alert="SGLangLogSilent",
        severity="warning",
        condition=Source(
            # Work that the metrics show long after the last batch line; of bursts, all but the first. It lasts until a line comes.
            "last_over_time(sglang_tuning_log_up[2m]) == 0"
            " or last_over_time(sglang_tuning_log_silent_seconds[2m]) > 60",
            trouble="log_silent",
            words="no batch line comes from the log",
        ),
        summary="SGLang's log cannot be read or has gone silent while the server works.",
        seen="{value}",
        guide="not in the guide: retractions and out-of-memory failures are told by the log",
        turn=Turn(
            "",
            "look",
            "see whether the file still grows and may be read, and whether --log-level lets batch lines through",
            "Without the log, out-of-memory failures go unseen and retractions cannot be counted as events.",
            "the server runs with --log-level warning on purpose: it prints retractions and failures, and no batch lines",
        ),
    ),
    Diagnosis(
        id="sources_disagree",
        alert="SGLangSourcesDisagree",
        severity="warning",
        condition=Source("max without (fact) (sglang_tuning_sources_disagree) == 1"),
        summary="SGLang's log and its metrics tell different things.",
        seen="pool size or retractions differ between the log and the metrics",
        guide="not in the guide: figures of two servers, or half of a log, lead to wrong advice",
        turn=Turn(
            "",
            "look",
            "see whether --log-file is the log of the server at --sglang-url, and whole",
            "The exporter was given another server's log, or retraction lines do not reach the file.",
            "several servers write into one log: give each its own",
        ),
    ),
    Diagnosis(
        id="format_drift",
        alert="SGLangFormatDrift",
        severity="info",
        condition=Source(
            "sum without (kind) (increase(sglang_tuning_log_unrecognised_total[1h])) > 0 or sglang_tuning_metrics_unrecognised_families > 0"
        ),
        summary="SGLang prints or exposes something that this exporter does not know.",
        seen="lines, keys or metric names that no known release has",
        guide="not in the guide: a newer SGLang may tell a figure in another way",
        turn=Turn(
            "",
            "update",
            "update to the newest exporter, and tell us which SGLang you run",
            "What is known goes on being read; a renamed figure would be absent.",
            "a plug-in of your own prints such lines",
        ),
        hold="10m",
    ),
    Diagnosis(
        id="exporter_down",
        alert="SGLangTuningExporterDown",
        severity="warning",
        condition=Source("up == 0 and on (job, instance) max_over_time(sglang_tuning_build_info[24h])"),
        summary="The exporter beside SGLang does not answer Prometheus.",
        seen="the exporter's /metrics could not be scraped",
        guide="not in the guide: without the exporter nothing of the above is seen",
        turn=Turn(
            "",
            "look",
            "look at its log and whether it runs",
            "No diagnosis is made while it is away.",
            "the server was taken out of service with it",
        ),
    ),
)
