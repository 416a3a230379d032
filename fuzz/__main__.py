"""`python -m fuzz [--seconds S] [--seed N] [--target NAME …]`: hostile input for every reader of outside input, by
Hypothesis.

It runs the files of a log through random orders of events, then mutates the real inputs of each target of
`fuzz/targets.py`. The time is for all together. Each check states what must not happen; an input that makes it happen
is kept under `build/fuzz/<target>/`. Move it to `tests/data/fuzz/<target>/`, where a test tries it again, and correct
the fault. Exit status 1 when something was found.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
import traceback
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from fuzz import files
from fuzz.targets import TARGETS, Target

BUILT = Path("build/fuzz")
_ROUND = 20  # inputs between two looks at the clock


def tried(target: Target, seconds: float, first: int, place: Path) -> int:
    """Try one target for this long.

    Returns 0, or 1 when something was found; Hypothesis makes that as short as it can.
    """
    begin, done, number, last, inputs = time.monotonic(), 0, first, b"", target.inputs()

    def one(text: bytes) -> None:
        nonlocal done, last
        done, last = done + 1, text
        target.check(text)

    every = settings(
        max_examples=_ROUND, deadline=None, database=None, phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    while done == 0 or time.monotonic() - begin < seconds:
        try:
            seed(number)(every(given(inputs)(one)))()
        except Exception:  # noqa: BLE001 - any exception is what is looked for
            traceback.print_exc()
            place.mkdir(parents=True, exist_ok=True)
            (place / "found").write_bytes(last)
            print(f"{target.name}: found something with seed {first}; the input is {place / 'found'}", file=sys.stderr)
            return 1
        number += 1
    print(f"{target.name}: {done} inputs in {time.monotonic() - begin:.0f} s, nothing found, seed {first}", flush=True)
    return 0


def main() -> int:
    """Read the flags and run."""
    names = ("files", *TARGETS)
    parser = argparse.ArgumentParser(
        prog="python -m fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="for all targets together (default 600)")
    parser.add_argument("--runs", type=int, default=2000, help="orders of events in a log's files (default 2000)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31), help="repeat a run")
    parser.add_argument("--target", nargs="+", choices=names, default=names, help=f"which: {', '.join(names)}")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)  # a seed may be a damaged file, which is said aloud
    print(f"seed {arguments.seed}", flush=True)
    share, found = arguments.seconds / len(arguments.target), 0
    for number, name in enumerate(arguments.target, arguments.seed):
        if name == "files":
            found |= files.run(arguments.runs, number)
        else:
            found |= tried(TARGETS[name], share, number, BUILT / name)
    return found


if __name__ == "__main__":
    sys.exit(main())
