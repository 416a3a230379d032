"""What advice was expected to bring, beside what a real server then did: loops and convergences with a quiet time before each load.

The exporter fits its step times in the quiet time, gives a figure with its advice, and the advice is followed. Each side keeps its
answers of `/v1/loads` and its log, so that another model can be tried on the same runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

from closed_loop import convergence
from closed_loop.load import Load
from closed_loop.loops import BY_NAME as LOOPS
from closed_loop.loops import MORE, Loop
from closed_loop.series import Bench, run_loop

SECONDS, LULL_SECONDS = 36.0, 20.0
MOST_RESTARTS = 2
CONVERGENCES = ("everything-small", "over-careful", "prefixes-in-small-chunks")

EXPECTED: dict[str, Loop] = {
    loop.name: loop
    for loop in (
        Loop(
            name="limit-of-four",
            what="four requests at once, and a KV cache that holds dozens",
            flags="--max-total-tokens 16384 --max-running-requests 4",
            load=Load(clients=32),
            expected="running_at_limit",
            alert="",
            wins=(MORE,),
        ),
        Loop(
            name="limit-of-four-long-prompts",
            what="four requests at once with prompts of 600 tokens",
            flags="--max-total-tokens 16384 --max-running-requests 4",
            load=Load(clients=24, prompt_tokens=(600,), most_new_tokens=150, ignore_eos=True),
            expected="running_at_limit",
            alert="",
            wins=(MORE,),
        ),
        Loop(
            name="limit-of-eight",
            what="eight requests at once; a quarter of the prompts has 1,200 tokens",
            flags="--max-total-tokens 24576 --max-running-requests 8",
            load=Load(clients=40, prompt_tokens=(24, 24, 24, 1200), most_new_tokens=200, ignore_eos=True),
            expected="running_at_limit",
            alert="",
            wins=(MORE,),
        ),
        LOOPS["conservative"],
        Loop(
            name="few-clients",
            what="eight requests at once, where throughput counts",
            flags="--max-total-tokens 16384",
            load=Load(clients=8),
            expected="client_too_slow",
            alert="",
            wins=(MORE,),
        ),
        LOOPS["ineffective"],
    )
}


def short(load: Load) -> Load:
    """Return a load as long as these runs are."""
    return replace(load, seconds=SECONDS)


def run(bench: Bench, number: int, names: Iterable[str]) -> None:
    """Run the loops and convergences of `names` once; what has its result is not run again."""
    for name in names:
        if name in EXPECTED:
            loop = EXPECTED[name]
            run_loop(bench, replace(loop, load=short(loop.load)), number)
        else:
            start = convergence.BY_NAME[name]
            convergence.converge(bench, replace(start, load=short(start.load)), number, MOST_RESTARTS)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One change: the throughput it was expected to bring, as a factor with its interval, and the factor that was measured.

    `expected` is None where the exporter gave no figure. The measured factor is of tokens per second of the scheduler's CPU.
    """

    name: str
    run: int
    step: int
    change: str
    measured: float
    expected: tuple[float, float, float] | None

    @property
    def error(self) -> float | None:
        """Return how far the expected factor is off, relative to the measured one."""
        return None if self.expected is None else self.expected[0] / self.measured - 1.0

    @property
    def has_direction(self) -> bool | None:
        """Whether a gain was expected and came, or neither was."""
        return None if self.expected is None else (self.expected[0] > 1) == (self.measured > 1)

    @property
    def is_inside(self) -> bool | None:
        """Whether the measured factor lies in the interval."""
        return None if self.expected is None else self.expected[1] <= self.measured <= self.expected[2]


def compared(name: str, run: int, steps: Sequence[Any]) -> list[Comparison]:
    """Return each change of consecutive sides, the side's own `advice` between them; none where a side generated nothing."""
    found = []
    for step, (before, after) in enumerate(pairwise(steps)):
        speeds = [side["measures"]["tokens_per_cpu_second"] for side in (before, after)]
        changes = before["advice"]["changes"]
        if all(speeds) and changes:
            words = "; ".join(f"{each['what']} {each['old'] or 'unset'} → {each['new'] or 'unset'}" for each in changes)
            found.append(Comparison(name, run, step, words, speeds[1] / speeds[0], _expected(before, changes)))
    return found


def _expected(side: Any, changes: list[Any]) -> tuple[float, float, float] | None:
    """Return the factor that was expected of the first of the changes that has a figure."""
    changed = {each["what"] for each in changes}
    for finding in side["findings"]:
        for advice, expected in zip(finding["advice"], finding["expected"], strict=True):
            if expected and (advice[0] in changed or advice[0] is None):
                tokens = expected["tokens_per_second"]
                return (
                    tokens["value"] / tokens["now"],
                    tokens["interval"][0] / tokens["now"],
                    tokens["interval"][1] / tokens["now"],
                )
    return None


def words(comparisons: list[Comparison]) -> str:
    """Return the median and the worst error of those with a figure."""
    errors = [abs(each.error) for each in comparisons if each.error is not None]
    inside = sum(each.is_inside is True for each in comparisons)
    right = sum(each.has_direction is True for each in comparisons)
    if not errors:
        return "No change had a figure."
    return (
        f"Median error {100 * median(errors):.0f} %, worst {100 * max(errors):.0f} %, direction right in {right} of {len(errors)},"
        f" {inside} of {len(errors)} inside the interval."
    )
