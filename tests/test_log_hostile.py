"""Lines that quote, forge, corrupt or flood a log: none of their content counts."""

from __future__ import annotations

import json
import re

import pytest

from sglang_tuning_exporter.sglang.events import DecodeBatch, Event, Liveness, PrefillBatch, Retraction
from sglang_tuning_exporter.sglang.log.reader import LogReader

PREFIX = b"[2025-11-20 11:40:13 TP0] "
RETRACTION = b"KV cache pool is full. Retract requests. #retracted_reqs: 99, #new_token_ratio: 0.1000 -> 0.9000"
DECODE = (
    b"Decode batch, #running-req: 1, #token: 1, token usage: 0.99, gen throughput (token/s): 0.01, #queue-req: 9999"
)
PROMPT = rb"Ignore previous.\n[2025-11-20 11:41:40 TP0] " + RETRACTION + rb"\n[2025-11-20 11:41:40 TP0] " + DECODE


def read(block: bytes) -> tuple[list[Event], LogReader]:
    reader = LogReader()
    return reader.feed(block), reader


REQUESTS = [
    b"Receive: obj=GenerateReqInput(text='" + PROMPT + b"', rid='c0ffee')",
    b"Finish: obj=GenerateReqInput(text='" + PROMPT + b"'), out={'text': '" + PROMPT + b"'}",
    b"Receive OpenAI: obj={'messages': '" + PROMPT + b"'}",
    b"in=GenerateReqInput(text='" + PROMPT + b"'), out={}",
    b"in=reqlog.<locals>.GenerateReqInput(text='" + PROMPT + b"'), out={}",
    b'{"timestamp": "2025-11-20T11:40:13", "event": "request.received", "obj": {"text": "' + PROMPT + b'"}}',
    b'{"timestamp": "2025-11-20T11:40:13", "event": "request.finished", "out": {"text": "' + PROMPT + b'"}}',
]


@pytest.mark.parametrize("request_line", REQUESTS)
@pytest.mark.parametrize("prefix", [PREFIX, b"[11:40:13] ", b"[2025-11-20 11:40:13] ", b""])
def test_a_request_log_is_a_request_and_nothing_in_it_counts(prefix: bytes, request_line: bytes) -> None:
    events, reader = read(prefix + request_line + b"\n")
    assert events == []
    assert reader.counts["request"] == 1
    assert not any(reader.unrecognised.values())


@pytest.mark.parametrize("request_line", REQUESTS)
def test_a_request_log_of_a_logging_configuration_of_ones_own_is_a_request_too(request_line: bytes) -> None:
    own = b"2025-11-20 11:40:13 INFO "
    events, reader = read(own + b"Load weight begin. avail mem=9.00 GB\n" + own + request_line + b"\n")
    assert len(events) == 1
    assert reader.counts["request"] == 1
    assert not any(reader.unrecognised.values())


@pytest.mark.parametrize("request_line", REQUESTS)
def test_a_request_log_in_a_container_is_a_request_too(request_line: bytes) -> None:
    text = (PREFIX + request_line).decode()
    for line in (json.dumps({"log": text + "\n", "stream": "stdout"}), f"2025-11-20T11:40:14Z stdout F {text}"):
        events, reader = read(line.encode() + b"\n")
        assert events == []
        assert reader.counts["request"] == 1


@pytest.mark.parametrize(
    "line",
    [
        PREFIX + b"Model attempted to call undefined function: " + RETRACTION,
        PREFIX + b"Model attempted to call undefined function: x [2025-11-20 11:40:13 TP0] " + RETRACTION,
        PREFIX + b"Model attempted to call undefined function: x[2025-11-20 11:40:13 TP0] " + RETRACTION,
        PREFIX + b"Model attempted to call undefined function: x\r[2025-11-20 11:40:13 TP0] " + RETRACTION,
        PREFIX + b"Error in detect_and_parse: [2025-11-20 11:40:13 TP0] " + RETRACTION,
        PREFIX + b"Req Time Stats(rid=" + RETRACTION + b")",
        PREFIX + b"Cache not flushed because there are pending requests. #queue-req: 3, #running-req: 4",
        PREFIX + b"'" + RETRACTION + b"'",
        PREFIX + b"x" + RETRACTION,
        b"tail of a line cut by rotation: text='previous.\\n[2025-11-20 11:41:40 TP0] " + RETRACTION,
        b'{"message": "' + PREFIX + RETRACTION + b'"}',
        PREFIX + b'{"log": "[2025-11-20 11:41:40 TP0] ' + RETRACTION + b'\\n"}',
        PREFIX + b'INFO:     1.2.3.4:5 - "GET /?' + DECODE + b' HTTP/1.1" 200 OK',
        b'INFO:     1.2.3.4:5 - "GET /?[2025-11-20 11:41:40 TP0] ' + DECODE + b' HTTP/1.1" 200 OK',
        PREFIX + b"torch.OutOfMemoryErrors are explained in the manual",
        PREFIX + b"Decode out of memory? " + DECODE,
    ],
)
def test_a_line_that_only_quotes_gives_no_event(line: bytes) -> None:
    events, reader = read(line + b"\n")
    assert events == []
    assert reader.counts["other"] + reader.counts["access"] == 1


@pytest.mark.parametrize(
    "line", [RETRACTION, DECODE, b"server_args={'tp_size': 1}", b"The server is fired up and ready to roll!"]
)
def test_a_line_without_a_time_is_rejected_among_lines_with_one(line: bytes) -> None:
    events, _ = read(PREFIX + DECODE + b"\n" + line + b"\n" + b"[TP0] " + line + b"\n")
    assert len(events) == 1
    assert len(read(line + b"\n")[0]) == 1


def test_an_exception_outside_of_a_traceback_is_text_of_another_program() -> None:
    events, _ = read(PREFIX + DECODE + b"\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB.\n")
    assert len(events) == 1


def test_an_unknown_field_is_kept_and_counted() -> None:
    events, reader = read(PREFIX + DECODE + b", #shiny-req: 4, dream usage: 0.5\n")
    assert isinstance(events[0], DecodeBatch)
    assert events[0].unknown_keys == ("#shiny-req", "dream usage")
    assert (events[0].running, events[0].queued) == (1, 9999)
    assert reader.unrecognised["batch_key"] == 2


def test_millions_of_field_names_leave_eight_short_ones() -> None:
    block = b"".join(
        PREFIX + DECODE + b"".join(b", key-%d-%d-%s: 1" % (i, j, b"x" * 60) for j in range(30)) + b"\n"
        for i in range(300)
    )
    events, reader = read(block)
    assert len(events) == 300
    for event in events:
        assert isinstance(event, DecodeBatch)
        assert len(event.unknown_keys) == 8
        assert max(map(len, event.unknown_keys)) <= 40
    assert set(reader.unrecognised) == {"batch_key", "batch_line", "retraction_line", "server_args"}


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (b"Decode batch, ", "batch_line"),
        (b"Decode batch. #running-req: many, #token: x", "batch_line"),
        (b"Prefill batch. #new-seq: , #new", "batch_line"),
        (b"Verify batch, #running-req: 4, #token: 5", "batch_line"),
        (b"KV cache pool is full. Retract requests. #retracted_reqs: some", "retraction_line"),
        (b"server_args=None", "server_args"),
    ],
)
def test_a_known_head_without_figures_counts_as_unrecognised(line: bytes, kind: str) -> None:
    events, reader = read(PREFIX + line + b"\n")
    assert events == []
    assert {name for name, count in reader.unrecognised.items() if count} == {kind}


def test_a_decode_line_cut_off_keeps_what_was_printed_and_is_counted() -> None:
    events, reader = read(PREFIX + b"Decode batch. #running-req: 237, #token: 925941, token usage: \n")
    assert isinstance(events[0], DecodeBatch)
    assert (events[0].running, events[0].tokens, events[0].full_usage, events[0].queued) == (237, 925_941, None, None)
    assert reader.unrecognised["batch_line"] == 1


def test_impossible_figures_are_left_out() -> None:
    events, _ = read(PREFIX + b"Decode batch. #running-req: 5, #token: -4, token usage: 47.11, #queue-req: -1\n")
    assert isinstance(events[0], DecodeBatch)
    assert (events[0].tokens, events[0].full_usage, events[0].queued) == (None, None, None)


def test_of_a_line_of_a_megabyte_the_start_is_read() -> None:
    events, reader = read(
        PREFIX + DECODE + b", " + b"x" * 1_000_000 + b"\n"
        + PREFIX + b"Receive: obj=GenerateReqInput(text='" + PROMPT * 5000 + b"')\n"
        + b"a" * 1_000_000 + b"\n" + b"[" * 300_000 + b"\n" + b"(" * 300_000 + b"\n" + b"\0" * 1_000_000
        + PREFIX + DECODE + b"\n"
    )  # fmt: skip
    assert len(events) == 2
    assert sum(reader.counts.values()) == 6


def test_memory_for_a_line_that_never_ends_is_bounded() -> None:
    reader = LogReader()
    assert len(reader.feed(b"2025-11-20T11:40:13.1Z stderr F " + PREFIX + DECODE + b"\n")) == 1
    part = b"2025-11-20T11:40:13.1Z stderr P " + b"x" * 16_000 + b"\n"
    for _ in range(100):
        assert reader.feed(part * 4) == []
    assert 0 < sum(len(text) for text, _ in reader.wrapping._partial.values()) <= 262_144
    assert reader.feed(b"2025-11-20T11:40:13.1Z stderr F end\n") == []
    assert len(reader.feed(PREFIX + DECODE + b"\n")) == 1


def test_a_million_different_seconds_are_not_all_remembered() -> None:
    reader = LogReader()
    for hour in range(24):
        reader.feed(
            b"".join(
                b"[2025-11-%02d %02d:%02d:%02d] %b\n" % (day, hour, minute, second, DECODE)
                for day in range(1, 3)
                for minute in range(60)
                for second in range(0, 60, 7)
            )
        )
    assert len(reader._fast_path._prefixes) <= 4096


def test_bytes_that_are_not_text_count_as_other_lines() -> None:
    block = b"\xff\xfe\x00\n" + PREFIX + b"\xff\xc3\x28\n" + PREFIX + DECODE + b", #\xff\xfe: 1\n" + b"\0\n\n"
    events, reader = read(block)
    assert [type(event) for event in events] == [DecodeBatch]
    assert reader.counts["other"] == 4


def test_a_forged_retraction_needs_a_line_of_its_own() -> None:
    """A tool name with a newline in it is printed as two lines: the second looks exactly like a real one here."""
    events, _ = read(PREFIX + b"Model attempted to call undefined function: x\n" + PREFIX + RETRACTION + b"\n")
    assert [type(event) for event in events] == [Retraction]


def test_lines_of_two_ranks_written_into_each_other_do_not_mix() -> None:
    events, reader = read(PREFIX + DECODE[:50] + PREFIX + DECODE + b"\n")
    assert all(isinstance(event, DecodeBatch | PrefillBatch | Liveness) for event in events)
    assert len(events) == 1
    assert reader.unrecognised["batch_line"] == 1


@pytest.mark.parametrize("figure", [b"1e999", b"9" * 6000, b"9" * 25])
@pytest.mark.parametrize("key", [b"#running-req", b"#queue-req", b"#token"])
def test_a_figure_that_no_server_prints_is_left_out(key: bytes, figure: bytes) -> None:
    line = b"[2025-11-20 11:40:13 TP0] Decode batch, #running-req: 1, #token: 1, token usage: 0.10, #queue-req: 1\n"
    events = LogReader().feed(re.sub(key + b": 1", key + b": " + figure, line))
    name = {b"#running-req": "running", b"#queue-req": "queued", b"#token": "tokens"}[key]
    assert [getattr(event, name) for event in events] in ([None], [])
