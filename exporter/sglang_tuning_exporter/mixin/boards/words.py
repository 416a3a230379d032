"""Words and colours of states and diagnoses, the same on every panel."""

from __future__ import annotations

from collections.abc import Mapping

from sglang_tuning_exporter.diagnosis.row import Remedy
from sglang_tuning_exporter.diagnosis.table import DIAGNOSES
from sglang_tuning_exporter.mixin.boards.looks import (
    BAD,
    COLOURS,
    GOOD,
    NEUTRAL,
    QUIET,
    WATCH,
    Json,
    renamed,
    value_mappings,
)
from sglang_tuning_exporter.state.profiles import DEFAULT
from sglang_tuning_exporter.state.signals import STATES, Signal

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
STATE_NUMBERS = {state: str(number) for number, state in enumerate(STATE_WORDS)}
NUMBERED_STATES = value_mappings({STATE_NUMBERS[state]: look for state, look in STATE_WORDS.items()})
SIGNAL_TITLES: dict[Signal, str] = {
    "activity": "server",
    "queue": "queue",
    "token_usage": "token usage",
    "admission": "admission",
    "cuda_graph": "CUDA graph",
}

# Urgency of a verdict, as `queries.verdict` gives it -> words and colour, the most urgent first.
LEVELS: dict[str, tuple[str, str]] = {
    "4": ("Critical", BAD),
    "3": ("Limited", WATCH),
    "2": ("Could be better", NEUTRAL),
    "1": ("No verdict", QUIET),
    "0": ("Fine", GOOD),
}
COLOURS_OF_LEVELS = value_mappings({level: (" ", colour) for level, (_, colour) in LEVELS.items()})
SEVERITY_CELLS = {"critical": ("critical", BAD), "warning": ("warning", WATCH), "info": ("info", NEUTRAL)}

# Judgements of the figures on tiles -> colour.
JUDGEMENTS: dict[str, str] = dict(STATE_WORDS.values()) | {
    "covered": GOOD,
    "not covered": WATCH,
    "too little": BAD,
    "more than needed": WATCH,
    "as it should be": GOOD,
    "too often": WATCH,
    "too many": WATCH,
    "none": GOOD,
    "tolerated": GOOD,
    "a few": "yellow",
    "too slow": WATCH,
    "in time": GOOD,
    "p99": NEUTRAL,
    "far too fast": BAD,
    "too fast": WATCH,
    "faster than allowed": "yellow",
    "within the budget": GOOD,
}
# Shades of the colour for waiting requests, to distinguish what they wait for.
_AMBERS = (WATCH, "#8f3f08", "#f0a36b", "#d98032", "#6b3410", "#b98a5e", "#e8c39e", "#ffd9b3")
_QUEUES = {
    "grammar": "grammar",
    "bootstrap": "bootstrap (prefill side)",
    "inflight": "in flight (prefill side)",
    "prealloc": "pre-allocation (decode side)",
    "transfer": "transfer (decode side)",
    "host_receive": "host receive (decode side)",
    "retracted": "retracted (decode side)",
}

# Every verdict in words.
HEADLINES = {row.id: row.headline for row in DIAGNOSES} | {
    "healthy": "Nothing to change",
    "idle": "Idle: nothing to judge",
    "no_clear_bottleneck": "No clear bottleneck",
    "starting": "Starting",
    "not_enough_data": "Not enough seen yet",
}
# Overrides for series named by the urgency of a verdict, or by a queue beside the main one.
LEVEL_LOOKS = {level: renamed(words, colour) for level, (words, colour) in LEVELS.items()}
QUEUE_LOOKS = {queue: renamed(words, colour) for (queue, words), colour in zip(_QUEUES.items(), COLOURS, strict=True)}


def state_looks(signal: Signal) -> dict[str, Json]:
    """Return overrides for series named by a state of a signal while it serves; each waiting state has a shade of its own."""
    shades = iter(_AMBERS)
    return {
        state: renamed(words, next(shades) if colour == WATCH else colour)
        for state in STATES[signal]
        if state not in ("idle", "unknown")
        for words, colour in (STATE_WORDS[state],)
    }


def _coloured_by_urgency(names: Mapping[str, str]) -> dict[str, Json]:
    """Name series; an idle server has the urgency of a healthy one and is grey."""
    looks: dict[str, Json] = {name: {"displayName": words} for name, words in names.items()}
    return looks | {"idle": {"displayName": names["idle"], "mappings": value_mappings({"0": (" ", QUIET)})}}


# Overrides for series named by their verdict, and for the verdict strip: the row's sentence with the label `figure`.
VERDICT_LOOKS = _coloured_by_urgency(HEADLINES)
VERDICT_SENTENCES = _coloured_by_urgency(
    {
        name: words + "${__field.labels.figure}"
        for name, words in (HEADLINES | {row.id: row.summary.removesuffix(".") for row in DIAGNOSES}).items()
    }
)


def _advice(remedy: Remedy) -> str:
    return (f"{remedy.direction} {remedy.flag}: " if remedy.flag else "") + remedy.fallback


# What to do about each verdict where no value can be computed: "raise --flag: words".
ADVICE_IN_WORDS = {row.id: _advice(row.remedy.with_figures(DEFAULT.figures)) for row in DIAGNOSES} | {
    "healthy": "leave it as it is",
    "idle": "nothing before there is load",
    "no_clear_bottleneck": "the guide has no advice for it",
    "starting": "wait until the model is loaded",
    "not_enough_data": "wait for a few minutes of load",
}
