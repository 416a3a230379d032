"""What an operator wants otherwise in the rules, without editing a generated file; and the rules in the formats of
other programs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from promtool import promtool
from sglang_tuning_exporter.cli import main
from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.mixin import wishes

RULES = "alerts/rules/sglang-tuning.rules.yml"
NATIVE = "alerts/rules-without-exporter/sglang-native.rules.yml"


def made(directory: Path, text: str = "", *flags: str) -> Path:
    """Generate with a file of wishes; return the folder of what was made."""
    (directory / "rules.yml").write_text(text)
    output = directory / "made"
    assert main(["generate", "--output", str(output), "--config", str(directory / "rules.yml"), *flags]) == 0
    return output


def alerts(path: Path) -> dict[str, dict[str, Any]]:
    document = yaml.safe_load(path.read_text())
    groups = document["spec"]["groups"] if "spec" in document else document["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("plain"))


WISHED = """
labels: {team: inference, tier: 1}
alerts:
  SGLangQueueTooLong: critical
  SGLangClientTooSlow: off
  SGLangScrapedTooSeldom: "off"
  SGLangCrashed: {severity: critical, labels: {team: chat}}
  SGLangQueueWait: {severity: info}
expected: [sglang, "sglang code"]
runbook_url: https://wiki.example.com/{alert}.md
"""


@pytest.fixture(scope="module")
def wished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("wished"), WISHED)


def test_severity_and_labels_are_those_that_are_wished(plain: Path, wished: Path) -> None:
    before, after = alerts(plain / RULES), alerts(wished / RULES)
    mine = {"team": "inference", "tier": "1"}
    assert after["SGLangQueueTooLong"]["labels"] == {"severity": "critical", **mine}
    assert after["SGLangCrashed"]["labels"] == {"severity": "critical", "team": "chat", "tier": "1"}
    assert after["SGLangServerDown"]["labels"] == {**before["SGLangServerDown"]["labels"], **mine}
    assert alerts(wished / NATIVE)["SGLangQueueWait"]["labels"] == {"severity": "info", **mine}
    assert all(after[name]["expr"] == before[name]["expr"] for name in after.keys() - {"SGLangTuningExporterGone"})


def test_an_alert_that_is_off_is_not_in_the_file(plain: Path, wished: Path) -> None:
    gone = alerts(plain / RULES).keys() - alerts(wished / RULES).keys()
    assert gone == {"SGLangClientTooSlow", "SGLangScrapedTooSeldom"}


def test_a_declared_pool_has_a_rule_that_misses_it_while_it_is_idle(wished: Path) -> None:
    groups = yaml.safe_load((wished / RULES).read_text())["groups"]
    [own] = [group["rules"] for group in groups if group["name"] == "sglang-tuning.expected"]
    assert [rule["expr"] for rule in own] == ['absent(up{job="sglang"})', 'absent(up{job="sglang code"})']
    assert {rule["alert"] for rule in own} == {"SGLangTuningExporterGone"}


def test_prometheus_accepts_what_was_wished(wished: Path) -> None:
    for name in (RULES, NATIVE):
        checked = promtool("check", "rules", wished / name)
        assert checked.status == 0, checked.words


def test_mimirs_file_names_its_namespace_and_no_group_is_above_its_limit(tmp_path: Path) -> None:
    document = yaml.safe_load((made(tmp_path, "", "--format", "mimir") / "alerts/mimir/sglang-tuning.yml").read_text())
    assert document["namespace"] == "sglang-tuning"
    assert max(len(group["rules"]) for group in document["groups"]) <= 14  # Mimir refuses more than 20


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "alerts: {SGLangQueueTooLang: off}",
            "alerts.SGLangQueueTooLang: unknown key; did you mean SGLangQueueTooLong?",
        ),
        ("alerts: {SGLangCrashed: high}", "alerts.SGLangCrashed=high: give off, "),
        ("alerts: {SGLangCrashed: {severity: high}}", "alerts.SGLangCrashed.severity=high: give one of "),
        ("alerts: {SGLangCrashed: {wait: 5m}}", "wait: unknown key; known are severity, labels"),
        ("alerts: [SGLangCrashed]", "give a mapping"),
        ("labels: {a-b: c}", "labels.a-b: give a label of letters, digits and _"),
        ("labels: {severity: info}", "labels.severity: a label of the rules' own"),
        ("labels: {team: '{{ x }}'}", "give a plain word"),
        ("labels: {team: {a: b}}", "give a plain word"),
        ("severity: {}", "severity: unknown key"),
        ("expected: ['a\"b']", "give names of jobs"),
        ("expected: {a: b}", "give names of jobs"),
        ("metadata: {name: A B}", "give a name as Kubernetes has it"),
        ("runbook_url: 3", "give an address"),
        ("- a", "give a mapping of keys to values"),
        ("a: [", "not YAML"),
        ("a: !!timestamp x", "not YAML"),
    ],
)
def test_a_mistake_is_one_line_with_key_value_and_remedy(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(text)
    with pytest.raises(UsageError) as refused:
        wishes.read(tmp_path / "rules.yml")
    assert told in str(refused.value)
    assert str(refused.value).startswith(f"--config={tmp_path / 'rules.yml'}: ")
    assert "\n" not in str(refused.value)
