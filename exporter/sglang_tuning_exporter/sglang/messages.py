"""Quotes an error of a log by the known texts of SGLang and its libraries, without words of a request. Pure.

A quotation has the type of the exception, the constant words of a known text, figures, flags and values that SGLang's
flags take. Everything else is `…`. Of an error that no text matches, only its type, known phrases and flags remain. So
no quotation has a client's words: labels, notifications, page, API and state file quote errors in this way only.
`messages.json` has the texts that SGLang raises (`python -m release.messages`), `advices.json` those about flags,
`libraries.json` those of Python, PyTorch, CUDA and others.
"""

from __future__ import annotations

import builtins
import json
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from pathlib import Path

from sglang_tuning_exporter.sglang import advices, flags

CUT = "…"
UNKNOWN = "an error that is no known text of SGLang's"
_LONGEST = 2000
_LONGEST_SUBJECT = 160  # characters of what varies before the first constant word
_LEAST_LETTERS = 12  # constant ones that a text must have
_MOST_WORDS = 3  # of a value that is shown
_TYPE = re.compile(
    r"((?:[A-Za-z_]\w{0,60}\.){0,6}"
    r"([A-Z]\w{0,60}(?:Error|Exception|Exit|Timeout|Interrupt|Failure|Failed|Warning|NotFound)|Exception))"
    r"(?:\([^()\n]{0,300}\))?(?:: |$)"
)
_PROGRAM = re.compile(r"(?:sglang(?: serve)?|launch_server\.py): error: ")
_REFUSED = re.compile(r"unrecognized arguments: ")
_FLAG = re.compile(r"--[a-z][a-z0-9_-]{2,60}[a-z0-9]")
_FIGURE = re.compile(
    r"[-+]?(?:\d{1,12}|\d{1,3}(?:,\d{3}){1,4})(?:\.\d{1,9})?(?:e[-+]?\d{1,3})?(?:%|x|[KMGT]i?B|[kKMG]|[mun]?s|B)?"
    r"|0x[0-9a-f]{1,16}"
    r"|[KMGT]i?B|bytes|tokens|seconds|SIG[A-Z]{2,6}"
)
_NAME = re.compile(
    r"(?:sglang::)?(?:scheduler|detokenizer|tokenizer|data_parallel_controller)(?:_(?:TP|DP|PP|EP)?\d{0,5}){0,5}"
)
_AROUND = "'\"`(),;.:[]"
# Phrases that alone say something, where the text around them is not known.
_PHRASES = re.compile(
    r"out of memory|not enough memory|illegal memory access|device-side assert|misaligned address"
    r"|unspecified launch failure|no kernel image is available|segmentation fault|bus error|core dumped"
    r"|illegal instruction|no space left on device|disk quota exceeded|too many open files|can't start new thread"
    r"|cannot allocate memory|address already in use|permission denied|no such file or directory"
    r"|connection refused|connection reset by peer|connection closed by peer|broken pipe|network is unreachable"
    r"|no route to host|timed out|timeout|from another rank|watchdog caught collective operation timeout"
    r"|failed to connect|is not supported|not implemented|does not support|not divisible|unsupported"
    r"|undefined symbol|cannot open shared object|no module named|driver version is insufficient|not compiled"
    r"|version mismatch|no cuda gpus are available|found no nvidia driver|invalid device ordinal|gated repo"
    r"|unauthorized|forbidden|not found|certificate verify failed|exit code|memory leak detected|NCCL error"
    r"|CUDA error|HIP error|NVSHMEM|NCCL|Gloo|Mooncake|NIXL|ibv_\w{2,40}\b|TCPStore|assertion|failed"
    r"|CUBLAS_STATUS_\w{4,40}\b|CUDNN_STATUS_\w{4,40}\b|CUresult error: \d{1,4}|cu_mem_create|corrupted"
    r"|double free",
    re.IGNORECASE,
)
_MOST_PHRASES = 6
_LETTERS = "".join(map(chr, (*range(65, 91), *range(97, 123))))
_WORD = re.compile("[A-Za-z]{3,}")


@lru_cache(maxsize=256)
def quoted(text: str, *, marked: bool = False) -> str:
    """Return an error by known texts alone. A quotation of a quotation is the same.

    marked: it stands beside text of others, so an unknown type or flag may be theirs.
    """
    if not text or text == UNKNOWN:
        return text
    message, head = " ".join(text[:_LONGEST].split()), ""
    if (program := _PROGRAM.match(message)) is not None:
        message, head = message[program.end() :], program[0]
        if not marked and _REFUSED.match(message):
            return f"{head}unrecognized arguments: {' '.join(_FLAG.findall(message)) or CUT}"
    while (found := _TYPE.match(message)) is not None:
        message = message[found.end() :]
        if not head and (found[2] in _types() or not marked):
            head = f"{found[1]}: " if message else found[1]
    words = _known(message) or _phrases(message)
    if not words:
        return f"{head}{CUT}" if program is not None else head.removesuffix(": ") or UNKNOWN
    return head + words if not head or head.endswith(": ") else f"{head}: {words}"


def _known(message: str) -> str:
    """Return a message by the text of the table with most constant words; empty where none is it."""
    best, letters = "", 0
    for pieces in _candidates(message):
        constant = sum(map(len, pieces))
        if constant > letters and (holes := _holes(message, pieces)) is not None:
            best, letters = _filled(pieces, holes), constant
    return best


def _holes(message: str, pieces: tuple[str, ...]) -> list[str] | None:
    """Return what stands between the constant pieces of a text, and behind it; None where it is another text."""
    first, *others = pieces
    if not message.startswith(first):
        return None
    at, holes = len(first), list[str]()
    for place, piece in enumerate(others, 1):
        is_last = place == len(others)
        found = len(message) if is_last and not piece else message.find(piece, at)
        if found < at or (place == 1 and not first and found > _LONGEST_SUBJECT):
            return None
        holes.append(message[at:found])
        at = found + len(piece)
    return [*holes, message[at:]]


def _filled(pieces: tuple[str, ...], holes: list[str]) -> str:
    """Return a text with its values; a value that is none is cut."""
    *values, rest = (_value(hole) for hole in holes)
    text = pieces[0] + "".join(map("".join, zip(values, pieces[1:], strict=True)))
    return text + (f" {CUT}" if rest.strip() and not text.endswith(CUT) else "")


def _value(hole: str) -> str:
    """Return a value if it is a figure, a flag, or one that SGLang's flags take; else `…`."""
    words = hole.split()
    return hole if len(words) <= _MOST_WORDS and all(map(_is_value, words)) else CUT


def _is_value(word: str) -> bool:
    name, _, value = word.rpartition("=") if "=" in word.strip("=<>!") else ("", "", word)
    bare = value.strip(_AROUND).removeprefix("torch.")
    is_one = not bare.strip("=<>/+-*!") or bare in _values() or any(form.fullmatch(bare) for form in (_FIGURE, _NAME))
    return is_one and (not name or name in _values())


def _phrases(message: str) -> str:
    """Return the known phrases and flags of a message that is no known text; empty without any."""
    found = [(match.start(), match[0]) for match in _PHRASES.finditer(message)]
    found += [(match.start(), match[0]) for match in _FLAG.finditer(message) if match[0] in _values()]
    words = f" {CUT} ".join(list(dict.fromkeys(phrase for _, phrase in sorted(found)))[:_MOST_PHRASES])
    return words if words in ("", message) else f"{CUT} {words} {CUT}"


@lru_cache(maxsize=2)
def _read(name: str) -> dict[str, list[str]]:
    """Return one of the files beside this one: texts and exceptions of SGLang, or of libraries."""
    document: dict[str, list[str]] = json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    return document


@lru_cache(maxsize=1)
def _types() -> frozenset[str]:
    """The names of exceptions of Python, SGLang and its libraries."""
    return frozenset(_read("libraries.json")["exceptions"]).union(
        _read("messages.json")["exceptions"], (name for name in dir(builtins) if name[0].isupper())
    )


@lru_cache(maxsize=1)
def _values() -> frozenset[str]:
    """The flags of all releases, their names and the words that they take."""
    return flags.words().union(_read("libraries.json")["values"], flags.spellings())


@lru_cache(maxsize=1)
def _by_word() -> dict[str, list[str]]:
    """The texts by their longest constant word that no value can touch; those without one by an empty word."""
    found: dict[str, list[str]] = {}
    for text in chain(
        _read("messages.json")["texts"], _read("libraries.json")["texts"], (words for words, _ in advices.table())
    ):
        words = (word for piece in _spaced(advices.pieces_of(text)) for word in _WORD.findall(piece))
        found.setdefault(max(words, key=len, default=""), []).append(text)
    return found


def _spaced(pieces: tuple[str, ...]) -> Iterator[str]:
    """The pieces of a text without letters beside a value."""
    for place, piece in enumerate(pieces):
        begun = piece.lstrip(_LETTERS) if place else piece
        yield begun.rstrip(_LETTERS) if place < len(pieces) - 1 else begun


def _candidates(message: str) -> Iterator[tuple[str, ...]]:
    known = _by_word()
    for word in ("", *dict.fromkeys(_WORD.findall(message))):
        yield from filter(_says_enough, map(advices.pieces_of, known.get(word, ())))


def _says_enough(pieces: tuple[str, ...]) -> bool:
    return sum(map(str.isalpha, "".join(pieces))) >= _LEAST_LETTERS
