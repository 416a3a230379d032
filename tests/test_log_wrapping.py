"""The wrapping of a stream is learned: events and times are those of the bare lines, whatever the wrapping."""

from __future__ import annotations

import datetime as dt
import gzip
import io
import json
import re
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.recordings.scrub import LogScrubber, Scrubber
from sglang_tuning_exporter.report.inputs import Logs
from sglang_tuning_exporter.sglang.events import Event, OutOfMemory, PrefillBatch, Retraction, ServerArgs
from sglang_tuning_exporter.sglang.log import wrapping
from sglang_tuning_exporter.sglang.log.reader import LogReader
from sglang_tuning_exporter.sglang.log.stamps import stamp_seconds
from wrappings import AMID, AROUND, INSTEAD, otlp

RECORDING = Path(__file__).parent / "recordings" / "v0.5.9-retract" / "server.log.gz"
DIALECTS = sorted((Path(__file__).parent / "data" / "logs").glob("*.log"))
STARTED = dt.datetime(2026, 11, 20, 19, 50, 0)  # noqa: DTZ001 - as a server prints it, without a zone
PRINTED = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
RETRACTION = "KV cache pool is full. Retract requests. #retracted_reqs: 99, #new_token_ratio: 0.1000 -> 0.9000"
DECODE = "Decode batch, #running-req: 7, #token: 900, token usage: 0.90, gen throughput (token/s): 87.00, #queue-req: 7"


def numbered(lines: list[str]) -> list[tuple[str, int, dt.datetime]]:
    """Give each line its number and the time last printed."""
    found, when = [], STARTED
    for number, line in enumerate(lines, 1):
        if match := PRINTED.match(line):
            when = dt.datetime.fromisoformat(match[1])
        found.append((line, number, when))
    return found


@cache
def recorded() -> list[tuple[str, int, dt.datetime]]:
    return numbered(gzip.decompress(RECORDING.read_bytes()).decode().splitlines())


def wrapped(name: str, lines: list[tuple[str, int, dt.datetime]]) -> bytes:
    wrap = (AROUND | INSTEAD | AMID)[name]
    return ("\n".join(wrap(*line) for line in lines) + "\n").encode()


def read(text: bytes, *, strict: bool = False) -> list[Event]:
    return unmarked(LogReader(strict=strict).feed(text))


def unmarked(events: list[Event]) -> list[Event]:
    """Remove the mark for suspect lines: the first lines of a form are read before the form is learned."""
    for event in events:
        event.suspect = False
        if isinstance(event, Retraction):
            event.near_raw_text = False
    return events


@cache
def expected() -> list[Event]:
    return read(wrapped("nothing", recorded()))


@pytest.mark.parametrize("name", [*AROUND, *AMID])
def test_in_any_wrapping_the_events_and_times_are_those_of_the_bare_log(name: str) -> None:
    assert len(expected()) > 700
    assert read(wrapped(name, recorded())) == expected()


@cache
def times_until_a_failure(name: str, hours: int) -> list[float | None]:
    """The times of the events of a log that ends with a failure, under a shipper whose clock is ahead of the server's."""
    failure = [
        "Traceback (most recent call last):",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    ]
    lines = [*recorded()[:400], *((line, 401 + place, recorded()[399][2]) for place, line in enumerate(failure))]
    ahead = [(line, number, time + dt.timedelta(hours=hours)) for line, number, time in lines]
    return [event.time for event in read(wrapped(name, ahead))]


@pytest.mark.parametrize("name", AROUND)
def test_a_failure_without_a_prefix_has_no_time_of_another_time_zone(name: str) -> None:
    bare = times_until_a_failure("nothing", 0)
    assert bare[-1] == recorded()[399][2].replace(tzinfo=dt.timezone.utc).timestamp()
    assert times_until_a_failure(name, 8) == bare


# These print text behind each line, or differ between lines that match a search and others: no shipper that cuts lines does.
AROUND_WHOLE_LINES = {
    "grep -C",
    "rg -C",
    "Python's bytes",
    "otel debug exporter",
    "html",
    "html escaped",
    "markdown table",
    "trailing tag",
}


@pytest.mark.parametrize("name", sorted(AROUND.keys() - AROUND_WHOLE_LINES))
def test_arguments_in_two_lines_of_a_shipper_are_read_whole(name: str) -> None:
    lines = [
        (line[at : at + 8_000], number, time)
        for line, number, time in recorded()[:400]
        for at in range(0, max(len(line), 1), 8_000)
    ]
    [start] = [event for event in read(wrapped(name, lines)) if isinstance(event, ServerArgs)]
    assert start == next(event for event in expected() if isinstance(event, ServerArgs))
    assert not start.is_cut


@cache
def doubts(wrapping: str) -> list[tuple[bool, bool]]:
    events = LogReader().feed(wrapped(wrapping, recorded()))
    return [(event.suspect, event.near_raw_text) for event in events if isinstance(event, Retraction)]


@pytest.mark.parametrize("name", AROUND)
def test_once_the_form_is_learned_no_wrapping_puts_an_event_in_doubt(name: str) -> None:
    bare = doubts("nothing")
    assert (False, False) in bare
    assert doubts(name) == bare


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("size", [1, 2, 7])
def test_every_record_of_a_document_of_several_is_read(size: int, strict: bool) -> None:  # noqa: FBT001 - a case
    lines = recorded()[:300]
    batches = [lines[start : start + size] for start in range(0, len(lines), size)]
    text = "\n".join(otlp([(line, when) for line, _, when in batch]) for batch in batches) + "\n"
    assert read(text.encode(), strict=strict) == read(wrapped("nothing", lines), strict=strict)


@pytest.mark.parametrize("name", INSTEAD)
def test_with_any_text_in_place_of_sglangs_prefix_the_lines_are_read_with_its_time(name: str) -> None:
    events = read(wrapped(name, recorded()))
    assert [type(event) for event in events] == [type(event) for event in expected()]
    assert [int(event.time or 0) for event in events] == [int(event.time or 0) for event in expected()]


@cache
def followed(name: str) -> list[Event]:
    return read(wrapped(name, recorded()[:200]), strict=True)


@pytest.mark.parametrize("name", [*AROUND, *INSTEAD, *AMID])
def test_a_followed_log_gives_in_any_form_the_events_of_the_bare_one(name: str) -> None:
    events, bare = followed(name), followed("nothing")
    assert len(bare) > 60
    if name not in INSTEAD:
        assert events == bare
    else:
        assert [(type(event), int(event.time or 0)) for event in events] == [
            (type(event), int(event.time or 0)) for event in bare
        ]


@pytest.mark.parametrize("name", [*AROUND, *INSTEAD])
def test_a_form_is_learned_the_same_way_line_by_line_and_from_a_whole_file(name: str) -> None:
    lines = wrapped(name, recorded()[:400]).splitlines(keepends=True)
    reader = LogReader()
    singly = [event for line in lines for event in reader.feed(line)]
    assert unmarked(singly) == read(b"".join(lines))


@pytest.mark.parametrize("strict", [False, True])
def test_a_supervisors_header_before_each_output_puts_no_retraction_in_doubt(strict: bool) -> None:  # noqa: FBT001 - a case
    name = "supervisord at loglevel debug"
    first = [f"[2026-11-20 19:51:{second:02d} TP0] Load weight begin. avail mem=21.50 GB" for second in range(3)]
    served = [f"[2026-11-20 19:52:{second:02d} TP0] {(DECODE, RETRACTION)[second % 2]}" for second in range(20)]
    reader = LogReader(strict=strict)
    events = reader.feed(wrapped(name, numbered(first + served)), 1.0 if strict else None)
    found = [event for event in events if isinstance(event, Retraction)]
    assert len(found) == 10
    assert not any(event.suspect or event.near_raw_text for event in found)
    forged = "2026-11-20 19:53:00,001 DEBG 'other' stderr output:\n" + served[1] + "\n"
    [event] = reader.feed(forged.encode(), 2.0 if strict else None)
    assert isinstance(event, Retraction)
    assert event.near_raw_text


@pytest.mark.parametrize("indent", [2, "\t"])
@pytest.mark.parametrize("strict", [False, True])
def test_the_other_fields_of_a_record_over_several_lines_put_no_retraction_in_doubt(
    indent: int | str,
    strict: bool,  # noqa: FBT001 - a case
) -> None:
    records = (
        {"insertId": f"x{number}y", "labels": {"pod": "s-0"}, "textPayload": line, "severity": "ERROR"}
        for number, (line, _, _) in enumerate(recorded())
    )
    text = "\n".join(json.dumps(record, indent=indent) for record in records)
    retractions = [event for event in LogReader(strict=strict).feed(text.encode()) if isinstance(event, Retraction)]
    assert retractions
    assert not any(event.suspect for event in retractions)


def test_a_prefix_of_ranks_within_a_custom_formatter_is_the_rank() -> None:
    line = "2026-03-18 11:22:05.874 INFO 120984 [ DP1 TP3 scheduler_metrics_mixin.py:415] " + DECODE
    [event] = read(line.encode())
    assert (event.rank.dp, event.rank.tp) == (1, 3)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "form",
    [
        "2026-03-18 11:22:05 INFO {ranks} ",
        "2026-03-18 11:22:05.874 INFO 120984 [ {ranks} scheduler_metrics_mixin.py:415] ",
        "[INFO][2026-03-18 11:22:05][pid=12][{ranks}] ",
        "[2026-03-18 11:22:05 {ranks}] [thread=MainThread] ",
        "[2026-03-18 11:22:05 {ranks}] INFO scheduler.py:9: ",
    ],
)
def test_lines_with_ranks_and_without_are_read_in_one_form(form: str, strict: bool) -> None:  # noqa: FBT001 - a case
    ready = "The server is fired up and ready to roll!"
    lines = [(ranks, DECODE) for ranks in 10 * ["DP0 TP0", "DP1 TP0"]] + 20 * [("", ready)]
    text = "".join(form.format(ranks=ranks).replace(" ]", "]") + words + "\n" for ranks, words in lines)
    events = read(text.encode(), strict=strict)
    assert [event.rank.dp for event in events] == 10 * [0, 1] + 20 * [None]


def test_several_forms_in_one_paste_are_all_read() -> None:
    lines = recorded()[300:]
    paste = b"".join(
        wrapped(name, lines[start : start + 100])
        for name, start in (("nothing", 0), ("stern", 100), ("GCP", 200), ("indented paste", 300))
    )
    assert read(paste) == read(wrapped("nothing", lines[:400]))


def test_a_traceback_in_a_wrapped_log_is_one_failure() -> None:
    failure = (
        "[2026-11-20 19:51:18 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "x.py", line 1, in event_loop_normal\n  File "y.py", line 2, in forward_extend\n'
        "torch.OutOfMemoryError: CUDA out of memory."
    )
    lines = numbered([f"[2026-11-20 19:51:17 TP0] {DECODE}", *failure.splitlines()])
    for name in ("nothing", "stern", "torchrun", "indented paste", "GCP", "CSV", "slurm srun -l", "syslog 5424"):
        found = [event for event in read(wrapped(name, lines)) if isinstance(event, OutOfMemory)]
        assert [(event.phase, event.rank.tp) for event in found] == [("prefill", 0)], name


FORGERIES = (
    "tail of a line cut by rotation: text='previous.\\n[2025-11-20 11:41:40 TP0] " + RETRACTION,
    "[2026-11-20 19:51:18 TP0] Receive: obj=GenerateReqInput(text='a\\nstern pod [2025-11-20 11:41:40 TP0] "
    + RETRACTION,
    '{"message": "[2025-11-20 11:41:40 TP0] ' + RETRACTION + '"}',
    json.dumps({"timestamp": "2026-11-20T19:51:18", "event": "request.received", "obj": {"text": RETRACTION}}),
    json.dumps({"ts": 1795204278, "messages": [{"content": "[2025-11-20 11:41:40 TP0] " + RETRACTION}]}),
    "Tell me what this means: [2025-11-20 11:41:40 TP0] " + RETRACTION,
    'INFO:     1.2.3.4:5 - "GET /?[2025-11-20 11:41:40 TP0] ' + RETRACTION + ' HTTP/1.1" 200 OK',
    'prompt="[2025-11-20 11:41:40 TP0] ' + RETRACTION + '"',
)


@pytest.mark.parametrize("forgery", FORGERIES)
@pytest.mark.parametrize("name", ["nothing", "stern", "kubernetes", "GCP", "custom formatter", "indented paste"])
def test_a_quoted_line_inside_a_message_is_no_event_in_any_form(name: str, forgery: str) -> None:
    real = [f"[2026-11-20 19:51:{second:02d} TP0] {DECODE}" for second in range(10, 14)]
    events = read(wrapped(name, numbered([*real, forgery, *real])))
    assert len(events) == 8


@pytest.mark.parametrize("name", ["stern --timestamps", "GCP", "Loki JSONL", "syslog 5424", "CSV", "kubernetes"])
def test_a_time_around_a_line_does_not_stand_for_sglangs_own(name: str) -> None:
    real = [f"[2026-11-20 19:51:{second:02d} TP0] {DECODE}" for second in range(10, 14)]
    raw = ["[2026-11-20 19:51:14 TP0] Parsed value 'x", RETRACTION, "server_args=ServerArgs(tp_size=1)"]
    assert len(read(wrapped(name, numbered([*real, *raw, *real])))) == 8


BAR = "Capturing batches (bs=1 avail_mem=9.87 GB): 100%|#####| 36/36 [00:21<00:00,  1.69it/s]"
REAL = f"[2026-11-20 19:51:10 TP0] {DECODE}"


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("between", ["", "\r", " ", "\r\r", f"\r{BAR}\r"])
def test_an_exceptions_words_are_no_line_however_they_are_glued(between: str, strict: bool) -> None:  # noqa: FBT001
    raised = f"ValueError: bad x{between}[2026-11-20 19:51:11 TP0] {RETRACTION}"
    frames = ["Traceback (most recent call last):", '  File "x.py", line 1, in f']
    text = "\n".join([REAL, *frames, raised, REAL])
    assert len(LogReader(strict=strict).feed(text.encode())) == 2


@pytest.mark.parametrize("before", ["any words", "See https://example.com/a", "100% of it: it/s ", "x\r", f"x{BAR}\ry"])
def test_of_a_log_that_is_followed_a_line_is_glued_behind_a_progress_bar_only(before: str) -> None:
    forged = f"{before}[2026-11-20 19:51:11 TP0] {RETRACTION}"
    assert len(LogReader(strict=True).feed(f"{REAL}\n{forged}\n{REAL}\n".encode())) == 2
    for bar in (BAR, f"\r{BAR}\r", f"\r{BAR}", "  0%|          | 0/36 [00:00<?, ?it/s]\r"):
        real = f"{bar}[2026-11-20 19:51:11 TP0] {RETRACTION}"
        assert len(LogReader(strict=True).feed(f"{REAL}\n{real}\n{REAL}\n".encode())) == 3


@pytest.mark.parametrize("name", ["stern", "GCP", "kubetail", "CSV"])
def test_a_followed_log_has_another_form_only_after_many_lines_and_none_of_them_is_lost(name: str) -> None:
    lines = numbered([f"[2026-11-20 19:51:{second:02d} TP0] {DECODE}" for second in range(40)])
    for other, events in ((15, 20), (16, 36), (20, 40)):
        reader = LogReader(strict=True)
        text = wrapped("nothing", lines[:20]) + wrapped(name, lines[20 : 20 + other])
        assert len(reader.feed(text)) == events


@settings(max_examples=60)
@given(
    st.sampled_from([*AROUND]),
    st.sampled_from(DIALECTS),
    st.lists(st.tuples(st.integers(0, 60), st.sampled_from(FORGERIES)), max_size=2),
)
def test_any_release_in_any_form_with_quoted_lines_between_gives_its_own_events(
    name: str, dialect: Path, forgeries: list[tuple[int, str]]
) -> None:
    lines = [line for line in dialect.read_text(encoding="utf-8").splitlines()[:120] if line.startswith("[")]
    mixed = list(lines)
    for place, forgery in forgeries:
        mixed.insert(min(place + 4, len(mixed)), forgery)
    for strict in (False, True):
        events = read(wrapped(name, numbered(mixed)), strict=strict)
        bare = read(wrapped("nothing", numbered(lines)), strict=strict)
        assert [(type(event), event.time) for event in events] == [(type(event), event.time) for event in bare]


@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("strict", [False, True])
def test_the_log_of_every_release_in_any_form_gives_its_own_events(name: str, strict: bool) -> None:  # noqa: FBT001 - a case
    for dialect in DIALECTS[sorted(AROUND).index(name) % 4 :: 4]:  # each of them in a quarter of the forms
        lines = [line for line in dialect.read_text(encoding="utf-8").splitlines()[:120] if line.startswith("[")]
        events = read(wrapped(name, numbered(lines)), strict=strict)
        bare = read(wrapped("nothing", numbered(lines)), strict=strict)
        assert [(type(event), event.time) for event in events] == [(type(event), event.time) for event in bare], dialect


def test_lines_in_a_form_that_cannot_be_learned_are_quoted_instead_of_denied() -> None:
    reader = LogReader()
    line = b"x\\y{{{ " + DECODE.encode() + b"\n"
    assert reader.feed(line) == []
    assert reader.unread == line.rstrip()


def test_a_report_quotes_the_first_line_of_a_form_that_cannot_be_learned() -> None:
    text = f"x\\y{{{{{{ {DECODE}\n".encode() * 3
    with pytest.raises(UsageError) as raised:
        list(Logs(["-"], io.BytesIO(text)).events())
    assert DECODE in str(raised.value)
    assert "no line of SGLang's" not in str(raised.value)


@pytest.mark.parametrize("name", ["stern", "GCP", "syslog 5424", "custom formatter", "custom formatter with a host"])
def test_a_recording_keeps_nothing_of_the_wrapping_of_a_line(name: str) -> None:
    scrubber = LogScrubber(Scrubber())
    lines = [f"[2026-11-20 19:51:{second:02d}] {DECODE}" for second in range(10, 20)]
    if name.endswith("host"):
        texts = [f"2026-11-20 19:51:{second:02d} gpu-01 scheduler: {DECODE}".encode() for second in range(10, 20)]
    else:
        texts = wrapped(name, numbered(lines)).splitlines()
    kept = [kept for text in texts if (kept := scrubber.line(text)) is not None]
    assert kept == [line.encode() + b"\n" for line in lines]


def test_memory_for_a_stream_is_bounded() -> None:
    reader = LogReader()
    reader.feed(f"[2026-11-20 19:51:18 TP0] {DECODE}\n".encode())
    for number in range(3000):
        marks = "".join("!?;^"[number // 4**place % 4] for place in range(6))
        reader.feed(f"a{marks} [2025-11-20 11:41:40 TP0] {RETRACTION}\n".encode())
    learned = reader.wrapping
    assert len(learned._shapes) <= wrapping._SHAPES_KEPT
    assert len(learned._waiting) <= wrapping._WAITING
    assert sum(len(wait.lines) for wait in learned._waiting.values()) <= wrapping._WAITING * wrapping._CONFIRMED


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (b"2026-11-20T19:51:18Z", 1795204278.0),
        (b"2026-11-20 19:51:18,250", 1795204278.25),
        (b"2026/11/20 19:51:18.5", 1795204278.5),
        (b"2026-11-20T19:51:18+08:00", 1795204278.0 - 8 * 3600),
        (b"1795204278", 1795204278.0),
        (b"1795204278.5", 1795204278.5),
        (b"1795204278500", 1795204278.5),
        (b"1795204278500000", 1795204278.5),
        (b"1795204278500000000", 1795204278.5),
        (b"Nov 20 2026 19:51:18", 1795204278.0),
        (b"20 Nov 2026 19:51:18 GMT", 1795204278.0),
        (b"20/Nov/2026:19:51:18 +0800", 1795204278.0 - 8 * 3600),
        (b"11/20/2026 07:51:18 PM", 1795204278.0),
        (b"11/20/2026 12:51:18 AM", 1795135878.0),
        (b"20.11.2026 19:51:18,5", 1795204278.5),
        (b"20261120T195118Z", 1795204278.0),
        (b"20261120-19:51:18.5", 1795204278.5),
        (b"19:51:18", 71478.0),
        (b"20/11/2026 19:51:18", None),
        (b"19:51:18:20", None),
        (b"202611201951180000000", None),
        (b"2026-13-40 19:51:18", None),
        (b"17952042", None),
        (b"yesterday", None),
    ],
)
def test_a_time_is_read_however_it_is_printed(text: bytes, seconds: float | None) -> None:
    assert stamp_seconds(text) == seconds


def test_a_time_of_day_alone_goes_on_after_midnight_as_sglangs_own_does() -> None:
    words = "Decode batch, #running-req: 1, #token: 9, token usage: 0.01, cuda graph: True, gen throughput (token/s): 9.0, #queue-req: 0"
    times = ["23:59:58", "23:59:59", "00:00:01"]
    events = LogReader().feed("".join(f"{time} [INFO] {words}\n" for time in times).encode())
    assert [event.time for event in events] == [86398.0, 86399.0, 86401.0]


def test_a_duration_in_a_structured_line_is_no_time() -> None:
    words = "KV cache pool is full. Retract requests. #retracted_reqs: 3"
    [event] = LogReader().feed(json.dumps({"level": "info", "uptime": "00:10:11", "message": words}).encode())
    assert event.time is None


def test_a_time_without_a_year_is_the_last_such_day() -> None:
    now = dt.datetime.now(dt.timezone.utc)
    found = stamp_seconds(f"{now:%b} {now.day:2d} 00:00:00".encode())
    assert found == now.replace(hour=0, minute=0, second=0, microsecond=0).timestamp()
    later = now + dt.timedelta(days=40)
    found = stamp_seconds(f"{later:%b} {later.day:2d} 00:00:00".encode())
    assert found is None or found < now.timestamp()


@pytest.mark.parametrize(
    "line",
    [
        "new fill batch. #seq: 7. #cached_token: 1541. #new_token: 4. #remaining_req: 3. #running_req: 2",
        (
            "GPU: 0 new fill batch. #seq: 7. #cached_token: 1541. #new_token: 4. #remaining_req: 3. #running_req: 2. "
            "tree_cache_hit_rate: 12.50%."
        ),
    ],
)
def test_the_fill_batch_line_of_the_first_releases_is_a_prefill_line(line: str) -> None:
    reader = LogReader()
    [event] = reader.feed(line.encode())
    assert isinstance(event, PrefillBatch)
    assert (event.new_sequences, event.new_tokens, event.cached_tokens, event.queued, event.running) == (
        7,
        4,
        1541,
        3,
        2,
    )
    assert reader.counts["prefill"] == 1
    assert not any(reader.unrecognised.values())
