"""Families about the sources: the scrape of SGLang, its log, and whether they agree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_tuning_exporter import __version__
from sglang_tuning_exporter.serve.metrics.families import counter, gauge, info, sound
from sglang_tuning_exporter.sglang.events import LINE_KINDS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric

    from sglang_tuning_exporter.serve.metrics.view import LogView, SidecarView

UNRECOGNISED_KINDS = ("batch_key", "batch_line", "retraction_line", "server_args")
CAPPED = ("dp_ranks", "long_metric_lines", "metric_lines", "refused_metric_lines")
SUSPICIOUS_KINDS = ("batch", "retraction", "out_of_memory", "startup", "rejection")


def sources(sidecar: SidecarView) -> Iterable[Metric]:
    """Tell where the figures come from, and how well."""
    health, config = sidecar.health, sidecar.config
    yield info("build", "The version of this exporter.", {"version": __version__})
    words = {True: "yes", False: "no"}
    yield info(
        "sources",
        "Where the figures come from: SGLang's /metrics, its log, or both.",
        {"metrics": words[config.sglang_url is not None], "log": words[bool(config.log_file)]},
    )
    up = gauge("up", "Whether the last scrape of SGLang's /metrics succeeded; absent without --sglang-url.")
    error = gauge("scrape_error_info", "Why SGLang could not be scraped; only while sglang_tuning_up is 0.", "reason")
    if config.sglang_url is not None:
        up.add_metric([], float(health.up is True))
        if health.up is False:
            error.add_metric([health.reason], 1.0)
    yield up
    yield error
    duration = gauge("scrape_duration_seconds", "Duration of the last scrape of SGLang in seconds.")
    if health.scrape_seconds is not None:
        duration.add_metric([], health.scrape_seconds)
    yield duration
    unknown = gauge("metrics_unrecognised_families", "SGLang families on the last page that no known release has.")
    if health.up:
        unknown.add_metric([], health.unrecognised)
    yield unknown
    capped = counter(
        "capped",
        "What was left out: lines of the server's page that are too many, too long or would have Prometheus refuse it, words of DP ranks beyond the most.",
        "what",
    )
    for what in CAPPED:
        capped.add_metric([what], sidecar.state.capped[what])
    yield capped
    errors = counter(
        "thread_errors", "Unexpected errors in the exporter's own threads; each one was restarted.", "thread"
    )
    for thread, number in sorted(sidecar.threads.errors.items()):
        errors.add_metric([thread], number)
    yield errors
    yield from _log(sidecar)


def _log(sidecar: SidecarView) -> Iterable[Metric]:
    if sidecar.log is not None:
        yield from _files(sidecar.log)
        yield from _lines(sidecar, sidecar.log)
        problem = gauge("state_file_up", "Whether positions and counters can be saved in --state-file.")
        if sidecar.log.state_file_problem is not None:
            problem.add_metric([], float(not sidecar.log.state_file_problem))
        yield problem


def _files(log: LogView) -> Iterable[Metric]:
    file_up = gauge("log_up", "Whether this log file is being followed.", "file")
    for status in log.files:
        file_up.add_metric([sound(status.path)], float(status.up))
    yield file_up
    past = gauge(
        "log_reading_past",
        "1 while what the log held at the exporter's start is still being read; the log's counters are absent until then.",
    )
    past.add_metric([], float(log.reads_the_past))
    yield past
    left_out = gauge("log_files_left_out", "Files that match --log-file and are not followed: there are too many.")
    left_out.add_metric([], log.left_out)
    yield left_out
    lost = counter(
        "log_files_lost",
        "Rotated or deleted files of the log that were gone before they had been read to their end, or may have been.",
    )
    lost.add_metric([], log.files_lost)
    yield lost
    overlong = counter("log_dropped_lines", "Lines of the log that were longer than 1 MiB, and not read.")
    overlong.add_metric([], log.dropped_lines)
    yield overlong


def _lines(sidecar: SidecarView, log: LogView) -> Iterable[Metric]:
    last = gauge("log_last_line_timestamp_seconds", "When the last line of the log arrived, in unix seconds.")
    if log.last_line_at is not None:
        last.add_metric([], log.last_line_at)
    yield last
    silent = gauge(
        "log_silent_seconds",
        "How long after the last batch line of the log the server was still seen at work by its metrics, in seconds; 0 while lines come.",
    )
    if sidecar.log_silent_seconds is not None:
        silent.add_metric([], sidecar.log_silent_seconds)
    yield silent
    lines = counter("log_lines", "Lines read from the log, by what they are.", "kind")
    for kind in LINE_KINDS:
        lines.add_metric([kind], log.lines[kind])
    yield lines
    unknown = counter(
        "log_unrecognised",
        "Log lines of a known head whose body or keys no known release prints: SGLang's format has drifted.",
        "kind",
    )
    for kind in UNRECOGNISED_KINDS:
        unknown.add_metric([kind], log.unrecognised[kind])
    yield unknown
    doubted = counter(
        "log_suspicious",
        "Lines that looked like an event of the server and were not counted, because nothing else bore them out.",
        "kind",
    )
    for kind in SUSPICIOUS_KINDS:
        doubted.add_metric([kind], sidecar.state.forgeries.suspicious[kind])
    yield doubted


def agreement(sidecar: SidecarView, now: float) -> Iterable[Metric]:
    """Compare what both sources tell."""
    family = gauge(
        "sources_disagree",
        "1 while log and metrics report different values for a fact: another server's log, or missing lines.",
        "fact",
    )
    state = sidecar.state
    counted = state.forgeries.disagrees(now) if state.log_is_read else None
    told = {"kv_pool_tokens": state.facts.pools_disagree, "retracted_requests": counted}
    if sidecar.log is not None:
        for fact, differs in told.items():
            if differs is not None:
                family.add_metric([fact], float(differs))
    yield family
