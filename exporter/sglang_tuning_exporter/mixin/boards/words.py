"""Words and colours of states and diagnoses, the same on every panel."""

from __future__ import annotations

from sglang_tuning_exporter.config.profiles import DEFAULT
from sglang_tuning_exporter.core import judge
from sglang_tuning_exporter.core.advice import MOST_GRAPH, fill
from sglang_tuning_exporter.core.rows import ROWS, Remedy
from sglang_tuning_exporter.core.runbooks import PROMETHEUS
from sglang_tuning_exporter.core.server import STATES
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
    "recovering": ("recovering from retractions", WATCH),
    "hybrid_pool_full": ("second KV cache full", WATCH),
    "grammar_queue": ("grammars compile", WATCH),
    "pd_queue": ("prefill/decode peer or transfer", WATCH),
    "unsupported": ("no graphs here", NEUTRAL),
    "standing_still": ("admission stands still", WATCH),
}
STATE_NUMBERS = {state: str(number) for number, state in enumerate(STATE_WORDS)}
NUMBERED_STATES = value_mappings({STATE_NUMBERS[state]: look for state, look in STATE_WORDS.items()})
SIGNAL_TITLES: dict[str, str] = {
    "activity": "server",
    "queue": "queue",
    "token_usage": "token usage",
    "admission": "admission",
    "cuda_graph": "CUDA graph",
}

# Urgency of a verdict, as `verdicts.verdict` gives it -> words and colour, the most urgent first.
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
_AMBERS = (WATCH, "#8f3f08", "#f0a36b", "#d98032", "#6b3410", "#b98a5e", "#e8c39e", "#ffd9b3", "#4a2308")
_QUEUES = {
    "grammar": "grammar",
    "bootstrap": "bootstrap (prefill side)",
    "inflight": "in flight (prefill side)",
    "prealloc": "pre-allocation (decode side)",
    "transfer": "transfer (decode side)",
    "host_receive": "host receive (decode side)",
    "retracted": "retracted (decode side)",
}

# Figures of the default profile, for texts without a server; what only a running server shows is said in words.
_FIGURES = DEFAULT.figures | {"most_graph": str(MOST_GRAPH), "given_up_after": "before their answer"}
_NAMES = {
    "out_of_memory_any": "Out of memory",
    "pd_queue": "Other server of the pair is slow",
    "dp_imbalanced": "DP ranks unbalanced",
    "unexplained": "Requests wait, cause not known",
}


def plain(text: str) -> str:
    """Return a text of the table of diagnoses with the default profile's figures."""
    return fill(text, _FIGURES)


def _name(verdict: str) -> str:
    return _NAMES.get(verdict, verdict.replace("_", " ").capitalize())


# Every verdict in a few words.
HEADLINES = {row.id: _name(row.id) for row in (*ROWS, *PROMETHEUS)} | {
    judge.HEALTHY: "Nothing to change",
    judge.NO_LIMIT: "No limit in the log",
    judge.IDLE: "Idle",
    judge.STARTING: "Starting",
    judge.STOPPED: "Stopped",
    judge.NOT_ENOUGH: "Not enough seen yet",
}
# Overrides for series named by the urgency of a verdict, or by a queue beside the main one.
LEVEL_LOOKS = {level: renamed(words, colour) for level, (words, colour) in LEVELS.items()}
QUEUE_LOOKS = {queue: renamed(words, colour) for (queue, words), colour in zip(_QUEUES.items(), COLOURS, strict=True)}


def state_looks(signal: str) -> dict[str, Json]:
    """Return overrides for series named by a state of a signal while it serves; each waiting state has a shade of its own."""
    shades = iter(_AMBERS)
    return {
        state: renamed(words, next(shades) if colour == WATCH else colour)
        for state in STATES[signal]
        for words, colour in (STATE_WORDS[state],)
    }


# Overrides for series named by their verdict.
VERDICT_LOOKS: dict[str, Json] = {name: {"displayName": words} for name, words in HEADLINES.items()}


def _advice(remedy: Remedy) -> str:
    flag, words = f"--{remedy.arg.replace('_', '-')}", plain(remedy.words)
    if not remedy.arg or words.startswith("add --"):
        return words
    return words.replace("add it", f"add {flag}") if "add it" in words else f"{remedy.direction} {flag}: {words}"


# What to do about each verdict where no value can be computed: "raise --flag: words".
ADVICE_IN_WORDS = {row.id: _advice(row.remedy) for row in (*ROWS, *PROMETHEUS)} | {
    judge.HEALTHY: "leave it as it is",
    judge.NO_LIMIT: "leave it as it is",
    judge.IDLE: "nothing before there is load",
    judge.STARTING: "wait until the model is loaded",
    judge.STOPPED: "start it when it is needed",
    judge.NOT_ENOUGH: "wait for a few minutes of load",
}
