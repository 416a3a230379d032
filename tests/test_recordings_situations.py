"""Captures of real servers in known situations: the verdict from each of the exporter's sources matches the known cause.

The causes are in `closed_loop/situations.py`. The real sidecar runs with a simulated clock (`closed_loop/rejudge.py`).
`OPEN` lists what does not hold yet; whoever corrects it removes its line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import pytest

from closed_loop.keeping import ARCHIVES, MOST_BYTES, archive_of, pack, unpack
from closed_loop.situations import BY_NAME
from closed_loop.verdicts import SOURCES, Seen, judging, seen
from sglang_tuning_exporter.recordings.recording import load

Said: TypeAlias = Callable[[str], dict[str, Seen]]
EXPORTER = Path(__file__).parent.parent / "exporter"
NAMES = sorted(path.name.removesuffix(".tar.xz") for path in ARCHIVES.glob("*.tar.xz"))

# (situation, way of seeing) → what is still wrong: the headline, an advice, or a cure that is missing.
HEADLINE: dict[tuple[str, str], str] = {}
ADVICE: dict[tuple[str, str], str] = {}
CURE: dict[str, str] = {}


def cases(known: dict[tuple[str, str], str]) -> list[Any]:
    return [
        pytest.param(
            name,
            source,
            id=f"{name}-{source}",
            marks=[pytest.mark.xfail(strict=True, reason=known[name, source])] if (name, source) in known else [],
        )
        for name in NAMES
        for source in SOURCES
    ]


@contextmanager
def unpacked(name: str) -> Iterator[Path]:
    with TemporaryDirectory(prefix="capture-") as scratch:
        yield unpack(archive_of(name), Path(scratch))


@pytest.fixture(scope="module")
def said_of() -> Iterator[Said]:
    """What the exporter of the working tree says of a situation, from each source."""
    with judging(EXPORTER) as judge:

        @cache
        def of(name: str) -> dict[str, Seen]:
            situation = BY_NAME[name]
            with unpacked(name) as capture:
                return seen(situation, judge(capture, situation.profile))

        yield of


def test_an_archive_of_the_same_files_has_the_same_bytes_and_gives_them_back(tmp_path: Path) -> None:
    files = {"server.log": b"[2026-11-22 10:12:02] hello\n" * 1000, "metrics-000-1.prom": b"up 1\n"}
    (tmp_path / "a.tar.xz").write_bytes(pack(files))
    assert pack(dict(reversed(files.items()))) == (tmp_path / "a.tar.xz").read_bytes()
    folder = unpack(tmp_path / "a.tar.xz", tmp_path / "a")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files


@pytest.mark.parametrize("name", ["../outside", "/outside", ".hidden"])
def test_an_archive_writes_nothing_but_plain_files_of_its_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.tar.xz").write_bytes(pack({name: b"x", "inside": b"y"}))
    unpack(tmp_path / "a.tar.xz", tmp_path / "a")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["inside"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a.tar.xz"]


@pytest.mark.parametrize("name", NAMES)
def test_a_kept_capture_is_small_and_can_be_replayed(name: str) -> None:
    assert archive_of(name).stat().st_size <= MOST_BYTES
    with unpacked(name) as capture:
        recorded, about = load(capture), (capture / "recording.json").read_text()
        text = b"".join(path.read_bytes() for path in capture.iterdir())
    assert b"/root/" not in text
    assert b"/home/" not in text
    assert recorded.length_seconds > 20
    assert json.loads(about)["sglang_version"] == BY_NAME[name].version


@pytest.mark.parametrize(("name", "source"), cases(HEADLINE))
def test_the_verdict_is_right_at_the_end_of_the_load_and_never_wrong_before(
    name: str, source: str, said_of: Said
) -> None:
    assert said_of(name)[source].false_headlines == ()


@pytest.mark.parametrize(("name", "source"), cases(ADVICE))
def test_no_harmful_change_is_advised(name: str, source: str, said_of: Said) -> None:
    assert said_of(name)[source].harmful == ()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.xfail(strict=True, reason=CURE[name])] if name in CURE else [])
        for name in NAMES
        if BY_NAME[name].cures
    ],
)
def test_the_flag_that_cures_is_named(name: str, said_of: Said) -> None:
    assert said_of(name)["both"].missed == ()


def test_every_known_failure_belongs_to_a_kept_capture() -> None:
    assert {name for name, _ in (*HEADLINE, *ADVICE)} | set(CURE) <= set(NAMES)
