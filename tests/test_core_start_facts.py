"""What a log says without any load: no room for a KV cache, costly settings, a host cache that fails, drafts that
nobody accepts.
"""

from __future__ import annotations

from typing import Any

import pytest

from sglang_tuning_exporter.core.findings import Judgement
from test_core_course import finding, found, judged, load, stamp, start
from test_core_watch import Beside

NO_LOAD = ("There is", "The load of")


def profiled(tokens: int, ranks: str = "TP0") -> str:
    return (
        f"{stamp(2, ranks)}max_total_tokens=131072 is larger than the profiled value {tokens}. Use the profiled value"
        " instead."
    )


def changes(answer: Judgement, row: str) -> list[tuple[str, object]]:
    return [(each.arg, each.to) for each in finding(answer, row).changes]


# No room for a KV cache


def test_a_smaller_pool_than_asked_for_is_no_failure() -> None:
    assert "no_kv_cache" not in found(judged([*start()[:2], profiled(90_000), *start()[2:], *load(20, 30)]))


# Costly settings


@pytest.mark.parametrize(
    ("more", "sentence", "advised"),
    [
        ({"chunked_prefill_size": 64}, "prompts are computed in chunks of 64 tokens", [("chunked_prefill_size", 4096)]),
        ({"disable_cuda_graph": True}, "CUDA graphs are switched off", [("disable_cuda_graph", False)]),
        (
            {"disable_cuda_graph": True, "chunked_prefill_size": 128},
            "CUDA graphs are switched off and prompts",
            [("disable_cuda_graph", False), ("chunked_prefill_size", 4096)],
        ),
    ],
)  # fmt: skip
def test_a_start_that_slows_every_request_down_is_said_without_any_load(
    more: dict[str, Any], sentence: str, advised: list[tuple[str, object]]
) -> None:
    answer = judged(start(**more))
    own = finding(answer, "costly_settings")
    assert own.sentence.startswith(sentence)
    assert (own.severity, own.is_limit) == ("info", False)
    assert changes(answer, "costly_settings") == advised
    assert not answer.sentence.startswith(NO_LOAD)


# HiCache


@pytest.mark.parametrize(
    ("line", "more", "advised"),
    [
        ("write_back: KV subtree dropped without backup due to host memory pressure, root node 7",
            {"hicache_ratio": 2.0, "hicache_size": 0}, "hicache_ratio"),
        ("write_back: KV subtree dropped without backup due to host memory pressure, root node 7",
            {"hicache_size": 100}, ""),
        ("Write page to storage: 4 pages failed.", {"hicache_storage_backend": "mooncake"}, ""),
    ],
)  # fmt: skip
def test_advice_follows_from_what_failed(line: str, more: dict[str, Any], advised: str) -> None:
    answer = judged([*start(**more), *load(20, 40), stamp(61, "TP0") + line, *load(62, 20)])
    own = finding(answer, "hicache_degraded")
    assert own.changes[0].arg == advised
    assert ("(mooncake)" in own.changes[0].words) is ("storage" in line)


# Speculative decoding


@pytest.mark.parametrize(("length", "is_found"), [(1.01, True), (2.4, False), (0.0, False)])
def test_the_gauge_shows_it_without_a_log(length: float, *, is_found: bool) -> None:
    beside = Beside(reads=False)
    for at in range(0, 301, 15):
        beside.scrape(at, running=8.0 + at % 2, accept_length=length)
    assert ("speculation_rejected" in {each.diagnosis for each in beside.judge(301).findings}) is is_found
