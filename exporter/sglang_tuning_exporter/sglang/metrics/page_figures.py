"""Read one page of SGLang's `/metrics` with the catalogue. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_tuning_exporter.sglang.metrics.catalogue import (
    CUMULATIVE,
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
from sglang_tuning_exporter.sglang.metrics.figures import MOST_RANKS, RankFigures, Scrape
from sglang_tuning_exporter.sglang.metrics.histograms import MOST
from sglang_tuning_exporter.sglang.metrics.histograms import read as read_histogram
from sglang_tuning_exporter.sglang.metrics.names import FAMILIES

Series = list[tuple["Mapping[str, str]", float]]
Process = tuple["int | None", frozenset[tuple[str, str]]]  # DP rank, and labels

# Paths of the HTTP server that generate.
_GENERATES = re.compile(
    r"/(?:generate|completions|embeddings|responses|messages|rerank|score|classify|encode|chat|invocations)$"
)
_MEMBERS = ("_bucket", "_count", "_sum", "_total", "_created")


@dataclass(frozen=True, slots=True)
class SampleIndexes:
    """Which samples of a page are read, by their number in the page's order; the same for all pages with the same labels."""

    series: Mapping[str, list[tuple[Mapping[str, str], int]]]  # by family, without prefix
    members: Mapping[str, list[tuple[str, int]]]  # of histograms, with raw labels
    unrecognised: int


def index_samples(page: Page) -> SampleIndexes:
    """Return where on a page the figures are."""
    series: dict[str, list[tuple[Mapping[str, str], int]]] = {}
    members: dict[str, list[tuple[str, int]]] = {}
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
            series.setdefault(family, []).append((labels(raw), number))
        if member:
            members.setdefault(family, []).append((raw, number))
    return SampleIndexes(series, members, _unrecognised(name for name in families.values() if name is not None))


def figures_at(indexes: SampleIndexes, values: Sequence[float]) -> Scrape:
    """Return the figures of a page from the values of its samples; None for those that the page does not have."""
    series: dict[str, Series] = {}
    counters_invalid = False
    for family, samples in indexes.series.items():
        found = [(label, value) for label, number in samples if _is_plausible(family, value := values[number])]
        if found:
            series[family] = found
        counters_invalid = counters_invalid or (len(found) < len(samples) and family in CUMULATIVE)
    members = {name: [(raw, values[number]) for raw, number in found] for name, found in indexes.members.items()}
    figures: dict[str, Any] = {source.fact: _total(source, series) for source in SERVER_SOURCES}
    for source in HISTOGRAM_SOURCES:
        if source.fact not in figures and f"{source.metric}_bucket" in members:
            buckets, counts, sums = (members.get(f"{source.metric}_{each}", []) for each in ("bucket", "count", "sum"))
            figures[source.fact] = read_histogram(buckets, counts, sums, source.where)
    sent, scheduled = (
        [value for source in PROGRESS_SOURCES if source.fact == fact for _, value in series.get(source.metric, [])]
        for fact in ("sent", "scheduled")
    )
    return Scrape(
        ranks=_ranks(series),
        model_name=_model_name(series),
        engine_type=_engine_type(series),
        progress=math.fsum(sent + scheduled) if sent or scheduled else None,
        sent=math.fsum(sent) if OUTPUTS in series else None,
        scheduled=math.fsum(scheduled) if scheduled else None,
        **figures,
        unrecognised=indexes.unrecognised,
        counters_invalid=counters_invalid,
    )


def _is_plausible(family: str, value: float) -> bool:
    """Whether a value can be one: memory may be negative, a difference during which another process freed some."""
    return 0 <= value <= MOST or (-MOST <= value < 0 and family.endswith("_gb"))


def read(text: str) -> Scrape:
    """Return the figures of one page of `/metrics`; without SGLang's series there are no ranks."""
    page = scan(text)
    return figures_at(index_samples(page), [value for _, _, value, _ in page.samples])


def _ranks(series: Mapping[str, Series]) -> list[RankFigures]:
    ranks: dict[int | None, RankFigures] = {}
    for source in SOURCES:
        for dp, value in _figures(source, series).items():
            rank = ranks.setdefault(dp, RankFigures(dp=dp))
            queue = source.fact.removeprefix("queues.")
            if queue != source.fact:
                rank.queues[queue] = max(value, rank.queues.get(queue, value))
            elif getattr(rank, source.fact) is None:
                setattr(rank, source.fact, value)
    # On a page with ranks, a figure without a rank label belongs to none of them.
    return sorted((rank for rank in ranks.values() if rank.dp is not None), key=lambda rank: rank.dp or 0) or list(
        ranks.values()
    )


def _figures(source: Source, series: Mapping[str, Series]) -> dict[int | None, float]:
    """Return the figure of one source for every DP rank that has it."""
    if source.needs and source.needs not in series:
        return {}
    found: dict[int | None, float] = {}
    for key, value in _by_process(source, series.get(source.metric, [])).items():
        fold, dp = min if source.fold == "min" else max, key[0]
        found[dp] = fold(found.get(dp, value), value)
    for sibling in source.zero_with:
        for label, _ in series.get(sibling, []):
            found.setdefault(_dp(label), 0.0)
    if source.pool:
        pools = {_dp(label) for name in source.pool for label, value in series.get(name, []) if value > 0}
        found = {dp: value for dp, value in found.items() if value > 0 or dp in pools}
    return found


def _by_process(source: Source, series: Series) -> dict[Process, float]:
    """Return the figure of every process: the total where it is split by priority, the sum of `parts`."""
    totals: dict[Process, float] = {}
    split: dict[Process, float] = {}
    for label, value in series:
        if source.where and label.get(source.where[0], "") not in source.where[1].split("|"):
            continue
        if source.generates and not _GENERATES.search(label.get("endpoint", "")):
            continue
        key = (_dp(label), frozenset(item for item in label.items() if item[0] not in ("priority", source.parts)))
        target = split if label.get("priority") else totals
        target[key] = target.get(key, 0.0) + value
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


def _total(source: Source, series: Mapping[str, Series]) -> float | None:
    if source.by_rank:
        return math.fsum(ranks.values()) if (ranks := _figures(source, series)) else None
    if found := _by_process(source, series.get(source.metric, [])):
        return math.fsum(found.values())
    return 0.0 if any(sibling in series for sibling in source.zero_with) else None


def _unrecognised(names: Iterable[str]) -> int:
    unknown = set()
    for name in names:
        base = next((name.removesuffix(member) for member in _MEMBERS if name.endswith(member)), name)
        if not FAMILIES & {name, base, base + "_total"}:
            unknown.add(base)
    return len(unknown)
