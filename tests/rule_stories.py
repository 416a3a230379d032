"""A small machine that plays troubles to the alert rules: what an exporter exposes goes in, when each alert fired comes
out.

The exporter's own alert clock decides here too; promtool evaluates the rules over what the scrapes got.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import yaml

from promtool import evaluated
from sglang_tuning_exporter.core.alerts import Clock, State
from sglang_tuning_exporter.core.diagnoses import BY_ID

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

STEP, END = 15, 4200  # seconds: between two samples and evaluations; of a story
BEGIN, OVER = 900, 2700  # of a trouble
INTERVALS = (15, 60, 120)  # between two scrapes
LIMIT = 0.5
DIAGNOSIS = "queue_too_long"
AWAY_SECONDS = 30  # in which an exporter that restarts answers no scrape
_FIRING = 'ALERTS{alertstate="firing"}'
_ASKED = (
    f"min_over_time(timestamp({_FIRING})[{END}s:{STEP}s])",
    f"max_over_time(timestamp({_FIRING})[{END}s:{STEP}s])",
    f"count_over_time(({_FIRING} unless {_FIRING} offset {STEP}s)[{END}s:{STEP}s])",
)


class Fired(NamedTuple):
    """When an alert began and was seen last, and how many times it began."""

    begun: float
    ended: float
    times: float


def trouble(at: float) -> float:
    """The condition of most stories: above its limit from BEGIN to OVER."""
    return 0.8 if BEGIN <= at < OVER else 0.3


def burst(seconds: float) -> Callable[[float], float]:
    return lambda at: 0.8 if BEGIN <= at < BEGIN + seconds else 0.3


@dataclass(frozen=True)
class Exporter:
    """One exporter, its server, and how it is scraped; times in seconds since the story began.

    condition: None where it is not known. away: times in which no scrape is answered. restarts: without a state file.
    idle: when its server has no request.
    """

    condition: Callable[[float], float | None] = trouble
    every: int = STEP
    missed: float = 0.0
    seed: int = 1
    away: tuple[tuple[float, float], ...] = ()
    restarts: tuple[float, ...] = ()
    born: float = 0.0
    gone: float = END + 1.0
    labels: Mapping[str, str] = field(default_factory=dict)
    idle: Callable[[float], bool] = lambda _: False
    is_exporter: bool = True

    def series(self) -> dict[str, str]:
        """Give what Prometheus stores: series → values as promtool's `input_series` has them."""
        chance, clock, request, left = random.Random(self.seed), self._clock(ran_before=self.born == 0), 0.0, False
        names = ("up", "sglang_tuning_build_info", "sglang_tuning_last_request_timestamp_seconds")
        own = tuple(f"sglang_tuning_{name}" for name in ("condition", "condition_limit", "alert"))
        found: dict[str, list[str]] = {name: [] for name in (*names, *own)}
        for at in range(0, END + STEP, STEP):
            if any(at == restart + AWAY_SECONDS for restart in self.restarts):
                clock = self._clock(ran_before=False)
            value = self.condition(at)
            if at >= self.born:
                clock.pass_on(at, at, state=State(None if value is None else value > LIMIT))
                request = request if self.idle(at) else at
            is_known = value is not None and clock.value is not None
            page = {
                "up": "1",
                "sglang_tuning_build_info": "1",
                "sglang_tuning_last_request_timestamp_seconds": f"{request:g}",
                "sglang_tuning_condition": "stale" if value is None else f"{value:g}",
                "sglang_tuning_condition_limit": f"{LIMIT:g}",
                "sglang_tuning_alert": f"{clock.value:d}" if is_known and clock.value is not None else "stale",
            }
            if at >= self.gone:
                page, left = dict.fromkeys(page, "_" if left else "stale"), True
            elif at < self.born or at % self.every:
                page = dict.fromkeys(page, "_")
            elif self._is_missed(at, chance):
                page = {name: "0" if name == "up" else "stale" for name in page}
            for name, values in found.items():
                values.append(page[name])
        target = {"job": "sglang", "instance": "gpu1:9741", **self.labels}
        if not self.is_exporter:
            return {f"up{written(target)}": " ".join(found["up"])}
        return {
            f"{name}{written(target if name in names else {**target, 'diagnosis': DIAGNOSIS})}": " ".join(values)
            for name, values in found.items()
        }

    def _is_missed(self, at: float, chance: random.Random) -> bool:
        away = (*self.away, *((restart, restart + AWAY_SECONDS) for restart in self.restarts))
        return chance.random() < self.missed or any(begin <= at < end for begin, end in away)

    def _clock(self, *, ran_before: bool) -> Clock:
        clock = Clock(BY_ID[DIAGNOSIS])
        if ran_before:
            clock.value, clock.calm = False, -clock.diagnosis.until
        return clock


def written(labels: Mapping[str, str]) -> str:
    return "{" + ", ".join(f'{name}="{value}"' for name, value in labels.items()) + "}"


def play(rules: Mapping[str, object], stories: Sequence[Sequence[Exporter]], directory: Path) -> list[dict[str, Fired]]:
    """Give the alerts that fired in each story: by name, and by `name cluster` where there are several."""
    (directory / "rules.yml").write_text(yaml.safe_dump(rules))
    series = [{name: values for each in story for name, values in each.series().items()} for story in stories]
    played = evaluated(directory, series, _ASKED, at=f"{END}s", every=f"{STEP}s", rules=directory / "rules.yml")
    found = []
    for answers in played:
        begun, ended, times = (
            {" ".join(filter(None, (labels["alertname"], labels.get("cluster")))): value for labels, value in each}
            for each in answers
        )
        found.append({name: Fired(begun[name], ended[name], times[name]) for name in begun})
    return found
