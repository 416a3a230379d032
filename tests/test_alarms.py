"""When alerts would have fired, from log lines alone; test_same_truth compares it with Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_tuning_exporter.diagnosis.promql import duration
from sglang_tuning_exporter.diagnosis.table import ALERTS
from sglang_tuning_exporter.report.alarms import GAP_SECONDS, AlarmClock, FiredAlert
from sglang_tuning_exporter.report.analysis import Analysis
from sglang_tuning_exporter.report.inputs import Logs
from sglang_tuning_exporter.state.profiles import PROFILES

READY = "[2025-11-20 11:40:00] The server is fired up and ready to roll!\n"


def printed(second: float) -> str:
    hours, rest = divmod(int(second), 3600)
    return f"2025-11-{20 + (11 + hours) // 24} {(11 + hours) % 24:02}:{rest // 60:02}:{rest % 60:02}"


def decode(second: float, *, running: int = 7, queued: int = 0, usage: float = 0.5, graph: bool = True) -> str:
    return (
        f"[{printed(second)}] Decode batch, #running-req: {running}, #token: 100, token usage: {usage:.2f}, cuda graph: {graph}, "
        f"gen throughput (token/s): 50.00, #queue-req: {queued}\n"
    )


def retraction(second: float) -> str:
    return (
        f"[{printed(second)}] KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_tokens_gained: 90, "
        "#new_token_ratio: 0.3002 -> 0.5783\n"
    )


def arguments(second: float, **given: object) -> str:
    return f"[{printed(second)}] server_args={dict({'model_path': 'm', 'tp_size': 1, 'version': 'x'}, **given)}\n"


def quiet(second: float) -> str:
    return f"[{printed(second)}] The server is fired up and ready to roll!\n"


def spans(directory: Path, text: str, profile: str = "online") -> list[FiredAlert]:
    log = directory / "server.log"
    log.write_text("".join(sorted(text.splitlines(keepends=True), key=lambda line: line[:21])))
    analysis, clock, logs = Analysis(PROFILES[profile]), AlarmClock(PROFILES[profile]), Logs([str(log)])
    for moment, event in logs.events():
        for at in clock.due(moment):
            analysis.take(at, None)
            clock.take(analysis.state, at)
        analysis.take(moment, event)
    for at in clock.rest():
        analysis.state.settle(at)
        clock.take(analysis.state, at)
    return clock.spans()


def minutes(span: FiredAlert) -> tuple[float, float, float]:
    """Pending, firing, resolved: minutes after 11:00."""
    begin = 1763636400.0
    return tuple((at - begin) / 60 for at in (span.pending_since, span.start, span.end))  # type: ignore[return-value]


def every(seconds: float, begin: float, end: float) -> Iterator[float]:
    at = begin
    while at < end:
        yield at
        at += seconds


def test_a_few_retractions_a_minute_fire_when_they_have_gone_on_for_ten_minutes(tmp_path: Path) -> None:
    text = "".join(decode(at, usage=0.97, queued=3) for at in every(5, 0, 1200))
    text += "".join(retraction(at) for at in every(20, 0, 1200)) + quiet(2400)
    [found] = [span for span in spans(tmp_path, text) if span.diagnosis == "retracting_too_often"]
    pending, fired, ended = minutes(found)
    assert 5 < pending < 6  # both halves of the ten minutes have some
    assert fired == pending + 5
    # The last was printed in minute 20: two minutes of looking back, then five of `keep_firing_for`.
    assert 26 <= ended <= 28
    assert (found.alert, found.severity, found.ongoing) == ("SGLangRetractingTooOften", "warning", False)


def test_one_burst_of_retractions_fires_nothing(tmp_path: Path) -> None:
    text = "".join(decode(at, usage=0.97, queued=3) for at in every(5, 0, 1200))
    text += "".join(retraction(300 + at) for at in range(1, 20))
    assert [span for span in spans(tmp_path, text) if span.diagnosis == "retracting_too_often"] == []


def test_a_condition_that_ends_before_its_time_fires_nothing(tmp_path: Path) -> None:
    text = "".join(decode(at, queued=3, graph=False) for at in every(5, 0, 200)) + quiet(2400)
    assert spans(tmp_path, text) == []


def test_an_empty_queue_is_bad_only_where_throughput_counts(tmp_path: Path) -> None:
    text = "".join(decode(at) for at in every(5, 0, 1200)) + quiet(1500)
    assert spans(tmp_path, text) == []
    [found] = spans(tmp_path, text, "offline")
    assert found.alert == "SGLangClientTooSlow"


def test_what_still_fires_ends_with_the_last_evaluation(tmp_path: Path) -> None:
    text = "".join(decode(at) for at in every(5, 0, 1200))
    [found] = spans(tmp_path, text, "offline")
    assert found.ongoing
    assert minutes(found)[2] == 20


def test_three_starts_in_half_an_hour_are_a_loop_and_two_are_none(tmp_path: Path) -> None:
    two = arguments(60) + arguments(600) + quiet(4000)
    assert spans(tmp_path, two) == []
    [found] = spans(tmp_path, two + arguments(1100))
    assert found.alert == "SGLangRestartLoop"
    # The first leaves the half hour in minute 31; it is kept firing for ten.
    assert 40 <= minutes(found)[2] <= 43


def test_a_restart_loop_counts_from_the_first_start_in_the_log(tmp_path: Path) -> None:
    assert [span.alert for span in spans(tmp_path, arguments(0) + arguments(20) + arguments(40) + quiet(90))] == [
        "SGLangRestartLoop"
    ]


def test_a_night_without_a_line_ends_every_alert(tmp_path: Path) -> None:
    text = "".join(decode(at) for at in every(5, 0, 1200)) + decode(GAP_SECONDS + 3600)
    [found] = spans(tmp_path, text, "offline")
    assert not found.ongoing
    assert minutes(found)[2] < 21


def test_a_reserve_that_is_too_small_fires_for_as_long_as_the_server_runs(tmp_path: Path) -> None:
    small = f"[{printed(5)}] max_total_num_tokens=2048, max_running_requests=64, available_gpu_mem=2.50 GB\n"
    text = arguments(0, mem_fraction_static=0.9) + small + quiet(7200)
    [found] = spans(tmp_path, text)
    assert found.diagnosis == "memory_reserve_too_small"
    assert found.start - found.pending_since == 600
    assert found.ongoing


def test_evaluations_fall_on_quarter_minutes_from_before_the_first_line_on() -> None:
    evaluations = AlarmClock(PROFILES["online"])
    assert list(evaluations.due(100.0)) == [90.0]
    assert evaluations.next_due == 105.0
    assert list(evaluations.due(104.9)) == []
    assert list(evaluations.due(135.0)) == [105.0, 120.0, 135.0]
    assert list(evaluations.rest()) == [150.0]


def test_without_a_printed_time_no_evaluation_is_due() -> None:
    evaluations = AlarmClock(PROFILES["online"])
    assert list(evaluations.due(float("-inf"))) == []
    assert list(evaluations.rest()) == []


@pytest.mark.parametrize("row", ALERTS, ids=lambda row: row.id)
def test_every_duration_of_the_table_can_be_read(row: object) -> None:
    hold, keep = row.hold, row.keep_firing  # type: ignore[attr-defined]
    assert duration(hold) >= 0
    assert not keep or duration(keep) > 0


def test_text_that_is_not_a_duration_is_refused() -> None:
    with pytest.raises(ValueError, match="no duration such as 5m"):
        duration("soon")
