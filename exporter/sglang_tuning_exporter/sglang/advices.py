"""What SGLang itself says about its flags: which of its texts a message is, what flag it names, and whether it is advice. Pure.

`advices.json` beside this file has the texts, generated from SGLang's wheels by `release/advices.py`. A text is compared piece by piece: its constant
words must stand in the message in their order, from the first letter to the last, so a text inside of other words is none, and the time
grows with the length of the message only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any, NamedTuple

_LONGEST = 2000
_LONGEST_SUBJECT = 160  # of what varies before the first constant word
_LINES = 60
_NAMES = re.compile(r"--[a-z][\w-]*|[A-Za-z][A-Za-z0-9]*_\w+")
_TYPE = re.compile(r"(?:[^\s\"']{1,300}\.py:\d{1,6}: )?[A-Za-z_][\w.]{0,120}(?:Error|Exception|Warning|Interrupt|WARNING|ERROR|INFO|CRITICAL): ")
_FIGURE = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d{1,3})?")
_PLACE = re.compile(r"\{\{|\}\}|\{\}|\{n(?:=([^}]*))?\}")
_DIRECTIONS = {"+": "increase", "-": "decrease", "=": "set", "!": "unset"}


@dataclass(frozen=True, slots=True)
class Advice:
    """A text of SGLang's about flags."""

    pattern: str  # the name of the text
    kind: str  # info, warning, error, critical, raise, assert
    flags: tuple[str, ...]  # those that it advises first
    variables: tuple[str, ...]
    direction: str | None  # increase, decrease, set, unset; None where it advises none, or not the same for all
    number: str | None  # for the flag, as printed
    role: str  # explains (a failure), recommends, decision (of SGLang's own), request (of one client)
    directions: tuple[tuple[str, str], ...] = ()  # of each flag and variable that has one


class _Text(NamedTuple):
    """A text: its constant pieces, between which something stands; the number is before the piece `number`, or in the words `figure`."""

    pieces: tuple[str, ...]
    number: int
    figure: str | None
    advice: Advice


def recognise(text: str) -> Advice | None:
    """Return which text of SGLang's a message is; None where it is none that names a flag. The message may begin with the type of an exception."""
    if "_" not in text and "--" not in text:
        return None
    text = text[:_LONGEST]
    names = set(_NAMES.findall(text))
    if not names:
        return None
    index = _index()
    texts = [each for name in names if name in index for each in index[name]]
    if not texts:
        return None
    for message in _readings(text):
        found = [(sum(map(len, each.pieces)), each.advice, number) for each in texts if (number := _match(message, each)) is not None]
        if found:
            _, advice, number = max(found, key=lambda each: each[0])
            return _with_number(advice, number)
    return None


def _readings(text: str) -> Iterator[str]:
    """The whole message, without the exception's type, and line by line."""
    for part in (text, *(text.split("\n", _LINES) if "\n" in text.strip() else ())):
        message = " ".join(part.split())
        yield message
        while match := _TYPE.match(message):
            message = message[match.end() :]
            yield message


def _match(message: str, text: _Text) -> str | None:
    """Return the number that a message has in the place of the text's, empty where it has none; None where it is not this text."""
    pieces = text.pieces
    first, last = pieces[0], pieces[-1]
    if not message.startswith(first) or (not last and not first):
        return None
    number, at = text.figure or "", len(first)
    for place, piece in enumerate(pieces[1:], 1):
        final = place == len(pieces) - 1
        if not piece:
            found = len(message) if final else at
        elif final:
            found = len(message) - len(piece)
            if found < at or not message.endswith(piece):
                return None
        else:
            found = message.find(piece, at)
            if found < 0:
                return None
        if place == 1 and not first and found > _LONGEST_SUBJECT:
            return None
        if place == text.number:
            number = message[at:found]
        at = found + len(piece)
    return number if at == len(message) else None


def _with_number(advice: Advice, number: str) -> Advice:
    figure = _FIGURE.match(number.strip(" '\"`"))
    if figure is None:
        return advice
    return Advice(
        advice.pattern, advice.kind, advice.flags, advice.variables, advice.direction, figure[0], advice.role, advice.directions
    )


@lru_cache(maxsize=1)
def table() -> tuple[tuple[str, str, str, Advice], ...]:
    """Return all texts: as they stand in the file, the first and the last release that has them, and what they say."""
    document: dict[str, Any] = json.loads((files(__package__) / "advices.json").read_text(encoding="utf-8"))
    return tuple(
        (words, first, last, _advice(name, kind, role, names))
        for name, words, kind, role, names, first, last in document["texts"]
    )


def releases() -> tuple[str, ...]:
    """Return the releases whose texts are known, oldest first."""
    document: dict[str, Any] = json.loads((files(__package__) / "advices.json").read_text(encoding="utf-8"))
    return tuple(document["releases"])


def _advice(name: str, kind: str, role: str, names: list[str]) -> Advice:
    ways = {each.rstrip("+-=!"): _DIRECTIONS.get(each[-1]) for each in names}
    given = {way for way in ways.values() if way}
    return Advice(
        name,
        kind,
        tuple(each for each in ways if each.startswith("--")),
        tuple(each for each in ways if not each.startswith("--")),
        given.pop() if len(given) == 1 else None,
        None,
        role,
        tuple((each, way) for each, way in ways.items() if way),
    )


@lru_cache(maxsize=1)
def _index() -> dict[str, list[_Text]]:
    """The texts by the rarest of the names that stand whole in them."""
    texts = [_text_of(words, advice) for words, _, _, advice in table()]
    named = [_whole_names(text.pieces) for text in texts]
    counts: dict[str, int] = {}
    for names in named:
        for name in names:
            counts[name] = counts.get(name, 0) + 1
    index: dict[str, list[_Text]] = {}
    for text, names in zip(texts, named, strict=True):
        if names:
            index.setdefault(min(names, key=lambda name: (counts[name], name)), []).append(text)
    return index


def _whole_names(pieces: tuple[str, ...]) -> set[str]:
    """The names in constant words that no varying part can lengthen."""
    last = len(pieces) - 1
    return {
        match[0]
        for at, piece in enumerate(pieces)
        for match in _NAMES.finditer(piece)
        if (match.start() or not at) and (match.end() < len(piece) or at == last)
    }


def _text_of(words: str, advice: Advice) -> _Text:
    pieces, number, figure, at = [""], -1, None, 0
    for match in _PLACE.finditer(words):
        pieces[-1] += words[at : match.start()]
        at = match.end()
        if match[0] in ("{{", "}}"):
            pieces[-1] += match[0][0]
        elif match[1] is not None:
            pieces[-1] += match[1]
            figure = match[1]
        else:
            number = len(pieces) if match[0] == "{n}" else number
            pieces.append("")
    pieces[-1] += words[at:]
    return _Text(tuple(pieces), number, figure, advice)
