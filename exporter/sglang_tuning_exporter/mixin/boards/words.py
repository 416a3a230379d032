"""Words and colours of states and diagnoses, the same on every panel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_tuning_exporter.diagnosis.row import Severity
from sglang_tuning_exporter.diagnosis.table import DIAGNOSES
from sglang_tuning_exporter.mixin.panels import BAD, GOOD, NEUTRAL, QUIET, WATCH, Style, texts
from sglang_tuning_exporter.state.profiles import DEFAULT
from sglang_tuning_exporter.state.signals import Signal

if TYPE_CHECKING:
    from collections.abc import Mapping

SEVERITIES: dict[Severity, str] = {"critical": BAD, "warning": WATCH, "info": NEUTRAL}

# State -> words and colour. A state's number on the timeline is its place in this table.
STATE_WORDS: dict[str, tuple[str, str]] = {
    "idle": ("idle", QUIET),
    "unknown": ("not known", "#3f434d"),
    "serving": ("serving", GOOD),
    "empty": ("queue empty", GOOD),
    "below_range": ("below the range", NEUTRAL),
    "in_range": ("in range", GOOD),
    "above_range": ("queue too long", WATCH),
    "below_target": ("KV cache has room", GOOD),
    "at_target": ("KV cache well used", GOOD),
    "no_queue": ("queue empty", GOOD),
    "held_back": ("held back", WATCH),
    "running_limit": ("at the running limit", WATCH),
    "pool_full": ("KV cache full", WATCH),
    "prefill_bound": ("prefill fills the batches", WATCH),
    "replayed": ("graph replayed", GOOD),
    "beyond_captured": ("batch beyond the graphs", WATCH),
    "eager": ("without graph", WATCH),
    "disabled": ("graphs disabled", NEUTRAL),
    "stuck": ("stuck", BAD),
    "recovering": ("recovering from retractions", WATCH),
    "hybrid_pool_full": ("second KV cache full", WATCH),
    "grammar_queue": ("grammars compile", WATCH),
    "pd_queue": ("prefill/decode peer or transfer", WATCH),
    "unsupported": ("no graphs here", NEUTRAL),
}
SIGNAL_TITLES: dict[Signal, str] = {
    "activity": "server",
    "queue": "queue",
    "token_usage": "token usage",
    "admission": "admission",
    "cuda_graph": "CUDA graph",
}

# Urgency of a verdict, as `queries.verdict` gives it -> words and colour, the most urgent first.
LEVELS: dict[str, tuple[str, str | None]] = {
    "4": ("Critical", BAD),
    "3": ("Limited", WATCH),
    "2": ("Could be better", NEUTRAL),
    "1": ("No verdict", QUIET),
    "0": ("Fine", GOOD),
}

HEALTHY = "Nothing to change"
# Verdicts that are no diagnosis -> words and colour.
OTHER_VERDICTS: dict[str, tuple[str, str]] = {
    "healthy": (HEALTHY, GOOD),
    "idle": ("Idle: nothing to judge", QUIET),
    "no_clear_bottleneck": ("No clear bottleneck", QUIET),
    "starting": ("Starting", QUIET),
    "not_enough_data": ("Not enough seen yet", QUIET),
}


def verdicts() -> dict[str, tuple[str, str]]:
    """Return every verdict with its words and colour."""
    return {row.id: (row.headline, SEVERITIES[row.severity]) for row in DIAGNOSES} | OTHER_VERDICTS


def verdict_looks() -> dict[str, Style]:
    """Return overrides for series named by their verdict; their colour comes from their urgency."""
    return _coloured_by_urgency({name: words for name, (words, _) in verdicts().items()})


def verdict_sentences() -> dict[str, Style]:
    """Return overrides for the verdict strip: the row's sentence with the label `figure`."""
    said = {name: words for name, (words, _) in verdicts().items()}
    said |= {row.id: row.summary.removesuffix(".") for row in DIAGNOSES}
    return _coloured_by_urgency({name: words + "${__field.labels.figure}" for name, words in said.items()})


def _coloured_by_urgency(names: Mapping[str, str]) -> dict[str, Style]:
    """Name series; an idle server has the urgency of a healthy one and is grey."""
    looks: dict[str, Style] = {name: {"displayName": words} for name, words in names.items()}
    return looks | {"idle": {"displayName": names["idle"], "mappings": texts({"0": (" ", QUIET)})}}


def changes() -> dict[str, tuple[str, str | None]]:
    """Return for each verdict what to do where no value can be computed: "raise --flag: words"."""
    said: dict[str, tuple[str, str | None]] = {}
    for row in DIAGNOSES:
        turn = row.turn.filled(DEFAULT.figures)
        flag = f"{turn.direction} --{turn.arg.replace('_', '-')}: " if turn.arg else ""
        said[row.id] = (flag + turn.fallback, None)
    return said | {
        "healthy": ("leave it as it is", None),
        "idle": ("nothing before there is load", None),
        "no_clear_bottleneck": ("the guide has no advice for it", None),
        "starting": ("wait until the model is loaded", None),
        "not_enough_data": ("wait a few minutes", None),
    }
