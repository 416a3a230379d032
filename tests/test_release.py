"""What is released: archives that reproduce, a wheel that needs no checkout, one version, and workflows that say what
they do.
"""

from __future__ import annotations

import ast
import io
import os
import tarfile
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from conftest import wait_for
from release.archives import ReleaseError, build, copied, digests, unpack
from release.statements import contradictions, version
from sglang_tuning_exporter import __version__

if TYPE_CHECKING:
    pass

ROOT = Path(__file__).parents[1]
EPOCH = 1_700_000_000


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[list[Path]]:
    """Build this tree twice: elsewhere, later, from files of another age, for another person."""
    found: list[list[Path]] = []
    begun: list[int] = []
    for place, umask in (("here", 0o022), ("elsewhere/deeper", 0o077)):
        tree = tmp_path_factory.mktemp(place.partition("/")[0]) / place
        before = os.umask(umask)
        try:
            copied(tree, ROOT)
            if found:
                wait_for(lambda: int(time.time()) > begun[0])
                for path in tree.rglob("*"):
                    os.utime(path, (EPOCH + 86400, EPOCH + 86400))
            begun.append(int(time.time()))
            found.append(build(tree, tree.parent / "dist", EPOCH, isolated=False))
        finally:
            os.umask(before)
    return found


def test_two_builds_at_two_times_and_places_have_the_same_bytes(built: list[list[Path]]) -> None:
    first, second = map(digests, built)
    assert sorted(first) == [
        f"sglang_tuning_exporter-{__version__}-py3-none-any.whl",
        f"sglang_tuning_exporter-{__version__}.tar.gz",
    ]
    assert first == second


def test_an_archive_has_the_time_of_its_commit_and_nobodys_name(built: list[list[Path]]) -> None:
    wheel, sdist = built[0]
    # A zip counts time in steps of two seconds, and has no zone.
    assert {entry.date_time for entry in zipfile.ZipFile(wheel).infolist()} == {time.gmtime(EPOCH)[:6]}
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert {member.mtime for member in members} == {EPOCH}
    assert {(member.uid, member.gid, member.uname, member.gname) for member in members} == {(0, 0, "", "")}


def test_the_wheel_has_every_file_of_the_package_and_none_beside_it(built: list[list[Path]]) -> None:
    inside = {name for name in zipfile.ZipFile(built[0][0]).namelist() if ".dist-info/" not in name}
    package = ROOT / "exporter"
    here = {
        str(path.relative_to(package))
        for path in (package / "sglang_tuning_exporter").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert inside == here
    assert "sglang_tuning_exporter/py.typed" in inside


def test_the_sdist_has_what_is_built_installed_and_read_and_nothing_else(
    built: list[list[Path]], tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    copied(tree, ROOT)
    with tarfile.open(built[0][1]) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    shipped = ("exporter", "alerts", "dashboards", "deploy", "docs")
    here = {str(path.relative_to(tree)) for name in shipped for path in (tree / name).rglob("*") if path.is_file()}
    here = {name for name in here if not name.startswith("alerts/tests/")}
    assert here - inside == set()
    assert {name.partition("/")[0] for name in inside - here} == {
        *(path.name for path in tree.glob("*.md")),
        *("pyproject.toml", "PKG-INFO", "LICENSE", "NOTICE", "docker-compose.yml", ".env.example", ".gitignore"),
    }
    assert built[0][1].stat().st_size < 2_000_000


def test_every_place_that_names_a_version_names_this_one() -> None:
    assert version(ROOT) == __version__
    assert contradictions(ROOT) == []


def packed(path: Path, *members: tuple[str, str]) -> Path:
    """Write a tar archive of files by name and text; a text that begins with `->` is where a symbolic link leads."""
    with tarfile.open(path, "w") as archive:
        for name, text in members:
            member = tarfile.TarInfo(name)
            if text.startswith("->"):
                member.type, member.linkname = tarfile.SYMTYPE, text[2:]
            member.size = 0 if member.issym() else len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


def test_an_archive_is_unpacked_with_its_folders_and_links(tmp_path: Path) -> None:
    archive = packed(tmp_path / "a.tar", ("deep/down/file", "text"), ("deep/link", "->down"), ("deep/link/next", "too"))
    unpack(archive, tmp_path / "out")
    assert (tmp_path / "out/deep/link/file").read_text() == "text"
    assert (tmp_path / "out/deep/down/next").read_text() == "too"


@pytest.mark.parametrize(
    "members",
    [
        (("../file", "text"),),
        (("/tmp/file", "text"),),
        (("deep/../../file", "text"),),
        (("link", "->.."), ("link/file", "text")),
        (("link", "->/etc"),),
    ],
)
def test_an_archive_that_leaves_its_folder_is_refused(members: tuple[tuple[str, str], ...], tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match="outside"):
        unpack(packed(tmp_path / "a.tar", *members), tmp_path / "out")
    assert not (tmp_path / "file").exists()


def test_no_code_asks_for_an_argument_that_the_oldest_python_lacks() -> None:
    """`extractall` got its filter in 3.10.12 and 3.11.4; without it later Pythons warn, so
    both are asked of `unpack`.
    """
    code = [
        path
        for name in ("exporter", "tests", "truth", "release", "closed_loop", "bench", "fuzz")
        for path in (ROOT / name).rglob("*.py")
    ]
    calls = (
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in code
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in {"extractall", "extract"}
    )
    assert list(calls) == []
