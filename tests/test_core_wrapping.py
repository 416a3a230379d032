"""The text around SGLang's lines: in every form the events and times are those of the bare lines."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable

import pytest

from sglang_tuning_exporter.core.events import Event
from sglang_tuning_exporter.core.lines import Reader, time_of
from wrappings import AMID, AROUND, INSTEAD, otlp

Shown = tuple[str, float | None, tuple[int | None, ...], tuple[tuple[str, float], ...], str]
STARTED = dt.datetime(2026, 11, 20, 19, 51, 0)  # noqa: DTZ001 - as a server prints it, without a zone
DECODE = "Decode batch, #running-req: 7, #token: 900, token usage: 0.90, gen throughput (token/s): 87.00, #queue-req: 7"
RETRACTION = "KV cache pool is full. Retract requests. #retracted_reqs: 9, #new_token_ratio: 0.1000 -> 0.9000"
MESSAGES = [
    "Load weight begin. avail mem=21.50 GB",
    "server_args=ServerArgs(model_path='/srv/a \"b\"', tp_size=8, schedule_conservativeness=1.0, dtype='auto')",
    "Load weight end. type=LlamaForCausalLM, avail mem=12.25 GB, mem usage=66.46 GB.",
    "KV Cache is allocated. #tokens: 1040384, K size: 19.84 GB, V size: 19.84 GB",
    "Memory pool end. avail mem=11.93 GB",
    "max_total_num_tokens=1040384, max_running_requests=4096, context_len=131072",
    "The server is fired up and ready to roll!",
    DECODE,
    (
        "Prefill batch, #new-seq: 4, #new-token: 6120, #cached-token: 3584, token usage: 0.89, #running-req: 237,"
        " #queue-req: 4"
    ),
    RETRACTION,
    'INFO:     127.0.0.1:40000 - "POST /generate HTTP/1.1" 503 Service Unavailable',
    "a line of no meaning",
    "Scheduler hit an exception: Traceback (most recent call last):",
]
BEHIND = [
    '  File "/srv/x.py", line 12, in event_loop_normal',
    "    self.run_batch(batch)",
    '  File "/srv/y.py", line 3, in forward_extend',
]
LAST = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
FORGED = f"[2025-11-20 11:41:40 TP0] {RETRACTION}"


def stamped(messages: list[str], ranks: str = " TP0") -> list[str]:
    return [f"[2026-11-20 19:51:{second:02d}{ranks}] {message}" for second, message in enumerate(messages)]


LINES = [*stamped(MESSAGES), *BEHIND, LAST, *stamped([DECODE] * 20)]


def around(name: str, lines: list[str], ahead: int = 0) -> list[bytes]:
    """Wrap each line, at the time that it or the one before prints; the shipper's clock is so many hours ahead."""
    wrap: Callable[[str, int, dt.datetime], str] = (AROUND | AMID | INSTEAD)[name]
    found, when = [], STARTED
    for number, line in enumerate(lines, 1):
        if line.startswith("[20"):
            when = dt.datetime.fromisoformat(line[1:20])
        found.append(wrap(line, number, when + dt.timedelta(hours=ahead)))
    return "\n".join(found).encode().split(b"\n")


def events(lines: list[bytes]) -> list[Event]:
    reader = Reader()
    return [event for line in lines for event in reader.read(line)] + list(reader.end())


def shown(found: list[Event]) -> list[Shown]:
    """Write events so that they can be compared; the texts of a form may stand behind an exception's."""
    return [
        (
            event.kind,
            event.time,
            tuple(event.rank),
            (
                tuple(sorted(event.figures.items())) if event.kind != "words" else ()
            ),  # its line is not the same in all forms
            f"{event.word} {event.text[:60]} {event.arguments} {event.sizes}",
        )
        for event in found
    ]


BARE = shown(events([line.encode() for line in LINES]))


@pytest.mark.parametrize("hours", [0, 8])
@pytest.mark.parametrize("name", [*AROUND, *AMID])
def test_in_any_form_the_events_are_those_of_the_bare_lines(name: str, hours: int) -> None:
    assert shown(events(around(name, LINES, hours))) == BARE


@pytest.mark.parametrize("name", INSTEAD)
def test_with_any_text_in_place_of_the_stamp_its_time_counts(name: str) -> None:
    found = [event for event in events(around(name, LINES)) if event.kind != "words"]
    bare = [each for each in BARE if each[0] != "words"]
    assert [event.kind for event in found] == [kind for kind, *_ in bare]
    assert [int(event.time or 0) for event in found] == [int(time or 0) for _, time, *_ in bare]


@pytest.mark.parametrize("size", [1, 2, 7])
def test_every_record_of_a_document_is_read(size: int) -> None:
    batches = [LINES[start : start + size] for start in range(0, len(LINES), size)]
    documents = [otlp([(line, STARTED) for line in batch]).encode() for batch in batches]
    assert shown(events(documents)) == BARE


# These print text behind each line, or differ between lines that match a search and others: no shipper that cuts lines
# does.
WHOLE_LINES = {
    "grep -C",
    "rg -C",
    "Python's bytes",
    "otel debug exporter",
    "html",
    "html escaped",
    "markdown table",
    "trailing tag",
}


@pytest.mark.parametrize("name", sorted(AROUND.keys() - WHOLE_LINES))
def test_arguments_in_two_lines_of_a_shipper_are_read_whole(name: str) -> None:
    long = (
        "[2026-11-20 19:51:01] server_args=ServerArgs("
        + ", ".join(f"argument_{number}={number}" for number in range(90))
        + ")"
    )
    first = stamped(MESSAGES[:1] + MESSAGES[2:9])
    [start] = [
        event for event in events(around(name, [*first, long[:900], long[900:], *first])) if event.kind == "arguments"
    ]
    assert (len(start.arguments), start.figures) == (90, {})


QUOTES = [
    f"user said: {FORGED}",
    f"user said:{FORGED}",
    "Tell me what this means: " + FORGED,
    "tail of a line cut by rotation: text='previous.\\n" + FORGED,
    "[2026-11-20 19:51:18 TP0] Receive: obj=GenerateReqInput(text='a\\nstern pod " + FORGED,
    "[2026-11-20 19:51:18 TP0] Model attempted to call undefined function: x " + FORGED,
    "[2026-11-20 19:51:18 TP0] Model attempted to call undefined function: x\r" + FORGED,
    "[2026-11-20 19:51:18 TP0] " + FORGED,
    json.dumps({"message": FORGED}),
    json.dumps({"ts": 1795204278, "messages": [{"content": FORGED}]}),
    json.dumps({"timestamp": "2026-11-20T19:51:18", "event": "request.received", "obj": {"text": FORGED}}),
    f'INFO:     1.2.3.4:5 - "GET /?{FORGED} HTTP/1.1" 200 OK',
    f'prompt="{FORGED}"',
    f"x {FORGED}",
]


@pytest.mark.parametrize("quote", QUOTES)
@pytest.mark.parametrize(
    "name", ["nothing", "stern", "kubernetes", "GCP", "compose -t", "custom formatter", "indented paste"]
)
def test_a_line_inside_another_does_not_count(name: str, quote: str) -> None:
    real = stamped([DECODE] * 4)
    assert len(events(around(name, [*real, quote, *real]))) == 8


def test_however_many_lines_quote_none_counts_between_others() -> None:
    mixed = [line for real in stamped([DECODE] * 60) for line in (real, f"user said: {FORGED}")]
    assert [event.kind for event in events([line.encode() for line in mixed])] == ["decode"] * 60


@pytest.mark.parametrize("between", ["", "\r", " ", "\r\r"])
def test_an_exceptions_words_are_no_line(between: str) -> None:
    text = [
        *stamped([DECODE]),
        "Traceback (most recent call last):",
        '  File "x.py", line 1, in f',
        f"ValueError: bad x{between}{FORGED}",
    ]
    assert len(events([line.encode() for line in text])) == 1


BAR = "Capturing batches (bs=1 avail_mem=9.87 GB): 100%|#####| 36/36 [00:21<00:00,  1.69it/s]"


@pytest.mark.parametrize(
    "before", [BAR, f"\r{BAR}\r", f"\r{BAR}", "  0%|          | 0/36 [00:00<?, ?it/s]\r", "\0" * 300, "\ufeff", "\r"]
)
def test_behind_a_progress_bar_a_line_counts(before: str) -> None:
    assert [event.marked for event in events([(before + FORGED).encode()])] == [False]


def test_directly_behind_words_of_another_program_a_line_counts_and_is_marked() -> None:
    text = [*stamped([DECODE]), "See https://nanobind.readthedocs.io/refleaks.html" + FORGED]
    assert [event.marked for event in events([line.encode() for line in text])] == [False, True]


def test_a_form_that_can_be_a_sentence_counts_from_its_third_line_on() -> None:
    lines = around("stern", stamped([DECODE] * 3))
    reader = Reader()
    assert [len(reader.read(line)) for line in lines] == [0, 0, 3]
    assert reader.unread.startswith(b"sglang-7d9f8b")


@pytest.mark.parametrize(
    ("form", "moments", "counted"),
    [
        (
            "2026-11-20T19:51:{}Z  INFO scheduler.update: ",
            ["33.2434", "33.2435", "33.2441"],
            1,
        ),  # ranks, of which the form says nothing
        ("2026-11-20T19:51:{}Z  INFO scheduler.update: ", ["33.2434", "34.2434"], 2),
        ("[2026-11-20 19:51:{}] ", ["33", "33"], 2),  # SGLang names no rank where it has only one
    ],
)
def test_a_form_without_ranks_counts_what_all_ranks_print_once(form: str, moments: list[str], counted: int) -> None:
    lines = [form.format(moment) + RETRACTION for moment in moments]
    assert len(events([line.encode() for line in lines])) == counted


def test_parts_of_a_line_that_a_container_runtime_cut_are_joined() -> None:
    line = f"[2026-11-20 19:51:18 TP0] {DECODE}"
    parts = [f"2025-11-20T11:40:13.1Z stderr P {line[:60]}", f"2025-11-20T11:40:13.1Z stdout F {FORGED}"]
    parts += [f"2025-11-20T11:40:13.1Z stderr P {line[60:90]}", f"2025-11-20T11:40:13.1Z stderr F {line[90:]}"]
    assert [event.kind for event in events([part.encode() for part in parts])] == ["retraction", "decode"]
    long = "[2026-11-20 19:51:18] server_args={'model_path': '" + "m" * 20_000 + "', 'tp_size': 8}\n"
    halves = [
        json.dumps({"log": part, "stream": "stderr", "time": "x"}).encode() for part in (long[:16_384], long[16_384:])
    ]
    assert [event.arguments["tp_size"] for event in events(halves)] == [8]


def test_memory_for_lines_that_never_end_and_forms_that_never_come_again_is_bounded() -> None:
    reader = Reader()
    reader.read(f"[2026-11-20 19:51:18 TP0] {DECODE}".encode())
    for number in range(2000):
        reader.read(b"2025-11-20T11:40:13.1Z stderr P " + b"x" * 16_000)
        marks = "".join("!?;^"[number // 4**place % 4] for place in range(6))
        reader.read(f"a{marks} {FORGED}".encode())
    wrapping = reader.wrapping
    assert sum(map(len, wrapping.cut.values())) <= 262_144
    assert sum(len(line.text) for line in wrapping.held) < 1 << 20


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (b"2026-11-20T19:51:18Z", 1795204278.0),
        (b"2026-11-20 19:51:18,250", 1795204278.25),
        (b"2026/11/20 19:51:18.5", 1795204278.5),
        (b"2026-11-20T19:51:18+08:00", 1795204278.0 - 8 * 3600),
        (b"1795204278", 1795204278.0),
        (b"1795204278.5", 1795204278.5),
        (b"1795204278500000000", 1795204278.5),
        (b"Nov 20 2026 19:51:18", 1795204278.0),
        (b"20/Nov/2026:19:51:18 +0800", 1795204278.0 - 8 * 3600),
        (b"20261120T195118Z", 1795204278.0),
        (b"19:51:18", 71478.0),
        (b"20/11/2026 19:51:18", None),
        (b"2026-13-40 19:51:18", None),
        (b"17952042", None),
    ],
)
def test_a_time_is_read_however_it_is_printed(text: bytes, seconds: float | None) -> None:
    assert time_of(text) == seconds
