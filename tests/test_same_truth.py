"""`report` and the exporter beside the log name the same alerts, from the same times on."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from math import inf
from pathlib import Path

import pytest

from nights import failing, prolonged
from sglang_tuning_exporter.cli import main
from sglang_tuning_exporter.core.diagnoses import adapted
from sglang_tuning_exporter.core.inputs import Logs
from sglang_tuning_exporter.core.watch import Watch

WITHIN = 60.0  # seconds between the two: a report looks every half minute
STEP_SECONDS = 15.0  # between two scrapes of the exporter


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


@dataclass(frozen=True)
class Night:
    """The alerts of one log, by `report` and by the exporter: name, begin and end in unix seconds.

    The end of an alert that fires when the log ends is infinite.
    """

    reported: list[tuple[str, float, float]]
    watched: list[tuple[str, float, float]]


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


def watched(log: Path, profile: str) -> list[tuple[str, float, float]]:
    """The alerts of an exporter that reads the log alone; an alert ends at the first scrape without it."""
    logs, firing = Logs([str(log)]), defaultdict[str, list[float]](list)
    assert logs.first is not None
    at, watch = logs.first, Watch(adapted(profile), logs.first, reads=True, scrapes=False)

    def scrape_until(end: float) -> None:
        nonlocal at
        while at + STEP_SECONDS <= end:
            at += STEP_SECONDS
            watch.advance(at)
            watch.judge(at)
            for alert in watch.clocks.firing:
                firing[alert.alert].append(at)

    for event in logs.events():
        scrape_until(event.time or at)
        watch.take_line(event)
    scrape_until((logs.end or at) + STEP_SECONDS)
    spans = []
    for alert, times in firing.items():
        begin = times[0]
        for time, following in zip(times, [*times[1:], inf], strict=True):
            if following - time > STEP_SECONDS:
                spans.append((alert, begin, inf if time == at else time + STEP_SECONDS))
                begin = following
    return sorted(spans)


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Night]:
    directory = tmp_path_factory.mktemp("nights")
    found = {}
    for name, (profile, make, _) in NIGHTS.items():
        log = directory / f"{name}.log"
        log.write_bytes(make())
        found[name] = Night(reported(log, profile, directory), watched(log, profile))
    return found


@pytest.mark.parametrize("name", NIGHTS)
def test_both_name_the_same_alerts(nights: dict[str, Night], name: str) -> None:
    night = nights[name]
    assert [alert for alert, *_ in night.watched] == [alert for alert, *_ in night.reported]
    assert NIGHTS[name][2] <= {alert for alert, *_ in night.reported}


@pytest.mark.parametrize("name", NIGHTS)
def test_each_alert_starts_and_ends_both_ways_within_a_minute(nights: dict[str, Night], name: str) -> None:
    for (alert, begin, end), (_, started_at, ended_at) in zip(nights[name].watched, nights[name].reported, strict=True):
        assert begin == pytest.approx(started_at, abs=WITHIN), alert
        assert end == pytest.approx(ended_at, abs=WITHIN), alert


def test_a_steady_server_fires_nothing_either_way(nights: dict[str, Night]) -> None:
    assert (nights["steady"].reported, nights["steady"].watched) == ([], [])
