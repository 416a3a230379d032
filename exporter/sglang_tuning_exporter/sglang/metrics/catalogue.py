"""Which metric of which SGLang release answers which question, and one page read with it.

Pure. `SOURCES` is the table: every figure that this program takes from `/metrics`, the family it comes from, the
releases that have the family, and how the series of several processes become one figure. Nothing else in the program
reads a native metric.

What the table guards against, release by release (SGLang 0.3.5 to 0.5.23, `srt/metrics/collector.py`, later
`srt/observability/metrics_collector.py`):

* Every TP rank counts the same retraction and the same forward pass, and prints the same constants; PP ranks repeat
  running, queued and usage. Only DP ranks are different schedulers, so nothing is ever summed over ranks.
* With priority scheduling `priority=""` is the total and the other values are its parts.
* A child that nobody has incremented is absent. It is zero only where another family of the same release proves that it
  could be there.
* `is_cuda_graph`, `utilization` and `num_paused_reqs` are declared and never computed, `num_retracted_reqs` is the last
  event of one process (label `pid`), and the queues of disaggregated servers are declared but not written up to 0.4.10.
  None of them is read.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sglang_tuning_exporter.sglang.events import MOST_RANKS, RankFigures, Scrape
from sglang_tuning_exporter.sglang.metrics.exposition import labels, native_name, scan
from sglang_tuning_exporter.sglang.metrics.histograms import MOST, Histogram
from sglang_tuning_exporter.sglang.metrics.histograms import read as read_histogram
from sglang_tuning_exporter.sglang.metrics.names import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Series = list[tuple["Mapping[str, str]", float]]

# Families that a release writes from its first batch on, and that came no later than the counter they vouch for.
_COUNTS_RETRACTIONS = (
    "realtime_tokens_total",
    "cuda_graph_passes_total",
)  # came with num_retracted_requests_total, 0.5.7
_COUNTS_ABORTS = ("total_retracted_reqs", "queue_time_seconds_count", "realtime_tokens_total")


@dataclass(frozen=True, slots=True)
class Source:
    """One place where one figure can be read. Of several for a figure, the first that a page has is used.

    `fact` is a field of `RankFigures` or of `Scrape`, or `queues.<key>`; `metric` a sample name without `sglang:`;
    `versions` the first and the last release examined that have it.
    """

    fact: str
    metric: str
    versions: str
    fold: Literal["max", "min", "sum"] = "max"  # over the TP and PP ranks of one scheduler
    where: tuple[str, str] | None = None  # only series with this label
    parts: str | None = None  # label whose values are added up within one rank
    zero_with: tuple[str, ...] = ()  # absent means zero where one of these is present
    needs: str | None = None  # without this family on the page the figure is declared and never written
    pool: tuple[str, ...] = ()  # zero means "no such pool" unless one of these is above zero

    @property
    def aggregation(self) -> str:
        """How series become the figure, as a sentence for the docs."""
        words = "sum of all series" if self.fold == "sum" else f"{self.fold} over TP and PP ranks"
        if self.where:
            words = f'{self.where[0]}="{self.where[1]}", {words}'
        if self.parts:
            words = f"sum over {self.parts}, then {words}"
        if self.zero_with:
            words += f"; 0 when absent beside {' or '.join(self.zero_with)}"
        if self.needs:
            words += f"; only beside {self.needs}"
        if self.pool:
            words += "; none when the model has no such pool"
        return words


@dataclass(frozen=True, slots=True)
class HistogramSource:
    """One family of buckets that tells a latency, or the length of answers: `fact` is a field of `Scrape`, the rest as in `Source`."""

    fact: str
    metric: str
    versions: str
    where: tuple[str, str] | None = None  # only series with this value, where they have the label

    @property
    def aggregation(self) -> str:
        """How series become one histogram, as a sentence for the docs."""
        words = "sum of all series, one TP and PP rank of each DP rank"
        return f'{self.where[0]}="{self.where[1]}" where told, {words}' if self.where else words


_SWA_POOL = ("swa_available_tokens", "swa_evictable_tokens", "swa_used_tokens", "max_total_num_tokens_swa")
_MAMBA_POOL = ("mamba_available_tokens", "mamba_evictable_tokens", "mamba_used_tokens")
# Came when the queues began to be written; before it was misspelt `infight`.
_QUEUES_WRITTEN = "num_prefill_inflight_queue_reqs"

# Grows while a request runs, streamed or not: releases that have it send the tokens of every request now and then.
OUTPUTS = "inter_token_latency_seconds_count"
# What generates, among the addresses of the HTTP server.
_GENERATES = re.compile(
    r"/(?:generate|completions|embeddings|responses|messages|rerank|score|classify|encode|chat|invocations)$"
)

SOURCES: tuple[Source, ...] = (
    Source("running", "num_running_reqs", "0.3.5.post2-0.5.23"),
    Source("queued", "num_queue_reqs", "0.3.5.post2-0.5.23"),
    Source("grammar_queued", "num_grammar_queue_reqs", "0.4.6.post5-0.5.23"),
    # From 0.5.11 token_usage is the fullest of all pools, so the full-attention pool is read from its own gauge.
    Source("full_usage", "full_token_usage", "0.5.10.post1-0.5.23"),
    Source("full_usage", "token_usage", "0.3.5.post2-0.5.9"),
    Source("swa_usage", "swa_token_usage", "0.5.3.post3-0.5.23", pool=_SWA_POOL),
    Source("mamba_usage", "mamba_usage", "0.5.5.post3-0.5.23", pool=_MAMBA_POOL),
    Source("used_tokens", "num_used_tokens", "0.3.5.post2-0.5.23"),
    Source("kv_pool_tokens", "max_total_num_tokens", "0.5.6.post2-0.5.23"),
    Source("generation_throughput", "gen_throughput", "0.3.5.post2-0.5.23"),
    Source("new_token_ratio", "new_token_ratio", "0.5.5.post3-0.5.23"),
    Source(
        "graph_passes",
        "cuda_graph_passes_total",
        "0.5.7-0.5.23",
        where=("mode", "decode_cuda_graph"),
        zero_with=("cuda_graph_passes_total",),
    ),
    Source(
        "eager_passes",
        "cuda_graph_passes_total",
        "0.5.7-0.5.23",
        where=("mode", "decode_none"),
        zero_with=("cuda_graph_passes_total",),
    ),
    Source("decoded_tokens", "realtime_tokens_total", "0.5.7-0.5.23", where=("mode", "decode")),
    Source("retracted_requests", "num_retracted_requests_total", "0.5.7-0.5.23", zero_with=_COUNTS_RETRACTIONS),
    # A gauge by type, cumulative by value, refreshed by decode logs only.
    Source("retracted_requests", "total_retracted_reqs", "0.4.9.post6-0.5.2"),
    # Counted when a request ends, and without a rank label: told for a server without DP ranks only.
    Source("retracted_requests", "num_retractions_sum", "0.5.4.post3-0.5.6.post2"),
    Source("admitted_requests", "queue_time_seconds_count", "0.5.3.post3-0.5.23"),
    # The rank with the least memory is the one that runs out.
    Source("available_gpu_memory_gb", "startup_available_gpu_memory_gb", "0.5.11-0.5.23", fold="min"),
    Source("graph_memory_gb", "graph_memory_usage_gb", "0.5.20-0.5.23", parts="phase"),
    Source("weight_memory_gb", "weight_memory_usage_gb", "0.5.20-0.5.23"),
    Source("kv_memory_gb", "kv_cache_memory_usage_gb", "0.5.20-0.5.23"),
    Source("queues.bootstrap", "num_prefill_bootstrap_queue_reqs", "0.5.12-0.5.23"),
    Source("queues.prealloc", "num_decode_prealloc_queue_reqs", "0.5.1.post3-0.5.23", needs=_QUEUES_WRITTEN),
    # A prefill server's queue; gauge and log line call it prealloc up to 0.5.11, bootstrap later. A server has one
    # role, and the other role's queues stay at 0.
    Source("queues.prealloc", "num_prefill_prealloc_queue_reqs", "0.5.1.post3-0.5.11", needs=_QUEUES_WRITTEN),
    Source("queues.inflight", _QUEUES_WRITTEN, "0.5.1.post3-0.5.23"),
    Source("queues.transfer", "num_decode_transfer_queue_reqs", "0.5.1.post3-0.5.23", needs=_QUEUES_WRITTEN),
    Source("queues.host_receive", "num_decode_host_receive_queue_reqs", "0.5.23-0.5.23"),
)

# Of the whole server: written by the tokenizer process, or compared only with itself.
SERVER_SOURCES: tuple[Source, ...] = (
    Source(
        "aborted_requests", "num_aborted_requests_total", "0.4.9.post6-0.5.23", fold="sum", zero_with=_COUNTS_ABORTS
    ),
    # Streamed or not: of an answer that is not streamed, the first tokens that the tokenizer sees. A prefill server of a
    # disaggregated pair has none; there and only there the requests that left the queue are counted instead.
    Source("started_requests", "time_to_first_token_seconds_count", "0.3.5.post2-0.5.23", fold="sum"),
    Source("finished_requests", "e2e_request_latency_seconds_count", "0.3.5.post2-0.5.23", fold="sum"),
    # Added when a request ends, so it goes with the requests that ended.
    Source("finished_prompt_tokens", "prompt_tokens_total", "0.3.5.post2-0.5.23", fold="sum"),
    Source("finished_answer_tokens", "generation_tokens_total", "0.3.5.post2-0.5.23", fold="sum"),
    # Missing until the first prompt that finds something in the cache.
    Source(
        "finished_cached_tokens",
        "cached_tokens_total",
        "0.4.3.post4-0.5.23",
        fold="sum",
        zero_with=("time_to_first_token_seconds_count",),
    ),
    # Move only when tokens or requests do. Left out: what a scrape or a waiting process moves by itself.
    # These are written when the detokenizer has given something out.
    Source("sent", "generation_tokens_total", "0.3.5.post2-0.5.23", fold="sum"),
    Source("sent", "prompt_tokens_total", "0.3.5.post2-0.5.23", fold="sum"),
    Source("sent", "num_requests_total", "0.4.3.post4-0.5.23", fold="sum"),
    # The three above move when a request ends. These two move while one runs, the only ones to do so before 0.5.7.
    Source("sent", "time_to_first_token_seconds_count", "0.3.5.post2-0.5.23", fold="sum"),
    Source("sent", OUTPUTS, "0.4.3.post4-0.5.23", fold="sum"),
    # These by the scheduler.
    Source("scheduled", "queue_time_seconds_count", "0.5.3.post3-0.5.23", fold="sum"),
    Source("scheduled", "realtime_tokens_total", "0.5.7-0.5.23", fold="sum"),
    Source("scheduled", "cuda_graph_passes_total", "0.5.7-0.5.23", fold="sum"),
    Source("scheduled", "prefill_effective_tokens_total", "0.5.20-0.5.23", fold="sum"),
    Source("open_requests", "http_requests_active", "0.5.9-0.5.23", fold="sum", where=("method", "POST")),
)

# Histograms of the whole server, in seconds but for the answers' tokens. Of several for one, the first that a page has is used.
HISTOGRAM_SOURCES: tuple[HistogramSource, ...] = (
    # Of an answer that is not streamed the tokenizer learns after fifty tokens (SGLANG_FORCE_STREAM_INTERVAL) or at its
    # end, and nobody waits for its first token. The label came with 0.5.18; before, both are one.
    HistogramSource(
        "time_to_first_token", "time_to_first_token_seconds", "0.3.5.post2-0.5.23", where=("is_streaming", "true")
    ),
    HistogramSource("inter_token", "inter_token_latency_seconds", "0.4.3.post4-0.5.23"),
    # The mean since the first token, observed with every output: smoother than the time between two tokens.
    HistogramSource("inter_token", "time_per_output_token_seconds", "0.3.5.post2-0.4.3.post4"),
    HistogramSource("request_latency", "e2e_request_latency_seconds", "0.3.5.post2-0.5.23"),
    HistogramSource("queue_time", "queue_time_seconds", "0.5.3.post3-0.5.23"),
    # Up to 0.5.9 with --collect-tokens-histogram only.
    HistogramSource("answer_tokens", "generation_tokens_histogram", "0.4.6.post5-0.5.23"),
)
_HISTOGRAM_MEMBERS = frozenset(
    f"{source.metric}_{member}" for source in HISTOGRAM_SOURCES for member in ("bucket", "count", "sum")
)


def _wanted() -> frozenset[str]:
    names: set[str] = set()
    for source in SOURCES + SERVER_SOURCES:
        names.update((source.metric, *source.zero_with, *source.pool), [source.needs] if source.needs else [])
    return frozenset(names)


_WANTED = _wanted()
# Of the whole server: each is added up from scrape to scrape.
SERVER_COUNTS = (
    *("aborted_requests", "started_requests", "finished_requests"),
    *("finished_prompt_tokens", "finished_answer_tokens", "finished_cached_tokens"),
)
# What only grows, and is added up from scrape to scrape.
_CUMULATIVE = frozenset(
    source.metric
    for source in SOURCES + SERVER_SOURCES
    if source.fact
    in {
        "graph_passes",
        "eager_passes",
        "decoded_tokens",
        "retracted_requests",
        "admitted_requests",
        "sent",
        "scheduled",
        *SERVER_COUNTS,
    }
)
_MEMBERS = ("_bucket", "_count", "_sum", "_total", "_created")


def describe() -> list[tuple[str, str, str, str]]:
    """Rows of the docs table: fact, metric, versions, aggregation."""
    return [
        (source.fact, f"sglang:{source.metric}", source.versions, source.aggregation)
        for source in (*SOURCES, *SERVER_SOURCES)
    ] + [
        (source.fact, f"sglang:{source.metric}_bucket", source.versions, source.aggregation)
        for source in HISTOGRAM_SOURCES
    ]


@dataclass(frozen=True, slots=True)
class Places:
    """Which samples of a page tell something, by their number in the page's order: of the same labels, the same at every scrape."""

    series: Mapping[str, list[tuple[Mapping[str, str], int]]]  # by family, without prefix
    members: Mapping[str, list[tuple[str, int]]]  # of histograms, labels as they stand between the braces
    unrecognised: int


def find(samples: Iterable[tuple[str, str]]) -> Places:
    """Say where on a page the figures are; `samples` are its names and raw labels."""
    series: dict[str, list[tuple[Mapping[str, str], int]]] = {}
    members: dict[str, list[tuple[str, int]]] = {}
    families: dict[str, str | None] = {}  # name as printed -> name without prefix, None for what is not SGLang's
    seen: set[tuple[str, str]] = set()
    for number, (printed, raw) in enumerate(samples):
        if printed not in families:
            name = native_name(printed)
            own = name.startswith("sglang:") and not printed.startswith("sglang_tuning_")
            families[printed] = name[7:] if own else None
        family = families[printed]
        if family in _WANTED or family in _HISTOGRAM_MEMBERS:
            if (printed, raw) in seen:  # of two samples of one series the first, as for a page passed on
                continue
            seen.add((printed, raw))
        if family in _WANTED and family:
            series.setdefault(family, []).append((labels(raw), number))
        if family in _HISTOGRAM_MEMBERS and family:
            members.setdefault(family, []).append((raw, number))
    return Places(series, members, _unrecognised(name for name in families.values() if name is not None))


def take(places: Places, values: Sequence[float]) -> Scrape:
    """Make of the values of a page's samples what they tell. What the page does not tell is None."""
    series: dict[str, Series] = {}
    spoiled = False
    for family, told in places.series.items():
        found = [(label, value) for label, number in told if _is_sound(family, value := values[number])]
        if found:
            series[family] = found
        spoiled = spoiled or (len(found) < len(told) and family in _CUMULATIVE)
    members = {name: [(raw, values[number]) for raw, number in told] for name, told in places.members.items()}
    return Scrape(
        ranks=_ranks(series),
        model_name=_model_name(series),
        engine_type=_engine_type(series),
        progress=_progress(series, "sent", "scheduled"),
        sent=_progress(series, "sent") if OUTPUTS in series else None,
        scheduled=_progress(series, "scheduled"),
        open_requests=_open(series),
        aborted_requests=_counted("aborted_requests", series),
        started_requests=_counted("started_requests", series),
        finished_requests=_counted("finished_requests", series),
        finished_prompt_tokens=_counted("finished_prompt_tokens", series),
        finished_answer_tokens=_counted("finished_answer_tokens", series),
        finished_cached_tokens=_counted("finished_cached_tokens", series),
        time_to_first_token=_histogram("time_to_first_token", members),
        inter_token=_histogram("inter_token", members),
        request_latency=_histogram("request_latency", members),
        queue_time=_histogram("queue_time", members),
        answer_tokens=_histogram("answer_tokens", members),
        unrecognised=places.unrecognised,
        spoiled=spoiled,
    )


def _is_sound(family: str, value: float) -> bool:
    """Memory is a difference of two measurements: below zero when another process let go of some meanwhile."""
    return 0 <= value <= MOST or (-MOST <= value < 0 and family.endswith("_gb"))


def read(text: str) -> Scrape:
    """Read one page of `/metrics`. A page without SGLang's series gives no ranks."""
    samples = scan(text).samples
    return take(find((name, raw) for name, raw, _ in samples), [value for _, _, value in samples])


def _ranks(series: Mapping[str, Series]) -> list[RankFigures]:
    ranks: dict[int | None, RankFigures] = {}
    for source in SOURCES:
        for dp, value in _figures(source, series).items():
            _put(ranks.setdefault(dp, RankFigures(dp=dp)), source.fact, value)
    # A figure without a rank label on a page with ranks belongs to none of them.
    return sorted((rank for rank in ranks.values() if rank.dp is not None), key=lambda rank: rank.dp or 0) or list(
        ranks.values()
    )


def _put(rank: RankFigures, fact: str, value: float) -> None:
    queue = fact.removeprefix("queues.")
    if queue != fact:
        rank.queues[queue] = max(value, rank.queues.get(queue, value))
    elif getattr(rank, fact) is None:
        setattr(rank, fact, value)


def _figures(source: Source, series: Mapping[str, Series]) -> dict[int | None, float]:
    """Fold the series of one source into a figure for every DP rank that tells it."""
    if source.needs and source.needs not in series:
        return {}
    found: dict[int | None, float] = {}
    for key, value in _by_process(source, series.get(source.metric, [])).items():
        dp = key[0]
        found[dp] = (
            value if dp not in found else max(found[dp], value) if source.fold == "max" else min(found[dp], value)
        )
    for sibling in source.zero_with:
        for label, _ in series.get(sibling, []):
            found.setdefault(_dp(label), 0.0)
    if source.pool:
        pools = {_dp(label) for name in source.pool for label, value in series.get(name, []) if value > 0}
        found = {dp: value for dp, value in found.items() if value > 0 or dp in pools}
    return found


def _by_process(source: Source, series: Series) -> dict[tuple[int | None, frozenset[tuple[str, str]]], float]:
    """Give every process its figure: the total of a priority split where there is one, the sum of `parts`."""
    totals: dict[tuple[int | None, frozenset[tuple[str, str]]], float] = {}
    split: dict[tuple[int | None, frozenset[tuple[str, str]]], float] = {}
    for label, value in series:
        if source.where and label.get(source.where[0]) != source.where[1]:
            continue
        key = (_dp(label), frozenset(item for item in label.items() if item[0] not in ("priority", source.parts)))
        into = split if label.get("priority") else totals
        into[key] = into.get(key, 0.0) + value
    return {**split, **totals}


def _dp(label: Mapping[str, str]) -> int | None:
    rank = label.get("dp_rank", "")
    number = int(rank) if rank.isascii() and rank.isdigit() and len(rank) < 7 else MOST_RANKS
    return number if number < MOST_RANKS else None


def _model_name(series: Mapping[str, Series]) -> str | None:
    for found in series.values():
        for label, _ in found:
            if label.get("model_name"):
                return label["model_name"]
    return None


def _engine_type(series: Mapping[str, Series]) -> str | None:
    """Role of the server: `unified`, `prefill` or `decode`.

    Before 0.5.9 every server called itself unified, so there the word says nothing.
    """
    found = {
        label["engine_type"]
        for name in ("num_running_reqs", "max_total_num_tokens")
        for label, _ in series.get(name, [])
        if label.get("engine_type")
    }
    if len(found) != 1:
        return None
    engine = found.pop()
    # As young as the correction or younger: the label came with 0.5.9, the gauges with 0.5.10.post1 and 0.5.11.
    honest = any(name in series for name in ("full_token_usage", "startup_available_gpu_memory_gb")) or any(
        "cache_source" in label for label, _ in series.get("cached_tokens_total", [])
    )
    return engine if honest or engine != "unified" else None


def _progress(series: Mapping[str, Series], *facts: str) -> float | None:
    values = [value for source in SERVER_SOURCES if source.fact in facts for _, value in series.get(source.metric, [])]
    return math.fsum(values) if values else None


def _open(series: Mapping[str, Series]) -> float | None:
    source = next(source for source in SERVER_SOURCES if source.fact == "open_requests")
    if source.metric not in series or source.where is None:
        return None
    name, method = source.where
    return math.fsum(
        value
        for label, value in series[source.metric]
        if label.get(name) == method and _GENERATES.search(label.get("endpoint", ""))
    )


def _counted(fact: str, series: Mapping[str, Series]) -> float | None:
    source = next(source for source in SERVER_SOURCES if source.fact == fact)
    if found := _by_process(source, series.get(source.metric, [])):
        return math.fsum(found.values())
    return 0.0 if any(sibling in series for sibling in source.zero_with) else None


def _histogram(fact: str, members: Mapping[str, list[tuple[str, float]]]) -> Histogram | None:
    for source in HISTOGRAM_SOURCES:
        if source.fact == fact and f"{source.metric}_bucket" in members:
            buckets, counts, sums = (
                members.get(f"{source.metric}_{member}", []) for member in ("bucket", "count", "sum")
            )
            return read_histogram(buckets, counts, sums, source.where)
    return None


def _unrecognised(names: Iterable[str]) -> int:
    unknown = set()
    for name in names:
        base = next((name.removesuffix(member) for member in _MEMBERS if name.endswith(member)), name)
        if not FAMILIES & {name, base, base + "_total"}:
            unknown.add(base)
    return len(unknown)
