"""What SGLang itself says about its flags: which of its texts a message is, what flag it names, and whether it is advice. Pure.

`advices.json` beside this file has the texts, generated from SGLang's wheels by `release/advices.py`. A text is compared piece by piece: its constant
words must stand in the message in their order, from the first letter to the last, so a text inside of other words is none, and the time
grows with the length of the message only.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

_LONGEST = 2000
_LONGEST_SUBJECT = 160  # of what varies before the first constant word
_LINES = 60
# A text of another release: so many constant letters, and so great a share of all, are the same from the beginning on.
_LEAST_ALIKE, _SHARE_ALIKE = 48, 0.6
_FIRST_LETTERS = 12  # of a piece, by which its place is found
_NAMES = re.compile(r"(?<![\w-])(?:--[a-z][\w-]*|[A-Za-z]\w*_[\w-]*)")
_TYPE = re.compile(
    r"(?:[^\s\"']{1,300}\.py:\d{1,6}: )?[A-Za-z_][\w.]{0,120}(?:Error|Exception|Warning|Interrupt|WARNING|ERROR|INFO|CRITICAL): "
)
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
    """Return which text of SGLang's a message is; None where it is none that names a flag.

    The message may begin with the type of an exception. A text of which another release changed the end is recognised by its beginning, with what
    both name.
    """
    if "_" not in text and "--" not in text:
        return None
    text = text[:_LONGEST]
    names = set(_NAMES.findall(text))
    exact, near = _indexes()
    texts = [each for name in names & exact.keys() for each in exact[name]]
    for message in _readings(text) if texts else ():
        found = [(each, number) for each in texts if (number := _number_of(message, each)) is not None]
        if found:
            whole, number = max(found, key=lambda each: _letters(each[0]))
            return _with_number(whole.advice, number)
    texts = [each for name in names & near.keys() for each in near[name]]
    for message in _readings(text) if texts else ():
        (reached, number), at = max((_reached(message, each), at) for at, each in enumerate(texts))
        if reached >= max(_LEAST_ALIKE, _letters(texts[at]) * _SHARE_ALIKE):
            return _with_number(_in_common(message, texts[at]), number)
    return None


def _readings(text: str) -> Iterator[str]:
    """The whole message, without the exception's type, and line by line."""
    for part in (text, *(text.split("\n", _LINES) if "\n" in text.strip() else ())):
        message = " ".join(part.split())
        yield message
        while match := _TYPE.match(message):
            message = message[match.end() :]
            yield message


def _letters(text: _Text) -> int:
    return sum(map(len, text.pieces))


def _number_of(message: str, text: _Text) -> str | None:
    """Return the number that a message has in the place of the text's, empty where there is none; None where it is not this text."""
    first, *others = text.pieces
    if not message.startswith(first):
        return None
    number, at = text.figure or "", len(first)
    for place, piece in enumerate(others, 1):
        # The last piece ends the message, and what stands between two pieces ends with the first chance.
        found = len(message) - len(piece) if place == len(others) else message.find(piece, at)
        if found < at or (place == 1 and not first and found > _LONGEST_SUBJECT):
            return None
        if place == len(others) and not message.endswith(piece):
            return None
        if place == text.number:
            number = message[at:found]
        at = found + len(piece)
    return number if at == len(message) else None


def _reached(message: str, text: _Text) -> tuple[int, str]:
    """Return how many constant letters of a text a message has before it differs, and the number that it has until there."""
    reached, at, number = 0, 0, ""
    for place, piece in enumerate(text.pieces):
        found = message.find(piece[:_FIRST_LETTERS], at) if place else 0
        if found < 0 or (place == 1 and not reached and found > _LONGEST_SUBJECT):
            break
        if place == text.number:
            number = message[at:found]
        alike = _alike(piece, message[found : found + len(piece)])
        reached, at = reached + alike, found + alike
        if alike < len(piece):
            break
    return reached, number


def _alike(one: str, other: str) -> int:
    """Return how many letters two texts begin with together."""
    return next((at for at, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))  # noqa: B905 - of two lengths


def _stands(words: str, text: str) -> bool:
    """Whether words stand in a text, and are not the beginning of a longer name."""
    return re.search(re.escape(words) + r"(?![\w-])", text) is not None


def _in_common(message: str, text: _Text) -> Advice:
    """What a text says with the same words as a message."""
    advice, words, said = text.advice, "0".join(text.pieces).lower(), message.lower()
    named = {
        name
        for name in (*advice.flags, *advice.variables)
        if _stands(name.lower(), said) or (name[:2] == "--" and _stands(name[2:].replace("-", "_"), said))
    }
    ways = tuple(
        (name, way)
        for name, way in advice.directions
        if (phrase := re.search(r"\S+ \S*" + re.escape(name.lower()) + r"(?![\w-])", words))
        and _stands(phrase[0], said)
    )
    given = {way for _, way in ways}
    return Advice(
        advice.pattern,
        advice.kind,
        tuple(flag for flag in advice.flags if flag in named),
        tuple(name for name in advice.variables if name in named),
        given.pop() if len(given) == 1 else None,
        None,
        advice.role,
        ways,
    )


def _with_number(advice: Advice, number: str) -> Advice:
    figure = _FIGURE.match(number.strip(" '\"`"))
    if figure is None:
        return advice
    return Advice(
        advice.pattern,
        advice.kind,
        advice.flags,
        advice.variables,
        advice.direction,
        figure[0],
        advice.role,
        advice.directions,
    )


@lru_cache(maxsize=1)
def table() -> tuple[tuple[str, str, str, Advice], ...]:
    """Return all texts of all releases: as they stand in the file, the first and the last release that has them, and what they say."""
    document: dict[str, Any] = json.loads(Path(__file__).with_name("advices.json").read_text(encoding="utf-8"))
    return tuple(
        (words, first, last, _advice(name, kind, role, names))
        for name, words, kind, role, names, first, last in document["texts"]
    )


def releases() -> tuple[str, ...]:
    """Return the releases whose texts are known, oldest first."""
    document: dict[str, Any] = json.loads(Path(__file__).with_name("advices.json").read_text(encoding="utf-8"))
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
def _indexes() -> tuple[dict[str, list[_Text]], dict[str, list[_Text]]]:
    """The texts by the rarest of the names that stand whole in them, and by the first."""
    texts = [_text_of(words, advice) for words, _, _, advice in table()]
    named = [_whole_names(text.pieces) for text in texts]
    counts = Counter(name for names in named for name in set(names))
    exact: dict[str, list[_Text]] = {}
    near: dict[str, list[_Text]] = {}
    for text, names in zip(texts, named, strict=True):
        if names:
            exact.setdefault(min(names, key=lambda name: (counts[name], name)), []).append(text)
            near.setdefault(names[0], []).append(text)
    return exact, near


def _whole_names(pieces: tuple[str, ...]) -> list[str]:
    """The names in constant words that no varying part can lengthen."""
    last = len(pieces) - 1
    return [
        match[0]
        for at, piece in enumerate(pieces)
        for match in _NAMES.finditer(piece)
        if (match.start() or not at) and (match.end() < len(piece) or at == last)
    ]


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
