"""Two runs compared: which arguments changed, what got better or worse, and whether the change is the likely cause. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import NamedTuple

from sglang_tuning_exporter.diagnosis.command import typed_args
from sglang_tuning_exporter.diagnosis.evidence import amount
from sglang_tuning_exporter.diagnosis.json_findings import Document, number
from sglang_tuning_exporter.diagnosis.table import BY_ID
from sglang_tuning_exporter.diagnosis.wording import capitalised
from sglang_tuning_exporter.sglang.args.printed import VARYING_ARGS
from sglang_tuning_exporter.state.facts import ServerFacts
from sglang_tuning_exporter.state.totals import Totals

# With less serving time in either run, nothing is compared.
ENOUGH_SECONDS = 30.0
ENOUGH_BATCHES = 10
# Figures of the load within this factor of each other are the same (docs/decisions.md, "Reports").
LOAD_ALIKE = 1.3
# With fewer requests their mean lengths are chance.
ENOUGH_REQUESTS = 20
RETRACTED_SHARE = 0.1
# Arguments that change the share of cached prompt tokens: if one of them changed, that share says nothing about the load.
_CACHE_ARGS = frozenset(
    {
        "disable_radix_cache", "schedule_policy", "page_size", "max_total_tokens", "mem_fraction_static", "kv_cache_dtype",
        "enable_hierarchical_cache", "hicache_ratio", "hicache_size", "radix_eviction_policy", "load_balance_method",
        "max_running_requests", "schedule_conservativeness", "dp_size",
    }
)  # fmt: skip
_LONGEST_VALUE = 80
_FAILURES = "out-of-memory failures"


@dataclass(frozen=True, slots=True)
class RunFigures:
    """The figures of a run, as the document names them. Shares are of serving time, 0-1; None where the log does not show a figure."""

    serving_seconds: float
    batches: float  # batch lines; not in the document
    generated_tokens_per_second: float | None  # while something was decoded
    prompt_tokens_per_second: float | None  # of serving time, cached ones included
    mean_running_requests: float | None
    mean_queued_requests: float | None
    mean_token_usage: float | None  # 0-1
    share_waiting: float | None  # with requests waiting
    share_queue_above_range: float | None  # with a queue that is too long for the profile
    retractions_per_minute: float  # of serving time
    cuda_graph_coverage: float | None  # share of decode batches that replayed a graph
    out_of_memory: float  # failures
    rejections_per_minute: float  # of serving time
    mean_prompt_tokens: float | None = None  # of a request, cached ones included
    mean_generated_tokens: float | None = None  # of a request
    share_cached: float | None = None  # of the prompt tokens

    @property
    def enough(self) -> bool:
        """Whether there was enough load to compare it."""
        return self.serving_seconds >= ENOUGH_SECONDS and self.batches >= ENOUGH_BATCHES

    @property
    def concurrency(self) -> float | None:
        """Mean number of requests at the server, running and waiting."""
        if self.mean_running_requests is None and self.mean_queued_requests is None:
            return None
        return (self.mean_running_requests or 0.0) + (self.mean_queued_requests or 0.0)

    @property
    def document(self) -> Document:
        """The figures for the document."""
        return {name: rounded(value) for name, value in asdict(self).items() if name != "batches"}


def rounded(value: float | None) -> float | None:
    """Return a figure as the document has it."""
    return None if value is None or not isfinite(value) else number(round(value, 4))


def figures_of(
    totals: Totals, served: float, throughput: float | None, out_of_memory: float, *, has_graphs: bool
) -> RunFigures:
    """Return a run's figures from its totals; `served`: seconds in which any scheduler served."""
    counts = totals.counts
    minutes = max(served, 60.0) / 60.0  # a shorter run counts as a minute: one burst is no rate
    prompts, requests = counts["computed_tokens"] + counts["cached_tokens"], counts["new_sequences"]
    # Retracted requests start again with what they had generated, so their prompts are not those of the clients.
    knows_lengths = requests >= ENOUGH_REQUESTS and counts["log_retracted_requests"] <= RETRACTED_SHARE * requests
    empty = totals.share("queue", "empty")
    generated = (throughput or 0.0) * served  # an estimate: the rate is read for a part of the seconds only

    def together(figure: str) -> float | None:
        """All schedulers added up, while any of them served."""
        is_known = served > 0 and totals.integrals[figure + "_seconds"] > 0
        return totals.integrals[figure] / served if is_known else None

    return RunFigures(
        serving_seconds=served,
        batches=counts["observations"],
        generated_tokens_per_second=throughput,
        prompt_tokens_per_second=prompts / served if served > 0 and prompts else None,
        mean_running_requests=together("running"),
        mean_queued_requests=together("queued"),
        mean_token_usage=totals.mean("usage"),
        share_waiting=None if empty is None else 1.0 - empty,
        share_queue_above_range=totals.share("queue", "above_range"),
        retractions_per_minute=counts["retraction_events"] / minutes,
        cuda_graph_coverage=totals.coverage if has_graphs else None,
        out_of_memory=out_of_memory,
        rejections_per_minute=counts["rejected_requests"] / minutes,
        mean_prompt_tokens=prompts / requests if knows_lengths and prompts else None,
        mean_generated_tokens=generated / requests if knows_lengths and generated else None,
        share_cached=counts["cached_tokens"] / prompts if knows_lengths and prompts else None,
    )


class StartArgs(NamedTuple):
    """A start's arguments: as printed, and what must have been typed to get them (None: not known)."""

    printed: Mapping[str, object]
    typed: Mapping[str, object] | None = None

    @classmethod
    def of(cls, facts: ServerFacts) -> StartArgs:
        """Return the arguments of a start."""
        return cls(dict(facts.args), typed_args(facts))


def changed_args(before: StartArgs, after: StartArgs) -> list[Document]:
    """Return the arguments that differ and may have been set, with both values as text.

    Where it is known what was typed, arguments that the server derives are left out; so are those that only one release has.
    """
    if before.typed is not None and after.typed is not None:
        old, new = {**before.printed, **before.typed}, {**after.printed, **after.typed}
        names: Iterable[str] = {**before.typed, **after.typed}
    else:
        old, new = dict(before.printed), dict(after.printed)
        names = [arg for arg in new if not arg.startswith("_")]
    return [
        {"arg": arg, "flag": "--" + arg.replace("_", "-"), "before": _text(old[arg]), "after": _text(new[arg])}
        for arg in names
        if arg in old and arg in new and arg not in VARYING_ARGS and old[arg] != new[arg]
    ]


def changed(change: Mapping[str, str]) -> str:
    """Return a changed argument in words."""
    return f"{change['flag']} {change['before']} → {change['after']}"


def is_of(change: Document, arg: str) -> bool:
    """Whether a changed argument is `arg`, or one of those whose names begin with it."""
    return bool(arg) and (change["arg"] == arg or change["arg"].startswith(arg + "_"))


def _text(value: object) -> str:
    if value is None:
        return "not set"
    text = {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"


@dataclass(frozen=True, slots=True)
class _Measure:
    """A figure that is compared; `good` is 1 where more is better, -1 where less is, 0 where neither is.

    Two values are the same when they differ by less than `least` or by less than the share `relative` of the larger.
    """

    name: str
    field: str
    unit: str
    good: int
    least: float
    relative: float = 0.1
    by_load: bool = False  # depends on the load: with another load it says nothing about the server


_MEASURES = (
    _Measure("generated tokens a second", "generated_tokens_per_second", "per_second", 1, 1.0, 0.2, by_load=True),
    _Measure("retractions a minute", "retractions_per_minute", "per_minute", -1, 0.5, 0.2),
    _Measure("serving time with requests waiting", "share_waiting", "share", -1, 0.1),
    _Measure("serving time with too long a queue", "share_queue_above_range", "share", -1, 0.1),
    _Measure("requests rejected a minute", "rejections_per_minute", "per_minute", -1, 0.5, 0.2),
    _Measure(_FAILURES, "out_of_memory", "count", -1, 0.5),
    _Measure("CUDA graph coverage", "cuda_graph_coverage", "share", 1, 0.05),
    _Measure("mean queued requests", "mean_queued_requests", "count", -1, 1.0, 0.2),
    _Measure("mean running requests", "mean_running_requests", "count", 0, 1.0, 0.2),
    _Measure("mean token usage", "mean_token_usage", "ratio", 0, 0.1),
    _Measure("prompt tokens a second", "prompt_tokens_per_second", "per_second", 0, 1.0, 0.2),
)


def compare(
    before: RunFigures, after: RunFigures, changes: Sequence[Document], verdict_before: str = "", *, known: bool = True
) -> Document:
    """Return what got better or worse, and whether the changed arguments are the likely cause.

    `verdict_before` is what limited the server before; `known`: both runs printed their arguments.
    """
    load = _load_differs(before, after, changes)
    rows = [row for measure in _MEASURES if (row := _row(measure, before, after, load)) is not None]
    failed = any(row["name"] == _FAILURES and row["change"] == "worse" for row in rows)
    if not (before.enough and after.enough) and not failed:
        overall, cause = "not_comparable", "none"
        words = f"Too little was served to compare: {before.serving_seconds:.0f} s before, {after.serving_seconds:.0f} s after."
    else:
        directions = {"better", "worse"} & {row["change"] for row in rows}
        overall = "mixed" if len(directions) == 2 else next(iter(directions), "same")
        cause, because = _cause(changes, overall, verdict_before, load, known=known)
        words = f"{_outcome(overall, rows)} {because}"
    return {"overall": overall, "cause": cause, "words": words, "changed_args": changes, "figures": rows}


def _row(measure: _Measure, before: RunFigures, after: RunFigures, load: str) -> Document | None:
    """Return a figure before and after; what a load that differs changes is neither better nor worse."""
    old, new = getattr(before, measure.field), getattr(after, measure.field)
    if old is None or new is None:
        return None
    direction = "same"
    if abs(new - old) >= max(measure.least, measure.relative * max(abs(old), abs(new))):
        neither = not measure.good or (measure.by_load and load)
        direction = "different" if neither else "better" if (new - old) * measure.good > 0 else "worse"
    return {
        "name": measure.name,
        "before": rounded(old),
        "after": rounded(new),
        "unit": measure.unit,
        "change": direction,
    }


def _outcome(overall: str, rows: Iterable[Document]) -> str:
    if overall == "same":
        return "Nothing got clearly better or worse."
    names = {way: [row["name"] for row in rows if row["change"] == way] for way in ("better", "worse")}
    return capitalised("; ".join(f"{way}: {_listed(found)}" for way, found in names.items() if found)) + "."


def _cause(  # noqa: PLR0911 - one answer for each case
    changes: Sequence[Document], overall: str, verdict_before: str, load: str, *, known: bool
) -> tuple[str, str]:
    count, is_same = len(changes), overall == "same"
    all_changes = _listed([changed(change) for change in changes[:4]]) + (f" and {count - 4} more" if count > 4 else "")
    if not known:
        return "none", "The arguments of one of the two are not in its log, so no cause can be named."
    if not changes:
        same = "The arguments are the same"
        return "none", f"{same}." if is_same else f"{same}: load, machine or model made the difference."
    if is_same and load:
        return "unproven", f"The load differs ({load}), so the effect of {all_changes} is not known."
    if is_same:
        return "none", f"So {all_changes} made no difference that the log shows."
    if load:
        are = "is" if count == 1 else "are"
        return "unproven", f"The load differs too ({load}), so {all_changes} {are} not proven to be the cause."
    if count == 1:
        return "likely", f"The load was alike and nothing else was changed, so {all_changes} is the likely cause."
    arg = BY_ID[verdict_before].remedy.arg if verdict_before in BY_ID else ""
    advised = next((changed(change) for change in changes if is_of(change, arg)), "")
    if advised:
        others = "another was" if count == 2 else f"{count - 1} others were"
        flag = f"{advised} is the flag for what limited the server before"
        return "possible", f"The load was alike; {flag}, though {others} changed too."
    return (
        "possible",
        f"The load was alike, but {count} arguments were changed at once ({all_changes}): try them one by one.",
    )


def _load_differs(before: RunFigures, after: RunFigures, changes: Sequence[Document]) -> str:
    """Return in words how the load differs; empty where it is alike.

    A fixed number of clients gives the same concurrency, a fixed rate of requests the same prompt tokens: one of the two is enough.
    The lengths of the requests must be alike in any case.
    """
    amounts = _differences(
        ("requests at once", before.concurrency, after.concurrency),
        ("prompt tokens a second", before.prompt_tokens_per_second, after.prompt_tokens_per_second),
    )
    found = [words for words, _ in amounts] if all(differs for _, differs in amounts) else []
    shapes = _differences(
        ("prompt tokens a request", before.mean_prompt_tokens, after.mean_prompt_tokens),
        ("generated tokens a request", before.mean_generated_tokens, after.mean_generated_tokens),
    )
    found += [words for words, differs in shapes if differs]
    cached, then = before.share_cached, after.share_cached
    if cached is not None and then is not None and not _CACHE_ARGS.intersection(change["arg"] for change in changes):
        was, now = 1.0 - cached, 1.0 - then
        if max(was, now) > LOAD_ALIKE * min(was, now) + 0.05:
            found.append(f"{100 * cached:.0f} → {100 * then:.0f} % of the prompts cached")
    return ", ".join(found)


def _differences(*figures: tuple[str, float | None, float | None]) -> list[tuple[str, bool]]:
    return [
        (f"{amount(old, 'count')} → {amount(new, 'count')} {name}", max(old, new) > LOAD_ALIKE * min(old, new) + 0.5)
        for name, old, new in figures
        if old is not None and new is not None
    ]


def _listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
