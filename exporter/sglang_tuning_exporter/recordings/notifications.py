"""Alertmanager's notifications as text for a terminal: server, finding, flag, values, and when it does not help."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Any

from sglang_tuning_exporter.config import values
from sglang_tuning_exporter.core import runbooks
from sglang_tuning_exporter.recordings import Answer, serving, stopped_by_signal
from sglang_tuning_exporter.sglang.clean import clean

_PLACES = {row.alert: place for place, row in enumerate(runbooks.MOST_SEVERE_FIRST)}


def _text(value: object) -> str:
    """Return one line without control characters: labels and annotations contain text from outside, such as model
    names.
    """
    return clean(" ".join(str(value).split()))


def _strings(value: object) -> dict[str, str]:
    return {str(key): _text(item) for key, item in value.items()} if isinstance(value, dict) else {}


def as_text(payload: object, *, without: str = "") -> str:
    """Return a webhook message of Alertmanager (version 4) as text, `without` one
    annotation; empty for anything else.
    """
    alerts = payload.get("alerts") if isinstance(payload, dict) else None
    if not isinstance(alerts, list):
        return ""
    objects = [alert for alert in alerts if isinstance(alert, dict)]
    return "\n".join(_alert(alert, without) for alert in sorted(objects, key=_place))


def _place(alert: dict[str, Any]) -> int:
    """Return the sort key: most severe first, a cause before its consequences."""
    return _PLACES.get(_strings(alert.get("labels")).get("alertname", ""), len(_PLACES))


def _alert(alert: dict[str, Any], without: str) -> str:
    labels, notes = _strings(alert.get("labels")), _strings(alert.get("annotations"))
    notes.pop(without, None)
    is_over = alert.get("status") == "resolved"
    state = "resolved" if is_over else labels.get("severity", "firing")
    lines = [f"[{state}] {labels.get('alertname', '?')} on {labels.get('instance', '?')}"]
    lines += [f"  {each}" for each in (_past(alert, notes) if is_over else _present(notes)) if each]
    return "\n".join(lines) + "\n"


def _past(alert: dict[str, Any], notes: dict[str, str]) -> list[str]:
    words = notes.get("past") or notes.get("summary", "")
    try:
        began, ended = (datetime.fromisoformat(str(alert[at])[:19]) for at in ("startsAt", "endsAt"))
    except (KeyError, ValueError):
        return [words]
    return [words, f"It lasted {ended - began}."]


def _present(notes: dict[str, str]) -> list[str]:
    """Return what is seen, what to do, and links; an alert that is not ours has fewer annotations."""
    lines = [notes.get("summary", ""), notes.get("description", ""), _advice(notes)]
    links = (("Runbook", "runbook_url"), ("Dashboard", "dashboard_url"))
    return [*lines, *(f"{words}: {notes[name]}" for words, name in links if notes.get(name))]


def _advice(notes: dict[str, str]) -> str:
    """Return the sentence of the notification template's `sglang_tuning.advice`."""
    advice = notes.get("advice", "")
    return f"{'Change' if advice.startswith('--') else 'Do:'} {advice}" if advice else ""


def receiver(address: str, on_message: Callable[[Any], None]) -> AbstractContextManager[str]:
    """Return a webhook that passes on every message as Python objects; its block is given its address."""

    def answer(_: str, body: bytes | None) -> Answer:
        if body is None:
            return 200, "text/plain", b"waiting for Alertmanager\n"
        try:
            payload = json.loads(body)
        except (ValueError, RecursionError):
            return 400, "text/plain", b"not JSON\n"
        on_message(payload)
        return 200, "text/plain", b""

    return serving(address, answer)


def run(listen_address: str) -> int:
    """`notify`: print every notification until ended."""
    done = threading.Event()

    def show(payload: Any) -> None:
        sys.stdout.write(as_text(payload))
        sys.stdout.flush()

    address = values.check(values.address, "--listen-address", listen_address)
    with stopped_by_signal(done.set), receiver(address, show) as url:
        print(f"waiting for Alertmanager at {url}/", flush=True)
        done.wait()
    return 0
