"""The one place that starts promtool, and reads its output: what it found where a test of rules expects nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

LESS_COLLECTING = {"GOGC": "400"}  # four times the memory between two garbage collections: a quarter less time
PRESENT = shutil.which("promtool") is not None
_GOT = re.compile(r"^\s+got: (.*)$", re.MULTILINE)


class UnplayableError(Exception):
    """promtool is missing, or refused what it was given."""


class Said(NamedTuple):
    """What a run of promtool printed, and its exit status."""

    status: int
    words: str


def promtool(*arguments: str | Path, given: str | None = None, seconds: float = 300) -> Said:
    """Run promtool with `given` as its input. Raises `UnplayableError` where it is not installed."""
    program = shutil.which("promtool")
    if program is None:
        raise UnplayableError("promtool is missing: install Prometheus 2.42 or newer (Debian: apt install prometheus)")
    command = [program, *map(str, arguments)]
    ran = subprocess.run(
        command,
        env={**os.environ, **LESS_COLLECTING},
        input=given,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=seconds,
        check=False,
    )
    return Said(ran.returncode, ran.stdout + ran.stderr)


def got(words: str, count: int) -> list[str]:
    """Give its answers to `count` queries that expected nothing. Raises `UnplayableError` with its words where it gave others."""
    answers = _GOT.findall(words)
    if len(answers) != count:
        raise UnplayableError(words[-2000:])
    return answers
