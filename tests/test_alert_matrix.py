"""A small part of `alert_matrix/` for every alert, and checks that the matrix finds wrong rules.

`make test-rules` runs all of it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from tempfile import mkdtemp

import pytest

from alert_matrix import document, rules, server, story
from alert_matrix.columns import Column, Level, Run
from alert_matrix.machine import LONG, Outcome, every_case, together
from alert_matrix.troubles import Case, UndescribedError, cases
from scenes import SCENES, lived
from sglang_tuning_exporter.diagnosis.conditions.source import SourceTrouble
from sglang_tuning_exporter.diagnosis.table import ALERTS
from sglang_tuning_exporter.serve.metrics import collect

ROOT = Path(__file__).parents[1]
RULES = (ROOT / "alerts" / "rules" / "sglang-tuning.rules.yml").read_text()
PLAIN = Column(15, 60, "no miss", "nothing else")
COLUMNS = (
    PLAIN,
    Column(15, 60, "1 in 5 fails", "DP ranks come and go"),
    Column(60, 60, "1 in 20 fails", "nothing else"),
)


@cache
def exposed() -> frozenset[tuple[str, frozenset[str]]]:
    """Give the names of all series that the exporter exposes of a good server and of one that is down, with their labels' names."""
    found: set[tuple[str, frozenset[str]]] = set()
    for name in ("healthy", "down"):
        with lived(SCENES[name](), Path(mkdtemp())) as sidecar:
            found |= {(s.name, frozenset(s.labels)) for family in collect(sidecar) for s in family.samples}
    return frozenset(found)


def small() -> list[Run]:
    levels: tuple[Level, ...] = ("present", "below")
    return [
        Run(case, level, column)
        for case, level, column in product(every_case(), levels, COLUMNS)
        # Hours of a server that comes and goes are for the whole matrix.
        if (level == "present" or case.below is not None) and (column == PLAIN or case.history < LONG / 2)
    ]


@cache
def played() -> tuple[Outcome, ...]:
    by_interval = {column.scrape: [run for run in small() if run.column.scrape == column.scrape] for column in COLUMNS}
    return tuple(outcome for runs in by_interval.values() for outcome in together(runs, RULES))


@pytest.mark.parametrize("alert", [row.alert for row in ALERTS if cases(row)])
def test_an_alert_fires_in_time_stays_to_the_end_and_is_silent_just_below(alert: str) -> None:
    mine = [outcome for outcome in played() if outcome.alert == alert]
    assert {outcome.level for outcome in mine} >= {"present"}
    assert [str(outcome) for outcome in mine if outcome.fault] == []


def test_the_matrixs_servers_have_only_series_that_the_exporter_exposes() -> None:
    simulated = set(server.healthy("online"))
    for case in every_case():
        for trouble in (case.present, case.below, case.always):
            if trouble is not None:
                simulated |= {*trouble.rates, *trouble.jumps, *trouble.gauges}
    unknown = {(name, frozenset(label for label, _ in labels)) for name, labels in simulated} - exposed()
    assert unknown == set()


def test_the_matrixs_servers_have_every_series_that_a_rule_reads() -> None:
    read = {name for name in rules.choose(rules.load(RULES)).names if name.startswith("sglang_tuning_")}
    assert read - {name for name, _ in server.healthy("online")} - set(server.ABSENT) == set()


@dataclass(frozen=True)
class Unheard:
    """A kind of condition that alert_matrix/troubles.py does not describe."""


def test_a_row_of_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(UndescribedError, match="Unheard"):
        cases(replace(ALERTS[0], condition=Unheard()))  # type: ignore[arg-type]


def test_an_undescribed_source_is_an_error() -> None:
    with pytest.raises(UndescribedError, match="new_source"):
        cases(replace(ALERTS[0], id="new_source", condition=SourceTrouble("up == 0")))


def case_of(diagnosis: str) -> Case:
    return next(case for case in every_case() if case.row.id == diagnosis)


@pytest.mark.parametrize(
    ("diagnosis", "right", "wrong", "fault"),
    [
        ("queue_too_long", "for: 5m", "for: 12m", "late"),
        ("queue_too_long", 'state="above_range"', 'state="in_range"', "false"),
        ("queue_too_long", 'bound="upper"', 'bound="lower"', "never"),
        ("queue_too_long", "keep_firing_for: 5m", "keep_firing_for: 0s", "ended early"),
        ("out_of_memory_decode", "10m", "3m", "ended early"),
        ("out_of_memory_decode", "[10m]", "[40m]", "too long"),
    ],
)
def test_a_wrong_rule_is_noticed(diagnosis: str, right: str, wrong: str, fault: str) -> None:
    case = case_of(diagnosis)
    begin = RULES.index(f"- alert: {case.row.alert}\n")
    end = RULES.find("- alert:", begin + 1)
    mine = RULES[begin:end]
    assert right in mine
    broken = RULES[:begin] + mine.replace(right, wrong) + RULES[end:]
    [outcome] = together([Run(case, "present", PLAIN)], broken)
    assert outcome.fault == fault


def test_a_rule_without_its_limit_fires_just_below() -> None:
    assert 'share10m{signal="queue", state="above_range"} > on' in RULES
    loose = RULES.replace(
        '> on (job, instance) group_left () instance:sglang_tuning_threshold:last5m{signal="share", bound="upper"}',
        "> 0.1",
    )
    [outcome] = together([Run(case_of("queue_too_long"), "below", PLAIN)], loose)
    assert outcome.fault == "false"


def values(run: Run, name: str) -> list[str]:
    """Give what Prometheus stores of a series at each scrape: a number, `stale`, or `_` for nothing."""
    [text] = [
        text for series, text in story.stored(run, story.page(run, "a")) if series.startswith((f"{name}{{", f"{name} "))
    ]
    return re.sub(r"^_x\d+ ", "", text).split(" _x4 ")


def test_a_scrape_that_fails_leaves_a_stale_marker_and_up_at_0() -> None:
    run = Run(case_of("queue_too_long"), "present", replace(PLAIN, misses="1 in 5 fails"))
    up, tuning = values(run, "up"), values(run, "sglang_tuning_up")
    assert len(up) == len(tuning) == len(run.scrapes)
    failed = [ended == "failed" for _, ended in run.scrapes]
    assert 0.1 < sum(failed) / len(failed) < 0.3
    assert [value == "0" for value in up] == failed
    for number, is_failed in enumerate(failed):
        first = not is_failed or (number > 0 and not failed[number - 1])
        assert tuning[number] == ("1" if not is_failed else "stale" if first else "_")


def test_a_prometheus_that_was_away_has_stored_nothing() -> None:
    run = Run(case_of("queue_too_long"), "present", replace(PLAIN, misses="12 min without, later"))
    away = [number for number, (_, ended) in enumerate(run.scrapes) if ended == "none"]
    assert len(away) == 12 * 60 // 15
    for name in ("up", "sglang_tuning_up"):
        assert {values(run, name)[number] for number in away} == {"_"}


def test_an_exporter_that_restarts_counts_from_0_again() -> None:
    run = Run(case_of("queue_too_long"), "present", replace(PLAIN, disturbance="exporter restarts"))
    totals = [
        float(value) for value in values(run, "sglang_tuning_started_requests_total") if value not in {"stale", "_"}
    ]
    assert sum(later < sooner for sooner, later in pairwise(totals)) == 2


def test_the_page_says_what_was_kept_and_which_alerts_hide_which() -> None:
    assert (ROOT / document.PAGE).read_text() == document.page(json.loads((ROOT / document.SUMS).read_text()))


def test_the_sums_count_failures_by_alert_and_apart_from_what_is_beyond_any_rule() -> None:
    column = {"scrape": 15, "evaluation": 60, "misses": "no miss", "disturbance": "nothing else"}
    outcome = {"alert": "SGLangServerDown", "level": "present", "column": column, "fault": "", "beyond": ""}
    outcomes = [outcome, {**outcome, "fault": "late"}, {**outcome, "fault": "broken", "beyond": "no data"}]
    found = document.sums(outcomes)
    assert found["alerts"] == {"SGLangServerDown": [3, 1, 1]}
    assert found["scrapes"] == {"15 s": [3, 1, 1]}
