"""docs/decisions.md has a row for every number that a judgement uses, with its value, its reason and its source."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_tuning_exporter.config.profiles import PROFILES, THRESHOLDS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "exporter" / "sglang_tuning_exporter"
DOCUMENT = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8")
TECHNICAL: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "release" / "technical_constants.yaml").read_text())
NAME = re.compile(r"_?[A-Z][A-Z0-9_]*")


def evaluated(node: ast.expr) -> Any:
    """Give the number, or the tuple of numbers, that an expression writes out; None for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, (int, float)) and not isinstance(node.value, bool) else None
    if isinstance(node, (ast.Tuple, ast.UnaryOp, ast.BinOp)):
        if any(isinstance(each, (ast.Name, ast.Call, ast.Attribute, ast.Starred)) for each in ast.walk(node)):
            return None
        value = eval(compile(ast.Expression(node), "", "eval"), {})  # of this repository's own code
        values = value if isinstance(value, tuple) else (value,)
        return value if values and all(isinstance(each, (int, float)) for each in values) else None
    return None


@cache
def constants() -> dict[tuple[str, str], Any]:
    """Give every upper-case number at the level of a module: (module, name) → value."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE).with_suffix("").as_posix().removesuffix("/__init__")
        for statement in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(statement, ast.Assign):
                pairs = [(target, statement.value) for target in statement.targets]
            elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
                pairs = [(statement.target, statement.value)]
            else:
                continue
            for target, value in pairs:
                both = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
                each = zip(target.elts, value.elts, strict=True) if both else [(target, value)]  # type: ignore[attr-defined] # both are tuples
                for name, number in each:
                    if isinstance(name, ast.Name) and NAME.fullmatch(name.id) and evaluated(number) is not None:
                        found[module, name.id] = evaluated(number)
    return found


@cache
def rows() -> list[tuple[str, tuple[str, ...], str]]:
    """Give the rows below "Constants": room, names and the cell of the values.

    A heading names the rooms of its table.
    """
    found, rooms = [], list[str]()
    for line in DOCUMENT.partition("\n## Constants\n")[2].splitlines():
        if line.startswith("### "):
            rooms = re.findall(r"\w+", line.partition(":")[0].replace(" and ", " "))
        elif line.startswith("| `"):
            names, values = line.split(" | ")[:2]
            found += [(room, tuple(re.findall(r"`(\w+)`", names)), values) for room in rooms]
    return found


def room(module: str) -> str:
    return module.partition("/")[0]


def is_technical(module: str, name: str) -> bool:
    return any(
        name in listed.get("rooms", {}).get(room(module), ())
        or any(re.fullmatch(pattern, name) for pattern in listed.get("patterns", ()))
        for listed in TECHNICAL.values()
    )


def renderings(value: Any) -> set[str]:
    """Give the ways in which a value may be written."""
    if isinstance(value, tuple):
        return {".".join(map(str, value)), "/".join(f"{each:g}" for each in value),
            "-".join(f"{each:g}" for each in value),
                ", ".join(f"{each:g}" for each in value)}  # fmt: skip
    forms = {f"{value:g}", f"{value:,}", str(value)}
    for power, unit in ((10, "KiB"), (20, "MiB"), (30, "GiB")):
        forms |= (
            {f"{value / 2**power:g} {unit}", f"2^{power}"} if value == 2**power else {f"{value / 2**power:g} {unit}"}
        )
    return forms


def test_every_number_has_a_row_or_is_listed_as_technical() -> None:
    documented = {(room, name) for room, names, _ in rows() for name in names}
    missing = [at for at in constants() if (room(at[0]), at[1]) not in documented and not is_technical(*at)]
    assert missing == [], (
        "docs/decisions.md says why a number is what it is, release/technical_constants.yaml that nothing depends on it"
    )


def test_every_row_names_numbers_that_exist() -> None:
    known = {(room(module), name) for module, name in constants()}
    rooms = {names: {each for each, others, _ in rows() if others == names} for _, names, _ in rows()}
    assert [
        name for names, places in rooms.items() for name in names if not any((each, name) in known for each in places)
    ] == []


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row[0]}-{','.join(row[1])}")
def test_a_row_has_the_value_of_the_code(row: tuple[str, tuple[str, ...], str]) -> None:
    place, names, cell = row
    for (module, name), value in constants().items():
        if name in names and room(module) == place:
            assert any(re.search(rf"(?<![\d.]){re.escape(form)}(?![\d]|\.\d)", cell) for form in renderings(value)), (
                module,
                name,
                value,
            )


def test_a_comment_cites_no_document_that_is_not_in_the_repository() -> None:
    for path in PACKAGE.rglob("*.py"):
        # Documents of other projects say whose they are.
        text = re.sub(r"`[^`]+` in \w+/\w+", "", path.read_text(encoding="utf-8"))
        for cited in re.findall(r"\b(?:docs/[\w/-]+\.(?:md|json)|[A-Z]{4,}\.md)", text):
            assert (ROOT / cited).exists() or (ROOT / "docs" / cited).exists(), (path.name, cited)


def test_every_threshold_has_a_row_with_its_default() -> None:
    section = DOCUMENT.partition("## Thresholds of the profiles")[2].partition("\n## ")[0]
    cells = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    named = {name: value for names, value in cells for name in re.findall(r"`(\w+)`", names)}
    assert named.keys() == set(THRESHOLDS)
    for name, cell in named.items():
        values = {getattr(profile, name) for profile in PROFILES.values()} - {None}
        assert all(re.search(rf"(?<![\d.]){value:g}(?![\d.])", cell) for value in values) or " to " in cell, name
