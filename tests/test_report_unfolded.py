"""What a log store answers in one document is read as the log that it holds."""

from __future__ import annotations

import csv
import datetime as dt
import io
import json
from typing import TYPE_CHECKING, Any

import pytest

from sglang_tuning_exporter.report.inputs import Logs
from sglang_tuning_exporter.report.texts import LONGEST_DOCUMENT, unfolded
from sglang_tuning_exporter.sglang.log.fast_path import BatchRun
from test_log_wrapping import recorded

if TYPE_CHECKING:
    from collections.abc import Callable

Lines = list[tuple[str, int, dt.datetime]]


def _ns(at: int, when: dt.datetime) -> str:
    return str(int(when.replace(tzinfo=dt.timezone.utc).timestamp()) * 10**9 + at * 10**6)


def loki(lines: Lines, *, newest_first: bool = False, indent: int | None = None, streams: int = 1) -> str:
    values = [[_ns(at, when), line] for line, at, when in lines]
    values = values[::-1] if newest_first else values
    result = [{"stream": {"pod": str(of)}, "values": values[of::streams]} for of in range(streams)]
    return json.dumps({"status": "success", "data": {"resultType": "streams", "result": result}}, indent=indent)


def records(lines: Lines, under: str | None, indent: int | None, **names: str) -> str:
    found: list[dict[str, Any]] = [
        {names["time"]: when.isoformat() + "Z", "id": at, names["text"]: line} for line, at, when in lines
    ]
    return json.dumps({under: found, "searched": True} if under else found, indent=indent)


def cloudwatch(lines: Lines) -> str:
    events = [
        {"timestamp": int(_ns(at, when)) // 10**6, "message": line, "ingestionTime": 1} for line, at, when in lines
    ]
    return json.dumps({"events": events, "nextForwardToken": "f/1"}, indent=4)


DOCUMENTS: dict[str, Callable[[Lines], str]] = {
    "Loki": loki,
    "Loki, pretty-printed": lambda lines: loki(lines, indent=2),
    "Loki, newest first": lambda lines: loki(lines, newest_first=True),
    "Loki, three streams": lambda lines: loki(lines, newest_first=True, streams=3),
    "CloudWatch": cloudwatch,
    "GCP": lambda lines: records(lines[::-1], None, 2, time="timestamp", text="textPayload"),
    "array": lambda lines: records(lines, None, None, time="time", text="log"),
    "array, a record on each line": lambda lines: (
        "[\n"
        + ",\n".join(json.dumps({"time": when.isoformat() + "Z", "log": line}) for line, _, when in lines)
        + "\n]\n"
    ),
    "Azure": lambda lines: records(lines, "value", None, time="TimeGenerated", text="LogMessage"),
    "Azure, a table": lambda lines: json.dumps(
        {
            "tables": [
                {
                    "columns": [{"name": "a"}, {"name": "b"}],
                    "rows": [[when.isoformat() + "Z", line] for line, _, when in lines],
                }
            ]
        }
    ),
    "a notebook": lambda lines: json.dumps(
        {
            "cells": [
                {"outputs": [{"name": "stderr", "text": [line + "\n" for line, _, _ in part]}]}
                for part in (lines[:90], lines[90:])
            ]
        },
        indent=1,
    ),
    "one text": lambda lines: json.dumps({"logs": "".join(line + "\n" for line, _, _ in lines)}),
    "UTF-16": lambda lines: "\n".join(line for line, _, _ in lines) + "\n",
    "UTF-8 with a mark": lambda lines: "\ufeff" + "\n".join(line for line, _, _ in lines) + "\n",
}


def events_of(data: bytes) -> list[object]:
    found: list[object] = []
    for _, event in Logs(["-"], io.BytesIO(data)).events():
        found += event.events() if isinstance(event, BatchRun) else [event] * (event is not None)
    return found


@pytest.mark.parametrize("name", DOCUMENTS)
def test_an_answer_of_a_log_store_gives_the_events_of_its_log(name: str) -> None:
    lines = recorded()[:500]
    plain = "\n".join(line for line, _, _ in lines).encode() + b"\n"
    document = DOCUMENTS[name](lines).encode("utf-16" if name == "UTF-16" else "utf-8")
    assert events_of(document) == events_of(plain)


@pytest.mark.parametrize(
    "text",
    [
        b"[2026-11-20 19:51:18 TP0] x\n",
        b'{"log": "a"}\n{"log": "b"}\n',
        b"{not json\n",
        b"",
        b"[\n",
        b"[[1]]",
        b"{" * 9000,
    ],
)
def test_any_other_text_stays_as_it_is(text: bytes) -> None:
    assert b"".join(unfolded(iter([text]))) == text


def test_a_document_without_an_end_is_not_kept_whole() -> None:
    chunk = b"[" + b'{"log": "x"},\n' * 70_000
    given = unfolded(iter([chunk] * 80))
    assert len(next(given)) <= LONGEST_DOCUMENT + len(chunk)


def test_a_table_is_no_document() -> None:
    out = io.StringIO()
    csv.writer(out).writerow(["2026-11-20T19:51:18Z", "a"])
    assert b"".join(unfolded(iter([out.getvalue().encode()]))) == out.getvalue().encode()
