"""Words of verdicts, states and queues, the same on every panel."""

from __future__ import annotations

from itertools import cycle

from sglang_tuning_exporter.config.profiles import DEFAULT
from sglang_tuning_exporter.core import judge
from sglang_tuning_exporter.core.advice import MOST_GRAPH, fill
from sglang_tuning_exporter.core.rows import ROWS, Remedy
from sglang_tuning_exporter.core.runbooks import PROMETHEUS
from sglang_tuning_exporter.core.server import STATES
from sglang_tuning_exporter.core.text import GOOD as FINE
from sglang_tuning_exporter.core.text import title
from sglang_tuning_exporter.mixin.boards.looks import (
    COLOURS,
    GOOD,
    LEVELS,
    NEUTRAL,
    SHADES,
    Json,
    fixed_colour,
    renamed,
    value_mappings,
)

# What admission waited for -> words and colour.
ADMISSION: dict[str, tuple[str, str]] = {
    "no_queue": ("queue empty", GOOD),
    "pool_full": ("KV cache full", "#f9b934"),
    "held_back": ("held back", "#8f3f08"),
    "running_limit": ("running limit reached", "#a352cc"),
    "prefill_bound": ("prefill fills the batches", NEUTRAL),
    "hybrid_pool_full": ("second KV cache full", "#c2570c"),
    "grammar_queue": ("grammars compile", "#0f9a96"),
    "pd_queue": ("prefill/decode peer or transfer", "#e0559d"),
    "standing_still": ("admission stands still", "#d0103a"),
}
assert ADMISSION.keys() == set(STATES["admission"])
ADMISSION_LOOKS = {state: renamed(*look) for state, look in ADMISSION.items()}
_QUEUES = {
    "grammar": "grammar",
    "bootstrap": "bootstrap (prefill side)",
    "inflight": "in flight (prefill side)",
    "prealloc": "pre-allocation (decode side)",
    "transfer": "transfer (decode side)",
    "host_receive": "host receive (decode side)",
    "retracted": "retracted (decode side)",
}
QUEUE_LOOKS = {queue: renamed(words, colour) for (queue, words), colour in zip(_QUEUES.items(), COLOURS, strict=True)}

# Figures of the default profile, for texts without a server; what only a running server shows is said in words.
_FIGURES = DEFAULT.figures | {"most_graph": str(MOST_GRAPH), "given_up_after": "before their answer"}
_WITHOUT = {
    judge.HEALTHY: "Nothing to change",
    judge.NO_LIMIT: "No limit in the log",
    judge.IDLE: "Idle",
    judge.STARTING: "Starting",
    judge.STOPPED: "Stopped",
    judge.NOT_ENOUGH: "Not enough seen yet",
}


def plain(text: str) -> str:
    """Return a text of the table of diagnoses with the default profile's figures."""
    return fill(text, _FIGURES)


# Every verdict in a few words, and its level.
HEADLINES = {row.id: title(row.id) for row in (*ROWS, *PROMETHEUS)} | _WITHOUT
_LEVELS = {row.id: row.severity for row in (*ROWS, *PROMETHEUS)} | {
    name: "good" if name in FINE else "none" for name in _WITHOUT
}
HEADLINE_CELLS = value_mappings(HEADLINES)


def _on_a_strip() -> dict[str, Json]:
    """Give overrides for series named by their verdict: its level's sign, and one of its level's shades."""
    shades = {level: cycle(colours) for level, colours in SHADES.items()}
    return {
        name: {"displayName": f"{LEVELS[_LEVELS[name]][0]} {words}", **fixed_colour(next(shades[_LEVELS[name]]))}
        for name, words in HEADLINES.items()
    }


VERDICT_LOOKS = _on_a_strip()


def _advice(remedy: Remedy) -> str:
    flag, words = f"--{remedy.arg.replace('_', '-')}", plain(remedy.words)
    if not remedy.arg or words.startswith("add --"):
        return words
    return words.replace("add it", f"add {flag}") if "add it" in words else f"{remedy.direction} {flag}: {words}"


# What to do about each diagnosis where no value can be computed: "raise --flag: words".
ADVICE_IN_WORDS = {row.id: _advice(row.remedy) for row in (*ROWS, *PROMETHEUS)}
