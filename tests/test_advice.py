"""The advised flag, its present value and the value to try, for each diagnosis. Arguments are as the server prints them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tuning_exporter.diagnosis.advice import Advice, SizingInput, advise
from sglang_tuning_exporter.diagnosis.evidence import Past
from sglang_tuning_exporter.diagnosis.table import DIAGNOSES
from sglang_tuning_exporter.state.facts import ServerFacts
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.totals import Totals, batch_size_bucket

PROFILE = PROFILES["online"]


def case(
    *,
    usage: float | None = None,
    ran: float | None = None,
    limits: dict[int | None, float] | None = None,
    version: str | None = None,
    **args: object,
) -> SizingInput:
    recent = Totals()
    if usage is not None:
        recent.integrals.update(usage=100 * usage, usage_seconds=100.0)
    if ran is not None:
        recent.running_seconds[batch_size_bucket(ran)] = 100.0
    facts = ServerFacts(version=version, args=args, running_limits=limits or {})
    return SizingInput(Past(recent, {}, 600.0, facts, PROFILE))


def one(diagnosis: str, of: SizingInput) -> Advice:
    (advice,) = advise(diagnosis, of)
    return advice


def turned(diagnosis: str, of: SizingInput) -> tuple[str, float | str | None, float | str | None]:
    advice = one(diagnosis, of)
    return advice.flag, advice.current, advice.suggested


# Whether a server runs far below its limit cannot be said without the limit.
# Suspects and a profile's settings are flags of this server, so where nothing is known of it there are none.
@pytest.mark.parametrize(
    "diagnosis",
    [
        row.id
        for row in DIAGNOSES
        if row.id not in ("running_far_below_limit", "profile_settings") and not row.names_suspects
    ],
)
def test_every_diagnosis_gives_advice_even_without_facts_about_the_server(diagnosis: str) -> None:
    advice = one(diagnosis, case())
    assert advice.suggestion
    assert advice.why
    assert advice.will_not_help_if


@pytest.mark.parametrize("current", [0.1, 0.3, 1.0, 1.2])
def test_retractions_raise_conservativeness_to_1_3(current: float) -> None:
    advised = turned("retracting_too_often", case(schedule_conservativeness=current))
    assert advised == ("--schedule-conservativeness", current, 1.3)


@pytest.mark.parametrize("current", [1.3, 1.43, 1.5, 3.0])
def test_above_the_ceiling_fewer_running_requests_are_advised_instead(current: float) -> None:
    of = case(schedule_conservativeness=current, max_running_requests=64, ran=50)
    assert turned("retracting_too_often", of) == ("--max-running-requests", 64, 40)


@pytest.mark.parametrize("conservativeness", [1.3, 3.0])
def test_a_pool_that_is_full_at_peaks_only_is_no_reason_to_run_fewer(conservativeness: float) -> None:
    of = case(schedule_conservativeness=conservativeness, max_running_requests=64, ran=50, usage=0.55)
    assert one("retracting_too_often", of).flag == ""
    full = case(schedule_conservativeness=conservativeness, max_running_requests=64, ran=50, usage=0.95)
    assert turned("retracting_too_often", full) == ("--max-running-requests", 64, 40)


@pytest.mark.parametrize(("started", "flag"), [(100.0, "--max-running-requests"), (1000.0, "")])
def test_fewer_running_requests_are_advised_only_where_retractions_undo_much_of_the_work(
    started: float, flag: str
) -> None:
    # Seen on a real engine: five retractions among eight hundred requests a minute, and nine at once in place of thirteen.
    of = case(schedule_conservativeness=1.3, max_running_requests=64, ran=50, usage=0.95)
    of.recent.counts["retraction_events"] = 100.0
    of.recent.seconds["activity", "serving"] = 100.0
    of.recent.counts["started_requests"] = started
    assert one("retracting_too_often", of).flag == flag


def test_a_limit_lowered_because_of_retractions_is_not_raised_again_for_the_room_it_left() -> None:
    of = case(schedule_conservativeness=1.3, max_running_requests=64, ran=64, usage=0.9)
    _, _, lowered = turned("retracting_too_often", of)
    assert lowered == 51
    assert advise("running_at_limit", case(max_running_requests=lowered, usage=0.9 * 51 / 64)) == []


def test_where_admission_is_mostly_recovering_no_fewer_retractions_are_promised() -> None:
    of = case(schedule_conservativeness=0.1)
    assert one("retracting_too_often", of).gain == ""
    of.recent.seconds.update({("admission", "recovering"): 75.0, ("admission", "held_back"): 25.0})
    assert "75 %" in one("retracting_too_often", of).gain


def test_with_one_running_request_no_lower_limit_is_advised() -> None:
    assert advise("retracting_too_often", case(schedule_conservativeness=2.0, max_running_requests=1, ran=1)) == []


def test_dp_attention_multiplies_the_flag_by_0_3_and_prints_the_product() -> None:
    of = case(schedule_conservativeness=0.3, enable_dp_attention=True, dp_size=8)
    assert turned("retracting_too_often", of) == ("--schedule-conservativeness", 1.0, 4.33)


def test_under_dp_attention_the_default_is_already_at_0_3() -> None:
    of = case(schedule_conservativeness=0.3, enable_dp_attention=True)
    assert one("admission_too_conservative", of).flag == ""


def test_a_flag_that_was_raised_under_dp_attention_is_not_advised_again() -> None:
    of = case(schedule_conservativeness=1.299, enable_dp_attention=True, dp_size=2, max_running_requests=100, ran=40)
    assert turned("retracting_too_often", of) == ("--max-running-requests", 100, 64)


def test_an_admission_that_is_too_conservative_is_advised_0_3() -> None:
    of = case(schedule_conservativeness=1.0)
    assert turned("admission_too_conservative", of) == ("--schedule-conservativeness", 1.0, 0.3)


@pytest.mark.parametrize("current", [0.3, 0.1])
def test_at_or_below_0_3_the_requested_tokens_keep_the_kv_cache_free(current: float) -> None:
    advice = one("admission_too_conservative", case(schedule_conservativeness=current))
    assert (advice.flag, advice.suggested) == ("", None)
    assert "max_new_tokens" in advice.suggestion


@pytest.mark.parametrize(
    ("limit", "usage", "suggested"),
    [
        (2, 0.01, 16),  # no more than eightfold
        (100, 0.45, 200),
        (100, 0.6, 144),  # 150, in steps of 8
        (1000, 0.3, 2944),  # 3000, in steps of 64
    ],
)
def test_the_running_limit_is_raised_as_far_as_the_pool_has_room(limit: int, usage: float, suggested: int) -> None:
    of = case(max_running_requests=limit, usage=usage)
    assert turned("running_at_limit", of) == ("--max-running-requests", limit, suggested)


@given(st.integers(1, 5000), st.floats(0.001, 1.0))
def test_the_raised_limit_never_fills_the_pool_beyond_nine_tenths(limit: int, usage: float) -> None:
    for advice in advise("running_at_limit", case(max_running_requests=limit, usage=usage)):
        assert isinstance(advice.suggested, float)
        assert limit < advice.suggested <= 8 * limit
        assert usage * advice.suggested / limit <= 0.9 + 1e-9


@pytest.mark.parametrize("usage", [0.85, 0.9, 1.0])
def test_a_limit_is_not_raised_where_the_pool_has_no_room(usage: float) -> None:
    assert advise("running_at_limit", case(max_running_requests=16, usage=usage)) == []


def test_no_figure_is_invented_for_the_limit_where_usage_is_unknown() -> None:
    advice = one("running_at_limit", case(max_running_requests=64))
    assert (advice.suggested, advice.suggestion) == (
        None,
        "as far as token usage stays below 0.9, at most eight times the present value",
    )


def test_the_limit_that_the_server_found_by_itself_is_the_present_value() -> None:
    assert turned("running_at_limit", case(limits={None: 48}, usage=0.45)) == ("--max-running-requests", 48, 96)


def test_dp_attention_divides_the_limit_among_its_ranks() -> None:
    shared = case(limits={0: 32, 1: 32}, usage=0.45, dp_size=2, enable_dp_attention=True, max_running_requests=64)
    plain = case(limits={0: 64, 1: 64}, usage=0.45, dp_size=2, max_running_requests=64)
    assert (
        turned("running_at_limit", shared) == turned("running_at_limit", plain) == ("--max-running-requests", 64, 128)
    )


def test_a_limit_that_the_pool_cut_short_is_not_raised() -> None:
    assert advise("running_at_limit", case(max_running_requests=1000, limits={None: 300}, usage=0.4)) == []


def reserve(gigabytes: float, capacity: float | None = 80.0, *, fraction: float = 0.85) -> SizingInput:
    of = case(mem_fraction_static=fraction)
    of.facts.available_gb[None] = gigabytes
    of.facts.memory_before_weights_gb = capacity
    return of


@given(
    st.floats(0.5, 4.99) | st.floats(10.01, 40.0), st.floats(24.0, 288.0), st.integers(300, 900).map(lambda n: n / 1000)
)
def test_about_six_and_a_half_gb_remain_within_a_step_and_never_less(
    gigabytes: float, capacity: float, fraction: float
) -> None:
    name = "memory_reserve_too_large" if gigabytes > 10 else "memory_reserve_too_small"
    for advice in advise(name, reserve(gigabytes, capacity, fraction=fraction)):
        assert isinstance(advice.suggested, float)
        assert (advice.suggested > fraction) is (gigabytes > 10)
        assert advice.suggested == round(advice.suggested, 2)
        remains = gigabytes - (advice.suggested - fraction) * capacity
        if 0.1 < advice.suggested < 0.95:
            assert 6.5 - 1e-3 <= remains <= 6.5 + 0.01 * capacity + 1e-3


def test_the_fraction_for_a_reserve_too_large_is_computed_with_its_gain_in_tokens() -> None:
    of = reserve(14.5)
    of.facts.kv_pool_gb, of.facts.kv_pool_tokens[None] = 40.0, 400_000
    advice = one("memory_reserve_too_large", of)
    assert (advice.flag, advice.current, advice.suggested) == ("--mem-fraction-static", 0.85, 0.95)
    assert advice.gain.startswith("+8.0 GB for the KV cache: +80,000 tokens, +20 %; more than the usual 0.7 to 0.9")


def test_larger_graphs_that_are_advised_as_well_take_their_memory_before_the_kv_cache_does() -> None:
    of = reserve(14.5, fraction=0.8)
    of.recent.running_seconds[batch_size_bucket(300)] = 100.0
    of.facts.args["cuda_graph_max_bs"] = 160
    of.facts.graph_gb = 4.0
    alone = one("memory_reserve_too_large", of)
    beside = one("memory_reserve_too_large", replace(of, holding=frozenset({"cuda_graph_not_covering"})))
    assert (alone.suggested, beside.suggested) == (0.9, 0.85)  # graphs of 320 take 4 GB more of 80


def test_binary_fractions_do_not_lose_a_step() -> None:
    assert turned("memory_reserve_too_large", reserve(14.5, fraction=0.47))[2] == 0.57


@pytest.mark.parametrize(("gigabytes", "suggested"), [(12.0, 0.86), (4.0, 0.84)])
def test_without_the_capacity_a_step_of_0_01_is_advised(gigabytes: float, suggested: float) -> None:
    name = "memory_reserve_too_large" if gigabytes > 10 else "memory_reserve_too_small"
    advice = one(name, reserve(gigabytes, None))
    assert (advice.suggested, advice.gain) == (suggested, "")


@pytest.mark.parametrize("fraction", [0.95, 0.97])
def test_the_fraction_is_never_raised_beyond_0_95(fraction: float) -> None:
    assert advise("memory_reserve_too_large", reserve(15.0, fraction=fraction)) == []


@pytest.mark.parametrize(
    ("current", "suggested"), [(None, 4096), (-1, 4096), (16384, 4096), (8192, 4096), (4096, 2048), (3000, 2048)]
)
def test_a_failure_in_prefill_halves_the_chunk_to_4096_then_2048(current: int | None, suggested: int) -> None:
    of = case(chunked_prefill_size=current)
    assert turned("out_of_memory_prefill", of) == ("--chunked-prefill-size", current, suggested)


@pytest.mark.parametrize("current", [2048, 512])
def test_below_a_chunk_of_2048_the_memory_fraction_is_lowered(current: int) -> None:
    of = case(chunked_prefill_size=current, mem_fraction_static=0.88)
    assert turned("out_of_memory_prefill", of) == ("--mem-fraction-static", 0.88, 0.8)


@pytest.mark.parametrize(
    ("current", "suggested"), [(None, 0.8), (0.9, 0.8), (0.81, 0.8), (0.8, 0.7), (0.75, 0.7), (0.7, 0.65), (0.5, 0.45)]
)
def test_any_failure_lowers_the_memory_fraction_to_0_8_then_0_7(current: float | None, suggested: float) -> None:
    of = case(mem_fraction_static=current)
    assert turned("out_of_memory_any", of) == ("--mem-fraction-static", current, suggested)


@pytest.mark.parametrize(
    ("of", "suggested"),
    [
        (case(max_running_requests=64, ran=60), 45),
        (case(max_running_requests=64), 48),
        (case(limits={None: 40}, ran=100), 30),
        (case(max_running_requests=128, enable_dp_attention=True, dp_size=8, ran=10), 60),
    ],
)
def test_after_a_failure_in_decode_three_quarters_of_the_last_batch_are_advised(
    of: SizingInput, suggested: float
) -> None:
    assert one("out_of_memory_decode", of).suggested == suggested


def test_a_failure_in_decode_of_one_request_lowers_the_memory_fraction() -> None:
    of = case(max_running_requests=1, ran=1, mem_fraction_static=0.9)
    assert turned("out_of_memory_decode", of) == ("--mem-fraction-static", 0.9, 0.8)


@pytest.mark.parametrize(
    ("ran", "tp", "suggested"),
    [(161, 1, 192), (192, 1, 192), (200, 1, 224), (500, 1, 512), (600, 1, 640), (700, 8, 768)],
)
def test_graphs_grow_to_the_next_usual_size_with_a_cap(ran: int, tp: int, suggested: int) -> None:
    of = case(cuda_graph_max_bs=160, tp_size=tp, ran=ran)
    assert turned("cuda_graph_not_covering", of) == ("--cuda-graph-max-bs", 160, suggested)


@pytest.mark.parametrize("current", [512, 768, 800])
def test_beyond_the_largest_useful_graph_the_advice_is_that_none_larger_helps(current: int) -> None:
    advice = one("cuda_graph_not_covering", case(cuda_graph_max_bs=current, ran=1000))
    assert (advice.flag, advice.suggested) == ("", None)
    assert "up to 1000 requests" in advice.suggestion
    assert "768" in advice.suggestion


@pytest.mark.parametrize(
    ("version", "flag"),
    [
        ("0.4.9", "--cuda-graph-max-bs"),
        ("0.5.12", "--cuda-graph-max-bs"),
        ("0.5.14", "--cuda-graph-max-bs-decode"),
        ("0.5.23", "--cuda-graph-max-bs-decode"),
    ],
)
def test_the_graph_flag_is_spelled_for_the_servers_version(version: str, flag: str) -> None:
    assert one("cuda_graph_not_covering", case(version=version, ran=300)).flag == flag


def test_a_captured_size_found_by_the_server_is_the_present_value() -> None:
    of = case(cuda_graph_max_bs_decode=None, cuda_graph_config={"decode": {"max_bs": 256}}, ran=300)
    assert turned("cuda_graph_not_covering", of) == ("--cuda-graph-max-bs-decode", 256, 320)


@pytest.mark.parametrize("diagnosis", ["queue_too_long", "client_too_slow"])
def test_advice_to_people_names_no_flag(diagnosis: str) -> None:
    advice = one(diagnosis, case())
    assert (advice.flag, advice.arg, advice.suggested) == ("", "", None)


@pytest.mark.parametrize("conservativeness", [1.3, 3.0])
def test_a_pool_that_its_own_flag_keeps_small_is_made_larger(conservativeness: float) -> None:
    of = case(
        schedule_conservativeness=conservativeness, max_running_requests=64, ran=50, usage=0.95, max_total_tokens=8192
    )
    of.facts.kv_pool_tokens[None] = 8180.0
    assert turned("retracting_too_often", of) == ("--max-total-tokens", 8192, 16384)
    of.facts.kv_pool_tokens[None] = 5000.0  # no more fits into memory: the flag is not what limits it
    assert turned("retracting_too_often", of) == ("--max-running-requests", 64, 40)


@pytest.mark.parametrize(
    ("pool", "advised"),
    [(8180.0, ("--max-total-tokens", 8192, 16384)), (5000.0, ("--kv-cache-dtype", "auto", "fp8_e4m3"))],
)
def test_a_pool_that_is_full_long_before_the_limit_is_made_larger(pool: float, advised: tuple[object, ...]) -> None:
    of = case(version="0.5.9", max_running_requests=64, max_total_tokens=8192, kv_cache_dtype="auto")
    of.recent.integrals.update(running=100 * 12.0, running_seconds=100.0)
    of.facts.kv_pool_tokens[None] = pool
    assert turned("running_far_below_limit", of) == advised


@pytest.mark.parametrize(("prompt", "flag"), [(999.0, ""), (1001.0, "--max-running-requests")])
def test_fewer_running_requests_are_advised_only_where_computing_a_request_again_is_expensive(
    prompt: float, flag: str
) -> None:
    # Seen on a real engine: four retractions for each request, prompts of 24 tokens, and a tenth of the throughput lost by 8 in place of 11.
    of = case(schedule_conservativeness=1.6, max_running_requests=64, ran=50, usage=0.95)
    of.recent.counts.update(retraction_events=400.0, computed_tokens=100 * prompt, started_requests=100.0)
    of.recent.seconds["activity", "serving"] = 100.0
    assert one("conservativeness_ineffective", of).flag == flag
