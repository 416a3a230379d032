"""What docker-compose.yml, the image and deploy/ promise to an operator, read from the files: docker is not needed."""

from __future__ import annotations

import json
import re
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from promtool import PRESENT, promtool

ROOT = Path(__file__).resolve().parent.parent
COMPOSE_TEXT = (ROOT / "docker-compose.yml").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load(COMPOSE_TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OWN = ("exporter", "notifications")
DEMO: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "demo.yml").read_text())
DOCKERFILE = (ROOT / "exporter" / "Dockerfile").read_text()
DOT_ENV = (ROOT / ".env.example").read_text()
PROMETHEUS: dict[str, Any] = yaml.safe_load((ROOT / "alerts" / "prometheus.yml").read_text())
MANIFESTS = ("deploy/kubernetes-sidecar.yml", "deploy/kubernetes-node-log.yml")
UNIT = (ROOT / "deploy" / "sglang-tuning-exporter.service").read_text()


def _tag(image: str) -> str:
    return image.rsplit("/", 1)[-1].partition(":")[2]


VARIABLE = re.compile(r"\$\{([A-Z_]+):-([^${}]*)\}")  # one without another inside


def _filled_in(text: str, **given: str) -> str:
    """Give the text as compose reads it: every ${NAME:-default} replaced by what is given, else by its default."""
    while VARIABLE.search(text):
        text = VARIABLE.sub(lambda match: given.get(match[1], match[2]), text)
    return text


def _containers(path: str) -> dict[str, dict[str, Any]]:
    documents = list(yaml.safe_load_all((ROOT / path).read_text()))
    pods = [document["spec"]["template"]["spec"] for document in documents if document["kind"] == "Deployment"]
    return {container["name"]: container for pod in pods for container in pod["containers"]}


def test_the_images_are_built_on_a_pinned_python() -> None:
    bases = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert bases == ["${PYTHON}", "${PYTHON}"]
    (base,) = re.findall(r"^ARG PYTHON=(\S+)", DOCKERFILE, re.MULTILINE)
    assert re.fullmatch(r"python:3\.12\.\d+-slim-bookworm", base)
    assert DOCKERFILE.count(base) == 3, "what is said of pinning by digest speaks of another image"


@pytest.mark.parametrize("name", OWN)
def test_a_container_of_ours_has_a_fixed_uid_that_is_not_root_and_a_read_only_root(name: str) -> None:
    service = SERVICES[name]
    assert _filled_in(service["user"]) == "10001:10001"
    assert service["read_only"] is True
    assert service["tmpfs"][0].startswith("/tmp:size=")
    assert "USER 10001:10001" in DOCKERFILE


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_every_container_is_pinned_confined_watched_limited_and_started_again(name: str) -> None:
    service = SERVICES[name]
    assert re.match(r"v?\d+\.\d+", _tag(service["image"]))
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "pid", "ipc", "network_mode", "devices"} & set(service)
    assert service["healthcheck"]["test"][0] == "CMD"
    assert service["restart"] == "unless-stopped"
    assert service["logging"]["options"]["max-size"]
    assert service["mem_limit"]
    assert service["pids_limit"]
    assert service["read_only"] is True
    for volume in service.get("volumes", []):
        assert not volume.startswith("./") or volume.endswith(":ro")
        assert not volume.startswith("./") or (ROOT / volume.split(":")[0]).exists()
    for port in service.get("ports", []):
        assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", _filled_in(port))


def test_the_exporters_health_check_is_the_images_own_and_needs_python_alone() -> None:
    check = SERVICES["exporter"]["healthcheck"]["test"]
    assert check == ["CMD", "python", "-m", "sglang_tuning_exporter.serve.probe"]
    assert f"CMD {json.dumps(check[1:])}" in DOCKERFILE


def test_no_secret_has_a_place_in_the_image_or_the_compose_file() -> None:
    """Arguments and variables of a build stay in its layers; a key or a password comes from a mounted file."""
    for text in (DOCKERFILE, COMPOSE_TEXT):
        assert not re.search(r"(?i)^[^#\n]*(password|passwd|secret|token|api_key)\w*[=:]\s*\S", text, re.MULTILINE)


def test_what_the_image_holds_of_ours_belongs_to_root_and_its_user_cannot_change_it() -> None:
    assert "--chown" not in DOCKERFILE
    assert DOCKERFILE.index("COPY --from=build") < DOCKERFILE.index("USER 10001:10001")
    assert DOCKERFILE.count("USER ") == 1


def test_every_variable_has_a_default_and_is_explained_in_the_example() -> None:
    used = re.findall(r"\$\{([A-Z_]+)([^}]*)\}", COMPOSE_TEXT)
    assert len(used) > 5
    without_default = {name for name, rest in used if not rest.startswith(":-")}
    explained = set(re.findall(r"^#?([A-Z_]+)=", DOT_ENV, re.MULTILINE))
    assert without_default == set()
    assert {name for name, _ in used} == explained


@pytest.mark.parametrize("name", sorted(DEMO["services"]))
def test_every_service_of_the_demo_is_as_confined_as_that_of_the_compose_file(name: str) -> None:
    service = DEMO["services"][name]
    assert service["extends"]["file"] == "../docker-compose.yml"
    assert service["extends"]["service"] in SERVICES
    assert not {"user", "cap_add", "privileged", "read_only", "security_opt", "ports"} & set(service)
    for volume in service.get("volumes", []):
        assert not volume.startswith("./") or (
            (ROOT / "deploy" / volume.split(":")[0]).is_file() and volume.endswith(":ro")
        )


@pytest.mark.parametrize("path", ["README.md", "docs/log.md", ".env.example", "deploy/kubernetes-sidecar.yml"])
def test_every_recipe_for_the_log_takes_both_streams(path: str) -> None:
    """SGLang prints access lines to standard output, and everything else to standard error."""
    text = (ROOT / path).read_text()
    assert ">> /var/log/sglang/server.log 2>&1" in text
    assert "2>>" not in text


def test_the_rule_files_of_prometheus_are_where_the_compose_file_mounts_them() -> None:
    targets = [volume.split(":")[1] for volume in SERVICES["prometheus"]["volumes"]]
    assert PROMETHEUS["rule_files"] == ["rules/sglang-tuning.rules.yml"]
    assert {"/etc/prometheus/prometheus.yml", "/etc/prometheus/rules"} <= set(targets)
    assert list((ROOT / "alerts" / "rules").glob("*.yml"))


@pytest.mark.skipif(not PRESENT, reason="promtool is not installed")
@pytest.mark.parametrize("path", ["alerts/prometheus.yml", "deploy/demo-prometheus.yml"])
def test_promtool_finds_nothing_wrong_with_the_configuration_of_prometheus(path: str) -> None:
    ran = promtool("check", "config", "--syntax-only", ROOT / path)
    assert ran.status == 0, ran.words


def test_alertmanager_finds_its_templates_where_the_compose_file_mounts_them() -> None:
    config = yaml.safe_load((ROOT / "alerts" / "alertmanager.yml").read_text())
    volumes = [_filled_in(volume) for volume in SERVICES["alertmanager"]["volumes"]]
    mounts = dict(volume.split(":")[1::-1] for volume in volumes if volume.startswith("./"))
    for pattern in config["templates"]:
        inside = Path("/etc/alertmanager") / pattern
        assert list((ROOT / mounts[str(inside.parent)]).glob(inside.name))


def test_grafana_reads_the_boards_where_the_compose_file_mounts_them() -> None:
    mounts = dict(volume.split(":")[1::-1] for volume in SERVICES["grafana"]["volumes"])
    provisioning = ROOT / mounts["/etc/grafana/provisioning"]
    (providers,) = (provisioning / "dashboards").glob("*.y*ml")
    folder = yaml.safe_load(providers.read_text())["providers"][0]["options"]["path"]
    assert list((ROOT / mounts[folder]).glob("*.json"))


def test_grafana_lets_visitors_look_and_has_no_known_password() -> None:
    environment = SERVICES["grafana"]["environment"]
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert environment["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"


def test_a_container_log_of_docker_is_read_through_a_group_and_without_root() -> None:
    exporter = yaml.safe_load((ROOT / "deploy" / "docker-json-log.yml").read_text())["services"]["exporter"]
    assert exporter["user"] == "10001:0"
    assert set(exporter) == {"user", "environment", "volumes"}
    (volume,) = exporter["volumes"]
    assert volume == "/var/lib/docker/containers/${SGLANG_CONTAINER_ID}:/var/log/sglang:ro"


@pytest.mark.parametrize("path", MANIFESTS)
def test_a_sidecar_is_confined_and_never_takes_the_server_out_of_service(path: str) -> None:
    exporter = _containers(path)["exporter"]
    context = exporter["securityContext"]
    assert context["runAsUser"] == 10001
    assert context["runAsNonRoot"] is True
    assert context["readOnlyRootFilesystem"] is True
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert exporter["livenessProbe"]["httpGet"] == {"path": "/-/healthy", "port": "tuning-metrics"}
    assert "readinessProbe" not in exporter


@pytest.mark.parametrize("path", MANIFESTS)
def test_the_images_of_a_manifest_are_pinned_and_its_server_gives_metrics(path: str) -> None:
    containers = _containers(path)
    assert {name: bool(re.match(r"v?\d+\.\d+", _tag(one["image"]))) for name, one in containers.items()} == {
        "sglang": True,
        "exporter": True,
    }
    assert "--enable-metrics" in " ".join(containers["sglang"]["args"])


def test_the_systemd_unit_has_a_dynamic_user_and_stops_after_a_wrong_setting() -> None:
    settings = dict(line.partition("=")[::2] for line in UNIT.splitlines() if re.match(r"[A-Z][A-Za-z]+=", line))
    assert settings["ExecStart"].endswith("/sglang-tuning-exporter serve")
    assert settings["DynamicUser"] == "yes"
    assert settings["CapabilityBoundingSet"] == ""
    assert settings["RestartPreventExitStatus"] == "2"


def test_the_image_installs_nothing_but_what_is_locked_with_its_hash() -> None:
    installs = [line for line in DOCKERFILE.splitlines() if re.search(r"\bpip\b.*\b(?:install|wheel)\b", line)]
    assert len(installs) == 4
    for line in installs:
        from_a_lock = "--require-hashes" in line and "--only-binary :all:" in line and ".lock" in line
        assert from_a_lock or ("--no-index" in line and "--no-deps" in line), line


@pytest.mark.parametrize("name", ["requirements", "build"])
def test_every_package_of_a_lock_has_one_version_and_its_hashes(name: str) -> None:
    text = re.sub(r"^ *#.*\n?", "", (ROOT / "exporter" / f"{name}.lock").read_text(), flags=re.MULTILINE)
    packages = re.split(r"\n(?=\S)", text.strip())
    assert packages
    for package in packages:
        assert re.fullmatch(
            r"[\w-]+==[\w.]+(?: ; [^\\\n]+)? \\\n(?: +--hash=sha256:[0-9a-f]{64}(?: \\\n|\n?))+", package
        ), package


def test_the_lock_has_every_dependency_at_a_version_that_is_allowed() -> None:
    locked = dict(
        re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "exporter" / "requirements.lock").read_text(), re.MULTILINE)
    )
    for requirement in map(Requirement, requires("sglang-tuning-exporter") or []):
        if requirement.marker is None:
            assert locked[canonicalize_name(requirement.name)] in requirement.specifier, requirement
