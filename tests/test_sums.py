"""Names of sums: each is declared once, written somewhere and read somewhere; any other name is an error."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

import sglang_tuning_exporter
from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.diagnoses import ALL
from sglang_tuning_exporter.core.sums import (
    MOMENTS,
    NAMES,
    PAGE_SUMS,
    STATES,
    SUMS,
    Sum,
    Totals,
    UndeclaredSumError,
    is_declared,
)
from sglang_tuning_exporter.core.watch import Watch

PACKAGE = Path(sglang_tuning_exporter.__file__).parent
MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "sums.py"]
# What sums, and the times of the last events, are held in, by the names of variables and attributes.
HELD_IN = {"totals", "counted", "bucket", "life", "_life", "recent", "window", "renamed", "last"}
JOINED = {
    "share": "/",
    "known": "/",
    "under": "/",
    "mean": "@",
}  # methods that ask for a signal's states, or a figure's
# A judgement has its last figures under these names, in `last` too.
FIGURES = {"running_requests", "queued_requests", "token_usage", "cuda_graph"}
# Written under names that are made of two variables, or listed in `sums`.
MADE = {*PAGE_SUMS, *(f"{signal}/*" for signal in STATES), "running", "queued", "usage", "throughput"}


def texts(node: ast.AST) -> set[str]:
    """Return the texts in an expression, with `*` for each variable."""
    if isinstance(node, ast.JoinedStr):
        parts = (each.value if isinstance(each, ast.Constant) else "*" for each in node.values)
        return {"".join(part for part in parts if isinstance(part, str))}
    if isinstance(node, ast.Constant):
        return {node.value} if isinstance(node.value, str) else set()
    return {text for child in ast.iter_child_nodes(node) for text in texts(child)}


def holder(node: ast.AST) -> str:
    """Return the last name of an expression: `bucket` of `self._server.bucket(now)`."""
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def places(scope: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    """Give each expression that names a sum or the time of an event, and whether it is written there."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Subscript) and holder(node.value) in HELD_IN:
            yield node.slice, not isinstance(node.ctx, ast.Load)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            method, of = node.func.attr, holder(node.func.value)
            if method in {"observe", "most", "count"} and of in {*HELD_IN, "self"}:
                yield node.args[0], True
            elif method == "get" and of in HELD_IN:
                yield node.args[0], False
            elif method in JOINED and all(isinstance(each, ast.Constant) for each in node.args):
                first, *others = (str(each.value) for each in node.args if isinstance(each, ast.Constant))
                joined = [f"{first}{JOINED[method]}{other}" for other in others if other] or [
                    f"{first}{JOINED[method]}*"
                ]
                yield from ((ast.Constant(name), False) for name in joined)
        elif isinstance(node, ast.keyword) and node.arg in {"counts", "worked"}:
            yield node.value, False


def variables(scope: ast.AST) -> dict[str, set[str]]:
    """Return the texts that variables and attributes may be."""
    known: dict[str, set[str]] = {}
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign | ast.For):
            targets, value = (node.targets, node.value) if isinstance(node, ast.Assign) else ([node.target], node.iter)
            for target in (name for each in targets for name in (each.elts if isinstance(each, ast.Tuple) else [each])):
                known.setdefault(ast.unparse(target), set()).update(texts(value))
    return known


@cache
def used(*, written: bool) -> set[str]:
    """Return the names under which the package writes sums, or reads them; outside of the
    state every text may be read.
    """
    names = set(MADE) if written else set()
    for path in MODULES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        attributes = {name: known for name, known in variables(tree).items() if name.startswith("self.")}
        if not written and path.name not in {"server.py", "scheduler.py"}:
            names |= texts(tree)
        for scope in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            known = attributes | variables(scope)
            for place, is_written in places(scope):
                if is_written is written:
                    names |= texts(place) | known.get(ast.unparse(place), set())
    return names


def is_among(each: Sum, names: set[str]) -> bool:
    """Whether a sum, or one of its members, is named."""
    forms = {each.name, f"{each.name}:n", f"{each.name}:s"}
    heads = () if each.members == ("",) else (each.name, each.name.rstrip("/"))
    return any(
        name in forms
        or name in heads
        or (heads and name.startswith(each.name))
        or name.replace("*", each.name) in forms
        for name in names
    )


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_the_package_names_declared_sums_alone(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    literal = {name for place, _ in places(tree) for name in texts(place)}
    forms = [(name, re.compile(re.escape(name).replace(r"\*", ".+"))) for name in literal]
    unknown = [
        name
        for name, form in forms
        if name not in FIGURES
        and not is_declared(name.replace("*", "1"))
        and name not in MOMENTS
        and not any(map(form.fullmatch, NAMES))
    ]
    assert unknown == []


@pytest.mark.parametrize("each", SUMS, ids=lambda each: each.name)
def test_every_declared_sum_is_written_and_read(each: Sum) -> None:
    assert (is_among(each, used(written=True)), is_among(each, used(written=False))) == (True, True)


def test_every_sum_is_declared_once() -> None:
    assert len({each.name for each in SUMS}) == len(SUMS)


def test_conditions_count_declared_sums() -> None:
    counts = {name for diagnosis in ALL for name in diagnosis.when.counts}
    assert [name for name in counts if not is_declared(name)] == []


@pytest.mark.parametrize(
    "use",
    [
        lambda totals: totals["ealry"],
        lambda totals: totals.__setitem__("ealry", totals["ealry"] + 1.0),
        lambda totals: totals.observe("acepted", 1.0),
        lambda totals: totals.most("failed_bach", 1.0),
        lambda totals: totals.mean("runing"),
        lambda totals: totals.share("queue", "emty"),
    ],
    ids=["read", "added to", "observed", "the most", "a mean", "a share"],
)
def test_an_undeclared_sum_is_an_error(use: Callable[[Totals], object]) -> None:
    with pytest.raises(UndeclaredSumError, match="is not declared"):
        use(Totals({"queue/empty": 1.0}))


def test_a_sum_that_was_never_written_is_0() -> None:
    assert (Totals()["early"], Totals()["serves/None"], Totals()["batch/64"]) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("name", ["serves/x", "batch/", "queue/full", "marked.lines", "out_of_memory.", "early:n", ""])
def test_a_name_that_only_looks_like_a_member_is_not_declared(name: str) -> None:
    assert not is_declared(name)


def test_a_state_file_of_the_last_release_goes_on_under_the_present_names() -> None:
    watch = Watch(PROFILES["online"], 1e9, reads=True, scrapes=True)
    saved = {
        "counted": {
            "retractions": 3,
            "starts": 2,
            "liveness.ready": 1,
            "inter_token_late": 5,
            "decode_lines": 7,
            "pause": 1,
        },
        "ranks": [[None, {"retracted": 4, "computed": 5, "eager": 6, "queue/empty": 7, "nothing": 8}]],
        "ledger": [[60, {"inter_token_observed": 9}]],
    }
    watch.restore(saved, 1e9, 1.0)
    assert watch.server.counted == {
        "retraction_events": 3, "server_starts": 2, "liveness_events.ready": 1, "latency_breaches.inter_token": 5,
        "decode_lines": 7,
    }  # fmt: skip
    assert watch.server.life(None) == {
        "retracted_requests": 4, "computed_tokens": 5, "eager_batches": 6, "queue/empty": 7,
    }  # fmt: skip
    counted = json.loads(json.dumps(watch.saved(1e9)["ledger"]))[0][1]
    assert counted == {"latency_observations.inter_token": 9}
