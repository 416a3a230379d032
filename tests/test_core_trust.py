"""Every line in SGLang's form counts; close behind text of others it is marked."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_tuning_exporter.core.events import Event
from sglang_tuning_exporter.core.lines import Reader

LOGS = Path(__file__).parent / "data" / "logs"
AT = b"[2025-11-20 11:40:13 TP0] "
LATER = b"[2025-11-20 11:40:16 TP0] "
TOOL = AT + b"Model attempted to call undefined function: x"
DECODE = (
    b"Decode batch, #running-req: 5, #token: 900, token usage: 0.90, cuda graph: True, gen throughput (token/s): 87.00,"
    b" #queue-req: 7"
)
RETRACTION = b"KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_token_ratio: 0.1000 -> 0.9000"
START = b"[2025-11-20 11:40:13] server_args={'tp_size': 1}"
LIMITS = b"[2025-11-20 11:40:13] max_total_num_tokens=1, max_running_requests=1, context_len=1"
ACCESS = b'[2025-11-20 11:40:13] INFO:     10.0.0.1:5000 - "POST /generate HTTP/1.1" 200 OK'
FRAMES = [b"Traceback (most recent call last):", b'  File "x.py", line 1, in f', b"    f()"]
ERROR = b"ValueError: words of a request"


def events(*lines: bytes) -> list[Event]:
    reader = Reader()
    found = [event for line in lines for event in reader.read(line)] + list(reader.end())
    return [event for event in found if event.kind != "words"]


def marks(*lines: bytes) -> list[bool]:
    return [event.marked for event in events(AT + DECODE, *lines)][1:]


@pytest.mark.parametrize(
    "text",
    [
        TOOL,
        AT + b"Receive: obj=GenerateReqInput(text='x')",
        AT + b"Finish: obj=GenerateReqInput(text='x'), out={}",
        AT + b"Received output for rid='x' but the state was deleted",
        AT + b"Req Time Stats(rid=abc",
        AT + b"Multimodal prompt is too long, self.rid='x'",
        AT + b"a warning of a newer release",
        b"a print of a library",
        b"\xff\xfe",
    ],
)
@pytest.mark.parametrize("line", [DECODE, RETRACTION, b"Decode out of memory. Try to lower your batch size."])
def test_behind_a_line_that_can_carry_text_of_others_a_line_counts_and_is_marked(text: bytes, line: bytes) -> None:
    assert marks(AT + line) == [False]
    assert marks(text, AT + line)[-1] is True


@pytest.mark.parametrize(
    "text",
    [
        ACCESS,
        AT + DECODE,
        AT + b"KV Cache VA upper bound. #tokens: 9",
        AT + b"INFO:     Application shutdown complete.",
        b"",
        AT
        + b"Grammar-based generation (regex) is not supported when the server is launched with --grammar-backend none,"
        b" self.rid='a'",
        AT + b"Prefill out of memory. Try to lower your batch size.",
    ],
)
def test_behind_a_line_of_sglangs_without_text_of_others_nothing_is_marked(text: bytes) -> None:
    assert marks(text, AT + RETRACTION)[-1] is False


def test_frames_carry_no_text_and_the_exception_behind_them_does() -> None:
    assert marks(*FRAMES, AT + RETRACTION) == [False]
    assert marks(*FRAMES, ERROR, AT + RETRACTION) == [True]


def test_a_mark_ends_when_lines_and_seconds_have_passed() -> None:
    assert marks(TOOL, *[AT + RETRACTION] * 300) == [True] * 300
    assert marks(TOOL, *[LATER + RETRACTION] * 70) == [True] * 64 + [False] * 6
    assert marks(TOOL, *[ACCESS] * 70, LATER + RETRACTION) == [False]
    assert marks(TOOL, b"[2031-01-01 00:00:00 TP0] " + RETRACTION, AT + RETRACTION) == [True, True]


def test_a_time_that_never_comes_does_not_mark_for_ever() -> None:
    found = marks(b"[2031-01-01 00:00:00] Model attempted to call undefined function: x", *[AT + RETRACTION] * 5000)
    assert sum(found) == 4096


def test_a_line_in_sglangs_form_does_not_end_it() -> None:
    assert marks(TOOL, AT + DECODE, ACCESS, AT + RETRACTION) == [True, True]


def test_before_the_first_line_about_a_request_nothing_is_marked() -> None:
    lines = [b"UserWarning: a library's words", START, AT + b"a warning", LIMITS]
    assert [event.marked for event in events(*lines)] == [False, False]
    assert [event.marked for event in events(*lines, AT + DECODE, b"a print", AT + RETRACTION)] == [
        False,
        False,
        False,
        True,
    ]


def test_after_the_first_batch_of_a_start_lines_are_marked_again() -> None:
    ready = AT + b"The server is fired up and ready to roll!"
    found = events(AT + DECODE, START, AT + b"a warning", ready, AT + DECODE, b"a print", AT + RETRACTION)
    assert [event.marked for event in found] == [False, False, False, False, True]


def test_a_start_that_a_client_can_have_written_is_marked_with_what_follows() -> None:
    assert marks(TOOL, START, LIMITS, AT + RETRACTION) == [True, True, True]


OTHERS = st.one_of(
    st.binary(max_size=60),
    st.text(max_size=60).map(lambda text: text.encode("utf-8", "replace")),
    st.lists(
        st.sampled_from(
            [
                b"user said: ", AT + RETRACTION, b"sglang-1 | ", b"[", b"] ", b"{", b'"', b"'", b"\r", b"\x1b[31m",
                    b"INFO ", b"2025-11-20T11:40:13Z ",
                b"server_args={", b"100%|##|", b"ValueError: ", FRAMES[0], FRAMES[1], TOOL,
            ]
        ),
        min_size=1,
        max_size=5,
    ).map(b"".join),
).map(lambda text: text.replace(b"\n", b" "))  # fmt: skip


def is_of_others(line: bytes) -> bool:
    """Whether a line is not in SGLang's own form, with a container's text around it or without."""
    reader = Reader()
    return not reader.read(line) and not reader.wrapping.is_bare and not reader.wrapping.forms


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(LOGS.glob("*.log"))),
    st.lists(st.tuples(st.integers(0, 60), st.lists(OTHERS.filter(is_of_others), min_size=1, max_size=30)), max_size=4),
)
def test_no_real_event_is_lost_whatever_others_print_between(log: Path, bursts: list[tuple[int, list[bytes]]]) -> None:
    def shown(lines: list[bytes]) -> Counter[str]:
        return Counter(
            f"{event.kind} {event.time} {event.rank} {event.figures}"
            for event in events(*lines)
            if event.kind != "exception"
        )

    honest = [line for line in log.read_bytes().split(b"\n") if line.startswith(b"[")]
    lines = list(honest)
    for place, burst in bursts:
        lines[place:place] = burst
    assert not shown(honest) - shown(lines)
