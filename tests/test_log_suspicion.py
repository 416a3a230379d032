"""Lines that may be text of a request or a model are still events, but marked as suspect and counted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from sglang_tuning_exporter.sglang.events import DecodeBatch, Event, OutOfMemory, PrefillBatch, Retraction
from sglang_tuning_exporter.sglang.log.fast_path import BatchRun
from sglang_tuning_exporter.sglang.log.reader import LogReader

AT = b"[2025-11-20 11:40:13 TP0] "
LATER = b"[2025-11-20 11:40:16 TP0] "
TOOL = AT + b"Model attempted to call undefined function: x\n"
DECODE = (
    b"Decode batch, #running-req: 5, #token: 900, token usage: 0.90, cuda graph: True, "
    b"gen throughput (token/s): 87.00, #queue-req: 7\n"
)
PREFILL = (
    b"Prefill batch, #new-seq: 1, #new-token: 24, #cached-token: 0, token usage: 0.38, #running-req: 2, "
    b"#queue-req: 21, cuda graph: False, input throughput (token/s): 18.00\n"
)
RETRACTION = b"KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_token_ratio: 0.1000 -> 0.9000\n"
OUT_OF_MEMORY = b"Decode out of memory. Try to lower your batch size.\n"
ACCESS = b'[2025-11-20 11:40:13] INFO:     10.0.0.1:5000 - "POST /generate HTTP/1.1" 200 OK\n'


def read(block: bytes) -> tuple[list[Event], LogReader]:
    reader = LogReader()
    return reader.feed(block), reader


def suspicions(events: Sequence[Event | BatchRun]) -> list[bool]:
    return [
        event.suspect for event in events if isinstance(event, DecodeBatch | PrefillBatch | Retraction | OutOfMemory)
    ]


@pytest.mark.parametrize("line", [DECODE, PREFILL, RETRACTION, OUT_OF_MEMORY])
def test_lines_after_a_tools_name_are_suspect(line: bytes) -> None:
    assert suspicions(read(AT + line + TOOL + AT + line)[0]) == [False, True]


@pytest.mark.parametrize(
    "sink",
    [
        b"Model attempted to call undefined function: x",
        b"Error in detect_and_parse: Expecting value",
        b"Req Time Stats(rid=abc",
        b"Req(rid=abc",
        b"self.cur_batch.reqs=[Req(rid=abc",
    ],
)
@pytest.mark.parametrize("prefix", [AT, b"[2025-11-20 11:40:13] ", b"2025-11-20T11:40:13Z stdout F " + AT])
def test_every_message_with_a_raw_text_in_it_makes_the_next_lines_suspect(prefix: bytes, sink: bytes) -> None:
    assert suspicions(read(prefix + sink + b"\n" + AT + RETRACTION)[0]) == [True]


@pytest.mark.parametrize(
    "line",
    [
        b"Receive: obj=GenerateReqInput(rid='x', text='Model attempted to call undefined function: y Req(rid=1')\n",
        b"Finish: obj=GenerateReqInput(text='Req(rid=1'), out={'text': 'Req(rid=1'}\n",
        b"Loaded 3 functions. Model attempted to call undefined function: never\n",
    ],
)
def test_a_message_that_only_quotes_such_a_message_does_not(line: bytes) -> None:
    assert suspicions(read(AT + line + AT + RETRACTION)[0]) == [False]


def test_a_made_up_time_does_not_end_the_suspicion() -> None:
    assert suspicions(read(TOOL + b"[2031-01-01 00:00:00 TP0] " + RETRACTION + AT + RETRACTION)[0]) == [True, True]


def test_many_lines_in_the_same_second_do_not_end_the_suspicion() -> None:
    assert suspicions(read(TOOL + b"x\n" * 300 + AT + RETRACTION)[0]) == [True]


def test_the_suspicion_ends_when_lines_and_seconds_have_passed() -> None:
    events, _ = read(AT + DECODE + TOOL + (AT + PREFILL) * 64 + LATER + DECODE + LATER + RETRACTION)
    assert suspicions(events) == [False] + [True] * 64 + [False, False]


def test_the_suspicion_ends_in_a_log_that_prints_no_times() -> None:
    tool = b"Model attempted to call undefined function: x\n"
    assert suspicions(read(tool + b"x\n" * 63 + RETRACTION + RETRACTION)[0]) == [True, False]


def test_access_lines_pass_like_any_other() -> None:
    assert suspicions(read(TOOL + ACCESS * 70 + LATER + RETRACTION)[0]) == [False]


def test_where_a_block_ends_does_not_end_the_suspicion() -> None:
    reader = LogReader()
    assert reader.feed(AT + DECODE + TOOL) != []
    assert suspicions(reader.feed(ACCESS + AT + DECODE)) == [True]


def test_a_whole_line_of_time_stats_makes_nothing_suspect() -> None:
    stats = b"Req Time Stats(rid=abc, input len=24, output len=600, type=unified): queue_duration=0.1ms\n"
    assert suspicions(read(AT + stats + AT + RETRACTION)[0]) == [False]


def test_a_forged_start_is_suspect() -> None:
    start = b"[2025-11-20 11:40:13] server_args={'tp_size': 1}\n"
    limits = b"[2025-11-20 11:40:13] max_total_num_tokens=1, max_running_requests=1, context_len=1\n"
    events, _ = read(TOOL + start + limits)
    assert [event.suspect for event in events] == [True, True]


def test_a_traceback_is_suspect_unless_a_scheduler_announced_it_with_no_words_near() -> None:
    bare = b'Traceback (most recent call last):\n  File "x.py", line 1, in f\ntorch.OutOfMemoryError: CUDA\n'
    announced = AT + b"Scheduler hit an exception: " + bare
    assert suspicions(read(AT + DECODE + announced)[0]) == [False, False]
    assert suspicions(read(AT + DECODE + bare)[0]) == [False, True]
    assert suspicions(read(AT + DECODE + TOOL + announced)[0]) == [False, True]


def test_suspect_lines_are_never_put_together_with_others() -> None:
    reader = LogReader()
    events = reader.feed_runs((AT + DECODE) * 3 + TOOL + (AT + DECODE) * 2)
    assert [type(event) for event in events] == [BatchRun, DecodeBatch, DecodeBatch]
    assert suspicions(events[1:]) == [True, True]
