"""The course of a run as its log shows it: phases, the memory of each start, and what changed between starts.

The recordings are real logs of 0.5.23 (tests/recordings); other lines are those of 0.5.23 and 0.5.12 as the released
wheels format them, with times and figures of our own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from closed_loop.keeping import archive_of, unpack
from sglang_tuning_exporter.report.inputs import Logs
from sglang_tuning_exporter.report.phases import FirstAndLast
from sglang_tuning_exporter.report.report import report
from sglang_tuning_exporter.state.profiles import PROFILES

HERE = Path(__file__).parent
STOP = "SIGTERM received. signum=None frame=None. Draining requests and shutting down..."
READY = "The server is fired up and ready to roll!"


def at(seconds: int, text: str) -> str:
    return f"[2025-11-20 {10 + seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}] {text}\n"


def decode(seconds: int, running: int = 4, queued: int = 0, throughput: float = 100.0) -> str:
    return at(
        seconds,
        f"Decode batch, #running-req: {running}, #token: 925, token usage: 0.40, cuda graph: True, "
        f"gen throughput (token/s): {throughput:.2f}, #queue-req: {queued}",
    )


def load(begin: int, end: int, **figures: Any) -> str:
    return "".join(decode(second, **figures) for second in range(begin, end, 5))


def start(seconds: int, **args: object) -> str:
    arguments = {"model_path": "m", "tp_size": 1, "max_running_requests": 2, "random_seed": seconds, **args}
    return at(seconds, f"server_args=ServerArgs({', '.join(f'{name}={value!r}' for name, value in arguments.items())})")


def document(tmp_path: Path, *texts: str) -> dict[str, Any]:
    paths = []
    for number, text in enumerate(texts):
        path = tmp_path / f"node{number}.log"
        path.write_text(text)
        paths.append(str(path))
    return report(Logs(paths), PROFILES["online"])


def phases(found: dict[str, Any]) -> list[tuple[str, int]]:
    return [(phase["phase"], phase["seconds"]) for phase in found["phases"]]


def test_a_run_is_start_up_load_and_stop(tmp_path: Path) -> None:
    text = start(0) + at(30, READY) + load(40, 100) + at(102, STOP)
    assert phases(document(tmp_path, text)) == [("start_up", 30), ("idle", 10), ("load", 62), ("stop", 0)]


def test_the_servers_own_request_before_it_is_ready_is_no_load(tmp_path: Path) -> None:
    text = start(0) + decode(20, running=1) + at(30, READY) + load(90, 120)
    assert phases(document(tmp_path, text)) == [("start_up", 30), ("idle", 60), ("load", 25)]


def test_an_idle_minute_before_a_short_load_is_neither_start_up_nor_load(tmp_path: Path) -> None:
    busy = "".join(decode(second, queued=44) for second in range(90, 118, 3))
    found = document(tmp_path, start(0) + at(30, READY) + busy)
    assert phases(found) == [("start_up", 30), ("idle", 60), ("load", 27)]
    assert (found["span"]["serving_seconds"], found["verdict"]) == (27, "running_at_limit")


def test_a_load_ends_when_its_next_line_is_overdue(tmp_path: Path) -> None:
    found = document(tmp_path, start(0) + at(30, READY) + load(40, 100) + at(400, "something else"))
    assert phases(found)[2:] == [("load", 67.5), ("idle", 292.5)]
    assert found["phases"][2]["serving_seconds"] == found["span"]["serving_seconds"] == 67.5


def test_bursts_are_one_load_that_says_how_much_of_it_was_served(tmp_path: Path) -> None:
    bursts = "".join(load(60 + 30 * number, 72 + 30 * number) for number in range(20))
    found = document(tmp_path, start(0) + at(30, READY) + bursts + at(1200, "something else"))
    assert [phase["phase"] for phase in found["phases"]] == ["start_up", "idle", "load", "idle"]
    burst_load = found["phases"][2]
    assert burst_load["detail"].startswith("in 20 bursts, serving ")
    assert burst_load["serving_seconds"] == pytest.approx(found["span"]["serving_seconds"])
    assert burst_load["serving_seconds"] < 0.8 * burst_load["seconds"]


def test_an_idle_server_that_is_stopped_does_not_end_under_load(tmp_path: Path) -> None:
    found = document(tmp_path, start(0) + at(30, READY) + load(40, 100) + at(130, STOP))
    assert [phase["phase"] for phase in found["phases"]] == ["start_up", "idle", "load", "idle", "stop"]
    assert "under load" not in str(found["phases"])


def test_a_log_that_goes_on_after_its_load_does_not_end_under_load(tmp_path: Path) -> None:
    assert "under load" not in str(document(tmp_path, load(0, 60) + at(75, "something else"))["phases"])


def test_silence_with_requests_waiting_is_not_called_idle(tmp_path: Path) -> None:
    found = document(tmp_path, load(0, 60, queued=3) + at(400, "something else"))
    assert [phase["phase"] for phase in found["phases"]] == ["load", "silence"]
    assert found["phases"][1]["detail"] == "requests were waiting, and nothing was printed"


def test_health_probes_of_an_idle_server_are_no_load(tmp_path: Path) -> None:
    probe = (
        "Prefill batch, #new-seq: 1, #new-token: 1, #cached-token: 0, token usage: 0.00, #running-req: 0, #queue-req: 0"
    )
    probes = "".join(at(second, probe) for second in range(35, 300, 10))
    assert phases(document(tmp_path, start(0) + at(30, READY) + probes)) == [("start_up", 30), ("idle", 265)]


def test_a_probe_every_ten_seconds_makes_no_load_longer(tmp_path: Path) -> None:
    probe = (
        "Prefill batch, #new-seq: 1, #new-token: 1, #cached-token: 0, token usage: 0.00, #running-req: 0, #queue-req: 0"
    )
    probes = "".join(at(second, probe) for second in range(105, 400, 10))
    assert phases(document(tmp_path, load(0, 100) + probes))[0][1] == pytest.approx(100, abs=8)


def test_load_without_a_ready_line_ends_the_start_up(tmp_path: Path) -> None:
    assert phases(document(tmp_path, start(0) + load(30, 60, queued=3))) == [("start_up", 30), ("load", 25)]


def test_a_pause_of_more_than_a_minute_is_idle_and_a_shorter_one_is_load(tmp_path: Path) -> None:
    text = load(0, 60) + load(60 + 50, 400) + load(1000, 1030)
    assert phases(document(tmp_path, text)) == [("load", 407.5), ("idle", 592.5), ("load", 25)]


def test_a_server_that_nobody_asks_is_idle_from_its_readiness_on(tmp_path: Path) -> None:
    text = start(0) + at(30, READY) + at(3000, "something else")
    assert phases(document(tmp_path, text)) == [("start_up", 30), ("idle", 2970)]


def test_a_log_that_begins_under_load_has_a_run_without_a_start(tmp_path: Path) -> None:
    found = document(tmp_path, load(0, 60))
    assert [(each["run"], each["started_in_log"], each["start"]) for each in found["starts"]] == [(0, False, None)]
    assert found["phases"][0]["run"] == 0


def test_a_log_that_ends_under_load_says_that_it_may_have_been_killed(tmp_path: Path) -> None:
    assert "the server was killed" in document(tmp_path, load(0, 60))["phases"][-1]["detail"]


def test_a_second_start_without_a_line_before_it_is_reported_as_silence() -> None:
    found = report(Logs([str(HERE / "recordings" / "restart_append" / "server.log.gz")]), PROFILES["online"])
    assert [phase["phase"] for phase in found["phases"]] == [
        "start_up", "idle", "load", "silence", "start_up", "idle", "load", "stop",
    ]  # fmt: skip
    assert [each["ending"] for each in found["starts"]] == ["silence", "stop"]
    assert [each["changed_args"] for each in found["starts"]] == [[], []]


def test_a_crash_says_why_and_lasts_until_the_next_start(tmp_path: Path) -> None:
    crash = at(65, "Scheduler hit an exception: Traceback (most recent call last):") + (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    )
    found = document(tmp_path, start(0) + at(30, READY) + load(35, 65) + crash + start(125))
    (crash_phase,) = [phase for phase in found["phases"] if phase["phase"] == "crash"]
    assert (crash_phase["at"], crash_phase["seconds"]) == (65, 60)
    assert found["starts"][0]["ending"] == "crash"


def test_the_memory_of_a_start_is_followed_from_before_the_weights_to_what_is_left() -> None:
    found = report(Logs([str(HERE / "data" / "logs" / "0.5.23.log")]), PROFILES["online"])
    assert found["starts"][0]["memory"] == {
        "device": "gpu",
        "before_weights_gb": 78.71,
        "weights_gb": 16.46,
        "kv_pool_gb": 39.68,
        "graphs_gb": 4.12,
        "left_gb": 9.87,
    }


def test_one_changed_argument_that_helped_under_the_same_load_is_the_likely_cause(tmp_path: Path) -> None:
    before = start(0) + at(30, READY) + load(35, 200, running=2, queued=30, throughput=200)
    after = start(300, max_running_requests=32) + at(330, READY) + load(335, 500, running=28, queued=0, throughput=900)
    second = document(tmp_path, before + after)["starts"][1]
    assert [(each["arg"], each["before"], each["after"]) for each in second["changed_args"]] == [
        ("max_running_requests", "2", "32")
    ]
    assert second["against_last"]["overall"] == "better"
    assert second["against_last"]["cause"] == "likely"
    assert "generated tokens a second" in second["against_last"]["words"]


def test_the_processes_of_two_nodes_are_one_start(tmp_path: Path) -> None:
    first = start(0, nnodes=2, node_rank=0) + at(40, READY) + load(60, 120)
    second = start(2, nnodes=2, node_rank=1)
    found = document(tmp_path, first, second)
    assert found["counts"]["server_starts"] == len(found["starts"]) == 1


def test_a_second_start_of_the_same_node_is_a_restart(tmp_path: Path) -> None:
    text = start(0, nnodes=2, node_rank=0) + start(60, nnodes=2, node_rank=0)
    assert document(tmp_path, text)["counts"]["server_starts"] == 2


def test_a_log_without_dates_places_its_phases_after_its_begin(tmp_path: Path) -> None:
    text = (load(0, 60) + load(900, 930)).replace("2025-11-20 ", "")
    found = document(tmp_path, text)
    assert [(phase["start"], phase["at"]) for phase in found["phases"]] == [(None, 0), (None, 67.5), (None, 900)]
    assert found["notes"] == ["times have no date: where they begin again, the next day is assumed"]


def test_a_log_without_times_has_no_phases_and_says_what_is_missing(tmp_path: Path) -> None:
    found = document(tmp_path, "".join(line.split("] ", 1)[1] + "\n" for line in load(0, 60).splitlines()))
    assert found["counts"]["decode_batches"] == 12
    assert "no line has a time" in found["notes"][0]


def test_a_clock_that_was_set_back_is_noted(tmp_path: Path) -> None:
    assert "set back once" in document(tmp_path, load(7200, 7230) + load(0, 30))["notes"][0]


def test_of_very_many_starts_the_first_and_the_last_are_kept() -> None:
    kept: FirstAndLast[int] = FirstAndLast(3)
    for number in range(1000):
        kept.append(number)
    assert list(kept) == [0, 1, 2, 997, 998, 999]


VAIN = (
    "Health check failed. Server couldn't get a response from detokenizer for last 20 seconds. tic start time: 10:01:00"
)


def test_a_hang_that_is_over_is_found_and_its_silence_is_not_idle(tmp_path: Path) -> None:
    hang = "".join(at(second, VAIN) for second in range(120, 240, 30))
    text = start(0) + at(30, READY) + load(40, 100, running=2) + hang + load(240, 900, running=2)
    found = document(tmp_path, text)
    assert found["verdict"] == "scheduler_stuck"
    assert "The scheduler hangs" in found["findings"][0]["summary"]
    silence = [phase["detail"] for phase in found["phases"] if phase["phase"] == "silence"]
    assert silence == ["the scheduler hung"]
    assert found["findings"][0]["last_seen"] is not None


def test_one_failed_health_check_is_no_hang(tmp_path: Path) -> None:
    text = start(0) + at(30, READY) + load(40, 100, running=2) + at(101, VAIN) + load(105, 400, running=2)
    assert document(tmp_path, text)["verdict"] != "scheduler_stuck"


def test_a_real_hang_of_the_detokenizer_is_named_by_the_report(tmp_path: Path) -> None:
    capture = unpack(archive_of("stop-detokenizer"), tmp_path)
    found = report(Logs([str(capture / "server.log")]), PROFILES["online"])
    assert found["verdict"] == "scheduler_stuck"
    assert found["findings"][0]["summary"].startswith("The detokenizer hangs")
