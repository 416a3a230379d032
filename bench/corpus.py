"""Long logs, whose figures differ from line to line, so that no program can answer from a cache.

`write` makes one from the recordings: each start once, then its work repeated. Small models on CPUs print few lines a
second, nearly all of them batch lines. `write_busy` makes one as a server with tens of requests a second prints it:
most lines are access lines.
"""

from __future__ import annotations

import datetime as dt
import gzip
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

from truth.today import STEPS

_ROOT = Path(__file__).parent.parent
RECORDINGS = (
    *sorted((_ROOT / "exporter" / "sglang_tuning_exporter" / "recordings").glob("*/server.log.gz")),
    *sorted((_ROOT / "tests" / "recordings").glob("*/server.log.gz")),
)
_READY = b"The server is fired up and ready to roll!"
_END = re.compile(rb"^[^\n]*(?:SIGTERM received|server_args=)", re.MULTILINE)
_TIME = re.compile(rb"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)", re.MULTILINE)
_TOKENS = re.compile(rb"(#(?:pending-)?token: )(\d+)")
_THROUGHPUT = re.compile(rb"(throughput \(token/s\): )(\d+)")
_FORMAT = "%Y-%m-%d %H:%M:%S"
_PORT = re.compile(rb"(127\.0\.0\.1:)(\d+)")
_BEGIN = dt.datetime(2026, 1, 1)  # noqa: DTZ001 - a log's times have no zone


@dataclass(frozen=True)
class Corpus:
    """A written log: its path, lines, bytes and starts."""

    path: Path
    lines: int
    size: int  # bytes
    starts: int


def _read(path: Path) -> tuple[bytes, bytes]:
    """Return a recording's start, and its work without the end of the server and a second start."""
    text = gzip.decompress(path.read_bytes())
    end = text.index(b"\n", text.index(_READY)) + 1
    close = _END.search(text, end)
    work = text[end : close.start() if close else None].splitlines(keepends=True)
    return text[:end], b"".join(line for line in work if line.startswith(b"["))


def _moved(text: bytes, begin: dt.datetime) -> tuple[bytes, dt.datetime]:
    """Return `text` with its printed times moved to begin then, and the last of them."""
    known = {printed: _time(printed) for printed in set(_TIME.findall(text))}
    by = begin - min(known.values(), default=begin)
    later = {printed: (when + by).strftime(_FORMAT).encode() for printed, when in known.items()}
    return _TIME.sub(lambda found: b"[" + later[found[1]], text), max(known.values(), default=begin - by) + by


def _time(printed: bytes) -> dt.datetime:
    return dt.datetime.strptime(printed.decode(), _FORMAT)  # noqa: DTZ007 - a log's times have no zone


def _varied(text: bytes, by: int) -> bytes:
    text = _TOKENS.sub(lambda m: b"%b%d" % (m[1], int(m[2]) + by), text)
    text = _THROUGHPUT.sub(lambda m: b"%b%d" % (m[1], int(m[2]) + by % 211), text)
    return _PORT.sub(lambda m: b"%b%d" % (m[1], 1024 + (int(m[2]) + 7 * by) % 64000), text)


def _pieces(size: int) -> Iterator[bytes]:
    """Return starts and work in order, with an equal share of `size` bytes for each recording."""
    now = _BEGIN
    for path in RECORDINGS:
        start, work = _read(path)
        start, now = _moved(start, now)
        yield start
        written = turn = 0
        while written < size // len(RECORDINGS):
            turn += 1
            piece, now = _moved(work, now)
            yield _varied(piece, turn)
            written += len(piece)


WRAPPINGS = {"Docker JSON": "docker-json", "CRI": "cri"}  # of truth/cases/today/recipes.yaml


def wrapped(log: Path, path: Path, name: str) -> Path:
    """Write a log to `path` in a wrapping, each line with the time that was printed last."""
    lines = STEPS["wrap"](log.read_text(encoding="utf-8").splitlines(), name)
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return path


def _written(path: Path, pieces: Iterator[bytes], starts: int) -> Corpus:
    with path.open("wb") as file:
        lines = sum(piece.count(b"\n") * bool(file.write(piece)) for piece in pieces)
    return Corpus(path, lines, path.stat().st_size, starts)


def write(path: Path, size: int) -> Corpus:
    """Write a log of about `size` bytes to `path`."""
    return _written(path, _pieces(size), len(RECORDINGS))


def write_busy(path: Path, size: int) -> Corpus:
    """Write a log of about `size` bytes to `path`: a start, and tens of requests each second."""
    return _written(path, _busy(size), 1)


def _busy(size: int) -> Iterator[bytes]:
    chance = random.Random(1)
    piece, second = _moved(_read(RECORDINGS[0])[0], _BEGIN)
    while size > 0:
        yield piece
        size, second = size - len(piece), second + dt.timedelta(seconds=1)
        piece = "".join(f"[{second:{_FORMAT}}] {line}\n" for line in _busy_second(chance)).encode()


def _busy_second(chance: random.Random) -> list[str]:
    """Return the lines of one second, in any order, without their times."""
    running, queued, usage = chance.randint(20, 60), max(0, round(chance.gauss(2, 3))), chance.randint(30, 95)
    lines = [
        f"INFO:     10.0.{chance.randint(0, 9)}.{chance.randint(1, 250)}:{chance.randint(1024, 65000)} - "
        '"POST /v1/chat/completions HTTP/1.1" 200 OK'
        for _ in range(chance.randint(30, 60))
    ]
    lines += (
        f"Prefill batch, #new-seq: {chance.randint(1, 6)}, #new-token: {chance.randint(30, 8000)}, #cached-token:"
        f" {chance.randint(0, 3000)}, token usage: 0.{usage}, #running-req: {running}, #queue-req: {queued},"
        f" #pending-token: {500 * queued}, cpu graph: False, input throughput (token/s): {chance.uniform(3e3, 2e4):.2f}"
        for _ in range(chance.randint(10, 25))
    )
    lines += (
        f"Decode batch, #running-req: {running}, #token: {2000 * usage}, token usage: 0.{usage}, cpu graph: False, "
        f"gen throughput (token/s): {chance.uniform(1e3, 2e3):.2f}, #queue-req: {queued}"
        for _ in range(chance.randint(1, 2))
    )
    chance.shuffle(lines)
    return lines
