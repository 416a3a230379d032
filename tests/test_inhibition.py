"""Inhibition of every pair of alerts, by a real Alertmanager with the committed configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from alert_matrix.inhibition import Observed, Servers, firing, measured, observe, pairs, table
from sglang_tuning_exporter.diagnosis.table import ALERTS
from sglang_tuning_exporter.mixin.alerts import is_inhibited_by
from sglang_tuning_exporter.recordings.stack import program

CONFIGURATION = Path(__file__).parents[1] / "alerts" / "alertmanager.yml"
URGENCY = {"info": 0, "warning": 1, "critical": 2}
PAIRS = list(pairs())
HIDDEN = [(row, by) for row in ALERTS for by in ALERTS if is_inhibited_by(row, by)]


EVERYTHING = "everything:1"


def servers() -> Servers:
    """Give each alert and each pair a server of its own, and each inhibited pair a second one where the inhibiting alert has resolved."""
    found: Servers = {f"alone:{row.id}": [firing(row, f"alone:{row.id}")] for row in ALERTS}
    found |= {server: [firing(row, server) for row in both] for server, *both in PAIRS}
    for row, by in HIDDEN:
        server = f"{row.id} after {by.id}"
        found[server] = [firing(row, server), firing(by, server, ended=True)]
    return found | {EVERYTHING: [firing(row, EVERYTHING) for row in ALERTS]}


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    if program("alertmanager") is None:
        pytest.fail("prometheus-alertmanager is missing: install Alertmanager 0.25 or newer", pytrace=False)
    return observe(tmp_path_factory.mktemp("inhibition"), CONFIGURATION, servers(), is_inhibited_by)


@pytest.fixture(scope="module")
def suppressed(observed: Observed) -> frozenset[tuple[str, str]]:
    return observed.suppressed


def test_of_each_pair_the_alert_that_the_table_names_is_inhibited(suppressed: frozenset[tuple[str, str]]) -> None:
    assert measured(suppressed) == table(is_inhibited_by)


def test_a_cause_is_never_hidden_by_its_consequence(suppressed: frozenset[tuple[str, str]]) -> None:
    found = measured(suppressed)
    rows = {row.id: row for row in ALERTS}
    assert [
        (cause, row.alert)
        for row in ALERTS
        for cause in row.causes
        if cause in rows and row.alert in found[rows[cause].alert]
    ] == []


def test_an_alert_is_never_hidden_by_a_less_urgent_one(suppressed: frozenset[tuple[str, str]]) -> None:
    severity = {row.alert: URGENCY[row.severity] for row in ALERTS}
    assert [
        (alert, by) for alert, others in measured(suppressed).items() for by in others if severity[by] < severity[alert]
    ] == []


def test_of_two_alerts_one_is_always_notified(suppressed: frozenset[tuple[str, str]]) -> None:
    found = measured(suppressed)
    assert [
        (one.id, other.id)
        for _, one, other in PAIRS
        if other.alert in found[one.alert] and one.alert in found[other.alert]
    ] == []


def test_an_alert_by_itself_is_notified_and_one_of_another_server_hides_nothing(
    suppressed: frozenset[tuple[str, str]],
) -> None:
    assert [server for server, _ in suppressed if server.startswith("alone:")] == []


def test_a_resolved_alert_inhibits_nothing(suppressed: frozenset[tuple[str, str]]) -> None:
    assert [server for server, _ in suppressed if " after " in server] == []


def test_of_all_alerts_at_once_some_are_notified_and_a_critical_one_is_among_them(
    suppressed: frozenset[tuple[str, str]],
) -> None:
    notified = {row.alert for row in ALERTS} - {alert for server, alert in suppressed if server == "everything:1"}
    assert notified & {row.alert for row in ALERTS if row.severity == "critical"}


def test_a_pager_for_critical_alerts_only_rings_for_each_server_that_has_one(observed: Observed) -> None:
    pairs_with_one = {server for server, *both in PAIRS if any(row.severity == "critical" for row in both)}
    alone = {f"alone:{row.id}" for row in ALERTS if row.severity == "critical"}
    assert (pairs_with_one | alone | {EVERYTHING}) - observed.rung == set()
    assert observed.severities == {"critical"}
