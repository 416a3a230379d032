"""Python's findings and Prometheus' alerts agree on the same 30 minutes.

Each scenario runs through the real state and the real metrics. `promtool` evaluates the committed rules over their series,
sampled every 15 s, for all servers in one run.

A rule may differ from a finding: it needs the cause in the last two minutes too and for its whole `for` (so one burst,
which stays a finding for ten minutes, notifies nobody), and it keeps firing for its `keep_firing_for`. Hence: a diagnosis
found without a break for window, `for` and a minute must fire; an alert that fires must have been found within the last
`keep_firing_for` and a minute.
"""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from alert_matrix.promtool import alerts_firing
from conftest import config
from scenarios import LENGTH, SCENARIOS, Away, Scenario, ServerInfo
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.diagnosis.conditions.latency import BurnRate
from sglang_tuning_exporter.diagnosis.conditions.requests import Rejections, RetractionRate
from sglang_tuning_exporter.diagnosis.conditions.share import Share, Spread
from sglang_tuning_exporter.diagnosis.findings import Judgement, judge
from sglang_tuning_exporter.diagnosis.row import Diagnosis
from sglang_tuning_exporter.diagnosis.table import ALERTS
from sglang_tuning_exporter.mixin import alerts
from sglang_tuning_exporter.serve.metrics import collect
from sglang_tuning_exporter.sglang.events import Scrape
from sglang_tuning_exporter.state.server import ServerState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

STEP = 15.0
ASKED_AT = tuple(60.0 * minute for minute in (12, 16, 20, 25, 30))
RULES = alerts.files()["alerts/rules/sglang-tuning.rules.yml"]
# Alerts that follow from a server's own figures. Only Prometheus computes burn rates, and problems of a source are seen by its
# reader: alerts/tests has their scenarios. The one exception is server_down, which the log shows too.
COMPARED = tuple(
    row
    for row in ALERTS
    if row.id == "server_down" or not (row.condition.is_advice_fixed or isinstance(row.condition, BurnRate))
)
USED = {
    name
    for line in RULES.splitlines()
    if "{{" not in line
    for name in re.findall(r"(?<![:\w])(?:sglang_tuning_\w+|up)\b", line)
}
History = dict[float, frozenset[str]]
Series = dict[tuple[str, tuple[tuple[str, str], ...]], dict[int, float]]


class Simulated(Sidecar):
    """A sidecar with the scenario's clock, which gets events by `observe` in place of reading files and sockets."""

    def __init__(self, scenario: Scenario) -> None:
        url = "http://127.0.0.1:9" if scenario.is_scraped else None
        log = ("server.log",) if scenario.has_log else ()
        super().__init__(config(sglang_url=url, log_file=log, profile=scenario.profile))
        self.state = ServerState(self.profile, 0.0)
        self.now = 0.0
        self.judged = judge(self.past(0.0))

    @contextmanager
    def view(self) -> Iterator[float]:
        self.state.advance(self.now)
        yield self.now

    def judge(self, now: float) -> Judgement:
        self.judged = super().judge(now)
        return self.judged

    def observe(self, what: object, at: float) -> None:
        self.now = at
        if isinstance(what, Away):
            self.state.lost_scrape()
            self.health.up, self.health.reason = False, what.reason
        elif isinstance(what, Scrape):
            self.state.observe_scrape(what, at)
            self.health.up, self.health.reason = True, ""
        elif isinstance(what, ServerInfo):
            self.state.facts.apply_info(what.version, {}, None)
        elif at <= 0:
            self.state.recall(what, at)  # type: ignore[arg-type]  # from before the exporter came
        else:
            self.state.observe(what, at)  # type: ignore[arg-type]  # the rest are events


@cache
def played(scenario: Scenario) -> tuple[History, Series]:
    """Give the findings and the series, every 15 s."""
    sidecar = Simulated(scenario)
    found: History = {}
    series: Series = {}
    story = iter(sorted(scenario.story, key=lambda pair: pair[0]))
    pair = next(story, None)
    for sample in range(int(LENGTH / STEP) + 1):
        now = STEP * sample
        while pair is not None and pair[0] <= now:
            sidecar.observe(pair[1], pair[0])
            pair = next(story, None)
        sidecar.now = now
        for family in collect(sidecar):
            for name, labels, value, *_ in family.samples:
                if name in USED:
                    series.setdefault((name, tuple(sorted(labels.items()))), {})[sample] = value
        found[now] = frozenset(finding.diagnosis.id for finding in sidecar.judged.findings)
    return found, series


def shorthand(samples: Mapping[int, float]) -> str:
    """Write samples as promtool does: a value and how often it comes again, `_` where there is none."""
    values = [repr(float(samples[n])) if n in samples else "_" for n in range(max(samples) + 1)]
    runs = [(value, sum(1 for _ in same)) for value, same in groupby(values)]
    return " ".join(f"_x{n}" if value == "_" else f"{value}+0x{n - 1}" for value, n in runs)


def fired(scenarios: tuple[Scenario, ...], directory: Path, rules: str = RULES) -> dict[str, dict[float, set[str]]]:
    """Give the diagnoses whose alerts fire at each of `ASKED_AT`, by scenario, as the rules have them."""
    inputs: list[dict[str, str]] = []
    for scenario in scenarios:
        for (name, labels), samples in played(scenario)[1].items():
            label_text = ",".join(f"{key}={json.dumps(value)}" for key, value in labels)
            selector = f'{name}{{job="sglang",instance="{scenario.name}",{label_text}}}'
            inputs.append({"series": selector, "values": shorthand(samples)})
    fires = alerts_firing(inputs, ASKED_AT, rules, directory, interval="15s", evaluation="30s")
    names = [scenario.name for scenario in scenarios]
    return {name: {at: named.get(name, set()) for at, named in zip(ASKED_AT, fires, strict=True)} for name in names}


def seconds(duration: str) -> float:
    return float(duration[:-1]) * {"s": 1.0, "m": 60.0, "h": 3600.0}[duration[-1]] if duration else 0.0


def longest_delay(row: Diagnosis) -> float:
    """After how long an unbroken finding must notify."""
    looks_back = type(row.condition) in {Share, RetractionRate, Rejections, Spread}
    return (600.0 if looks_back else 0.0) + seconds(row.hold) + 60.0


def disagreements(found: History, firing: Mapping[float, set[str]]) -> list[str]:
    """Say where core and rules differ by more than the rules may."""
    said = []
    for at, alerts_then in firing.items():
        for row in COMPARED:
            since = at - longest_delay(row)
            always = all(row.id in ids for moment, ids in found.items() if since <= moment <= at)
            if since >= 0 and always and row.id not in alerts_then:
                said.append(f"{row.id}: found since {since:g} s, and silent at {at:g} s")
            lately = at - seconds(row.keep_firing) - 60.0
            if row.id in alerts_then and not any(
                row.id in ids for moment, ids in found.items() if lately <= moment <= at
            ):
                said.append(f"{row.id}: fires at {at:g} s, and not found since {lately:g} s")
    return said


@pytest.fixture(scope="module")
def firing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[float, set[str]]]:
    return fired(SCENARIOS, tmp_path_factory.mktemp("agreement"))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_core_and_rules_agree_at_every_moment_asked(scenario: Scenario, firing: Any) -> None:
    assert disagreements(played(scenario)[0], firing[scenario.name]) == []


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_findings_and_alerts_at_the_end_are_those_that_the_scenario_names(scenario: Scenario, firing: Any) -> None:
    with_alert = {row.id for row in COMPARED}
    assert played(scenario)[0][LENGTH] & with_alert == scenario.ends
    assert firing[scenario.name][LENGTH] == scenario.ends


def test_every_alert_that_the_exporter_can_fire_has_its_scenario() -> None:
    assert set().union(*(scenario.ends for scenario in SCENARIOS)) == {row.id for row in COMPARED}
    assert len({scenario.name for scenario in SCENARIOS}) == len(SCENARIOS)


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("held_back", 'state="held_back"', 'state="no_queue"'),  # silent where it is found
        (
            "at_limit_without_room",
            'unless on (job, instance) max_over_time(sglang_tuning_diagnosis_active{diagnosis="running',
            'unless on (job, instance) max_over_time(nobody{diagnosis="running',
        ),  # fires where it is not
    ],
)
def test_a_wrong_rule_is_a_disagreement(name: str, right: str, wrong: str, tmp_path: Path) -> None:
    assert right in RULES
    chosen = tuple(scenario for scenario in SCENARIOS if scenario.name == name)
    firing = fired(chosen, tmp_path, RULES.replace(right, wrong))
    assert disagreements(played(chosen[0])[0], firing[name]) != []
