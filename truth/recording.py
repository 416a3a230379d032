"""What a server printed and answered, and when: the input of every case.

Times are unix seconds; a log's own are read as UTC.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import tarfile
from bisect import bisect_right
from calendar import timegm
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parent.parent
_STAMP = re.compile(rb"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)")
_NAMED = re.compile(r"(?:.*/)?(metrics|v1_loads)-(?:\d+-)?(\d{9,})\.(?:prom|json)")
_LATE_MILLISECONDS = 5000.0
HANGS, REFUSES = "hangs", "refuses"  # in place of a status
QUIET_SECONDS = 20.0  # so long after a log's last line the exporter is still asked


@dataclass(frozen=True, slots=True)
class Page:
    """From `at` on, the server answers `path` with this status and text; `hangs` and `refuses` are no answer."""

    at: float
    path: str
    status: int | str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Recording:
    """A log as chunks of bytes with the time each was written, the server's answers, and when it started, was ready and
    ended.
    """

    log: tuple[tuple[float, bytes], ...]
    pages: tuple[Page, ...] = ()
    begin: float = 0.0  # the exporter starts
    ready: float = 0.0
    end: float = 0.0  # the last moment at which the exporter is asked
    loads: tuple[tuple[float, float], ...] = ()  # begin and end of each load, where known

    @property
    def text(self) -> bytes:
        """The whole log."""
        return b"".join(line for _, line in self.log)


def timed(log: bytes, begin: float = 0.0) -> Iterator[tuple[float, bytes]]:
    """Place each line at its printed second, several of one second evenly over it; a line without a time follows its
    predecessor.
    """
    placed, second = [], begin
    for line in io.BytesIO(log):
        found = _STAMP.search(line[:64])
        if found:
            second = max(second, float(timegm((*map(int, found.groups()), 0, 0, 0))))
        placed.append((second, line))
    for at, group in groupby(placed, key=lambda pair: pair[0]):
        lines = [line for _, line in group]
        for number, line in enumerate(lines):
            yield at + (number + 0.5) / len(lines), line


def of_log(log: bytes) -> Recording:
    """Make a recording of a log alone; the exporter starts a second before its first line and is asked until some time
    after its last.
    """
    first = next(
        (float(timegm((*map(int, found.groups()), 0, 0, 0))) for found in _STAMP.finditer(log)), 1_700_000_000.0
    )
    lines = tuple(timed(log, first))
    last = lines[-1][0] if lines else first
    return Recording(lines, begin=first - 1.0, ready=first, end=last + QUIET_SECONDS)


@lru_cache(maxsize=4)
def read(path: Path) -> Recording:
    """Read a log (`.log`, `.log.gz`), or a capture: a folder or a `.tar.xz` with `server.log`, pages and
    `events.jsonl`.
    """
    if path.is_dir():
        return of_files({each.name: each.read_bytes() for each in path.iterdir() if each.is_file()})
    if path.name.endswith(".tar.xz"):
        with tarfile.open(path) as packed:
            return of_files({m.name.rpartition("/")[2]: f.read() for m in packed if (f := packed.extractfile(m))})
    data = path.read_bytes()
    return of_log(gzip.decompress(data) if path.suffix == ".gz" else data)


def of_files(packed: Mapping[str, bytes]) -> Recording:
    """Make a recording of a capture's files by name."""
    files = {n.removesuffix(".gz"): gzip.decompress(b) if n.endswith(".gz") else b for n, b in packed.items()}
    events = [json.loads(line) for line in files.get("events.jsonl", b"").splitlines() if line.strip()]
    times = {name: [e["t"] for e in events if e["event"] == name] for name in {e["event"] for e in events}}
    log = files["server.log"]
    pages = sorted(_pages(files, events), key=lambda page: page.at)
    alone = of_log(log)
    begin = min([*times.get("start", []), alone.begin, *(p.at for p in pages if p.status == 200)][:2] or [0.0])
    ready = (times.get("ready") or times.get("load_begin") or [alone.ready])[0]
    ends = [t for name in ("load_end", "ready", "exit") for t in times.get(name, [])]
    end = max([*ends, *(p.at for p in pages)] or [alone.end]) + 1.0
    loads = tuple(zip(times.get("load_begin", []), times.get("load_end", []), strict=False))
    lines = tuple(timed(log, begin))
    return Recording(lines, tuple(pages), begin, ready, end if pages else max(end, alone.end), loads)


def _pages(files: Mapping[str, bytes], events: Iterable[Mapping[str, object]]) -> Iterator[Page]:
    texts = []
    for name, body in files.items():
        if found := _NAMED.fullmatch(name):
            path = "/metrics" if found[1] == "metrics" else "/v1/loads"
            texts.append(Page(int(found[2]) / 1000, path, 200, body.decode("utf-8", "replace")))
        elif name.startswith("server_info"):
            yield from (Page(0.0, path, 200, body.decode()) for path in ("/server_info", "/get_server_info"))
    yield from texts
    marks = [(float(str(event["t"])), str(event["event"])) for event in events]
    signals = [(at, name.startswith("SIGSTOP")) for at, name in marks if name.startswith("SIG")]
    for page in _answers(files, sorted((each for each in texts if each.path == "/metrics"), key=lambda each: each.at)):
        stopped = [stop for at, stop in signals if at <= page.at][-1:] == [True]
        if not stopped or page.path != "/health_generate":  # no token was asked for then; none can have come
            yield page
    yield from (Page(at, "/health_generate", HANGS if stop else 200) for at, stop in signals)
    for at, name in marks:
        if (name == "exit" or name.startswith("SIGKILL")) and "scrapes.tsv" not in files:
            yield Page(at, "/metrics", REFUSES)


def _answers(files: Mapping[str, bytes], kept: list[Page]) -> Iterator[Page]:
    """Read the tables of what was asked for and what came; a scrape whose text was not kept had that of the one before
    it.
    """
    for path, table in (("/metrics", "scrapes.tsv"), ("/health", "health.tsv"), ("/health_generate", "health.tsv")):
        for row in files.get(table, b"").decode().splitlines():
            at, status = _answer(row)
            place = bisect_right(kept, at + 0.001, key=lambda page: page.at)
            if status != 200 or path != "/metrics":
                yield Page(at, path, status)
            elif place and kept[place - 1].at < at - 0.5:
                yield replace(kept[place - 1], at=at)


def _answer(row: str) -> tuple[float, int | str]:
    """Read a row of `scrapes.tsv` or `health.tsv`, with or without a number in front; whoever asks gives up before a
    late answer comes.
    """
    cells = row.split("\t")
    at, status, took = cells[1:4] if cells[0].isdigit() and len(cells) > 3 else cells[:3]
    if status.isdigit() and float(took) < _LATE_MILLISECONDS:
        return float(at), int(status)
    return float(at), HANGS if status.isdigit() or "imeout" in status else REFUSES
