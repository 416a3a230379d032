"""What is shown beside a judgement: figures over time, the start, the command line, another log. Pure; a report and a live server show the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sglang_tuning_exporter.core.advice import setting
from sglang_tuning_exporter.core.facts import Facts
from sglang_tuning_exporter.core.findings import Judgement, Series
from sglang_tuning_exporter.core.server import SIGNALS, Server, Totals
from sglang_tuning_exporter.core.view import View
from sglang_tuning_exporter.sglang.flags import command_line

# Of the counts: the name in a report.
COUNTS = {
    "retraction_events": "retractions", "retracted_requests": "retracted", "rejected_requests": "rejected", "server_errors": "server_errors",
    "server_starts": "starts", "decode_batches": "decode_lines", "prefill_batches": "prefill_lines",
    **{f"out_of_memory.{phase}": f"out_of_memory.{phase}" for phase in ("prefill", "decode", "graph_capture", "startup", "unknown")},
}  # fmt: skip


def beside(judgement: Judgement, server: Server, totals: Totals, **more: Any) -> Judgement:
    """Return the judgement with what is shown beside it in a report and of a running server; `totals`: sums of the judged time."""
    line, changes, notes = command(judgement, server.facts)
    marked = {name: totals[f"marked.{count}"] for name, count in COUNTS.items() if totals[f"marked.{count}"]}
    events = totals["marked.retractions"]
    note = f"{totals['retractions']:.0f} retractions, {events:.0f} of them beside text that clients can write."
    return replace(
        judgement, notes=(*([note] if events else []), *judgement.notes), marked=marked, shares=shares(totals), last=last_figures(server),
        series=series(server), running_limit=server.running_limit,
        command=line, command_changes=changes, command_notes=notes, facts=printed(server.facts), **more,
    )  # fmt: skip


def shares(totals: Totals) -> dict[str, dict[str, float]]:
    """Return the share of each state in the serving time in which its signal was known."""
    return {
        signal: {
            state: seconds / known
            for state, seconds in totals.under(signal).items()
            if state not in {"idle", "unknown"}
        }
        for signal in SIGNALS
        if (known := totals.known(signal)) > 0
    }


def command(
    judgement: Judgement, facts: Facts
) -> tuple[tuple[str, ...], tuple[tuple[str, str, str], ...], tuple[str, ...]]:
    """Return the command line with the changes of what limits the server, these changes, and remarks; empty where it is not known."""
    changes: dict[str, object] = {}
    for finding in judgement.findings:
        for change in finding.changes if finding.is_limit else ():
            if change.arg and change.arg not in changes and (change.to is not None or change.removes):
                changes[change.arg] = None if change.removes and change.to is None else setting(change.to)
    found = None if facts.cut else command_line(facts.release, facts.arguments, changes)
    if found is None or not changes:
        return (), (), ()
    line, changed, secrets = found
    note = f"Secrets are never read: add {', '.join(secrets)} again where the server has them now."
    return line, changed, (note,) if secrets else ()


def figures_of(view: View) -> dict[str, float]:
    """Return the figures of a start, those that are known."""
    figures = {
        "serving_seconds": view.served, "running_requests": view.sum("running"), "queued_requests": view.sum("queued"),
        "token_usage": view.mean("usage"), "generated_tokens_per_second": view.generated_per_second, "share_cached": view.cached_share,
        "prompt_tokens_per_second": view.totals["computed"] / view.served if view.served else None,
        "retractions": view.totals["retractions"] if view.served else None,
    }  # fmt: skip
    return {name: value for name, value in figures.items() if value is not None}


def last_figures(server: Server) -> Mapping[str, float | None]:
    """Return the present figures of all schedulers together, None where unknown."""

    def known(figure: str) -> list[float]:
        values = (getattr(one, figure) for one in server.schedulers.values())
        return [float(value) for value in values if value is not None]

    return {
        "running_requests": sum(known("running")) if known("running") else None,
        "queued_requests": sum(known("queued")) if known("queued") else None,
        "token_usage": max(known("usage"), default=None), "cuda_graph": min(known("graph"), default=None),
    }  # fmt: skip


def series(server: Server) -> dict[str, Series]:
    """Return means of ten seconds, all schedulers together; and how many retractions there were."""

    def of_all(totals: Totals, figure: str) -> float | None:
        mean = totals.mean(figure)
        return mean and mean * max(len(totals.under("serves")), 1)

    buckets = list(server.buckets)
    return {
        **{name: tuple((at, of_all(totals, name)) for at, totals in buckets) for name in ("running", "queued")},
        "usage": tuple((at, totals.mean("usage")) for at, totals in buckets),
        "retractions": tuple((at, totals["retractions"]) for at, totals in buckets),
    }


def memory(facts: Facts) -> dict[str, float | str]:
    """Return the memory of one rank at the start in GB, and the device where it is no GPU."""
    left = [each["left"] for each in facts.memory.values() if each.get("left")]
    figures = {
        "before_weights_gb": facts.capacity_gb, "weights_gb": facts.gigabytes("weights"), "draft_weights_gb": facts.gigabytes("draft_weights"),
        "kv_pool_gb": facts.gigabytes("pool"), "graphs_gb": facts.gigabytes("graph"),
        "left_gb": min(facts.left.values() or left, default=None),
    }  # fmt: skip
    known: dict[str, float | str] = {name: value for name, value in figures.items() if value is not None}
    return known | {"device": "cpu"} if known and facts.is_cpu else known


def printed(facts: Facts) -> dict[str, float | str | None]:
    """Return what the start printed of sizes and limits."""
    return {
        "kv_pool_tokens": facts.pool(), "max_running_requests": facts.least_limit, "largest_captured_batch": facts.largest_captured,
        "release": facts.shown_release, "available_gpu_memory_gb": facts.reserve_gb,
    }  # fmt: skip


# `report --against`: the figures of two logs side by side, without a guess why they differ

SAME = 0.1  # figures that differ by less, of the larger, differ by chance
SAME_SHARE = 0.05  # and shares that differ by less in all
DRAWN = frozenset({"random_seed", "nccl_port", "port", "host"})  # they differ at every start, and change no figure
# By the name that `figures_of` gives it: words, unit, and which side is better, if any.
FIGURES: Mapping[str, tuple[str, str, str]] = {
    "generated_tokens_per_second": ("generated tokens/s", "count", "higher"),
    "prompt_tokens_per_second": ("prompt tokens/s", "count", "higher"),
    "running_requests": ("mean running requests", "count", ""),
    "queued_requests": ("mean queued requests", "count", "lower"),
    "token_usage": ("mean token usage", "ratio", ""),
    "share_cached": ("prompt tokens found in the cache", "share", "higher"),
}


class Row(NamedTuple):
    """A figure of two logs; `change` is better, worse, different (neither is better) or same."""

    name: str
    before: float
    after: float
    unit: str
    change: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the last loaded start of one log differs from that of another."""

    sources: tuple[str, ...]  # the other logs
    changed: dict[str, tuple[object, object]]  # arguments that differ: before, now
    rows: tuple[Row, ...]

    @property
    def overall(self) -> str:
        """One word: better, worse, mixed, same, or not_comparable where a log has no loaded start."""
        changes = {row.change for row in self.rows} & {"better", "worse"}
        if not self.rows:
            return "not_comparable"
        return "mixed" if len(changes) == 2 else next(iter(changes), "same")

    @property
    def words(self) -> str:
        """Which figures are better and which are worse."""
        found = {change: [row.name for row in self.rows if row.change == change] for change in ("better", "worse")}
        told = [f"{change}: {', '.join(names)}" for change, names in found.items() if names]
        return "; ".join(told) or "no clear difference"


def compare(before: Judgement, after: Judgement) -> Comparison:
    """Return how one log differs from the log before: the last starts with figures of both."""
    old, new = (next((start for start in reversed(each.starts) if start.figures), None) for each in (before, after))
    if old is None or new is None:
        return Comparison(before.sources, {}, ())
    arguments = {
        arg: (old.arguments[arg], new.arguments[arg])
        for arg in sorted((old.arguments.keys() & new.arguments.keys()) - DRAWN)
    }
    return Comparison(
        before.sources,
        {arg: (was, now) for arg, (was, now) in arguments.items() if was != now and (was or now)},
        tuple(
            Row(words, was, now, unit, _change(unit, better, was, now))
            for name, (words, unit, better) in FIGURES.items()
            if (was := old.figures.get(name)) is not None
            and (now := new.figures.get(name)) is not None
            and (was or now)
        ),
    )


def _change(unit: str, better: str, before: float, after: float) -> str:
    difference = after - before
    least = SAME_SHARE if unit in {"share", "ratio"} else SAME * max(abs(before), abs(after))
    if abs(difference) <= least:
        return "same"
    if not better:
        return "different"
    return "better" if (difference > 0) == (better == "higher") else "worse"
