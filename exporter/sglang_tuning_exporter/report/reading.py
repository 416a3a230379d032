"""Logs read to their end, with the state and the alerts at each moment, and a line that shows how much of them was read."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO

from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.report.alarms import AlarmClock
from sglang_tuning_exporter.report.analysis import Analysis
from sglang_tuning_exporter.report.files import shown
from sglang_tuning_exporter.report.inputs import Logs
from sglang_tuning_exporter.state.profiles import PROFILES, Profile

# A smaller log is read before a progress line helps.
WORTH_BYTES = 64 << 20
_EVERY_SECONDS = 0.2
_BAR = 30


class ReadLogs:
    """Logs, the analysis of what they show, and their alerts."""

    def __init__(self, logs: Logs, profile: Profile) -> None:
        self.analysis, self.logs, self.alarms = Analysis(profile), logs, AlarmClock(profile)
        self.last_event_at: float | None = None

    def read(self) -> ReadLogs:
        """Read all, and return this. Raises `UsageError` for input that cannot be read or is no log of SGLang."""
        with watched(self.logs):
            for _ in self.evaluations():
                pass
        return self

    def evaluations(self) -> Iterator[float]:
        """Read all; return each time at which Prometheus evaluates, with state and alerts as they were then. Raises as `read` does."""
        analysis, alarms = self.analysis, self.alarms
        with closing(self.logs.events()) as events:
            for moment, event in events:
                if moment >= alarms.next_due:
                    for at in alarms.due(moment):
                        analysis.wait(at)
                        yield self._evaluated(at)
                analysis.take(moment, event)
                if event is not None:
                    self.last_event_at = moment
        for at in alarms.rest():
            self._end(at)
            yield self._evaluated(at)

    def _evaluated(self, at: float) -> float:
        self.alarms.take(self.analysis.state, at, unrecognised=self.logs.unrecognised_taken.total())
        return at

    def _end(self, at: float) -> None:  # noqa: ARG002 - a backfill lets time pass until then
        self.analysis.conclude()

    @property
    def span(self) -> tuple[float | None, float | None]:
        """The first and the last printed time, unix seconds."""
        start, end = self.logs.first, max(self.logs.ends, default=None)
        is_set_back = start is not None and end is not None and end < start
        return (end, start) if is_set_back else (start, end)

    @property
    def notes(self) -> list[str]:
        """Notes about what could not be read, and about times."""
        facts = self.analysis.state.facts
        cut = (
            f"the log has only {len(facts.args)} of the server's arguments, the others were cut off or not printed: "
            "values in force may be unknown, and no command line is given"
        )
        return [*self.logs.notes, *self.logs.remarks, *([cut] if facts.args_are_cut else [])]


def profile_of(name: str, own_thresholds: Mapping[str, float] | None) -> Profile:
    """Return a profile by its name, with the user's own thresholds."""
    return PROFILES[name].with_thresholds(own_thresholds or {})


def check_output(output: Path, *logs: Logs, replaced: bool = False) -> None:
    """Check that a file can be written beside these logs; `replaced`: by another file, so that it must be an ordinary one.

    Raises `UsageError`.
    """
    name = f"--output={shown(str(output))}"
    if output.is_dir():
        raise UsageError(f"{name}: is a directory; give a file")
    if replaced and output.exists() and not output.is_file():
        raise UsageError(f"{name}: is no ordinary file; give one that can be written anew")
    if not output.parent.is_dir():
        raise UsageError(f"{name}: there is no such directory; give a file in one that exists")
    if output.exists() and any(output.samefile(path) for each in logs for path in each.paths):
        raise UsageError(f"{name}: is one of the logs; give another file")


class Progress:
    """Bytes read of `total` (0: not known, as of a pipe), as a line that overwrites itself. Writes nothing where `stream` is no terminal."""

    def __init__(self, stream: IO[str], total: int, *, piped: bool = False, worth: int = WORTH_BYTES) -> None:
        self._stream, self._total = stream, 0 if piped else total
        self._shown = stream.isatty() and (piped or total >= worth)
        self._begin = self._last = time.monotonic()
        self._read = 0

    def add(self, number: int) -> None:
        """Count `number` more bytes as read."""
        self._read += number
        now = time.monotonic()
        if self._shown and now - self._last >= _EVERY_SECONDS:
            self._last = now
            self._stream.write(f"\r\x1b[K{progress_line(self._read, self._total, now - self._begin)}")
            self._stream.flush()

    def clear(self) -> None:
        """Remove the line."""
        if self._shown and self._last > self._begin:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


@contextmanager
def watched(logs: Logs, worth: int = WORTH_BYTES) -> Iterator[None]:
    """Show how much of logs of at least `worth` bytes is read."""
    progress = Progress(sys.stderr, logs.size, piped=logs.is_piped, worth=worth)
    logs.watch(progress.add)
    try:
        yield
    finally:
        progress.clear()


def progress_line(read: int, total: int, seconds: float) -> str:
    """Return the line: a bar and the time left where the total is known, else how much was read."""
    speed = read / seconds if seconds > 0 else 0.0
    size = f"{read / (1 << 20):.0f} MB"
    if not total:
        return f"{size} read, {speed / (1 << 20):.0f} MB/s"
    share = min(read / total, 1.0)
    bar = "#" * int(_BAR * share)
    left = f", {(total - read) / speed:.0f} s left" if speed > 0 and read < total else ""
    return f"[{bar:<{_BAR}}] {100 * share:3.0f} %  {size} of {total / (1 << 20):.0f}{left}"
