"""`report`: a log of last night in, what limited the server and what to change out."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.diagnosis.json_findings import Document
from sglang_tuning_exporter.diagnosis.table import BY_ID
from sglang_tuning_exporter.report.comparison import StartArgs, changed_args, compare
from sglang_tuning_exporter.report.document import build
from sglang_tuning_exporter.report.files import shown
from sglang_tuning_exporter.report.inputs import Logs
from sglang_tuning_exporter.report.reading import ReadLogs, check_output, profile_of
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
