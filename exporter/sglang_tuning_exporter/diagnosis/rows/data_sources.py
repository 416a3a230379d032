"""Rows about where the figures come from: metrics, log, and the exporter itself."""

from __future__ import annotations

from sglang_tuning_exporter.diagnosis.conditions import SourceTrouble
from sglang_tuning_exporter.diagnosis.evidence import UNRECOGNISED
from sglang_tuning_exporter.diagnosis.promql import EVER, EXCUSED, KNOWN, ON, before, firing, known
from sglang_tuning_exporter.diagnosis.row import Diagnosis, Turn
from sglang_tuning_exporter.diagnosis.rows.liveness import disabled

# Of half an hour's 15 at the longest interval that the rules hold for, two minutes.
FEWEST_SCRAPES = 14

SOURCE_DIAGNOSES: tuple[Diagnosis, ...] = (
    Diagnosis(
        id="metrics_disabled",
        alert="SGLangMetricsDisabled",
        severity="info",
        condition=SourceTrouble(
            f"{disabled(KNOWN)} == 1\nunless {ON} {firing('SGLangServerDown')}",
            trouble="metrics_disabled",
        ),
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
        keep_firing="5m",  # two missed scrapes that are two minutes apart
    ),
    Diagnosis(
        id="log_silent",
        alert="SGLangLogSilent",
        severity="warning",
        condition=SourceTrouble(
            # Work that the metrics show long after the last batch line; of bursts, all but the first. It lasts until a line comes.
            f"{known('sglang_tuning_log_up', EXCUSED)} == 0\nor {known('sglang_tuning_log_silent_seconds', EXCUSED)} > 60",
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
        keep_firing="5m",  # an exporter that has just started begins to count anew
    ),
    Diagnosis(
        id="sources_disagree",
        alert="SGLangSourcesDisagree",
        severity="warning",
        condition=SourceTrouble(f"max without (fact) ({known('sglang_tuning_sources_disagree', EXCUSED)}) == 1"),
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
        keep_firing="5m",
    ),
    Diagnosis(
        id="format_drift",
        alert="SGLangFormatDrift",
        severity="info",
        condition=SourceTrouble(
            "sum without (kind) (increase(sglang_tuning_log_unrecognised_total[1h])) > 0\n"
            f"or {known('sglang_tuning_metrics_unrecognised_families')} > 0",
            events=(UNRECOGNISED,),
            window="1h",
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
        severity="critical",
        condition=SourceTrouble(
            # Not `up == 0`: an exporter that answers every other time is as blind. Once told, until it answers again.
            f"avg_over_time(up[5m]) < 0.5\nand {ON} ({known('sglang_tuning_build_info', EVER)} or {firing('SGLangTuningExporterDown')})"
        ),
        summary="The exporter beside SGLang does not answer Prometheus.",
        seen="most scrapes of the exporter's /metrics fail",
        guide="not in the guide: without the exporter nothing of the above is seen",
        turn=Turn(
            "",
            "look",
            "look at its log and whether it runs",
            "No diagnosis is made while it is away, and no other alert of this server can come.",
            "the server was taken out of service with it",
        ),
        about="exporter",
        hides="warning",
    ),
    Diagnosis(
        id="exporter_gone",
        alert="SGLangTuningExporterGone",
        severity="critical",
        condition=SourceTrouble(
            f"count by (job) (last_over_time(sglang_tuning_build_info[{EVER}] offset {KNOWN})) > 0\n"
            f"unless on (job) group by (job) ({known('sglang_tuning_build_info')})\n"
            f"unless on (job) group by (job) ({known('up')})"
        ),
        summary="Prometheus has no SGLang exporter left to scrape in this job.",
        seen="its last target left service discovery within the last day",
        guide="not in the guide: without a target nothing fails, and nothing is seen",
        turn=Turn(
            "",
            "look",
            "look at Prometheus' targets page, and at what runs the servers",
            "A target that leaves service discovery takes its series with it: no alert about its server can come any more.",
            "the servers were taken out of service on purpose: silence it, it ends a day after they left",
        ),
        about="job",
    ),
    Diagnosis(
        id="scraped_too_seldom",
        alert="SGLangScrapedTooSeldom",
        severity="info",
        condition=SourceTrouble(
            # Failed scrapes count as well: this is about the interval.
            f"count_over_time(up[30m]) < {FEWEST_SCRAPES}\n"
            # The same target, with the same labels, as long as that.
            f"and {before('up', '30m')} >= 0\n"
            f"and {known('up', '10m')} >= 0\nand {ON} {known('sglang_tuning_build_info', EVER)}"
        ),
        summary="Prometheus scrapes the exporter too seldom for its alerts.",
        seen="more than two minutes lie between two scrapes",
        guide="not in the guide: the rules count within windows of some minutes, and need two scrapes in each",
        turn=Turn(
            "",
            "look",
            "set scrape_interval of this job to 15s, or at most 2m",
            "A rate needs two samples in its window; with fewer most alerts can never fire.",
            "somebody has just changed the interval: it ends within half an hour",
        ),
        hold="10m",
    ),
)
