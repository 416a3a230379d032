"""Find words that readers should not meet: `python -m release.wording` prints each with its place and its reason.

`python -m release.wording FILE …` checks these files, docstrings and comments included, instead of the listed ones.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).parent.parent
WORDS = Path(__file__).with_name("banned_words.yaml")
_CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
_HAS_BODY = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def found(text: str, words: list[tuple[re.Pattern[str], str]]) -> Iterator[tuple[str, str]]:
    """Give each banned word of a text, with its reason."""
    for pattern, reason in words:
        for match in pattern.finditer(text):
            yield match[0], reason


def passages(path: Path, *, with_notes: bool = False) -> Iterator[tuple[int, str]]:
    """Give a file's prose with line numbers: Markdown without code; of Python the string literals.

    `with_notes` adds Python's docstrings and comments.
    """
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
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and (with_notes or id(node) not in docstrings)
        ):
            yield node.lineno, node.value
    if with_notes:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def problems(files: Iterable[Path] = ()) -> list[str]:
    """Give one line for each banned word in `files`, docstrings and comments included; without `files`, in the listed ones."""
    rules = yaml.safe_load(WORDS.read_text(encoding="utf-8"))
    words = [(re.compile(each["pattern"]), each["reason"]) for each in rules["words"]]
    listed = [
        (path, with_notes)
        for key, with_notes in (("files", False), ("files_with_docstrings", True))
        for pattern in rules[key]
        for path in sorted(ROOT.glob(pattern))
    ]
    return [
        f'{path}:{line}: "{word}": {reason}'
        for path, with_notes in [(file, True) for file in files] or listed
        for line, text in passages(path, with_notes=with_notes)
        for word, reason in found(text, words)
    ]


if __name__ == "__main__":
    lines = problems(map(Path, sys.argv[1:]))
    print("\n".join(lines) or "no banned word")
    sys.exit(1 if lines else 0)
