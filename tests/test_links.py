"""The runbook link of a notification leads to the exporter's public address, as promtool renders the rules' annotation."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from conftest import RETRACTION, running_exporter
from sglang_tuning_exporter.mixin import alerts

RULES = yaml.safe_load(alerts.files()["alerts/rules/sglang-tuning.rules.yml"])
LINKS = {
    rule["alert"]: rule["annotations"]["runbook_url"]
    for group in RULES["groups"]
    for rule in group["rules"]
    if "alert" in rule
}
LIVING = 'job="sglang", instance="gpu2:9741"'
OWN = 'job="sglang", instance="gpu1:9741"'


def link(alert: str, series: list[str], directory: Path) -> list[str]:
    """The rendered link of an alert, as promtool prints it where it differs from an empty annotation, beside these series."""
    rule = {"alert": "A", "expr": "trouble == 1", "annotations": {"link": LINKS[alert].strip()}}
    (directory / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": [rule]}]}))
    test = {
        "rule_files": ["rules.yml"],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": "1x10"} for name in [f"trouble{{{OWN}}}", *series]],
                "alert_rule_test": [{"eval_time": "5m", "alertname": "A", "exp_alerts": []}],
            }
        ],
    }
    (directory / "test.yml").write_text(yaml.safe_dump(test))
    ran = subprocess.run(
        ["promtool", "test", "rules", "test.yml"],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return [line for line in (ran.stdout + ran.stderr).replace("\\n", "\n").split('"') if "/runbooks/" in line]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize(
    ("alert", "series", "address"),
    [
        ("SGLangRetractingTooOften", [], "http://gpu1:9741"),
        ("SGLangRetractingTooOften", [f'sglang_tuning_web_info{{{OWN}, scheme="http"}}'], "http://gpu1:9741"),
        ("SGLangRetractingTooOften", [f'sglang_tuning_web_info{{{OWN}, scheme="https"}}'], "https://gpu1:9741"),
        (
            "SGLangRetractingTooOften",
            [f'sglang_tuning_web_info{{{OWN}, scheme="https", external_url="https://gpu1.example.com/x"}}'],
            "https://gpu1.example.com/x",
        ),
        (
            "SGLangTuningExporterDown",
            [f'sglang_tuning_web_info{{{LIVING}, scheme="https"}}', f"sglang_tuning_build_info{{{LIVING}}}"],
            "https://gpu2:9741",
        ),
        ("SGLangTuningExporterDown", [f"sglang_tuning_build_info{{{LIVING}}}"], "http://gpu2:9741"),
        ("SGLangTuningExporterDown", [], "http://gpu1:9741"),
    ],
)
def test_a_link_leads_to_the_address_that_the_exporter_exposes(
    alert: str, series: list[str], address: str, tmp_path: Path
) -> None:
    assert link(alert, series, tmp_path) == [f"{address}/runbooks/{alert}"]


def test_an_exporter_exposes_the_address_that_it_was_given(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_bytes(RETRACTION)
    flags = ["--log-file", str(tmp_path / "server.log"), "--external-url", "https://gpu1.example.com/sglang/"]
    with running_exporter(*flags) as exporter:
        shown = exporter.page().labels("sglang_tuning_web_info")
    assert shown == [{"external_url": "https://gpu1.example.com/sglang", "scheme": "http"}]
