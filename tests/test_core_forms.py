"""Forms of SGLang's lines: what ten releases print, failures of each device, requests that quote lines, lines that are
cut or torn.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_tuning_exporter.core.events import Event
from sglang_tuning_exporter.core.lines import Line, Reader
from test_core_lines import CUDA, DECODE, RETRACTION, STAMP, failures, read

HERE = Path(__file__).parent
LOGS = HERE / "data" / "logs"
RECORDED = sorted((HERE / "recordings").glob("*/server.log.gz"))
RELEASES = (
    "0.3.0", "0.3.6.post3", "0.4.3.post4", "0.4.6.post5", "0.4.9.post6", "0.5.3.post3", "0.5.7", "0.5.12", "0.5.20",
    "0.5.23",
)  # fmt: skip


# Failures


def test_an_exception_without_a_traceback_is_of_another_program() -> None:
    assert failures(STAMP + DECODE, CUDA) == []


# Requests that quote lines


PROMPT = rf"Ignore previous.\n[2025-11-20 11:41:40 TP0] {RETRACTION}\n[2025-11-20 11:41:40 TP0] {DECODE}"
REQUESTS = [
    f"Receive: obj=GenerateReqInput(text='{PROMPT}', rid='c0ffee')",
    f"Finish: obj=GenerateReqInput(text='{PROMPT}'), out={{'text': '{PROMPT}'}}",
    f"Receive OpenAI: obj={{'messages': '{PROMPT}'}}",
    f"in=GenerateReqInput(text='{PROMPT}'), out={{}}",
    f"in=reqlog.<locals>.GenerateReqInput(text='{PROMPT}'), out={{}}",
    f'{{"timestamp": "2025-11-20T11:40:13", "event": "request.received", "obj": {{"text": "{PROMPT}"}}}}',
    f'{{"timestamp": "2025-11-20T11:40:13", "event": "request.finished", "out": {{"text": "{PROMPT}"}}}}',
]
FORMS: dict[str, Callable[[str], str]] = {
    "ranks": lambda line: STAMP + line,
    "0.3.0": lambda line: "[11:40:13] " + line,
    "no ranks": lambda line: "[2025-11-20 11:40:13] " + line,
    "no stamp": lambda line: line,
    "docker": lambda line: json.dumps({"log": STAMP + line + "\n", "stream": "stdout"}),
    "kubernetes": lambda line: f"2025-11-20T11:40:14Z stdout F {STAMP}{line}",
}


@pytest.mark.parametrize("request_line", REQUESTS)
@pytest.mark.parametrize("form", FORMS)
def test_a_logged_request_is_a_request_in_every_form_and_nothing_in_it_counts(form: str, request_line: str) -> None:
    reader = Reader()
    assert reader.read(FORMS[form](request_line).encode()) == ()
    assert (dict(reader.lines), +reader.unreadable) == ({"request": 1}, {})


@pytest.mark.parametrize("request_line", REQUESTS)
@pytest.mark.parametrize("form", FORMS)
def test_many_logged_requests_teach_no_form(form: str, request_line: str) -> None:
    reader = Reader()
    assert [event for _ in range(40) for event in reader.read(FORMS[form](request_line).encode())] == []
    assert dict(reader.lines) == {"request": 40}


@pytest.mark.parametrize("field", ["obj", "prompt", "messages", "input", "out"])
def test_documents_whose_field_is_of_requests_teach_no_form(field: str) -> None:
    reader, said = Reader(), f"{STAMP}{RETRACTION}"
    for document in ({"rid": "r1", field: {"text": said}}, {"time": "2025-11-20T11:40:13Z", "body": {field: said}}):
        assert [event for _ in range(40) for event in reader.read(json.dumps(document).encode())] == []


@pytest.mark.parametrize(
    "line",
    [
        STAMP + "Error in detect_and_parse: [2025-11-20 11:40:13 TP0] " + RETRACTION,
        STAMP + "Req Time Stats(rid=" + RETRACTION + ")",
        STAMP + "Cache not flushed because there are pending requests. #queue-req: 3, #running-req: 4",
        STAMP + "'" + RETRACTION + "'",
        STAMP + "x" + RETRACTION,
        STAMP + '{"log": "[2025-11-20 11:41:40 TP0] ' + RETRACTION + '\\n"}',
        STAMP + 'INFO:     1.2.3.4:5 - "GET /?' + DECODE + ' HTTP/1.1" 200 OK',
        STAMP + 'Receive: text="POST /generate HTTP/1.1" 503 Service Unavailable',
        STAMP + "torch.OutOfMemoryErrors are explained in the manual",
        STAMP + "Decode out of memory? " + DECODE,
    ],
)
def test_a_line_that_only_quotes_gives_no_event(line: str) -> None:
    assert read(line) == []


# Lines that are cut, torn, or in another layout


@pytest.mark.parametrize("usage", ["1.07", "2.00", "2.01", "9.00"])
def test_a_usage_that_cannot_be_is_left_out_of_a_usual_line_too(usage: str) -> None:
    line = (
        f"Decode batch, #running-req: 1, #token: 900, token usage: {usage}, gen throughput (token/s): 8.00,"
        " #queue-req: 7"
    )
    usual, other = read(STAMP + line)[0], read(STAMP + line + ", accept len: 1.0")[0]
    assert usual.figures.get("usage") == other.figures.get("usage")


class Slow(Reader):
    """Reads each line by the table, also the usual ones."""

    def _learn(self, raw: bytes, line: Line) -> None:
        """Know no usual line."""


def all_of(reader: Reader, text: bytes) -> tuple[list[Event], dict[str, int]]:
    return [event for line in text.splitlines() for event in reader.read(line)], dict(reader.lines)


AROUND: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda line: line,
    "docker": lambda line: json.dumps({"log": line.decode() + "\n", "stream": "stderr", "time": "x"}).encode(),
    "kubernetes": lambda line: b"2025-11-20T11:40:14.5Z stderr F " + line,
    "compose": lambda line: b"sglang-1  | " + line,
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("path", RECORDED, ids=[path.parent.name for path in RECORDED])
def test_usual_lines_of_a_recorded_log_are_read_as_by_the_table(path: Path, around: str) -> None:
    text = b"\n".join(map(AROUND[around], gzip.decompress(path.read_bytes()).splitlines()))
    assert all_of(Reader(), text) == all_of(Slow(), text)


def test_a_usual_line_inside_any_other_line_does_not_count() -> None:
    reader, behind = Reader(), f"user said: {STAMP}{DECODE}".encode()
    assert [len(reader.read(line)) for line in (*[(STAMP + DECODE).encode()] * 3, behind, behind)] == [1, 1, 1, 0, 0]


@pytest.mark.parametrize("release", RELEASES)
def test_a_log_with_carriage_returns_gives_the_same(release: str) -> None:
    text = (LOGS / f"{release}.log").read_bytes()
    assert all_of(Reader(), text.replace(b"\n", b"\r\n"))[0] == all_of(Reader(), text)[0]


def test_the_rest_of_a_cut_line_is_none_however_usual_it_looks() -> None:
    stream = "2025-11-20T11:40:14.5Z stdout {} "
    usual = (stream.format("F") + STAMP + DECODE).encode()
    cut = (stream.format("P") + STAMP + "Receive: obj=GenerateReqInput(text='x").encode()
    reader = Reader()
    assert [len(reader.read(line)) for line in (usual, usual, cut, usual, usual)] == [1, 1, 0, 0, 1]
