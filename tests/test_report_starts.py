"""Of several starts in a log the last one with enough load is judged, alone; what limited the others is reported as history.

The lines are those of 0.5.23 as the released wheel formats them, with times and figures of our own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sglang_tuning_exporter.report.inputs import Logs
from sglang_tuning_exporter.report.report import report as report_of
from sglang_tuning_exporter.report.report import run
from sglang_tuning_exporter.state.profiles import PROFILES

if TYPE_CHECKING:
    from pathlib import Path

READY = "The server is fired up and ready to roll!"
OUT_OF_MEMORY = """\
{at} Scheduler hit an exception: Traceback (most recent call last):
  File "/srv/sglang/scheduler.py", line 3012, in run_scheduler_process
    scheduler.event_loop_overlap()
  File "/srv/sglang/model_runner.py", line 2100, in {function}
    return self.model.forward(batch)
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.75 GiB. GPU 0 has a total capacity of 79.11 GiB.
"""
EXTEND, DECODE, CAPTURE = "forward_extend", "forward_decode", "capture"


def stamp(seconds: int) -> str:
    return f"[2025-11-{20 + seconds // 86400:02} {seconds // 3600 % 24:02}:{seconds // 60 % 60:02}:{seconds % 60:02}]"


def start(seconds: int, **args: object) -> str:
    arguments = {
        "model_path": "m",
        "tp_size": 8,
        "chunked_prefill_size": 8192,
        "max_running_requests": 256,
        "mem_fraction_static": 0.85,
        **args,
    }
    limit, chunk = arguments["max_running_requests"], arguments["chunked_prefill_size"]
    return (
        f"{stamp(seconds)} server_args=ServerArgs({', '.join(f'{name}={value!r}' for name, value in arguments.items())})\n"
        f"{stamp(seconds + 25)} max_total_num_tokens=400000, chunked_prefill_size={chunk}, max_prefill_tokens=16384, "
        f"max_running_requests={limit}, context_len=32768, available_gpu_mem=6.50 GB\n{stamp(seconds + 30)} {READY}\n"
    )


def load(begin: int, end: int, running: int, queued: int = 0, *, usage: float = 0.4, every: int = 5) -> str:
    return "".join(
        f"{stamp(second)} Decode batch, #running-req: {running}, #token: {int(usage * 400000)}, token usage: {usage:.2f}, "
        f"cuda graph: True, gen throughput (token/s): 1000.00, #queue-req: {queued}\n"
        for second in range(begin, end, every)
    )


def failed(seconds: int, function: str) -> str:
    return OUT_OF_MEMORY.format(at=stamp(seconds), function=function)


def document(tmp_path: Path, *parts: str, profile: str = "online") -> dict[str, Any]:
    log = tmp_path / "server.log"
    log.write_text("".join(parts))
    return report_of(Logs([str(log)]), PROFILES[profile])


def written(log: Path) -> str:
    output = log.with_suffix(".text")
    run([str(log)], format="text", output=output, profile="online")
    return output.read_text()


FIXED_OUT_OF_MEMORY = (
    start(0),
    load(40, 600, 20),
    failed(605, EXTEND),
    start(700, chunked_prefill_size=4096),
    load(740, 40_000, 20, every=20),
)


def test_a_failure_that_a_new_flag_ended_is_history_and_the_server_healthy(tmp_path: Path) -> None:
    found = document(tmp_path, *FIXED_OUT_OF_MEMORY)
    assert (found["verdict"], found["judged"]["run"], found["command"]) == ("healthy", 2, None)
    assert found["counts"]["out_of_memory"]["prefill"] == 1
    (earlier,) = found["earlier"]
    assert (earlier["diagnosis"], earlier["run"], earlier["over"]) == ("out_of_memory_prefill", 1, True)
    assert earlier["words"].startswith("start 1: ")
    assert earlier["words"].endswith("Fixed by --chunked-prefill-size 8192 → 4096.")


def test_the_exit_status_is_that_of_the_start_that_is_judged(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    document(tmp_path, *FIXED_OUT_OF_MEMORY)
    assert run([str(tmp_path / "server.log")], format="text", output=None, profile="online") == 0
    said = capfd.readouterr().out
    assert "This is of start 2 of 2" in said
    assert "But for a part of the time" not in said  # the alert was that of start 1
    assert "Other starts, as each was judged\n   start 1: " in said
    assert "Fixed by --chunked-prefill-size 8192 → 4096." in said


def test_a_limit_that_was_raised_is_not_judged_by_the_starts_before_it(tmp_path: Path) -> None:
    found = document(
        tmp_path,
        start(0, max_running_requests=32),
        load(40, 3600, 32, queued=500),
        start(3700),
        load(3740, 5500, 60, usage=0.5),
    )
    assert found["verdict"] == "healthy"
    assert found["shares"]["admission"] == {**found["shares"]["admission"], "running_limit": 0}
    assert [each["diagnosis"] for each in found["earlier"]] == ["running_at_limit"]
    assert found["earlier"][0]["fixed_by"] == [
        {"arg": "max_running_requests", "flag": "--max-running-requests", "before": "32", "after": "256"}
    ]


def test_a_limit_that_is_still_reached_is_judged_with_the_flags_and_figures_of_the_last_start(tmp_path: Path) -> None:
    found = document(
        tmp_path,
        start(0),
        load(40, 3600, 60, usage=0.1),
        start(3700, max_running_requests=32),
        load(3740, 5500, 32, queued=500, usage=0.3),
    )
    assert found["verdict"] == "running_at_limit"
    finding = next(each for each in found["findings"] if each["diagnosis"] == "running_at_limit")
    assert finding["run"] == 2
    assert finding["advice"][0]["current"] == 32
    usage = next(each["value"] for each in finding["evidence"] if each["name"] == "mean token usage")
    assert usage == pytest.approx(0.3)
    assert finding["first_seen"] == "2025-11-20T01:02:20Z"


def test_a_last_start_without_load_leaves_the_verdict_to_the_one_before_with_its_flags(tmp_path: Path) -> None:
    found = document(
        tmp_path,
        start(0, max_running_requests=32),
        load(40, 3600, 32, queued=500),
        start(3700, max_running_requests=64),
    )
    assert (found["verdict"], found["judged"]["run"]) == ("running_at_limit", 1)
    assert found["findings"][0]["advice"][0]["current"] == 32
    assert found["server"]["args"]["max_running_requests"] == 64


def test_a_last_start_that_failed_is_judged_however_short_it_was(tmp_path: Path) -> None:
    found = document(
        tmp_path, start(0), load(40, 3600, 20), start(3700, chunked_prefill_size=16384), failed(3740, EXTEND)
    )
    assert (found["verdict"], found["judged"]["run"]) == ("out_of_memory_prefill", 2)
    assert found["findings"][0]["advice"][0]["current"] == 16384


def test_a_server_that_crashed_and_came_back_is_not_down(tmp_path: Path) -> None:
    crash = f"{stamp(3605)} Scheduler hit an exception: Traceback (most recent call last):\nValueError: bad\n"
    found = document(tmp_path, start(0), load(40, 3600, 20), crash, start(3700), load(3740, 7000, 20))
    assert found["verdict"] == "healthy"
    assert "server_down" not in {each["diagnosis"] for each in found["findings"]}
    assert [(each["diagnosis"], each["run"]) for each in found["earlier"]] == [(None, 1)]
    assert "died" in found["earlier"][0]["words"]


def loop(starts: int) -> str:
    return "".join(
        start(300 * n) + load(300 * n + 40, 300 * n + 200, 20) + failed(300 * n + 205, EXTEND) for n in range(starts)
    )


def test_a_server_that_still_starts_again_and_again_is_in_a_loop(tmp_path: Path) -> None:
    found = document(tmp_path, loop(5))
    assert found["verdict"] == "out_of_memory_prefill"
    assert "restart_loop" in {each["diagnosis"] for each in found["findings"]}


def test_a_loop_that_ended_hours_ago_is_history(tmp_path: Path) -> None:
    found = document(tmp_path, loop(5), start(1500, chunked_prefill_size=4096), load(1540, 20_000, 20, every=20))
    assert found["verdict"] == "healthy"
    assert found["counts"]["server_starts"] == 6
    assert "SGLangRestartLoop" in {alert["alert"] for alert in found["alerts"]}
    (earlier,) = found["earlier"]
    assert (earlier["run"], earlier["last_run"], earlier["over"]) == (1, 5, True)


def test_an_ongoing_finding_is_not_called_fixed(tmp_path: Path) -> None:
    found = document(
        tmp_path,
        *(start(0), load(40, 600, 20), failed(605, EXTEND)),
        *(start(700, chunked_prefill_size=4096), load(740, 2000, 20), failed(2005, EXTEND)),
    )
    assert found["verdict"] == "out_of_memory_prefill"
    assert [(each["run"], each["over"], each["fixed_by"]) for each in found["earlier"]] == [(1, False, [])]


def test_retractions_of_one_start_are_no_rate_of_the_next(tmp_path: Path) -> None:
    retractions = "".join(
        f"{stamp(second)} KV cache pool is full. Retract requests. #retracted_reqs: 5, #new_tokens_gained: 8950, "
        f"#new_token_ratio: 0.3002 -> 0.{second}\n"
        for second in range(100, 1000, 10)
    )
    lines = sorted((retractions + load(40, 1000, 20, usage=0.9)).splitlines(keepends=True))
    found = document(tmp_path, start(0), *lines, start(1100), load(1140, 2000, 20))
    assert found["verdict"] == "healthy"
    assert found["counts"]["retraction_events"] == 90
    assert [each["diagnosis"] for each in found["earlier"]] == ["retracting_too_often"]


def test_ranks_that_serve_side_by_side_do_not_dilute_a_rate(tmp_path: Path) -> None:
    text = start(0, dp_size=8)
    for second in range(40, 400, 5):
        for rank in range(8):
            line = load(second, second + 1, 20, usage=0.9)
            text += line.replace("]", f" DP{rank} TP{rank}]", 1)
        if second % 20 == 0:
            text += (
                f"{stamp(second)[:-1]} DP{second // 20 % 8} TP{second // 20 % 8}] KV cache pool is full. Retract requests. "
                f"#retracted_reqs: 5, #new_tokens_gained: 8950, #new_token_ratio: 0.3002 -> 0.{second}\n"
            )
    found = document(tmp_path, text, f'{stamp(3600)} INFO:     127.0.0.1:5 - "GET /health HTTP/1.1" 200 OK\n')
    assert "retracting_too_often" in {each["diagnosis"] for each in found["findings"]}


def test_the_report_of_a_log_with_one_start_has_no_history(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = document(tmp_path, start(0), load(40, 600, 20))
    assert (found["earlier"], found["judged"]["run"], found["judged"]["serving_seconds"]) == (
        [],
        1,
        found["span"]["serving_seconds"],
    )
    run([str(tmp_path / "server.log")], format="text", output=None, profile="online")
    assert "This is of start" not in capfd.readouterr().out


def head(tmp_path: Path, capfd: pytest.CaptureFixture[str], *parts: str) -> str:
    document(tmp_path, *parts)
    run([str(tmp_path / "server.log")], format="text", output=None, profile="online")
    return capfd.readouterr().out.splitlines()[0]


STARTING = start(0).split("\n", maxsplit=1)[0] + "\n"


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ((STARTING, failed(20, CAPTURE)), "CUDA graphs leave too little GPU memory free, or do not fit."),
        ((start(0), load(40, 600, 20), failed(605, "anything")), "SGLang ran out of GPU memory"),
        ((start(0), load(40, 600, 20), failed(605, DECODE)), "SGLang ran out of GPU memory"),
    ],
)
def test_a_log_that_ends_out_of_memory_is_headed_by_it_and_not_by_the_server_that_is_down(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], parts: tuple[str, ...], words: str
) -> None:
    assert head(tmp_path, capfd, *parts).startswith(words)


def test_a_log_that_ends_in_a_crash_is_headed_by_the_crash_with_its_time(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    crash = f"{stamp(605)} Scheduler hit an exception: Traceback (most recent call last):\nValueError: bad\n"
    said = head(tmp_path, capfd, start(0), load(40, 600, 20), crash)
    assert said.startswith("SGLang crashed at 2025-11-20 00:10:05: the scheduler raised an exception.")


def retracting(begin: int, end: int) -> list[str]:
    retractions = "".join(
        f"{stamp(second)} KV cache pool is full. Retract requests. #retracted_reqs: 5, #new_tokens_gained: 8950, "
        f"#new_token_ratio: 0.3002 -> 0.{second}\n"
        for second in range(begin, end, 10)
    )
    return sorted((retractions + load(begin, end, 20, usage=0.9)).splitlines(keepends=True))


def test_a_past_finding_has_the_time_when_it_was_last_seen(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said = head(tmp_path, capfd, start(0), *retracting(40, 1000), load(1000, 2000, 20))
    assert "until 00:16" in said


def test_a_finding_that_lasts_until_the_end_is_not_in_the_past_tense(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = head(tmp_path, capfd, start(0), *retracting(40, 1000))
    assert ("until" in said, "Last seen" in said) == (False, False)


def test_a_log_that_ends_with_a_crash_says_which_process_died_and_which_alert_would_have_followed(
    tmp_path: Path,
) -> None:
    log = tmp_path / "server.log"
    log.write_text(
        "[2025-11-20 00:10:00] The server is fired up and ready to roll!\n"
        "[2025-11-20 00:10:05] Subprocess scheduler_0 (pid=1234) crashed with exit code -9. Triggering SIGQUIT for cleanup...\n"
    )
    text = written(log)
    how = "scheduler_0 crashed with exit code -9 (killed from outside, often by the kernel's OOM killer)"
    assert text.startswith(
        f"SGLang crashed at 2025-11-20 00:10:05: {how}. (at 2025-11-20 00:10:05, the end of the log)\n"
    )
    assert "The log ends with the crash; SGLangServerDown would have fired 5 minutes later." in text


def test_a_log_that_goes_on_after_a_crash_does_not_say_what_would_have_followed(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(
        "[2025-11-20 00:10:05] Subprocess scheduler_0 (pid=1234) crashed with exit code -9. Triggering SIGQUIT for cleanup...\n"
        "[2025-11-20 00:11:00] server_args={'model_path': 'm', 'tp_size': 1, 'version': 'x'}\n"
        "[2025-11-20 00:12:00] The server is fired up and ready to roll!\n"
    )
    assert "ends with the crash" not in written(log)
