"""`report` and `backfill` say the same of a log: which alerts would have been sent, from when to when."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from math import inf
from pathlib import Path

import pytest

from nights import failing, prolonged
from sglang_tuning_exporter.cli import main
from sglang_tuning_exporter.serve.backfill import STEP_SECONDS

WITHIN = 60.0  # seconds between the two: a report looks every half minute


# name -> profile, log, and alerts that must be among those that fire: an agreement on silence proves little
NIGHTS: dict[str, tuple[str, Callable[[], bytes], set[str]]] = {
    "retract": ("online", lambda: prolonged("retract"), {"SGLangRetractingTooOften"}),
    "steady": ("online", lambda: prolonged("steady"), set()),
    "failing": (
        "online",
        failing,
        {
            "SGLangCudaGraphNotCovering",
            "SGLangGraphMemoryShort",
            "SGLangOutOfMemoryDecode",
            "SGLangOutOfMemoryPrefill",
            "SGLangRequestsRejected",
        },
    ),
}
# Beside a running server a failure is still shown after the next start, and nothing of one that was stopped; a report judges each
# start by itself.
SEVERAL_STARTS = {"failing"}


@dataclass(frozen=True)
class Night:
    """The alerts of one log, by `report` and by `backfill`: name and unix seconds; what fires at the end of the log has no end."""

    reported: list[tuple[str, float, float]]
    backfilled: list[tuple[str, float, float]]


def reported(log: Path, profile: str, directory: Path) -> list[tuple[str, float, float]]:
    output = directory / "report.json"
    flags = ["--profile", profile, "--format", "json", "--fail-on", "never", "--output", str(output)]
    assert main(["report", str(log), *flags]) == 0
    return sorted(
        (each["alert"], _unix(each["start"]), inf if each["ongoing"] else _unix(each["end"]))
        for each in json.loads(output.read_text())["alerts"]
    )


def _unix(time: str) -> float:
    return datetime.fromisoformat(time.replace("Z", "+00:00")).timestamp()


def backfilled(log: Path, profile: str, directory: Path) -> list[tuple[str, float, float]]:
    """The alerts that fire at each moment; one ends at the first moment without it."""
    output = directory / "night.om"
    assert main(["backfill", str(log), "--profile", profile, "--output", str(output)]) == 0
    text = output.read_text()
    last = max(float(line.split()[-1]) for line in text.splitlines() if line.startswith("up{"))
    firing: defaultdict[str, list[float]] = defaultdict(list)
    for labels, at in re.findall(r'^ALERTS\{(.*alertstate="firing".*)\} \S+ (\S+)$', text, re.MULTILINE):
        firing[re.findall(r'alertname="(\w+)"', labels)[0]].append(float(at))
    spans = []
    for alert, times in firing.items():
        begin = times[0]
        for at, following in zip(times, [*times[1:], inf], strict=True):
            if following - at > STEP_SECONDS:
                spans.append((alert, begin, inf if at == last else at + STEP_SECONDS))
                begin = following
    return sorted(spans)


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Night]:
    directory = tmp_path_factory.mktemp("nights")
    found = {}
    for name, (profile, make, _) in NIGHTS.items():
        log = directory / f"{name}.log"
        log.write_bytes(make())
        found[name] = Night(reported(log, profile, directory), backfilled(log, profile, directory))
    return found


@pytest.mark.parametrize("name", NIGHTS)
def test_both_name_the_same_alerts(nights: dict[str, Night], name: str) -> None:
    night = nights[name]
    assert [alert for alert, *_ in night.backfilled] == [alert for alert, *_ in night.reported]
    assert NIGHTS[name][2] <= {alert for alert, *_ in night.reported}


@pytest.mark.parametrize("name", NIGHTS)
def test_each_alert_starts_and_ends_both_ways_within_a_minute(nights: dict[str, Night], name: str) -> None:
    for (alert, begin, end), (_, started_at, ended_at) in zip(
        nights[name].backfilled, nights[name].reported, strict=True
    ):
        assert begin == pytest.approx(started_at, abs=WITHIN), alert
        if name not in SEVERAL_STARTS:
            assert end == pytest.approx(ended_at, abs=WITHIN), alert


def test_a_steady_server_fires_nothing_either_way(nights: dict[str, Night]) -> None:
    assert (nights["steady"].reported, nights["steady"].backfilled) == ([], [])
