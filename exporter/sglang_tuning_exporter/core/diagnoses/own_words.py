"""SGLang's own words about flags, in its errors and at its start, as changes. Pure."""

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


def arg_of(flag: str) -> str:
    """Return the argument of a flag: `--tp-size` → `tp_size`."""
    return flag[2:].replace("-", "_")


def refused_flag(flag: str) -> Change:
    """Say what to do with a flag that SGLang refuses."""
    spelled = flag.replace("_", "-")
    words = f"drop {flag}: no release up to {flags.releases()[-1]} has this flag"
    if arg_of(spelled) in flags.argument_names():
        words = f"drop {flag}, or install a release that has it: other releases of SGLang have this flag"
        words = words if spelled == flag else f"spell it {spelled}: SGLang's flags have hyphens"
    why, not_if = (
        "SGLang refuses a command line with a flag that its release does not have.",
        "the flag belongs to another program",
    )
    return say(words=words, why=why, not_if=not_if)


def named_flags(view: View, words: str) -> list[Change]:
    """Return the flags that an error of SGLang's names."""
    known = recognise(words)
    ways, changes = known.ways if known is not None else {}, list[Change]()
    for flag in list(dict.fromkeys(FLAG.findall(words)))[:2]:
        flag_known = flags.nearest_flag(arg_of(flag), flags.releases()[-1])
        is_switch = flag_known is not None and flag_known.kind in {"switch", "either"}  # nothing about it can be lower
        guessed = (
            "set"
            if is_switch
            else "lower"
            if ASKS_FOR_LESS.search(words)
            else "raise"
            if ASKS_FOR_MORE.search(words)
            else "set"
        )
        way = WAYS.get(ways.get(flag, ""), guessed)
        change = set_flag(view, arg_of(flag), words=f"{way} it: SGLang's own error names it", direction=way)
        why, not_if = f"SGLang ended with: {shortened(words, 300)}", "another error came before this one"
        changes.append(replace(change, why=why, not_if=not_if))
    return changes


def recommended_change(view: View, said: Advice) -> list[Change]:
    """Return what SGLang recommends as a change of the first flag that this release has; nothing where it has none."""
    ways = {each: way for each, way in said.ways.items() if way}
    flag = next((each for each in ways if each.startswith("--") and view.facts.flag(arg_of(each))), None)
    times = f", {said.count:,} times" if said.count > 1 else ""
    why, not_if = (
        f"SGLang printed at its start{times}: “{said.words.rstrip('.')}”",
        "what the line is about does not matter for this load",
    )
    if flag is not None:
        way = WAYS[ways[flag]]
        change = set_flag(view, arg_of(flag), words=f"{way} it: SGLang itself recommends it", direction=way)
        return [replace(change, why=why, not_if=not_if)]
    variables = ", ".join(each for each in ways if not each.startswith("--"))
    return [say(words=f"set {variables} as SGLang's own line says", why=why, not_if=not_if)] if variables else []


def recommended_changes(view: View, _: Beside = frozenset()) -> list[Change]:
    """Return everything that SGLang recommends at its start, as changes."""
    return [change for said in view.facts.recommended() for change in recommended_change(view, said)]
