"""How the closed loop judges faults and counts, without an engine: text and series in, figures and problems out.

Log lines come from a real 0.5.23; figures of pages are invented.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from closed_loop import accounts, agreement, liveness, timeline
from closed_loop.accounts import Asked, Pages
from closed_loop.faults import DOWN, FAULTS, LOOP, named
from closed_loop.host import Host
from closed_loop.timeline import FaultRecords, judged
from sglang_tuning_exporter.core.server import LIVENESS
from sglang_tuning_exporter.mixin.alerts import files

LOG = """\
[2026-11-21 09:22:50] Prefill batch, #new-seq: 2, #new-token: 48, #cached-token: 1, token usage: 0.94, #running-req: 27, #queue-req: 20, cpu graph: False
[2026-11-21 09:22:54] KV cache pool is full. Retract requests. #retracted_reqs: 2, #new_tokens_gained: 76, #new_token_ratio: 0.1002 -> 0.1039
[2026-11-21 09:22:54] Decode batch, #running-req: 30, #token: 2909, token usage: 0.97, cpu graph: False, gen throughput (token/s): 288.62, #queue-req: 18
[2026-11-21 09:22:55] INFO:     127.0.0.1:41 - "POST /generate HTTP/1.1" 503 Service Unavailable
[2026-11-21 09:22:55] INFO:     127.0.0.1:42 - "POST /generate HTTP/1.1" 200 OK
"""


def message(alert: str, status: str) -> dict[str, Any]:
    return {"alerts": [{"status": status, "labels": {"alertname": alert}}]}


def records(**changed: Any) -> FaultRecords:
    """A server that was killed at 100, notified at 134, restarted at 140, and ready at 170."""
    lines = {"decode": 7, "prefill": 3, "retraction": 0}
    usual = FaultRecords(
        fault_at=100.0,
        repair_at=140.0,
        ready_at=170.0,
        up=[(99, 1.0), (100, 1.0), (101, 0.0), (168, 0.0), (169, 1.0)],
        firing={DOWN: [(131.0, 1.0), (168.0, 1.0)]},
        starts=[(99, 0.0), (150, 1.0)],
        messages=[(134.0, message(DOWN, "firing")), (172.0, message(DOWN, "resolved"))],
        counted=lines,
        written=dict(lines),
        in_files=dict(lines),
    )
    return replace(usual, **changed)


def test_seconds_are_from_the_fault_and_from_the_repair() -> None:
    found = judged(named("kill_main"), records())
    assert found["problems"] == []
    assert found["seconds"] == {"up_0": 1.0, "firing": 31.0, "webhook": 34.0}
    assert found["after_repair"] == {"ready": 30.0, "up_1": 29.0, "not_firing": 28.0, "resolved_webhook": 32.0}


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"firing": {DOWN: [(131, 1.0)], LOOP: [(135, 1.0)]}}, "SGLangRestartLoop fired"),
        ({"messages": [(134.0, message(DOWN, "firing"))]}, "no resolved_webhook"),
        ({"messages": [(134.0, message(DOWN, "firing")), (145.0, message(DOWN, "resolved"))]}, "resolved 24 s before"),
        ({"firing": {}, "messages": []}, "no firing"),
        ({"starts": [(99, 0.0), (150, 2.0)]}, "2 starts counted, 1 were made"),
        ({"counted": {"decode": 8, "prefill": 3, "retraction": 0}}, "decode: 8 counted, 7 written"),
        ({"up": [(99, 1.0), (180, 1.0)]}, "sglang_tuning_up stayed 1"),
    ],
)
def test_a_difference_from_the_table_is_a_problem(changed: dict[str, Any], problem: str) -> None:
    assert any(problem in found for found in judged(named("kill_main"), records(**changed))["problems"])


def test_alerts_that_any_server_on_a_cpu_has_are_no_problem() -> None:
    found = judged(named("kill_main"), records(firing={**records().firing, "SGLangCudaGraphOff": [(120, 1.0)]}))
    assert found["problems"] == []
    assert found["others"] == {"SGLangCudaGraphOff": 20.0}


def test_an_event_that_the_log_should_have_must_have_been_counted() -> None:
    silent = judged(named("kill_scheduler"), records())
    assert silent["problems"] == ["none of process_died was counted"]
    counted = judged(named("kill_scheduler"), records(events={"process_died": [(99, 0.0), (103, 1.0)]}))
    assert counted["problems"] == []
    assert counted["events"] == {"process_died": 3.0}


def test_a_release_that_does_not_notice_its_schedulers_death_is_recognised_by_figures_that_stand_still() -> None:
    row = named("kill_scheduler").of_release("0.5.9")
    assert (row.alert, row.events) == ("SGLangSchedulerStuck", ())
    assert named("kill_scheduler").of_release("0.5.23").alert == DOWN


def test_lines_of_a_prompt_are_no_lines_of_the_log() -> None:
    quoted = '"text": "[2026-11-21 09:22:54] Decode batch, #running-req: 30"\n'
    assert timeline.count_lines((LOG + quoted).splitlines()) == {"decode": 1, "prefill": 1, "retraction": 1, "start": 0}


def test_the_table_of_faults_names_existing_alerts_events_and_actions() -> None:
    rules = yaml.safe_load(files()["alerts/rules/sglang-tuning.rules.yml"])
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"] if "alert" in rule}
    for fault in FAULTS:
        assert fault.may_fire() <= alerts, fault.id
        assert set(fault.events) <= set(LIVENESS), fault.id
        assert all(callable(getattr(Host, deed)) for deed in (*fault.begins, *fault.ends)), fault.id


def test_a_result_is_a_row_of_a_table() -> None:
    found = {**judged(named("kill_main"), records()), "version": "0.5.23", "time_scale": 10.0}
    row = liveness.table([found])[-1]
    assert row == (
        "| 0.5.23 | 10 times as fast | SIGKILL of the main process | SGLangServerDown"
        " | 1 | 31 | 34 | 30 | 28 | 32 | 10 of 10 |"
    )


def test_the_writer_opens_its_log_anew_and_keeps_every_line_once(tmp_path: Path) -> None:
    log, witness = tmp_path / "server.log", tmp_path / "witness.log"
    program = Path(liveness.__file__).parent / "writer.py"
    with subprocess.Popen([sys.executable, str(program), str(witness), str(log)], stdin=subprocess.PIPE) as writer:
        assert writer.stdin is not None
        writer.stdin.write(b"one\n")
        writer.stdin.flush()
        _until(lambda: log.exists() and log.read_bytes() == b"one\n")
        log.rename(tmp_path / "server.log.1")
        os.kill(writer.pid, signal.SIGHUP)
        _until(log.exists)
        writer.stdin.write(b"two\n")
        writer.stdin.close()
        assert writer.wait(10) == 0
    assert (tmp_path / "server.log.1").read_bytes() == b"one\n"
    assert log.read_bytes() == b"two\n"
    assert witness.read_bytes() == b"one\ntwo\n"


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def asked(number: int, outcome: str, **details: Any) -> Asked:
    made = Asked(number, "stays", 24, stream=True)
    for name, value in {"outcome": outcome, **details}.items():
        setattr(made, name, value)
    return made


def test_the_end_of_an_answer_shows_how_the_request_ended() -> None:
    ends: dict[str, tuple[int, dict[str, Any]]] = {
        "finished": (200, {"finish_reason": {"type": "stop", "matched": 1}, "completion_tokens": 9}),
        "aborted waiting": (200, {"finish_reason": {"type": "abort", "message": "Abort in waiting queue"}}),
        "aborted by the server": (200, {"finish_reason": {"type": "abort", "message": "Out of memory"}}),
        "rejected": (
            200,
            {"finish_reason": {"type": "abort", "status_code": 503, "message": "The request queue is full."}},
        ),
        "failed": (500, {}),
    }
    for outcome, (status, meta) in ends.items():
        each = Asked(0, "stays", 24, stream=True)
        each.end(status, meta)
        assert each.outcome == outcome


def page(**figures: float) -> str:
    names = {
        "retracted": "sglang:num_retracted_requests_total",
        "served": "sglang:num_requests_total",
        "aborted": "sglang:num_aborted_requests_total",
        "prompt": "sglang:prompt_tokens_total",
        "generated": "sglang:generation_tokens_total",
        "events": "sglang_tuning_retraction_events_total",
        "our_retracted": "sglang_tuning_retracted_requests_total",
        "our_aborted": "sglang_tuning_aborted_requests_total",
        "our_rejected": "sglang_tuning_rejected_requests_total",
        "decode": 'sglang_tuning_log_lines_total{kind="decode"}',
        "prefill": 'sglang_tuning_log_lines_total{kind="prefill"}',
        "passes": 'sglang:cuda_graph_passes_total{mode="prefill_none"}',
        "computed": 'sglang:realtime_tokens_total{mode="prefill_compute"}',
        "cached": 'sglang:realtime_tokens_total{mode="prefill_cache"}',
    }
    return "".join(f"{names[name]} {value}\n" for name, value in figures.items())


SERVER = {
    "retracted": 2,
    "served": 0,
    "aborted": 0,
    "prompt": 0,
    "generated": 0,
    "passes": 1,
    "computed": 48,
    "cached": 1,
}
OURS = {"events": 1, "our_retracted": 2, "our_aborted": 0, "our_rejected": 1, "decode": 1, "prefill": 1}
REPORT = {
    "counts": {
        "decode_batches": 1,
        "prefill_batches": 1,
        "retraction_events": 1,
        "retracted_requests": 2,
        "server_starts": 0,
    }
}


def compared(requests_of: list[Asked], **server: float) -> dict[str, accounts.Row]:
    counted = accounts.of_log(LOG.splitlines())
    pages = Pages(("", page(**{**SERVER, **server})), ("", page(**OURS)))
    return {row.what: row for row in accounts.compare(requests_of, counted, counted, pages, REPORT)}


def test_log_server_exporter_and_report_agree_on_the_same_events() -> None:
    one_piece = asked(0, "rejected", stream=False)
    rows = compared([one_piece, asked(1, "finished", tokens=9)], served=1, prompt=24, generated=9)
    different = {what for what, row in rows.items() if not row.agrees}
    assert different == {"admissions"}  # the counters above do not include one admitted request
    assert rows["retracted requests"].counts == {"log": 2, "server": 2, "exporter": 2}


def test_a_count_that_differs_without_a_reason_is_a_problem_and_one_with_a_reason_is_not() -> None:
    stayed = [asked(0, "rejected", stream=False), asked(1, "rejected")]
    rows = compared(stayed, retracted=3)
    found = accounts.problems(list(rows.values()), stayed)
    assert any(problem.startswith("retracted requests:") for problem in found)
    assert not any("streamed" in problem for problem in found)
    assert not rows["rejected, streamed"].agrees


def test_a_request_that_failed_is_a_problem() -> None:
    assert accounts.problems([], [asked(0, "failed", words="status 500")]) == ["1 requests failed: status 500"]


def test_requests_depend_on_the_seed_alone() -> None:
    storm = agreement.Storm(seed=3)
    manners = [storm.manner(number) for number in range(300)]
    assert manners == [agreement.Storm(seed=3).manner(number) for number in range(300)]
    assert {manner for manner, _, _ in manners} == {"stays", "leaves", "asks to abort"}
    assert all(streams for manner, streams, _ in manners if manner == "leaves")


def test_agreement_is_a_table_with_a_reason_beside_each_difference() -> None:
    rows = [
        accounts.Row("retraction events", {"log": 1250, "exporter": 1250}),
        accounts.Row("rejected, streamed", {"clients": 3, "log": 0}, "a stream begins with 200", differs=True),
    ]
    shown = agreement.table(json.loads(json.dumps({"rows": [row.as_json() for row in rows]})))
    assert shown[2] == "| retraction events |  | 1,250 |  | 1,250 |  | equal |"
    assert shown[3] == "| rejected, streamed | 3 | 0 |  |  |  | a stream begins with 200 |"
