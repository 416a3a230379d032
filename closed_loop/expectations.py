"""What advice was expected to bring, beside what a real server then did: loops and convergences with a quiet time before each load.

The exporter fits its step times in the quiet time, gives a figure with its advice, and the advice is followed. Each side keeps its
answers of `/v1/loads` and its log, so that another model can be tried on the same runs.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from closed_loop import convergence
from closed_loop.load import Load
from closed_loop.loops import BY_NAME as LOOPS
from closed_loop.loops import MORE, Loop
from closed_loop.series import Bench, run_loop
from sglang_tuning_exporter.capacity.readings import Counters, Readings
from sglang_tuning_exporter.capacity.step_time import StepSums, StepTime, fit
from sglang_tuning_exporter.sglang.log.reader import LogReader
from sglang_tuning_exporter.sglang.server_info import parse_loads
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.server import ServerState

SECONDS, LULL_SECONDS = 36.0, 20.0
MOST_RESTARTS = 2
LEAST_LINES = 20  # of a log: these runs last a minute
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
    expected: Sequence[float] | None

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


def summary(comparisons: Sequence[Comparison]) -> str:
    """Return the median and the worst error of those with a figure, and how many have the right direction."""
    errors = [abs(each.error) for each in comparisons if each.error is not None]
    inside = sum(each.is_inside is True for each in comparisons)
    right = sum(each.has_direction is True for each in comparisons)
    without = len(comparisons) - len(errors)
    rest = f"; {without} change{'s' if without > 1 else ''} had no figure" if without else ""
    if not errors:
        return "No change had a figure."
    return (
        f"Median error {100 * median(errors):.0f} %, worst {100 * max(errors):.0f} %, direction right in {right} of {len(errors)},"
        f" {inside} of {len(errors)} inside the interval{rest}."
    )


def collect(results: Path) -> dict[str, Any]:
    """Return all changes and all pairs of fits of the results that are there, as plain JSON."""
    changes = []
    for name in (*EXPECTED, *CONVERGENCES):
        for number, steps in sorted(_runs(results, name).items()):
            changes += [asdict(each) for each in compared(name, number, steps)]
    return {"changes": changes, "fits": [fits(log.parent) for log in sorted((results / "raw").glob("*/server.log.gz"))]}


def _runs(results: Path, name: str) -> dict[int, list[Any]]:
    """Return the sides of each run, in their order."""
    found: dict[int, list[Any]] = {}
    for path in sorted(results.glob(f"{name}.*.json")):
        result, number = json.loads(path.read_text(encoding="utf-8")), int(path.name.split(".")[1])
        if name in EXPECTED:
            before, after = {**result["before"], "advice": result["advice"]}, result.get("after")
            found[number] = [before] if after is None else [before, after]
        else:
            found.setdefault(number, []).append(result)
    return found


def fits(folder: Path) -> dict[str, Any]:
    """Return one side's step time by the server's counters and by its log; None where there are too few steps."""
    readings, state = Readings(600.0), ServerState(PROFILES["offline"], 0.0)
    with gzip.open(folder / "loads.jsonl.gz", "rt") as answers:
        for line in answers:
            for load in parse_loads(json.dumps(json.loads(line)["answer"])):
                if (reading := Counters.of(load)) is not None:
                    readings.take(reading)
    state.observe_all(LogReader().feed(gzip.decompress((folder / "server.log.gz").read_bytes())))
    lines = [sample for rank in state.schedulers for sample in rank.samples.since(-inf)]
    moments = [StepSums.of_line(batch, batch / speed) for _, batch, speed, _ in lines]
    return {
        "name": folder.name,
        "counters": _fit(fit([each.decode for each in readings.intervals])),
        "log": _fit(fit(moments, least=LEAST_LINES, source="log")),
    }


def _fit(found: StepTime | None) -> dict[str, Any] | None:
    if found is None:
        return None
    line = found.line
    return {
        "batch": round(found.batch, 2),
        "deviation": round(found.deviation, 2),
        "step_ms": round(1e3 * found.seconds.value, 3),
        "fixed_ms": None if line is None else round(1e3 * line.fixed.value, 3),
        "per_request_ms": None if line is None else round(1e3 * line.per_request.value, 4),
        "refused": found.refused,
    }


KEPT = Path(__file__).with_suffix(".json")
BEGIN, END = "<!-- python -m closed_loop document -->", "<!-- end -->"


def document(results: Path, page: Path) -> None:
    """Write expectations.json out of the results, where there are any, and its part of docs/capacity.md."""
    if any(results.glob("*.json")):
        KEPT.write_text(json.dumps(collect(results), indent=1) + "\n", encoding="utf-8")
    data = json.loads(KEPT.read_text(encoding="utf-8"))
    page.write_text(with_section(page.read_text(encoding="utf-8"), data), encoding="utf-8")


def with_section(page: str, data: dict[str, Any]) -> str:
    """Return docs/capacity.md with its part about these runs written anew."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{section(data)}\n{END}{rest.split(END, 1)[1]}"


def section(data: dict[str, Any]) -> str:
    """Write what docs/capacity.md says of predicted and measured changes."""
    changes = [Comparison(**each) for each in data["changes"]]
    rows = ["| loop or convergence | run | change | expected | measured | error |", "|---|---|---|---|---|---|"]
    rows += [
        f"| {each.name}{f', step {each.step + 1}' if each.name in CONVERGENCES else ''} | {each.run} | {_typed(each.change)} |"
        f" {_gain(each.expected)} | {100 * (each.measured - 1):+.0f} % | {'' if each.error is None else f'{100 * each.error:+.0f} %'} |"
        for each in changes
    ]
    return "\n".join(["", *rows, "", summary(changes), "", *_agreement(data["fits"]), ""])


def _typed(change: str) -> str:
    return re.sub(r"--[a-z-]+", r"`\g<0>`", change)


def _gain(expected: Sequence[float] | None) -> str:
    if expected is None:
        return "no figure"
    value, low, high = (100 * (each - 1) for each in expected)
    return f"{value:+.0f} % ({low:+.0f} to {high:+.0f})"


def _agreement(found: list[dict[str, Any]]) -> list[str]:
    """Write how far the log's fit is from the counters' fit on the same run."""
    both = [(each["counters"], each["log"]) for each in found if each["counters"] and each["log"]]
    lines = [(mine, logs) for mine, logs in both if mine["fixed_ms"] is not None and logs["fixed_ms"] is not None]
    if not lines:
        return []
    far = [_at(logs, batch) / _at(mine, batch) - 1 for mine, logs in lines for batch in (mine["batch"], 16.0)]
    own, sixteen = sorted(map(abs, far[::2])), sorted(map(abs, far[1::2]))
    slopes = sorted(abs(logs["per_request_ms"] / mine["per_request_ms"] - 1) for mine, logs in lines)
    words = (
        f"Of {len(found)} sides, {len(both)} have log lines enough for a fit as well; {len(lines)} have a line from both. The log's step at the"
        f" counters' mean batch is off by {100 * median(own):.0f} % (median; worst {100 * own[-1]:.0f} %), at a batch of 16 by"
        f" {100 * median(sixteen):.0f} % (worst {100 * sixteen[-1]:.0f} %), its time per request by {100 * median(slopes):.0f} %"
        f" (worst {100 * slopes[-1]:.0f} %)."
    )
    return [words]


def _at(line: dict[str, Any], batch: float) -> float:
    return float(line["fixed_ms"] + line["per_request_ms"] * batch)
