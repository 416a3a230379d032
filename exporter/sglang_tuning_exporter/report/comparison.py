"""Two runs compared: which arguments changed, what got better or worse, and whether the change is the likely cause. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from sglang_tuning_exporter.diagnosis.command import typed_args
from sglang_tuning_exporter.diagnosis.evidence import amount
from sglang_tuning_exporter.diagnosis.table import BY_ID
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


Direction: TypeAlias = Literal["better", "worse", "same", "different"]
Overall: TypeAlias = Literal["better", "worse", "mixed", "same", "not_comparable"]
Cause: TypeAlias = Literal["likely", "possible", "unproven", "none"]


@dataclass(frozen=True, slots=True)
class RunFigures:
    """The figures of a run. Shares are of serving time, 0-1; None where the log does not show a figure."""

    serving_seconds: float
    batches: float  # batch lines
    throughput: float | None  # generated tokens per second, while something was decoded
    prompt_tokens: float | None  # per second of serving time, cached ones included
    running: float | None  # mean
    queued: float | None  # mean
    usage: float | None  # mean, 0-1
    waiting: float | None  # share with requests waiting
    above_range: float | None  # share with a queue that is too long for the profile
    retractions: float  # per minute of serving time
    coverage: float | None  # share of decode batches that replayed a graph
    out_of_memory: float  # failures
    rejections: float  # per minute of serving time
    requests: float = 0.0  # that were started
    prompt_length: float | None = None  # tokens, mean, cached ones included
    answer_length: float | None = None  # tokens, mean
    cached: float | None = None  # share of the prompt tokens

    @property
    def enough(self) -> bool:
        """Whether there was enough load to compare it."""
        return self.serving_seconds >= ENOUGH_SECONDS and self.batches >= ENOUGH_BATCHES

    @property
    def concurrency(self) -> float | None:
        """Mean number of requests at the server, running and waiting."""
        if self.running is None and self.queued is None:
            return None
        return (self.running or 0.0) + (self.queued or 0.0)


def figures_of(
    totals: Totals,
    served: float,
    *,
    throughput: float | None,
    generated: float,
    out_of_memory: float,
    has_graphs: bool = True,
) -> RunFigures:
    """Return a run's figures from its totals.

    `served`: seconds in which any scheduler served; `generated`: tokens, as far as the log shows their rate.
    """
    counts = totals.counts
    minutes = max(served, 60.0) / 60.0  # a shorter run counts as a minute: one burst is no rate
    prompts, requests = counts["computed_tokens"] + counts["cached_tokens"], counts["new_sequences"]
    # Retracted requests start again with what they had generated, so their prompts are not those of the clients.
    knows_lengths = requests >= ENOUGH_REQUESTS and counts["log_retracted_requests"] <= RETRACTED_SHARE * requests
    empty = totals.share("queue", "empty")

    def together(figure: str) -> float | None:
        """All schedulers added up, while any of them served."""
        is_known = served > 0 and totals.integrals[figure + "_seconds"] > 0
        return totals.integrals[figure] / served if is_known else None

    return RunFigures(
        serving_seconds=served,
        batches=counts["observations"],
        throughput=throughput,
        prompt_tokens=prompts / served if served > 0 and prompts else None,
        running=together("running"),
        queued=together("queued"),
        usage=totals.mean("usage"),
        waiting=None if empty is None else 1.0 - empty,
        above_range=totals.share("queue", "above_range"),
        retractions=counts["retraction_events"] / minutes,
        coverage=totals.coverage if has_graphs else None,
        out_of_memory=out_of_memory,
        rejections=counts["rejected_requests"] / minutes,
        requests=requests,
        prompt_length=prompts / requests if knows_lengths and prompts else None,
        answer_length=generated / requests if knows_lengths and generated else None,
        cached=counts["cached_tokens"] / prompts if knows_lengths and prompts else None,
    )


@dataclass(frozen=True, slots=True)
class ArgChange:
    """One argument that differs between two starts; values as text, `not set` where one has none."""

    arg: str
    before: str
    after: str

    @property
    def flag(self) -> str:
        """Its name as a flag."""
        return "--" + self.arg.replace("_", "-")


@dataclass(frozen=True, slots=True)
class ArgumentChanges:
    """A start's arguments: as printed, and what must have been typed to get them (None: not known)."""

    printed: Mapping[str, object]
    typed: Mapping[str, object] | None = None

    @classmethod
    def of(cls, facts: ServerFacts) -> ArgumentChanges:
        """Return the arguments of a start."""
        return cls(dict(facts.args), typed_args(facts))


def changed_args(before: ArgumentChanges, after: ArgumentChanges) -> tuple[ArgChange, ...]:
    """Return the arguments that differ and may have been set.

    Where it is known what was typed, arguments that the server derives are left out; so are those that only one release has.
    """
    if before.typed is not None and after.typed is not None:
        old, new = {**before.printed, **before.typed}, {**after.printed, **after.typed}
        names: Iterable[str] = {**before.typed, **after.typed}
    else:
        old, new = dict(before.printed), dict(after.printed)
        names = [arg for arg in new if not arg.startswith("_")]
    return tuple(
        ArgChange(arg, _text(old[arg]), _text(new[arg]))
        for arg in names
        if arg in old and arg in new and arg not in VARYING_ARGS and old[arg] != new[arg]
    )


def _text(value: object) -> str:
    if value is None:
        return "not set"
    text = {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """One figure before and after. `unit` is per_second, per_minute, count, share or ratio."""

    name: str
    before: float
    after: float
    unit: str
    direction: Direction


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a server changed from one run to another."""

    rows: tuple[ComparedFigure, ...]
    changed: tuple[ArgChange, ...]
    overall: Overall
    cause: Cause
    words: str


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
    _Measure("generated tokens a second", "throughput", "per_second", 1, 1.0, 0.2, by_load=True),
    _Measure("retractions a minute", "retractions", "per_minute", -1, 0.5, 0.2),
    _Measure("serving time with requests waiting", "waiting", "share", -1, 0.1),
    _Measure("serving time with too long a queue", "above_range", "share", -1, 0.1),
    _Measure("requests rejected a minute", "rejections", "per_minute", -1, 0.5, 0.2),
    _Measure("out-of-memory failures", "out_of_memory", "count", -1, 0.5),
    _Measure("CUDA graph coverage", "coverage", "share", 1, 0.05),
    _Measure("mean queued requests", "queued", "count", -1, 1.0, 0.2),
    _Measure("mean running requests", "running", "count", 0, 1.0, 0.2),
    _Measure("mean token usage", "usage", "ratio", 0, 0.1),
    _Measure("prompt tokens a second", "prompt_tokens", "per_second", 0, 1.0, 0.2),
)


def compare(
    before: RunFigures,
    after: RunFigures,
    changed: tuple[ArgChange, ...],
    verdict_before: str = "",
    *,
    known: bool = True,
) -> Comparison:
    """Return what got better or worse, and whether the changed arguments are the likely cause.

    `verdict_before` is what limited the server before; `known`: both runs printed their arguments.
    """
    load = _load_differs(before, after, changed)
    rows = tuple(row for measure in _MEASURES if (row := _row(measure, before, after, load)) is not None)
    failed = [row for row in rows if row.unit == "count" and row.name.startswith("out-of-memory")]
    if not (before.enough and after.enough) and not any(row.direction == "worse" for row in failed):
        words = f"Too little was served to compare: {before.serving_seconds:.0f} s before, {after.serving_seconds:.0f} s after."
        return Comparison(rows, changed, "not_comparable", "none", words)
    directions = {row.direction for row in rows}
    overall: Overall = "same"
    if "better" in directions or "worse" in directions:
        overall = "mixed" if {"better", "worse"} <= directions else "better" if "better" in directions else "worse"
    cause, because = _cause(changed, overall, verdict_before, load, known=known)
    return Comparison(rows, changed, overall, cause, f"{_outcome(overall, rows)} {because}")


def _row(measure: _Measure, before: RunFigures, after: RunFigures, load: str) -> ComparedFigure | None:
    old, new = getattr(before, measure.field), getattr(after, measure.field)
    if old is None or new is None:
        return None
    difference = new - old
    direction: Direction = "same"
    if abs(difference) >= max(measure.least, measure.relative * max(abs(old), abs(new))):
        neither = not measure.good or (measure.by_load and load)
        direction = "different" if neither else "better" if difference * measure.good > 0 else "worse"
    return ComparedFigure(measure.name, old, new, measure.unit, direction)


def _outcome(overall: Overall, rows: Iterable[ComparedFigure]) -> str:
    better = [row.name for row in rows if row.direction == "better"]
    worse = [row.name for row in rows if row.direction == "worse"]
    if overall == "same":
        return "Nothing got clearly better or worse."
    if overall == "mixed":
        return f"Better: {_listed(better)}; worse: {_listed(worse)}."
    return f"Better: {_listed(better)}." if overall == "better" else f"Worse: {_listed(worse)}."


def _cause(  # noqa: PLR0911 - one answer for each case
    changed: tuple[ArgChange, ...], overall: Overall, verdict_before: str, load: str, *, known: bool
) -> tuple[Cause, str]:
    turned = _listed([f"{change.flag} {change.before} → {change.after}" for change in changed[:4]])
    turned += f" and {len(changed) - 4} more" if len(changed) > 4 else ""
    if not known:
        return "none", "The arguments of one of the two are not in its log, so no cause can be named."
    if not changed:
        same = "The arguments are the same"
        return "none", f"{same}." if overall == "same" else f"{same}: load, machine or model made the difference."
    if overall == "same" and load:
        return "unproven", f"The load differs ({load}), so the effect of {turned} is not known."
    if overall == "same":
        return "none", f"So {turned} made no difference that the log shows."
    if load:
        return (
            "unproven",
            f"The load differs too ({load}), so {turned} {'is' if len(changed) == 1 else 'are'} not proven to be the cause.",
        )
    if len(changed) == 1:
        return "likely", f"The load was alike and nothing else was changed, so {turned} is the likely cause."
    arg = BY_ID[verdict_before].remedy.arg if verdict_before in BY_ID else ""
    advised = [change for change in changed if arg and (change.arg == arg or change.arg.startswith(arg + "_"))]
    if advised:
        one = f"{advised[0].flag} {advised[0].before} → {advised[0].after}"
        others = "another was" if len(changed) == 2 else f"{len(changed) - 1} others were"
        return (
            "possible",
            f"The load was alike; {one} is the flag for what limited the server before, though {others} changed too.",
        )
    return (
        "possible",
        f"The load was alike, but {len(changed)} arguments were changed at once ({turned}): try them one by one.",
    )


def _load_differs(before: RunFigures, after: RunFigures, changed: tuple[ArgChange, ...]) -> str:
    """Return in words how the load differs; empty where it is alike.

    A fixed number of clients gives the same concurrency, a fixed rate of requests the same prompt tokens: one of the two is enough.
    The lengths of the requests must be alike in any case.
    """
    amounts = _differences(
        ("requests at once", before.concurrency, after.concurrency),
        ("prompt tokens a second", before.prompt_tokens, after.prompt_tokens),
    )
    found = [words for words, _ in amounts] if all(differs for _, differs in amounts) else []
    shapes = _differences(
        ("prompt tokens a request", before.prompt_length, after.prompt_length),
        ("generated tokens a request", before.answer_length, after.answer_length),
    )
    found += [words for words, differs in shapes if differs]
    if not _CACHE_ARGS.intersection(change.arg for change in changed) and before.cached is not None is not after.cached:
        was, now = 1.0 - before.cached, 1.0 - (after.cached or 0.0)
        if max(was, now) > LOAD_ALIKE * min(was, now) + 0.05:
            found.append(f"{100 * before.cached:.0f} → {100 * (1 - now):.0f} % of the prompts cached")
    return ", ".join(found)


def _differences(*figures: tuple[str, float | None, float | None]) -> list[tuple[str, bool]]:
    return [
        (f"{amount(old, 'count')} → {amount(new, 'count')} {name}", max(old, new) > LOAD_ALIKE * min(old, new) + 0.5)
        for name, old, new in figures
        if old is not None and new is not None
    ]


def _listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
