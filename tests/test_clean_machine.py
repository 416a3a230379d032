"""A machine on which nothing is prepared: the variables of CI's command, Debian's packages without their services, a user without sudo."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import environment

ROOT = Path(__file__).parent.parent
DEBIAN = ROOT / "release" / "debian.sh"
pytestmark = pytest.mark.skipif(
    not DEBIAN.exists() or shutil.which("make") is None, reason="needs the repository and make"
)


def command(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_ci_hands_on_home_path_locale_and_the_variables_of_pip_alone(tmp_path: Path) -> None:
    command(tmp_path, "make", 'echo "$@"; env')
    given = {"HOME": "/home/me", "LANG": "C.UTF-8", "CI": "true", "PIP_CERT": "/a b.crt", "PYTHONUNBUFFERED": "1"}
    path = f"{tmp_path}:{os.environ['PATH']}"
    ran = subprocess.run(
        ["sh", ROOT / ".ci" / "run"],
        env={**given, "PATH": path, "TERM": "xterm"},
        capture_output=True,
        text=True,
        check=True,
    )
    arguments, *variables = ran.stdout.splitlines()
    assert arguments == "check test"
    found = dict(line.split("=", 1) for line in variables)
    del given["PYTHONUNBUFFERED"]
    assert {name: value for name, value in found.items() if name not in ("PWD", "SHLVL", "_")} == {
        **given,
        "PATH": path,
    }


class Debian:
    """A folder as the root of a machine, with commands that write down how they were called."""

    def __init__(self, root: Path, installed: str = "") -> None:
        self.policy = root / "usr/sbin/policy-rc.d"
        self._calls = root / "calls"
        self._calls.touch()
        self._commands = root / "commands"
        for folder in (self.policy.parent, self._commands, root / "etc/init.d", root / "lib/systemd/system"):
            folder.mkdir(parents=True)
        for service in ("prometheus", "prometheus-alertmanager"):
            (root / "etc/init.d" / service).touch()
            (root / "lib/systemd/system" / f"{service}.service").touch()
        command(self._commands, "update-rc.d", f'echo "update-rc.d $*" >>{self._calls}')
        # As the real one, it does nothing where dpkg does not call it.
        command(self._commands, "deb-systemd-helper", f'echo "$DPKG_MAINTSCRIPT_PACKAGE: $*" >>{self._calls}')
        command(self._commands, "dpkg-query", f'case " {installed} " in *" $4 "*) echo installed ;; *) exit 1 ;; esac')
        asked = f'for s in prometheus prometheus-alertmanager.service cron; do sh {self.policy} $s start; echo "$s $?"; done'
        command(
            self._commands, "apt-get", f'{{ echo "apt-get $*"; [ "$1" = update ] || {{ {asked}; }}; }} >>{self._calls}'
        )
        self._script = re.sub(r"/(?=usr/sbin|etc/init|lib/systemd)", f"{root}/", DEBIAN.read_text())

    def install(self, *packages: str) -> list[str]:
        path = f"{self._commands}:{os.environ['PATH']}"
        subprocess.run(["sh", "-c", self._script, "sh", *packages], check=True, env=environment(PATH=path))
        return self._calls.read_text().splitlines()


def test_no_service_of_an_installed_package_is_started_or_left_enabled(tmp_path: Path) -> None:
    machine = Debian(tmp_path)
    assert machine.install("prometheus", "prometheus-alertmanager", "python3-venv") == [
        "apt-get update -q",
        "apt-get install -q -y --no-install-recommends --no-upgrade prometheus prometheus-alertmanager python3-venv",
        "prometheus 101",
        "prometheus-alertmanager.service 101",
        "cron 0",
        "update-rc.d prometheus disable",
        "prometheus: disable prometheus.service",
        "update-rc.d prometheus-alertmanager disable",
        "prometheus-alertmanager: disable prometheus-alertmanager.service",
    ]
    assert not machine.policy.exists()


def test_a_service_that_a_user_already_has_stays_as_it_is(tmp_path: Path) -> None:
    calls = Debian(tmp_path, installed="prometheus").install("prometheus", "prometheus-alertmanager")
    assert calls[1].endswith("--no-upgrade prometheus-alertmanager")
    assert "prometheus 0" in calls
    assert not [call for call in calls if call.startswith(("update-rc.d prometheus ", "prometheus: "))]


def test_without_apt_and_sudo_the_demo_runs_without_a_notification_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    command(tmp_path / "bin", "sglang-tuning-exporter", f'exec {sys.executable} -m sglang_tuning_exporter "$@"')
    (tmp_path / "installed").touch()
    make = str(shutil.which("make"))
    ran = subprocess.run(
        [make, "demo", "DEMO=--seconds 1", f"DEMO_VENV={tmp_path}", f"PYTHON={sys.executable}", "--assume-old=pyproject.toml"],
        cwd=ROOT, env=environment(PATH=str(tmp_path)), capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    said = "Not installed: Prometheus and Alertmanager. No notification; the exporter's page shows the same finding."
    assert [line.strip() for line in ran.stdout.splitlines() if "installed:" in line] == [said]
    assert re.search(r"^  exporter +http://127\.0\.0\.1:\d+$", ran.stdout, re.MULTILINE)
