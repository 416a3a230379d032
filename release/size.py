"""`python -m release.size [REVISION …]`: how large the package is, for each revision and for the working tree, as a table.

For a change that is to make the house smaller: `python -m release.size main` before it lands.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = Path("exporter/sglang_tuning_exporter")
_NOQA = re.compile(r"# noqa(?:: *[A-Z]+[0-9]+(?:, *[A-Z]+[0-9]+)*)?(?P<reason>.*)$", re.MULTILINE)
_ISINSTANCE = re.compile(r"isinstance\([^()]*\bcondition\b")


def measured(tree: Path) -> dict[str, str]:
    """Give each figure of the checkout at `tree` by its name."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted((tree / PACKAGE).rglob("*.py"))}
    parsed = {path: ast.parse(text) for path, text in texts.items()}
    lines = {_short(path, tree): len(text.splitlines()) for path, text in texts.items()}
    functions = {
        f"{_short(path, tree)} {each.name}": (each.end_lineno or each.lineno) - each.lineno + 1
        for path, module in parsed.items()
        for each in ast.walk(module)
        if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    everything = "\n".join(texts.values())
    chain = floors(imports(tree, parsed))
    return {
        "files": str(len(texts)),
        "lines": f"{sum(lines.values()):,}",
        "lines of code (no blank line, comment or docstring)": f"{sum(map(code_lines, texts.values())):,}",
        "modules at the root": str(len([path for path in (tree / PACKAGE).glob("*.py") if path.stem != "__init__"])),
        "floors of imports between rooms": f"{len(chain)} ({' → '.join(chain)})",
        "isinstance on conditions": str(len(_ISINSTANCE.findall(everything))),
        "noqa without a reason": str(sum(not found["reason"].strip(" -#") for found in _NOQA.finditer(everything))),
        "functions above 50 lines": str(sum(length > 50 for length in functions.values())),
        "longest function": _longest(functions),
        "modules above 400 lines": str(sum(length > 400 for length in lines.values())),
        "longest module": _longest(lines),
        "words of README.md": _words(tree / "README.md"),
        "words of ARCHITECTURE.md": _words(tree / "ARCHITECTURE.md"),
    }


def code_lines(text: str) -> int:
    """Count the lines of a module that hold code."""
    held = {
        number for number, line in enumerate(text.splitlines(), 1) if line.strip() and not line.strip().startswith("#")
    }
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            held -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(held)


def imports(tree: Path, parsed: dict[Path, ast.Module]) -> dict[str, set[str]]:
    """Give the folders that each folder imports when it runs."""
    found: dict[str, set[str]] = {}
    for path, module in parsed.items():
        room = _room(path.relative_to(tree / PACKAGE).with_suffix("").parts, tree)
        imported = (_room(tuple(name.split(".")[1:]), tree) for name in _imported(module, tree))
        found.setdefault(room, set()).update(each for each in imported if each != room)
    return found


def floors(rooms: dict[str, set[str]]) -> list[str]:
    """Give the longest chain of rooms, each of which imports the next one; an import that closes a circle is left out."""
    known: dict[str, list[str]] = {}
    under_way: set[str] = set()

    def below(room: str) -> list[str]:
        if room not in known:
            under_way.add(room)
            known[room] = [room, *_longest_of(below(each) for each in sorted(rooms.get(room, set()) - under_way))]
            under_way.remove(room)
        return known[room]

    return _longest_of(below(room) for room in sorted(rooms))


def _longest_of(chains: Iterable[list[str]]) -> list[str]:
    return max(chains, key=len, default=[])


def _imported(module: ast.Module, tree: Path) -> Iterator[str]:
    typing = {id(inner) for each in ast.walk(module) if _is_for_types(each) for inner in ast.walk(each)}
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and id(node) not in typing and (node.module or "").startswith(PACKAGE.name):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                place = tree / PACKAGE.parent / name.replace(".", "/")
                yield name if place.is_dir() or place.with_suffix(".py").exists() else str(node.module)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _room(parts: tuple[str, ...], tree: Path) -> str:
    """Name the folder of a module; one at the root is a room of its own."""
    is_folder = (tree / PACKAGE).joinpath(*parts).is_dir()
    return "/".join(parts if is_folder or len(parts) == 1 else parts[:-1]) or "the root"


def _longest(lengths: dict[str, int]) -> str:
    name = max(lengths, key=lengths.__getitem__)
    return f"{lengths[name]} ({name})"


def _short(path: Path, tree: Path) -> str:
    return path.relative_to(tree / PACKAGE).as_posix()


def _words(path: Path) -> str:
    return f"{len(path.read_text(encoding='utf-8').split()):,}" if path.exists() else "-"


def _unpacked(revision: str, directory: Path) -> Path:
    packed = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=False)
    if packed.returncode:
        raise SystemExit(f"{revision}: no such revision; give one that `git rev-parse` accepts")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(directory, filter="data")
    return directory


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m release.size", description=__doc__)
    parser.add_argument("revisions", nargs="*", metavar="REVISION", help="what to compare the working tree with")
    revisions = parser.parse_args(argv).revisions
    columns = {}
    for revision in revisions:
        with tempfile.TemporaryDirectory() as directory:
            columns[revision] = measured(_unpacked(revision, Path(directory)))
    columns["now"] = measured(ROOT)
    print(f"| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for name in columns["now"]:
        print(f"| {name} | {' | '.join(column[name] for column in columns.values())} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
