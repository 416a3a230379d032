"""State into Prometheus families: a custom collector that makes fresh families for every scrape."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from sglang_tuning_exporter import __version__
from sglang_tuning_exporter.guide.findings import findings
from sglang_tuning_exporter.guide.profiles import GIGABYTE
from sglang_tuning_exporter.guide.table import DIAGNOSES, RuleOnly
from sglang_tuning_exporter.sglang.events import LINE_KINDS, OUT_OF_MEMORY_PHASES
from sglang_tuning_exporter.signals import SIGNALS, STATES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from sglang_tuning_exporter.scheduler import RankState
    from sglang_tuning_exporter.watcher import Watcher

PREFIX = "sglang_tuning_"
UNRECOGNISED_KINDS = ("batch_key", "batch_line", "retraction_line", "server_args")
SUSPICIOUS_KINDS = ("batch", "retraction", "out_of_memory", "startup")


class WatcherCollector(Collector):
    """Everything `sglang_tuning_*`: names, labels and meanings are the contract with the rules and dashboards."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def collect(self) -> Iterator[Metric]:
        """All families at one moment. A thing that this server cannot tell is absent."""
        with self._watcher.view() as now:
            families = [
                *self._sources(),
                *self._server(),
                *self._ranks(now),
                *self._failures(),
                *self._states(),
                *self._findings(now),
                *self._thresholds(),
                *self._agreement(now),
            ]
        return (family for family in families if family.samples)

    def _sources(self) -> Iterable[Metric]:
        health, config = self._watcher.health, self._watcher.config
        yield _info("build", "The version of this exporter.", {"version": __version__})
        words = {True: "yes", False: "no"}
        yield _info(
            "sources",
            "Where the figures come from: SGLang's /metrics, its log, or both.",
            {"metrics": words[config.sglang_url is not None], "log": words[bool(config.log_file)]},
        )
        up = _gauge("up", "Whether the last scrape of SGLang's /metrics succeeded; absent without --sglang-url.")
        error = _gauge(
            "scrape_error_info", "Why SGLang could not be scraped; only while sglang_tuning_up is 0.", "reason"
        )
        if config.sglang_url is not None:
            up.add_metric([], float(health.up is True))
            if health.up is False:
                error.add_metric([health.reason], 1.0)
        yield up
        yield error
        duration = _gauge("scrape_duration_seconds", "How long the last scrape of SGLang took.")
        if health.scrape_seconds is not None:
            duration.add_metric([], health.scrape_seconds)
        yield duration
        unknown = _gauge("metrics_unrecognised_families", "SGLang families on the last page that no known release has.")
        if health.up:
            unknown.add_metric([], health.unrecognised)
        yield unknown
        yield from self._log()

    def _log(self) -> Iterable[Metric]:
        log = self._watcher.log
        if log is None:
            return
        file_up = _gauge("log_up", "Whether this log file is being followed.", "file")
        for status in log.files:
            file_up.add_metric([_sound(status.path)], float(status.up))
        yield file_up
        last = _gauge("log_last_line_timestamp_seconds", "When the last line of the log arrived, in unix seconds.")
        if log.last_line_at is not None:
            last.add_metric([], log.last_line_at)
        yield last
        lines = _counter("log_lines", "Lines read from the log, by what they are.", "kind")
        for kind in LINE_KINDS:
            lines.add_metric([kind], log.lines[kind])
        yield lines
        unknown = _counter(
            "log_unrecognised",
            "Log lines of a known head whose body or keys no known release prints: SGLang's format has drifted.",
            "kind",
        )
        for kind in UNRECOGNISED_KINDS:
            unknown.add_metric([kind], log.unrecognised[kind])
        yield unknown
        doubted = _counter(
            "log_suspicious",
            "Lines that looked like an event of the server and were not counted, because nothing else bore them out.",
            "kind",
        )
        for kind in SUSPICIOUS_KINDS:
            doubted.add_metric([kind], self._watcher.state.witness.suspicious[kind])
        yield doubted
        problem = _gauge("state_file_up", "Whether positions and counters can be saved in --state-file.")
        if log.state_file_problem is not None:
            problem.add_metric([], float(not log.state_file_problem))
        yield problem

    def _agreement(self, now: float) -> Iterable[Metric]:
        """Compare what both sources tell."""
        family = _gauge(
            "sources_disagree",
            "1 while log and metrics tell different figures for a fact: another server's log, or lines that do not arrive.",
            "fact",
        )
        state = self._watcher.state
        told = {"kv_pool_tokens": state.facts.pools_disagree, "retracted_requests": state.witness.disagrees(now)}
        if self._watcher.log is not None:
            for fact, differs in told.items():
                if differs is not None:
                    family.add_metric([fact], float(differs))
        yield family

    def _server(self) -> Iterable[Metric]:
        state, facts = self._watcher.state, self._watcher.state.facts
        yield _info(
            "server",
            "What runs: release, model and engine as told by the server (empty: not told), and the profile in force.",
            {
                "version": _sound(facts.version),
                "model_name": _sound(facts.model_name),
                "engine_type": _sound(facts.engine_type),
                "profile": self._watcher.profile.name,
            },
        )
        args = _gauge(
            "server_arg", "A numeric argument of the running server, as resolved by it (switches are 0 or 1).", "arg"
        )
        for name, value in sorted(facts.shown_args.items()):
            args.add_metric([name], value)
        yield args
        starts = _counter("server_starts", "Starts of the server seen by this exporter.")
        starts.add_metric([], state.starts)
        yield starts
        reserve = _gauge(
            "available_gpu_memory_bytes",
            "GPU memory left when the server had started (available_gpu_mem); absent on a CPU server.",
            *self._labels(),
        )
        told = {
            str(dp): gb
            for dp, gb in sorted(facts.available_gb.items(), key=str)
            if dp is not None and state.has_dp_ranks
        }
        if facts.reserve_gb is not None:
            for dp_rank, gigabytes in (told or {"": facts.reserve_gb}).items():
                reserve.add_metric([dp_rank] if state.has_dp_ranks else [], gigabytes * GIGABYTE)
        yield reserve

    def _ranks(self, now: float) -> Iterable[Metric]:
        facts, log = self._watcher.state.facts, bool(self._watcher.config.log_file)
        yield self._each("queued_requests", "Requests waiting (#queue-req, num_queue_reqs).", lambda r: r.queued)
        yield self._each("running_requests", "Requests running (#running-req, num_running_reqs).", lambda r: r.running)
        yield self._each(
            "running_requests_limit",
            "Requests that may run at once (max_running_requests).",
            lambda r: facts.running_limit(r.dp),
        )
        yield self._each(
            "queue_wait_seconds",
            "Estimated wait of the last request in the queue: queued / admitted per second over the last minute.",
            lambda r: r.queue_wait_seconds(now),
        )
        usage = _gauge("token_usage_ratio", "Used share of a KV pool, 0-1 (token usage).", *self._labels("pool"))
        for rank in self._known_ranks():
            for pool, value in rank.usages.items():
                if rank.states["activity"] != "unknown":
                    usage.add_metric([pool, *self._values(rank)], value)
        yield usage
        yield self._each(
            "kv_pool_tokens",
            "Tokens that the KV pool holds (max_total_num_tokens).",
            lambda r: facts.kv_pool_tokens.get(r.dp),
        )
        yield self._each(
            "new_token_ratio",
            "Share of max_new_tokens that admission keeps room for (#new_token_ratio).",
            lambda r: r.new_token_ratio,
        )
        yield self._each(
            "generation_tokens_per_second",
            "Generation throughput as last logged (gen throughput).",
            lambda r: r.generation_throughput,
        )
        yield self._each(
            "cuda_graph_coverage_ratio",
            "Share of decode batches of the last 10 minutes that replayed a captured graph, 0-1 (cuda graph).",
            lambda r: r.window.recent(now, r.totals).coverage,
        )
        batches = _counter(
            "decode_batches",
            "Decode batches by use of a captured graph: all where the server counts them (cuda_graph_passes_total),"
            " else logged ones.",
            *self._labels("graph"),
        )
        events = _counter(
            "retraction_events",
            "Times the KV pool was full and running requests were put back, TP ranks counted once.",
            *self._labels(),
        )
        requests = _counter(
            "retracted_requests", "Requests put back into the queue because the KV pool was full.", *self._labels()
        )
        for rank in self._known_ranks():
            counts, values = rank.totals.counts, self._values(rank)
            for graph in ("replayed", "eager"):
                if rank.graph is not None or counts[graph]:
                    batches.add_metric([graph, *values], counts[graph])
            if log:
                events.add_metric(values, counts["retraction_events"])
            if log or rank.native_retractions_told:
                requests.add_metric(values, counts["log_retracted_requests" if log else "native_retracted_requests"])
        if log and not self._watcher.state.ranks:
            events.add_metric([], 0)
            requests.add_metric([], 0)
        yield batches
        yield events
        yield requests

    def _failures(self) -> Iterable[Metric]:
        family = _counter(
            "out_of_memory",
            "Fatal out-of-memory failures in the log, by phase. A recoverable retraction is none.",
            "phase",
        )
        if self._watcher.config.log_file:
            for phase in OUT_OF_MEMORY_PHASES:
                family.add_metric([phase], self._watcher.state.out_of_memory[phase])
        yield family

    def _states(self) -> Iterable[Metric]:
        now = _gauge("state", "1 for the state that each signal is in.", *self._labels("signal", "state"))
        seconds = _counter(
            "state_seconds",
            "Seconds spent in each state. Serving time of a signal is all but idle and unknown; a share is"
            " increase / increase of serving time.",
            *self._labels("signal", "state"),
        )
        for rank in self._known_ranks():
            for signal in SIGNALS:
                for state in STATES[signal]:
                    labels = [signal, state, *self._values(rank)]
                    now.add_metric(labels, float(rank.states[signal] == state))
                    seconds.add_metric(labels, rank.totals.seconds[signal, state])
        yield now
        yield seconds

    def _findings(self, now: float) -> Iterable[Metric]:
        active = _gauge("diagnosis_active", "1 while this diagnosis holds over the last 10 minutes.", "diagnosis")
        now_set = _gauge(
            "recommended_arg_current",
            "What that argument is set to, as its flag (the printed conservativeness is 0.3 of the flag under DP attention).",
            "arg",
            "diagnosis",
        )
        advised = _gauge(
            "recommended_arg",
            "The value to try for an argument, while a diagnosis that turns it holds.",
            "arg",
            "diagnosis",
        )
        found = {finding.diagnosis.id: finding for finding in findings(self._watcher.past(now))}
        for row in DIAGNOSES:
            if isinstance(row.condition, RuleOnly) or (row.profiles and self._watcher.profile.name not in row.profiles):
                continue
            active.add_metric([row.id], float(row.id in found))
            for advice in found[row.id].advice if row.id in found else ():
                if advice.arg and advice.suggested is not None:
                    advised.add_metric([advice.arg, row.id], advice.suggested)
                    if advice.current is not None:
                        now_set.add_metric([advice.arg, row.id], advice.current)
        yield active
        yield advised
        yield now_set

    def _thresholds(self) -> Iterable[Metric]:
        profile = self._watcher.profile
        family = _gauge("threshold", "What the profile in force calls healthy.", "signal", "bound")
        for signal, bound, value in (
            ("queue", "lower", profile.queue_lower),
            ("queue", "upper", profile.queue_upper),
            ("queue", "wait_seconds", profile.queue_wait_seconds),
            ("token_usage", "target", profile.token_usage_target),
            ("retractions_per_minute", "upper", profile.retractions_per_minute),
            ("available_gpu_memory_bytes", "lower", profile.reserve_lower_gb * GIGABYTE),
            ("available_gpu_memory_bytes", "upper", profile.reserve_upper_gb * GIGABYTE),
            ("cuda_graph", "lower", 1 - profile.frequent_share),
            ("share", "upper", profile.frequent_share),
        ):
            if value is not None:
                family.add_metric([signal, bound], value)
        yield family

    def _known_ranks(self) -> list[RankState]:
        state = self._watcher.state
        ranks = [rank for rank in state.ranks.values() if rank.dp is not None or not state.has_dp_ranks]
        return sorted(ranks, key=lambda rank: -1 if rank.dp is None else rank.dp)

    def _labels(self, *names: str) -> tuple[str, ...]:
        return (*names, "dp_rank") if self._watcher.state.has_dp_ranks else names

    def _values(self, rank: RankState) -> list[str]:
        return [str(rank.dp)] if self._watcher.state.has_dp_ranks else []

    def _each(self, name: str, words: str, figure: Callable[[RankState], float | None]) -> Metric:
        family = _gauge(name, words, *self._labels())
        for rank in self._known_ranks():
            value = figure(rank)
            if value is not None and isfinite(value):
                family.add_metric(self._values(rank), value)
        return family


def _sound(text: str | None) -> str:
    """Write words from outside as UTF-8 can: a lone surrogate in a name would cost the whole page."""
    return (text or "").encode("utf-8", "backslashreplace").decode()


def _gauge(name: str, words: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, words, labels=labels)


def _counter(name: str, words: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, words, labels=labels)


def _info(name: str, words: str, values: dict[str, str]) -> InfoMetricFamily:
    return InfoMetricFamily(PREFIX + name, words, value=values)


def registry(watcher: Watcher) -> CollectorRegistry:
    """Make a registry of its own with nothing but our families (no process or platform metrics)."""
    own = CollectorRegistry(auto_describe=False)
    own.register(WatcherCollector(watcher))
    return own
