"""Alertmanager's notifications as text for a terminal: server, finding, flag, values, and when it does not help."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sglang_tuning_exporter.config import Address, UsageError, parse_address
from sglang_tuning_exporter.diagnosis.table import MOST_SEVERE_FIRST
from sglang_tuning_exporter.sglang.clean import clean

MOST_BYTES = 4 << 20
_PLACES = {row.alert: place for place, row in enumerate(MOST_SEVERE_FIRST)}


def _text(value: object) -> str:
    """Return one line without control characters: labels and annotations contain text from outside, such as model names."""
    return clean(" ".join(str(value).split()))


def _strings(value: object) -> dict[str, str]:
    return {str(key): _text(item) for key, item in value.items()} if isinstance(value, dict) else {}


def as_text(payload: object) -> str:
    """Return a webhook message of Alertmanager (version 4) as text; empty for anything else."""
    alerts = payload.get("alerts") if isinstance(payload, dict) else None
    if not isinstance(alerts, list):
        return ""
    return "\n".join(_alert(alert) for alert in sorted(filter(_is_alert, alerts), key=_place))


def _is_alert(alert: object) -> bool:
    return isinstance(alert, dict)


def _place(alert: dict[str, Any]) -> int:
    """Return the sort key: most severe first, a cause before its consequences."""
    return _PLACES.get(_strings(alert.get("labels")).get("alertname", ""), len(_PLACES))


def _alert(alert: dict[str, Any]) -> str:
    labels, notes = _strings(alert.get("labels")), _strings(alert.get("annotations"))
    state = "resolved" if alert.get("status") == "resolved" else labels.get("severity", "firing")
    lines = [f"[{state}] {labels.get('alertname', '?')} on {labels.get('instance', '?')}"]
    said = [notes.get("summary")]
    if state != "resolved":
        said.append(notes.get("description"))
        if notes.get("flag"):
            now = f"now {notes['current']}, try " if notes.get("current") else ""
            said.append(f"Change {notes['flag']}: {now}{notes.get('suggested', '?')}.")
        elif notes.get("suggested"):
            said.append(f"Do: {notes['suggested']}.")
        # an alert that is not ours has fewer annotations
        for words, end, name in (
            ("Expected:", "", "expected"),
            ("Why:", "", "why"),
            ("It costs:", "", "cost"),
            ("It will not help if", ".", "will_not_help_if"),
        ):
            said.append(f"{words} {notes[name]}{end}" if notes.get(name) else None)
        links = (("Runbook", notes.get("runbook_url")), ("Dashboard", notes.get("dashboard_url")))
        said += [f"{name}: {url}" for name, url in links if url]
    lines += [f"  {each}" for each in said if each]
    return "\n".join(lines) + "\n"


class Receiver:
    """A webhook server that passes on every message as Python objects."""

    def __init__(self, address: Address, on_message: Callable[[Any], None]) -> None:
        class WebhookHandler(BaseHTTPRequestHandler):
            timeout = 10

            def do_POST(self) -> None:
                try:
                    length = min(int(self.headers.get("Content-Length", "0")), MOST_BYTES)
                    payload = json.loads(self.rfile.read(max(length, 0)))
                except (ValueError, RecursionError):
                    self.send_error(400)
                    return
                on_message(payload)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def do_GET(self) -> None:
                body = b"waiting for Alertmanager\n"
                self.send_response(200)
                self.send_header("Content-Type", "text/plain")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Log nothing: the receiver prints the messages."""

        try:
            self._server = ThreadingHTTPServer((address.host, address.port), WebhookHandler)
        except OSError as error:
            raise UsageError(
                f"--listen-address={address}: {error.strerror or error}; give another port or address"
            ) from None
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        """The URL of the webhook."""
        return f"http://{Address(*self._server.server_address[:2])}/"  # type: ignore[arg-type]  # a TCP address is host and port

    def start(self) -> None:
        """Listen in a thread."""
        threading.Thread(target=self._server.serve_forever, name="webhook", daemon=True).start()

    def stop(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


def run(listen_address: str) -> int:
    """`notify`: print every notification until ended."""
    done = threading.Event()

    def show(payload: Any) -> None:
        sys.stdout.write(as_text(payload))
        sys.stdout.flush()

    receiver = Receiver(parse_address("--listen-address", listen_address), show)
    receiver.start()
    print(f"waiting for Alertmanager at {receiver.url}", flush=True)
    import signal  # noqa: PLC0415 - only this command ends by it

    signal.signal(signal.SIGTERM, lambda *_: done.set())
    try:
        done.wait()
    except KeyboardInterrupt:
        pass
    receiver.stop()
    return 0
