"""How far the printed times of a log are from real time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sglang_tuning_exporter.collect.log import last_printed, offset_of


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        (b"[2025-11-20 11:40:10] Decode batch\n", 1763638810.0),
        (b"[2025-11-20 11:40:10 DP1 TP0] Decode batch\nTraceback (most recent call last):\n  File x\n", 1763638810.0),
        (b'[2025-11-20 11:40:10] INFO:     127.0.0.1:1 - "GET /health HTTP/1.1" 200 OK\n', 1763638810.0),
        (b"2025-11-20T11:40:10.5Z stdout F words without a stamp\n", 1763638810.5),
        (b"[11:40:10] Decode batch\n", None),
        (b"no time at all\n", None),
        (b"", None),
    ],
)
def test_the_last_dated_line_gives_when_a_log_was_written_last(text: bytes, printed: float | None) -> None:
    assert last_printed(text) == printed


def test_sglangs_own_stamps_count_where_a_runtime_prints_times_of_another_zone() -> None:
    stamped = b"2025-11-20T09:40:10.5Z stdout F [2025-11-20 11:40:10] Load weight begin. avail mem=1 GB\n"
    unstamped = b"2025-11-20T09:40:11.5Z stdout F a line without a stamp\n"
    assert last_printed(stamped + unstamped) == 1763638810.0


def test_a_log_printed_in_another_zone_has_that_zones_offset(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_bytes(b"[2025-11-20 11:40:10] Load weight begin. avail mem=1 GB\n")
    os.utime(log, (1763638810.0 - 7200, 1763638810.0 - 7200))
    assert offset_of(str(log)) == -7200
