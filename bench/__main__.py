"""Print tables of figures, each beside its peer's in the same run: `python -m bench [PART …] [--megabytes N]
[--write]`.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench import corpus, equivalence, reading, running
from bench.table import BRIEF, Table, markdown

if TYPE_CHECKING:
    from collections.abc import Callable

MEGABYTES = 60
DOCUMENT = Path(__file__).parent.parent / "docs" / "benchmarks.md"
_ABOUT = """# Benchmarks

Made by `make bench`: every figure beside a peer's in the same run. Ratios travel from machine to machine,
seconds do not.
`python -m bench PART` prints a part and how it is measured.
"""


def _machine() -> str:
    return f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}, Python {platform.python_version()}."


def main() -> None:
    """Measure, print, and with `--write` write `docs/benchmarks.md`."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help="log, busy, report, page, idle, scrapes, lines, chain (default: all)"
    )
    parser.add_argument("--megabytes", type=int, default=MEGABYTES, help=f"how long the log is (default {MEGABYTES})")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md, of all parts")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory, size = Path(name), given.megabytes * 1_000_000
        parts: dict[str, Callable[[], Table]] = {
            "idle": lambda: running.at_rest(directory),
            "scrapes": lambda: running.scrapes(directory),
            "lines": lambda: running.lines(directory),
            "chain": lambda: running.chains(directory),
            "log": lambda: reading.logs(
                corpus.write(directory / "server.log", size), directory, "Reading a log", "A log made of recordings"
            ),
            "busy": lambda: reading.logs(
                corpus.write_busy(directory / "busy.log", size),
                directory,
                "Reading the log of a busy server",
                "A start, and tens of requests a second",
            ),
            "report": lambda: reading.reports(directory, size),
            "page": reading.pages,
        }
        wanted = given.parts or list(parts)
        if unknown := [part for part in wanted if part not in parts]:
            parser.error(f"{unknown[0]}: give one of {', '.join(parts)}")
        tables: list[Table] = []
        for part in wanted:
            begin = time.monotonic()
            sys.stderr.write(f"{part} …")
            sys.stderr.flush()
            try:
                tables.append(parts[part]())
            except equivalence.DifferentError as error:
                sys.exit(f"the two are not comparable, they found different things:\n{error}")
            sys.stderr.write(f" {time.monotonic() - begin:.0f} s\n")
    sys.stdout.write("\n".join(table.text() for table in tables))
    if given.write and not given.parts:
        rows = [row for table in tables for row in table.brief()]
        DOCUMENT.write_text(
            "\n".join([_ABOUT, _machine() + "\n", markdown(BRIEF, rows, figures=True), ""]), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
