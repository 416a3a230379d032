"""Words and colours of states and diagnoses, the same on every panel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_tuning_exporter.diagnosis.row import Severity
from sglang_tuning_exporter.diagnosis.table import DIAGNOSES
from sglang_tuning_exporter.mixin import panels as p
from sglang_tuning_exporter.state.profiles import DEFAULT
from sglang_tuning_exporter.state.signals import Signal

if TYPE_CHECKING:
    from collections.abc import Mapping

SEVERITIES: dict[Severity, str] = {"critical": p.BAD, "warning": p.WATCH, "info": p.NEUTRAL}

# State -> words and colour. A state's number on the timeline is its place in this table.
STATE_WORDS: dict[str, tuple[str, str]] = {
    "idle": ("idle", p.QUIET),
    "unknown": ("not known", "#3f434d"),
    "serving": ("serving", p.GOOD),
    "empty": ("queue empty", p.GOOD),
    "below_range": ("below the range", p.NEUTRAL),
    "in_range": ("in range", p.GOOD),
    "above_range": ("queue too long", p.WATCH),
    "below_target": ("KV cache has room", p.GOOD),
    "at_target": ("KV cache well used", p.GOOD),
    "no_queue": ("queue empty", p.GOOD),
    "held_back": ("held back", p.WATCH),
    "running_limit": ("at the running limit", p.WATCH),
    "pool_full": ("KV cache full", p.WATCH),
    "prefill_bound": ("prefill fills the batches", p.WATCH),
    "replayed": ("graph replayed", p.GOOD),
    "beyond_captured": ("batch beyond the graphs", p.WATCH),
    "eager": ("without graph", p.WATCH),
    "disabled": ("graphs disabled", p.NEUTRAL),
    "stuck": ("stuck", p.BAD),
    "recovering": ("recovering from retractions", p.WATCH),
    "hybrid_pool_full": ("second KV cache full", p.WATCH),
    "grammar_queue": ("grammars compile", p.WATCH),
    "pd_queue": ("prefill/decode peer or transfer", p.WATCH),
    "unsupported": ("no graphs here", p.NEUTRAL),
}
SIGNAL_TITLES: dict[Signal, str] = {
    "activity": "server",
    "queue": "queue",
    "token_usage": "token usage",
    "admission": "admission",
    "cuda_graph": "CUDA graph",
}

# Urgency of a verdict, as `queries.verdict` gives it -> words and colour, the most urgent first.
LEVELS: dict[str, tuple[str, str]] = {
    "4": ("Critical", p.BAD),
    "3": ("Limited", p.WATCH),
    "2": ("Could be better", p.NEUTRAL),
    "1": ("No verdict", p.QUIET),
    "0": ("Fine", p.GOOD),
}

HEALTHY = "Nothing to change"
# Verdicts that are no diagnosis -> words and colour.
OTHER_VERDICTS: dict[str, tuple[str, str]] = {
    "healthy": (HEALTHY, p.GOOD),
    "idle": ("Idle: nothing to judge", p.QUIET),
    "no_clear_bottleneck": ("No clear bottleneck", p.QUIET),
    "starting": ("Starting", p.QUIET),
    "not_enough_data": ("Not enough seen yet", p.QUIET),
}


def verdicts() -> dict[str, tuple[str, str]]:
    """Return every verdict with its words and colour."""
    return {row.id: (row.headline, SEVERITIES[row.severity]) for row in DIAGNOSES} | OTHER_VERDICTS


def verdict_looks() -> dict[str, p.Style]:
    """Return overrides for series named by their verdict; their colour comes from their urgency."""
    return _coloured_by_urgency({name: words for name, (words, _) in verdicts().items()})


def verdict_sentences() -> dict[str, p.Style]:
    """Return overrides for the verdict strip: the row's sentence with the label `figure`."""
    said = {name: words for name, (words, _) in verdicts().items()}
    said |= {row.id: row.summary.removesuffix(".") for row in DIAGNOSES}
    return _coloured_by_urgency({name: words + "${__field.labels.figure}" for name, words in said.items()})


def _coloured_by_urgency(names: Mapping[str, str]) -> dict[str, p.Style]:
    """Name series; an idle server has the urgency of a healthy one and is grey."""
    looks: dict[str, p.Style] = {name: {"displayName": words} for name, words in names.items()}
    return looks | {"idle": {"displayName": names["idle"], "mappings": p.texts({"0": (" ", p.QUIET)})}}


def changes() -> dict[str, str]:
    """Return for each verdict what to do where no value can be computed: "raise --flag: words"."""
    said: dict[str, str] = {}
    for row in DIAGNOSES:
        remedy = row.remedy.with_figures(DEFAULT.figures)
        flag = f"{remedy.direction} --{remedy.arg.replace('_', '-')}: " if remedy.arg else ""
        said[row.id] = flag + remedy.fallback
    return said | {
        "healthy": "leave it as it is",
        "idle": "nothing before there is load",
        "no_clear_bottleneck": "the guide has no advice for it",
        "starting": "wait until the model is loaded",
        "not_enough_data": "wait for a few minutes of load",
    }
