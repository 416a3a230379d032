"""The check for banned words that `make check` runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

from release import wording

WORDS = [(re.compile(r"\btold\b"), "say logged")]


def test_a_banned_word_is_found_with_its_reason() -> None:
    assert list(wording.found("as told by the log", WORDS)) == [("told", "say logged")]


def test_strings_docstrings_and_comments_of_python_are_read(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text('"""What is told."""\n\n# as told\nHELP = "as told"\n')
    assert [problem.split(": ")[0] for problem in wording.problems([file])] == [f"{file}:1", f"{file}:4", f"{file}:3"]


def test_a_key_is_no_prose(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text('KEY = "told"\n')
    assert list(wording.passages(file)) == []


def test_comments_and_values_of_yaml_are_read(tmp_path: Path) -> None:
    file = tmp_path / "a.yml"
    file.write_text("# as told\nkey:\n- title: as told\n")
    assert [problem.split(": ")[0] for problem in wording.problems([file])] == [f"{file}:1", f"{file}:3"]


def test_values_of_json_are_read_behind_an_escaped_line_end_too(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"description": "a line\ntold"}, indent=1))
    assert [problem.split(": ")[0] for problem in wording.problems([file])] == [f"{file}:2"]


def test_code_in_markdown_is_not_read_and_lines_keep_their_number(tmp_path: Path) -> None:
    file = tmp_path / "a.md"
    file.write_text("```sh\ntold\n```\n`told` here\n")
    assert [line for line, text in wording.passages(file) if "told" in text] == []
    assert (4, " here") in list(wording.passages(file))


def test_no_listed_file_has_a_banned_word() -> None:
    assert wording.problems() == []
