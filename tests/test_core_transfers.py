"""Requests that fail between the servers of a prefill/decode pair.

Lines and counters of SGLang in, one count and its cause out.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tuning_exporter.core.findings import Finding, Judgement
from test_core_course import finding, found, judged, load, stamp, start
from test_core_watch import Beside

ROW = "kv_transfer_failing"
TIMED_OUT = "Request {room} timed out after 300.0s in KVPoll.WaitingForInput"
ANOTHER = "Failed due to an unknown reason from another rank"
SOME = (
    "Some requests fail to receive KV Cache transfer done signal after bootstrapping. If a greater mean TTFT is"
    " acceptable, you can 'export SGLANG_DISAGGREGATION_WAITING_TIMEOUT=600' (10 minutes) to relax the timeout"
    " condition. "
)


def failed(
    at: float,
    room: int = 11,
    reason: str = TIMED_OUT,
    *,
    rank: int = 0,
    side: str = "Decode transfer",
    raised: bool = True,
) -> str:
    request = "decode_req.req" if side.startswith("Decode") else "req"
    because = f" with exception KVTransferError(bootstrap_room={room}): {reason.format(room=room)}" if raised else ""
    return (
        f"{stamp(at, f'TP{rank}')}{side} failed for request rank={rank} {request}.rid='a{room}'"
        f" {request}.bootstrap_room={room}{because}"
    )


def said(answer: Judgement) -> str:
    return finding(answer, ROW).sentence


def words(answer: Finding) -> str:
    return " ".join(change.words for change in answer.changes)


# Counted once


@pytest.mark.parametrize(
    ("lines", "number"),
    [
        ([failed(0, rank=rank) for rank in range(8)], 1),
        ([failed(0, rank=0), failed(0, reason=ANOTHER, rank=1), failed(3, reason=ANOTHER, rank=2)], 1),
        ([failed(0, room) for room in (11, 12, 13)], 3),
        ([failed(0, 11), failed(400, 11, rank=1)], 1),  # however late the other rank is
        ([failed(0, raised=False)], 1),
        ([failed(0, side="Prefill bootstrap"), failed(0, side="Prefill transfer", room=12), failed(0,
            side="Decode handshake", room=13)], 3),
        ([stamp(0, f"TP{rank} EP{rank}") + SOME for rank in range(4)], 1),
        ([stamp(0, "TP0") + SOME, failed(0, 11), failed(0, 12)], 2),
        ([failed(0, 11), stamp(1, "TP0") + SOME], 1),
        ([f"{stamp(0)}Could not fetch prefill parallel info from 10.0.0.1:8998 after 60 attempts"], 1),
    ],
)  # fmt: skip
def test_a_failed_request_is_counted_once_whatever_the_ranks_print(lines: list[str], number: int) -> None:
    assert said(judged(lines)).startswith(f"{number} request{'' if number == 1 else 's'} failed")


@pytest.mark.parametrize(
    "lines",
    [
        [failed(0, reason="Aborted by AbortReq.", side="Prefill bootstrap")],
        [failed(0, room, reason="Aborted by decode-side abort notification.",
            side="Prefill transfer") for room in range(9)],
        [f"{stamp(0)}Failed to get prefill parallel info: 404, Not Found"],  # it asks again
        [f"{stamp(0)}Lost connection with prefill instance (bootstrap_addr: 10.0.0.1:8998), 0 transfers affected"],
        [f"{stamp(0)}Session 10.0.0.1:17000 failed."],
    ],
)  # fmt: skip
def test_a_client_that_gave_up_and_an_attempt_are_no_failed_request(lines: list[str]) -> None:
    assert ROW not in found(judged([*start(disaggregation_mode="decode"), *lines, *load(20, 30)]))


@given(st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), max_size=300))
def test_whatever_a_reason_and_a_request_id_hold_one_request_failed(text: str) -> None:
    line = (
        f"{stamp(0, 'TP0')}Decode transfer failed for request rank=0 decode_req.req.rid={text!r}"
        f" decode_req.req.bootstrap_room=5 with exception {text}"
    )
    answer = judged([line])
    assert ROW in found(answer) or "Aborted by" in text


# Why


@pytest.mark.parametrize(
    ("reason", "look", "more"),
    [
        (TIMED_OUT, "prefill server's log", "export SGLANG_DISAGGREGATION_WAITING_TIMEOUT=600 on the decode server"),
        (TIMED_OUT.replace("300.0", "600.0"), "prefill server's log", "longer waits will hardly help"),
        ("Request {room} timed out after 300.1s in KVPoll.Bootstrapping", "decode server",
            "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT=600"),
        ("Decode instance could be dead, remote mooncake session 10.0.0.1:1 is not alive", "decode server's log", ""),
        ("Failed to get kvcache from prefill instance, it might be dead", "where it says why: Prefill transfer failed",
            ""),
        ("Losing connection with prefill instance (bootstrap_addr: 10.0.0.1:8998)", "prefill server's log", ""),
        ("Lost connection with prefill instance (bootstrap_addr: 10.0.0.1:8998)", "prefill server's log", ""),
        ("Could not fetch prefill parallel info from bootstrap_addr: 10.0.0.1:8998", "--disaggregation-bootstrap-port",
            ""),
        ("Failed to send kv chunk of 11 to 10.0.0.1:4000", "--disaggregation-ib-device", ""),
        (("follow_bootstrap_room conflict: dispatched to dp_rank 1. Set"
            " SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK=1 to allow mixed routing."),
         "SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK=1", ""),
        (ANOTHER, "other ranks", ""),
        ("something new", "other server's log", ""),
    ],
)  # fmt: skip
def test_advice_names_the_side_and_the_variable_that_sglangs_line_names(reason: str, look: str, more: str) -> None:
    advice = words(finding(judged([failed(0, reason=reason)]), ROW))
    assert look in advice
    assert more in advice
    assert ("SGLANG_DISAGGREGATION_WAITING_TIMEOUT" in advice) is ("WaitingForInput" in reason)


def test_a_secret_in_a_reason_is_not_said() -> None:
    assert "sk-abcdefghijklmnop1234" not in said(judged([failed(0, reason="Bearer sk-abcdefghijklmnop1234 refused")]))


# Metrics


def pair(**figures: Any) -> Beside:
    beside = Beside()
    beside.scrape(0, failed_transfers=0.0, failed_bootstraps=0.0, running=4.0)
    for at in range(15, 316, 15):
        beside.scrape(at, running=4.0, **{name: value * at / 15 for name, value in figures.items()})
    return beside


@pytest.mark.parametrize(
    ("figures", "is_found"),
    [
        ({"failed_transfers": 1.0}, True),
        ({"failed_bootstraps": 1.0}, True),
        ({"failed_transfers": 1.0, "aborted_requests": 1.0}, False),  # clients that gave up
        ({"failed_transfers": 1.0, "finished_requests": 500.0}, False),
        ({}, False),
    ],
)
def test_counters_alone_show_failing_transfers(figures: dict[str, float], *, is_found: bool) -> None:
    assert (ROW in {each.diagnosis for each in pair(**figures).judge(316).findings}) is is_found


def test_a_forged_line_beside_a_counter_that_stands_is_nothing() -> None:
    beside = pair()
    beside.lines(failed(316))
    assert ROW not in {each.diagnosis for each in beside.judge(317).findings}
