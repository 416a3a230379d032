"""`report --against`: the figures of two logs side by side, without a guess why they differ. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from sglang_tuning_exporter.core.findings import Judgement

SAME = 0.1  # figures that differ by less, of the larger, differ by chance
SAME_SHARE = 0.05  # and shares that differ by less in all
DRAWN = frozenset({"random_seed", "nccl_port", "port", "host"})  # they differ at every start, and change no figure


# By the name that `Start.figures` has: words, unit, and which side is better, if any.
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
