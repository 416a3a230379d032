"""Where SGLang prints words of a request or of a model raw: `python -m fuzz.sinks WHEEL …` reads the wheels of its releases.

    pip download --no-deps --only-binary=:all: --ignore-requires-python sglang==0.5.23 -d build/wheels
    python -m fuzz.sinks build/wheels/*.whl

Each call that logs, prints or raises a text with a part that can hold such words is written to `fuzz/sinks.json`: the constant words around that
part, and release by release the place. What counts as raw is decided by the names of the variables (`_RAW`),
and may be wrong both ways: the reader of logs needs none of it (`core/trust.py`); `fuzz/forgeries.py` forges with it. No code of SGLang's is kept.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PLACE = Path(__file__).with_name("sinks.json")

# Code that a request passes through. Kernels, layers, models and benchmarks print none of its words.
_PATHS = re.compile(
    r"sglang/(?:srt/(?:entrypoints|managers|function_call|openai_api|parser|constrained|conversation|utils|sampling|multimodal|reasoning_parser"
    r"|hf_transformers_utils|server|tokenizer|code_completion|jinja|observability|disaggregation|grpc|session|lora)|launch_server|utils)"
)
_LEVELS = ("debug", "info", "warning", "warn", "error", "exception", "critical")
# A name is raw where one of its words is.
_RAW = re.compile(
    r"(?:text|prompt|message|messages|content|tool|tools|function|functions|func|name|arguments|args|param|params|value"
    r"|json|chunk|output|outputs|answer|rid|request|req|obj|body|payload|schema|grammar|regex|template|url|image|audio"
    r"|video|media|data|input|inputs|string|str|delta|response|result|e|ex|exc|err|error|exception|traceback|reason"
    r"|line|detail|key|token|tokens)"
)
# What has such a name and is a figure, or the operator's own.
_TAME = re.compile(
    r"len\(|type\(|\.shape|num_|_len\b|count|time|size|server_args|_ids?\b|port|rank|model_path|dtype|__name__|\.pid|self\.\w*args|config|device|backend"
)
_LONGEST = 80


class Sink(NamedTuple):
    """A text with a raw part: how SGLang prints it, and the constant words before and after."""

    how: str
    before: str
    after: str


def of_source(source: str) -> Iterator[tuple[Sink, int]]:
    """The sinks of one file, with their lines."""
    for node in ast.walk(ast.parse(source)):
        how = _how(node)
        arguments = node.args if isinstance(node, ast.Call) else _raised(node)
        if how and arguments:
            for before, raw, after in _parts(arguments):
                if _is_raw(raw):
                    yield Sink(how, before[-_LONGEST:], after[:_LONGEST]), getattr(node, "lineno", 0)
                    break


def _how(node: ast.AST) -> str:
    if isinstance(node, ast.Raise):
        return "raise"
    if not isinstance(node, ast.Call):
        return ""
    function = node.func
    if isinstance(function, ast.Name):
        return function.id if function.id in ("print", "warn") else ""
    if not isinstance(function, ast.Attribute):
        return ""
    owner = ast.unparse(function.value)
    if function.attr in _LEVELS and ("log" in owner.lower() or owner == "warnings"):
        return function.attr
    return ""


def _raised(node: ast.AST) -> list[ast.expr]:
    return node.exc.args if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) else []


def _parts(arguments: list[ast.expr]) -> Iterator[tuple[str, ast.expr, str]]:
    """Each varying part of a call's text with the constant words on both sides."""
    pieces: list[str | ast.expr] = []
    for number, argument in enumerate(arguments):
        text = list(_pieces(argument))
        if number and isinstance(arguments[0], ast.Constant) and isinstance(arguments[0].value, str):
            pieces = _filled(pieces, argument)
        else:
            pieces += text
    for at, piece in enumerate(pieces):
        if not isinstance(piece, str):
            before = "".join(_or_gap(each) for each in pieces[:at])
            after = "".join(_or_gap(each) for each in pieces[at + 1 :])
            yield before, piece, after


def _or_gap(piece: str | ast.expr) -> str:
    return piece if isinstance(piece, str) else "…"


def _filled(pieces: list[str | ast.expr], argument: ast.expr) -> list[str | ast.expr]:
    """Put an argument of logging in place of the next `%s`."""
    for at, piece in enumerate(pieces):
        if isinstance(piece, str) and (match := re.search(r"%[-\d.]*[sdrfx]", piece)):
            if match[0] != "%s":
                argument = ast.Constant(0)
            return [*pieces[:at], piece[: match.start()], argument, piece[match.end() :], *pieces[at + 1 :]]
    return [*pieces, argument]


def _pieces(node: ast.expr) -> Iterator[str | ast.expr]:
    if isinstance(node, ast.Constant):
        yield str(node.value)
    elif isinstance(node, ast.JoinedStr):
        for value in node.values:
            if not isinstance(value, ast.FormattedValue):
                yield from _pieces(value)
            elif value.conversion == ord("r") or value.format_spec is not None:
                yield "…"  # what is printed as a literal has no line end, and what has a format is a figure
            else:
                yield value.value
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield from _pieces(node.left)
        yield from _pieces(node.right)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        pieces = list(_pieces(node.left))
        for value in node.right.elts if isinstance(node.right, ast.Tuple) else [node.right]:
            pieces = _filled(pieces, value)
        yield from pieces
    else:
        yield node


def _is_raw(node: ast.expr) -> bool:
    written = ast.unparse(node)
    if isinstance(node, ast.Constant) or _TAME.search(written):
        return False
    return any(
        _RAW.fullmatch(word) for name in re.findall(r"[A-Za-z_]\w*", written) for word in name.lower().split("_")
    )


def of_wheel(path: Path) -> dict[Sink, str]:
    """The sinks of one release, each with the first place in its source."""
    found: dict[Sink, str] = {}
    with zipfile.ZipFile(path) as wheel:
        for name in sorted(wheel.namelist()):
            if name.endswith(".py") and _PATHS.match(name) and "/test" not in name:
                for sink, line in of_source(wheel.read(name).decode("utf-8", "replace")):
                    found.setdefault(sink, f"{name.removeprefix('sglang/')}:{line}")
    return found


def known() -> list[tuple[Sink, dict[str, str]]]:
    """The result of the last search: each sink with its place by release."""
    return [(Sink(*entry["sink"]), entry["at"]) for entry in json.loads(PLACE.read_text())]


def main(wheels: list[str]) -> int:
    """Read the wheels, write the file, and print what is new."""
    before = {sink for sink, _ in known()} if PLACE.exists() else set()
    found: dict[Sink, dict[str, str]] = {}
    for path in sorted(
        map(Path, wheels), key=lambda path: [int(n) for n in re.findall(r"\d+", path.name.split("-")[1])]
    ):
        release = path.name.split("-")[1]
        places = of_wheel(path)
        print(f"{release}: {len(places)} texts with raw words")
        for sink, place in places.items():
            found.setdefault(sink, {})[release] = place
    pairs = sorted(found.items())
    PLACE.write_text(json.dumps([{"sink": sink, "at": at} for sink, at in pairs], indent=0, ensure_ascii=False) + "\n")
    print(f"{len(pairs)} altogether, {len(found.keys() - before)} of them new, {len(before - found.keys())} gone")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
