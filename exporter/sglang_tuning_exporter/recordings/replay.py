"""Replays a recorded server: its HTTP endpoints, and its log as a growing file."""

from __future__ import annotations

import math
import re
import threading
import time
from contextlib import ExitStack
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory

from sglang_tuning_exporter.config import values
from sglang_tuning_exporter.recordings import Answer, serving, stopped_by_signal
from sglang_tuning_exporter.recordings.recording import Recording, load

MAX_SPEED = 10_000.0
_STEP_SECONDS = 0.02
_LONGEST_LOG_BYTES = 32 << 20  # above this a new round starts with an empty file: a long demo does not fill the disk
_JSON = "application/json"
_NOT_FOUND: Answer = (404, _JSON, b'{"detail":"Not Found"}')
_CUMULATIVE_TYPE = re.compile(rb"^# TYPE (\S+) (?:counter|histogram|summary)\s*$", re.MULTILINE)
_SAMPLE = re.compile(rb"^(?P<series>(?P<name>[\w:]+)(?:\{.*\})?) (?P<value>\d[\d.e+-]*)", re.MULTILINE)
_MEMBER = re.compile(rb"_(?:bucket|sum|count)$")
_EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


def find(name: str) -> Path:
    """Return a recording's directory by its path, or by the name of a packaged one.

    Raise `UsageError` for an unknown name.
    """
    is_path = "/" in name or name in {".", ".."} or Path(name).is_dir()
    return Path(name) if is_path else packaged(name)


def packaged(name: str) -> Path:
    """Return the directory of a packaged recording. Raise `UsageError` if there is none with this name."""
    root = Path(str(resources.files("sglang_tuning_exporter") / "recordings"))
    names = sorted(path.name for path in root.glob("[!_]*") if path.is_dir())
    if name not in names:
        raise values.UsageError(f"recording={name}: is not packaged; one of: {', '.join(names)}")
    return root / name


class ReplayServer:
    """Serves a recording over HTTP and lets its log grow, `speed` recorded seconds per second.

    With `loop` it starts again at the end, from the moment the server was ready, with counters that go on: counters
    that begin again would show a restart. Without, the last scrape is still served and the log is quiet.
    `position_seconds`: recorded seconds since the server was ready, of this round; `finished`: the recording has been
    played to its end;
    `failure`: why the log cannot be written any more, such as a full disk. Raises `UsageError` for an invalid speed,
    and where the log or, at the start, the port cannot be opened. `url` is known from then on.
    """

    def __init__(
        self,
        recording: Recording,
        *,
        log_path: Path,
        address: str = "127.0.0.1:0",
        speed: float = 1.0,
        loop: bool = False,
    ) -> None:
        if not (math.isfinite(speed) and 0 < speed <= MAX_SPEED):
            raise values.UsageError(
                f"speed={speed}: give recorded seconds per second, above 0 and at most {MAX_SPEED:.0f}"
            )
        try:
            self._log = log_path.open("ab", buffering=0)
        except OSError as error:
            raise values.UsageError(f"log_file={log_path}: cannot be written: {error.strerror or error}") from error
        self.url, self._address = "", address
        self._ending = ExitStack()
        self._ending.callback(self._log.close)
        self.recording, self._speed, self._loop = recording, speed, loop
        self._moment = (0, 0.0)  # rounds that have ended, and the position in this one: read and set together
        self.finished = False
        self.failure: OSError | None = None
        self._written = 0
        self._round_gains = _gains_of(recording) if loop else {}
        self._stopping = threading.Event()
        self._player = threading.Thread(target=self._play, name="replay-log", daemon=True)

    def start(self) -> None:
        """Open the port, write the log up to the moment the server was ready, and start the replay.

        A failed start must be stopped too.
        """
        self.url = self._ending.enter_context(serving(self._address, self._answer, "listen_address"))
        self._advance(0.0)
        self._player.start()

    def stop(self) -> None:
        """Close the port and the log. A second call does nothing."""
        self._stopping.set()
        if self._player.is_alive():
            self._player.join()
        self._ending.close()

    def _play(self) -> None:
        began, rounds = time.monotonic(), 0
        while not self._stopping.wait(_STEP_SECONDS):
            position = (time.monotonic() - began) * self._speed
            if position >= self.recording.length_seconds:
                self._advance(self.recording.length_seconds, rounds)
                if not self._loop or self.failure is not None:
                    self.finished = True
                    return
                # A recording shorter than a step would otherwise restart thousands of times at once.
                began = time.monotonic()
                # The start is not repeated: that would show a server that restarts every few minutes.
                self._written = self.recording.count_lines_until(0.0)
                rounds, position = rounds + 1, 0.0
                if self._log.tell() > _LONGEST_LOG_BYTES:
                    self._log.truncate(0)
            self._advance(position, rounds)

    @property
    def position_seconds(self) -> float:
        """Recorded seconds since the server was ready, of this round."""
        return self._moment[1]

    def _advance(self, position: float, rounds: int = 0) -> None:
        until = self.recording.count_lines_until(position)
        rest = memoryview(b"".join(line.text for line in self.recording.lines[self._written : until]))
        self._written = until
        try:
            while rest:
                rest = rest[self._log.write(rest) :]
        except OSError as error:
            self.failure = error
        self._moment = rounds, position

    def _gone_on(self, page: bytes, rounds: int) -> bytes:
        """Return a page with the counters of the rounds before; it has all series of the last one, because none goes
        again.
        """
        last = self.recording.scrape_at(self.recording.length_seconds)
        if not rounds or last is None:
            return page
        now = {match["series"]: float(match["value"]) for match in _SAMPLE.finditer(page)}

        def value(match: re.Match[bytes]) -> bytes:
            series = match["series"]
            return b"%b %r" % (series, now.get(series, 0.0) + rounds * self._round_gains.get(series, 0.0))

        return _SAMPLE.sub(value, last.text)

    def _answer(self, path: str, _: bytes | None) -> Answer | None:
        """Return the recorded server's answer; None while it was down."""
        rounds, position = self._moment
        phase = self.recording.phase_at(position)
        if phase == "down":
            return None
        match path:
            case "/metrics":
                scrape = self.recording.scrape_at(position)
                return _NOT_FOUND if scrape is None else (200, _EXPOSITION, self._gone_on(scrape.text, rounds))
            case "/health" | "/health_generate":
                return (200 if phase == "ready" else 503, _JSON, b"")
            case "/server_info" | "/get_server_info":
                info = self.recording.server_info
                return _NOT_FOUND if info is None else (200, _JSON, info)
            case _:
                return _NOT_FOUND


def _gains_of(recording: Recording) -> dict[bytes, float]:
    """Return what every counter gains from the moment the server was ready to the end of a recording."""
    first, last = recording.scrape_at(0.0), recording.scrape_at(recording.length_seconds)
    begin, end = (_counters(scrape.text) if scrape is not None else {} for scrape in (first, last))
    return {series: value - begin.get(series, 0.0) for series, value in end.items()}


def _counters(page: bytes) -> dict[bytes, float]:
    """Return the values of all cumulative series of a page."""
    families = set(_CUMULATIVE_TYPE.findall(page))
    found = {}
    for match in _SAMPLE.finditer(page):
        name = match["name"]
        if name in families or _MEMBER.sub(b"", name) in families or name.endswith(b"total_retracted_reqs"):
            found[match["series"]] = float(match["value"])
    return found


def run(directory: str, *, speed: float, listen_address: str, log_file: Path | None, loop: bool) -> int:
    """Replay a recording until Ctrl-C or SIGTERM; returns exit status 0.

    Prints one line with what to pass to `serve`. Without `log_file` the log grows in a temporary directory that goes
    at the end. Raises `UsageError` for a directory that is no recording, and for an address or a log file that cannot
    be used. For the main thread only: it handles the signals.
    """
    recording, address = load(find(directory)), values.check(values.address, "listen_address", listen_address)
    asked_to_stop = threading.Event()
    with ExitStack() as stack:
        if log_file is None:
            scratch = TemporaryDirectory(prefix="sglang-replay-", ignore_cleanup_errors=True)
            log_file = Path(stack.enter_context(scratch)) / "server.log"
        server = ReplayServer(recording, log_path=log_file, address=address, speed=speed, loop=loop)
        stack.enter_context(stopped_by_signal(asked_to_stop.set))
        stack.callback(server.stop)
        server.start()
        print(f"--sglang-url {server.url} --log-file {log_file}", flush=True)  # noqa: T201 - the command's output
        while server.failure is None and not asked_to_stop.wait(0.5):
            pass
    if server.failure is not None:
        raise values.UsageError(f"log_file={log_file}: cannot be written: {server.failure.strerror or server.failure}")
    return 0
