"""The check for banned words that `make check` runs."""

from __future__ import annotations

import re

from release import wording

WORDS = [(re.compile(r"\btold\b"), "say logged")]


def test_a_banned_word_is_found_with_its_reason() -> None:
    assert list(wording.found("as told by the log", WORDS)) == [("told", "say logged")]


def test_no_listed_file_has_a_banned_word() -> None:
    assert wording.problems() == []
