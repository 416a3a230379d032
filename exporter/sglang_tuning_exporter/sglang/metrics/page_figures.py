"""One page of SGLang's `/metrics` as objects, read with the catalogue. Pure; nothing here raises.

Times are unix seconds; memory is in GB as SGLang prints it (1 GB = 2**30 bytes). `None` means that this release does not show the figure, never
zero. Until a new series comes only the values of a page change, so `PageReader` keeps the structure of the page before: to compare the rest
takes a small part of the time of parsing it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
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
Figures = Callable[[Sequence[float]], dict["int | None", float]]  # the values of a page in, one figure by DP rank out

# Paths of the HTTP server that generate.
_GENERATES = re.compile(
    r"/(?:generate|completions|embeddings|responses|messages|rerank|score|classify|encode|chat|invocations)$"
)
_MEMBERS = ("_bucket", "_count", "_sum", "_total", "_created")


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
        self._scrape = self._reader()

    def figures(self, values: Sequence[float]) -> Scrape:
        """Return the figures of a page from the values of its samples; None for those that the page does not have."""
        impossible = {number for number in self._read if not 0 <= values[number] <= MOST}
        impossible -= {number for number in impossible & self._memory if -MOST <= values[number] < 0}
        if impossible != self._impossible:
            self._impossible = impossible
            self._scrape = self._reader()
        scrape = self._scrape(values)
        scrape.counters_invalid = not impossible.isdisjoint(self._counters)
        return scrape

    def _reader(self) -> Callable[[Sequence[float]], Scrape]:
        """Return what reads a page without the samples whose values cannot be."""
        series: dict[str, Series] = {}
        for family, samples in self._series.items():
            if found := [(label, number) for label, number in samples if number not in self._impossible]:
                series[family] = found
        members = {
            name: [(raw, number) for raw, number in found if number not in self._impossible]
            for name, found in self._members.items()
        }
        of_server: dict[str, Callable[[Sequence[float]], Any]] = {}
        for source in HISTOGRAM_SOURCES:
            if source.fact not in of_server and f"{source.metric}_bucket" in members:
                buckets, counts, sums = (
                    members.get(f"{source.metric}_{each}", []) for each in ("bucket", "count", "sum")
                )
                of_server[source.fact] = histograms.places(buckets, counts, sums, source.where).read
        of_server |= {source.fact: _of_server(source, series) for source in SERVER_SOURCES}
        by_rank = [(source.fact, _by_rank(source, series)) for source in SOURCES]
        in_progress = [(each.fact, number) for each in PROGRESS_SOURCES for _, number in series.get(each.metric, ())]
        names: dict[str, Any] = {"model_name": _model_name(series), "engine_type": _engine_type(series)}

        def scrape(values: Sequence[float]) -> Scrape:
            sent, scheduled = (
                [values[number] for fact, number in in_progress if fact == wanted] for wanted in ("sent", "scheduled")
            )
            return Scrape(
                _ranks(by_rank, values),
                progress=math.fsum(sent + scheduled) if in_progress else None,
                sent=math.fsum(sent) if OUTPUTS in series else None,
                scheduled=math.fsum(scheduled) if scheduled else None,
                unrecognised=self._unrecognised,
                **names,
                **{fact: read(values) for fact, read in of_server.items()},
            )

        return scrape


def read(text: str) -> Scrape:
    """Return the figures of one page of `/metrics`; without SGLang's series there are no ranks."""
    page = scan(text)
    return Places(page).figures(page.values)


def _ranks(readers: Iterable[tuple[str, Figures]], values: Sequence[float]) -> list[RankFigures]:
    ranks: dict[int | None, RankFigures] = {}
    for fact, read in readers:
        queue = fact.removeprefix("queues.")
        for dp, value in read(values).items():
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


def _by_rank(source: Source, series: Mapping[str, Series]) -> Figures:
    """Return what reads a source for every DP rank that has it."""
    if source.needs and source.needs not in series:
        return lambda _: {}
    processes = [(dp, each) for (dp, _), each in _processes(source, series.get(source.metric, ())).items()]
    zeros = {_dp(label): None for sibling in source.zero_with for label, _ in series.get(sibling, ())}
    pools = [(_dp(label), number) for name in source.pool for label, number in series.get(name, ())]
    fold = min if source.fold == "min" else max

    def figures(values: Sequence[float]) -> dict[int | None, float]:
        found: dict[int | None, float] = {}
        for dp, numbers in processes:
            value = values[numbers[0]] if len(numbers) == 1 else sum(values[number] for number in numbers)
            found[dp] = fold(found[dp], value) if dp in found else value
        for dp in zeros:
            found.setdefault(dp, 0.0)
        if not source.pool:
            return found
        filled = {dp for dp, number in pools if values[number] > 0}
        return {dp: value for dp, value in found.items() if value > 0 or dp in filled}

    return figures


def _of_server(source: Source, series: Mapping[str, Series]) -> Callable[[Sequence[float]], float | None]:
    """Return what reads a source of the whole server."""
    if source.by_rank:
        by_rank = _by_rank(source, series)
        return lambda values: math.fsum(found.values()) if (found := by_rank(values)) else None
    numbers = [number for each in _processes(source, series.get(source.metric, ())).values() for number in each]
    absent = 0.0 if any(sibling in series for sibling in source.zero_with) else None
    return lambda values: math.fsum(values[number] for number in numbers) if numbers else absent


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


class PageReader:
    """Reads the pages of one server; not thread-safe. It keeps the structure of the last page, where the next may have the same."""

    def __init__(self, *, passthrough: bool = True, only: frozenset[str] | None = None) -> None:
        self._passthrough, self._only = passthrough, only if passthrough else frozenset()
        self._places: Places | None = None  # None: without a structure that the next page may have
        self._lines: list[str] = []
        self._begins: Sequence[int] = ()  # in each line, where its figure is; 0 for a line without one
        self._samples: Sequence[int] = ()  # the number of each line's sample
        self._values: list[float] = []
        # Which lines are passed through, in which order; None: the page unchanged.
        self._native: Sequence[int] | None = None
        self._left_out = 0

    def read(self, text: str) -> ParsedPage:
        """Read one page."""
        text, lines, *dropped = exposition.bounded(text)
        if self._places is not None and self._goes_on(lines):
            native = text if self._native is None else "".join([lines[place] + "\n" for place in self._native])
            return ParsedPage(self._places.figures(self._values), native, self._left_out, *dropped)
        page = exposition.scan(text)
        passed = exposition.passthrough(page, self._only) if self._passthrough else exposition.SafePage("")
        places = Places(page)
        self._places = places if len(text) <= MOST_CHARACTERS and self._keep(page, passed, text, lines) else None
        if self._places is not None:  # without a structure, the next page needs them again
            exposition.clear_caches()
        return ParsedPage(places.figures(page.values), passed.text, passed.left_out, *dropped)

    def _goes_on(self, lines: list[str]) -> bool:
        """Take the lines of the next page; False, and the structure is of no use any more, where more than figures changed."""
        if len(lines) != len(self._lines):
            return False
        changed = [number for number, (line, last) in enumerate(zip(lines, self._lines, strict=True)) if line != last]
        for number in changed:
            begin, line = self._begins[number], lines[number]
            if not begin or line[:begin] != self._lines[number][:begin]:
                return False
            value = exposition.figure(line[begin:])
            if value is None:
                return False
            self._values[self._samples[number]] = value
        self._lines = lines
        return True

    def _keep(self, page: Page, passed: exposition.SafePage, text: str, lines: list[str]) -> bool:
        """Keep the structure of a page; False where what is `passed` on may depend on more than the values."""
        if not page.canonical or not page.samples or any(name.startswith("sglang_") for name, *_ in page.samples):
            return False
        self._native = None
        if passed.text != text:
            passed_lines = passed.text.splitlines()
            first_places = dict(zip(reversed(lines), reversed(range(len(lines))), strict=True))
            if not first_places.keys() >= set(passed_lines):  # a line was changed
                return False
            self._native = [first_places[line] for line in passed_lines]
        self._begins = [0 if line[:1] in ("", "#") else line.rindex(" ") + 1 for line in lines]
        self._samples = [number - 1 for number in accumulate(map(bool, self._begins))]
        self._lines, self._values, self._left_out = lines, page.values, passed.left_out
        return True
