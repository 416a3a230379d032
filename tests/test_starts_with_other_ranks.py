"""One log, several starts with and without DP ranks: what one start counted is not lost in the next.

Lines as 0.5.12 formats them (tests/data/logs), with times and figures of our own.
"""

from __future__ import annotations

import itertools

import pytest

from conftest import config
from faults import serving
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.serve.metrics import collect
from sglang_tuning_exporter.sglang.log.reader import LogReader
from sglang_tuning_exporter.sglang.metrics import page_figures as facts
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.server import ServerState

WITHOUT, WITH = "", " DP0"


def lines(clock: str, ranks: str) -> bytes:
    return (
        f"[2025-11-20 {clock}:00] server_args=ServerArgs(model_path='m', tp_size=1)\n"
        f"[2025-11-20 {clock}:10{ranks}] Decode batch, #running-req: 4, #token: 925, token usage: 0.95, "
        "cuda graph: True, gen throughput (token/s): 44.70, #queue-req: 4\n"
        f"[2025-11-20 {clock}:11{ranks}] KV cache pool is full. Retract requests. "
        "#retracted_reqs: 5, #new_tokens_gained: 8950, #new_token_ratio: 0.3002 -> 0.5783\n"
        f"[2025-11-20 {clock}:12{ranks}] Decode batch, #running-req: 4, #token: 925, token usage: 0.95, "
        "cuda graph: True, gen throughput (token/s): 44.70, #queue-req: 4\n"
    ).encode()


@pytest.mark.parametrize("starts", list(itertools.product([WITHOUT, WITH], repeat=3)))
def test_every_start_counts_whether_it_has_dp_ranks_or_not(starts: tuple[str, ...]) -> None:
    state, reader = ServerState(PROFILES["online"], 0.0), LogReader()
    for number, ranks in enumerate(starts):
        state.observe_all(reader.feed(lines(f"1{number}:00", ranks)))
    assert state.totals().counts["retraction_events"] == len(starts)
    assert state.has_dp_ranks == (starts[-1] == WITH)


def test_series_without_a_rank_beside_dp_ranks_are_no_scheduler() -> None:
    state, reader = ServerState(PROFILES["online"], 0.0), LogReader()
    state.observe_all(reader.feed(lines("10:00", WITH)))
    state.observe_all(reader.feed(lines("10:05", WITHOUT)[lines("10:05", WITHOUT).index(b"\n") + 1 :]))
    assert [rank.dp for rank in state.schedulers] == [0]


def test_a_scheduler_that_the_new_start_has_not_has_no_limit() -> None:
    state, reader = ServerState(PROFILES["online"], 0.0), LogReader()
    for dp_size in (2, 1):
        ranks = [f" DP{dp}" for dp in range(dp_size)]
        start = f"server_args=ServerArgs(model_path='m', tp_size=1, dp_size={dp_size}, max_running_requests=8)\n"
        state.observe_all(reader.feed(f"[2025-11-20 10:0{3 - dp_size}:00] {start}".encode()))
        for rank in ranks:
            state.observe_all(reader.feed(lines(f"10:1{3 - dp_size}", rank).split(b"\n", 1)[1]))
    assert [state.facts.running_limit(dp) for dp in (0, 1)] == [8, None]


def scraped(*pages: bytes) -> ServerState:
    state = ServerState(PROFILES["online"], 0.0)
    for number, page in enumerate(pages):
        state.observe_scrape(facts.read(page.decode()), 15.0 * number)
    return state


def test_a_start_without_dp_ranks_after_one_with_them_is_seen_in_the_metrics_alone() -> None:
    state = scraped(serving(90, ranks=range(4)), serving(95, ranks=range(4)), serving(3), serving(10))
    assert (state.starts, state.has_dp_ranks) == (1, False)
    assert state.totals().counts["native_retracted_requests"] == 4 * 5 + 10


def test_counters_above_their_values_before_a_restart_count_from_0() -> None:
    before = serving(10).replace(b'mode="decode"} 1000', b'mode="decode"} 9000')
    state = scraped(before, serving(12))
    assert (state.starts, state.totals().counts["native_retracted_requests"]) == (1, 12)


@pytest.mark.parametrize("starts", list(itertools.product([WITHOUT, WITH], repeat=3)))
def test_every_scheduler_of_every_start_has_its_own_series(starts: tuple[str, ...]) -> None:
    sidecar, reader = Sidecar(config(sglang_url="http://127.0.0.1:9")), LogReader()
    for number, ranks in enumerate(starts):
        sidecar.state.observe_all(reader.feed(lines(f"1{number}:00", ranks)))
    families = collect(sidecar)
    samples = [(each.name, tuple(sorted(each.labels.items()))) for family in families for each in family.samples]
    assert len(samples) == len(set(samples))
    ranked = {dict(labels).get("dp_rank") for name, labels in samples if name == "sglang_tuning_state"}
    assert ranked == {"0" if ranks == WITH else None for ranks in starts}
