"""Find words that readers should not meet, and names of tests that are no sentence: `python -m release.wording` prints
each with its place.

`python -m release.wording FILE …` checks these files instead of the listed ones.
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
LONGEST_NAME = 80  # of a test
_CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)


def found(text: str, words: list[tuple[re.Pattern[str], str]]) -> Iterator[tuple[str, str]]:
    """Give each banned word of a text, with its reason."""
    for pattern, reason in words:
        for match in pattern.finditer(text):
            yield match[0], reason


def passages(path: Path) -> Iterator[tuple[int, str]]:
    """Give a file's prose with line numbers: docstrings, comments and literals with a space of Python, else all text
    but code spans.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        text = text.replace(r"\n", "  ")  # the n of an escaped line end is no part of the next word
    if path.suffix != ".py":
        prose = _CODE.sub(lambda code: "\n" * code[0].count("\n"), text)
        yield from enumerate(prose.splitlines(), 1)
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def problems(files: Iterable[Path] = ()) -> list[str]:
    """Give one line for each banned word in `files`; without `files`, in the listed ones."""
    rules = yaml.safe_load(WORDS.read_text(encoding="utf-8"))
    words = [(re.compile(each["pattern"]), each["reason"]) for each in rules["words"]]
    left_out = {path for pattern in rules["but_not"] for path in ROOT.glob(pattern)}
    listed = [path for pattern in rules["files"] for path in sorted(ROOT.glob(pattern)) if path not in left_out]
    return [
        f'{path}:{line}: "{word}": {reason}'
        for path in list(files) or listed
        for line, text in passages(path)
        for word, reason in found(text, words)
    ]


def long_names() -> list[str]:
    """Give one line for each name of a test that is longer than a sentence that can be said back."""
    return [
        f'{path}: "{name}": give it at most {LONGEST_NAME} characters'
        for path in sorted((ROOT / "tests").glob("test_*.py"))
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        if len(name) > LONGEST_NAME
    ]


if __name__ == "__main__":
    lines = [*problems(map(Path, sys.argv[1:])), *long_names()]
    print("\n".join(lines) or "no banned word, no long name of a test")
    sys.exit(1 if lines else 0)
