"""`report`: a log of last night in, what limited the server and what to change out; and how logs are read for every command."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO

from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.diagnosis.json_findings import Document
from sglang_tuning_exporter.diagnosis.table import BY_ID
from sglang_tuning_exporter.report.alarms import AlarmClock
from sglang_tuning_exporter.report.analysis import Analysis
from sglang_tuning_exporter.report.comparison import StartArgs, changed_args, compare
from sglang_tuning_exporter.report.document import build
from sglang_tuning_exporter.report.files import shown
from sglang_tuning_exporter.report.inputs import Logs
from sglang_tuning_exporter.report.terminal import Style, render
from sglang_tuning_exporter.sglang.clean import clean, cleaned
from sglang_tuning_exporter.state.profiles import PROFILES, Profile

NOTHING_TO_CHANGE, SOMETHING_TO_CHANGE = 0, 1


def run(
    logs: Sequence[str],
    *,
    format: str,  # noqa: A002 - the flag's name
    output: Path | None,
    profile: str,
    own_thresholds: Mapping[str, float] | None = None,
    against: Sequence[str] = (),
    jobs: int = 1,
    most: int | None = None,
) -> int:
    """Write the report of `logs`; 0 when nothing is to be changed, 1 when something is. Raises `UsageError`."""
    judged = PROFILES[profile].with_thresholds(own_thresholds or {})
    night = ReadLogs(Logs(logs, jobs=jobs, most=most), judged)
    before = ReadLogs(Logs(against, jobs=jobs, most=most), judged) if against else None
    if output is not None:
        check_output(output, *(each.logs for each in (night, before) if each is not None))
    night.read()
    document = cleaned(build(night, None if before is None else _compared(before, night)))
    if format == "json":
        text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    elif format == "html":
        from sglang_tuning_exporter.report import page  # noqa: PLC0415 - templates are for this format alone

        text = page.render(document, night.analysis)
    else:
        text = render(document, night.analysis, _style() if output is None else Style())
    _write(text.encode("utf-8", "replace"), output)
    sys.stderr.writelines(f"sglang-tuning-exporter: {clean(note)}\n" for note in night.logs.notes)
    wrong = [finding for finding in document["findings"] if not BY_ID[finding["diagnosis"]].is_chance]
    return SOMETHING_TO_CHANGE if wrong else NOTHING_TO_CHANGE


def report(logs: Logs, profile: Profile) -> Document:
    """Make the report's document. Raises `UsageError` for input that cannot be read or is no log of SGLang."""
    return build(ReadLogs(logs, profile).read())


def _compared(before: ReadLogs, after: ReadLogs) -> Document:
    """Return how the start that one report judges differs from the other's."""
    before.read()
    old, new = before.analysis.conclude(), after.analysis.conclude()
    was, now = StartArgs.of(old.facts), StartArgs.of(new.facts)
    known = bool(was.printed and now.printed)
    change = compare(old.figures, new.figures, changed_args(was, now), old.judgement.verdict, known=known)
    return {"against": before.logs.names, **change}


def _style() -> Style:
    """Colour only on a terminal, and only where nobody asked for none (https://no-color.org)."""
    if not sys.stdout.isatty():
        return Style()
    colour = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return Style(colour, shutil.get_terminal_size().columns)


def _write(data: bytes, output: Path | None) -> None:
    try:
        if output is not None:
            output.write_bytes(data)
        else:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
    except OSError as error:
        name = "standard output" if output is None else f"--output={shown(str(output))}"
        raise UsageError(f"{name}: {error.strerror or error}; give a file that can be written") from None


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

    def __init__(self, stream: IO[str], total: int, *, worth: int = WORTH_BYTES) -> None:
        self._stream, self._total = stream, total
        self._shown = stream.isatty() and (not total or total >= worth)
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
        if self._last > self._begin:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


@contextmanager
def watched(logs: Logs, worth: int = WORTH_BYTES) -> Iterator[None]:
    """Show how much of logs of at least `worth` bytes is read."""
    progress = Progress(sys.stderr, logs.size, worth=worth)
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
