"""An export of a log store with the newest line first gives the same events as the log itself."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.report.inputs import Logs
from sglang_tuning_exporter.report.texts import oldest_first
from test_log_wrapping import recorded, wrapped
from test_report_unfolded import events_of

LINES = recorded()[:500]


def turned(text: bytes) -> bytes:
    return b"\n".join(text.rstrip(b"\n").split(b"\n")[::-1]) + b"\n"


def read(text: bytes) -> list[bytes]:
    return b"".join(oldest_first(iter([text]), "x")).splitlines()


@pytest.mark.parametrize(
    "name", ["nothing", "Loki JSONL", "Loki API values", "CloudWatch get-log-events", "GCP", "Loki text", "CSV"]
)
def test_lines_with_the_newest_first_give_the_events_of_their_log(name: str) -> None:
    events = events_of(turned(wrapped(name, LINES)))
    times = [event.time for event in events if getattr(event, "time", None) is not None]  # type: ignore[attr-defined]
    assert times == sorted(times)
    assert len(events) > 100
    assert [sure(event) for event in events] == [sure(event) for event in events_of(wrapped("nothing", LINES))]


def sure(event: object) -> object:
    """Return the event without its mark as suspect, which depends on the lines before it."""
    return replace(event, suspect=False) if hasattr(event, "suspect") else event  # type: ignore[type-var]  # all are dataclasses


def test_a_log_with_the_oldest_first_stays_as_it_is() -> None:
    text = wrapped("nothing", LINES)
    assert read(text) == text.splitlines()


def test_lines_slightly_out_of_order_and_a_clock_set_back_do_not_reverse_a_log() -> None:
    seconds = [10, 9, 11, 10, 12, 11, 13, 12, 14, 2, 3, 4, 5]
    text = "".join(f"[2026-11-20 19:51:{second:02d} TP0] Load weight begin.\n" for second in seconds).encode()
    assert read(text) == text.splitlines()


def test_a_reversed_log_that_is_too_large_to_reverse_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_tuning_exporter.report.texts.LONGEST_DOCUMENT", 1 << 16)
    with pytest.raises(UsageError, match=r"newest line comes first.*oldest line first") as raised:
        list(Logs(["-"], io.BytesIO(turned(wrapped("nothing", LINES)))).events())
    assert "\n" not in str(raised.value)
