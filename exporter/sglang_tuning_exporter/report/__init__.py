"""`report`: a log of last night in, what limited the server and what to change out."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from sglang_tuning_exporter.config import UsageError
from sglang_tuning_exporter.guide.document import Document
from sglang_tuning_exporter.guide.profiles import PROFILES
from sglang_tuning_exporter.report.analysis import Analysis
from sglang_tuning_exporter.report.document import Input, build
from sglang_tuning_exporter.report.inputs import Logs, shown
from sglang_tuning_exporter.report.terminal import render

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from sglang_tuning_exporter.guide.profiles import Profile

FORMATS = ("text", "json")
NOTHING_TO_CHANGE, SOMETHING_TO_CHANGE = 0, 1


def run(
    logs: Sequence[str],
    *,
    format: str,  # noqa: A002 - the flag's name
    output: Path | None,
    profile: str,
    own_thresholds: Mapping[str, float] | None = None,
) -> int:
    """Write the report of `logs`; 0 when nothing is to be changed, 1 when something is. Raises `UsageError`."""
    if format not in FORMATS:
        raise UsageError(f"--format={format}: give one of {', '.join(FORMATS)}")
    if profile not in PROFILES:
        raise UsageError(f"--profile={profile}: give one of {', '.join(PROFILES)}")
    read = Logs(logs)
    if output is not None:
        _check_output(output, read)
    document = report(read, PROFILES[profile].with_thresholds(own_thresholds or {}))
    text = json.dumps(document, indent=2, allow_nan=False) + "\n" if format == "json" else render(document)
    _write(text.encode("utf-8", "replace"), output)
    sys.stderr.writelines(f"sglang-tuning-exporter: {note}\n" for note in read.notes)
    return SOMETHING_TO_CHANGE if document["findings"] else NOTHING_TO_CHANGE


def report(logs: Logs, profile: Profile) -> Document:
    """Make the report's document. Raises `UsageError` for input that cannot be read or is no log of SGLang."""
    analysis = Analysis(profile)
    for moment, event in logs.events():
        analysis.take(moment, event)
    start, end = logs.first, max(logs.ends, default=None)
    if start is not None and end is not None and end < start:  # the clock was set back
        start, end = end, start
    return build(Input(logs.names, logs.lines, logs.unrecognised, start, end), analysis)


def _check_output(output: Path, logs: Logs) -> None:
    name = f"--output={shown(str(output))}"
    if output.is_dir():
        raise UsageError(f"{name}: is a directory; give a file")
    if not output.parent.is_dir():
        raise UsageError(f"{name}: there is no such directory; give a file in one that exists")
    if logs.read_from(output):
        raise UsageError(f"{name}: is one of the logs; give another file")


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
