"""A real Prometheus and a real Alertmanager, killed in the middle of an alert, sixty times as fast: who is called, and
how often.

A small page stands in for the exporter, because only what rules and Alertmanager make of its word is asked here.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from conftest import wait_for
from sglang_tuning_exporter.mixin import alerts
from sglang_tuning_exporter.recordings import Answer, serving
from sglang_tuning_exporter.recordings.demo import Process, free_port, program
from sglang_tuning_exporter.recordings.notifications import receiver
from test_alertmanager import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SCALE = 60.0  # fifteen minutes are fifteen seconds
EVERY = "250ms"


class Exporter:
    """The series of one exporter whose server is down, or is up again."""

    is_down = True

    def answer(self, *_: object) -> Answer:
        down = f'{{diagnosis="server_down"}} {self.is_down:d}\n'
        limit = 'sglang_tuning_condition_limit{diagnosis="server_down"} 0'
        text = f"sglang_tuning_condition{down}sglang_tuning_alert{down}{limit}\n"
        return 200, "text/plain; version=0.0.4", f'sglang_tuning_build_info{{version="1"}} 1\n{text}'.encode()


class Chain:
    """Prometheus and Alertmanager, each of which can be killed and started again with what it has on disk."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.exporter, self.received = Exporter(), list[Any]()
        self._directory, self._running = directory, dict[str, Process]()
        exporter_url = stack.enter_context(serving(f"{LOOPBACK}:0", self.exporter.answer))
        webhook_url = stack.enter_context(receiver(f"{LOOPBACK}:0", self.received.append))
        for name, text in alerts.files(SCALE).items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(text)
        document = yaml.safe_load((directory / "alerts/alertmanager.yml").read_text())
        document["receivers"][0]["webhook_configs"][0]["url"] = webhook_url
        document["route"] |= {"group_wait": "500ms", "group_interval": "1s"}
        (directory / "alerts/alertmanager.yml").write_text(yaml.safe_dump(document))
        self._ports = {"prometheus": free_port(), "alertmanager": free_port()}
        target = exporter_url.removeprefix("http://").rstrip("/")
        manager = f"{LOOPBACK}:{self._ports['alertmanager']}"
        configuration = {
            "global": dict.fromkeys(("scrape_interval", "scrape_timeout", "evaluation_interval"), EVERY),
            "rule_files": ["alerts/rules/sglang-tuning.rules.yml"],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [manager]}]}]},
            "scrape_configs": [{"job_name": "sglang", "static_configs": [{"targets": [target]}]}],
        }
        (directory / "prometheus.yml").write_text(yaml.safe_dump(configuration))
        stack.callback(self.stop)
        for name in self._ports:
            self.start(name)

    def start(self, name: str) -> None:
        path = program(name)
        if path is None:
            pytest.fail(f"{name} is missing (Debian: apt install prometheus prometheus-alertmanager)", pytrace=False)
        own = {
            "prometheus": ["--config.file=prometheus.yml", "--storage.tsdb.path=tsdb", "--log.level=warn"],
            # Snapshots as often as in fifteen minutes by default.
            "alertmanager": ["--config.file=alerts/alertmanager.yml", "--storage.path=nflog",
                "--cluster.listen-address=", "--data.maintenance-interval=1s"],
        }[name]  # fmt: skip
        flags = [part if "=" not in part else self._absolute(part) for part in own]
        address = f"{LOOPBACK}:{self._ports[name]}"
        log = self._directory / f"{name}-{time.monotonic_ns()}.log"
        self._running[name] = Process(name, [path, *flags, f"--web.listen-address={address}"], log)
        self._running[name].wait_until_ready(f"http://{address}/-/ready")

    def _absolute(self, flag: str) -> str:
        name, _, value = flag.partition("=")
        is_path = name.endswith((".file", ".path"))
        return f"{name}={self._directory / value}" if is_path else flag

    def kill(self, name: str) -> None:
        self._running[name].kill()

    def stop(self) -> None:
        for process in self._running.values():
            process.stop()

    def said(self, status: str) -> int:
        """Return how many messages of a status came."""
        return sum(message["status"] == status for message in self.received)


def killed(name: str, away: float, directory: Path) -> None:
    with ExitStack() as stack:
        chain = Chain(directory, stack)
        wait_for(lambda: chain.said("firing"), 20)
        time.sleep(2.5)  # two snapshots
        chain.kill(name)
        time.sleep(away)
        chain.start(name)
        time.sleep(8)  # eight minutes of the rules
        assert (chain.said("firing"), chain.said("resolved")) == (1, 0)
        chain.exporter.is_down = False
        wait_for(lambda: chain.said("resolved"), 20)
        assert (chain.said("firing"), chain.said("resolved")) == (1, 1)


KILLED = [(name, seconds) for name in ("prometheus", "alertmanager") for seconds in (0.5, 4.0)]  # half a minute, four


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, float], Future[None]]]:
    """Each story with a chain of its own, all at once: they wait more than they compute."""
    with ThreadPoolExecutor(len(KILLED)) as pool:
        yield {each: pool.submit(killed, *each, tmp_path_factory.mktemp("chain")) for each in KILLED}


@pytest.mark.parametrize("what", KILLED)
def test_who_was_called_is_not_told_that_it_is_over_and_is_not_called_again(
    what: tuple[str, float], played: dict[tuple[str, float], Future[None]]
) -> None:
    played[what].result()
