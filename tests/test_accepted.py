"""What a user accepts is said nowhere but as muted; and how long an alert waits is the user's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from conftest import watched_retractions
from sglang_tuning_exporter.cli import main
from sglang_tuning_exporter.config import values
from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.core.alerts import Clocks, State
from sglang_tuning_exporter.core.diagnoses import BY_ID, adapted, better_explained_by
from sglang_tuning_exporter.recordings.replay import packaged
from sglang_tuning_exporter.serve import metrics
from sglang_tuning_exporter.sglang import exposition

if TYPE_CHECKING:
    from sglang_tuning_exporter.collect.sidecar import Sidecar

LOG = packaged("retract") / "server.log.gz"
ROW, WHY = "retracting_too_often", "a stress test"
ACCEPT = ("--accept", f"{ROW}={WHY}")
MUTED = f"Muted: {BY_ID[ROW].summary} Why: {WHY}."


def reported(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str]:
    status = main(["report", str(LOG), "--profile", "offline", *flags])
    return status, capsys.readouterr().out


def test_the_status_of_a_report_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    assert reported(capsys)[0] == 1
    assert reported(capsys, *ACCEPT)[0] == 0


def test_a_report_says_what_is_muted_and_why_and_has_no_finding_and_no_alert_of_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = json.loads(reported(capsys, *ACCEPT, "--format", "json")[1])
    better_explained = {row.id for row in BY_ID.values() if BY_ID[ROW] in better_explained_by(row)}
    assert not {ROW, *better_explained} & {each["diagnosis"] for each in document["findings"]}
    assert ROW not in {each["diagnosis"] for each in document["alerts"]}
    assert f"{MUTED} It is so now." in document["notes"]
    assert "but what is muted" in json.dumps(document)
    assert MUTED in reported(capsys, *ACCEPT)[1]
    assert MUTED in reported(capsys, *ACCEPT, "--format", "html")[1]


def exposed(directory: Path, **settings: Any) -> tuple[Sidecar, dict[str, dict[str, float]]]:
    directory.mkdir(exist_ok=True)
    sidecar = watched_retractions(directory, profile="offline", **settings)
    found: dict[str, dict[str, float]] = {}
    for family in metrics.collect(sidecar):
        for text, value in family.samples:
            if "diagnosis" in family.names:
                found.setdefault(family.sample_name, {})[exposition.labels(text[1:-1])["diagnosis"]] = value
    return sidecar, found


def test_rules_and_boards_read_a_muted_alert_that_is_never_on_and_no_condition(tmp_path: Path) -> None:
    _, before = exposed(tmp_path / "a")
    assert before["sglang_tuning_condition"][ROW] > before["sglang_tuning_condition_limit"][ROW]
    _, found = exposed(tmp_path / "b", accept={ROW: WHY})
    assert found["sglang_tuning_alert"][ROW] == 0.0  # absent, a rule would hold the last 1
    assert found["sglang_tuning_accepted_info"] == {ROW: 1.0}
    for name in ("condition", "condition_limit", "advice_timestamp_seconds"):
        assert ROW not in found.get(f"sglang_tuning_{name}", {})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"accept": {"queue_to_long": "why"}},
            "accept=queue_to_long: give a diagnosis of docs/diagnoses.md; did you mean queue_too_long?"),
        ({"wait": {"shared_prefixes_unused": 60.0}}, "wait=shared_prefixes_unused: give a diagnosis"),
    ],
)  # fmt: skip
def test_a_name_that_is_no_diagnosis_is_refused_in_one_line(given: dict[str, dict[str, object]], told: str) -> None:
    with pytest.raises(UsageError) as refused:
        adapted("online", None, given.get("accept"), given.get("wait"))  # type: ignore[arg-type] # as given
    assert str(refused.value).startswith(told)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (["queue_too_long"], "queue_too_long: say why as well, such as queue_too_long=batch jobs may wait"),
        ({"queue_too_long": None}, "say why as well"),
        ("", "give NAME=VALUE"),
    ],
)
def test_what_is_accepted_needs_a_reason(value: object, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        values.check(values.accepted, "accept", value)


@pytest.mark.parametrize("value", ["-1", "soon", "25h", "1e3", ""])
def test_a_wait_that_is_no_duration_is_refused(value: str) -> None:
    with pytest.raises(UsageError, match="give a duration up to 24h"):
        values.check(values.waits, "wait", {"queue_too_long": value})


def test_an_alert_begins_after_the_users_wait_and_others_after_their_own() -> None:
    clocks = Clocks(adapted("online", waits={"queue_too_long": 900.0})).by_diagnosis
    for name, wait in (("queue_too_long", 900), ("retracting_too_often", 300)):
        clock = clocks[name]
        for at in range(0, wait, 15):
            clock.pass_on(at, at, state=State(holds=True))
            assert clock.firing is None
        clock.pass_on(wait, wait, state=State(holds=True))
        assert clock.firing == wait
