"""Recordings on disk become timelines; the packaged ones and those under tests/recordings are cut from real servers."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.recordings.recording import MAX_FILE_BYTES, Recording, from_files, load

RECORDINGS = Path(__file__).parent / "recordings"
NOON = 1738324800  # 2025-01-31 12:00:00 UTC
READY = b"[2025-01-31 12:00:00] The server is fired up and ready to roll!\n"


def from_log(log: bytes, **files: bytes) -> Recording:
    return from_files({"server.log": log} | files, name="made")


def test_a_log_in_local_time_is_moved_to_utc() -> None:
    scrape = {f"metrics-0001-{NOON * 1000 + 3000}.prom": b"up 1\n"}
    log = READY.replace(b"12:00", b"14:00") + b"[2025-01-31 14:00:10] x\n"
    about = {"recording.json": b'{"log_utc_offset_seconds": 7200}'}
    recording = from_log(log, **scrape, **about)
    assert [s.at for s in recording.scrapes] == [3.0]
    with pytest.raises(UsageError, match="log_utc_offset_seconds"):
        from_log(log, **scrape)


def test_a_killed_server_is_away_until_it_answers_again() -> None:
    recording = load(RECORDINGS / "restart_append")
    assert [transition.phase for transition in recording.transitions] == ["ready", "down", "starting", "ready"]
    away = recording.transitions[1].at
    assert recording.phase_at(away - 0.1) == "ready"
    assert recording.phase_at(away + 5) == "down"
    assert recording.phase_at(1e9) == "ready"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no server.log"),
        ({"server.log": b""}, "no line of server.log"),
        ({"server.log": b"\x00" * 100 + b"nothing\n"}, "no line of server.log"),
        ({"server.log": b"[2025-13-45 12:00:00] x\n"}, "no line of server.log"),
        ({"server.log.gz": b"not gzip"}, "whole gzip"),
        ({"server.log.gz": gzip.compress(READY)[:-9]}, "whole gzip"),
        ({"server.log": READY, "recording.json": b"{"}, "not valid JSON"),
        ({"server.log": READY, "recording.json": b"[" * 100_000}, "not valid JSON"),
        ({"server.log": READY, "recording.json": b"[]"}, "one JSON object"),
        ({"server.log": READY, "recording.json": b'{"log_utc_offset_seconds": NaN}'}, "log_utc_offset_seconds=nan"),
        ({"server.log": READY, "recording.json": b'{"log_utc_offset_seconds": "UTC"}'}, "log_utc_offset_seconds=UTC"),
        ({"server.log": READY, "server_info.json": b"null"}, "one JSON object"),
        ({"server.log": READY, "events.jsonl": b"ready\n"}, "not valid JSON"),
        ({"server.log": READY, "events.jsonl": b'{"t": "noon"}\n'}, "unix seconds"),
        ({"server.log": READY, "events.jsonl": b'{"t": 1e999}\n'}, "unix seconds"),
    ],
)
def test_a_directory_that_is_no_recording_is_one_line_of_complaint(
    tmp_path: Path, files: dict[str, bytes], message: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_small_file_that_unpacks_to_a_giant_is_refused(tmp_path: Path) -> None:
    (tmp_path / "server.log.gz").write_bytes(gzip.compress(b"\0" * (MAX_FILE_BYTES + 1), 1))
    with pytest.raises(UsageError, match="larger than 64 MiB"):
        load(tmp_path)
