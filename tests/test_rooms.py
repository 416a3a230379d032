"""The doors of the package's files: what only its own file calls begins with an underscore."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "exporter" / "sglang_tuning_exporter"
OTHERS = ("tests", "truth", "bench", "release", "fuzz", "closed_loop")
# The YAML of the boards calls these by name.
BOARDS = PACKAGE / "mixin" / "boards"


def words(path: Path) -> set[str]:
    return set(re.findall(r"\w+", path.read_text(encoding="utf-8")))


def test_a_function_that_only_its_own_file_calls_begins_with_an_underscore() -> None:
    root = PACKAGE.parent.parent
    sources = [path for path in PACKAGE.rglob("*.py") if path.parent != BOARDS]
    known = {path: words(path) for path in PACKAGE.rglob("*") if path.suffix in {".py", ".j2", ".html", ".yml"}}
    outside = set[str]().union(*(words(path) for folder in OTHERS for path in (root / folder).rglob("*.py")))
    inner = [
        f"{path.relative_to(PACKAGE)}: {node.name}"
        for path in sources
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and node.name not in outside
        if not any(node.name in names for other, names in known.items() if other != path)
    ]
    assert inner == []
