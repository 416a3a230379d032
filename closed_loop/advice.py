"""The advice in the exporter's JSON, followed as an operator would: its command line unchanged, or its sentence to the clients. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
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
    words: str = ""  # of the verdict's advice to people

    def as_json(self) -> dict[str, Any]:
        """Return what changed as plain JSON."""
        return {"changes": [asdict(change) for change in self.changes], "words": self.words}


def advised(document: dict[str, Any], args: Sequence[str], load: Load, fixed: Sequence[str] = ()) -> Advised:
    """Return the next command line and load by `/api/v1/findings`.

    In this order: the document's command line; the first advice with a flag and value; the first sentence with a figure for the clients.
    The flags `fixed` stay as they are, because they stand for hardware; then the next advice is used.
    """
    kept = Advised(tuple(args), load)
    command = document.get("command")
    if command:
        data = [Change(c["flag"], str(c["current"]), str(c["suggested"])) for c in command["changes"]]
        kept = _held(Advised(tuple(arguments_of(command["text"])), load, tuple(data), _words(document)), args, fixed)
        if kept.changes:
            return kept
    for finding in document["findings"]:
        for advice in finding["advice"]:
            if advice["typed"] and advice["flag"] not in fixed:
                change = Change(advice["flag"], str(advice["current"]), str(advice["suggested"]))
                if advice["action"] == "Remove":
                    return Advised(_without(args, advice["flag"]), load, (change,))
                return Advised((*args, *shlex.split(advice["typed"])), load, (change,))
    for sentence in _sentences(document):
        for name, what, figure in _COUNTED:
            found = figure.search(sentence)
            if found is not None:
                wanted = int(found[1].replace(",", ""))
                change = Change(what, str(getattr(load, name)), str(wanted))
                changed = Load.of_json({**load.as_json(), name: wanted})
                return Advised(tuple(args), changed, (change,), sentence)
    return Advised(tuple(args), load, words=kept.words or _words(document))


def _held(advice: Advised, args: Sequence[str], fixed: Sequence[str]) -> Advised:
    """Return the advice with the flags `fixed` as they are in `args`."""
    turned = [change for change in advice.changes if change.what in fixed]
    if not turned:
        return advice
    kept = list(advice.args)
    for change in turned:
        kept[kept.index(change.what) + 1] = args[len(args) - 1 - list(args)[::-1].index(change.what) + 1]
    words = "; ".join(f"{change.what} {change.old} -> {change.new}, which is held here" for change in turned)
    rest = tuple(change for change in advice.changes if change not in turned)
    return replace(advice, args=tuple(kept), changes=rest, words=advice.words or words)


def _without(args: Sequence[str], flag: str) -> tuple[str, ...]:
    """Return a command line without a flag and its value."""
    kept: list[str] = []
    dropped = False
    for word in args:
        dropped = word == flag or (dropped and not word.startswith("--"))
        if not dropped:
            kept.append(word)
    return tuple(kept)


def _sentences(document: dict[str, Any]) -> list[str]:
    """Return all advice to people, the most urgent first."""
    return [str(a["suggested"]) for finding in document["findings"] for a in finding["advice"] if a["flag"] is None]


def _words(document: dict[str, Any]) -> str:
    """Return the verdict's advice to people; empty if it names a flag or there is none."""
    for finding in document["findings"]:
        if finding["diagnosis"] == document["verdict"]:
            data = [str(a["suggested"]) for a in finding["advice"] if a["flag"] is None]
            return data[0] if data else ""
    return ""


def in_short(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the findings in short: diagnosis, confidence, advice."""
    return [
        {
            "diagnosis": finding["diagnosis"],
            "confidence": finding["confidence"],
            "value": finding["evidence"][0]["value"] if finding["evidence"] else None,
            "advice": [[a["flag"], a["current"], a["suggested"]] for a in finding["advice"]],
        }
        for finding in document["findings"]
    ]
