"""The generated rules follow the linters for Prometheus rules: names, labels, matchers, functions."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import yaml

from scenarios import SCENARIOS
from sglang_tuning_exporter.mixin import alerts
from sglang_tuning_exporter.serve.metrics import sections
from sglang_tuning_exporter.state.signals import STATES
from test_core_and_rules import Simulated

GROUPS: list[dict[str, Any]] = yaml.safe_load(alerts.files()["alerts/rules/sglang-tuning.rules.yml"])["groups"]
RULES: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"]]
SUFFIXES = {"counter": "_total", "info": "_info"}
SELECTOR = re.compile(r"(?P<name>(?:[a-z]+:)?\b(?:sglang_tuning_\w+(?::\w+)?|up)\b)(?:\{(?P<matchers>[^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
RECORD = re.compile(r"(?:instance|rank|job|model):sglang_tuning_[a-z_]+:[a-z]+\d+[smh]")
TARGET = {"job", "instance"}


def produced() -> dict[str, set[str]]:
    """Give every series that the exporter can have, with its labels; those of schedulers may have their rank's as well."""
    sidecar = Simulated(next(scenario for scenario in SCENARIOS if scenario.has_log))
    with sidecar.view() as now:
        families = [family for section in sections(sidecar, now).values() for family in section]
    labels: dict[str, set[str]] = {"up": set()}
    for family in families:
        names = {*family.names}
        labels[family.name + SUFFIXES.get(family.type, "")] = {*names, *TARGET, "dp_rank"}
    return labels


PRODUCED = produced()
RECORDED = {rule["record"] for rule in RULES if "record" in rule}


def problems(rule: dict[str, Any]) -> list[str]:  # noqa: C901, PLR0912 - one question after the other
    """List what a linter would report for one rule."""
    found = []
    words: str = rule["expr"]
    # The one alert has no instance left; the records add up servers, which is what they are for.
    about_job = rule.get("labels", {}).get("diagnosis") == "exporter_gone" or rule.get("record", "").startswith(
        ("job:", "model:")
    )
    for selector in SELECTOR.finditer(words):
        name = selector["name"]
        if name not in PRODUCED and name not in RECORDED:
            found.append(f"nobody makes {name}")
        if name not in RECORDED and not words[selector.end() :].startswith("["):
            found.append(f"{name} is not asked as last known: a missed scrape changes it")
        matchers = MATCHER.findall(selector["matchers"] or "")
        for label, operator, value in matchers:
            if name in PRODUCED and label not in PRODUCED[name]:
                found.append(f"{name} has no label {label}")
            if operator in {"=~", "!~"} and not re.search(r"[|.*+?()\[\]^$\\]", value):
                found.append(f"{label}{operator}{value} could be an equality")
        equal = {label: value for label, operator, value in matchers if operator == "="}
        states = next((value for label, _, value in matchers if label == "state"), "")
        if equal.get("signal") in STATES and "state" in name:
            known = set(STATES[equal["signal"]])
            found += [
                f"{equal['signal']} is never {state}" for state in states.split("|") if state and state not in known
            ]
    found += [
        f"{function} over {name}, which is no counter"
        for function, name in re.findall(r"\b(rate|irate|increase)\(([\w:]+)", words)
        if not name.endswith("_total")
    ]
    found += [
        f"{function} drops the target"
        for function, rest in re.findall(r"\b(sum|min|max|avg|count)\s*((?:by|without)?\s*\([^)]*\)?)", words)
        if not rest.startswith(("by (job, instance", "without ("))
        and not (about_job and rest.startswith(("by (job)", "by (job, model_name)")))
    ]
    whole = {
        "job, instance",
        "job, instance, phase",
        "job, instance, event",
        *(["job", "job, model_name"] if about_job else []),
    }
    found += [f"matches on {labels}" for labels in re.findall(r"\bon \(([^)]*)\)", words) if labels not in whole]
    if "record" in rule:
        if not RECORD.fullmatch(rule["record"]):
            found.append(f"{rule['record']} is not level:metric:operations")
        return found
    bare = re.sub(r"\{[^}]*\}", "", words)
    if not re.search(r"[<>]|==|!=", bare):
        found.append("no comparison")
    if "for" not in rule:
        found.append("no for")
    if not re.fullmatch(r"SGLang[A-Z]\w+", rule["alert"]):
        found.append("not our name")
    if rule["labels"].get("severity") not in {"critical", "warning", "info"}:
        found.append("no severity")
    notes = rule["annotations"]
    found += [f"no {key}" for key in ("summary", "description", "runbook_url", "dashboard_url") if not notes.get(key)]
    used = {label for text in notes.values() for label in re.findall(r"\$labels\.(\w+)", text)}
    found += [f"annotation uses the label {label}" for label in sorted(used - TARGET)]
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_a_linter_finds_nothing(rule: dict[str, Any]) -> None:
    assert problems(rule) == []


def test_no_recording_rule_exists_twice() -> None:
    made = [(rule["record"], str(rule.get("labels"))) for rule in RULES if "record" in rule]
    assert len(set(made)) == len(made)


HELD_BACK: dict[str, Any] = next(rule for rule in RULES if rule.get("alert") == "SGLangAdmissionTooConservative")
RECORDING: dict[str, Any] = next(rule for rule in RULES if rule.get("record", "").endswith("increase10m"))


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("expr", "sglang_tuning_nothing > 0", "nobody makes sglang_tuning_nothing"),
        ("expr", "sglang_tuning_up == 0", "sglang_tuning_up is not asked as last known: a missed scrape changes it"),
        ("expr", 'sglang_tuning_up{pool="full"} == 0', "sglang_tuning_up has no label pool"),
        ("expr", 'sglang_tuning_server_info{profile=~"offline"} == 1', "profile=~offline could be an equality"),
        ("expr", 'sglang_tuning_state{signal="queue", state="full"} == 1', "queue is never full"),
        (
            "expr",
            "rate(sglang_tuning_queued_requests[5m]) > 0",
            "rate over sglang_tuning_queued_requests, which is no counter",
        ),
        ("expr", "sum(sglang_tuning_up) == 0", "sum drops the target"),
        ("expr", "sglang_tuning_up == 0 and on (instance) up", "matches on instance"),
        ("expr", "sglang_tuning_up", "no comparison"),
        ("alert", "HeldBack", "not our name"),
        ("labels", {"severity": "bad"}, "no severity"),
        ("annotations", {**HELD_BACK["annotations"], "summary": ""}, "no summary"),
        ("annotations", {**HELD_BACK["annotations"], "why": "{{ $labels.pool }}"}, "annotation uses the label pool"),
        ("record", "sglang_tuning_share", "sglang_tuning_share is not level:metric:operations"),
    ],
)
def test_the_linter_check_finds_a_bad_rule(part: str, value: object, said: str) -> None:
    spoiled = copy.deepcopy(RECORDING if part == "record" else HELD_BACK)
    spoiled[part] = value
    assert said in problems(spoiled)


def test_an_alert_without_a_for_is_found() -> None:
    spoiled = {key: value for key, value in HELD_BACK.items() if key != "for"}
    assert "no for" in problems(spoiled)
