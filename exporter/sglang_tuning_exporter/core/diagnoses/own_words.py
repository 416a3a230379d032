"""Changes of flags that SGLang itself names, in its errors and at its start. Pure."""

from __future__ import annotations

import re
from dataclasses import replace

from sglang_tuning_exporter.core.diagnoses.base import Beside
from sglang_tuning_exporter.core.diagnoses.steps import say, set_flag
from sglang_tuning_exporter.core.events import shortened
from sglang_tuning_exporter.core.findings import Change
from sglang_tuning_exporter.core.view import View
from sglang_tuning_exporter.sglang import flags
from sglang_tuning_exporter.sglang.advices import Advice, recognise

FLAG = re.compile(r"--[a-z][a-z0-9_-]{2,60}[a-z0-9]")
ASKS_FOR_LESS = re.compile(r"smaller|lower|reduc|decrease|fewer", re.IGNORECASE)
ASKS_FOR_MORE = re.compile(r"larger|higher|increase|raise|raising", re.IGNORECASE)
WAYS = {"increase": "raise", "decrease": "lower", "set": "set", "unset": "drop"}


def _arg_of(flag: str) -> str:
    """Return the argument of a flag: `--tp-size` → `tp_size`."""
    return flag[2:].replace("-", "_")


def refused_flag(flag: str) -> Change:
    """Return the advice for a flag that SGLang refuses."""
    spelled = flag.replace("_", "-")
    words = f"drop {flag}: no release up to {flags.releases()[-1]} has this flag"
    if _arg_of(spelled) in flags.argument_names():
        words = f"drop {flag}, or install a release that has it: other releases of SGLang have this flag"
        words = words if spelled == flag else f"spell it {spelled}: SGLang's flags have hyphens"
    why, not_if = (
        "SGLang refuses a command line with a flag that its release does not have.",
        "the flag belongs to another program",
    )
    return say(words=words, why=why, not_if=not_if)


def named_flags(view: View, words: str) -> list[Change]:
    """Return the changes of the flags that an error of SGLang's names."""
    known = recognise(words)
    ways, changes = known.ways if known is not None else {}, list[Change]()
    for flag in list(dict.fromkeys(FLAG.findall(words)))[:2]:
        flag_known = flags.nearest_flag(_arg_of(flag), flags.releases()[-1])
        is_switch = flag_known is not None and flag_known.kind in {"switch", "either"}  # nothing about it can be lower
        way = WAYS.get(ways.get(flag, ""), "set" if is_switch else _way_asked_for(words))
        change = set_flag(view, _arg_of(flag), words=f"{way} it: SGLang's own error names it", direction=way)
        why, not_if = f"SGLang ended with: {shortened(words, 300)}", "another error came before this one"
        changes.append(replace(change, why=why, not_if=not_if))
    return changes


def _way_asked_for(words: str) -> str:
    """Return whether an error asks to raise, to lower or only to set a value."""
    if ASKS_FOR_LESS.search(words):
        return "lower"
    return "raise" if ASKS_FOR_MORE.search(words) else "set"


def recommended_change(view: View, advice: Advice) -> list[Change]:
    """Return a recommendation of SGLang's: a change of its first flag that this release has, else of its variables."""
    ways = {name: way for name, way in advice.ways.items() if way}
    flag = next((name for name in ways if name.startswith("--") and view.facts.flag(_arg_of(name))), None)
    times = f", {advice.count:,} times" if advice.count > 1 else ""
    why, not_if = (
        f"SGLang printed at its start{times}: “{advice.words.rstrip('.')}”",
        "what the line is about does not matter for this load",
    )
    if flag is not None:
        way = WAYS[ways[flag]]
        change = set_flag(view, _arg_of(flag), words=f"{way} it: SGLang itself recommends it", direction=way)
        return [replace(change, why=why, not_if=not_if)]
    variables = ", ".join(name for name in ways if not name.startswith("--"))
    return [say(words=f"set {variables} as SGLang's own line says", why=why, not_if=not_if)] if variables else []


def recommended_changes(view: View, _: Beside = frozenset()) -> list[Change]:
    """Return the changes that SGLang recommends at its start."""
    return [change for advice in view.facts.recommended() for change in recommended_change(view, advice)]
