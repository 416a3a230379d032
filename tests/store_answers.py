"""What log stores answer in one document, each as a function from the lines of a log."""

from __future__ import annotations

import datetime as dt
import json
from typing import TYPE_CHECKING, Any

from wrappings import Lines

if TYPE_CHECKING:
    from collections.abc import Callable


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
    "CloudWatch Logs Insights": lambda lines: json.dumps(
        {
            "results": [
                [{"field": "@message", "value": line}, {"field": "@ptr", "value": f"p{at}"}] for line, at, _ in lines
            ]
        }
    ),
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
