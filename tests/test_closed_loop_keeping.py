"""Captures of real servers as small archives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from closed_loop.keeping import ARCHIVES, MOST_BYTES, archive_of, pack, unpack
from closed_loop.situations import BY_NAME
from sglang_tuning_exporter.recordings.recording import load

NAMES = sorted(path.name.removesuffix(".tar.xz") for path in ARCHIVES.glob("*.tar.xz"))


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
def test_a_kept_capture_is_small_and_can_be_replayed(name: str, tmp_path: Path) -> None:
    assert archive_of(name).stat().st_size <= MOST_BYTES
    capture = unpack(archive_of(name), tmp_path)
    recorded, about = load(capture), (capture / "recording.json").read_text()
    text = b"".join(path.read_bytes() for path in capture.iterdir())
    assert b"/root/" not in text
    assert b"/home/" not in text
    assert recorded.length_seconds > 20
    assert json.loads(about)["sglang_version"] == BY_NAME[name].version
