"""A recorded SGLang server as a timeline: what its log printed, what its `/metrics` answered, when it was ready or
down.

A recording is a directory:

- `server.log` or `server.log.gz`: the log as printed;
- `metrics-<n>-<unix ms>.prom[.gz]`: the text of one scrape each;
- `server_info*.json[.gz]` (optional): the answer of `/server_info`;
- `events.jsonl` (optional): one JSON object per line, `{"t": unix seconds, "event": name}` with the names `start`,
  `ready`, `load_begin`, `burst`, `load_end`, `exit` and `SIGKILL…`;
- `recording.json` (optional): `{"sglang_version": "…", "log_utc_offset_seconds": 0, "note": "…"}`; the offset is what
  the printed times are ahead of UTC.

Positions are seconds since the server was first ready; everything before that stands at position 0.
"""

from __future__ import annotations

import bisect
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from math import inf
from pathlib import Path
from typing import Any, Literal, NamedTuple

from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.core import lines

Phase = Literal["starting", "ready", "down"]

# A recording is small: a larger file is no recording, and unpacking it could exhaust the memory.
MAX_FILE_BYTES = 64 * 1024 * 1024
MAX_FILES = 10_000
MAX_TOTAL_BYTES = 1024 * 1024 * 1024
# Clocks of one machine agree: if log and scrapes are further apart, the log was printed in another time zone.
MAX_APART_SECONDS = 600.0

_SCRAPE_NAME = re.compile(r"metrics-\d+-(?P<ms>\d{1,15})\.prom(?:\.gz)?")
_INFO_NAME = re.compile(r"server_info[^/]*\.json(?:\.gz)?")
_PART = re.compile(
    rf"(?:server\.log|events\.jsonl|recording\.json)(?:\.gz)?|{_SCRAPE_NAME.pattern}|{_INFO_NAME.pattern}"
)
_READY_LINE = b"The server is fired up and ready to roll!"


class TimedText(NamedTuple):
    """A line of the log with its own line end, or the exact text of one scrape, at its position in seconds."""

    at: float
    text: bytes


@dataclass(frozen=True, slots=True)
class Recording:
    """One recorded server; all positions are seconds since it was first ready.

    `lines`, `scrapes`, `transitions` (position, phase from then on) and `events` (position, name) are in order of
    position; `server_info` is JSON text.
    """

    name: str
    lines: tuple[TimedText, ...]
    scrapes: tuple[TimedText, ...]
    transitions: tuple[tuple[float, Phase], ...]
    events: tuple[tuple[float, str], ...]
    server_info: bytes | None

    @property
    def length_seconds(self) -> float:
        """The position of the last line or scrape."""
        return max(self.lines[-1].at if self.lines else 0.0, self.scrapes[-1].at if self.scrapes else 0.0)

    def scrape_at(self, position: float) -> TimedText | None:
        """Return the latest scrape at this position, or the first one before that; None without any scrape."""
        index = bisect.bisect_right(self.scrapes, position, key=lambda scrape: scrape.at)
        return self.scrapes[max(0, index - 1)] if self.scrapes else None

    def phase_at(self, position: float) -> Phase:
        """Whether the server is starting, ready, or down (its port closed) at this position."""
        index = bisect.bisect_right(self.transitions, position, key=lambda transition: transition[0])
        return self.transitions[index - 1][1] if index else "starting"

    def count_lines_until(self, position: float) -> int:
        """How many lines have been printed by this position, its own moment included."""
        return bisect.bisect_right(self.lines, position, key=lambda line: line.at)


def load(directory: Path) -> Recording:
    """Read a recording from its directory. Raise `UsageError` if it is missing, unreadable, or no recording."""
    if not directory.is_dir():
        raise UsageError(f"directory={directory}: is not a directory; give the directory of a recording")
    files: dict[str, bytes] = {}
    total = 0
    try:
        for path in sorted(directory.iterdir()):
            name = path.name.removesuffix(".gz")
            if _PART.fullmatch(path.name) and path.is_file():
                files[name] = _read(path)
                total += len(files[name])
                if len(files) > MAX_FILES or total > MAX_TOTAL_BYTES:
                    raise UsageError(
                        f"directory={directory}: holds more than {MAX_FILES} files or a gigabyte; thin the scrapes"
                    )
    except OSError as error:
        raise UsageError(f"directory={directory}: cannot be read: {error.strerror or error}") from error
    return from_files(files, name=str(directory))


def from_files(files: Mapping[str, bytes], *, name: str) -> Recording:
    """Build a recording from the unpacked bytes of its files by name (without `.gz`).

    `name` is used in error messages. Raise `UsageError` if there is no log with SGLang's timestamps, or a file is
    invalid.
    """
    if "server.log" not in files:
        raise UsageError(f"directory={name}: has no server.log or server.log.gz; give the directory of a recording")
    about = _object(files.get("recording.json", b"{}"), f"{name}/recording.json")
    moments = _log_moments(
        files["server.log"], _number(about.get("log_utc_offset_seconds", 0), "log_utc_offset_seconds", name)
    )
    if not moments:
        raise UsageError(
            f"directory={name}: no line of server.log has a time such as [2025-01-31 12:00:00]; is it an SGLang log?"
        )
    scrapes = sorted(
        (int(match["ms"]) / 1000, files[file]) for file in files if (match := _SCRAPE_NAME.fullmatch(file))
    )
    if (
        about.get("one_clock") is not True
        and scrapes
        and (scrapes[0][0] - moments[-1].at > MAX_APART_SECONDS or moments[0].at - scrapes[-1][0] > MAX_APART_SECONDS)
    ):
        apart = moments[0].at - scrapes[0][0]
        raise UsageError(
            f"directory={name}: log and scrapes are {apart:.0f} s apart; "
            "put the log's offset from UTC into recording.json as log_utc_offset_seconds"
        )
    events = _events(files.get("events.jsonl", b""), name)
    ready = _ready_moment(events, moments)
    transitions = _transitions(events, ready, [at for at, _ in scrapes])
    zero = moments[0].at if ready is None else ready

    def position(at: float) -> float:
        return max(0.0, at - zero)

    return Recording(
        name=name,
        lines=tuple(TimedText(position(at), text) for at, text in moments),
        scrapes=tuple(TimedText(position(at), text) for at, text in scrapes),
        transitions=tuple((position(at), phase) for at, phase in transitions),
        events=tuple((position(at), event) for at, event in events),
        server_info=_server_info(files, name),
    )


def _read(path: Path) -> bytes:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data: bytes = file.read(MAX_FILE_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(f"{path}: is not a whole gzip file; pack it again") from error
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"{path}: is larger than {MAX_FILE_BYTES // 2**20} MiB; cut the recording down")
    return data


def _object(text: bytes, file: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file}: is not valid JSON; mend or remove it") from error
    if not isinstance(found, dict):
        raise UsageError(f"{file}: must hold one JSON object" + (" on each line" if file.endswith("l") else ""))
    return found


def _number(value: Any, key: str, name: str) -> float:
    # A little more than a day: no time zone is further from UTC; also excludes NaN and infinity.
    if isinstance(value, bool) or not isinstance(value, int | float) or not -90_000 <= value <= 90_000:
        raise UsageError(
            f"{name}/recording.json: {key}={value}: give the log's offset from UTC in seconds, such as 7200 for UTC+2"
        )
    return float(value)


def _server_info(files: Mapping[str, bytes], name: str) -> bytes | None:
    file = next(filter(_INFO_NAME.fullmatch, sorted(files)), None)
    if file is not None:
        _object(files[file], f"{name}/{file}")
    return files.get(file or "")


def _events(text: bytes, name: str) -> list[tuple[float, str]]:
    """Return time and name of each event, in order."""
    events = []
    for line in filter(bytes.strip, text.splitlines()):
        event = _object(line, f"{name}/events.jsonl")
        at = event.get("t")
        if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at < 1e12:
            raise UsageError(
                f'{name}/events.jsonl: each line is {{"t": unix seconds, "event": "name"}}; mend or remove it'
            )
        events.append((float(at), str(event.get("event", ""))))
    return sorted(events, key=lambda event: event[0])


def _log_moments(log: bytes, offset: float) -> list[TimedText]:
    """Place each line at its unix seconds; lines printed at the same second are spread evenly over it.

    A line without a time follows its predecessor. Empty when no line has a time.
    """
    printed: list[tuple[float, bytes]] = []
    untimed: list[bytes] = []
    for line in io.BytesIO(log):
        found = lines.stamp_of(line)
        if found is not None and (time := found[0] or 0.0) >= lines.FIRST_DATED:
            # Several processes write to one file, so times may be out of order; a replay never goes back.
            printed.append((max(time - offset, printed[-1][0] if printed else -inf), line))
        elif printed:
            printed.append((printed[-1][0], line))
        else:
            untimed.append(line)
    return list(_spread([(printed[0][0], line) for line in untimed] + printed)) if printed else []


def _spread(printed: list[tuple[float, bytes]]) -> Iterator[TimedText]:
    for moment, group in groupby(printed, key=lambda pair: pair[0]):
        texts = [text for _, text in group]
        # Under SGLANG_LOG_MS the times carry milliseconds.
        width = 1.0 if moment.is_integer() else 0.001
        for index, text in enumerate(texts):
            yield TimedText(moment + width * index / len(texts), text)


def _ready_moment(events: list[tuple[float, str]], moments: list[TimedText]) -> float | None:
    ready = _first(events, "ready")
    return next((line.at for line in moments if _READY_LINE in line.text), None) if ready is None else ready


def _first(events: list[tuple[float, str]], name: str) -> float | None:
    return next((at for at, other in events if other == name), None)


def _transitions(
    events: list[tuple[float, str]], ready: float | None, scrapes: list[float]
) -> list[tuple[float, Phase]]:
    if ready is None:
        return []
    transitions: list[tuple[float, Phase]] = [(ready, "ready")]
    for place, (end, name) in enumerate(events, start=1):
        again, back = _first(events[place:], "start"), _first(events[place:], "ready")
        # The end of the last run is no transition: the last scrape is still served.
        if end <= ready or again is None or not (name == "exit" or name.startswith("SIGKILL")):
            continue
        transitions.append((end, "down"))
        # The HTTP server answers before the model is ready: the first scrape shows from when.
        answered = next((at for at in scrapes if at > again), None)
        if answered is not None and (back is None or answered < back):
            transitions.append((answered, "starting"))
        if back is not None:
            transitions.append((back, "ready"))
    return transitions
