"""A webhook message of Alertmanager in, text for a terminal out; and the port that takes such messages."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import ExitStack
from typing import Any

import pytest
import requests

from sglang_tuning_exporter.recordings import MOST_BODY_BYTES, MOST_THREADS
from sglang_tuning_exporter.recordings.notifications import as_text, receiver

ADVICE = "--schedule-conservativeness 0.1 → 1.3: The KV cache is full."
FIRING = {
    "status": "firing",
    "labels": {"alertname": "SGLangRetractingTooOften", "instance": "gpu1:9741", "severity": "warning"},
    "annotations": {
        "summary": "Requests are taken out again.",
        "description": "gpu1:9741: 4.0 retractions/min.",
        "past": "Requests were taken out again.",
        "advice": f"{ADVICE} It will not help if it is above 1.43.",
    },
}


def message(*alerts: object) -> dict[str, object]:
    return {"version": "4", "status": "firing", "alerts": list(alerts)}


def test_a_firing_alert_names_the_flag_both_values_and_the_reason() -> None:
    assert as_text(message(FIRING)) == (
        "[warning] SGLangRetractingTooOften on gpu1:9741\n"
        "  Requests are taken out again.\n"
        "  gpu1:9741: 4.0 retractions/min.\n"
        "  Change --schedule-conservativeness 0.1 → 1.3: The KV cache is full. It will not help if it is above 1.43.\n"
    )


def test_a_resolved_alert_says_how_long_it_lasted() -> None:
    times = {"startsAt": "2026-09-05T10:00:00.123Z", "endsAt": "2026-09-05T10:12:30.456Z"}
    assert as_text(message({**FIRING, **times, "status": "resolved"})).endswith("\n  It lasted 0:12:30.\n")


def test_an_alert_of_another_source_gets_no_empty_sentences() -> None:
    text = as_text(message({"labels": {"alertname": "A"}}))
    assert text.strip() == "[firing] A on ?"


def test_half_requests_take_bounded_threads_and_delay_no_notification() -> None:
    before, taken = threading.active_count(), list[Any]()
    with receiver("127.0.0.1:0", taken.append) as url, ExitStack() as strangers:
        port = int(url.rpartition(":")[2])
        for _ in range(4 * MOST_THREADS):
            stranger = strangers.enter_context(socket.create_connection(("127.0.0.1", port)))
            stranger.sendall(b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n{")
        assert requests.post(url, json=message(FIRING), timeout=30).status_code == 200
        assert threading.active_count() <= before + MOST_THREADS + 1  # and the one that accepts
    assert taken == [message(FIRING)]


def test_a_moment_without_threads_costs_the_request_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def limited(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with receiver("127.0.0.1:0", lambda _: None) as url:
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(threading.Thread, "start", limited)
            for _ in range(2 * MOST_THREADS):
                with pytest.raises(requests.ConnectionError):
                    requests.post(url, json=message(FIRING), timeout=30)
        assert requests.post(url, json=message(FIRING), timeout=30).status_code == 200
    assert set(capsys.readouterr().err.splitlines()) == {"a request was not answered: can't start new thread"}


@pytest.mark.parametrize(
    "hostile", ["\x1b]0;owned\x07\x1b[2J", "a\nWhy: trust me", "a\r\x08b", "\u202eevil", "\x9b31m"]
)
def test_control_characters_in_a_label_never_reach_the_terminal(hostile: str) -> None:
    text = as_text(message({**FIRING, "labels": {"alertname": hostile, "instance": hostile, "severity": hostile}}))
    assert all(character.isprintable() for character in text.replace("\n", ""))
    assert len(text.splitlines()) == len(as_text(message(FIRING)).splitlines())


@pytest.mark.parametrize(
    "payload",
    [
        None,
        3,
        "text",
        [],
        [1],
        {},
        {"alerts": None},
        {"alerts": {}},
        {"alerts": "abc"},
        message(),
        message(None, 3, "x", []),
    ],
)
def test_json_that_is_not_a_message_gives_no_text(payload: object) -> None:
    assert as_text(payload) == ""


def post(url: str, body: bytes) -> int:
    return requests.post(url, data=body, timeout=5).status_code


@pytest.mark.parametrize("body", [b"", b"not json", b"{", b"\xff\xfe", b"[" * 100_000])
def test_what_is_not_json_is_refused(body: bytes) -> None:
    received: list[Any] = []
    with receiver("127.0.0.1:0", received.append) as url:
        assert post(url, body) == 400
        assert post(url, json.dumps(message(FIRING)).encode()) == 200
    assert received == [message(FIRING)]


@pytest.mark.parametrize("length", [b"-5", b"many", str(MOST_BODY_BYTES * 1000).encode()])
def test_a_wrong_content_length_is_refused(length: bytes) -> None:
    received: list[Any] = []
    with receiver("127.0.0.1:0", received.append) as url:
        host, _, port = url.removeprefix("http://").rstrip("/").rpartition(":")
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: " + length + b"\r\n\r\n{")
            connection.shutdown(socket.SHUT_WR)
            assert b" 400 " in connection.recv(1000).split(b"\r\n")[0] + b" "
    assert received == []
