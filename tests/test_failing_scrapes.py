"""One scrape in ten fails, with a real Prometheus and a real Alertmanager: an alert is notified once, and resolved once.

Every duration of the rules is divided by the same figure.
"""

from __future__ import annotations

import random
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from sglang_tuning_exporter.recordings.stack import LOOPBACK, Stack, program

if TYPE_CHECKING:
    from pathlib import Path

SPEED = 15.0
FAILS = 0.1
ALERT = "SGLangServerDown"


class Exporter:
    """A page that says of its server whether it is down, and every tenth answer a 500."""

    def __init__(self) -> None:
        self.is_down = False
        self.answers: list[bool] = []
        chance, exporter = random.Random(7), self

        class Handler(BaseHTTPRequestHandler):
            timeout = 10

            def do_GET(self) -> None:
                fails = chance.random() < FAILS
                exporter.answers.append(not fails)
                body = b"" if fails else exporter.page().encode()
                self.send_response(500 if fails else 200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer((LOOPBACK, 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://{LOOPBACK}:{self._server.server_address[1]}"

    def page(self) -> str:
        labels = '{diagnosis="server_down"}'
        values = {
            "up": 0 if self.is_down else 1,
            "last_request_timestamp_seconds": time.time(),
            f"condition{labels}": int(self.is_down),
            f"condition_limit{labels}": 0,
            f"alert{labels}": int(self.is_down),
        }
        return "".join(f"sglang_tuning_{name} {value}\n" for name, value in values.items())

    def start(self) -> None:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def wait_until(condition: Any, words: str, seconds: float = 150.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {words}"
        time.sleep(0.1)


def test_a_server_that_is_down_is_notified_once_and_resolved_once_though_scrapes_fail(tmp_path: Path) -> None:
    for needed in ("prometheus", "alertmanager"):
        if program(needed) is None:
            pytest.fail(f"{needed} is missing: make system installs it", pytrace=False)
    messages: list[Any] = []
    exporter = Exporter()
    stack = Stack(
        tmp_path, sglang_url=None, log_file=None, profile="online", time_scale=SPEED, on_message=messages.append
    )
    stack.exporter_url = exporter.url

    def starts_of(status: str) -> list[str]:
        """When each notified alert of this status began."""
        return [
            alert["startsAt"]
            for message in list(messages)
            for alert in message["alerts"]
            if alert["status"] == status and alert["labels"]["alertname"] == ALERT
        ]

    exporter.start()
    try:
        stack._receiver.start()
        stack._write_rules()
        stack._start_alertmanager()
        stack._start_prometheus()
        wait_until(lambda: len(exporter.answers) > 10, "scrapes")
        exporter.is_down = True
        wait_until(lambda: starts_of("firing"), "the notification")
        # Five minutes of the rules' time: what flaps would have come again.
        time.sleep(5 * 60 / SPEED)
        assert starts_of("resolved") == []
        exporter.is_down = False
        wait_until(lambda: starts_of("resolved"), "its end")
        time.sleep(3 * 60 / SPEED)
    finally:
        stack.stop()
        exporter.stop()
    assert len(set(starts_of("firing"))) == 1
    assert len(set(starts_of("resolved"))) == 1
    assert {alert["labels"]["alertname"] for message in messages for alert in message["alerts"]} == {ALERT}
    failed = exporter.answers.count(False)
    assert failed > 3
    assert failed < len(exporter.answers) / 4
