"""`record`: a live server's log and scrapes as a directory that `replay` serves, without private data.

Everything goes through `scrub` before it is written, and is written at once: however the recording ends,
`recording.load` can read the directory. Its times are those that the log prints.
"""

from __future__ import annotations

import gzip
import json
import math
import operator
import os
import shutil
import socket
import sys
import threading
import time
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from sglang_tuning_exporter.collect import scrape
from sglang_tuning_exporter.collect.follower import LogFollower
from sglang_tuning_exporter.config import Config
from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.recordings import stopped_by_signal
from sglang_tuning_exporter.recordings.recording import MAX_FILE_BYTES
from sglang_tuning_exporter.recordings.scrub import HOST, OF_LIFE, Scrubber, is_known
from sglang_tuning_exporter.sglang import clean

SCRAPE_SECONDS = 2.0
POLL_SECONDS = 0.1
# Below the limits of `recording.load`.
MOST_SCRAPES, MOST_SCRAPED_BYTES = 9_000, 900 << 20
MOST_LOG_BYTES = MAX_FILE_BYTES - (1 << 20)
_TIMEOUT_SECONDS = 10.0
# Printed times have whole seconds: the latest line of the last few seconds shows the log's clock best.
_CLOCK_SECONDS = 3.0


class Recorder:
    """Writes one recording of the server and the log in `config`: `lines` of the log, and so many `scrapes`.

    `scrape_error` is why the last scrape failed.
    """

    def __init__(
        self, config: Config, output: Path, *, keep_request_text: bool = False, every: float = SCRAPE_SECONDS
    ) -> None:
        assert config.sglang_url is not None
        assert config.metrics_url is not None
        self._client = scrape.Client(config.sglang_url, config.metrics_url, config.api_key)
        self.scrubber = Scrubber(keep_request_text=keep_request_text)
        for name in (socket.gethostname(), urlsplit(config.sglang_url).hostname or ""):
            if name != "localhost":
                self.scrubber.hide(name, HOST)
        self.scrubber.hide(config.api_key or "", clean.REDACTED)
        self.config, self.output, self._every = config, output, every
        (self._log_file,) = config.log_file
        self._stopping = threading.Event()
        self.lines = self.scrapes = self._log_bytes = self._scraped_bytes = 0
        self._offsets: list[tuple[float, float]] = []  # when a line arrived, and how far the log's clock was ahead
        self._last_printed: float | None = None  # before the recording
        self._is_up: bool | None = None
        self._last_ms = 0
        self._sink: IO[bytes] | None = None
        self.scrape_error = "none was made"

    def stop(self) -> None:
        """End the recording soon, even if the server does not answer."""
        self._stopping.set()
        self._client.end()

    def run(self, seconds: float | None = None) -> None:
        """Record for so long, or until `stop`.

        Raises `UsageError` where the directory is not new or the log cannot be read.
        """
        try:
            self.output.mkdir(parents=True, exist_ok=True)
            if any(self.output.iterdir()):
                raise UsageError(f"--output={self.output}: is not empty; give a new directory")
            with (self.output / "server.log").open("ab") as self._sink:
                self._record(seconds)
            self._pack()
        except OSError as error:
            raise UsageError(f"--output={self.output}: {error.strerror or error}; give a new directory") from None

    @property
    def is_full(self) -> bool:
        """Whether the recording has reached a limit of its size."""
        figures = (self._log_bytes, self.scrapes, self._scraped_bytes)
        return any(map(operator.ge, figures, (MOST_LOG_BYTES, MOST_SCRAPES, MOST_SCRAPED_BYTES)))

    def _record(self, seconds: float | None) -> None:
        self._ask_server()
        follower = LogFollower([self._log_file])
        try:
            for status in follower.status():
                if not status.up:
                    raise UsageError(
                        f"--log-file={self._log_file}: {status.reason}; give the log of the running server"
                    )
            self._record_log(follower)  # what is there now is history: only how the server was started
            self._offsets = self._clock_by_file()
            self._write_event("ready")
            due, until = time.monotonic(), math.inf if seconds is None else time.monotonic() + seconds
            while not self._stopping.is_set() and not self.is_full and time.monotonic() < until:
                self._record_log(follower)
                if time.monotonic() >= due:
                    due = time.monotonic() + self._every
                    self._scrape()
                self._stopping.wait(POLL_SECONDS)
            self._record_log(follower)
        finally:
            self._client.end()
            follower.close()

    def _ask_server(self) -> None:
        """Ask the server about itself: its secrets and names are learned before anything is written."""
        version: str | None = None
        for path in ("/server_info", "/get_server_info"):
            try:
                found = json.loads(self._client.answer(path, _TIMEOUT_SECONDS))
            except (scrape.ScrapeError, ValueError, RecursionError):
                continue
            if isinstance(found, dict):
                version = str(found.get("version") or "")
                text = json.dumps(self.scrubber.arguments(found), indent=1)
                (self.output / "server_info.json").write_text(text + "\n", encoding="utf-8")
            break
        about = {
            "sglang_version": version if version and is_known(version) else None,
            "log_utc_offset_seconds": 0,
            "one_clock": True,
            "note": "Recorded by sglang-tuning-exporter record.",
        }
        (self.output / "recording.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")

    def _record_log(self, follower: LogFollower) -> None:
        for block in follower.poll():
            now = time.time()
            for line in block.data.splitlines(keepends=True):
                kept = self.scrubber.line(line)
                if block.historical:
                    self._keep_startup(kept)
                    continue
                if self.scrubber.printed is not None:
                    self._offsets = [(at, ahead) for at, ahead in self._offsets if now - at < _CLOCK_SECONDS]
                    self._offsets.append((now, self.scrubber.printed - now))
                self._write(kept)
        if self._sink is not None:
            self._sink.flush()

    def _keep_startup(self, kept: bytes | None) -> None:
        """Of what was printed before the recording, keep how the server was last started."""
        assert self._sink is not None
        self._last_printed = self.scrubber.printed or self._last_printed
        if self.scrubber.starts:
            self._sink.truncate(0)
            self._log_bytes = self.lines = 0
        if kept is not None and self.scrubber.kind in OF_LIFE:
            self._write(kept)

    def _clock_by_file(self) -> list[tuple[float, float]]:
        """How far the log's clock is ahead of ours by its last line: the file was written when that was printed."""
        try:
            written = os.stat(self._log_file).st_mtime  # noqa: PTH116 - it may be no path at all
        except OSError:
            return []
        return [] if self._last_printed is None else [(0.0, self._last_printed - written)]

    def _write(self, kept: bytes | None) -> None:
        if kept is not None and self._sink is not None and self._log_bytes + len(kept) <= MOST_LOG_BYTES:
            self._sink.write(kept)
            self._log_bytes += len(kept)
            self.lines += kept.count(b"\n")

    def _scrape(self) -> None:
        try:
            page = self._client.metrics(_TIMEOUT_SECONDS)
        except scrape.ScrapeError as error:
            self.scrape_error = str(error)
            if self._is_up and not self._stopping.is_set() and error.reason in {"connection_refused", "unreachable"}:
                self._is_up = False
                self._write_event("exit")
            return
        if self._is_up is False:
            self._write_event("start", early=0.002)
        data = self.scrubber.page(page).encode("utf-8", "replace")
        if self.is_full:
            return
        self.scrapes += 1
        self._scraped_bytes += len(data)
        self._last_ms = max(self._last_ms + 1, round(1000 * self._clock()))
        whole = self.output / f"metrics-{self.scrapes:04}-{self._last_ms}.prom.gz"
        part = whole.with_suffix(".part")
        part.write_bytes(gzip.compress(data, mtime=0))
        part.rename(whole)
        if self._is_up is False:
            self._write_event("ready")
        self._is_up = True

    def _clock(self) -> float:
        """The time of the log's clock, seconds."""
        now = time.time()
        ahead = self._offsets
        latest = ahead[-1][0] if ahead else 0.0
        return now + max((offset for at, offset in ahead if latest - at < _CLOCK_SECONDS), default=0.0)

    def _write_event(self, event: str, early: float = 0.0) -> None:
        with (self.output / "events.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"t": round(self._clock() - early, 3), "event": event}) + "\n")

    def _pack(self) -> None:
        """Pack the log; the unpacked one goes only when the packed one is whole."""
        plain = self.output / "server.log"
        part = self.output / "server.log.part"
        with (
            plain.open("rb") as source,
            part.open("wb") as sink,
            gzip.GzipFile("", "wb", fileobj=sink, mtime=0) as packed,
        ):
            shutil.copyfileobj(source, packed)
        part.rename(self.output / "server.log.gz")
        plain.unlink()


def run(recorder: Recorder, seconds: float | None) -> int:
    """Record until the time is over, Ctrl-C or SIGTERM; the exit status: 0, or 1 where no scrape succeeded.

    For the main thread only: it handles the signals. Raises `UsageError`.
    """
    with stopped_by_signal(recorder.stop):
        recorder.run(seconds)
    output, ended = recorder.output, "; it ended because no more fits" if recorder.is_full else ""
    sys.stderr.write(
        f"{output}: {recorder.lines} lines ({recorder.scrubber.left_out} left out), {recorder.scrapes} scrapes{ended}."
        f" Look through it before you share it: sglang-tuning-exporter replay {output}\n"
    )
    if recorder.scrapes:
        return 0
    sys.stderr.write(f"{output}: no scrape of {recorder.config.metrics_url} succeeded: {recorder.scrape_error}\n")
    return 1
