"""Lines of ten releases, 0.3.0 to 0.5.23, as the code of the released wheels prints them, and their exact figures."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import pytest

from sglang_tuning_exporter.sglang.events import (
    NO_RANK,
    DecodeBatch,
    Event,
    KvPool,
    Limits,
    Liveness,
    Memory,
    PrefillBatch,
    Rank,
    Retraction,
    ServerArgs,
)
from sglang_tuning_exporter.sglang.log.reader import LogReader

LOGS = Path(__file__).parent / "data" / "logs"
VERSIONS = [
    "0.3.0",
    "0.3.6.post3",
    "0.4.3.post4",
    "0.4.6.post5",
    "0.4.9.post6",
    "0.5.3.post3",
    "0.5.7",
    "0.5.12",
    "0.5.20",
    "0.5.23",
]
NOON = 1_763_638_800.0  # 2025-11-20 11:40:00 UTC
TP0 = Rank(tp=0)
Kind = TypeVar("Kind")


def read(version: str) -> tuple[list[Event], LogReader]:
    reader = LogReader()
    return reader.feed((LOGS / f"{version}.log").read_bytes()), reader


def only(events: list[Event], kind: type[Kind]) -> list[Kind]:
    return [event for event in events if isinstance(event, kind)]


def moment(version: str, seconds: float) -> float:
    """Seconds after 11:40:00, which 0.3.0 prints without a date."""
    return (11 * 3600 + 40 * 60 if version == "0.3.0" else NOON) + seconds


def at_least(version: str, since: str) -> bool:
    return VERSIONS.index(version) >= VERSIONS.index(since)


@pytest.mark.parametrize("version", VERSIONS)
def test_nothing_of_a_release_is_unrecognised(version: str) -> None:
    events, reader = read(version)
    assert not any(reader.unrecognised.values())
    assert not any(event.unknown_keys for event in only(events, DecodeBatch) + only(events, PrefillBatch))
    assert sum(reader.counts.values()) == (LOGS / f"{version}.log").read_bytes().count(b"\n")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_decode_line_of_every_release_gives_its_figures(version: str) -> None:
    decode = only(read(version)[0], DecodeBatch)[0]
    graph = at_least(version, "0.4.6.post5")
    assert decode == DecodeBatch(
        moment(version, 13),
        TP0,
        running=237,
        queued=4,
        tokens=925_941,
        full_usage=0.89,
        graph=True if graph else None,
        graph_device="cuda" if graph else None,
        generation_throughput=4471.70,
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_a_prefill_line_of_every_release_gives_its_figures(version: str) -> None:
    prefill = only(read(version)[0], PrefillBatch)[0]
    assert prefill == PrefillBatch(
        moment(version, 11),
        TP0,
        new_sequences=4,
        new_tokens=6120,
        cached_tokens=3584,
        running=237,
        queued=4,
        pending_tokens=7200 if at_least(version, "0.5.12") else None,
        full_usage=None if version == "0.3.0" else 0.89,
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_a_retraction_of_every_release_gives_its_figures(version: str) -> None:
    retraction = only(read(version)[0], Retraction)[0]
    assert retraction == Retraction(
        moment(version, 10),
        TP0,
        requests=5,
        aborted=0 if version == "0.5.3.post3" else None,
        new_tokens_gained=8950 if at_least(version, "0.5.7") else None,
        ratio_before=0.3002,
        ratio_after=0.5783,
    )


PD_QUEUES = {
    "0.4.6.post5": ({}, {"unbootstrapped": 311, "transferring": 64}),
    "0.4.9.post6": ({"retracted": 5}, {"unbootstrapped": 311, "transferring": 64}),
    "0.5.3.post3": ({"prealloc": 31, "transfer": 8, "retracted": 5}, {"prealloc": 311, "inflight": 64}),
    "0.5.7": ({"prealloc": 31, "transfer": 8, "retracted": 5}, {"prealloc": 311, "inflight": 64}),
    "0.5.12": ({"prealloc": 31, "transfer": 8, "retracted": 5}, {"bootstrap": 311, "inflight": 64}),
    "0.5.20": ({"prealloc": 31, "transfer": 8, "retracted": 5}, {"bootstrap": 311, "inflight": 64, "optimistic": 0}),
    "0.5.23": ({"prealloc": 31, "transfer": 8, "retracted": 5}, {"bootstrap": 311, "inflight": 64, "optimistic": 0}),
}


@pytest.mark.parametrize("version", PD_QUEUES)
def test_the_queues_of_a_disaggregated_server_keep_their_names(version: str) -> None:
    events, _ = read(version)
    decode, prefill = only(events, DecodeBatch)[1], only(events, PrefillBatch)[1]
    assert (decode.queues, prefill.queues) == PD_QUEUES[version]
    assert (decode.running, decode.queued, decode.full_usage) == (399, 27, 0.99)
    assert (prefill.new_tokens, prefill.queued, prefill.full_usage) == (8192, 2594, 0.46)
    assert len(only(events, Retraction)) == 1  # `#retracted-req` is a queue, not an event


@pytest.mark.parametrize("version", ["0.4.9.post6", "0.5.3.post3", "0.5.7", "0.5.12", "0.5.20", "0.5.23"])
def test_a_sliding_window_pool_is_distinguished_from_the_full_one(version: str) -> None:
    [decode] = [event for event in only(read(version)[0], DecodeBatch) if event.swa_usage is not None]
    assert (decode.tokens, decode.full_usage, decode.swa_usage, decode.rank) == (925_941, 0.89, 0.41, NO_RANK)


@pytest.mark.parametrize("version", ["0.5.3.post3", "0.5.7", "0.5.12", "0.5.20", "0.5.23"])
def test_a_mamba_pool_is_distinguished_from_the_full_one(version: str) -> None:
    [decode] = [event for event in only(read(version)[0], DecodeBatch) if event.mamba_usage is not None]
    assert (decode.full_usage, decode.mamba_usage, decode.swa_usage) == (0.89, 0.69, None)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_start_of_every_release_gives_its_limits(version: str) -> None:
    [limits] = only(read(version)[0], Limits)
    shown = at_least(version, "0.4.9.post6")
    assert limits == Limits(
        limits.time,
        TP0,
        max_total_num_tokens=1_040_384,
        max_running_requests=4096,
        chunked_prefill_size=8192 if at_least(version, "0.4.3.post4") else None,
        available_gb=9.87 if shown else None,
        memory_device="gpu" if shown else None,
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_the_start_of_every_release_gives_its_pool(version: str) -> None:
    pools = only(read(version)[0], KvPool)
    expected = [(1_040_384, 39.68)] if at_least(version, "0.4.3.post4") else []
    assert [(pool.tokens, round(pool.gigabytes or 0, 2)) for pool in pools] == expected


@pytest.mark.parametrize("version", VERSIONS)
def test_the_start_of_every_release_gives_what_is_left_after_the_pool(version: str) -> None:
    [pool] = [memory for memory in only(read(version)[0], Memory) if memory.stage == "pool"]
    assert (pool.available_gb, pool.used_gb, pool.graph_sizes) == (11.93, None, ())


@pytest.mark.parametrize("version", [version for version in VERSIONS if at_least(version, "0.4.3.post4")])
def test_the_end_of_the_capture_gives_what_the_graphs_took(version: str) -> None:
    graphs = [memory for memory in only(read(version)[0], Memory) if memory.stage == "graph"]
    assert {(memory.used_gb, memory.available_gb) for memory in graphs} == {(2.06, 9.87)}
    sizes = [memory.graph_sizes for memory in graphs if memory.graph_sizes]
    if at_least(version, "0.4.6.post5"):
        assert [(s[:4], s[-1], len(s)) for s in sizes] == [((1, 2, 4, 8), 256, 36)]
    else:
        assert sizes == []


@pytest.mark.parametrize("version", VERSIONS)
def test_a_start_of_every_release_ends_with_ready(version: str) -> None:
    assert [event.what for event in only(read(version)[0], Liveness)] == ["ready"]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_arguments_of_every_release_are_read_whole(version: str) -> None:
    [event] = only(read(version)[0], ServerArgs)
    args = event.args
    assert (args["tp_size"], args["schedule_conservativeness"], args["max_running_requests"]) == (8, 1.0, None)
    assert (args["model_path"], args["disable_cuda_graph"]) == ("meta-llama/Llama-3.1-70B-Instruct", False)
    assert "api_key" not in args
    if at_least(version, "0.5.20"):
        config = args["cuda_graph_config"]
        assert isinstance(config, dict)
        assert config["decode"]["max_bs"] == 256
        assert config["decode"]["bs"][-1] == 256
