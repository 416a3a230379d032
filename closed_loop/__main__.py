"""`python -m closed_loop [run|install|document]`: see CONTRIBUTING.md."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from closed_loop.chain import Lane
from closed_loop.installation import RELEASES, install
from closed_loop.loops import BY_NAME, LOOPS
from closed_loop.series import Bench, run_loop
from sglang_tuning_exporter.config import UsageError

RESULTS = Path(".closed-loop")
_BEGUN = time.monotonic()


def say(words: str) -> None:
    """Show progress, with the seconds since the start."""
    print(f"[{time.monotonic() - _BEGUN:5.0f} s] {words}", flush=True)


def main() -> int:
    """Run what the command line asks for; gives the exit status."""
    parser = argparse.ArgumentParser(prog="python -m closed_loop", description=__doc__)
    tasks = parser.add_subparsers(dest="task", required=True)
    running = tasks.add_parser("run", help="run loops whose results are not there yet")
    running.add_argument("--runs", type=int, default=1, help="runs of each loop")
    running.add_argument("--only", default="", metavar="NAME,NAME", help=f"of {', '.join(BY_NAME)}")
    running.add_argument(
        "--lane", type=int, default=0, choices=(0, 1), help="port and cores; two lanes run side by side"
    )
    running.add_argument("--results", type=Path, default=RESULTS)
    installing = tasks.add_parser("install", help="install a release of SGLang for CPUs")
    installing.add_argument("version", nargs="?", default=RELEASES[0], choices=RELEASES)
    args = parser.parse_args()
    try:
        if args.task == "install":
            install(args.version, say=say)
            return 0
        return _run(args)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _run(args: argparse.Namespace) -> int:
    names = [name for name in args.only.split(",") if name] or [loop.name for loop in LOOPS]
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        raise UsageError(f"--only={unknown[0]}: give some of {', '.join(BY_NAME)}")
    lane = Lane.of(args.lane)
    lane.stay()
    bench = Bench(install(RELEASES[0], say=say), lane, args.results, say)
    for number in range(1, args.runs + 1):
        for name in names:
            run_loop(bench, BY_NAME[name], number)
    return 0


if __name__ == "__main__":
    sys.exit(main())
