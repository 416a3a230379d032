"""What SGLang says about its own flags: `python -m release.advices WHEEL …` reads the wheels of its releases.

    pip download --no-deps --only-binary=:all: --ignore-requires-python sglang==0.5.23 -d build/wheels
    python -m release.advices build/wheels/*.whl

Every text that SGLang logs as info, warning, error or critical, raises or asserts, and that names a flag, an argument
or an environment variable, is a row of `exporter/sglang_tuning_exporter/sglang/advices.json`: the constant words of the
text, and what follows from them by the rules below. Where a rule errs, `advice_corrections.yaml` beside this file has
the answer. Nothing of SGLang's code is kept.

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
from functools import cached_property, lru_cache
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import NamedTuple

import yaml

PLACE = Path(__file__).parent.parent / "exporter" / "sglang_tuning_exporter" / "sglang" / "advices.json"
FLAGS = PLACE.parent / "args" / "flags.json"
CORRECTIONS = Path(__file__).with_name("advice_corrections.yaml")
ABOUT = (
    "Texts that SGLang (Apache-2.0, see NOTICE) logs, raises or asserts and that name a flag, an argument or an"
    " environment variable, with `{}` for what varies. Generated from its wheels by `python -m release.advices`. A row:"
    " id, text ({n}: the number that it advises, {n=600}: the same, constant), kind, role, flags and variables with"
    " their direction (+ increase, - decrease, = set, ! unset, nothing: only named), the first and the last of the"
    " releases that have it."
)

# The server, its start and what it runs; not its benchmarks, its client language and the server of diffusion models.
_PATHS = re.compile(r"sglang/(?:srt|cli|jit_kernel|kernels)/|sglang/(?:launch_server|utils|profiler)\.py")
_KERNELS = re.compile(r"sglang/(?:jit_kernel|kernels)/")
_NOT_SERVING = re.compile(r"/tests?/|/test_|benchmark|/bench_|/debug_utils/|/testing/")
_LEVELS = {
    "info": "info", "warning": "warning", "warn": "warning", "error": "error", "exception": "error",
    "critical": "critical",
    "info_once": "info", "warning_once": "warning", "error_once": "error",
}  # fmt: skip
_FUNCTIONS = {
    "log_info_on_rank0": "info", "rank0_log": "info", "print_info_once": "info",
    "print_warning_once": "warning", "print_deprecated_warning": "warning", "log_warning_on_rank0": "warning",
    "warn": "warning",
}  # fmt: skip
# What ends one request, with the place of its text; it is logged with the request's id behind it.
_ABORTED = {"set_finish_with_abort": 0, "prepare_abort": 1, "FINISH_ABORT": 0}
_LOGGED = frozenset((*_LEVELS.values(), *_FUNCTIONS.values()))
_PERCENT = re.compile(r"%(?:\(\w+\))?[-#0 +]*\d*(?:\.\d+)?[sdrfxgi]")
_CONSTANT = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+")
_DEEPEST = 3  # names that stand for names, functions that return what others return
ROLES = ("request", "decision", "recommends", "explains")
_HOLE = "\0"
_MOST_READINGS = 8  # of one text whose parts are chosen by conditions
_LEAST_WORDS = 12  # letters that are constant; a text with fewer is nobody's in particular
_LONGEST = 1500
_FLAG = re.compile(r"(?<![\w-])--(?:no-)?[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*(?![\w-])")
_NAME = re.compile(r"(?:(?<![\w.\0/-])|(?<=\bself\.)|(?<=\bserver_args\.))[a-z][a-z0-9]*(?:_[a-z0-9]+)+(?![\w\0(-])")
_VARIABLE = re.compile(
    r"(?<![A-Za-z0-9_\0])(?:SGLANG|SGL|NCCL|GLOO|MC|HCCL|MOONCAKE|NVSHMEM|DEEPEP|DG)_[A-Z0-9_]*[A-Z0-9](?![\w\0])"
)
_READ_FROM_ENVIRONMENT = re.compile(
    r"""(?:environ(?:\.get\(|\[|\.setdefault\()|getenv\(|get_bool_env_var\(|get_int_env_var\()"""
    r"""\s*["']([A-Z][A-Z0-9]*_[A-Z0-9_]+)["']"""
)

_HAS_CONSTANTS = re.compile(r"^_?[A-Z][A-Z0-9]*_[A-Z0-9_]+ = (?:\(\n +)?[\"']", re.MULTILINE)
# A line of source with a quotation mark and a name of the kind that is looked for; without one a file need not be
# parsed.
_SAYS_SOMETHING = re.compile(r"[\"'][^\n]*(?:--[a-z]|[a-z]_[a-z]|[A-Z]_[A-Z])")


class Text(NamedTuple):
    """A text of SGLang's: its words with holes, how it is printed, and where."""

    words: str
    kind: str
    path: str
    function: str
    exception: str = ""


def texts_of(tree: ast.Module, path: str, constants: dict[str, str]) -> Iterator[Text]:
    """The texts of one file."""
    words_of = _Words(constants, tree)
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
            for words in words_of.of(argument, scope):
                if kind in _LOGGED:
                    words = _PERCENT.sub(_HOLE, words)  # noqa: PLW2901 - a logger's own holes
                yield Text(words, kind, path, function, exception)


def _printed(node: ast.AST) -> tuple[str, list[ast.expr], str]:
    """How a statement prints or raises, the expressions of its text, and the exception's type."""
    match node:
        case ast.Raise(exc=ast.Call(func=function, args=arguments, keywords=keywords)):
            named = [each.value for each in keywords if each.arg in ("detail", "message", "msg")]
            return "raise", [*arguments[:2], *named], ast.unparse(function)
        case ast.Assert(msg=ast.expr() as words):
            return "assert", [words], ""
        case ast.Call(func=ast.Name(id=name), args=arguments) if name in _FUNCTIONS:
            return (
                _FUNCTIONS[name],
                [each for each in arguments if not isinstance(each, ast.Name) or each.id != "logger"][:1],
                "",
            )
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name), args=arguments) if name in _ABORTED:
            return "error", [ast.BinOp(each, ast.Add(), ast.Name("")) for each in arguments[_ABORTED[name] :][:1]], name
        case ast.Call(func=ast.Attribute(value=owner, attr=name), args=arguments) if name in _LEVELS:
            of = ast.unparse(owner).lower()
            if "log" in of or of in ("warnings", "parser"):
                return _LEVELS[name], arguments[:1], ""
    return "", [], ""


class _Given(NamedTuple):
    """What the names of a function are given: each value, and which are added to."""

    values: dict[str, list[ast.expr | None]]  # None: what cannot be seen here
    added: set[str]


def _given_in(scope: ast.AST) -> _Given:
    given = _Given({}, set())
    todo = list(ast.iter_child_nodes(scope))
    while todo:
        node = todo.pop()
        if not isinstance(scope, ast.Module) or not isinstance(
            node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        ):
            todo.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    given.values.setdefault(target.id, []).append(node.value)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            given.added.add(node.target.id)
        elif isinstance(node, ast.arg):
            given.values.setdefault(node.arg, []).append(None)
        elif isinstance(node, (ast.For, ast.comprehension)) and isinstance(node.target, ast.Name):
            given.values.setdefault(node.target.id, []).append(None)
    return given


class _Words:
    """Reads expressions of one file as words; a name is what it was given in its function."""

    def __init__(self, constants: dict[str, str], tree: ast.Module) -> None:
        self.constants, self.tree = constants, tree
        self.given: dict[int, _Given] = {}
        self.scope: ast.AST
        self.open: set[str] = set()

    def of(self, node: ast.expr, scope: ast.AST) -> list[str]:
        self.scope = scope
        return list(dict.fromkeys(self._read(node)))[:_MOST_READINGS]

    def _read(self, node: ast.expr) -> list[str]:
        found = [_HOLE]
        match node:
            case ast.Constant(value=str(words)):
                found = [words]
            case ast.JoinedStr(values=values):
                found = _joined([self._part(each) for each in values])
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                found = _joined([self._read(left), self._read(right)])
            case ast.BinOp(left=left, op=ast.Mod()):
                found = [_PERCENT.sub(_HOLE, words).replace("%%", "%") for words in self._read(left)]
            case ast.IfExp() | ast.BoolOp():
                values = node.values if isinstance(node, ast.BoolOp) else [node.body, node.orelse]
                found = [words for each in values for words in self._read(each)]
            case ast.Name(id=name):
                found = self._named(name)
            case ast.Attribute():
                found = self._attribute(node)
            case ast.Call():
                found = self._called(node)
        return found

    def _attribute(self, node: ast.Attribute) -> list[str]:
        of = ast.unparse(node.value).rpartition(".")[2]
        if node.attr == "name" and _CONSTANT.fullmatch(of):
            return [of]  # `envs.SGLANG_….name`
        return [self.constants.get(node.attr, _HOLE) if node.attr.isupper() else _HOLE]

    def _part(self, node: ast.expr) -> list[str]:
        """A part of an f-string: words that stand in the source, or a hole."""
        if isinstance(node, ast.Constant):
            return [str(node.value)]
        if not isinstance(node, ast.FormattedValue) or node.format_spec is not None or node.conversion == ord("r"):
            return [_HOLE]
        return self._read(node.value)

    def _called(self, node: ast.Call) -> list[str]:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if isinstance(node.func, ast.Attribute):
            of = node.func.value
            if name == "format":
                return [re.sub(r"\{[^{}]*\}", _HOLE, words) for words in self._read(of)]
            if name in ("strip", "rstrip", "lstrip"):
                return self._read(of)
            if (
                name == "join"
                and isinstance(of, ast.Constant)
                and node.args
                and isinstance(node.args[0], (ast.List, ast.Tuple))
            ):
                parts = [part for each in node.args[0].elts for part in ([str(of.value)], self._read(each))]
                return _joined(parts[1:])
        if name in ("dedent", "cleandoc") and node.args:
            return self._read(node.args[0])
        if name in self._functions and name not in self.open and len(self.open) < _DEEPEST:
            self.open.add(name)
            try:
                return [words for each in self._returned(name) for words in self._read(each)][:_MOST_READINGS] or [
                    _HOLE
                ]
            finally:
                self.open.discard(name)
        return [_HOLE]

    @cached_property
    def _functions(self) -> dict[str, ast.FunctionDef]:
        return {node.name: node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef)}

    def _returned(self, name: str) -> list[ast.expr]:
        return [each.value for each in ast.walk(self._functions[name]) if isinstance(each, ast.Return) and each.value]

    def _named(self, name: str) -> list[str]:
        given = self.given.get(id(self.scope))
        if given is None:
            given = self.given[id(self.scope)] = _given_in(self.scope)
        values = given.values.get(name)
        if values is None:
            return [self.constants.get(name, _HOLE)]
        if name in self.open or len(self.open) >= _DEEPEST:
            return [_HOLE]
        self.open.add(name)
        try:
            readings = [
                words for each in values[:_MOST_READINGS] for words in ([_HOLE] if each is None else self._read(each))
            ]
        finally:
            self.open.discard(name)
        return [*readings, *(words + _HOLE for words in readings if name in given.added)][:_MOST_READINGS]


def _joined(parts: list[list[str]]) -> list[str]:
    count = 1
    for at, part in enumerate(parts):
        if count * len(part) > _MOST_READINGS:
            parts[at] = [_HOLE]
        count *= len(parts[at])
    return ["".join(each) for each in product(*parts)]


# What a text names


_ALIASES = {
    "--tp": "--tp-size", "--tensor-parallel-size": "--tp-size", "--dp": "--dp-size",
    "--data-parallel-size": "--dp-size",
    "--ep": "--ep-size", "--expert-parallel-size": "--ep-size", "--pp": "--pp-size",
    "--pipeline-parallel-size": "--pp-size",
    # SGLang's own misspelling
    "--model": "--model-path", "--enable-custom-logits-processor": "--enable-custom-logit-processor",
}  # fmt: skip


@lru_cache(maxsize=1)
def _flags() -> tuple[dict[str, str], dict[str, str]]:
    """The flags of all releases by argument, and by each spelling."""
    by_argument, by_spelling = {}, dict(_ALIASES)
    for name, spans in json.loads(FLAGS.read_text())["arguments"].items():
        for row in spans:
            flag = row[4] if len(row) > 4 else "--" + name.replace("_", "-")
            if flag and (row[2] != "-" or len(row) > 4):
                by_argument[name] = by_spelling[flag] = flag
                by_spelling["--no-" + flag[2:]] = flag
    return by_argument, by_spelling


class Named(NamedTuple):
    """A flag or a variable, and where its name stands."""

    name: str
    start: int
    end: int


def named_in(words: str, variables: frozenset[str]) -> list[Named]:
    """The flags, arguments and environment variables that a text names, in their order."""
    arguments, spellings = _flags()
    found = [
        Named(flag, match.start(), match.end())
        for match in _FLAG.finditer(words)
        if (flag := spellings.get(match[0].replace("_", "-"))) and words[match.end() : match.end() + 1] != _HOLE
    ]
    found += [
        Named(arguments[match[0]], match.start(), match.end())
        for match in _NAME.finditer(words)
        if match[0] in arguments
    ]
    found += [
        Named(match[0], match.start(), match.end())
        for match in re.finditer(r"(?<![A-Za-z0-9_\0])[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+(?![\w\0])", words)
        if match[0] in variables or _VARIABLE.fullmatch(match[0])
    ]
    return sorted(found, key=lambda each: each.start)


# What it advises

_SIZES = r"(?:larger|higher|bigger|greater)(?! than)", r"(?:smaller|lower)(?! than)"
_UP = rf"increas(?:e|ing)|rais(?:e|ing)|enlarg(?:e|ing)|bump|{_SIZES[0]}"
_DOWN = rf"decreas(?:e|ing)|reduc(?:e|ing)|lowering|shrink(?:ing)?|{_SIZES[1]}"
_OFF = (
    r"remov(?:e|ing)|disabl(?:e|ing)|unset(?:ting)?|drop(?:ping)?|turn(?:ing)? off|"
    r"(?:launch\w*|run\w*|start\w*|server|again) without|omit(?:ting)?|avoid(?:ing)?"
    r"|(?:not|n't) (?:using|setting|passing|use|set|pass|specify)"
)
_ON = (
    r"set(?:ting)?|us(?:e|ing)|specify(?:ing)?|pass(?:ing)?|enabl(?:e|ing)|add(?:ing)?|provid(?:e|ing)|try|export"
    r"|requires?(?= \S+$| (?:the |an? )?(?:flag |option |env\w* |variable |argument )?[`\'\"]*$)|needs(?= \S*$)"
    r"|switch(?:ing)? to|adjust(?:ing)?|configur(?:e|ing)|choos(?:e|ing)|tun(?:e|ing)|supply|define"
)
_WAYS = tuple(
    (re.compile(rf"\b(?:{words})\b", re.IGNORECASE), way)
    for words, way in ((_UP, "+"), (_DOWN, "-"), (_OFF, "!"), (_ON, "="))
)
_BY = re.compile(
    r"\b(?:by|via|launch\w* with|run\w* with|(?:re)?start\w* with|server with|halve[^.;,]{0,40} with)\s[\s`'\"]*$",
    re.IGNORECASE,
)
_NOT = re.compile(
    r"\b(?:not|never|cannot|can't|incompatible|conflicts?|unsupported|mutually"
    r" exclusive|ignored|when|if|because|since)\b",
    re.IGNORECASE,
)
# `--a to a smaller value`; `--a must be at least 2`
_TO_A_VALUE = re.compile(
    r"[`'\"]*\s(?:[^.;,]{0,20}\b)?to (?:be )?(?:an? |something )?(?:much |slightly"
    rf" )?(?:(?P<up>{_SIZES[0]})|(?P<down>{_SIZES[1]}))\b"
)
_MUST = re.compile(
    r"[`'\"]*(?: \([^)]{0,40}\))? (?:must|should|has to|needs to|need to) be (?P<not>not"
    r" )?(?:(?P<up>greater|larger|higher|at least|>|increased|raised)"
    r"|(?P<down>smaller|less|lower|at most|<|reduced|lowered|decreased)|(?P<off>unset|disabled|removed|None|False)|)"
)
_STATED = (
    (re.compile(r"\b(?:reduc(?:ed?|ing)|lower(?:ed|ing)|capp(?:ed|ing)|clamp(?:ed|ing)|decreas(?:ed?|ing)"
            r"|shrunk|limited|scaled down|truncated)\b", re.IGNORECASE), "-"),
    (re.compile(r"\b(?:increas(?:ed?|ing)|rais(?:ed|ing)|bump(?:ed|ing)|round(?:ed|ing) up)\b", re.IGNORECASE), "+"),
    (re.compile(r"\b(?:disabl(?:ed?|ing)|ignor(?:ed|ing)|turn(?:ed|ing)? off?"
            r"|dropp(?:ed|ing)|cleared|(?:set|setting|reset) to (?:False|None)|=False)\b", re.IGNORECASE), "!"),
    (
        re.compile(
            r"\b(?:set|enabl(?:ed|ing)|chang(?:ed?|ing)|adjust(?:ed|ing)?|overrid(?:e|den|ing)|forc(?:ed|ing)"
            r"|defaults?|defaulting|setting|switch(?:ed|ing)"
            r"|resolved|configured|using)\b",
            re.IGNORECASE,
        ),
        "=",
    ),
)  # fmt: skip
_FARTHEST = 48  # letters from a verb to the name that it is about
_STRENGTH = ("", "=", "!", "-", "+")  # of two mentions of a flag the one that says more
_CLAUSE = re.compile(r"[.;:!?](?=\s|$|[A-Z])|,\s| or (?=[a-z]+ )| and (?=[a-z]+ )|\((?!or )")
_ALSO = re.compile(r"[\s`'\"]*(?:=\S+)?(?:,|/|\bor|\band|\(or|, or|, and|and/or)[\s`'\"]*")
_NUMBER = r"(?P<n>\0|-?\d+(?:\.\d+)?)(?!\d|\.\d|-\d|\.\s\S*-|[\w-]*[A-Za-z_(])"
_BETWEEN = (
    r"(?:\s(?!needs\b|requires?\b|supports?\b|with\b|got\b|has\b|gives\b|and\b|or\b|on\b|for\b|but\b|which\b"
    r"|when\b|than\b)\w+){0,4}?"
)
_ADVISED = (
    re.compile(rf"^[`'\"]?{_BETWEEN}\s?from:? (?:the )?(?:requested )?\S{{1,20}} to:? ['\"`]?{_NUMBER}"),
    re.compile(
        rf"^['\"`]?{_BETWEEN}\s?(?:\b(?:above|below|at least|at most|over|under|than|exceed|up"
        r" to|to|of|be)|>=?|<=?|==|≥|≤|->):?\s*(?:or equal to\s*)?"
        rf"(?:at least\s*|at most\s*|about\s*|around\s*|>=?\s*)?['\"`]?{_NUMBER}"
    ),
    re.compile(rf"^['\"`]?(?:=| = | |: )['\"`]?{_NUMBER}"),
)


def directions_of(words: str, names: list[Named], role: str) -> list[str]:
    """The direction of each mention, in their order: one that a text only speaks of is without."""
    way_of = _stated if role == "decision" else _advised
    return [way_of(words, names, at) for at in range(len(names))]


def _strongest(names: list[Named], ways: list[str]) -> dict[str, str]:
    """The direction of each name, of its mentions the one that says more."""
    found: dict[str, str] = {}
    for name, way in zip(names, ways, strict=True):
        if _STRENGTH.index(way) > _STRENGTH.index(found.setdefault(name.name, way)):
            found[name.name] = way
    return found


def _advised(words: str, names: list[Named], at: int) -> str:
    """What a text asks for: by the nearest verb before the name in its clause, or by what stands behind the name."""
    name = names[at]
    must = _MUST.match(words, name.end)
    if must and not must["not"]:
        return "+" if must["up"] else "-" if must["down"] else "!" if must["off"] else "="
    start = max([match.end() for match in _CLAUSE.finditer(words, 0, name.start)], default=0)
    if at and _ALSO.fullmatch(words[names[at - 1].end : name.start]):  # what is said of `A` in `A or B` holds for `B`
        earlier = _advised(words, names, at - 1)
        if earlier:
            return earlier
    before = words[max([start, name.start - 90, *(each.end for each in names[:at])]) : name.start]
    last = [(match.start(), way) for pattern, way in _WAYS for match in pattern.finditer(before)]
    lower = re.search(r"(?:^|[^\w]|\b(?:or|to|and|please|then|consider) )[Ll]ower [`'\"]*(?:the )?[`'\"]*$", before)
    way = "-" if lower else max(last)[1] if last else ""
    if way == "=" and len(before) - max(last)[0] > _FARTHEST:
        way = ""
    if last and _NOT.search(before, max(last)[0] + len("not ")):
        way = ""
    if way == "=" and _NOT.search(before):
        way = ""
    if _BY.search(before) and not _NAME.fullmatch(words, name.start, name.end):
        way = "="
    to = _TO_A_VALUE.match(words, name.end)
    return ("+" if to["up"] else "-") if to and way in ("=", "") else way


def _stated(words: str, names: list[Named], at: int) -> str:
    """What a text says that was done: by the first participle behind the name, or the last before it."""
    name = names[at]
    later = [each.start for each in names[at + 1 :]]
    after = re.split(r"[.;,](?=\s|$)", words[name.end : min([name.end + 60, *later])])[0]
    before = re.split(
        r"[.;,](?=\s|$)", words[max([0, name.start - 40, *(each.end for each in names[:at])]) : name.start]
    )[-1]
    after = re.split(r"^:\s|\b(?:because|when|since|as|for|if)\b", after)[0]
    parts = [(after, min), (before, max)]
    if any(re.search(pattern.pattern + r"[\s`'\"]*(?:the )?$", before, re.IGNORECASE) for pattern, _ in _STATED):
        parts.reverse()  # `Disable --a`, `setting --a`
    for part, nearest in parts:
        found = [(match.start(), way) for pattern, way in _STATED for match in pattern.finditer(part)]
        if found and not re.search(
            r"\b(?:not|never|no)\b|n't" + (r"|\b(?:when|if|because)\b" if part is before else ""), part
        ):
            return nearest(found)[1]
    return ""


def number_in(words: str, names: list[Named], ways: list[str], role: str) -> tuple[int, int] | None:
    """Where the number stands that a text gives for a flag: of what was decided the last one, which is what became of
    it.
    """
    given = [at for at, way in enumerate(ways) if way and way == _strongest(names, ways)[names[at].name]]
    for pattern in _ADVISED:
        for at in given[:: -1 if role == "decision" else 1]:
            end = min((each.start for each in names if each.start > names[at].start), default=len(words))
            match = pattern.search(words[names[at].end : end])
            if match:
                return names[at].end + match.start("n"), names[at].end + match.end("n")
    return None


# Its role

_RECOMMENDS = re.compile(
    r"\b(?:consider|try|please(?! (?:raise|file|open|report|note|beware|refer|see|check|install|be|contact)\b)|should"
    r"|recommend\w*|suggest\w*|you (?:can|may|might|could|need)|better to|"
    r"to (?:raise|increase|improve|reduce|lower|fix|resolve) (?:it|this)|can be"
    r" (?:increased|raised|lowered|reduced)|may need)\b"
    r"|(?:^|[.;:!?]\s*|,\s|\bor |\band |\bto \w+, )(?:set|use|pass|specify|lower|raise"
    r"|reduce|increase|decrease|add|export|remove|rerun|unset|choose|shrink|grow)\b",
    re.IGNORECASE,
)
_OPT_OUT = re.compile(
    r"\b(?:to (?:override|disable|opt out|opt in|opt-out|keep|force|restore|silence|suppress"
    r"|revert|turn (?:it |this )?off|re-?enable|skip|bypass|enable it|use it anyway|change|customi[sz]e)|explicitly|"
    r"if you (?:want|wish|prefer|need)|if [\w ]{1,40} (?:is|are) (?:necessary|needed|required)|deprecated)\b",
    re.IGNORECASE,
)
_STRONGLY = re.compile(r"\b(?:consider|recommend\w*|suboptimal|sub-optimal|out[- ]of[- ]memory|OOM)\b", re.IGNORECASE)
_DEPRECATED = re.compile(r"\bdeprecated\b|will be removed|is obsolete|has been (?:renamed|removed)", re.IGNORECASE)
_OF_A_REQUEST = re.compile(
    r"srt/(?:entrypoints/(?:openai|anthropic|ollama|http_server|v1_|grpc|harmony|request)|openai_api|function_call"
    r"|parser|sampling|managers/(?:io_struct|tokenizer_manager|tokenizer_manager_\w+|multimodal_processor|session|io_)|"
    r"session|constrained|multimodal|conversation|code_completion|reasoning_parser|jinja|grpc)"
)
_AT_THE_START = re.compile(
    r"init|launch|load|setup|configure|validate_args|check|post_init|warmup|start|run_|create|build|resolve|_handle_"
    r"|parse",
    re.IGNORECASE,
)
_OF_REQUESTS = re.compile(
    r"validate.*request|_request|request_|handle_.*req|tokenize_one|verify|normalize|generate|add_.*req|process_input"
    r"|prepare_for",
    re.IGNORECASE,
)


def role_of(text: Text) -> str:
    """What a text is for its reader, by its place and its words."""
    raised = text.kind in ("raise", "assert")
    if _is_of_a_request(text):
        return "request"
    if raised:
        return "explains"
    if _DEPRECATED.search(text.words):
        return "decision"
    if (
        text.kind == "info"
        and re.match(r"(?:Set|Use) ", text.words)
        and not _RECOMMENDS.search(text.words, len("Use "))
    ):
        return "decision"
    opts_out = text.kind in ("info", "warning") and _OPT_OUT.search(text.words) and not _STRONGLY.search(text.words)
    if _RECOMMENDS.search(text.words) and not opts_out:
        return "recommends"
    return "explains" if text.kind in ("error", "critical") else "decision"


def _is_of_a_request(text: Text) -> bool:
    if text.exception.endswith("HTTPException") or text.exception in _ABORTED:
        return True
    if _OF_A_REQUEST.search(text.path):
        starts = _AT_THE_START.search(text.function) and not _OF_REQUESTS.search(text.function)
        return not starts
    return bool(
        _OF_REQUESTS.search(text.function)
        and re.search(r"\brequests?\b", text.words, re.IGNORECASE)
        and "server" not in text.function
    )


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
    if role == "recommends" and not any(ways):  # it recommends something else
        role = "explains" if text.kind in ("error", "critical") else "decision"
        ways = directions_of(words, names, role)
    strongest = _strongest(names, ways)
    ordered = sorted(strongest, key=lambda name: not strongest[name])
    braced = _with_braces(words, number_in(words, names, ways, role))
    return Row(braced, text.kind, role, tuple(name + strongest[name] for name in ordered))


def _with_braces(words: str, number: tuple[int, int] | None) -> str:
    def plain(part: str) -> str:
        return part.replace("{", "{{").replace("}", "}}").replace(_HOLE, "{}")

    if number is None:
        return plain(words)
    start, end = number
    inside = words[start:end]
    return plain(words[:start]) + ("{n}" if inside == _HOLE else "{n=" + inside + "}") + plain(words[end:])


class Wheel(NamedTuple):
    """What one release says, and the environment variables that it reads."""

    texts: list[Text]
    variables: frozenset[str]


def wheel_of(path: Path, *, every_text: bool = False) -> Wheel:
    """Read one release: its files that name flags, or every file but kernels."""
    sources: dict[str, str] = {}
    with zipfile.ZipFile(path) as wheel:
        for name in sorted(wheel.namelist()):
            if name.endswith(".py") and _PATHS.match(name) and not _NOT_SERVING.search(name):
                sources[name] = wheel.read(name).decode("utf-8-sig", "replace")
    constants: dict[str, str] = {}
    for source in sources.values():
        if _HAS_CONSTANTS.search(source):
            constants.update(_constants_of(ast.parse(source)))
    texts = [
        text
        for name, source in sources.items()
        if (_SAYS_SOMETHING.search(source) if not every_text else not _KERNELS.match(name))
        for text in texts_of(ast.parse(source), name.removeprefix("sglang/"), constants)
    ]
    return Wheel(
        texts, frozenset(name for source in sources.values() for name in _READ_FROM_ENVIRONMENT.findall(source))
    )


def rows_by_text(wheel: Wheel) -> dict[str, Row]:
    """The rows of one release, by text."""
    found: dict[str, Row] = {}
    for text in wheel.texts:
        for row in rows_of(text, wheel.variables):
            found[row.words] = _heavier(found.get(row.words), row)
    return found


def _heavier(one: Row | None, other: Row) -> Row:
    """Of two uses of one text the one that says more about a server."""
    return other if one is None or ROLES.index(other.role) > ROLES.index(one.role) else one


def _constants_of(tree: ast.Module) -> dict[str, str]:
    found = {}
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(words))) if name.isupper():
                found[name] = words
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
            row = row._replace(
                role=str(change.get("role", row.role)),
                names=tuple(map(str, names)) if isinstance(names, list) else row.names,
            )
    return row


def written(wheels: dict[str, Wheel]) -> str:
    """The table of these releases, oldest first, as JSON; it also prints how many texts each has."""
    corrections = yaml.safe_load(CORRECTIONS.read_text()) or {}
    spans: dict[str, tuple[str, str]] = {}
    rows: dict[str, Row] = {}
    for release, wheel in wheels.items():
        found = [row for each in rows_by_text(wheel).values() if (row := corrected(each, corrections)) is not None]
        counts = Counter(row.role for row in found)
        print(f"{release}: {len(found)} texts, " + ", ".join(f"{counts[role]} {role}" for role in ROLES))
        for row in found:
            spans[row.words] = (spans.get(row.words, (release,))[0], release)
            rows[row.words] = row
    counts = Counter(row.role for row in rows.values())
    print(f"altogether: {len(rows)} texts, " + ", ".join(f"{counts[role]} {role}" for role in ROLES))
    table = [
        [name_of(words), words, row.kind, row.role, list(row.names), *spans[words]]
        for words, row in sorted(rows.items())
    ]
    assert len({row[0] for row in table}) == len(table), "two texts have one name"
    head = json.dumps({"about": ABOUT, "releases": list(wheels)}, ensure_ascii=False)[:-1]
    lines = ",\n".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in table)
    return f'{head}, "texts": [\n{lines}\n]}}\n'


def main(wheels: list[str]) -> int:
    """Read the wheels and write the table."""
    paths = {path.name.split("-")[1]: path for path in map(Path, wheels)}
    PLACE.write_text(written({release: wheel_of(paths[release]) for release in sorted(paths, key=_order)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
