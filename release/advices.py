"""What SGLang says about its own flags: `python -m release.advices WHEEL …` reads the wheels of its releases.

    pip download --no-deps --only-binary=:all: --ignore-requires-python sglang==0.5.23 -d build/wheels
    python -m release.advices build/wheels/*.whl

Every text that SGLang logs as info, warning, error or critical, raises or asserts, and that names a flag, an argument or an environment variable, is a
row of `exporter/sglang_tuning_exporter/sglang/advices.json`: the constant words of the text, and what follows from them by the rules below. Where a
rule errs, `advice_corrections.yaml` beside this file has the answer. Nothing of SGLang's code is kept.

A text is kept with its holes, `{}`, and the number that it advises, `{n}` or `{n=600}` where that is constant.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import NamedTuple

import yaml

PLACE = Path(__file__).parent.parent / "exporter" / "sglang_tuning_exporter" / "sglang" / "advices.json"
FLAGS = PLACE.parent / "args" / "flags.json"
CORRECTIONS = Path(__file__).with_name("advice_corrections.yaml")
ABOUT = (
    "Texts that SGLang (Apache-2.0, see NOTICE) logs, raises or asserts and that name a flag, an argument or an environment variable, with `{}` for what varies."
    " Generated from its wheels by `python -m release.advices`. A row: id, text ({n}: the number that it advises, {n=600}: the same, constant), kind, role,"
    " flags and variables with their direction (+ increase, - decrease, = set, ! unset, nothing: only named), the first and the last of the releases that have it."
)

# The server, its start and what it runs; not its benchmarks, its client language and the server of diffusion models.
_PATHS = re.compile(r"sglang/(?:srt|cli|jit_kernel|kernels)/|sglang/(?:launch_server|utils|profiler)\.py")
_NOT_SERVING = re.compile(r"/tests?/|/test_|benchmark|/bench_|/debug_utils/|/testing/")
_KINDS = {
    "info": "info", "warning": "warning", "warn": "warning", "error": "error", "exception": "error",
    "critical": "critical", "info_once": "info", "warning_once": "warning", "error_once": "error",
    "log_info_on_rank0": "info", "log_info_on_rank": "info", "rank0_log": "info", "print_warning_once": "warning",
    "print_info_once": "info", "print_deprecated_warning": "warning", "log_warning_on_rank0": "warning",
}  # fmt: skip
_HOLE = "\0"
_MOST_READINGS = 8  # of one text whose parts are chosen by conditions
_LEAST_WORDS = 12  # letters that are constant; a text with fewer is nobody's in particular
_LONGEST = 1500
_FLAG = re.compile(r"(?<![\w-])--(?:no-)?[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*(?![\w-])")
_NAME = re.compile(r"(?<![\w.\0-])[a-z][a-z0-9]*(?:_[a-z0-9]+)+(?![\w\0(-])")
_VARIABLE = re.compile(r"(?<![A-Za-z0-9_\0])(?:SGLANG|SGL|NCCL|GLOO|MC|HCCL|MOONCAKE|NVSHMEM|DEEPEP|DG)_[A-Z0-9_]*[A-Z0-9](?![\w\0])")
_READ_FROM_ENVIRONMENT = re.compile(r"""(?:environ(?:\.get\(|\[|\.setdefault\()|getenv\(|get_bool_env_var\(|get_int_env_var\()\s*["']([A-Z][A-Z0-9]*_[A-Z0-9_]+)["']""")


class Text(NamedTuple):
    """A text of SGLang's: its words with holes, how it is printed, and where."""

    words: str
    kind: str
    path: str
    function: str
    exception: str = ""


def texts_of(source: str, path: str, constants: dict[str, str]) -> Iterator[Text]:
    """The texts of one file."""
    tree = ast.parse(source)
    returned = {
        node.name: [each.value for each in ast.walk(node) if isinstance(each, ast.Return) and each.value]
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    }
    stack: list[tuple[ast.AST, str, ast.AST]] = [(tree, "", tree)]
    while stack:
        node, function, scope = stack.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function, scope = node.name, node
        elif isinstance(node, ast.ClassDef):
            function = node.name
        stack.extend((child, function, scope) for child in ast.iter_child_nodes(node))
        kind, arguments, exception = _printed(node)
        for argument in arguments:
            for words in _Words(constants, scope, returned).of(argument):
                yield Text(words, kind, path, function, exception)


def _printed(node: ast.AST) -> tuple[str, list[ast.expr], str]:
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        keywords = [each.value for each in node.exc.keywords if each.arg in ("detail", "message", "msg")]
        return "raise", [*node.exc.args[:2], *keywords], ast.unparse(node.exc.func)
    if isinstance(node, ast.Assert) and node.msg is not None:
        return "assert", [node.msg], ""
    if not isinstance(node, ast.Call):
        return "", [], ""
    function = node.func
    if isinstance(function, ast.Name):
        kind = _KINDS.get(function.id, "") if function.id not in ("info", "warning", "error", "exception") else ""
        return kind, _filled(node.args, first_is_text=not function.id.startswith("log_")), ""
    if not isinstance(function, ast.Attribute):
        return "", [], ""
    owner = ast.unparse(function.value)
    if function.attr in _KINDS and ("log" in owner.lower() or owner == "warnings"):
        return _KINDS[function.attr], _filled(node.args), ""
    if function.attr == "error" and owner == "parser":
        return "error", node.args[:1], ""
    return "", [], ""


def _filled(arguments: list[ast.expr], *, first_is_text: bool = True) -> list[ast.expr]:
    arguments = arguments if first_is_text else arguments[1:]
    return arguments[:1]


class _Words:
    """Reads an expression as words; a name is what it was given in its function."""

    def __init__(self, constants: dict[str, str], scope: ast.AST, returned: dict[str, list[ast.expr]]) -> None:
        self.constants, self.scope, self.returned = constants, scope, returned
        self.open: set[str] = set()

    def of(self, node: ast.expr) -> list[str]:
        return list(dict.fromkeys(self._read(node)))[:_MOST_READINGS]

    def _read(self, node: ast.expr) -> list[str]:
        if isinstance(node, ast.Constant):
            return [re.sub(r"%(?:\(\w+\))?[-#0 +]*\d*(?:\.\d+)?[sdrfxgi]", _HOLE, node.value).replace("%%", "%") if "%" in node.value else node.value] if isinstance(node.value, str) else [str(node.value)]
        if isinstance(node, ast.JoinedStr):
            parts = [self._read(each.value) if isinstance(each, ast.FormattedValue) and _is_words(each.value) else [_HOLE] if isinstance(each, ast.FormattedValue) else [str(each.value)] if isinstance(each, ast.Constant) else [_HOLE] for each in node.values]
            return _joined(parts)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return _joined([self._read(node.left), self._read(node.right)])
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            return self._read(node.left)
        if isinstance(node, ast.IfExp):
            return [*self._read(node.body), *self._read(node.orelse)]
        if isinstance(node, ast.BoolOp):
            return [words for each in node.values for words in self._read(each)]
        if isinstance(node, ast.Name):
            return self._named(node.id)
        if isinstance(node, ast.Attribute):
            if node.attr == "name" and re.fullmatch(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+", ast.unparse(node.value).rpartition(".")[2]):
                return [ast.unparse(node.value).rpartition(".")[2]]
            return self._named(node.attr) if node.attr.isupper() else [_HOLE]
        if isinstance(node, ast.Call):
            return self._called(node)
        return [_HOLE]

    def _called(self, node: ast.Call) -> list[str]:
        function = node.func
        if isinstance(function, ast.Attribute):
            if function.attr == "format":
                return [re.sub(r"\{[^{}]*\}", _HOLE, words) for words in self._read(function.value)]
            if function.attr in ("strip", "rstrip", "lstrip") or function.attr == "dedent":
                return self._read(function.value if function.attr != "dedent" else node.args[0])
            if function.attr == "join" and isinstance(function.value, ast.Constant) and node.args:
                of = node.args[0]
                return _joined([each for part in of.elts for each in ([str(function.value.value)], self._read(part))][1:]) if isinstance(of, (ast.List, ast.Tuple)) else [_HOLE]
        name = function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ""
        if name in self.returned and name not in self.open and len(self.open) < 3:
            self.open.add(name)
            try:
                return [words for each in self.returned[name] for words in self._read(each)][:_MOST_READINGS] or [_HOLE]
            finally:
                self.open.discard(name)
        return [_HOLE]

    def _named(self, name: str) -> list[str]:
        if name in self.open or len(self.open) > 3:
            return [_HOLE]
        self.open.add(name)
        try:
            given = [each.value for each in ast.walk(self.scope) if isinstance(each, ast.Assign) and any(isinstance(target, ast.Name) and target.id == name for target in each.targets)]
            added = any(isinstance(each, ast.AugAssign) and isinstance(each.target, ast.Name) and each.target.id == name for each in ast.walk(self.scope))
            readings = [words for each in given for words in self._read(each) if words != _HOLE]
            if readings:
                return [*readings, *(words + _HOLE for words in readings if added)]
        finally:
            self.open.discard(name)
        return [self.constants.get(name, _HOLE)]


def _is_words(node: ast.expr) -> bool:
    """Whether a part of an f-string may be words that stand in the source."""
    return isinstance(node, (ast.Name, ast.Constant, ast.IfExp, ast.JoinedStr)) or (isinstance(node, ast.Attribute) and (node.attr == "name" or node.attr.isupper()))


def _joined(parts: list[list[str]]) -> list[str]:
    count = 1
    for at, part in enumerate(parts):
        count *= len(part)
        if count > _MOST_READINGS:
            parts[at] = [_HOLE]
            count //= len(part)
    return ["".join(each) for each in product(*parts)]


# What a text names


@lru_cache(maxsize=1)
def _arguments() -> dict[str, str]:
    """The flag of each argument of any release."""
    document = json.loads(FLAGS.read_text())
    found = {}
    for name, spans in document["arguments"].items():
        flags = [row[4] for row in spans if len(row) > 4 and row[4]]
        if spans[-1][2] != "-" or flags:
            found[name] = flags[-1] if flags else "--" + name.replace("_", "-")
    return found


class Named(NamedTuple):
    """A flag or a variable, and where its name stands."""

    name: str
    start: int
    end: int


def named_in(words: str, variables: frozenset[str]) -> list[Named]:
    """The flags, arguments and environment variables that a text names, in their order."""
    arguments = _arguments()
    known = set(arguments.values())
    found = []
    for match in _FLAG.finditer(words):
        flag = match[0].replace("_", "-")
        if words[match.end() : match.end() + 1] != _HOLE and (flag in known or flag.replace("--no-", "--") in known or len(flag) > 5):
            found.append(Named(flag, match.start(), match.end()))
    for match in _NAME.finditer(words):
        if match[0] in arguments:
            found.append(Named(arguments[match[0]], match.start(), match.end()))
    for match in re.finditer(r"(?<![A-Za-z0-9_\0])[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+(?![\w\0])", words):
        if match[0] in variables or _VARIABLE.fullmatch(match[0]):
            found.append(Named(match[0], match.start(), match.end()))
    return sorted(found, key=lambda each: each.start)


# What it advises

_UP = r"increas(?:e|ing)|rais(?:e|ing)|enlarg(?:e|ing)|larger|higher|bigger|greater|bump"
_DOWN = r"decreas(?:e|ing)|reduc(?:e|ing)|lower(?:ing)?|smaller|shrink(?:ing)?"
_OFF = r"remov(?:e|ing)|disabl(?:e|ing)|unset(?:ting)?|drop(?:ping)?|without|turn(?:ing)? off|omit(?:ting)?|avoid(?:ing)?|not (?:using|setting|passing|use|set|pass|specify)|leave|rerun without"
_ON = r"set(?:ting)?|us(?:e|ing)|specify(?:ing)?|pass(?:ing)?|enabl(?:e|ing)|add(?:ing)?|provid(?:e|ing)|try|export|with|via|by|requires?|needs?|switch(?:ing)? to|adjust(?:ing)?|configure|choose|tune|supply|give|check"
_WAYS = ((re.compile(rf"\b(?:{_UP})\b", re.I), "+"), (re.compile(rf"\b(?:{_DOWN})\b", re.I), "-"), (re.compile(rf"\b(?:{_OFF})\b", re.I), "!"), (re.compile(rf"\b(?:{_ON})\b", re.I), "="))
_AFTER = re.compile(r"[=:]?\s*(?:[^.;,]{0,20}\b)?to (?:be )?(?:a |an |something )?(?:much |slightly )?(?P<w>smaller|lower|larger|higher|bigger|greater)\b", re.I)
_DECIDED = ((re.compile(r"\b(?:reduced|lowered|capped|clamped|decreased|shrunk|limited|scaled down|truncated|cut)\b", re.I), "-"), (re.compile(r"\b(?:increased|raised|bumped|rounded up)\b", re.I), "+"),
            (re.compile(r"\b(?:disabled|ignored|turned off|disabling|disable|turn off|ignoring|dropped|cleared)\b", re.I), "!"), (re.compile(r"\b(?:set|enabled|changed|adjusted|overridden|overriding|forced|using|enabling|defaults?|defaulting|setting|switched|use|override)\b", re.I), "="))
_CLAUSE = re.compile(r"[.;:!?\n](?=\s|$)|,\s| or (?=[a-z]+ )| and (?=[a-z]+ )|\(")
_NUMBER = r"(?P<n>\0|-?\d+(?:\.\d+)?)(?![\w-]*[A-Za-z_(])"
_ADVISED = (
    re.compile(rf"^(?:[^.;\n]|\.(?!\s)){{0,60}}?\b(?:above|below|at least|at most|over|under|than|exceed|up to|to|of|>=?|<=?|≥|≤)\s*(?:or equal to\s*)?(?:at least\s*|at most\s*|about\s*|around\s*)?['\"`]?{_NUMBER}"),
    re.compile(rf"^['\"`]?(?:=| = | |: )['\"`]?{_NUMBER}"),
)


def directions_of(words: str, names: list[Named], role: str) -> dict[str, str]:
    """The direction of each name, in their order: those that a text speaks of only are without one."""
    found: dict[str, str] = {}
    for at, name in enumerate(names):
        way = _decided(words, name, names[at + 1 :]) if role == "decision" else _advised(words, name, names, at)
        if not found.get(name.name):
            found[name.name] = way
    return found


def _advised(words: str, name: Named, names: list[Named], at: int) -> str:
    start = max([match.end() for match in _CLAUSE.finditer(words, 0, name.start)], default=0)
    start = max(start, name.start - 90)
    before = words[start : name.start]
    # `A or B`, `A and B`, `A/B`: what is said of the first holds for the second.
    if at and re.fullmatch(r"[\s`'\"]*(?:,|/|or|and|\(or|,? or)[\s`'\"]*", words[names[at - 1].end : name.start]):
        earlier = _advised(words, names[at - 1], names, at - 1)
        if earlier:
            return earlier
    last = [(match.start(), way) for pattern, way in _WAYS for match in pattern.finditer(before)]
    way = max(last)[1] if last else ""
    if way == "=" and re.search(r"\b(?:not|never|cannot|can't|incompatible|conflicts?|unsupported|mutually exclusive|ignored)\b", before, re.I):
        way = ""
    after = _AFTER.match(words, name.end)
    if after and way in ("=", ""):
        way = "-" if after["w"].lower() in ("smaller", "lower") else "+"
    return way


def _decided(words: str, name: Named, later: list[Named]) -> str:
    end = min([match.start() for match in re.finditer(r"[.;\n](?=\s|$)", words[name.end :])], default=60)
    after = words[name.end : name.end + min(end, 60)]
    found = [(match.start(), way) for pattern, way in _DECIDED for match in pattern.finditer(after)]
    if found:
        return min(found)[1]
    before = words[max(0, name.start - 40) : name.start]
    found = [(match.start(), way) for pattern, way in _DECIDED for match in pattern.finditer(before)]
    return max(found)[1] if found else ""


def number_in(words: str, names: list[Named], ways: dict[str, str]) -> tuple[int, int] | None:
    """Where the number stands that a text gives for a flag."""
    for pattern in _ADVISED:
        for name in sorted(names, key=lambda each: not ways.get(each.name)):
            end = min((each.start for each in names if each.start > name.start), default=len(words))
            match = pattern.search(words[name.end : end])
            if match:
                return name.end + match.start("n"), name.end + match.end("n")
    return None


# Its role

_RECOMMENDS = re.compile(
    r"\b(?:consider|try|please|should|recommend\w*|suggest\w*|you (?:can|may|might|could|need)|better to|"
    r"to (?:raise|increase|improve|reduce|lower|fix|resolve) (?:it|this)|can be (?:increased|raised|lowered|reduced)|may need)\b"
    r"|(?:^|[.;:!?]\s*|,\s|\bor |\band |\bto \w+, )(?:set|use|pass|specify|lower|raise|reduce|increase|decrease|add|export|remove|rerun|unset|choose)\b",
    re.IGNORECASE,
)
_OPT_OUT = re.compile(
    r"\b(?:to (?:override|disable|opt out|opt-out|keep|force|restore|silence|suppress|revert|turn (?:it |this )?off|re-?enable|skip|bypass|enable it|use it anyway|change|customi[sz]e)|explicitly|"
    r"if you (?:want|wish|prefer|need)|deprecated)\b",
    re.IGNORECASE,
)
_DEPRECATED = re.compile(r"\bdeprecated\b|will be removed|is obsolete|has been renamed", re.IGNORECASE)
_OF_A_REQUEST = re.compile(
    r"srt/(?:entrypoints/(?:openai|anthropic|ollama|http_server|v1_|grpc|harmony|request)|openai_api|function_call|parser|sampling|managers/(?:io_struct|tokenizer_manager|tokenizer_manager_\w+|multimodal_processor|session|schedule_batch|io_)|"
    r"session|constrained|multimodal|conversation|code_completion|reasoning_parser|jinja|grpc)"
)
_AT_THE_START = re.compile(r"init|launch|load|setup|configure|validate_args|check|post_init|warmup|start|run_|create|build|resolve|_handle_|parse", re.IGNORECASE)
_REQUESTED = re.compile(r"\b(?:requests?|input|prompt|rid|return_\w+|sampling|stream(?:ing)?)\b", re.IGNORECASE)
_OF_REQUESTS = re.compile(r"validate.*request|_request|request_|handle_.*req|tokenize_one|verify|normalize|generate|add_.*req|process_input|prepare_for", re.IGNORECASE)


def role_of(text: Text) -> str:
    """What a text is for its reader, by its place and its words."""
    raised = text.kind in ("raise", "assert")
    if _is_of_a_request(text):
        return "request"
    if raised:
        return "explains"
    if _DEPRECATED.search(text.words):
        return "decision"
    if _RECOMMENDS.search(text.words) and not (text.kind in ("info", "warning") and _OPT_OUT.search(text.words)):
        return "recommends"
    return "explains" if text.kind in ("error", "critical") else "decision"


def _is_of_a_request(text: Text) -> bool:
    if text.exception.endswith("HTTPException"):
        return True
    if _OF_A_REQUEST.search(text.path):
        starts = _AT_THE_START.search(text.function) and not _OF_REQUESTS.search(text.function)
        return not starts
    return bool(_OF_REQUESTS.search(text.function) and re.search(r"\brequests?\b", text.words, re.I) and "server" not in text.function)


# One row for each text


class Row(NamedTuple):
    """A text with what follows from it."""

    words: str  # with `{}`
    kind: str
    role: str
    names: tuple[str, ...]  # with their direction


def rows_of(text: Text, variables: frozenset[str]) -> Iterator[Row]:
    """The rows of a text: itself, and of several lines also each that names something."""
    lines = [line for line in text.words.split("\n") if line.strip()]
    for words in dict.fromkeys([text.words, *(lines if len(lines) > 1 else ())]):
        row = _row_of(text._replace(words=" ".join(words.split(" ")).strip()), text, variables)
        if row is not None:
            yield row


def _row_of(text: Text, whole: Text, variables: frozenset[str]) -> Row | None:
    words = re.sub(r"\s+", " ", re.sub(r"\0(?:[\s,]*\0)+", _HOLE, text.words)).strip()
    names = named_in(words, variables)
    constant = re.sub(r"[^A-Za-z]", "", "".join(part for part in words.split(_HOLE)))
    if not names or len(constant) < _LEAST_WORDS or len(words) > _LONGEST or " " not in words:
        return None
    role = role_of(whole._replace(words=words))
    ways = directions_of(words, names, role)
    place = number_in(words, names, ways)
    ordered = sorted(ways, key=lambda name: not ways[name])
    return Row(_with_braces(words, place), text.kind, role, tuple(name + ways[name] for name in ordered))


def _with_braces(words: str, number: tuple[int, int] | None) -> str:
    def plain(part: str) -> str:
        return part.replace("{", "{{").replace("}", "}}").replace(_HOLE, "{}")

    if number is None:
        return plain(words)
    start, end = number
    inside = words[start:end]
    return plain(words[:start]) + ("{n}" if inside == _HOLE else "{n=" + inside + "}") + plain(words[end:])


def of_wheel(path: Path) -> dict[str, Row]:
    """The rows of one release, by text."""
    sources = {}
    with zipfile.ZipFile(path) as wheel:
        for name in sorted(wheel.namelist()):
            if name.endswith(".py") and _PATHS.match(name) and not _NOT_SERVING.search(name):
                sources[name] = wheel.read(name).decode("utf-8", "replace")
    variables = frozenset(name for source in sources.values() for name in _READ_FROM_ENVIRONMENT.findall(source))
    constants = {}
    for source in sources.values():
        constants.update(_constants_of(source))
    found: dict[str, Row] = {}
    for name, source in sources.items():
        for text in texts_of(source, name.removeprefix("sglang/"), constants):
            for row in rows_of(text, variables):
                found[row.words] = _heavier(found.get(row.words), row)
    return found


def _heavier(one: Row | None, other: Row) -> Row:
    """Of two uses of one text the one that says more about a server."""
    order = ("request", "decision", "recommends", "explains")
    return other if one is None or order.index(other.role) > order.index(one.role) else one


def _constants_of(source: str) -> dict[str, str]:
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper():
            if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                found[node.targets[0].id] = node.value.value
    return found


def name_of(words: str) -> str:
    """A short name of a text that stays the same."""
    first = re.findall(r"[a-z0-9]+", re.sub(r"\{[^}]*\}", " ", words.lower()))[:5]
    return "-".join(first)[:40].strip("-") + "-" + sha256(words.encode()).hexdigest()[:4]


def _order(release: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", release)]


def corrected(row: Row, corrections: dict[str, dict[str, object]]) -> Row | None:
    """The row with what a person found; None where it says nothing about a server."""
    for beginning, change in corrections.items():
        if row.words.startswith(beginning) or (beginning.startswith("…") and beginning[1:] in row.words):
            if change.get("role") == "none":
                return None
            names = change.get("names")
            row = row._replace(role=str(change.get("role", row.role)), names=tuple(map(str, names)) if isinstance(names, list) else row.names)
    return row


def main(wheels: list[str]) -> int:
    """Read the wheels, write the table, and print how many texts each release has."""
    corrections = yaml.safe_load(CORRECTIONS.read_text()) or {}
    paths = sorted(map(Path, wheels), key=lambda path: _order(path.name.split("-")[1]))
    releases = [path.name.split("-")[1] for path in paths]
    spans: dict[str, tuple[str, str]] = {}
    rows: dict[str, Row] = {}
    for release, path in zip(releases, paths, strict=True):
        found = {words: row for words, each in of_wheel(path).items() if (row := corrected(each, corrections)) is not None}
        counts = Counter(row.role for row in found.values())
        print(f"{release}: {len(found)} texts, " + ", ".join(f"{count} {role}" for role, count in sorted(counts.items())))
        for words, row in found.items():
            spans[words] = (spans.get(words, (release,))[0], release)
            rows[words] = row
    table = [[name_of(words), words, row.kind, row.role, list(row.names), *spans[words]] for words, row in sorted(rows.items())]
    assert len({row[0] for row in table}) == len(table), "two texts have one name"
    head = json.dumps({"about": ABOUT, "releases": releases}, ensure_ascii=False)[:-1]
    lines = ",\n".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in table)
    PLACE.write_text(f'{head}, "texts": [\n{lines}\n]}}\n')
    print(f"{len(table)} texts altogether")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
