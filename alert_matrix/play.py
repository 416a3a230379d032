"""Run simulated servers through promtool: when each alert of each server fired first and last, and how often."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TypeAlias

from alert_matrix.columns import PLACES, Run
from alert_matrix.promtool import got, promtool
from alert_matrix.rules import Chosen
from alert_matrix.story import Shown, page, stored

# By the job, which is each server's own: an alert about a job has no instance.
_FIRING = 'max by (alertname, job) (ALERTS{{alertstate="firing", job=~"{}"}})'
_ASKED = (
    "min_over_time(timestamp({})[{}s:{}s])",
    "max_over_time(timestamp({})[{}s:{}s])",
    "count_over_time({}[{}s:{}s])",
)
# promtool answers no query that holds more than 10,000 samples.
_SAMPLES = 3000
_FAILED = re.compile(r"^\s+rule: (\S+), time: \w+, err: (.*)$", re.MULTILINE)
_SAMPLE = re.compile(r'\{(?:__name__="matrix:\w+", )?alertname="(\w+)", job="([^"]+)"\} ([-+.\dEe]+)')
_NOBODY = 'label_replace(label_replace(vector(1), "job", "nobody", "", ""), "alertname", "none", "", "")'
Reads: TypeAlias = Callable[[Run, Shown], bool]


class RuleError(Exception):
    """A rule that Prometheus could not evaluate: it then fires for no server at all."""

    def __init__(self, name: str, words: str) -> None:
        super().__init__(f"{name}: {words}")
        self.name, self.words = name, words


@dataclass(frozen=True)
class Fired:
    """When an alert fired for the first and the last time, in seconds from the start, and at how many evaluations; or why it could not be evaluated."""

    first: float = 0.0
    last: float = 0.0
    count: int = 0
    error: str = ""

    def holes(self, evaluation: float) -> int:
        """At how many evaluations between the first and the last it did not fire."""
        return round((self.last - self.first) / evaluation) + 1 - self.count


def play(runs: list[Run], chosen: Chosen, order: list[str], reads: Reads | None = None) -> list[dict[str, Fired]]:
    """Give what fired in each run, by alert. All runs have the same two intervals. Raises `UnplayableError` and `RuleError`.

    `order` is that of the rules' groups. `reads`: which series a run's server needs to have, if not all that the rules read.
    """
    [evaluation] = {run.column.evaluation for run in runs}
    stop = ceil(max(run.stop for run in runs) / evaluation) * evaluation
    each = max(1, int(_SAMPLES * evaluation / stop))
    parts = [range(first, min(first + each, len(runs))) for first in range(0, len(runs), each)]
    with tempfile.TemporaryDirectory(prefix="alert-matrix-") as directory:
        place = Path(directory)
        (place / "rules.yml").write_text(json.dumps({"groups": chosen.groups}))
        with (place / "test.yml").open("w") as file:
            file.writelines(_input(runs, chosen, order, reads or (lambda _, shown: chosen.reads(shown))))
            for part in parts:
                firing = _FIRING.format("|".join(map(_instance, part)))
                for asked in _ASKED:
                    expression = f"{asked.format(firing, stop, evaluation)} or {_NOBODY}"
                    # Nobody expects any, so that promtool prints what it got.
                    file.write(f"  - {{expr: '{expression}', eval_time: {stop}s}}\n")
        said = promtool("test", "rules", place / "test.yml", seconds=1800).words
    failed = _FAILED.search(said)
    if failed:
        raise RuleError(failed[1], failed[2])
    answers = [
        {(alert, instance): float(value) for alert, instance, value in _SAMPLE.findall(answer)}
        for answer in got(said, len(parts) * len(_ASKED))
    ]
    fired: list[dict[str, Fired]] = [{} for _ in runs]
    names = {_instance(number): number for number in range(len(runs))}
    for firsts, lasts, counts in zip(answers[::3], answers[1::3], answers[2::3], strict=True):
        for (alert, instance), first in firsts.items():
            if instance in names:
                seen = Fired(first, lasts[alert, instance], round(counts[alert, instance]))
                fired[names[instance]][alert] = seen
    return fired


def _instance(number: int) -> str:
    return f"server{number}"


def _input(runs: Iterable[Run], chosen: Chosen, order: list[str], reads: Reads) -> Iterator[str]:
    [(scrape, evaluation)] = {(run.column.scrape, run.column.evaluation) for run in runs}
    present = {group["name"] for group in chosen.groups}
    groups = [name for name in order if name in present]
    yield f"rule_files: [rules.yml]\nevaluation_interval: {evaluation}s\ngroup_eval_order: {json.dumps(groups)}\n"
    yield f"tests:\n- interval: {1000 * scrape // PLACES}ms\n  input_series:\n"
    for number, run in enumerate(runs):
        read = [each for each in page(run, _instance(number)) if reads(run, each)]
        for name, values in stored(run, read):
            yield f"  - {{series: '{name}', values: '{values}'}}\n"
    yield "  promql_expr_test:\n"
