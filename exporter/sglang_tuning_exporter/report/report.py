"""`report`: a log of last night in, what limited the server and what to change out."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.diagnosis.json_findings import Document
from sglang_tuning_exporter.diagnosis.table import BY_ID
from sglang_tuning_exporter.report.alarms import AlarmClock
from sglang_tuning_exporter.report.analysis import Analysis
from sglang_tuning_exporter.report.chapters import change_document
from sglang_tuning_exporter.report.comparison import ArgumentChanges, changed_args, compare
from sglang_tuning_exporter.report.document import Input, build
from sglang_tuning_exporter.report.files import shown
from sglang_tuning_exporter.report.given import check_output, profile_of
from sglang_tuning_exporter.report.inputs import Logs
from sglang_tuning_exporter.report.progress import watched
from sglang_tuning_exporter.report.terminal import Style, render
from sglang_tuning_exporter.sglang.clean import clean, cleaned
from sglang_tuning_exporter.state.profiles import Profile

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
    judged = profile_of(profile, own_thresholds)
    read = Logs(logs, jobs=jobs, most=most)
    others = Logs(against, jobs=jobs, most=most) if against else None
    if output is not None:
        check_output(output, *(part for part in (read, others) if part is not None))
    night = ReadLogs(read, judged)
    before = None if others is None else _compared(ReadLogs(others, judged), night)
    document = cleaned(build(night.input, night.analysis, before))
    if format == "json":
        text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    elif format == "html":
        from sglang_tuning_exporter.report import page  # noqa: PLC0415 - templates are for this format alone

        text = page.render(document, night.analysis)
    else:
        text = render(document, night.analysis, _style() if output is None else Style())
    _write(text.encode("utf-8", "replace"), output)
    sys.stderr.writelines(f"sglang-tuning-exporter: {clean(note)}\n" for note in read.notes)
    wrong = [finding for finding in document["findings"] if not BY_ID[finding["diagnosis"]].is_chance]
    return SOMETHING_TO_CHANGE if wrong else NOTHING_TO_CHANGE


class ReadLogs:
    """Logs read to their end. Raises `UsageError` for input that cannot be read or is no log of SGLang."""

    def __init__(self, logs: Logs, profile: Profile) -> None:
        self.analysis, self.logs, self._alarms = Analysis(profile), logs, AlarmClock(profile)
        with watched(logs):
            self._read()

    def _read(self) -> None:
        analysis, alarms, state = self.analysis, self._alarms, self.analysis.state
        with closing(self.logs.events()) as events:
            for moment, event in events:
                if moment >= alarms.next_due:
                    for at in alarms.due(moment):
                        analysis.wait(at)
                        alarms.take(state, at, unrecognised=self.logs.unrecognised_taken.total())
                analysis.take(moment, event)
        analysis.conclude()
        for at in alarms.rest():
            alarms.take(state, at, unrecognised=self.logs.unrecognised_taken.total())

    @property
    def input(self) -> Input:
        """What is known beside the analysis."""
        logs, start, end = self.logs, self.logs.first, max(self.logs.ends, default=None)
        if start is not None and end is not None and end < start:  # the clock was set back
            start, end = end, start
        notes = [*logs.notes, *logs.remarks]
        if (facts := self.analysis.state.facts).args_are_cut:
            notes.append(
                f"the log has only {len(facts.args)} of the server's arguments, the others were cut off or not printed: "
                "values in force may be unknown, and no command line is given"
            )
        return Input(logs.names, logs.lines, logs.unrecognised, start, end, notes, self._alarms.spans())


def report(logs: Logs, profile: Profile) -> Document:
    """Make the report's document. Raises `UsageError` for input that cannot be read or is no log of SGLang."""
    reading = ReadLogs(logs, profile)
    return build(reading.input, reading.analysis)


def _compared(before: ReadLogs, after: ReadLogs) -> Document:
    """Return how the start that one report judges differs from the other's."""
    old, new = before.analysis.conclude(), after.analysis.conclude()
    was, now = ArgumentChanges.of(old.facts), ArgumentChanges.of(new.facts)
    known = bool(was.printed and now.printed)
    changed = changed_args(was, now)
    change = compare(old.figures, new.figures, changed, old.judgement.verdict, known=known)
    return {"against": before.logs.names, **change_document(change)}


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
