"""From a recorded server to the words that reach a person: the real exporter, Prometheus, Alertmanager and a webhook.

The recordings are played ten times as fast or more, and every duration of the rules and alert clocks is divided by the
same figure.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from sglang_tuning_exporter.recordings import recording
from sglang_tuning_exporter.recordings.demo import Stack, program
from sglang_tuning_exporter.recordings.notifications import as_text
from sglang_tuning_exporter.recordings.replay import ReplayServer, packaged

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SPEED = 12.0  # a round of the recording takes longer than ranks repeat an event for
PROGRAMS = {"prometheus": "prometheus", "alertmanager": "prometheus-alertmanager"}
EVERY_ALERT_SEEN = 'count by (alertname, alertstate) (count_over_time(ALERTS{alertname=~"SGLang.*"}[10m]))'


class Run:
    """A running chain and the alerts that its webhook received."""

    def __init__(self, stack: Stack, replay: ReplayServer, messages: list[Any]) -> None:
        self.stack, self.replay, self._messages, self.begun = stack, replay, messages, time.monotonic()

    def notified(self) -> list[dict[str, Any]]:
        return [alert for message in list(self._messages) for alert in message["alerts"]]

    def texts(self) -> str:
        return "\n".join(as_text(message) for message in list(self._messages))

    def seen(self, state: str) -> set[str]:
        """Give the names of all alerts that were in this state at any evaluation of the run."""
        found = [series["metric"] for series in self.stack.query(EVERY_ALERT_SEEN)]
        return {labels["alertname"] for labels in found if labels["alertstate"] == state}


@contextmanager
def chain(name: str, directory: Path) -> Iterator[Run]:
    """Replay a packaged recording in a loop into the whole chain; all processes are ended afterwards."""
    for needed, package in PROGRAMS.items():
        if program(needed) is None:
            pytest.fail(f"{needed} is missing: install it (Debian: apt install {package})", pytrace=False)
    log = directory / "server.log"
    log.touch()
    messages: list[Any] = []
    replay = ReplayServer(recording.load(packaged(name)), log_path=log, speed=SPEED, loop=True)
    replay.start()
    stack = Stack(
        directory,
        sglang_url=replay.url,
        log_file=log,
        profile="online",
        time_scale=SPEED,
        on_message=messages.append,
    )
    pids: list[int] = []
    try:
        stack.start()
        pids = [process._child.pid for process in stack._processes]
        yield Run(stack, replay, messages)
    finally:
        stack.stop()
        replay.stop()
    assert [pid for pid in pids if is_running(pid)] == []


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module", autouse=True)
def steady(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A healthy server, which runs beside the other."""
    with chain("steady", tmp_path_factory.mktemp("steady")) as run:
        yield run


def test_retractions_reach_a_person_as_advice_to_raise_the_flag(tmp_path: Path) -> None:
    begin = time.monotonic()
    with chain("retract", tmp_path) as run:
        while not run.notified():
            assert time.monotonic() - begin < 150, f"no notification; Prometheus says {run.stack.alerts()}"
            time.sleep(0.2)
        # Whose requests wait may have burnt its latency budget by then, too.
        [alert] = [each for each in run.notified() if not each["labels"]["alertname"].endswith("BurningFast")]
        assert alert["labels"]["alertname"] == "SGLangRetractingTooOften"
        assert alert["labels"]["instance"] == run.stack.exporter_url.removeprefix("http://")
        # The first retractions are of answers that use all of their max_new_tokens: against these a larger KV cache
        # helps.
        advice = ("--schedule-conservativeness 0.1 → 1.3: ", "--max-total-tokens 2048 → 4096: ")
        assert alert["annotations"]["advice"].startswith(advice)
        assert f"Change {alert['annotations']['advice']}" in run.texts()
        # A retraction leaves the KV cache half empty: requests wait beside free tokens much of the time, and still no
        # advice is to lower the flag.
        spent = 'sum(sglang_tuning_state_seconds_total{signal="token_usage", state%s})'
        room, serving = spent % '="below_target"', spent % '!~"idle|unknown"'
        assert float(run.stack.query(f"{room} / {serving}")[0]["value"][1]) > 0.3
        assert "SGLangAdmissionTooConservative" not in run.seen("firing")
        advised = run.stack.query('sglang_tuning_advice_timestamp_seconds{flag="--schedule-conservativeness"}')
        assert {series["metric"]["suggested"] for series in advised} <= {"1.3"}


def test_a_healthy_online_server_fires_nothing(steady: Run) -> None:
    # Eleven minutes of the alerts' time: enough for every clock.
    time.sleep(max(0.0, steady.begun + 11 * 60 / SPEED - time.monotonic()))
    assert steady.stack.query("sglang_tuning_up")[0]["value"][1] == "1"
    busy = steady.stack.query('sum(sglang_tuning_state_seconds_total{signal="activity", state!~"idle|unknown"})')
    assert float(busy[0]["value"][1]) > 60 / SPEED
    assert steady.seen("firing") == set()
    assert steady.notified() == []
