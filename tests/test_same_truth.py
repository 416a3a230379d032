"""`backfill` and Prometheus fire the same alerts for the same log.

The log is backfilled into a real Prometheus. Its samples, read back out of it, go to `promtool test rules`, where
Prometheus's own engine evaluates the committed rule file: recording rules, `for`, `keep_firing_for`. A Prometheus evaluates
some seconds after it scrapes, so the samples stand five seconds before each evaluation. A series that is missing from a
scrape gets the stale marker, as in a real Prometheus.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from alert_matrix.promtool import PRESENT, promtool
from conftest import wait_for
from nights import failing, imbalanced, prolonged, restarted, started
from sglang_tuning_exporter.cli import main
from sglang_tuning_exporter.recordings.stack import free_port
from sglang_tuning_exporter.report.samples import EVALUATION_SECONDS

ROOT = Path(__file__).parent.parent
RULES = ROOT / "alerts" / "rules" / "sglang-tuning.rules.yml"
pytestmark = pytest.mark.skipif(not PRESENT, reason="no Prometheus is installed")


def capped() -> bytes:
    """The retracting server of 0.5.9, with its conservativeness replaced by the highest value that has an effect."""
    text = prolonged("v0.5.9-retract")
    assert b"schedule_conservativeness=0.1," in text
    return text.replace(b"schedule_conservativeness=0.1,", b"schedule_conservativeness=1.5,")


# name -> profile, log, and alerts that must be among those that fire: an agreement on silence proves little
NIGHTS: dict[str, tuple[str, Callable[[], bytes], set[str]]] = {
    "retract": ("online", lambda: prolonged("retract"), {"SGLangRetractingTooOften"}),
    "capped": ("online", capped, {"SGLangConservativenessIneffective"}),
    "big_queue": ("online", lambda: prolonged("big_queue"), {"SGLangRunningAtLimit", "SGLangQueueTooLong"}),
    "steady": ("online", lambda: prolonged("steady"), set()),
    "client_limited": ("offline", lambda: prolonged("client_limited"), {"SGLangClientTooSlow"}),
    "dp2": ("online", lambda: prolonged("dp2"), set()),
    "imbalanced": ("online", imbalanced, {"SGLangDPImbalanced"}),
    "started": ("online", started, {"SGLangMemoryReserveTooSmall", "SGLangMemoryReserveTooLarge"}),
    "restart_append": ("online", lambda: restarted("restart_append"), {"SGLangRestartLoop"}),
    "failing": (
        "online",
        failing,
        {
            "SGLangCudaGraphNotCovering",
            "SGLangFormatDrift",
            "SGLangGraphMemoryShort",
            "SGLangOutOfMemoryDecode",
            "SGLangOutOfMemoryPrefill",
            "SGLangRequestsRejected",
            "SGLangSchedulerStuck",
        },
    ),
}


@dataclass(frozen=True)
class Night:
    """Alerts of one log by `backfill` and by Prometheus: when each fired, in seconds since the first evaluation (end: first evaluation without it).

    What fires at the log's end ends with it.
    """

    by_backfill: dict[str, list[tuple[float, float]]]
    by_prometheus: dict[str, list[tuple[float, float]]]


@dataclass(frozen=True)
class Backfilled:
    """The alerts that were backfilled, with the times of the first and the last evaluation."""

    first: float
    last: float
    spans: list[tuple[str, float, float]]


def backfilled(exposed: Path) -> Backfilled:
    """Read the alerts that fire at each moment that was backfilled; one ends at the first moment without it."""
    text = exposed.read_text()
    moments = [float(line.split()[-1]) for line in text.splitlines() if line.startswith("up{")]
    firing: defaultdict[str, list[float]] = defaultdict(list)
    for labels, at in re.findall(r'^ALERTS\{(.*alertstate="firing".*)\} \S+ (\S+)$', text, re.MULTILINE):
        firing[re.findall(r'alertname="(\w+)"', labels)[0]].append(float(at))
    spans = []
    for alert, times in firing.items():
        begin = times[0]
        for at, following in zip(times, [*times[1:], inf], strict=True):
            if following - at > EVALUATION_SECONDS:
                spans.append((alert, begin, at + EVALUATION_SECONDS))
                begin = following
    return Backfilled(moments[0], moments[-1], spans)


class Prometheus:
    """A real Prometheus with the backfilled blocks."""

    def __init__(self, directory: Path) -> None:
        self._address = f"127.0.0.1:{free_port()}"
        (directory / "prometheus.yml").write_text("global: {scrape_interval: 15s}\n")
        self._log = (directory / "prometheus.log").open("wb")
        self._process = subprocess.Popen(
            ["prometheus", f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data",
             f"--web.listen-address={self._address}", "--storage.tsdb.retention.time=100y", "--log.level=warn"],
            stdout=self._log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        wait_for(self._ready, seconds=30)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=10)
        self._log.close()

    def _ready(self) -> bool:
        try:
            return self._get("/-/ready").status_code == 200
        except requests.RequestException:
            return False

    def _get(self, path: str, **params: str) -> requests.Response:
        with requests.Session() as session:
            session.trust_env = False
            return session.get(f"http://{self._address}{path}", params=params, timeout=20)

    def samples(self, selector: str, at: float) -> list[dict[str, Any]]:
        answer = self._get("/api/v1/query", query=f"{selector}[3h]", time=f"{at}").json()
        assert answer["status"] == "success", answer
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Night]:
    directory = tmp_path_factory.mktemp("nights")
    reported: dict[str, Backfilled] = {}
    for name, (profile, make, _) in NIGHTS.items():
        log, exposed = directory / f"{name}.log", directory / f"{name}.om"
        log.write_bytes(make())
        flags = ["--profile", profile, "--instance", name, "--output", str(exposed)]
        assert main(["backfill", str(log), *flags]) == 0
        reported[name] = backfilled(exposed)
        ran = promtool("tsdb", "create-blocks-from", "openmetrics", exposed, f"{directory}/data")
        assert ran.status == 0, ran.words
    prometheus = Prometheus(directory)
    try:
        fired = evaluated(directory, prometheus, {name: report.first for name, report in reported.items()})
    finally:
        prometheus.close()
    return {
        name: Night(
            _by_alert(report.spans, report),
            _by_alert(
                (
                    (alert, start + report.first, end + report.first)
                    for alert, spans in fired[name].items()
                    for start, end in spans
                ),
                report,
            ),
        )
        for name, report in reported.items()
    }


def _by_alert(spans: Iterable[tuple[str, float, float]], report: Backfilled) -> dict[str, list[tuple[float, float]]]:
    found: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for alert, start, end in spans:
        if start <= report.last:
            found[alert].append((start - report.first, min(end, report.last) - report.first))
    return dict(found)


# --- Prometheus's own engine -----------------------------------------------------------------------------------------


def asked_for() -> str:
    """Every metric of ours that the rules select, as a pattern."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    text = " ".join(rule["expr"] for group in groups for rule in group["rules"])
    return "|".join(sorted(set(re.findall(r"(?<![\w:])(?:sglang_tuning_\w+|up)(?=[ {\[)])", text))))


def evaluated(
    directory: Path, prometheus: Prometheus, firsts: dict[str, float]
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Evaluate the committed rules over each instance's samples: instance -> alert -> when it fired."""
    steps = 0
    series = []
    for name, first in firsts.items():
        found = prometheus.samples(f'{{__name__=~"{asked_for()}", instance="{name}"}}', first + 3 * 3600)
        length = 1 + max(round((at - first) / EVALUATION_SECONDS) for each in found for at, _ in each["values"])
        steps = max(steps, length)
        series += [_noted(each, first, length) for each in found]
    test = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "15s",
        "group_eval_order": ["sglang-tuning.records", "sglang-tuning.alerts"],
        "tests": [
            {
                "interval": "5s",
                "input_series": series,
                "promql_expr_test": [
                    {"expr": 'ALERTS{alertstate="firing"}', "eval_time": f"{15 * step}s", "exp_samples": []}
                    for step in range(1, steps + 1)
                ],
            }
        ],
    }
    path = directory / "nights.yml"
    path.write_text(json.dumps(test))  # JSON is YAML, and quicker to write
    return _fired(promtool("test", "rules", path).words, firsts)


def _noted(series: dict[str, Any], first: float, length: int) -> dict[str, str]:
    """Write a series in promtool's notation: sample k stands 5 s before evaluation k + 1, counted in fifteens from 0."""
    labels = dict(series["metric"])
    name = labels.pop("__name__")
    values = {round((at - first) / EVALUATION_SECONDS): value for at, value in series["values"]}
    steps = []
    for step in range(length):
        gone = "stale" if step - 1 in values else "_"
        steps.append(f"_ _ {values.get(step, gone)}")
    said = ", ".join(f"{label}={json.dumps(value)}" for label, value in labels.items())
    return {"series": f"{name}{{{said}}}", "values": " ".join(steps)}


def _fired(output: str, firsts: dict[str, float]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Read the alerts that promtool got at each evaluation where the test expects none."""
    moments: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for found in re.finditer(
        r'expr: "ALERTS\{[^\n]*time: ([0-9hms]+),\s+exp:[^\n]*\n\s+got:((?:\s+\{?Labels:|[^\n])*)', output
    ):
        step = _seconds(found[1]) // 15 - 1
        for labels in re.findall(r"\{__name__=[^}]*\}", found[2]):
            labels_of = dict(re.findall(r'(\w+)=\\?"([^"\\]*)\\?"', labels))
            moments[labels_of["instance"], labels_of["alertname"]].add(step)
    fired: dict[str, dict[str, list[tuple[float, float]]]] = {name: {} for name in firsts}
    for (instance, alert), steps in moments.items():
        spans: list[tuple[float, float]] = []
        for step in sorted(steps):
            at = EVALUATION_SECONDS * step
            if spans and spans[-1][1] == at:
                spans[-1] = (spans[-1][0], at + EVALUATION_SECONDS)
            else:
                spans.append((at, at + EVALUATION_SECONDS))
        fired[instance][alert] = spans
    return fired


def _seconds(text: str) -> int:
    units = {"h": 3600, "m": 60, "s": 1}
    return sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+)([hms])", text))


# --- what is compared ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NIGHTS)
def test_backfill_and_prometheus_fire_the_same_alerts(nights: dict[str, Night], name: str) -> None:
    night, expected = nights[name], NIGHTS[name][2]
    assert set(night.by_backfill) == set(night.by_prometheus)
    assert expected <= set(night.by_backfill)


@pytest.mark.parametrize("name", NIGHTS)
def test_each_alert_starts_and_ends_within_one_evaluation_of_the_other(nights: dict[str, Night], name: str) -> None:
    night = nights[name]
    for alert, spans in night.by_backfill.items():
        other = night.by_prometheus[alert]
        assert len(spans) == len(other), (alert, spans, other)
        for (start, end), (its_start, its_end) in zip(spans, other, strict=True):
            assert abs(start - its_start) <= EVALUATION_SECONDS, (alert, spans, other)
            assert abs(end - its_end) <= EVALUATION_SECONDS, (alert, spans, other)


def test_a_steady_server_fires_nothing_either_way(nights: dict[str, Night]) -> None:
    assert nights["steady"] == Night({}, {})
