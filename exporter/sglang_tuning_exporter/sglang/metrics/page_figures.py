"""One page of SGLang's `/metrics` as objects, read with the catalogue. Pure; nothing here raises.

Times are unix seconds; memory is in GB as SGLang prints it (1 GB = 2**30 bytes). `None` means that this release does not show the figure, never
zero. Until a new series comes only the values of a page change, so `PageReader` keeps the structure of the page before: to compare the rest
takes a small part of the time of parsing it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from sglang_tuning_exporter.sglang.metrics import exposition, histograms
from sglang_tuning_exporter.sglang.metrics.catalogue import (
    CUMULATIVE,
    FAMILIES,
    HISTOGRAM_MEMBERS,
    HISTOGRAM_SOURCES,
    OUTPUTS,
    PROGRESS_SOURCES,
    SERVER_SOURCES,
    SOURCES,
    WANTED,
    Source,
)
from sglang_tuning_exporter.sglang.metrics.exposition import Page, is_sglang_series, labels, name_with_colon, scan
from sglang_tuning_exporter.sglang.metrics.histograms import MOST, Histogram

MOST_RANKS = 1024
"""Ranks are numbered below this; a greater number is none."""


@dataclass(slots=True)
class RankFigures:
    """The figures of one scheduler in one scrape (one DP rank, or the whole server without DP).

    Counters are the server's own cumulative values. Repetitions by TP and PP ranks are already removed.
    """

    dp: int | None = None
    running: float | None = None
    queued: float | None = None
    grammar_queued: float | None = None
    full_usage: float | None = None
    swa_usage: float | None = None
    mamba_usage: float | None = None
    used_tokens: float | None = None
    kv_pool_tokens: float | None = None
    generation_throughput: float | None = None
    new_token_ratio: float | None = None
    accept_length: float | None = None  # of speculative decoding: tokens a verified step, at last
    graph_passes: float | None = None  # decode passes that replayed a captured graph, cumulative
    eager_passes: float | None = None  # decode passes that did not, cumulative
    prefill_passes: float | None = None  # cumulative, from 0.5.10.post1 on
    decoded_tokens: float | None = None  # cumulative
    computed_tokens: float | None = None  # of prompts, cumulative
    cached_tokens: float | None = None  # of prompts, found in the prefix cache, cumulative
    retracted_requests: float | None = None  # cumulative
    queued_requests: float | None = None  # cumulative: entered the queue for the first time
    admitted_requests: float | None = None  # cumulative: left the queue for the first time
    available_gpu_memory_gb: float | None = None  # at start-up; host memory on a CPU server
    graph_memory_gb: float | None = None
    weight_memory_gb: float | None = None
    kv_memory_gb: float | None = None
    queues: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Scrape:
    """One successful scrape of SGLang's `/metrics`."""

    ranks: list[RankFigures]
    model_name: str | None = None
    engine_type: str | None = None
    progress: float | None = None  # sum of counters that change only with tokens or requests; to compare, not to show
    sent: float | None = None  # the part of it that changes when the detokenizer sends tokens, known while requests run
    scheduled: float | None = None  # the part of it that the schedulers change
    open_requests: float | None = None  # accepted by the HTTP server and not finished
    aborted_requests: float | None = None
    # Streamed or not. Finished requests include those whose client went away.
    started_requests: float | None = None
    finished_requests: float | None = None
    finished_prompt_tokens: float | None = None  # of the requests that ended, as the next two
    finished_answer_tokens: float | None = None
    # Of prompts; up to 0.5.8 counted again when a request is computed again.
    finished_cached_tokens: float | None = None
    posted_requests: float | None = None  # over HTTP
    answered_requests: float | None = None  # over HTTP, with status 200
    refused_requests: float | None = None  # over HTTP, with status 503
    server_errors: float | None = None  # over HTTP, with status 500
    generation_posts: float | None = None  # over HTTP, to endpoints that generate
    generation_responses: float | None = None  # to them, with any status
    # On this side of a pair; clients that gave up are among them.
    failed_bootstraps: float | None = None
    failed_transfers: float | None = None
    pauses: float | None = None  # POSTs to /pause_generation, cumulative
    resumptions: float | None = None  # POSTs to /continue_generation, cumulative
    # Cumulative, of the whole server. Time to first token is that of streamed requests where the release separates them.
    time_to_first_token: Histogram | None = None
    inter_token: Histogram | None = None
    request_latency: Histogram | None = None
    queue_time: Histogram | None = None
    answer_tokens: Histogram | None = None  # its "seconds" are tokens of an answer
    unrecognised: int = 0  # sglang families that no release of the census has
    counters_invalid: bool = False  # a counter is NaN or negative: the counters of this page are not used


Series = list[tuple["Mapping[str, str]", int]]  # labels, and the number of the sample in the page's order
Process = tuple["int | None", frozenset[tuple[str, str]]]  # DP rank, and labels

# Paths of the HTTP server that generate.
_GENERATES = re.compile(
    r"/(?:generate|completions|embeddings|responses|messages|rerank|score|classify|encode|chat|invocations)$"
)
_MEMBERS = ("_bucket", "_count", "_sum", "_total", "_created")


class _Reading(NamedTuple):
    """Where one source is on a page: which values add up to the figure of each process."""

    source: Source
    processes: tuple[tuple[int | None, tuple[int, ...]], ...]  # DP rank, and numbers of samples
    zeros: tuple[int | None, ...]  # DP ranks whose figure is zero where it is absent
    is_zero: bool  # of the whole server, where it is absent
    pools: tuple[tuple[int | None, int], ...]


class _Plan(NamedTuple):
    """Where everything is on a page, without the samples whose values cannot be."""

    ranks: list[_Reading]
    server: list[_Reading]
    histograms: list[tuple[str, histograms.Places]]
    sent: list[int]
    scheduled: list[int]
    shows_sent: bool
    model_name: str | None
    engine_type: str | None


class Places:
    """Where on a page the figures are: the same for all pages with the same labels."""

    def __init__(self, page: Page) -> None:
        self._series: dict[str, list[tuple[Mapping[str, str], int]]] = {}  # by family, without prefix
        self._members: dict[str, list[tuple[str, int]]] = {}  # of histograms, with raw labels
        families: dict[str, str | None] = {}  # printed name -> name without prefix; None for what is not SGLang's
        seen: set[tuple[str, str]] = set()
        for number, (printed, raw, _, _) in enumerate(page.samples):
            if printed not in families:
                families[printed] = name_with_colon(printed)[7:] if is_sglang_series(printed) else None
            family = families[printed]
            wanted, member = family in WANTED, family in HISTOGRAM_MEMBERS
            # Of two samples of one series the first, as in the pass-through.
            if family is None or not (wanted or member) or (printed, raw) in seen:
                continue
            seen.add((printed, raw))
            if wanted:
                self._series.setdefault(family, []).append((labels(raw), number))
            if member:
                self._members.setdefault(family, []).append((raw, number))
        self._unrecognised = _unrecognised(name for name in families.values() if name is not None)
        numbers = {name: {number for _, number in found} for name, found in self._series.items()}
        self._counters = {number for name, found in numbers.items() if name in CUMULATIVE for number in found}
        # Memory may be negative: a difference during which another process freed some.
        self._memory = {number for name, found in numbers.items() if name.endswith("_gb") for number in found}
        members = {number for found in self._members.values() for _, number in found}
        self._read = sorted(members.union(*numbers.values()))
        self._impossible: set[int] = set()
        self._plan = self._planned()

    def figures(self, values: Sequence[float]) -> Scrape:
        """Return the figures of a page from the values of its samples; None for those that the page does not have."""
        impossible = {number for number in self._read if not 0 <= values[number] <= MOST}
        impossible -= {number for number in impossible & self._memory if -MOST <= values[number] < 0}
        if impossible != self._impossible:
            self._impossible = impossible
            self._plan = self._planned()
        plan = self._plan
        figures: dict[str, Any] = {each.source.fact: _total(each, values) for each in plan.server}
        figures |= {fact: found.read(values) for fact, found in plan.histograms}
        sent, scheduled = [values[place] for place in plan.sent], [values[place] for place in plan.scheduled]
        return Scrape(
            ranks=_ranks(plan.ranks, values),
            model_name=plan.model_name,
            engine_type=plan.engine_type,
            progress=math.fsum(sent + scheduled) if sent or scheduled else None,
            sent=math.fsum(sent) if plan.shows_sent else None,
            scheduled=math.fsum(scheduled) if scheduled else None,
            **figures,
            unrecognised=self._unrecognised,
            counters_invalid=not impossible.isdisjoint(self._counters),
        )

    def _planned(self) -> _Plan:
        """Return where everything is but the samples whose values cannot be."""
        series: dict[str, Series] = {}
        for family, samples in self._series.items():
            found = [(label, number) for label, number in samples if number not in self._impossible]
            if found:
                series[family] = found
        members = {
            name: [(raw, number) for raw, number in found if number not in self._impossible]
            for name, found in self._members.items()
        }
        latencies: dict[str, histograms.Places] = {}
        for source in HISTOGRAM_SOURCES:
            if source.fact not in latencies and f"{source.metric}_bucket" in members:
                buckets, counts, sums = (
                    members.get(f"{source.metric}_{each}", []) for each in ("bucket", "count", "sum")
                )
                latencies[source.fact] = histograms.places(buckets, counts, sums, source.where)
        sent, scheduled = (
            [
                number
                for source in PROGRESS_SOURCES
                if source.fact == fact
                for _, number in series.get(source.metric, [])
            ]
            for fact in ("sent", "scheduled")
        )
        return _Plan(
            [_reading(source, series) for source in SOURCES],
            [_reading(source, series) for source in SERVER_SOURCES],
            list(latencies.items()),
            sent,
            scheduled,
            OUTPUTS in series,
            _model_name(series),
            _engine_type(series),
        )


def read(text: str) -> Scrape:
    """Return the figures of one page of `/metrics`; without SGLang's series there are no ranks."""
    page = scan(text)
    return Places(page).figures(page.values)


def _ranks(readings: Iterable[_Reading], values: Sequence[float]) -> list[RankFigures]:
    ranks: dict[int | None, RankFigures] = {}
    for reading in readings:
        fact = reading.source.fact
        queue = fact.removeprefix("queues.")
        for dp, value in _figures(reading, values).items():
            if dp not in ranks:
                ranks[dp] = RankFigures(dp=dp)
            rank = ranks[dp]
            if queue != fact:
                rank.queues[queue] = max(value, rank.queues.get(queue, value))
            elif getattr(rank, fact) is None:
                setattr(rank, fact, value)
    # On a page with ranks, a figure without a rank label belongs to none of them.
    return sorted((rank for rank in ranks.values() if rank.dp is not None), key=lambda rank: rank.dp or 0) or list(
        ranks.values()
    )


def _figures(reading: _Reading, values: Sequence[float]) -> dict[int | None, float]:
    """Return the figure of one source for every DP rank that has it."""
    found: dict[int | None, float] = {}
    fold = min if reading.source.fold == "min" else max
    for dp, numbers in reading.processes:
        value = values[numbers[0]] if len(numbers) == 1 else sum(values[number] for number in numbers)
        found[dp] = fold(found[dp], value) if dp in found else value
    for dp in reading.zeros:
        found.setdefault(dp, 0.0)
    if reading.source.pool:
        pools = {dp for dp, number in reading.pools if values[number] > 0}
        found = {dp: value for dp, value in found.items() if value > 0 or dp in pools}
    return found


def _total(reading: _Reading, values: Sequence[float]) -> float | None:
    if reading.source.by_rank:
        return math.fsum(ranks.values()) if (ranks := _figures(reading, values)) else None
    if reading.processes:
        return math.fsum(sum(values[number] for number in numbers) for _, numbers in reading.processes)
    return 0.0 if reading.is_zero else None


def _reading(source: Source, series: Mapping[str, Series]) -> _Reading:
    """Return where a source is."""
    if source.needs and source.needs not in series:
        return _Reading(source, (), (), is_zero=False, pools=())
    return _Reading(
        source,
        tuple((dp, tuple(numbers)) for (dp, _), numbers in _processes(source, series.get(source.metric, ())).items()),
        tuple({_dp(label): None for sibling in source.zero_with for label, _ in series.get(sibling, ())}),
        is_zero=any(sibling in series for sibling in source.zero_with),
        pools=tuple((_dp(label), number) for name in source.pool for label, number in series.get(name, ())),
    )


def _processes(source: Source, samples: Iterable[tuple[Mapping[str, str], int]]) -> dict[Process, list[int]]:
    """Return what adds up to the figure of every process: the total where it is split by priority, the sum of `parts`."""
    totals: dict[Process, list[int]] = {}
    split: dict[Process, list[int]] = {}
    for label, number in samples:
        if source.where and label.get(source.where[0], "") not in source.where[1].split("|"):
            continue
        if source.generates and not _GENERATES.search(label.get("endpoint", "")):
            continue
        key = (_dp(label), frozenset(item for item in label.items() if item[0] not in ("priority", source.parts)))
        (split if label.get("priority") else totals).setdefault(key, []).append(number)
    return {**split, **totals}


def _dp(label: Mapping[str, str]) -> int | None:
    rank = label.get("dp_rank", "")
    number = int(rank) if rank.isascii() and rank.isdigit() and len(rank) < 7 else MOST_RANKS
    return number if number < MOST_RANKS else None


def _model_name(series: Mapping[str, Series]) -> str | None:
    names = (label.get("model_name") for found in series.values() for label, _ in found)
    return next(filter(None, names), None)


def _engine_type(series: Mapping[str, Series]) -> str | None:
    """Return the role of the server: `unified`, `prefill` or `decode`.

    Before 0.5.9 the label of every server was `unified`, so there the role is None.
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
    # Present since the label is right: `cache_source` came with 0.5.9, the gauges with 0.5.10.post1 and 0.5.11.
    honest = any(name in series for name in ("full_token_usage", "startup_available_gpu_memory_gb")) or any(
        "cache_source" in label for label, _ in series.get("cached_tokens_total", [])
    )
    return engine if honest or engine != "unified" else None


def _unrecognised(names: Iterable[str]) -> int:
    unknown = set()
    for name in names:
        base = next((name.removesuffix(member) for member in _MEMBERS if name.endswith(member)), name)
        if not FAMILIES & {name, base, base + "_total"}:
            unknown.add(base)
    return len(unknown)


# A larger page is not cached; a page of eight ranks has 0.4 MB.
MOST_CHARACTERS = 8 << 20


class ParsedPage(NamedTuple):
    """The figures of a page, and the page itself, safe to append to ours (empty without pass-through)."""

    scrape: Scrape
    native: str
    left_out: int = 0  # lines not in `native` because Prometheus would reject them
    too_long: int = 0  # lines that were not read, as `too_many`: `exposition.bounded`
    too_many: int = 0


@dataclass(slots=True)
class _Layout:
    """The structure of a page, and the lines and values of the last one that had it."""

    lines: list[str]
    figures_begin: Sequence[int]  # in each line, where its figure is; 0 for a line without one
    samples: Sequence[int]  # the number of each line's sample
    values: list[float]
    places: Places
    native: Sequence[int] | None  # which lines are passed through, in which order; None: the page unchanged
    left_out: int

    def take(self, lines: list[str]) -> bool:
        """Take the lines of the next page; False, and it is of no use any more, where more than figures changed."""
        if len(lines) != len(self.lines):
            return False
        changed = [number for number, (line, last) in enumerate(zip(lines, self.lines, strict=True)) if line != last]
        for number in changed:
            begin, line = self.figures_begin[number], lines[number]
            if not begin or line[:begin] != self.lines[number][:begin]:
                return False
            value = exposition.figure(line[begin:])
            if value is None:
                return False
            self.values[self.samples[number]] = value
        self.lines = lines
        return True


class PageReader:
    """Reads the pages of one server; not thread-safe."""

    def __init__(self, *, passthrough: bool = True, only: frozenset[str] | None = None) -> None:
        self._passthrough, self._only = passthrough, only if passthrough else frozenset()
        self._layout: _Layout | None = None

    def read(self, text: str) -> ParsedPage:
        """Read one page."""
        text, lines, *dropped = exposition.bounded(text)
        layout = self._layout
        if layout is None or not layout.take(lines):
            return self._read_anew(text, lines, dropped)
        native = text if layout.native is None else "".join([lines[place] + "\n" for place in layout.native])
        return ParsedPage(layout.places.figures(layout.values), native, layout.left_out, *dropped)

    def _read_anew(self, text: str, lines: list[str], dropped: Iterable[int]) -> ParsedPage:
        """Read a page whose structure is new, and keep that where the next page may have it too."""
        page = exposition.scan(text)
        passed = exposition.passthrough(page, self._only) if self._passthrough else exposition.SafePage("")
        places, is_kept = Places(page), len(text) <= MOST_CHARACTERS
        self._layout = _layout(page, places, passed, text, lines) if is_kept else None
        if self._layout is not None:  # without a structure, the next page needs them again
            exposition.clear_caches()
        return ParsedPage(places.figures(page.values), passed.text, passed.left_out, *dropped)


def _layout(page: Page, places: Places, passed: exposition.SafePage, text: str, lines: list[str]) -> _Layout | None:
    """Return the structure of a page; None where what is `passed` on may depend on more than the values."""
    if not page.canonical or not page.samples or any(name.startswith("sglang_") for name, *_ in page.samples):
        return None
    begins = [0 if line[:1] in ("", "#") else line.rindex(" ") + 1 for line in lines]
    samples = [number - 1 for number in accumulate(map(bool, begins))]
    native_lines = None
    if passed.text != text:
        passed_lines = passed.text.splitlines()
        first_places = dict(zip(reversed(lines), reversed(range(len(lines))), strict=True))
        if not first_places.keys() >= set(passed_lines):  # a line was changed
            return None
        native_lines = [first_places[line] for line in passed_lines]
    return _Layout(lines, begins, samples, page.values, places, native_lines, passed.left_out)
