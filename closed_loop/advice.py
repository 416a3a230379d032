"""The advice in the exporter's JSON, followed as an operator would: its command line unchanged, or its sentence to the
clients. Pure.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from closed_loop.engine import arguments_of
from closed_loop.load import Load

# Advice about clients, with the load's field that it changes.
_COUNTED = (
    ("clients", "requests at once", re.compile(r"\b(?:at most|about) ([\d,]+) requests? at once")),
    ("most_new_tokens", "max_new_tokens", re.compile(r"\bat most ([\d,]+) max_new_tokens")),
)


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that was changed, as text: a flag, or `requests at once` or `max_new_tokens` of the clients."""

    what: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Advised:
    """What to start and send next, and the changes; no advice was given where `changes` is empty."""

    args: tuple[str, ...]
    load: Load
    changes: tuple[Change, ...] = ()


def advised(document: dict[str, Any], args: Sequence[str], load: Load, fixed: Sequence[str] = ()) -> Advised:
    """Return the next command line and load by `/api/v1/findings`.

    In this order: the document's command line; the first advice with a flag and value; the first sentence with a figure
    for the clients. The flags `fixed` stay as they are, because they stand for hardware; then the next advice is used.
    """
    if command := document.get("command"):
        changes = [_change(each) for each in command["changes"]]
        kept = list(arguments_of(command["text"]))
        for change in changes:
            if change.what in fixed:  # as it was: of several the last one counts
                kept[kept.index(change.what) + 1] = args[len(args) - list(args)[::-1].index(change.what)]
        if turned := tuple(change for change in changes if change.what not in fixed):
            return Advised(tuple(kept), load, turned)
    advices = [advice for finding in document["findings"] for advice in finding["advice"]]
    for advice in advices:
        if advice["typed"] and advice["flag"] not in fixed:
            removes = advice["action"] == "Remove"
            after = _without(args, advice["flag"]) if removes else (*args, *shlex.split(advice["typed"]))
            return Advised(after, load, (_change(advice),))
    for sentence in (str(advice["suggested"]) for advice in advices if advice["flag"] is None):
        for name, what, figure in _COUNTED:
            if found := figure.search(sentence):
                wanted = int(found[1].replace(",", ""))
                change = Change(what, str(getattr(load, name)), str(wanted))
                changed: dict[str, Any] = {name: wanted}
                return Advised(tuple(args), replace(load, **changed), (change,))
    return Advised(tuple(args), load)


def _change(advice: dict[str, Any]) -> Change:
    return Change(advice["flag"], str(advice["current"]), str(advice["suggested"]))


def _without(args: Sequence[str], flag: str) -> tuple[str, ...]:
    """Return a command line without a flag and its value."""
    kept: list[str] = []
    dropped = False
    for word in args:
        dropped = word == flag or (dropped and not word.startswith("--"))
        if not dropped:
            kept.append(word)
    return tuple(kept)
