"""Parse the arguments that the server prints at the start, without secrets.

`server_args=ServerArgs(a=…, b=…)` is a dataclass's repr (0.3.0 to 0.5.18), `server_args={'a': …}` a dict's (0.5.20 on;
sglang/srt/entrypoints/engine.py). Both have `api_key` in clear text, so secrets are dropped here, before anything else reads them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

from sglang_tuning_exporter.sglang.clean import redacted

LONGEST_TEXT = 262_144
_ARGUMENTS_KEPT = 2000
_VALUE_LENGTH = 4096
_NAME_LENGTH = 100

_START = re.compile(r"\s*(?:server_args\s*=\s*)?(?:\w+\.)*\w*[({]")
_NAMED = re.compile(r"\s*(?:([A-Za-z_]\w*)\s*=|['\"]([^'\"\\]{1,200})['\"]\s*:)(.*)", re.DOTALL)
_STRING = r"[bru]{0,2}(?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
_STRUCTURE = re.compile(_STRING + r"|<(?=[A-Za-z])|[()\[\]{}>,'\"]")
# Python prints an enum as `<LoadFormat.AUTO: 'auto'>`, and an object without a repr of its own in angle brackets too.
_OBJECT = re.compile(rf"({_STRING})|<\w+(?:\.\w+)*: ([^<>]*)>|(<[A-Za-z][^<>]*>)")

_USUAL = {"None": None, "True": True, "False": False, "0": 0, "1": 1}  # most values, which need no parser

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


def is_argument(name: str) -> bool:
    """Return whether an argument can have this name, from which its flag is spelled: SGLang's are fields of a Python class."""
    return len(name) <= _NAME_LENGTH and name.isascii() and name.isidentifier()


def parse_server_args(text: str) -> tuple[dict[str, object], bool] | None:
    """Return the arguments of a `server_args=…` line or of its value, and whether it was cut; None where none can be read. Never raises.

    A line that was cut gives the arguments before the cut. Nested mappings stay dicts, lists and tuples become lists, enums their values,
    `nan` and unresolved defaults None, values with a secret `<redacted>`.
    """
    text = text[:LONGEST_TEXT]
    if "<" in text:
        text = _OBJECT.sub(lambda match: match[1] or match[2] or repr(match[3] or ""), text)
    start = _START.match(text)
    if start is None:
        return None
    parts, is_cut = _parts(text, start.end())
    found: dict[str, object] = {}
    for part in parts:
        named = _NAMED.match(part)
        if named is None:
            is_cut = is_cut or bool(part.strip())
            break
        name = named[1] or named[2]
        if is_argument(name):
            found[name] = _value(named[3].strip())
    args = redacted(found)
    return (args, is_cut) if args else None


def _parts(text: str, position: int) -> tuple[list[str], bool]:
    """Cut the inside of a bracket at its commas, those of strings and inner brackets left out; also return whether its end is missing."""
    parts, depth = list[str](), 0
    for match in _STRUCTURE.finditer(text, position):
        mark = match[0]
        if mark in ("'", '"') or len(parts) == _ARGUMENTS_KEPT:
            break
        if mark in ("(", "[", "{", "<"):
            depth += 1
        elif mark in (")", "]", "}", ">") and depth:
            depth -= 1
        elif mark in (",", ")", "}") and not depth:
            parts.append(text[position : match.start()])
            position = match.end()
            if mark != ",":
                return parts, False
    return parts, True


def _value(text: str) -> object:
    """Return the value that Python prints so; other text unchanged."""
    if text in _USUAL:
        return _USUAL[text]
    if text[:1] == "'" == text[-1:] and "\\" not in text and text.count("'") == 2:
        return text[1:-1]
    try:
        return _value_of(ast.parse(text, mode="eval").body, text.encode())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text[:_VALUE_LENGTH]


def _value_of(node: ast.expr, source: bytes) -> object:
    value: object = source[node.col_offset : node.end_col_offset].decode("utf-8", "replace")[:_VALUE_LENGTH]
    match node:
        case ast.Constant(value=str() as text):
            value = text[: 4 * _VALUE_LENGTH]
        case ast.Constant(value=int() | float() | None as number):
            value = number
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            value = -number
        case ast.Name(id="nan" | "inf" as name):
            value = None if name == "nan" else float(name)
        case ast.List() | ast.Tuple() | ast.Set():
            value = [_value_of(item, source) for item in node.elts[:_ARGUMENTS_KEPT]]
        case ast.Dict():
            pairs = zip(node.keys, node.values, strict=True)
            value = {str(_value_of(key, source)): _value_of(item, source) for key, item in pairs if key is not None}
        case ast.Call() if node.keywords:
            fields = {each.arg or "": _value_of(each.value, source) for each in node.keywords}
            value = None if "default_factory" in fields else fields  # such a call is not the value in force
    return value
