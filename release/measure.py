"""`python -m release.measure [REVISION …]`: what a reader of the code must meet, for each revision and for the working
tree, as a table.

Counted: the modules of the core, of the package and of the tools beside it; what one `report` of a log with retractions
runs through; and the way of one appended line to the page of a running exporter. Every tree gets the same log. Tables
that a script extracts are no code: they are `.json`, and have a row of their own, as texts and rows by hand outside of
modules have.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.table import markdown
from release.archives import ROOT, ReleaseError, committed

PACKAGE = "sglang_tuning_exporter"
LOG = ROOT / "tests" / "recordings" / "v0.5.9-retract" / "server.log.gz"
CORE = ("core", "sglang", "capacity", "state", "diagnosis", "report")
FORMER = {"capacity", "state", "diagnosis", "report"}  # of these, rooms that only earlier revisions have
TOOLS = ("closed_loop", "bench", "fuzz", "release", "truth")
BY_HAND = {".css", ".html", ".j2", ".js", ".md", ".mtail", ".yaml", ".yml"}
EXTRACTED = {".json"}
# Which functions are entered depends a little on the order of sets: what any of these orders enters is counted.
SEEDS = (0, 1, 2)
_NOQA = re.compile(r"# noqa(?:: *[A-Z]+[0-9]+(?:, *[A-Z]+[0-9]+)*)?(?P<reason>.*)$", re.MULTILINE)

Figures = dict[str, int]
Place = tuple[str, int, str]  # a function: its file, its first line with decorators, its name


@dataclass(frozen=True, slots=True)
class Module:
    """One module. Its room is the folder or the module directly below the package; a tool is one room."""

    room: str
    text: str
    parsed: ast.Module


@dataclass(frozen=True, slots=True)
class Function:
    """One function; `owner` is the class whose body has it, empty for any other."""

    name: str
    owner: str
    lines: int


def measured(tree: Path) -> dict[str, Figures]:
    """Give the figures of the checkout at `tree` by group. Raises `SystemExit` where its exporter does not run."""
    figures = counted(tree)
    for kind in ("report", "line"):
        figures[kind] = met(entered(tree, kind), tree)
    return figures


def counted(tree: Path) -> dict[str, Figures]:
    """Give what can be counted without running anything."""
    package = tree / "exporter" / PACKAGE
    rooms = list(modules(package, package))
    core = [module for module in rooms if module.room in CORE]
    tools = [module for tool in TOOLS for module in modules(tree / tool, tree)]
    return {
        "core": {**code(core), **_beside(package / room for room in CORE)},
        "package": {**code(rooms), **_beside([package])},
        "tools": {**code(tools), **_beside(tree / tool for tool in TOOLS)},
        "documents": {
            "words of README.md": _words([tree / "README.md"]),
            "words of ARCHITECTURE.md": _words([tree / "ARCHITECTURE.md"]),
            "words of docs": _words((tree / "docs").rglob("*.md")),
        },
    }


def modules(folder: Path, house: Path) -> Iterator[Module]:
    """Give the modules under a folder; the first part of their path in `house` is their room."""
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        yield Module(path.relative_to(house).parts[0].removesuffix(".py"), text, ast.parse(text))


def code(found: list[Module]) -> Figures:
    """Give the figures of some modules."""
    nodes = [node for module in found for node in ast.walk(module.parsed)]
    functions = [each for module in found for each in definitions(module.parsed).values()]
    lines = [len(module.text.splitlines()) for module in found]
    return {
        "lines": sum(lines),
        "statements": sum(isinstance(node, ast.stmt) and not _is_text(node) for node in nodes),
        "modules": len(found),
        "classes": sum(isinstance(node, ast.ClassDef) for node in nodes),
        "functions": len(functions),
        "public names": sum(len(public(module.parsed)) for module in found),
        "names imported from another room": len({name for module in found for name in _foreign(module)}),
        "lines of the longest module": max(lines, default=0),
        "lines of the longest function": max((function.lines for function in functions), default=0),
        "waived rules without a reason": sum(map(waived, (module.text for module in found))),
    }


def definitions(parsed: ast.Module) -> dict[tuple[int, str], Function]:
    """Give the functions of a module by their first line and name, which is what a code object has of them in every
    Python.
    """
    found: dict[tuple[int, str], Function] = {}

    def within(node: ast.AST, outer: tuple[str, ...], owner: str) -> None:
        for each in ast.iter_child_nodes(node):
            if isinstance(each, ast.ClassDef):
                path = (*outer, each.name)
                within(each, path, ".".join(path))
            elif isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
                path = (*outer, each.name)
                first = min(part.lineno for part in (each, *each.decorator_list))
                found[first, each.name] = Function(".".join(path), owner, (each.end_lineno or each.lineno) - first + 1)
                within(each, path, "")
            else:
                within(each, outer, owner)

    within(parsed, (), "")
    return found


def public(parsed: ast.Module) -> list[str]:
    """Give the public names that a module itself binds by a `def`, a class or an assignment to one name."""
    names = []
    for node in parsed.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.append(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [target.id for target in targets if isinstance(target, ast.Name)]
    return [name for name in names if not name.startswith("_")]


def waived(text: str) -> int:
    """Count the rules of ruff that a module waives without saying why."""
    return sum(not found["reason"].strip(" -#") for found in _NOQA.finditer(text))


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _foreign(module: Module) -> Iterator[str]:
    """Give each name that a module imports from another room of the package, or of the
    tools, with where it comes from.
    """
    for node in ast.walk(module.parsed):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (name for name in names if _room(name) not in {None, module.room})


def _room(name: str) -> str | None:
    """Give the room of an imported name; None for one of the world."""
    first, *rest = name.split(".")
    if first == PACKAGE:
        return rest[0] if rest else "__init__"
    return first if first in TOOLS else None


def _beside(folders: Iterable[Path]) -> Figures:
    """Give the lines of what stands beside the modules."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return {
        name: sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files if path.suffix in suffixes)
        for name, suffixes in (("lines of texts and rows by hand", BY_HAND), ("lines of extracted tables", EXTRACTED))
    }


def _words(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").split()) for path in paths if path.exists())


def entered(tree: Path, kind: str, seeds: Iterable[int] = SEEDS) -> set[Place]:
    """Give the functions that one `report` of the log enters, or one line of it in a running exporter (`line`).

    Raises `SystemExit` where the exporter of `tree` does not run.
    """
    with ThreadPoolExecutor() as pool:
        return set().union(*pool.map(lambda seed: _entered(tree, kind, seed), seeds))


def _entered(tree: Path, kind: str, seed: int) -> set[Place]:
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "entered.json"
        ran = subprocess.run(
            [sys.executable, "-m", "release.entered", kind, str(LOG), str(output)],
            cwd=directory,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join((str(tree / "exporter"), str(ROOT))),
                "PYTHONHASHSEED": str(seed),
            },
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if not output.exists():
            words = ran.stderr.splitlines() or [f"status {ran.returncode}"]
            raise SystemExit(f"{tree}: {kind}: it does not run: {words[-1]}")
        return {(file, line, name) for file, line, name in json.loads(output.read_text(encoding="utf-8"))}


def met(places: Iterable[Place], tree: Path) -> Figures:
    """Give how many modules, classes and functions of the package these are: a class by a method of its own, a function
    by its `def`.
    """
    package = tree / "exporter" / PACKAGE
    files: dict[Path, dict[tuple[int, str], Function]] = {}
    found = set()
    for file, line, name in places:
        path = Path(file)
        if path.suffix != ".py" or not path.is_relative_to(package):
            continue
        if path not in files:
            files[path] = definitions(ast.parse(path.read_text(encoding="utf-8")))
        if (line, name) in files[path]:
            found.add((path, files[path][line, name]))
    return {
        "rooms": len({path.relative_to(package).parts[0] for path, _ in found}),
        "modules": len({path for path, _ in found}),
        "classes": len({(path, function.owner) for path, function in found if function.owner}),
        "functions": len(found),
        "lines of these functions": sum(function.lines for _, function in found),
    }


def of_revision(revision: str) -> dict[str, Figures]:
    """Give the figures of a commit. Raises `ReleaseError` where there is none of this name."""
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory) / "tree"
        committed(tree, revision)
        return measured(tree)


def table(columns: dict[str, dict[str, Figures]]) -> str:
    """Write the figures of one or more trees side by side."""
    rows = [
        [group, name, *(f"{column.get(group, {}).get(name, 0):,}" for column in columns.values())]
        for group, figures in next(iter(columns.values())).items()
        for name in figures
    ]
    return markdown(["", "", *columns], rows, figures=True)


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m release.measure", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("revisions", nargs="*", metavar="REVISION", help="what to compare the working tree with")
    given = parser.parse_args(argv)
    try:
        columns = {**{revision: of_revision(revision) for revision in given.revisions}, "now": measured(ROOT)}
    except ReleaseError as error:
        print(error, file=sys.stderr)
        return 1
    print(table(columns))
    return 0


if __name__ == "__main__":
    sys.exit(main())
