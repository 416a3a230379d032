"""State files as an exporter may find them: any bytes, and its own with one value that is something else."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

from fuzz import forgeries
from fuzz.sidecars import check_outputs, scratch, settings
from sglang_tuning_exporter.collect.log import Logbook
from sglang_tuning_exporter.collect.positions import HEAD_BYTES, TAIL_BYTES, make_mark
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.collect.state_file import SCHEMA
from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.lines import Reader
from sglang_tuning_exporter.core.watch import Watch
from sglang_tuning_exporter.sglang.metrics import page_figures as facts

_LOG = Path(__file__).parent.parent / "tests" / "data" / "logs" / "0.5.23.log"
NOW = 1_763_640_000.0
# What a value of a JSON document may be instead of what it should be.
_ODD_VALUES: tuple[object, ...] = (
    *(None, True, False, -1, 0, 1, 1.5, 1e308, -1e308, 10**400, 2**53, 10**15, math.nan, math.inf),
    *(
        "",
        "x",
        "\x1b[31m",
        "9" * 5000,
        "\ud800",
        [],
        {},
        [[]],
        [None],
        [math.nan],
        [1, 2, 3, 4, 5, 6, 7],
        {"x": 1},
        {"a": {"b": []}},
    ),
)


def check_state_values(data: bytes) -> None:
    """With any value in place of one value of a state file, the log is read, all outputs are written, and no series is twice there."""
    document = json.loads(_rich_state())
    paths = list(_paths(document))
    path = paths[int.from_bytes(data[:2], "big") % len(paths)]
    holder: Any = document
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = _ODD_VALUES[int.from_bytes(data[2:3], "big") % len(_ODD_VALUES)]
    with scratch("server.log", _line() * 3) as log:
        text = json.dumps(document).replace('"LOG"', json.dumps(str(log)))
        log.with_name("state.json").write_text(text.replace('"INODE"', str(log.stat().st_ino)))
        sidecar = Sidecar(settings(log_file=(str(log),), state_file=log.with_name("state.json")))
        try:
            assert sidecar.log is not None
            sidecar.log.poll()
            watch, now = sidecar.watch, sidecar.now()
            watch.scrape(facts.read(_serving()), now)
            for event in Reader().read(_line().rstrip()):
                event.time = now
                watch.take(event)
            check_outputs(sidecar)
            watch.judge(now + 40.0)
            json.dumps(watch.saved(now + 40.0), allow_nan=False)
        finally:
            sidecar.stop()


def _paths(value: object, to: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON document but the whole of it, as the keys that lead there; of a long list only its begin."""
    inner = value.items() if isinstance(value, dict) else enumerate(value[:4]) if isinstance(value, list) else ()
    for key, each in inner:
        if key not in {"schema", "program"}:
            yield (*to, key)
            yield from _paths(each, (*to, key))


@cache
def _rich_state() -> bytes:
    """The state file of a server that was seen to retract, with lines that wait for evidence, as JSON; `LOG` and `INODE` are its log's."""
    recording = forgeries.recordings()[1]
    played = forgeries.Played(recording, len(recording.lines) * 3 // 4, scrapers=(1.0, 1.0))
    played.until_middle()
    played.watch.judge(played.now)
    for name in ("out of memory", "all lines of a start", "retraction", "watchdog"):
        played.say(forgeries.FORGED[name].replace(b"%p", b"[2026-11-20 19:26:00] ") + b"\n")
    mark = make_mark("LOG", 0, 3 * len(_line()), (_line() * 3)[:HEAD_BYTES], (_line() * 3)[-TAIL_BYTES:]).json()
    positions = {"patterns": ["LOG"], "files": [mark | {"inode": "INODE"}]}
    document = {"at": time.time() - 5.0, "positions": positions, "lines": {"decode": 3}, "unrecognised": {"x": 1}}
    document |= {"watch": played.watch.saved(played.now)}
    return json.dumps({"schema": SCHEMA, "program": "sglang-tuning-exporter", **document}).encode()


@cache
def _serving() -> str:
    return forgeries.recordings()[1].scrapes[-1].text.decode()


def check_state_file(data: bytes) -> None:
    """Any state file is restored or ignored, and the file that is saved afterwards is restored again."""
    with scratch("state.json", data) as path:
        log = path.with_name("server.log")
        log.write_bytes(_line() * 3)
        given = settings(log_file=(str(log),), state_file=path, sglang_url=None)
        saved: list[tuple[Any, dict[str, int]]] = []
        for _ in range(2):
            watch = _watch()
            book = Logbook(given, watch, nullcontext(), clock=lambda: NOW)
            try:
                book.poll()
                watch.judge(NOW + 1.0)
                saved.append((watch.saved(NOW + 1.0)["counted"], dict(book.lines)))
            finally:
                book.close()
        kept = path.read_bytes()
        if kept == data:  # not ours
            assert saved[0] == saved[1], "what is not ours changed what is counted"
        else:
            assert not data.strip(b"\0 \r\n") or data.lstrip()[:1] == b"{", "a file of somebody else was overwritten"
            assert saved[0] == saved[1], "a restart changed what had been counted"


def _watch() -> Watch:
    return Watch(PROFILES["online"], NOW, reads=True, scrapes=False)


@cache
def _line() -> bytes:
    return (
        b"[2025-11-20 11:40:13] Decode batch, #running-req: 237, #token: 925941, token usage: 0.89, cuda graph: True, "
        b"gen throughput (token/s): 4471.70, #queue-req: 4\n"
    )


def seeds() -> list[bytes]:
    """An exporter's own state file, none, and one of an older release."""
    watch, reader = _watch(), Reader()
    for line in _LOG.read_bytes().splitlines():
        for event in reader.read(line):
            event.time = NOW
            watch.take(event)
    with scratch("state.json", b"") as path:
        log = path.with_name("server.log")
        log.write_bytes(_line() * 4)
        given = settings(log_file=(str(log),), state_file=path, sglang_url=None, from_start=True)
        book = Logbook(given, watch, nullcontext(), clock=lambda: NOW)
        book.poll()
        book.close()
        return [path.read_bytes(), b"", b'{"schema": 1, "positions": {"patterns": [], "files": []}}']
