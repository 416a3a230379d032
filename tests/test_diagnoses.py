"""A diagnosis is one object: it is listed once, its causes stand before it, and no other code names it."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest

import sglang_tuning_exporter
from sglang_tuning_exporter.collect import scrape
from sglang_tuning_exporter.core import diagnoses, judge, sums
from sglang_tuning_exporter.core.diagnoses import ALL, EXPORTER, Diagnosis, causes_of, place
from sglang_tuning_exporter.mixin.boards import looks

PACKAGE = Path(sglang_tuning_exporter.__file__).parent
FAMILIES = sorted(path.stem for path in (PACKAGE / "core" / "diagnoses").glob("[a-z]*.py"))
IDS = {diagnosis.id for diagnosis in (*ALL, *EXPORTER)}
# Words of other vocabularies that a diagnosis has as its id, too: states of a signal, reasons why a scrape failed,
# troubles of a source, verdicts without a diagnosis.
STATES = {state for states in sums.STATES.values() for state in states}
ALSO = STATES | set(get_args(scrape.Reason)) | set(judge.SENTENCES)
TROUBLES = {diagnosis.trouble for diagnosis in ALL if diagnosis.trouble}
# Series with the name of a diagnosis.
SERIES = {"sources_disagree", "cuda_graph_off"}


def texts(path: Path) -> list[str]:
    """Give the texts of a module, without the titles of notifications: those are words for people."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    titles = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "title"}
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in titles
    ]


def named_outside() -> dict[str, set[str]]:
    """Give the diagnoses that a file outside their package names, by file."""
    allowed = {"core/watch.py": TROUBLES, "serve/metrics/__init__.py": SERIES}
    named = {}
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith("core/diagnoses/"):
            named[name] = (IDS & set(texts(path))) - ALSO - allowed.get(name, set())
    return {name: ids for name, ids in named.items() if ids}


def test_no_code_outside_names_a_diagnosis() -> None:
    assert named_outside() == {}


def test_inside_the_package_a_diagnosis_is_named_by_its_own_object_alone() -> None:
    named = Counter(text for family in FAMILIES for text in texts(PACKAGE / "core" / "diagnoses" / f"{family}.py"))
    assert {name: named[name] for name in IDS - ALSO - TROUBLES if named[name] > 1} == {}


def test_every_diagnosis_of_a_family_is_listed_once() -> None:
    objects = {
        thing
        for family in FAMILIES
        for thing in vars(
            getattr(diagnoses, family, None) or __import__(f"{diagnoses.__name__}.{family}", fromlist=[family])
        ).values()
        if isinstance(thing, Diagnosis)
    }
    listed = Counter((*ALL, *EXPORTER))
    assert set(listed) == objects
    assert set(listed.values()) == {1}
    assert len(IDS) == len(listed)


def test_a_cause_stands_before_its_consequences() -> None:
    assert all(place(cause) < place(diagnosis) for diagnosis in ALL for cause in causes_of(diagnosis))


@pytest.mark.parametrize("diagnosis", ALL, ids=lambda diagnosis: diagnosis.id)
def test_a_diagnosis_has_a_colour_of_its_level(diagnosis: Diagnosis) -> None:
    assert 0 <= diagnosis.shade < len(looks.SHADES[diagnosis.severity])
