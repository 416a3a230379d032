"""Every pair of alerts, posted to a real Alertmanager with the committed configuration: which one it inhibits while the other fires."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from itertools import combinations
from pathlib import Path
from typing import Any, TypeAlias

import requests
import yaml

from sglang_tuning_exporter.config.values import Address
from sglang_tuning_exporter.diagnosis.row import Diagnosis
from sglang_tuning_exporter.diagnosis.table import ALERTS
from sglang_tuning_exporter.recordings.notifications import Receiver
from sglang_tuning_exporter.recordings.stack import LOOPBACK, Process, free_port, program

CONFIGURATION = Path("alerts/alertmanager.yml")
# Alert → those that it was not notified beside.
Hidden: TypeAlias = dict[str, frozenset[str]]
# Server → its alerts, as they are posted.
Servers: TypeAlias = dict[str, list[dict[str, Any]]]
ROWS = {row.alert: row for row in ALERTS}
# Of one Alertmanager: it compares each alert with all that may hide it.
_SERVERS = 120


class Manager:
    """A running Alertmanager, and what its pager was sent."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.pager: list[Any] = []

    def post(self, alerts: list[dict[str, Any]]) -> None:
        """Send alerts as Prometheus does."""
        with requests.Session() as session:
            session.trust_env = False
            answer = session.post(f"{self.url}/api/v2/alerts", json=alerts, timeout=30)
        answer.raise_for_status()

    def suppressed(self) -> set[tuple[str, str]]:
        """Give the server and the name of every alert that is not notified."""
        with requests.Session() as session:
            session.trust_env = False
            active = session.get(f"{self.url}/api/v2/alerts", timeout=30).json()
        return {
            (alert["labels"]["job"], alert["labels"]["alertname"])
            for alert in active
            if alert["status"]["state"] == "suppressed"
        }

    def ring(self, servers: set[str], most: float = 60.0) -> None:
        """Wait until the pager has rung for these servers, or for a while."""
        with suppress(TimeoutError):
            wait_until(lambda: servers <= _jobs(self.pager), "the pager", most)

    def settled(self, expected: set[tuple[str, str]], most: float = 60.0) -> set[tuple[str, str]]:
        """Give the same, but wait a while for the expected result: Alertmanager processes alerts one by one."""
        deadline = time.monotonic() + most
        while (seen := self.suppressed()) != expected and time.monotonic() < deadline:
            time.sleep(0.2)
        return seen


@dataclass(frozen=True)
class Observed:
    """What Alertmanager did about all servers: alerts that were not notified, servers whose pager rang, severities that rang it."""

    suppressed: frozenset[tuple[str, str]]
    rung: frozenset[str]
    severities: frozenset[str]


def observe(
    directory: Path, configuration: Path, servers: Servers, hidden: Callable[[Diagnosis, Diagnosis], bool]
) -> Observed:
    """Post the alerts of all servers, some servers to each Alertmanager, because it compares every alert with all others."""
    suppressed: set[tuple[str, str]] = set()
    messages: list[Any] = []
    names = list(servers)
    for number, first in enumerate(range(0, len(names), _SERVERS)):
        some = {name: servers[name] for name in names[first : first + _SERVERS]}
        place = directory / f"{number}"
        place.mkdir()
        with running(place, configuration) as manager:
            # The dispatcher does not wait for the rest of a group whose first alert is old enough.
            manager.post([alert for alerts in some.values() for alert in alerts])
            rows = {
                name: [ROWS[alert["labels"]["alertname"]] for alert in alerts if not _has_ended(alert)]
                for name, alerts in some.items()
            }
            expected = {
                (name, row.alert) for name, own in rows.items() for row in own if any(hidden(row, by) for by in own)
            }
            suppressed |= manager.settled(expected)
            critical = {name for name, own in rows.items() if any(row.severity == "critical" for row in own)}
            manager.ring(critical)
            messages += manager.pager
    severities = {alert["labels"]["severity"] for message in messages for alert in message["alerts"]}
    return Observed(frozenset(suppressed), frozenset(_jobs(messages)), frozenset(severities))


def _jobs(messages: Iterable[Any]) -> set[str]:
    return {alert["labels"]["job"] for message in list(messages) for alert in message["alerts"]}


def _has_ended(alert: dict[str, Any]) -> bool:
    return datetime.fromisoformat(alert["endsAt"]) < datetime.now(timezone.utc)


def firing(row: Diagnosis, server: str, *, ended: bool = False) -> dict[str, Any]:
    """Give a row's alert as Prometheus posts it. A job of its own for each server, because an alert about a job has no instance."""
    now = datetime.now(timezone.utc)
    labels = {"alertname": row.alert, "job": server, "severity": row.severity, "diagnosis": row.id}
    if row.about != "job":
        labels["instance"] = server
    return {
        "labels": labels,
        "annotations": {},
        "startsAt": (now - timedelta(minutes=5)).isoformat(),
        "endsAt": (now + timedelta(minutes=-1 if ended else 30)).isoformat(),
    }


@contextmanager
def running(directory: Path, configuration: Path = CONFIGURATION) -> Iterator[Manager]:
    """Run Alertmanager with a configuration in which only the addresses are replaced and critical alerts go to a pager."""
    url = f"http://{LOOPBACK}:{free_port()}"
    manager = Manager(url)
    receiver = Receiver(Address(LOOPBACK, 0), manager.pager.append)
    document = yaml.safe_load(configuration.read_text())
    document["receivers"] = [
        {"name": "nobody"},
        {"name": "pager", "webhook_configs": [{"url": receiver.url, "send_resolved": False}]},
    ]
    document["route"] |= {
        "receiver": "nobody",
        "group_wait": "1s",
        "group_interval": "1s",
        "routes": [{"receiver": "pager", "matchers": ['severity = "critical"']}],
    }
    document["templates"] = []
    path = directory / "alertmanager.yml"
    path.write_text(yaml.safe_dump(document))
    command = [
        str(program("alertmanager")),
        f"--config.file={path}",
        f"--storage.path={directory / 'data'}",
        "--cluster.listen-address=",
        f"--web.listen-address={url.removeprefix('http://')}",
    ]
    process = Process("alertmanager", command, directory / "alertmanager.log")
    receiver.start()
    try:
        process.wait_until_ready(f"{url}/-/ready")
        yield manager
    finally:
        process.stop()
        receiver.stop()


def wait_until(condition: Callable[[], bool], words: str, most: float = 60.0) -> None:
    """Wait for a condition. Raises `TimeoutError`."""
    deadline = time.monotonic() + most
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited in vain for {words}")
        time.sleep(0.05)


def pairs() -> Iterator[tuple[str, Diagnosis, Diagnosis]]:
    """Give every pair of rows with alerts, and a server for each."""
    for one, other in combinations(ALERTS, 2):
        yield f"{one.id}+{other.id}", one, other


def table(hidden: Callable[[Diagnosis, Diagnosis], bool]) -> Hidden:
    """Give the alerts that inhibit each alert, by a function of two rows."""
    return {row.alert: frozenset(other.alert for other in ALERTS if hidden(row, other)) for row in ALERTS}


def measured(suppressed: Iterable[tuple[str, str]]) -> Hidden:
    """Give the alerts that inhibited each alert on the servers of `pairs`."""
    seen = set(suppressed)
    found: dict[str, set[str]] = {row.alert: set() for row in ALERTS}
    for server, one, other in pairs():
        for row, beside in ((one, other), (other, one)):
            if (server, row.alert) in seen:
                found[row.alert].add(beside.alert)
    return {alert: frozenset(names) for alert, names in found.items()}
