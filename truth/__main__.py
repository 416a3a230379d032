"""`python -m truth [FAMILY …]`: ask the product about every case and print each family's score by way in.

Exit status 1 if a check is wrong that `failing.yaml` does not list, or right although it is listed there.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from truth import ways
from truth.cases import WAYS, Case, data

# Each with the part of its cases that a sample asks: one in so many.
FAMILIES = {
    "counts": 25, "guide": 9, "situations": 40, "simulated": 30, "today": 16, "every_way": 23, "surface": 1,
    "processes": 11,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Result:
    """One check of one case by one way in; `wrong` is empty where it is right."""

    family: str
    case: str
    way: str
    check: str
    wrong: str

    @property
    def key(self) -> str:
        """How `failing.yaml` names it."""
        return f"{self.case} {self.way} {self.check}"


def ask(family: str, case: Case, way: str) -> list[Result]:
    """Ask about one case; an input at which the product ends or hangs is wrong in every check."""
    try:
        checks = case.check(way, case.ask(case) if case.ask else ways.ask(case, way))
    except RuntimeError as error:
        checks = {"answer": str(error)}
    named = [
        (check.partition(" by "), wrong) for check, wrong in checks.items()
    ]  # `figure by way` where ways are compared
    return [Result(family, case.name, other if by else way, check, wrong) for (check, by, other), wrong in named]


def chosen(family: str, only: str, sample: bool, wanted: Iterable[str]) -> Iterator[tuple[str, Case, str]]:  # noqa: FBT001 - of the command line
    """Give each case of the family by each way in, or a part that is the same at every run."""
    for case in importlib.import_module(f"truth.{family}").cases():
        for way in case.ways:
            if only not in case.name or way not in wanted:
                continue
            short = way != "real time" and not case.name.startswith("drawn/")
            if sample and (not short or zlib.crc32(f"{case.name} {way}".encode()) % FAMILIES[family]):
                continue
            yield family, case, way


def score(results: Iterable[Result]) -> Iterator[str]:
    """Give a line for each check of each family: how many are right by each way in."""
    rows: dict[tuple[str, str], dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        rows[result.family, result.check][result.way].append(not result.wrong)
    for (family, check), by_way in rows.items():
        cells = [f"{way} {sum(right)}/{len(right)}" for way, right in sorted(by_way.items())]
        yield f"{family:11} {check:20} {'   '.join(cells)}"


def unexpected(results: Iterable[Result], listed: dict[str, dict[str, str]]) -> Iterator[str]:
    """Give a line for each result that the list of what fails does not expect.

    Drawn cases are new at each run, and only counted.
    """
    for result in results:
        known = (listed.get(result.family) or {}).get(result.key)
        if result.wrong and known is None and not result.case.startswith("drawn/"):
            yield f"WRONG {result.family}: {result.key}: {result.wrong}"
        if not result.wrong and known is not None:
            yield f"RIGHT {result.family}: {result.key}: take it off truth/failing.yaml"


def main(argv: list[str] | None = None) -> int:
    """Run the families."""
    parser = argparse.ArgumentParser(prog="python -m truth", description=__doc__)
    parser.add_argument("family", nargs="*", help=f"one or more of {', '.join(FAMILIES)}; default: all")
    parser.add_argument("--only", default="", help="only cases with this text in their name")
    parser.add_argument("--way", action="append", help="only this way in; may be given again")
    parser.add_argument("--sample", action="store_true", help="a part of each family, the same at every run")
    parser.add_argument("--wrong", action="store_true", help="print every wrong check, the expected ones too")
    parser.add_argument("--jobs", type=int, default=2, help="how many processes judge side by side")
    given = parser.parse_args(argv)
    # A shell starts its background jobs with SIGINT ignored, and the programs asked would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if unknown := [family for family in given.family if family not in FAMILIES]:
        parser.error(f"{unknown[0]}: no such family; give one of {', '.join(FAMILIES)}")
    results: list[Result] = []
    with ThreadPoolExecutor(given.jobs) as pool:
        for family in given.family or FAMILIES:
            begin = time.monotonic()
            work = chosen(
                family, given.only, given.sample, given.way or (*WAYS, "every", "outside", "process", "real time")
            )
            found = [each for part in pool.map(lambda job: ask(*job), work) for each in part]
            print("\n".join(score(found)), f"  ({time.monotonic() - begin:.0f} s)", flush=True)
            results += found
    if given.wrong:
        print("\n".join(f"{each.family} {each.key}: {each.wrong}" for each in results if each.wrong))
    problems = list(unexpected(results, data("../failing.yaml") or {}))
    wrong = sum(bool(each.wrong) for each in results)
    print("\n".join(problems))
    print(f"{len(results)} checks, {wrong} wrong, {len(problems)} unexpected")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
