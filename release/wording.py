"""Find words that readers should not meet: `python -m release.wording` prints each with its place and its reason."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
WORDS = Path(__file__).with_name("banned_words.yaml")
_CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
_HAS_BODY = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def found(text: str, words: list[tuple[re.Pattern[str], str]]) -> Iterator[tuple[str, str]]:
    """Give each banned word of a text, with its reason."""
    for pattern, reason in words:
        for match in pattern.finditer(text):
            yield match[0], reason


def passages(path: Path) -> Iterator[tuple[int, str]]:
    """Give what a reader sees of a file, with its line: Markdown without code, the string literals of Python."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        prose = _CODE.sub(lambda code: "\n" * code[0].count("\n"), text)
        yield from enumerate(prose.splitlines(), 1)
        return
    tree = ast.parse(text)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, _HAS_BODY) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


def problems(root: Path = ROOT) -> list[str]:
    """Give one line for each banned word under the root."""
    rules = yaml.safe_load(WORDS.read_text(encoding="utf-8"))
    words = [(re.compile(each["pattern"]), each["reason"]) for each in rules["words"]]
    return [
        f'{path.relative_to(root)}:{line}: "{word}": {reason}'
        for pattern in rules["files"]
        for path in sorted(root.glob(pattern))
        for line, text in passages(path)
        for word, reason in found(text, words)
    ]


if __name__ == "__main__":
    lines = problems()
    print("\n".join(lines) or "no banned word")
    sys.exit(1 if lines else 0)
