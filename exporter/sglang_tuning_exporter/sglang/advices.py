"""What SGLang itself says about its flags: which of its texts a message is, what flag it names, and whether it is
advice. Pure.

`advices.json` beside this file has the texts, generated from SGLang's wheels by `release/advices.py`. A text is
compared piece by piece: its constant words must stand in the message in their order, from the first letter to the last,
so a text inside of other words is none, and the time grows with the length of the message only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

_LONGEST = 2000
_LONGEST_SUBJECT = 160  # of what varies before the first constant word
_LINES = 60
_TYPE = re.compile(
    r"(?:[^\s\"']{1,300}\.py:\d{1,6}:"
    r" )?[A-Za-z_][\w.]{0,120}(?:Error|Exception|Warning|Interrupt|WARNING|ERROR|INFO|CRITICAL): "
)
_PLACE = re.compile(r"\{\{|\}\}|\{n?\}|\{n=([^}]*)\}")
_DIRECTIONS = {"+": "increase", "-": "decrease", "=": "set", "!": "unset"}


@dataclass(frozen=True, slots=True)
class Advice:
    """A text of SGLang's about flags."""

    pattern: str  # the name of the text
    role: str  # explains (a failure), recommends, decision (of SGLang's own), request (of one client)
    ways: Mapping[str, str]  # increase, decrease, set or unset, of each flag and variable; empty where it only names it
    words: str = field(default="", compare=False)  # as it was printed
    count: int = field(default=1, compare=False)  # how often

    def is_about(self, arg: str) -> bool:
        """Whether it names an argument, as its flag or as SGLang's field."""
        named = f"--{arg.replace('_', '-')}" in (*self.ways, *self.words.split())
        return named or re.search(rf"\b{arg}\b", self.words) is not None


def recognise(text: str) -> Advice | None:
    """Return which text of SGLang's a message is; None where it is none that names a flag.

    The message may begin with the type of an exception.
    """
    if "_" not in text and "--" not in text:
        return None
    known = _by_first_word()
    for message in _readings(text[:_LONGEST]):
        texts = [*known.get(message.partition(" ")[0], []), *known[""]]
        found = {sum(map(len, pieces)): advice for pieces, advice in reversed(texts) if is_text(message, pieces)}
        if found:
            return replace(found[max(found)], words=text)  # the one with most constant words
    return None


def _readings(text: str) -> Iterator[str]:
    """The whole message, without the exception's type, and line by line."""
    for part in (text, *(text.split("\n", _LINES) if "\n" in text.strip() else ())):
        message = " ".join(part.split())
        yield message
        while match := _TYPE.match(message):
            message = message[match.end() :]
            yield message


def is_text(message: str, pieces: tuple[str, ...]) -> bool:
    """Whether a message is a text with these constant pieces, between which something stands."""
    first, *others = pieces
    if not message.startswith(first):
        return False
    at = len(first)
    for place, piece in enumerate(others, 1):
        # The last piece ends the message, and what stands between two pieces ends with the first chance.
        is_last = place == len(others)
        found = len(message) - len(piece) if is_last else message.find(piece, at)
        if found < at or (place == 1 and not first and found > _LONGEST_SUBJECT):
            return False
        if is_last and not message.endswith(piece):
            return False
        at = found + len(piece)
    return at == len(message)


@lru_cache(maxsize=1)
def table() -> tuple[tuple[str, Advice], ...]:
    """Return all texts of all releases: as they stand in the file, and what they say."""
    document: dict[str, Any] = json.loads(Path(__file__).with_name("advices.json").read_text(encoding="utf-8"))
    return tuple(
        (words, Advice(name, role, {each.rstrip("+-=!"): _DIRECTIONS.get(each[-1], "") for each in names}))
        for name, words, _, role, names, _, _ in document["texts"]
    )


def pieces_of(words: str) -> tuple[str, ...]:
    """Return the constant pieces of a text as it stands in the file; a constant number is a part of them."""
    text = _PLACE.sub(lambda match: match[1] or {"{{": "{", "}}": "}"}.get(match[0], "\0"), words)
    return tuple(text.split("\0"))


@lru_cache(maxsize=1)
def _by_first_word() -> dict[str, list[tuple[tuple[str, ...], Advice]]]:
    """The texts by their first word; without one those that may begin with anything."""
    found: dict[str, list[tuple[tuple[str, ...], Advice]]] = {"": []}
    for words, advice in table():
        pieces = pieces_of(words)
        word, space, _ = pieces[0].partition(" ")
        found.setdefault(word if space else "", []).append((pieces, advice))
    return found
