"""Every family of `/metrics`: its name, its help, and its samples, made anew for every scrape.

A figure that is not known has no sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from sglang_tuning_exporter import __version__
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.config import profiles, resolve
from sglang_tuning_exporter.core import alerts, lines, sums
from sglang_tuning_exporter.core import server as servers
from sglang_tuning_exporter.core.diagnoses import BY_ID
from sglang_tuning_exporter.core.events import ENDINGS, OUT_OF_MEMORY_PHASES
from sglang_tuning_exporter.core.progress import STAGES
from sglang_tuning_exporter.core.scheduler import Scheduler
from sglang_tuning_exporter.serve.metrics.families import (
    Family,
    Ranks,
    by_rank,
    counter,
    gauge,
    info,
    printable,
    shortened,
    single,
)

if TYPE_CHECKING:
    from sglang_tuning_exporter.collect.log import Logbook

__all__ = ["collect", "reference_sections", "serving"]
MOST_END_WORDS = 50  # different ones of one process: each is a series in Prometheus


def sections(sidecar: Sidecar, now: float) -> dict[str, list[Family]]:
    """Return every family by its heading in the reference, those without samples included."""
    return {
        "Data sources": [*sources(sidecar, now)],
        "Server": [*server(sidecar, now)],
        "GPU memory": [*memory(sidecar)],
        "Scheduler": [*schedulers(sidecar, now)],
        "Failures": [*failures(sidecar, now)],
        "Findings": [*findings(sidecar, now)],
        "Profile": [*thresholds(sidecar)],
    }


def collect(sidecar: Sidecar) -> list[Family]:
    """Return all `sglang_tuning_*` families that have samples, at one moment.

    Rules and boards rely on their names, labels and meanings. While older lines of the log are read, the log's counters
    are left out: Prometheus would count their increase as present events.
    """
    with sidecar.view() as now:
        families = [family for section in sections(sidecar, now).values() for family in section if family.samples]
        if sidecar.log is not None and sidecar.log.is_catching_up:
            families = [family for family in families if family.type != "counter" or family.source == "metrics"]
    return families


def reference_sections() -> dict[str, list[Family]]:
    """Return every family by its heading: names, labels and help, by an exporter that was never started."""
    config = resolve({"sglang_url": "http://localhost:30000", "log_file": ["server.log"]}, {})
    sidecar = Sidecar(config)
    with sidecar.view() as now:
        return sections(sidecar, now) | {"Serving": serving(None, {}, is_tls=False, is_up=True)}


LINE_KINDS = tuple(
    sorted(
        {
            *(row.kind for row in lines.MESSAGES),
            "access",
            "advice",
            "cut",
            "exception",
            "other",
            "server_error",
            "traceback",
        }
    )
)
UNRECOGNISED_KINDS = ("batch_key", "batch_line", "retraction_line", "server_args")
CAPPED = ("dp_ranks", "long_metric_lines", "metric_lines", "pages", "refused_metric_lines")


def sources(sidecar: Sidecar, now: float) -> Iterable[Family]:
    """Return the families about the sources of the figures, and whether these work."""
    config, is_scraped = sidecar.config, sidecar.config.sglang_url is not None
    yield info("build", "The version of this exporter.", {"version": __version__})
    yield info(
        "sources",
        "Where the figures come from: SGLang's /metrics, its log, or both.",
        {"metrics": "yes" if is_scraped else "no", "log": "yes" if config.log_file else "no"},
    )
    yield from _scrapes(sidecar, is_scraped=is_scraped)
    doc = (
        "Whether a thread of the exporter runs: the one that follows the log, scrapes, asks, or reads --web-config."
        " 0: it failed, and starts again."
    )
    yield gauge("thread_up", doc, "thread").with_samples(
        (name, float(up)) for name, up in sorted(sidecar.threads.up.items())
    )
    doc = "Unexpected errors in the exporter's own threads; after four in a row the exporter ends."
    yield counter("thread_errors", doc, "thread").with_samples(sorted(sidecar.threads.errors.items()))
    doc = "1 while log and metrics report different values for a fact: another server's log, or missing lines."
    disagree = gauge("sources_disagree", doc, "fact", source="metrics and log")
    if sidecar.log is not None:
        yield from _files(sidecar.log)
        yield from _lines(sidecar, sidecar.log, now)
        disagree.with_samples(sidecar.watch.disagreements(now).items())
    yield disagree


def _scrapes(sidecar: Sidecar, *, is_scraped: bool) -> Iterable[Family]:
    watch = sidecar.watch
    doc = "Whether the last scrape of SGLang's /metrics succeeded; absent without --sglang-url."
    yield single("up", doc, float(watch.is_up is True) if is_scraped else None, "metrics")
    doc = "Why SGLang could not be scraped; only while sglang_tuning_up is 0."
    error = gauge("scrape_error_info", doc, "reason", source="metrics")
    yield error.with_samples([] if watch.failure is None else [(watch.failure.reason, 1.0)])
    doc = "Duration of the last scrape of SGLang in seconds."
    yield single("scrape_duration_seconds", doc, sidecar.scrape_seconds, "metrics")
    doc = "SGLang families on the last page that no known release has."
    unknown = sidecar.unrecognised_families if watch.is_up else None
    yield single("metrics_unrecognised_families", doc, unknown, "metrics")
    doc = (
        "Input dropped by safety limits: lines of the server's page that are too many, too long or invalid, pages whose"
        " counters cannot be true beside those before and after, values of dp_rank beyond the limit."
    )
    yield counter("capped", doc, "what", source="metrics").with_samples(
        (what, watch.server.capped[what]) for what in CAPPED
    )


def serving(external_url: str | None, answered: Mapping[int, int], *, is_tls: bool, is_up: bool | None) -> list[Family]:
    """Return the families of this exporter's own answers.

    `is_up` says whether the web configuration file is in force; it is None without such a file.
    """
    doc = (
        "Requests to this exporter that were answered, by HTTP status: 401 and 429 of passwords, 500 of its own errors."
    )
    answers = counter("http_requests", doc, "code")
    doc = (
        "Whether the present --web-config is in force; 0: it cannot be read or applied, and nobody is let in five"
        " seconds later."
    )
    return [
        info(
            "web",
            "Where people reach this exporter's pages: --external-url (empty: the scraped address), and the scheme it"
            " serves.",
            {"external_url": printable(external_url), "scheme": "https" if is_tls else "http"},
        ),
        single("web_config_up", doc, None if is_up is None else float(is_up)),
        answers.with_samples((str(code), answered.get(code, 0)) for code in sorted({200, 500, *answered})),
    ]


def _files(log: Logbook) -> Iterable[Family]:
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


def _lines(sidecar: Sidecar, log: Logbook, now: float) -> Iterable[Family]:
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
        "Lines of an event that SGLang's metrics refuted: by kind, and by what spoke against it (counter: the counter"
        " did not grow; works_on: the server went on; too_many: more waited than are kept). They are counted nowhere"
        " else."
    )
    doubtful = counter("log_doubtful", doc, "kind", "reason", source="metrics and log")
    yield doubtful.with_samples((*key, number) for key, number in sorted(sidecar.watch.doubtful.items()))


JUDGED = ("time_to_first_token", "inter_token")  # the latencies that profiles have objectives for
# Arguments with a series of their own: only numbers and switches, because text may be secret.
SHOWN = (
    "schedule_conservativeness", "mem_fraction_static", "max_running_requests", "max_queued_requests",
    "max_total_tokens", "chunked_prefill_size", "max_prefill_tokens", "cuda_graph_max_bs", "cuda_graph_max_bs_decode",
    "tp_size", "dp_size", "pp_size", "page_size", "context_length", "disable_cuda_graph", "disable_decode_cuda_graph",
    "disable_radix_cache", "enable_dp_attention", "enable_torch_compile", "enable_mixed_chunk", "decode_log_interval",
    "stream_interval", "num_continuous_decode_steps", "swa_full_tokens_ratio",
)  # fmt: skip
_COUNTED = {
    "aborted_requests": "Requests that their clients gave up, as the server counts them.",
    "started_requests": "Requests, streamed or not, that got their first token, as the server counts them.",
    "finished_requests": "Requests that ended, as the server counts them.",
}


def server(sidecar: Sidecar, now: float) -> Iterable[Family]:
    """Return the families about release, arguments, requests, liveness and latencies."""
    state, facts = sidecar.watch.server, sidecar.watch.server.facts
    page, counted = state.page, state.counted
    shown = {
        "version": facts.version or facts.release,
        "model_name": (page is not None and page.model_name)
        or facts.word("served_model_name")
        or facts.word("model_path"),
        "engine_type": facts.role or facts.role_seen,
    }
    yield info(
        "server",
        "Release, model and engine as the server reports them (empty: not reported), and the profile in force.",
        {name: shortened(word) for name, word in shown.items()} | {"profile": state.profile.name},
    )
    doc = "A numeric argument of the running server, as resolved by it (switches are 0 or 1)."
    arguments = gauge("server_arg", doc, "arg", source="log, else `/server_info`")
    yield arguments.with_samples((arg, value) for arg in sorted(SHOWN) if (value := facts.number(arg)) is not None)
    doc = "Starts of the server seen by this exporter."
    yield counter("server_starts", doc, source="log, else metrics").with_samples([(counted["server_starts"],)])
    for name, doc in _COUNTED.items():
        known = page is not None and getattr(page, name) is not None
        yield counter(name, doc, source="metrics").with_samples([(counted[name],)] if known or name in counted else [])
    doc = (
        "Requests that SGLang rejected because its queue was full, or they waited for SGLANG_REQ_WAITING_TIMEOUT:"
        " answered with 503, or a stream with an error."
    )
    is_counted = bool(sidecar.config.log_file) or (page is not None and page.answered_requests is not None)
    yield counter("rejected_requests", doc, source="metrics, else log").with_samples(
        [(counted["rejected_requests"],)] if is_counted else []
    )
    doc = "Requests answered with 500, and streams that an exception ended; absent before the first one."
    failed = [(counted["server_errors"],)] if counted["server_errors"] else []
    yield counter("server_errors", doc, source="metrics, else log").with_samples(failed)
    doc = (
        "Liveness events in the log: ready, draining, failed starts, crashes, watchdog timeouts, failed health checks."
    )
    yield from _events(
        sidecar,
        now,
        counter("liveness_events", doc, "event", source="log"),
        gauge("liveness_event_age_seconds", "Seconds since this event was last in the log.", "event", source="log"),
        {event: f"liveness_events.{event}" for event in sums.LIVENESS},
    )
    doc = "Latencies that the server observed since the exporter started."
    seen = counter("latency_observations", doc, "latency", source="metrics")
    # From the first scrape on: a family that is not on the first page had no observations before.
    observed = JUDGED if page is not None else ()
    yield seen.with_samples([(each, counted[f"latency_observations.{each}"]) for each in observed])
    doc = "Those above the profile's objective (estimated inside a histogram's bucket)."
    missed = counter("latency_breaches", doc, "latency", source="metrics")
    judged = [each for each in observed if state.objectives[each] is not None]
    yield missed.with_samples([(each, counted[f"latency_breaches.{each}"]) for each in judged])
    doc = "When a request last ran or waited, in unix seconds."
    at = state.last.get("requests")
    yield single("last_request_timestamp_seconds", doc, None if at is None else sidecar.unix(at))


def memory(sidecar: Sidecar) -> Iterable[Family]:
    """Return the families about GPU memory, as reported at the start."""
    facts = sidecar.watch.server.facts
    doc = "GPU memory left when the server had started (available_gpu_mem); absent on a CPU server."
    left = gauge("available_gpu_memory_bytes", doc)
    by_rank: dict[int | None, float] = {dp: gb for dp, gb in facts.left.items() if dp is not None}
    known = facts.reserve_gb
    for dp, each in sorted(by_rank.items(), key=str) if known is not None else ():
        left.add_metric([], each * profiles.GIGABYTE, dp)
    if known is not None and not by_rank:
        left.add_metric([], known * profiles.GIGABYTE)
    yield left
    for name, doc, gigabytes in (
        ("gpu_memory", "GPU memory free before the weights were loaded (avail mem).", facts.capacity_gb),
        ("weights", "GPU memory of one rank's part of the weights, a draft model's included.", facts.weights_gb),
        ("kv_pool", "GPU memory of one rank's KV cache, a draft model's included.", facts.pools_gb),
        ("cuda_graph_memory", "GPU memory of the captured graphs on one rank.", facts.gigabytes("graph")),
    ):
        size = None if gigabytes is None or facts.is_cpu else gigabytes * profiles.GIGABYTE
        yield single(f"{name}_bytes", doc, size)
    doc = "The largest decode batch with a captured graph."
    yield single("cuda_graph_max_batch_size", doc, None if facts.without_graph else facts.largest_captured)
    doc = "1 where decode batches run without a CUDA graph because of an argument or of the device."
    yield single("cuda_graph_off", doc, float(bool(facts.without_graph)))


def failures(sidecar: Sidecar, now: float) -> Iterable[Family]:
    """Return the families about out-of-memory failures in the log, by phase."""
    doc = "Fatal out-of-memory failures in the log, by phase. A retraction is none."
    yield from _events(
        sidecar,
        now,
        counter("out_of_memory", doc, "phase"),
        gauge("out_of_memory_age_seconds", "Seconds since the last out-of-memory failure in the log.", "phase"),
        {phase: f"out_of_memory.{phase}" for phase in OUT_OF_MEMORY_PHASES},
    )


def _events(sidecar: Sidecar, now: float, counts: Family, ages: Family, named: Mapping[str, str]) -> Iterable[Family]:
    """Return both families with samples: how often each event of the log happened, and how long ago the last one was.

    The age is needed because a counter that is first seen above 0 cannot show whether its events are recent.
    """
    state = sidecar.watch.server
    names = named.items() if sidecar.config.log_file else ()
    yield counts.with_samples((event, state.counted[name]) for event, name in names)
    yield ages.with_samples((event, max(now - state.last[name], 0.0)) for event, name in names if name in state.last)


def thresholds(sidecar: Sidecar) -> Iterable[Family]:
    """Return the family of the thresholds in force, for boards and rules."""
    profile = sidecar.watch.server.profile
    yield gauge("threshold", "What the profile in force calls healthy.", "signal", "bound").with_samples(profile.bounds)


def schedulers(sidecar: Sidecar, now: float) -> Iterable[Family]:
    """Return the families of each scheduler."""
    server = sidecar.watch.server
    ranks = by_rank(server.schedulers)
    lives = by_rank({dp: server.life(dp) for dp in server.lives.keys() - server.absent})
    recent = server.window(servers.COVERAGE_SECONDS, now)
    yield from _waiting(ranks, server, recent)
    yield from _pools(ranks, lives, server, now)
    yield from _batches(ranks, lives, recent)
    yield from _retractions(lives, sidecar)
    yield from _states(ranks, lives, now)


def _waiting(ranks: Ranks[Scheduler], server: servers.Server, recent: sums.Totals) -> Iterable[Family]:
    doc = "Requests waiting (#queue-req, num_queue_reqs)."
    yield gauge("queued_requests", doc).of_each(ranks, lambda r: r.shown.queued)
    doc = "Requests running (#running-req, num_running_reqs); with pipeline parallelism those of one micro batch."
    yield gauge("running_requests", doc).of_each(ranks, lambda r: r.shown.running)
    doc = "Requests that may run at once (max_running_requests); with pipeline parallelism a micro batch's share."
    yield gauge("running_requests_limit", doc).of_each(ranks, lambda r: server.facts.limit(r.dp))
    doc = "Estimated mean wait in the queue over the last 10 minutes: requests waiting / requests started per second."
    yield gauge("queue_wait_seconds", doc, source="computed").of_each(ranks, lambda r: r.wait(recent))
    doc = "Requests waiting elsewhere than in the main queue: for a grammar, or in a queue of disaggregation."
    waiting = gauge("waiting_requests", doc, "queue")
    yield waiting.of_all(ranks, _elsewhere)
    doc = "Prompt tokens that wait to be computed (#pending-token)."
    yield gauge("pending_tokens", doc).of_each(
        ranks, lambda r: r.shown.pending[0] if r.shown.pending is not None else None
    )


def _elsewhere(rank: Scheduler) -> list[tuple[str, float]]:
    shown = rank.shown
    grammar = {} if shown.grammar_queued is None else {"grammar": shown.grammar_queued}
    return sorted((shown.queues | grammar).items())


def _pools(ranks: Ranks[Scheduler], lives: Ranks[sums.Totals], server: servers.Server, now: float) -> Iterable[Family]:
    doc = "Used share of the KV cache, 0-1 (token usage)."
    yield gauge("token_usage_ratio", doc, "pool").of_all(
        ranks, lambda r: r.shown.usages.items() if r.moment(now).activity != sums.UNKNOWN else ()
    )
    doc = "Capacity of the KV cache in tokens (max_total_num_tokens)."
    yield gauge("kv_pool_tokens", doc).of_each(ranks, lambda r: server.facts.pool(r.dp))
    doc = "Share of max_new_tokens that admission keeps room for (#new_token_ratio)."
    yield gauge("new_token_ratio", doc, source="log, else metrics").of_each(ranks, lambda r: r.shown.new_token_ratio)
    doc = "Prompt tokens, by where they came from: computed, or from the prefix cache."
    yield counter("prompt_tokens", doc, "source").of_all(
        lives, lambda life: _known(life, "computed_tokens", "cached_tokens")
    )


def _batches(ranks: Ranks[Scheduler], lives: Ranks[sums.Totals], recent: sums.Totals) -> Iterable[Family]:
    doc = "Generation throughput as last logged (gen throughput)."
    yield gauge("generation_tokens_per_second", doc).of_each(ranks, lambda r: r.shown.throughput)
    doc = "Share of decode batches of the last 10 minutes that replayed a captured graph, 0-1 (cuda graph)."
    yield gauge("cuda_graph_coverage_ratio", doc, source="computed").of_each(ranks, lambda r: r.coverage(recent))
    doc = (
        "Decode batches by use of a captured graph: all where the server counts them (cuda_graph_passes_total),"
        " else logged ones."
    )
    yield counter("decode_batches", doc, "graph").of_all(
        lives, lambda life: _known(life, "replayed_batches", "eager_batches")
    )


def _known(life: sums.Totals, *names: str) -> list[tuple[str, float]]:
    """Return these counts of a scheduler by the first word of their names: all of them,
    once one of them was counted.
    """
    return [(name.partition("_")[0], life.get(name, 0.0)) for name in names] if life.keys() & set(names) else []


def _retractions(lives: Ranks[sums.Totals], sidecar: Sidecar) -> Iterable[Family]:
    is_read = sidecar.counts_log
    page = sidecar.watch.server.page
    counted = {rank.dp for rank in page.ranks if rank.retracted_requests is not None} if page is not None else set()
    doc = "Retraction events (KV cache full), TP ranks counted once; absent while the log is unreadable."
    events = counter("retraction_events", doc, source="log")
    events.of_each(lives, lambda life: life.get("retraction_events", 0.0) if is_read else None)
    doc = (
        "Requests retracted because the KV cache was full: from the log, and from the server's counter what the log"
        " does not show."
    )
    requests = counter("retracted_requests", doc, source="log, else metrics")
    for dp, life in lives.items():
        requests.add_metric((), life.get("retracted_requests", 0.0 if is_read or dp in counted else None), dp)
    if is_read and not events.samples:
        events.add_metric([], 0)
        requests.add_metric([], 0)
    yield events
    yield requests


def _states(ranks: Ranks[Scheduler], lives: Ranks[sums.Totals], now: float) -> Iterable[Family]:
    names = {
        f"{signal}/{state}": (signal, state)
        for signal, states in sums.STATES.items()
        for state in (*states, sums.IDLE, sums.UNKNOWN)
    }

    def present(rank: Scheduler) -> list[tuple[str, str, float]]:
        activity = rank.moment(now).activity
        states = [(signal, state, float(activity == state)) for signal, state in names.values() if signal == "activity"]
        return states if rank.dp is None else states[:1]  # of a DP rank only whether it serves

    doc = "1 for what the scheduler does now: it serves, is idle, or nothing is known."
    yield gauge("state", doc, "signal", "state", source="computed").of_all(ranks, present)
    doc = (
        "Seconds spent in each state; of a DP rank, in those that it was in. Serving time of a signal is all but idle"
        " and unknown; a share is increase / increase of serving time."
    )
    spent = counter("state_seconds", doc, "signal", "state", source="computed")
    for dp, life in lives.items():
        for key, seconds in life.items():
            # Of a DP rank only the states that it was in: the others would be most of its series.
            if key in names and (seconds or dp is None):
                spent.add_metric(names[key], seconds, dp)
    yield spent


def findings(sidecar: Sidecar, now: float) -> Iterable[Family]:
    """Return the families of the verdict, of its conditions and limits, of alerts and of advice."""
    judgement, watch = sidecar.judge(now), sidecar.watch
    assert watch.measured is not None
    assert watch.of_alerts is not None
    shown = list(alerts.conditions(watch.of_alerts))
    doc = (
        "The figure that decides a diagnosis over its window, turned so that above its limit is bad; one unit for each"
        " diagnosis (docs/diagnoses.md). Absent while it is not measured."
    )
    values = gauge("condition", doc, "diagnosis")
    yield values.with_samples((name, value) for name, value, _ in shown)
    doc = "The limit in force for sglang_tuning_condition, in the same unit."
    yield gauge("condition_limit", doc, "diagnosis").with_samples((name, limit) for name, _, limit in shown)
    doc = (
        "1 once a condition was above its limit for its wait without a break, 0 once it was not for five minutes or as"
        " long as its diagnosis says; absent while neither is known."
    )
    clocks = watch.clocks.by_diagnosis.items()
    lasting = gauge("alert", doc, "diagnosis")
    lasting.with_samples((name, float(clock.value)) for name, clock in clocks if clock.value is not None)
    # A muted alert is 0 and not absent: a rule would hold the last 1 for a while.
    accepted = dict(sidecar.watch.server.profile.accepted)
    yield lasting.with_samples((muted, 0.0) for muted in accepted if BY_ID[muted].alert)
    doc = "1 for each diagnosis that --accept mutes, and why: it is not in verdict, alerts and conditions."
    yield gauge("accepted_info", doc, "diagnosis", "reason").with_samples(
        (muted, shortened(reason), 1.0) for muted, reason in accepted.items()
    )
    doc = (
        "Since when this advice stands, in unix seconds. Flag as typed for the running release (empty: advice to"
        " people), its present value, the value to try, why, when it will not help, and what it costs."
    )
    advice = gauge("advice_timestamp_seconds", doc, "diagnosis", *alerts.ADVICE)
    for diagnosis, (said, since) in watch.words.advice.items():
        if diagnosis not in accepted:
            advice.add_metric(map(shortened, (diagnosis, *said)), sidecar.unix(since))
    yield advice
    stands = watch.words
    doc = (
        "What limits the server now: a diagnosis, or why there is none; how urgent it is, and a sentence without"
        " figures."
    )
    yield info(
        "verdict", doc, {"verdict": stands.verdict, "level": stands.level, "sentence": shortened(stands.sentence)}
    )
    doc = "Since when the verdict is the same, in unix seconds."
    yield single("verdict_since_timestamp_seconds", doc, sidecar.unix(stands.since))
    helps = alerts.scale_out_helps(judgement)
    doc = (
        "1 where a further replica would help, by the verdict; 0 where a flag comes first, or neither helps (clients,"
        " grammar, imbalance)."
    )
    yield single("scale_out_helps", doc, None if helps is None else float(helps))
    stuck = watch.measured.view.stuck
    stage = gauge("stuck_stage", "1 for the stage that hangs: requests wait for it, and it makes no progress.", "stage")
    yield stage.with_samples((each, float(stuck is not None and each == stuck.stage)) for each in STAGES)
    doc = (
        "Why the server ended: the class of the line of its log that explains it, and SGLang's own words of it: no"
        " secrets, no words of a request. Absent while the server may run."
    )
    end = gauge("end_info", doc, "class", "words")
    yield end.with_samples([(*_end(sidecar), 1.0)] if watch.server.ended else [])


def _end(sidecar: Sidecar) -> tuple[str, str]:
    """Return class and words of the last end; after `MOST_END_WORDS` different ones only the words of its class."""
    line, told = sidecar.watch.server.end_explanation, sidecar.end_words
    kind, words = ("unknown", sidecar.watch.server.ended) if line is None else (line.word, line.spoken)
    words = shortened(words)
    if words not in told and len(told) >= MOST_END_WORDS:
        return kind, ENDINGS[kind].what
    told.add(words)
    return kind, words
