"""What a reader of the code must meet: counted on a made-up tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from release.archives import ROOT
from release.measure import (
    CORE,
    FORMER,
    PACKAGE,
    counted,
    entered,
    main,
    met,
    modules,
    table,
    waived,
)

MADE_UP = {
    "README.md": "Four words are here.\n",
    "docs/reference/one.md": "Three more words.\n",
    "exporter/sglang_tuning_exporter/__init__.py": '"""A package."""\n',
    "exporter/sglang_tuning_exporter/__main__.py": """\
import sys

from sglang_tuning_exporter.report.page import ROWS, Page

if sys.argv[1] == "report":
    print(Page().shown())
    sys.exit(1)
""",
    "exporter/sglang_tuning_exporter/report/__init__.py": "",
    "exporter/sglang_tuning_exporter/report/page.html": "<p>\n</p>\n",
    "exporter/sglang_tuning_exporter/report/page.py": '''\
"""A page."""

from functools import cache

from sglang_tuning_exporter.state import rank  # noqa: F401 - to see that it counts
from sglang_tuning_exporter.state.rank import Rank, empty  # noqa: F401

ROWS = 3
_HIDDEN, SHOWN = 1, 2


def at_import():
    return 1


NUMBER: int = at_import()


class Page:
    """A page."""

    def shown(self):
        def inner():
            return [each for each in range(ROWS)]

        return inner() and Rank().taken

    def never(self):
        return (
            1,
            2,
        )


@cache
def unused():
    return 0
''',
    "exporter/sglang_tuning_exporter/state/__init__.py": "",
    "exporter/sglang_tuning_exporter/state/flags.json": "{\n}\n",
    "exporter/sglang_tuning_exporter/state/rank.py": """\
from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_tuning_exporter.report.page import Page


class Rank:
    class Inner:
        def taken(self):
            return 1

    @property
    def taken(self):
        return Rank.Inner().taken()


def empty():
    return 0
""",
    "bench/table.py": "from sglang_tuning_exporter.state.rank import Rank\nfrom bench.chain import chain\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in MADE_UP.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_modules_classes_functions_and_public_names_are_counted_by_group(tree: Path) -> None:
    found = counted(tree)
    names = ("modules", "classes", "functions", "public names")
    assert [found["core"][name] for name in names] == [4, 3, 8, 7]
    assert [found["package"][name] for name in names] == [6, 3, 8, 7]
    assert [found["tools"][name] for name in names] == [1, 0, 0, 0]


def test_statements_are_what_is_left_without_comments_and_docstrings(tmp_path: Path) -> None:
    package = tmp_path / "exporter" / PACKAGE / "state"
    package.mkdir(parents=True)
    (package / "rank.py").write_text('"""Say."""\n# nothing\n\n\ndef one():\n    """Say."""\n    a = 1; return a\n')
    assert [counted(tmp_path)["core"][name] for name in ("statements", "lines")] == [3, 7]


def test_a_name_from_another_room_counts_once_and_one_of_the_own_room_or_the_world_not(tree: Path) -> None:
    found = counted(tree)
    name = "names imported from another room"
    # Of the core: state.rank, Rank and empty for the page, and Page for the types of the rank. Of the package: ROWS too.
    assert [found[group][name] for group in ("core", "package", "tools")] == [4, 5, 1]


def test_extracted_tables_are_no_code_and_texts_by_hand_have_a_row(tree: Path) -> None:
    core = counted(tree)["core"]
    assert (core["lines of extracted tables"], core["lines of texts and rows by hand"]) == (2, 2)


def test_the_longest_function_has_its_decorators(tree: Path) -> None:
    assert counted(tree)["core"]["lines of the longest function"] == 5
    assert counted(tree)["core"]["lines of the longest module"] == 37


def test_words_of_documents_are_counted_in_every_folder_of_docs(tree: Path) -> None:
    assert counted(tree)["documents"] == {"words of README.md": 4, "words of ARCHITECTURE.md": 0, "words of docs": 3}


def test_a_report_meets_what_it_enters_and_not_what_runs_at_an_import(tree: Path) -> None:
    found = met(entered(tree, "report"), tree)
    # Page.shown, its inner function, Rank.taken and Rank.Inner.taken, which has the same name.
    assert found == {"rooms": 2, "modules": 2, "classes": 3, "functions": 4, "lines of these functions": 5 + 2 + 3 + 2}


def test_an_exporter_that_does_not_run_is_an_error_with_its_words(tree: Path) -> None:
    (tree / "exporter" / PACKAGE / "__main__.py").write_text("raise ValueError('no such command')\n")
    with pytest.raises(SystemExit, match="report: it does not run: ValueError: no such command"):
        entered(tree, "report")


def test_the_way_of_one_line_leads_from_the_followed_file_to_the_page() -> None:
    places = entered(ROOT, "line", seeds=(0,))
    package = ROOT / "exporter" / PACKAGE
    rooms = {Path(file).relative_to(package).parts[0] for file, *_ in places if Path(file).is_relative_to(package)}
    assert {"collect", "core", "serve"} <= rooms
    assert met(places, ROOT)["functions"] > 50


def test_trees_stand_side_by_side() -> None:
    before, now = {"core": {"modules": 1200}}, {"core": {"modules": 12}}
    assert table({"main": before, "now": now}).splitlines()[-1] == "| core | modules | 1,200 | 12 |"


def test_an_unknown_revision_is_one_line_and_status_1(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["no-such-revision"]) == 1
    assert "no-such-revision: " in capfd.readouterr().err


def test_a_waived_rule_without_a_reason_is_found() -> None:
    assert [waived("x()  # noqa: S101\n"), waived("x()  # noqa: S101 - because\n"), waived("x()  # noqa\n")] == [
        1,
        0,
        1,
    ]


def test_every_rule_that_is_waived_in_the_package_says_why() -> None:
    package = ROOT / "exporter" / PACKAGE
    assert sum(waived(module.text) for module in modules(package, package)) == 0


def test_the_rooms_of_the_core_exist() -> None:
    package = ROOT / "exporter" / PACKAGE
    assert set(CORE) - FORMER <= {module.room for module in modules(package, package)}
