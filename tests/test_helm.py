"""The Helm chart, as helm itself renders it. Skipped where helm is missing; CONTRIBUTING.md says how to get it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
CHART = ROOT / "deploy" / "helm" / "sglang-tuning-exporter"
HELM = shutil.which("helm")
ALL = "serviceMonitor.enabled=true,prometheusRule.enabled=true,dashboards.enabled=true"
pytestmark = pytest.mark.skipif(HELM is None, reason="helm is not installed")


def helm(*arguments: str) -> str:
    assert HELM is not None
    ran = subprocess.run([HELM, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def rendered(*settings: str) -> dict[str, dict[str, Any]]:
    """Give the manifests of a release called `chat`, by kind."""
    text = helm("template", "chat", str(CHART), *(part for each in settings for part in ("--set", each)))
    return {each["kind"]: each for each in yaml.safe_load_all(text) if each}


def containers(manifests: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in manifests["Deployment"]["spec"]["template"]["spec"]["containers"]}


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container["env"]}


def test_lint_finds_nothing_wrong() -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART))


def test_without_an_address_the_exporter_is_a_sidecar_that_reads_sglangs_log() -> None:
    manifests = rendered()
    assert set(manifests) == {"Deployment", "Service"}
    sglang, exporter = (containers(manifests)[name] for name in ("sglang", "exporter"))
    assert environment(exporter) == {
        "SGLANG_TUNING_SGLANG_URL": "http://127.0.0.1:30000",
        "SGLANG_TUNING_LOG_FILE": "/var/log/sglang/server.log",
        "SGLANG_TUNING_STATE_FILE": "/var/lib/sglang-tuning/state.json",
        "SGLANG_TUNING_PROFILE": "online",
    }
    assert ">> /var/log/sglang/server.log 2>&1" in sglang["args"][0]
    assert sglang["args"][-1] == "--enable-metrics"
    assert all(isinstance(each, str) for each in sglang["args"])


def test_an_address_makes_an_exporter_alone_that_reads_metrics() -> None:
    manifests = rendered("sglangUrl=http://chat:30000", "profile=offline", "sglang.replicas=3")
    assert list(containers(manifests)) == ["exporter"]
    assert environment(containers(manifests)["exporter"]) == {
        "SGLANG_TUNING_SGLANG_URL": "http://chat:30000",
        "SGLANG_TUNING_PROFILE": "offline",
    }
    assert manifests["Deployment"]["spec"]["replicas"] == 1
    assert [port["name"] for port in manifests["Service"]["spec"]["ports"]] == ["tuning-metrics"]


@pytest.mark.parametrize("settings", [(), ("sglangUrl=http://chat:30000",)], ids=["sidecar", "alone"])
def test_the_chart_confines_the_exporter_which_never_stops_the_server(
    settings: tuple[str, ...],
) -> None:
    exporter = containers(rendered(*settings))["exporter"]
    sidecar = next(yaml.safe_load_all((ROOT / "deploy" / "kubernetes-sidecar.yml").read_text()))
    other = containers({"Deployment": sidecar})["exporter"]
    assert exporter["securityContext"] == other["securityContext"]
    assert exporter["livenessProbe"] == other["livenessProbe"]
    assert "readinessProbe" not in exporter
    assert all(mount.get("readOnly") or mount["name"] in {"tmp", "state"} for mount in exporter["volumeMounts"])


CLOSED = ("webConfig.secrets={tuning-web,tuning-tls}", "apiKey.secret=sglang", "apiKey.key=token")


@pytest.mark.parametrize("settings", [(), ("sglangUrl=http://chat:30000",)], ids=["sidecar", "alone"])
def test_passwords_certificates_and_the_key_come_from_secrets_that_exist(settings: tuple[str, ...]) -> None:
    manifests = rendered(*settings, *CLOSED)
    exporter = containers(manifests)["exporter"]
    volumes = {each["name"]: each for each in manifests["Deployment"]["spec"]["template"]["spec"]["volumes"]}
    mounts = {each["mountPath"]: each for each in exporter["volumeMounts"]}
    for name, path in (
        ("WEB_CONFIG", "/etc/sglang-tuning/web/web.yml"),
        ("API_KEY_FILE", "/etc/sglang-tuning/key/token"),
    ):
        assert environment(exporter)[f"SGLANG_TUNING_{name}"] == path
        mount = mounts[path.rpartition("/")[0]]
        assert mount["readOnly"] is True
        assert "subPath" not in mount, "a secret that changes would not arrive"
    assert [each["secret"]["name"] for each in volumes["web-config"]["projected"]["sources"]] == [
        "tuning-web",
        "tuning-tls",
    ]
    assert volumes["api-key"]["secret"]["secretName"] == "sglang"
    # As in the image: a probe by HTTP would need the password, and restart the pod for ever.
    assert exporter["livenessProbe"]["exec"]["command"] == ["python", "-m", "sglang_tuning_exporter.serve.probe"]


def test_counters_outlive_the_exporter_beside_a_server_in_the_volume_that_is_given() -> None:
    volumes = rendered()["Deployment"]["spec"]["template"]["spec"]["volumes"]
    assert {"name": "state", "emptyDir": {}} in volumes
    claim = "stateVolume.persistentVolumeClaim.claimName=tuning"
    volumes = rendered(claim, "stateVolume.emptyDir=null")["Deployment"]["spec"]["template"]["spec"]["volumes"]
    assert {"name": "state", "persistentVolumeClaim": {"claimName": "tuning"}} in volumes


PEER = "networkPolicy.from[0].namespaceSelector.matchLabels.team=monitoring"


def test_only_those_who_are_named_reach_the_exporter_and_the_server_stays_open() -> None:
    assert "NetworkPolicy" not in rendered()
    policy = rendered("networkPolicy.enabled=true", PEER)["NetworkPolicy"]["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    assert policy["ingress"] == [
        {
            "ports": [{"port": "tuning-metrics"}],
            "from": [{"namespaceSelector": {"matchLabels": {"team": "monitoring"}}}],
        },
        {"ports": [{"port": "http"}]},
    ]
    alone = rendered("networkPolicy.enabled=true", PEER, "sglangUrl=http://chat:30000")["NetworkPolicy"]["spec"]
    assert alone["ingress"] == policy["ingress"][:1]


def test_a_network_policy_that_names_nobody_would_let_everybody_in_and_is_refused() -> None:
    assert HELM is not None
    command = [HELM, "template", "chat", str(CHART), "--set", "networkPolicy.enabled=true"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode != 0
    assert "networkPolicy.from: name who may reach the exporter" in ran.stderr


def test_prometheus_is_told_how_to_reach_an_exporter_that_is_closed() -> None:
    more = ("serviceMonitor.endpoint.scheme=https", "serviceMonitor.endpoint.basicAuth.username.name=tuning-scrape")
    [endpoint] = rendered(ALL, *more)["ServiceMonitor"]["spec"]["endpoints"]
    assert endpoint == {
        "port": "tuning-metrics",
        "interval": "10s",
        "scheme": "https",
        "basicAuth": {"username": {"name": "tuning-scrape"}},
    }


def test_rules_and_boards_are_the_generated_ones() -> None:
    manifests = rendered(ALL, "prometheusRule.labels.release=prom")
    rules = yaml.safe_load((ROOT / "alerts" / "rules" / "sglang-tuning.rules.yml").read_text())
    assert manifests["PrometheusRule"]["spec"] == rules
    assert manifests["PrometheusRule"]["metadata"]["labels"]["release"] == "prom"
    boards = {path.name: json.loads(path.read_text()) for path in (ROOT / "dashboards").glob("*.json")}
    assert {name: json.loads(text) for name, text in manifests["ConfigMap"]["data"].items()} == boards
    assert manifests["ConfigMap"]["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert len(yaml.safe_dump(manifests["ConfigMap"])) < 1 << 20  # the most that Kubernetes stores


def _rules(manifests: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    groups = manifests["PrometheusRule"]["spec"]["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def test_severity_labels_and_single_alerts_are_changed_by_values() -> None:
    wishes = (
        "prometheusRule.alertLabels.team=inference",
        "prometheusRule.alerts.SGLangQueueTooLong=critical",
        "prometheusRule.alerts.SGLangClientTooSlow=off",
        "prometheusRule.alerts.SGLangCrashed.severity=critical",
        "prometheusRule.alerts.SGLangCrashed.labels.team=chat",
    )
    before, after = _rules(rendered(ALL)), _rules(rendered(ALL, *wishes))
    assert set(before) - set(after) == {"SGLangClientTooSlow"}
    assert after["SGLangQueueTooLong"]["labels"] == {"severity": "critical", "team": "inference"}
    assert after["SGLangCrashed"]["labels"] == {"severity": "critical", "team": "chat"}
    assert after["SGLangServerDown"]["labels"] == {**before["SGLangServerDown"]["labels"], "team": "inference"}
    assert all(after[name]["annotations"] == before[name]["annotations"] for name in after)


def test_an_alert_that_is_not_there_is_refused_by_name() -> None:
    assert HELM is not None
    command = [HELM, "template", "chat", str(CHART), "--set", ALL, "--set", "prometheusRule.alerts.SGLangQueue=off"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode != 0
    assert "prometheusRule.alerts.SGLangQueue: no such alert" in ran.stderr


def test_the_service_monitor_finds_the_port_of_the_service_and_the_service_its_pods() -> None:
    manifests = rendered(ALL)
    service, monitor = manifests["Service"], manifests["ServiceMonitor"]
    [endpoint] = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    pods = manifests["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= pods.items()
