"""Families about the data sources: the scrape of SGLang, its log, and whether both agree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sglang_tuning_exporter import __version__
from sglang_tuning_exporter.core.lines import ROWS
from sglang_tuning_exporter.serve.metrics.families import Family, counter, gauge, info, printable, single
from sglang_tuning_exporter.serve.metrics.view import LogView, SidecarView

LINE_KINDS = tuple(
    sorted({*(row.kind for row in ROWS), "access", "advice", "cut", "exception", "other", "server_error", "traceback"})
)
UNRECOGNISED_KINDS = ("batch_key", "batch_line", "retraction_line", "server_args")
CAPPED = ("dp_ranks", "long_metric_lines", "metric_lines", "refused_metric_lines")


def sources(sidecar: SidecarView, now: float) -> Iterable[Family]:
    """Return the families about where the figures come from, and whether those sources work."""
    watch, config, is_scraped = sidecar.watch, sidecar.config, sidecar.config.sglang_url is not None
    health, failure = sidecar.health, sidecar.watch.failure
    yield info("build", "The version of this exporter.", {"version": __version__})
    yield info(
        "sources",
        "Where the figures come from: SGLang's /metrics, its log, or both.",
        {"metrics": "yes" if is_scraped else "no", "log": "yes" if config.log_file else "no"},
    )
    doc = "Whether the last scrape of SGLang's /metrics succeeded; absent without --sglang-url."
    yield single("up", doc, float(watch.is_up is True) if is_scraped else None, "metrics")
    doc = "Why SGLang could not be scraped; only while sglang_tuning_up is 0."
    error = gauge("scrape_error_info", doc, "reason", source="metrics")
    yield error.with_samples([(failure.reason, 1.0)] if failure is not None else [])
    doc = "Duration of the last scrape of SGLang in seconds."
    yield single("scrape_duration_seconds", doc, health.scrape_seconds, "metrics")
    doc = "SGLang families on the last page that no known release has."
    yield single("metrics_unrecognised_families", doc, health.unrecognised if watch.is_up else None, "metrics")
    doc = "Input dropped by safety limits: lines of the server's page that are too many, too long or invalid, values of dp_rank beyond the limit."
    yield counter("capped", doc, "what", source="metrics").with_samples(
        (what, watch.server.capped[what]) for what in CAPPED
    )
    doc = "Whether a thread of the exporter runs: the one that follows the log, scrapes, asks, or reads --web-config. 0: it failed, and starts again."
    yield gauge("thread_up", doc, "thread").with_samples(
        (name, float(up)) for name, up in sorted(sidecar.threads.up.items())
    )
    doc = "Unexpected errors in the exporter's own threads; after four in a row the exporter ends."
    yield counter("thread_errors", doc, "thread").with_samples(sorted(sidecar.threads.errors.items()))
    if sidecar.log is not None:
        yield from _files(sidecar.log)
        yield from _lines(sidecar, sidecar.log, now)
    doc = "1 while log and metrics report different values for a fact: another server's log, or missing lines."
    disagree = gauge("sources_disagree", doc, "fact", source="metrics and log")
    facts = watch.disagreements(now)
    yield disagree.with_samples(facts.items() if sidecar.log is not None else ())


def web(external_url: str | None, *, is_tls: bool) -> Family:
    """Return the family with the address of this exporter's pages, for the links of boards."""
    return info(
        "web",
        "Where people reach this exporter's pages: --external-url (empty: the scraped address), and the scheme it serves.",
        {"external_url": printable(external_url), "scheme": "https" if is_tls else "http"},
    )


def answers(answered: Mapping[int, int]) -> Family:
    """Return the family that counts what this exporter answered to requests of its own."""
    doc = (
        "Requests to this exporter that were answered, by HTTP status: 401 and 429 of passwords, 500 of its own errors."
    )
    return counter("http_requests", doc, "code").with_samples(
        (str(code), answered.get(code, 0)) for code in sorted({200, 500, *answered})
    )


def web_config_up(*, is_up: bool) -> Family:
    """Return the family that shows whether the present web configuration file is in force."""
    doc = "Whether the present --web-config is in force; 0: it cannot be read or applied, and nobody is let in five seconds later."
    return single("web_config_up", doc, float(is_up))


def _files(log: LogView) -> Iterable[Family]:
    doc = "Whether this log file is being followed."
    family = gauge("log_up", doc, "file", source="log")
    yield family.with_samples((printable(file.path), float(file.up)) for file in log.files)
    doc = (
        "1 while lines from before the exporter's start are still being read; the log's counters are absent until then."
    )
    yield single("log_reading_past", doc, float(log.is_catching_up), "log")
    doc = "Files that match --log-file and are not followed: there are too many."
    yield single("log_files_left_out", doc, log.left_out, "log")
    doc = "Rotated or deleted files of the log that were gone, or may have been, before they were read to their end."
    yield counter("log_files_lost", doc, source="log").with_samples([(log.files_lost,)])
    doc = "Lines of the log that were longer than 1 MiB, and not read."
    yield counter("log_dropped_lines", doc, source="log").with_samples([(log.dropped_lines,)])
    problem, doc = log.state_file_problem, "Whether positions and counters can be saved in --state-file."
    yield single("state_file_up", doc, None if problem is None else float(not problem))


def _lines(sidecar: SidecarView, log: LogView, now: float) -> Iterable[Family]:
    doc = "When the last line of the log arrived, in unix seconds."
    yield single("log_last_line_timestamp_seconds", doc, log.last_line_at, "log")
    doc = "Seconds from the last batch line of the log to the last work seen in the metrics; 0 while lines come."
    yield single("log_silent_seconds", doc, sidecar.watch.silent_log_seconds(now), "log")
    doc = "Lines read from the log, by kind."
    family = counter("log_lines", doc, "kind", source="log")
    yield family.with_samples((kind, log.lines[kind]) for kind in LINE_KINDS)
    doc = "Log lines of a known kind with words or keys that no known release prints: SGLang's format has changed."
    unknown = counter("log_unrecognised", doc, "kind", source="log")
    yield unknown.with_samples([(kind, log.unrecognised[kind]) for kind in UNRECOGNISED_KINDS])
    doc = (
        "Lines of an event that SGLang's metrics refuted: by kind, and by what spoke against it (counter: the counter did not grow;"
        " works_on: the server went on; too_many: more waited than are kept). They are counted nowhere else."
    )
    doubtful = counter("log_doubtful", doc, "kind", "reason", source="metrics and log")
    yield doubtful.with_samples((*key, number) for key, number in sorted(sidecar.watch.doubtful.items()))
