"""`promtool` runs every scenario of alerts/tests on the alert rules; each alert has all annotations that a person needs."""

from __future__ import annotations

import shutil
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from alert_matrix.promtool import promtool
from sglang_tuning_exporter.diagnosis.table import DIAGNOSES

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
ALERTS = Path(__file__).parents[1] / "alerts"
RULE_FILE = ALERTS / "rules" / "sglang-tuning.rules.yml"
SCENARIO_FILES = sorted((ALERTS / "tests").glob("*.yml"))
GROUPS: list[dict[str, Any]] = yaml.safe_load(RULE_FILE.read_text())["groups"]
RULES: dict[str, dict[str, Any]] = {
    rule["alert"]: rule for group in GROUPS for rule in group["rules"] if "alert" in rule
}


@cache
def scenarios(path: Path) -> list[dict[str, Any]]:
    tests: list[dict[str, Any]] = yaml.load(path.read_text(), Loader=LOADER)["tests"]
    return tests


@cache
def cases() -> tuple[Counter[str], Counter[str]]:
    """Count, for every alert, the moments at which it must fire and those at which it must not."""
    firing: Counter[str] = Counter()
    silent: Counter[str] = Counter()
    for path in SCENARIO_FILES:
        for scenario in scenarios(path):
            for case in scenario.get("alert_rule_test", []):
                (firing if case.get("exp_alerts") else silent)[case["alertname"]] += 1
    return firing, silent


def test_prometheus_accepts_the_rules() -> None:
    checked = promtool("check", "rules", RULE_FILE)
    assert checked.status == 0, checked.words


@pytest.mark.parametrize("path", SCENARIO_FILES, ids=lambda path: path.stem)
def test_every_scenario_ends_as_its_words_say(path: Path) -> None:
    ended = promtool("test", "rules", path)
    assert ended.status == 0, ended.words


def test_a_wrong_expectation_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "rules").mkdir()
    shutil.copy(RULE_FILE, tmp_path / "rules")
    document = yaml.load((ALERTS / "tests" / "memory.yml").read_text(), Loader=LOADER)
    [document["tests"][0]["alert_rule_test"][0]["exp_alerts"][0]["exp_annotations"]["suggested"]] = ["0.5"]
    document["tests"] = document["tests"][:1]
    document["rule_files"] = ["rules/*.yml"]
    (tmp_path / "wrong.yml").write_text(yaml.safe_dump(document))
    played = promtool("test", "rules", tmp_path / "wrong.yml")
    assert played.status == 1
    assert "SGLangMemoryReserveTooSmall" in played.words


def test_there_is_an_alert_for_every_row_of_the_table_or_a_reason_for_none() -> None:
    assert sorted(RULES) == sorted(row.alert for row in DIAGNOSES if row.alert)
    assert all(bool(row.alert) != bool(row.why_no_alert) for row in DIAGNOSES)


@pytest.mark.parametrize("alert", RULES)
def test_an_alert_has_a_scenario_that_fires_it(alert: str) -> None:
    firing, _ = cases()
    assert firing[alert] >= 1


@pytest.mark.parametrize("alert", RULES)
def test_an_alert_has_at_least_as_many_silent_cases_as_firing_ones(alert: str) -> None:
    firing, silent = cases()
    assert silent[alert] >= firing[alert]


def test_no_scenario_speaks_of_an_alert_that_is_not_there() -> None:
    firing, silent = cases()
    assert set(firing) | set(silent) <= set(RULES)


@pytest.mark.parametrize("path", SCENARIO_FILES, ids=lambda path: path.stem)
def test_every_scenario_opens_with_its_words(path: Path) -> None:
    lines = path.read_text().splitlines()
    openings = [number for number, line in enumerate(lines) if line.startswith("  - interval:")]
    assert len(openings) == len(scenarios(path))
    assert all(lines[number - 1].startswith("  # ") for number in openings)


@pytest.mark.parametrize("alert", RULES)
def test_an_alert_says_how_urgent_it_is(alert: str) -> None:
    assert RULES[alert]["labels"]["severity"] in {"critical", "warning", "info"}


@pytest.mark.parametrize("alert", RULES)
def test_an_alert_has_the_evidence_the_action_the_reason_and_when_it_will_not_help(alert: str) -> None:
    notes = RULES[alert]["annotations"]
    assert all(
        notes[key].strip() for key in ("summary", "description", "suggested", "why", "will_not_help_if", "guide")
    )


@pytest.mark.parametrize("alert", RULES)
def test_a_summary_is_the_same_words_each_time(alert: str) -> None:
    assert "{{" not in RULES[alert]["annotations"]["summary"]


@pytest.mark.parametrize("alert", RULES)
def test_advice_to_set_a_flag_has_its_present_value(alert: str) -> None:
    notes = RULES[alert]["annotations"]
    recommended_at = "sglang_tuning_recommendation_timestamp_seconds"
    computed = recommended_at in notes.get("flag", "")
    assert computed == ("current" in notes)
    # One series has all of it: words for people have no flag and none of the guide's figures beside them.
    for name in ("current", "suggested", "direction") if computed else ():
        assert recommended_at in notes[name]


@pytest.mark.parametrize("alert", RULES)
def test_no_rule_looks_at_a_series_of_sglang_itself(alert: str) -> None:
    assert "sglang:" not in RULES[alert]["expr"]
