"""README and reference have what they must have, every page is linked, and every link of the repository leads
somewhere.
"""

from __future__ import annotations

import ast
import json
import os
import re
from functools import cache
from pathlib import Path

import pytest

from sglang_tuning_exporter.cli import main
from sglang_tuning_exporter.cli.commands import commands_of, known_words, make_parser
from sglang_tuning_exporter.config import OPTIONS
from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.recordings.replay import packaged

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
REFERENCE = ROOT / "docs" / "reference"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *REFERENCE.glob("*.md")])
PACKAGE = ROOT / "exporter" / "sglang_tuning_exporter"
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def targets(page: Path) -> list[str]:
    """The links of a page to files of the repository."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    return [target for target in LINK.findall(text) if not re.match(r"[a-z]+:", target)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_file_leads_to_one(page: Path) -> None:
    assert [target for target in targets(page) if not (page.parent / target).exists()] == []


def test_every_page_is_reached_from_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    named = set(re.findall(r"^(?:.*<)?([\w./-]+?)>?$", index, re.MULTILINE))
    pages = {str(page.relative_to(ROOT / "docs").with_suffix("")) for page in (ROOT / "docs").rglob("*.md")}
    assert pages - named == {"index"}


def test_every_family_of_the_reference_has_a_meaning_and_a_source() -> None:
    rows = [line for line in (REFERENCE / "metrics.md").read_text().splitlines() if line.startswith("| `sglang_")]
    assert len(rows) > 60
    assert [row for row in rows if not all(cell.strip() for cell in row.strip("| ").split(" | "))] == []


def commands(program: str) -> set[tuple[str, str, tuple[str, ...]]]:
    """Give each command line of a program that a page shows: page, the word behind it, and its flags."""
    found = re.compile(rf"(?:^|`|[ /]){program} ([a-z_.-]+)([^`\n#]*)", re.MULTILINE)
    return {
        (page.name, match[1], tuple(re.findall(r"(?<![\w-])--[a-z.-]*[a-z]", match[2])))
        for page in PAGES
        for match in found.finditer(page.read_text())
    }


def test_every_command_line_that_a_page_shows_has_flags_that_exist() -> None:
    known = {name: known_words(parser) for name, parser in commands_of(make_parser()).items()}
    shown = {each for each in commands("sglang-tuning-exporter") if each[1] in known}
    assert len(shown) > 20
    assert [(page, name, flag) for page, name, flags in shown for flag in flags if flag not in known[name]] == []


def test_every_target_of_make_that_a_page_shows_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert [each for each in commands("(?<![ /])make") if each[1] not in targets and each[0] != "CHANGELOG.md"] == []


def test_every_tool_that_a_page_shows_is_there_with_its_command() -> None:
    for page, module, _ in commands("python -m"):
        path = ROOT / module.replace(".", "/")
        tool = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__main__.py"
        assert tool.exists() or module.startswith(("pytest", "pip", "sglang")), (page, module)
    shown = {each for page in PAGES for each in re.findall(r"python -m closed_loop ([a-z]+)", page.read_text())}
    assert [each for each in shown if f'"{each}"' not in (ROOT / "closed_loop" / "__main__.py").read_text()] == []


def test_the_readme_names_the_first_and_the_last_release_that_is_known() -> None:
    (table,) = PACKAGE.rglob("flags.json")
    releases = json.loads(table.read_text())["releases"]
    assert f"It works with SGLang {releases[0]} to {releases[-1]}:" in README


def test_the_report_that_the_readme_shows_is_one_of_a_packaged_recording(capsys: pytest.CaptureFixture[str]) -> None:
    shown = re.findall(r"first of all:\n\n```\n((?:.+\n)+)```", README)[0].splitlines()
    main(["report", str(packaged("retract") / "server.log.gz"), "--profile", "offline"])
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in shown if line not in printed] == []


@cache
def literals() -> str:
    """Every text that the exporter's modules hold, with a gap where a value is put in."""
    nodes = [node for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return re.sub(r"%[sd]", "…", "\n".join(texts))


TROUBLES = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("message", TROUBLES)
def test_each_message_of_troubleshooting_is_made_of_words_that_the_exporter_logs(message: str) -> None:
    known = {option.flag for option in OPTIONS} | {os.strerror(98)}
    # What a value is put between, and what is joined: a reason and its remedy, the sources, the profile.
    parts = re.split(r"…|http\S*|\b\d{3}\b|; |: |=|, (?=watching|profile)|(?<=watching) | and |(?<=profile) ", message)
    words = [part.strip(" ().,") for part in parts]
    assert [
        each for each in words if each and each not in literals() and each not in known and each not in PROFILES
    ] == []
