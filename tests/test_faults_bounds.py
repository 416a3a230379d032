"""docs/faults.md has the limits in force and names the tests that try its lines."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "sglang_tuning_exporter"
TEXT = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
# `collect/rotation.py` `MOST_FILES`, `_OTHER`: a module with the names in it
NAMED = re.compile(r"`([\w/]+)\.py`((?:,? `\w+`)+)")


def rows() -> list[tuple[str, str, str, str]]:
    """Every constant that a row of the tables below "Bounds" names: the row's bound, the constant's module and its
    name.
    """
    cells = [line.split(" | ") for line in TEXT.split("## Bounds")[1].splitlines() if line.startswith("| ")]
    return [
        (row[0].removeprefix("| "), row[1], module, name)
        for row in cells
        for module, names in NAMED.findall(row[2])
        for name in re.findall(r"\w+", names)
    ]


def value(module: str, name: str) -> Any:
    """The value of a constant, or of an argument that the module sets or has as default; None for a function."""
    loaded = importlib.import_module(f"{PACKAGE}.{module.replace('/', '.')}")
    if not hasattr(loaded, name):
        source = (ROOT / "exporter" / PACKAGE / f"{module}.py").read_text(encoding="utf-8")
        found = re.search(rf"\b{name}(?:: int)? ?= ?([^,]+),", source)
        assert found, (module, name)
        return eval(found[1], vars(loaded))  # an expression in our own source
    return None if callable(getattr(loaded, name)) else getattr(loaded, name)


def written(figure: float) -> set[str]:
    """Every way in which the document writes a figure."""
    ways = {f"{figure:g}", f"{figure:,.0f}", f"{figure:.0f}", f"{100 / figure:g} %"}
    return ways | ({f"{figure >> 20} MiB", f"{figure >> 30} GiB"} if isinstance(figure, int) else set())


@pytest.mark.parametrize(("what", "words", "module", "name"), rows())
def test_a_bound_in_the_document_is_the_one_in_force(what: str, words: str, module: str, name: str) -> None:
    found = value(module, name)
    for figure in found if isinstance(found, tuple) else [found] * (found is not None):
        assert any(re.search(rf"(?<![\d.,]){re.escape(way)}(?![\d.]|,\d)", words) for way in written(figure)), what


def test_every_row_about_delivery_names_a_test_that_exists() -> None:
    section = TEXT.split("## Delivery")[1].split("## Bounds")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ") and not line.startswith("| source")]
    assert len(rows) > 10
    for row in rows:
        assert re.search(r"\| (its \w+ )?(exactly|at least|at most) once", row), row
        named = re.findall(r"`(test_\w+)\.py(?:::(test_\w+))?`", row)
        assert named, row
        for file, test in named:
            source = (ROOT / "tests" / f"{file}.py").read_text(encoding="utf-8")
            assert not test or re.search(rf"^def {test}\(", source, re.MULTILINE), f"{file}.py has no {test}"


def test_every_section_of_faults_names_the_tests_that_try_it() -> None:
    named = re.findall(r"`(tests/test_\w+\.py)`", TEXT)
    assert {f"tests/test_faults_{part}.py" for part in ("log", "past", "process", "server")} <= set(named)
    assert [path for path in named if not (ROOT / path).exists()] == []
