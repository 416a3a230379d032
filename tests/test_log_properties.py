"""Properties of any log: reading raises nothing, and the events do not depend on where a block of bytes ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_tuning_exporter.sglang.events import LINE_KINDS
from sglang_tuning_exporter.sglang.log.reader import LogReader

LOGS = Path(__file__).parent / "data" / "logs"
WHOLE = b"".join(path.read_bytes() for path in sorted(LOGS.glob("*.log")))
LINES = WHOLE.splitlines(keepends=True)
PIECES = st.sampled_from(
    [
        *(
            b"[2025-11-20 11:40:13 TP0] ",
            b"[11:40:13] ",
            b"Decode batch, ",
            b"Prefill batch. ",
            b"#running-req: 5, ",
            b"#token: ",
        ),
        *(
            b"token usage: 0.5, ",
            b"KV cache pool is full. Retract requests. ",
            b"#retracted_reqs: 1",
            b"server_args={'a': ",
        ),
        *(
            b"Traceback (most recent call last):",
            b"\n",
            b'  File "x.py", line 1, in f\n',
            b"torch.OutOfMemoryError: x\n",
            b"\r",
        ),
        *(
            b"2025-11-20T11:40:13Z stderr P ",
            b"2025-11-20T11:40:13Z stderr F ",
            b'{"log":"',
            b'\\n","stream":"stderr"}',
            b"\x1b[3m",
        ),
        *(
            b"(Engine pid=1) ",
            b"Nov 20 11:40:13 host unit[1]: ",
            b"sglang-1  | ",
            b"\0",
            b"\xff",
            b"[2025-",
            b"INFO:     ",
            b' - "',
        ),
        *(
            b"Capture cuda graph bs [1, 2, 4]\n",
            b"Capture cuda graph end. mem usage=1 GB",
            b"max_total_num_tokens=5, ",
            b": ",
            b",",
        ),
    ]
)


@given(st.binary(max_size=400))
def test_any_bytes_are_read(block: bytes) -> None:
    reader = LogReader()
    reader.feed(block)
    assert sum(reader.counts.values()) == len(block.split(b"\n")) - (block.endswith(b"\n") or not block)
    assert set(reader.counts) == set(LINE_KINDS)


@given(st.lists(PIECES | st.binary(max_size=12), max_size=40))
def test_any_mixture_of_known_pieces_is_read(pieces: list[bytes]) -> None:
    block = b"".join(pieces)
    reader = LogReader()
    reader.feed(block)
    assert sum(reader.counts.values()) == len(block.split(b"\n")) - (block.endswith(b"\n") or not block)


@settings(max_examples=60)
@given(st.lists(st.sampled_from(LINES), max_size=25), st.data())
def test_where_a_block_ends_changes_nothing(lines: list[bytes], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(lines)))
    whole, parts = LogReader(), LogReader()
    events = whole.feed(b"".join(lines))
    assert parts.feed(b"".join(lines[:cut])) + parts.feed(b"".join(lines[cut:])) == events
    assert (parts.counts, parts.unrecognised) == (whole.counts, whole.unrecognised)


@settings(max_examples=60)
@given(st.lists(PIECES, max_size=40), st.data())
def test_where_a_block_of_fragments_ends_changes_nothing(pieces: list[bytes], data: st.DataObject) -> None:
    lines = b"".join(pieces).split(b"\n")
    blocks = [line + b"\n" for line in lines]
    cut = data.draw(st.integers(0, len(blocks)))
    whole, parts = LogReader(), LogReader()
    events = whole.feed(b"".join(blocks))
    assert parts.feed(b"".join(blocks[:cut])) + parts.feed(b"".join(blocks[cut:])) == events
    assert parts.counts == whole.counts


def test_line_by_line_gives_what_one_block_gives() -> None:
    whole, parts = LogReader(), LogReader()
    events = [event for line in LINES for event in parts.feed(line)]
    assert events == whole.feed(WHOLE)
    assert parts.counts == whole.counts


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_the_last_line_may_lack_its_newline(newline: bytes) -> None:
    text = newline.join(line.rstrip(b"\n") for line in LINES)
    assert LogReader().feed(text) == LogReader().feed(WHOLE)


def test_an_empty_block_has_no_events() -> None:
    assert LogReader().feed(b"") == []
