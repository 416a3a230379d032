"""Text copied from a terminal, which cut its lines at its width, is read as the log it was."""

from __future__ import annotations

import gzip
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sglang_tuning_exporter.report.texts import rejoined

if TYPE_CHECKING:
    pass

RECORDINGS = Path(__file__).parent / "recordings"
RETRACT = RECORDINGS / "v0.5.9-retract" / "server.log.gz"


@cache
def recorded(path: Path = RETRACT) -> bytes:
    return gzip.decompress(path.read_bytes())


@pytest.mark.parametrize("path", sorted(RECORDINGS.glob("*/server.log.gz")), ids=lambda path: path.parent.name)
@pytest.mark.parametrize(
    "part", [slice(None), slice(-20_000, None), slice(-2_000, None)], ids=["whole", "end", "last lines"]
)
def test_a_log_whose_lines_are_whole_stays_as_it_is(path: Path, part: slice) -> None:
    text = recorded(path)[part]
    notes: list[str] = []
    assert b"".join(rejoined(iter([text]), notes.append)) == text
    assert notes == []


def test_lines_of_one_length_stay_lines_of_their_own() -> None:
    line = b"[2026-11-20 19:25:46] Decode batch, #running-req: 8, #token: 1500, token usage: 0.97, gen throughput (token/s): 87.00, #queue-req: 7\n"
    assert b"".join(rejoined(iter([line * 100]), print)) == line * 100
