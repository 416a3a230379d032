"""Parse the arguments that the server prints at the start, without secrets.

`server_args=ServerArgs(a=…, b=…)` is a dataclass's repr (0.3.0 to 0.5.18), `server_args={'a': …}` a dict's (0.5.20 on;
sglang/srt/entrypoints/engine.py). Both have `api_key` in clear text, so secrets are dropped here, before anything else reads them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

from sglang_tuning_exporter.sglang.clean import REDACTED, without_secrets

LONGEST_TEXT = 262_144
_ARGUMENTS_KEPT = 2000
_DEPTH = 12
_VALUE_LENGTH = 4096
_NAME_LENGTH = 100

_START = re.compile(r"\s*(?:server_args\s*=\s*)?(?:\w+\.)*\w*([({])")
_NAME = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*")
_KEY = re.compile(r"""\s*(?:'((?:[^'\\]|\\.){1,200})'|"((?:[^"\\]|\\.){1,200})"|([A-Za-z_]\w*))\s*:\s*""")
_STRING = re.compile(r"""[bru]{0,2}(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""")
_NUMBER = re.compile(r"-?(?:\d[\d_]*(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)$")
_STRUCTURE = re.compile(r"""[,'"()\[\]{}<>]""")
_ENUM = re.compile(r"<\w+(?:\.\w+)*: ")
_OPEN = {"(": ")", "[": "]", "{": "}", "<": ">"}
_WORDS: dict[str, object] = {
    "None": None,
    "True": True,
    "False": False,
    "inf": float("inf"),
    "-inf": float("-inf"),
    "nan": None,
}
_QUOTES = ("'", '"')
_PREFIXED_QUOTES = ("b'", 'b"', "r'", 'r"', "u'", 'u"')

_SECRET = re.compile(
    r"api[_-]?key|passw|secret|credential|keyfile|private_key|watermark_(?:config|key)|auth(?!or)", re.IGNORECASE
)
_SECRET_TEXT = re.compile(
    r"api[_-]?key|passw|secret|credential|private_key|access_?key|\w_?token['\"]?\s*[:=]|bearer |://[^/\s'\"@]+@",
    re.IGNORECASE,
)
# An access token; `bucket_time_to_first_token` is about tokens of the model.
_TOKEN = re.compile(
    r"(?:^|(?<!first)(?<!last)(?<!next)(?<!per)_)token$|(?:^|_)(?:hf|access|auth|bearer|api|refresh|session)_?token",
    re.IGNORECASE,
)


# Arguments that change from start to start without tuning.
VARYING_ARGS = frozenset(
    {
        "random_seed", "port", "host", "nccl_port", "dist_init_addr", "node_rank", "log_level", "log_level_http",
        "grpc_port", "file_storage_path", "crash_dump_folder", "watchdog_timeout", "served_model_name", "tokenizer_path",
    }
)  # fmt: skip


def are_same_settings(before: Mapping[str, object], after: Mapping[str, object]) -> bool:
    """Return whether two starts had the same arguments, of those that both have as a number, a switch or a string."""
    both = ((value, after[arg]) for arg, value in before.items() if arg in after and arg not in VARYING_ARGS)
    plain = (int, float, str, type(None))
    return all(old == new or not isinstance(old, plain) or not isinstance(new, plain) for old, new in both)


@lru_cache(maxsize=2048)  # a server's arguments have the same names at every start
def is_secret(name: str) -> bool:
    """Return whether the value of a key is secret: of `api_key`, `ssl_keyfile` and `hf_token` it is, of `max_total_tokens` not."""
    return _SECRET.search(name) is not None or _TOKEN.search(name) is not None


def is_argument(name: str) -> bool:
    """Return whether an argument can have this name, from which its flag is spelled: SGLang's are fields of a Python class."""
    return len(name) <= _NAME_LENGTH and name.isascii() and name.isidentifier()


def holds_secret(text: str) -> bool:
    """Return whether a value may contain a secret: JSON with an `access_key`, a URL with a password, `--api-key` among arguments."""
    return _SECRET_TEXT.search(text) is not None or without_secrets(text) != text


class _CutTextError(Exception):
    """The text ends inside a value."""


def _value_end(text: str, position: int, closing: str) -> int:
    """Return the end of the value at `position`: a comma or `closing` outside of quotes and brackets. Raises `_CutTextError`."""
    stack: list[str] = []
    while (match := _STRUCTURE.search(text, position)) is not None:
        position = match.start()
        character = match[0]
        if character in _QUOTES:
            string = _STRING.match(text, position)
            if string is None:
                break
            position = string.end()
            continue
        if not stack and character in (",", closing):
            return position
        if stack and character == stack[-1]:
            stack.pop()
        elif character in _OPEN and (character != "<" or text[position + 1 : position + 2].isalpha()):
            stack.append(_OPEN[character])
        position += 1
    raise _CutTextError


def _literal(text: str) -> object:
    """Return the string or number that Python prints so; other text unchanged."""
    if text[:1] in _QUOTES and text[-1:] == text[:1] and len(text) > 1 and "\\" not in text:
        return text[1:-1]
    try:
        value: object = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return text[:_VALUE_LENGTH]
    return value


def _items(text: str, depth: int) -> list[object]:
    """Return the items of a list or tuple, whose inside is `text`."""
    items: list[object] = []
    position = 0
    inside = text + ","
    while position < len(inside) and len(items) < _ARGUMENTS_KEPT:
        end = _value_end(inside, position, ",")
        if inside[position:end].strip():
            items.append(_value(inside[position:end], depth + 1))
        position = end + 1
    return items


def _value(text: str, depth: int) -> object:
    text = text.strip()
    if text in _WORDS:
        return _WORDS[text]
    if _NUMBER.match(text) and len(text) <= _NAME_LENGTH:
        return int(text) if text.isdigit() else _literal(text)
    if text[:1] in _QUOTES or text[:2] in _PREFIXED_QUOTES:
        return REDACTED if holds_secret(text) else _literal(text[: _VALUE_LENGTH * 4])
    value: object = text[:_VALUE_LENGTH]
    if depth <= _DEPTH:
        with suppress(_CutTextError):
            value = _compound(text, depth)
    return REDACTED if isinstance(value, str) and holds_secret(value) else value


def _compound(text: str, depth: int) -> object:
    """Return a mapping, a list, the value of an enum or a nested dataclass; other text unchanged. Raises `_CutTextError`."""
    value: object = text[:_VALUE_LENGTH]
    if text[:1] == "{" and text[-1:] == "}":
        value = _arguments(text, 1, _KEY, "}", depth + 1).args
    elif text[:1] + text[-1:] in ("[]", "()"):
        # In a list such as ['--api-key', '…'] only the item before shows which one is secret.
        value = REDACTED if holds_secret(text) else _items(text[1:-1], depth)
    elif text[-1:] == ">" and (match := _ENUM.match(text)):
        value = _value(text[match.end() : -1], depth + 1)
    elif text[-1:] == ")" and (start := _START.match(text)) and start[1] == "(":
        fields = _arguments(text, start.end(), _NAME, ")", depth + 1).args
        # A call such as field(default_factory=…) is not the value in force.
        value = None if "default_factory" in fields else fields or value
    return value


class PrintedArguments(NamedTuple):
    """Arguments by name; `is_cut`: the text ends before the last of them."""

    args: dict[str, object]
    is_cut: bool


def _arguments(text: str, position: int, name: re.Pattern[str], closing: str, depth: int) -> PrintedArguments:
    """Return the arguments from `position` to `closing`, up to where the text is cut or mangled."""
    found: dict[str, object] = {}
    while len(found) < _ARGUMENTS_KEPT:
        match = name.match(text, position)
        if match is None:
            break
        key = match[match.lastindex or 0]
        try:
            end = _value_end(text, match.end(), closing)
        except _CutTextError:
            break
        if not is_secret(key) and (is_argument(key) if depth == 0 else len(key) <= _NAME_LENGTH):
            found[key] = _value(text[match.end() : end], depth)
        position = end + 1
        if text[end] == closing:
            return PrintedArguments(found, is_cut=False)
    return PrintedArguments(found, is_cut=True)


def parse_server_args(text: str) -> PrintedArguments | None:
    """Return the arguments of a `server_args=…` line or of its value; None where none can be read. Never raises.

    A line that was cut gives the arguments before the cut. Nested mappings stay dicts, lists and tuples become lists, enums their values,
    `nan` and unresolved defaults None, values with a secret `<redacted>`.
    """
    text = text[:LONGEST_TEXT]
    start = _START.match(text)
    if start is None:
        return None
    name, closing = (_NAME, ")") if start[1] == "(" else (_KEY, "}")
    found = _arguments(text, start.end(), name, closing, 0)
    return found if found.args else None
