"""`report --against`: the figures of two logs side by side, without a guess why they differ. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_tuning_exporter.core.findings import Judged

SAME = 0.1  # figures that differ by less, of the larger, differ by chance
SAME_SHARE = 0.05  # and shares that differ by less in all
DRAWN = frozenset({"random_seed", "nccl_port", "port", "host"})  # they differ at every start, and change no figure


@dataclass(frozen=True, slots=True)
class Compared:
    """A figure of a start in words, its unit, and which side is better: higher, lower, or neither."""

    words: str
    unit: str
    better: str = ""


FIGURES = {  # by the name that `Start.figures` has
    "generated_tokens_per_second": Compared("generated tokens/s", "count", "higher"),
    "prompt_tokens_per_second": Compared("prompt tokens/s", "count", "higher"),
    "running_requests": Compared("mean running requests", "count"),
    "queued_requests": Compared("mean queued requests", "count", "lower"),
    "token_usage": Compared("mean token usage", "ratio"),
    "share_waiting": Compared("time with requests waiting", "share", "lower"),
    "share_queue_above_range": Compared("time with too long a queue", "share", "lower"),
    "retractions_per_minute": Compared("retractions", "per_minute", "lower"),
    "cuda_graph_coverage": Compared("decode batches with a CUDA graph", "share", "higher"),
    "out_of_memory": Compared("out-of-memory failures", "count", "lower"),
    "rejections_per_minute": Compared("requests answered with 503", "per_minute", "lower"),
    "mean_prompt_tokens": Compared("mean tokens of a prompt", "count"),
    "mean_generated_tokens": Compared("mean tokens of an answer", "count"),
    "share_cached": Compared("prompt tokens found in the cache", "share", "higher"),
}


@dataclass(frozen=True, slots=True)
class Row:
    """A figure of two logs; `change` is better, worse, different (neither is better) or same."""

    figure: Compared
    before: float
    after: float
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
        found = {
            change: [row.figure.words for row in self.rows if row.change == change] for change in ("better", "worse")
        }
        told = [f"{change}: {', '.join(names)}" for change, names in found.items() if names]
        return "; ".join(told) or "no clear difference"


def compare(before: Judged, after: Judged) -> Comparison:
    """Return how one log differs from the log before: the last starts with figures of both."""
    old, new = (next((start for start in reversed(each.starts) if start.figures), None) for each in (before, after))
    if old is None or new is None:
        return Comparison(before.sources, {}, ())
    arguments = {
        arg: (old.arguments[arg], new.arguments[arg])
        for arg in sorted((old.arguments.keys() & new.arguments.keys()) - DRAWN)
    }
    figures = {name: (old.figures.get(name), new.figures.get(name)) for name in FIGURES}
    return Comparison(
        before.sources,
        {arg: (was, now) for arg, (was, now) in arguments.items() if was != now and (was or now)},
        tuple(
            Row(FIGURES[name], was, now, _change(FIGURES[name], was, now))
            for name, (was, now) in figures.items()
            if was is not None and now is not None and (was or now)
        ),
    )


def _change(figure: Compared, before: float, after: float) -> str:
    difference = after - before
    least = SAME_SHARE if figure.unit in {"share", "ratio"} else SAME * max(abs(before), abs(after))
    if abs(difference) <= least:
        return "same"
    if not figure.better:
        return "different"
    return "better" if (difference > 0) == (figure.better == "higher") else "worse"
