"""`python -m alert_matrix [--only ALERT …] [--scrape S …] [--evaluation S …] [--rules FILE]`: play the matrix and say what fails.

Exit status 1 when something fails that is not in `beyond.BEYOND`, or when something there passes in every run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from alert_matrix.beyond import idle
from alert_matrix.columns import EVALUATIONS, SCRAPES
from alert_matrix.machine import Outcome, Part, every_case, healthy_case, parts, play_all

RULES = Path("alerts/rules/sglang-tuning.rules.yml")


def main(arguments: list[str] | None = None) -> int:
    """Play and report."""
    parser = argparse.ArgumentParser(prog="python -m alert_matrix", description=__doc__)
    parser.add_argument("--rules", type=Path, default=RULES, help="the rule file")
    parser.add_argument("--only", default="", help="alerts or diagnoses whose names contain one of these, with commas")
    parser.add_argument("--scrape", type=int, nargs="+", default=list(SCRAPES), help="scrape intervals, in seconds")
    parser.add_argument("--evaluation", type=int, nargs="+", default=list(EVALUATIONS), help="evaluation intervals")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="promtools at once")
    parser.add_argument("--json", type=Path, help="add every outcome to this file, a line for each, as it is known")
    parser.add_argument("--failures", type=Path, help="write what fails, a line for each run")
    options = parser.parse_args(arguments)
    names = [name for name in options.only.split(",") if name]
    cases = [case for case in every_case() if not names or any(name in f"{case.name} {case.row.id}" for name in names)]
    if not names or "healthy" in names:
        cases.append(healthy_case())

    def report(part: Part, outcomes: list[Outcome]) -> None:
        failing = sum(bool(outcome.fault and not outcome.beyond) for outcome in outcomes)
        print(f"{part}{', long gaps' if part.with_long_gaps else ''}: {failing} of {len(outcomes)} fail", flush=True)
        if options.json:
            with options.json.open("a") as file:
                file.writelines(json.dumps(asdict(outcome)) + "\n" for outcome in outcomes)

    begin = time.monotonic()
    found = play_all(parts(cases, options.scrape, options.evaluation), options.rules.read_text(), options.jobs, report)
    failing = [outcome for outcome in found if outcome.fault and not outcome.beyond]
    for name, count in Counter(outcome.alert for outcome in failing).most_common():
        total = sum(outcome.alert == name for outcome in found)
        print(f"{name}: {count} of {total} fail")
    if options.failures:
        options.failures.write_text("".join(f"{outcome}\n" for outcome in failing))
    unneeded = idle(outcome.beyond for outcome in found) if not names and len(options.scrape) == len(SCRAPES) else []
    for reason in unneeded:
        print(f"in beyond.BEYOND, and nothing fails for it: {reason}")
    beyond = sum(bool(outcome.beyond) for outcome in found)
    print(
        f"{len(found)} combinations in {time.monotonic() - begin:.0f} s: {len(failing)} fail, {beyond} beyond any rule"
    )
    return int(bool(failing or unneeded))


if __name__ == "__main__":
    sys.exit(main())
