"""Optional improvements from the guide: settings of a profile, a router instead of replicas in one server, prefill graphs, memory fractions."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from scenarios import Story, decoding, started
from sglang_tuning_exporter.diagnosis.evidence import Past, past_of
from sglang_tuning_exporter.diagnosis.findings import Finding, judge
from sglang_tuning_exporter.diagnosis.table import BY_ID
from sglang_tuning_exporter.sglang.events import NO_RANK, Memory, RankFigures, Scrape
from sglang_tuning_exporter.sglang.metrics.histograms import Histogram
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.server import ServerState

END = 200.0
SETTINGS, ROUTER, PREFILL_GRAPHS = "profile_settings", "router_candidate", "prefill_graph_candidate"
HEALTHY = decoding(0.0, END, running=20)
FULL = decoding(0.0, END, running=20, queued=30, usage=0.95)


def lived(story: Story, profile: str = "online", reserve: float | None = 6.5, **args: Any) -> Past:
    state = ServerState(PROFILES[profile], 0.0)
    happened = started(reserve=reserve, model_path="/models/llama", **args) + story
    for at, what in sorted(happened, key=lambda pair: pair[0]):
        if isinstance(what, Scrape):
            state.observe_scrape(what, at)
        else:
            state.observe(what, at)  # type: ignore[arg-type]  # the rest are events here
    state.advance(END)
    return past_of(state, END)


def late() -> Story:
    """First tokens take three seconds, and nothing waits."""

    def histogram(count: float) -> Histogram:
        return Histogram((1.0, 4.0, inf), (0.0, count, count), 3.0 * count)

    return HEALTHY + [
        (10.0 * step, Scrape([RankFigures()], progress=step, time_to_first_token=histogram(20.0 * step)))
        for step in range(20)
    ]


def found(past: Past, row: str) -> Finding | None:
    return next((finding for finding in judge(past).findings if finding.diagnosis.id == row), None)


def flags(past: Past, row: str) -> dict[str, float | str | None]:
    finding = found(past, row)
    return {} if finding is None else {advice.flag: advice.suggested for advice in finding.advice}


def test_a_multi_turn_server_without_radix_cache_gets_the_advice_even_when_nothing_waits() -> None:
    past = lived(HEALTHY, "multi_turn", disable_radix_cache=True)
    assert flags(past, SETTINGS) == {"--disable-radix-cache": 0.0}
    assert judge(past).verdict == "no_clear_bottleneck"  # it computes every remedy before again
    assert judge(past).changes == {}


@pytest.mark.parametrize("profile", ["online", "offline", "long_context"])
def test_other_profiles_do_not_need_the_radix_cache(profile: str) -> None:
    assert found(lived(HEALTHY, profile, disable_radix_cache=True), SETTINGS) is None


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_a_server_without_trouble_gets_no_advice_about_settings(profile: str) -> None:
    args = {"disable_radix_cache": False, "enable_hierarchical_cache": False, "page_size": 16}
    assert found(lived(HEALTHY, profile, **args), SETTINGS) is None


@pytest.mark.parametrize("profile", ["multi_turn", "long_context"])
def test_a_full_kv_cache_of_long_conversations_gets_the_advice_of_a_host_cache(profile: str) -> None:
    past = lived(FULL, profile, disable_radix_cache=False, enable_hierarchical_cache=False, hicache_ratio=2.0)
    assert flags(past, SETTINGS) == {"--enable-hierarchical-cache": 1.0}


def test_a_full_kv_cache_online_does_not() -> None:
    assert found(lived(FULL, disable_radix_cache=False, enable_hierarchical_cache=False), SETTINGS) is None


def test_the_size_of_the_host_cache_matters_only_where_there_is_one() -> None:
    args = {"enable_hierarchical_cache": True, "hicache_ratio": 1.2}
    assert flags(lived(FULL, "multi_turn", **args), SETTINGS) == {"--hicache-ratio": 2.0}


def test_replicas_in_one_server_are_better_behind_a_router() -> None:
    finding = found(lived(HEALTHY, dp_size=8), ROUTER)
    assert finding is not None
    [advice] = finding.advice
    assert (advice.flag, advice.typed) == ("", "")
    assert advice.suggestion.startswith("start 8 servers without --dp-size")


@pytest.mark.parametrize(
    "args", [{"dp_size": 1}, {"dp_size": 8, "tp_size": 8, "enable_dp_attention": True}, {"dp_size": 2, "device": "cpu"}]
)
def test_a_single_server_and_dp_attention_need_no_router(args: dict[str, Any]) -> None:
    assert found(lived(HEALTHY, **args), ROUTER) is None


def test_late_first_tokens_can_have_prefill_graphs_where_the_release_has_them_switched_off() -> None:
    past = lived(late(), enable_piecewise_cuda_graph=False)
    assert flags(past, PREFILL_GRAPHS) == {"--enable-piecewise-cuda-graph": 1.0}


@pytest.mark.parametrize("args", [{}, {"enable_piecewise_cuda_graph": True}])
def test_no_prefill_graphs_are_advised_where_they_are_on_or_there_are_none(args: dict[str, Any]) -> None:
    assert found(lived(late(), **args), PREFILL_GRAPHS) is None


def test_no_prefill_graphs_are_advised_where_first_tokens_are_in_time() -> None:
    assert found(lived(HEALTHY, enable_piecewise_cuda_graph=False), PREFILL_GRAPHS) is None


def test_a_memory_fraction_above_the_usual_range_is_called_unusual() -> None:
    finding = found(lived(HEALTHY, reserve=14.0), "memory_reserve_too_large")
    assert finding is not None
    assert finding.advice[0].suggested == 0.94
    assert "more than the usual 0.7 to 0.9" in finding.advice[0].gain


def test_a_memory_fraction_in_the_usual_range_is_not() -> None:
    finding = found(lived(HEALTHY, reserve=14.0, mem_fraction_static=0.75), "memory_reserve_too_large")
    assert finding is not None
    assert "usual" not in finding.advice[0].gain


def test_a_compile_cache_can_be_shared() -> None:
    weights: Story = [(0.0, Memory(None, NO_RANK, "weights", used_gb=10.0))]
    finding = found(
        lived([*weights, *decoding(0.0, END, running=8)], enable_torch_compile=False), "torch_compile_candidate"
    )
    assert finding is not None
    assert "TORCHINDUCTOR_CACHE_DIR" in finding.advice[0].cost


@pytest.mark.parametrize("row", [SETTINGS, ROUTER, PREFILL_GRAPHS])
def test_chances_have_no_alert_and_are_in_no_combined_command_line(row: str) -> None:
    assert BY_ID[row].is_chance
    assert BY_ID[row].alert == ""
