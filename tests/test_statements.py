"""Figures in the documents, each beside the place in the repository that it comes from: a figure that has drifted fails here."""

from __future__ import annotations

import ast
import json
import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rule_stories import INTERVALS
from sglang_tuning_exporter.cli import USAGE_STATUS, main
from sglang_tuning_exporter.collect.scrape import MOST_BYTES
from sglang_tuning_exporter.collect.sidecar import POLL_SECONDS
from sglang_tuning_exporter.config import OPTIONS
from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.mixin.reference import MOST_IMPORTANT
from sglang_tuning_exporter.recordings.replay import packaged
from sglang_tuning_exporter.serve.pages.figures import MOST_SECONDS
from sglang_tuning_exporter.sglang.metrics.exposition import MOST_LINES

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "exporter" / "sglang_tuning_exporter"
NUMBERS = ("No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def first(pattern: str, name: str) -> str:
    """What a file says where this pattern first matches."""
    found = re.search(pattern, read(name), re.MULTILINE)
    assert found is not None, f"{name}: nothing like {pattern}"
    return found[1]


def releases() -> list[str]:
    (table,) = PACKAGE.rglob("flags.json")
    names: list[str] = json.loads(table.read_text())["releases"]
    return names


def default(option: str) -> str:
    return next(str(each.default) for each in OPTIONS if each.name == option)


def port() -> str:
    return default("listen_address").rpartition(":")[2]


def image(program: str) -> str:
    """The major and minor version of an image of docker-compose.yml."""
    return first(rf"image: \S*{program}:v?(\d+\.\d+)", "docker-compose.yml")


def of_compose(variable: str) -> str:
    """The value of a variable of docker-compose.yml where nobody sets it."""
    return first(rf"\$\{{{variable}:-((?:[^{{}}]|\$\{{[^{{}}]*\}})*)\}}", "docker-compose.yml")


def boards() -> list[str]:
    return [
        json.loads(path.read_text())["title"].rpartition(" / ")[2] for path in sorted(ROOT.glob("dashboards/*.json"))
    ]


def needed(program: str) -> str:
    """The oldest release of a program that docs/prometheus.md names."""
    return first(rf"^\| {program} \| (\S+) \|", "docs/prometheus.md")


def replay_port() -> str:
    return first(r"where /metrics is served \(default \S+:(\d+)\)", "exporter/sglang_tuning_exporter/cli/parser.py")


def recordings() -> list[Path]:
    return [path.parent for path in PACKAGE.glob("recordings/*/server.log.gz")]


@dataclass(frozen=True)
class Statement:
    """What `document` says wherever `pattern` matches, and what it has to say."""

    document: str
    pattern: str
    source: Callable[[], Any]


STATEMENTS = [
    Statement("README.md", r"works with SGLang (\S+) to", lambda: releases()[0]),
    Statement("README.md", r"works with SGLang \S+ to ([\d.]+):", lambda: releases()[-1]),
    Statement(
        "README.md", r"Python (3\.\d+) or newer", lambda: first(r'requires-python = ">=([\d.]+)"', "pyproject.toml")
    ),
    Statement("README.md", r"Prometheus (2\.\d+) or newer", lambda: needed("Prometheus")),
    Statement("README.md", r"Alertmanager (0\.\d+) or newer", lambda: needed("Alertmanager")),
    Statement("README.md", r"Grafana (\d+\.\d+) or newer", lambda: needed("Grafana")),
    Statement("README.md", r"Grafana :(\d+)", lambda: of_compose("GRAFANA_PORT")),
    Statement("README.md", r"Prometheus :(\d+)", lambda: of_compose("PROMETHEUS_PORT")),
    Statement("README.md", r"Alertmanager :(\d+)", lambda: of_compose("ALERTMANAGER_PORT")),
    Statement("README.md", r"127\.0\.0\.1:(97\d\d)", port),
    Statement("README.md", r"(\w+) of \[all alerts\]", lambda: NUMBERS[len(MOST_IMPORTANT)]),
    Statement("CHANGELOG.md", r"one SGLang server, (\S+) to", lambda: releases()[0]),
    Statement("CHANGELOG.md", r"one SGLang server, \S+ to ([\d.]+)\.", lambda: releases()[-1]),
    Statement("CHANGELOG.md", r"the last (\d+) minutes", lambda: f"{MOST_SECONDS / 60:.0f}"),
    Statement("ARCHITECTURE.md", r"(\d+) releases", lambda: len(releases())),
    Statement(
        "CONTRIBUTING.md",
        r"Python (3\.\d+) or newer",
        lambda: first(r'requires-python = ">=([\d.]+)"', "pyproject.toml"),
    ),
    Statement("docs/prometheus.md", r"starts Prometheus ([\d.]+)", lambda: image("prometheus")),
    Statement("docs/prometheus.md", r"long-term support\), Alertmanager ([\d.]+)", lambda: image("alertmanager")),
    Statement("docs/prometheus.md", r"and Grafana ([\d.]+) \(", lambda: image("grafana")),
    Statement("docs/prometheus.md", r"12's Prometheus ([\d.]+)", lambda: needed("Prometheus")),
    Statement(
        "docs/prometheus.md", r"12's Prometheus [\d.]+ and Alertmanager (\d+\.\d+)", lambda: needed("Alertmanager")
    ),
    Statement("docs/prometheus.md", r'"gpu\d:(\d+)"', port),
    Statement("docs/prometheus.md", r"(\w+) linked boards", lambda: NUMBERS[len(boards())]),
    Statement("docs/troubleshooting.md", r"listening on http://([\d.:]+),", lambda: default("listen_address")),
    Statement("docs/troubleshooting.md", r"watching metrics and log, profile (\w+)", lambda: default("profile")),
    Statement("docs/prometheus.md", r"scrape_interval: 15s +# at most (\d+)m", lambda: max(INTERVALS) // 60),
    Statement(
        "CHANGELOG.md", r"hold for scrapes up to (\w+) minutes apart", lambda: str.lower(NUMBERS[max(INTERVALS) // 60])
    ),
    Statement("ARCHITECTURE.md", r"reads appended bytes \(every ([\d.]+) s,", lambda: POLL_SECONDS),
    Statement("SECURITY.md", r"at most (\d+) MiB and", lambda: MOST_BYTES >> 20),
    Statement("SECURITY.md", r"at most \d+ MiB and ([\d,]+) lines", lambda: f"{MOST_LINES:,}"),
    Statement("docs/offline.md", r"(\d): no log of SGLang", lambda: USAGE_STATUS),
    Statement("docs/recordings.md", r"serves a recording at 127\.0\.0\.1:(\d+)", replay_port),
    Statement("docs/recordings.md", r"(\w+) recordings are in the package", lambda: NUMBERS[len(recordings())]),
    Statement(".env.example", r"runs as uid (\d+)", lambda: first(r"^USER (\d+)", "exporter/Dockerfile")),
    Statement(".env.example", r"^SGLANG_LOG_FILE=(.*)", lambda: of_compose("SGLANG_LOG_FILE")),
    Statement(".env.example", r"^SGLANG_PROFILE=(.*)", lambda: of_compose("SGLANG_PROFILE")),
    Statement(
        ".env.example",
        r"What the server is for: ([^.]*)\.",
        lambda: ", ".join([*PROFILES][:-1]) + f" or {[*PROFILES][-1]}",
    ),
    Statement("deploy/kubernetes-sidecar.yml", r"containerPort: (97\d\d)", port),
    Statement("deploy/kubernetes-sidecar.yml", r"SGLANG_TUNING_PROFILE, value: (\w+)", lambda: default("profile")),
]


@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda each: f"{each.document}: {each.pattern}")
def test_a_figure_is_what_its_source_says(statement: Statement) -> None:
    found = re.findall(statement.pattern, read(statement.document), re.MULTILINE)
    assert found, "the document no longer says this: take the row out"
    assert {*found} == {str(statement.source())}


def test_the_report_that_the_readme_shows_is_one_of_a_packaged_recording(capsys: pytest.CaptureFixture[str]) -> None:
    shown = first(r"first of all:\n\n```\n((?:.+\n)+)```", "README.md").splitlines()
    main(["report", str(packaged("retract") / "server.log.gz"), "--profile", "offline"])
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in shown if line not in printed] == []


def test_every_variable_of_the_compose_file_is_in_the_example_and_no_other() -> None:
    used = set(re.findall(r"\$\{([A-Z_]+)", read("docker-compose.yml")))
    assert used == set(re.findall(r"^#?([A-Z_]+)=", read(".env.example"), re.MULTILINE))


@cache
def literals() -> str:
    """Every text that the exporter's modules hold, with a gap where a value is put in."""
    nodes = [node for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return re.sub(r"%[sd]", "…", "\n".join(texts))


def messages() -> list[str]:
    """The messages of the tables in docs/troubleshooting.md."""
    return re.findall(r"^\| `([^`]+)` \|", read("docs/troubleshooting.md"), re.MULTILINE)


@pytest.mark.parametrize("message", messages())
def test_each_message_of_troubleshooting_is_made_of_words_that_the_exporter_logs(message: str) -> None:
    known = {option.flag for option in OPTIONS} | {os.strerror(98)}
    # What a value is put between, and what is joined: a reason and its remedy, the sources, the profile.
    parts = re.split(r"…|http\S*|\b\d{3}\b|; |: |=|, (?=watching|profile)|(?<=watching) | and |(?<=profile) ", message)
    words = [part.strip(" ().,") for part in parts]
    assert [
        each for each in words if each and each not in literals() and each not in known and each not in PROFILES
    ] == []
