"""Flags that differ from SGLang's defaults: advised first where they explain a finding, listed where nothing else does."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scenarios import Story, decoding, prefilling, repeated, retraction, started
from sglang_tuning_exporter.diagnosis.advice import Advice
from sglang_tuning_exporter.diagnosis.command import command_line
from sglang_tuning_exporter.diagnosis.evidence import Past, past_of
from sglang_tuning_exporter.diagnosis.findings import judge
from sglang_tuning_exporter.diagnosis.suspect_flags import SUSPECTS
from sglang_tuning_exporter.diagnosis.suspect_proofs import empty_page_share
from sglang_tuning_exporter.diagnosis.suspects import suspects, troubles, waits_beside_room
from sglang_tuning_exporter.diagnosis.table import BY_ID
from sglang_tuning_exporter.sglang.args.flags import flag_of, releases
from sglang_tuning_exporter.sglang.events import NO_RANK, PrefillBatch, RankFigures, Rejection, Scrape
from sglang_tuning_exporter.sglang.metrics.histograms import Histogram
from sglang_tuning_exporter.state.latency import RecentLatency
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.server import ServerState
from test_demand import MINUTE, POOL, balanced

END = 200.0
NAMED = "flags_away_from_defaults"
# Six prefixes of 1,200 tokens, each request with one of them; the radix cache off. Measured on a real engine: the KV cache doubled
# three times gave 494 to 691 tokens per CPU second, the radix cache alone 1,035.
FULL = decoding(0.0, END, running=20, queued=30, usage=0.95)


def lived(story: Story, profile: str = "online", prompt: int = 0, **args: Any) -> Past:
    """The past after a story; `prompt` is the mean length of the prompts, 0 where it is unknown."""
    state = ServerState(PROFILES[profile], 0.0)
    for at, what in sorted(started(model_path="/models/llama", **args) + story, key=lambda pair: pair[0]):
        if isinstance(what, Scrape):
            state.observe_scrape(what, at)
        else:
            state.observe(what, at)  # type: ignore[arg-type]  # the rest are events here
    state.advance(END)
    if prompt:
        requests = 380.0
        tokens = dict.fromkeys(("computed_tokens", "finished_prompt_tokens"), requests * prompt)
        state.server_totals.counts.update(tokens, started_requests=requests, finished_requests=requests)
    return past_of(state, END)


def scrapes(first: float = 0.1, between: float = 0.01) -> Story:
    """Twenty requests every ten seconds, with latencies of so many seconds."""

    def histogram(seconds: float, count: float) -> Histogram:
        bounds = (0.05, 0.2, 1.0, 4.0, 20.0, inf)
        return Histogram(bounds, tuple(count * (bound >= seconds) for bound in bounds), count * seconds)

    return [
        (
            10.0 * step,
            Scrape(
                [RankFigures()],
                progress=1000.0 * step,
                time_to_first_token=histogram(first, 20.0 * step),
                inter_token=histogram(between, 20.0 * step),
            ),
        )
        for step in range(20)
    ]


def interrupted(gap: float, chunk: int) -> Past:
    """The past after decoding with interruptions by prompts of 2,000 tokens; the first token takes half a second."""
    story = decoding(0.0, END, running=12) + scrapes(first=0.5)
    # The last argument exists from 0.5.19 on.
    past = lived(story, prompt=2000, chunked_prefill_size=chunk, prefill_decode_interval=0)
    gaps = RecentLatency(20_000.0, 1_400.0, 2.0 * gap, gap, 0.5, gap)
    return replace(past, latency={**past.latency, "inter_token": gaps})


def advice_of(past: Past, row: str) -> list[Advice]:
    return [each for finding in judge(past).findings if finding.diagnosis.id == row for each in finding.advice]


def first_flag(past: Past, row: str) -> str:
    return next((each.flag for each in advice_of(past, row)), "none")


def named(past: Past) -> set[str]:
    return {each.suspect.arg for each in suspects(past, troubles(past))}


def ids(past: Past) -> set[str]:
    return {finding.diagnosis.id for finding in judge(past).findings}


def test_a_full_kv_cache_without_radix_cache_names_the_radix_cache_before_a_larger_pool() -> None:
    story = decoding(0.0, END, running=100, queued=30, usage=0.95) + scrapes()
    args: dict[str, Any] = {"max_running_requests": 512, "max_total_tokens": 400_000}
    past = lived(story, prompt=1200, disable_radix_cache=True, **args)
    flags = [each.flag for each in advice_of(past, "running_far_below_limit")]
    assert flags[0] == "--disable-radix-cache"
    assert "--max-total-tokens" in flags
    [first] = [each for each in advice_of(past, "running_far_below_limit") if each.arg == "disable_radix_cache"]
    assert "If prompts share prefixes" in first.why
    assert first.suggestion == "start without it"


def test_late_first_tokens_have_the_flag_that_cures_before_fewer_requests() -> None:
    story = decoding(0.0, END, running=100, queued=30, usage=0.95) + scrapes(first=3.0)
    past = lived(story, prompt=1200, disable_radix_cache=True, max_running_requests=512)
    judgement = judge(past)
    flags = [each.flag for finding in judgement.findings for each in finding.advice]
    assert flags[0] == "--disable-radix-cache"
    assert judgement.changes["disable_radix_cache"] is False


def test_the_log_alone_names_the_same_flag() -> None:
    assert first_flag(lived(FULL, disable_radix_cache=True), "running_far_below_limit") == "--disable-radix-cache"


def test_the_radix_cache_is_named_first_in_a_profile_for_throughput_too() -> None:
    story = decoding(0.0, END, running=20, queued=300, usage=0.95)
    past = lived(story, "offline", disable_radix_cache=True)
    assert first_flag(past, "running_far_below_limit") == "--disable-radix-cache"


def test_full_prefill_batches_without_radix_cache_name_it_before_a_larger_chunk() -> None:
    past = lived(prefilling(0.0, END, queued=200), disable_radix_cache=True)
    assert first_flag(past, "prefill_bound") == "--disable-radix-cache"


def test_short_prompts_have_no_prefix_worth_a_cache() -> None:
    past = lived(FULL + scrapes(), prompt=20, disable_radix_cache=True)
    assert first_flag(past, "running_far_below_limit") != "--disable-radix-cache"


def test_prompts_that_are_a_small_part_of_the_kv_cache_do_not_fill_it() -> None:
    past = lived(FULL + scrapes(), prompt=1000, disable_radix_cache=True)  # of 19,000 tokens that each request holds
    assert first_flag(past, "running_far_below_limit") != "--disable-radix-cache"


@pytest.mark.parametrize(
    "args",
    [{"disable_radix_cache": False}, {"disaggregation_mode": "decode"}, {"is_embedding": True}, {"enable_mis": True}],
)
def test_a_radix_cache_that_is_on_or_that_sglang_switches_off_itself_is_not_named(args: dict[str, Any]) -> None:
    past = lived(FULL, **{"disable_radix_cache": True, **args})
    assert "--disable-radix-cache" not in {each.flag for row in ids(past) for each in advice_of(past, row)}


def test_a_healthy_server_without_radix_cache_gets_no_advice() -> None:
    past = lived(decoding(0.0, END, running=20), disable_radix_cache=True)
    assert judge(past).verdict == "healthy"
    assert ids(past) == set()


def test_a_tiny_prefill_limit_is_what_fills_the_batches_and_not_the_chunk() -> None:
    past = lived(prefilling(0.0, END, tokens=8000, queued=200), max_prefill_tokens=512)
    [advice] = advice_of(past, "prefill_bound")
    assert (advice.flag, advice.current, advice.suggested) == ("--max-prefill-tokens", 512.0, 16384.0)
    assert advice.direction == "raise"


def test_a_prefill_limit_below_the_prompts_explains_a_wait_with_room() -> None:
    # One prompt fills each batch, and the KV cache has room: lowering conservativeness would change nothing.
    line = PrefillBatch(None, NO_RANK, 1, 1100, 0, 4, 20, 0, 0.3)
    past = lived(repeated(line, 10.0, end=END) + scrapes(), prompt=1100, max_prefill_tokens=256)
    flags = {each.flag for row in ids(past) for each in advice_of(past, row)}
    assert "--schedule-conservativeness" not in flags


def test_a_prefill_limit_that_a_chunk_does_not_reach_is_not_named() -> None:
    past = lived(prefilling(0.0, END, queued=200), max_prefill_tokens=8192)
    assert first_flag(past, "prefill_bound") == "--chunked-prefill-size"


@pytest.mark.parametrize(("chunk", "suggested"), [(128, 1024.0), (256, 1024.0), (512, 1024.0), (1024, 4096.0)])
def test_a_very_small_chunk_is_raised_step_by_step(chunk: int, suggested: float) -> None:
    # Measured on a real engine: 256 gives 593 tokens per CPU second, 1,024 gives 813, and 4,096 less again.
    past = lived(prefilling(0.0, END, tokens=chunk, queued=200), chunked_prefill_size=chunk)
    advised = [each for each in advice_of(past, "prefill_bound") if each.arg == "chunked_prefill_size"]
    assert [each.suggested for each in advised] == [suggested]


def test_a_small_chunk_under_dp_attention_is_counted_for_each_rank() -> None:
    # SGLang prints the flag divided by the ranks: 8 x 128.
    args: dict[str, Any] = {"enable_dp_attention": True, "dp_size": 8, "tp_size": 8, "schedule_conservativeness": 0.3}
    past = lived(prefilling(0.0, END, tokens=128, queued=200), chunked_prefill_size=128, **args)
    [advice] = [each for each in advice_of(past, "prefill_bound") if each.arg == "chunked_prefill_size"]
    assert (advice.current, advice.suggested) == (1024.0, 8192.0)


def test_long_prompts_without_chunks_make_every_token_late() -> None:
    story = decoding(0.0, END, running=20) + scrapes(between=0.3)
    advised = advice_of(lived(story, prompt=6000, chunked_prefill_size=-1), "latency_batch_too_large")
    assert (advised[0].flag, advised[0].suggested) == ("--chunked-prefill-size", 4096.0)


def test_short_prompts_without_chunks_do_not() -> None:
    story = decoding(0.0, END, running=20) + scrapes(between=0.3)
    flags = {
        each.flag for each in advice_of(lived(story, prompt=100, chunked_prefill_size=-1), "latency_batch_too_large")
    }
    assert "--chunked-prefill-size" not in flags


@pytest.mark.parametrize("usage", [0.8, 0.95])
def test_large_pages_with_small_requests_are_mostly_empty(usage: float) -> None:
    story = decoding(0.0, END, running=20, queued=30, usage=usage) + scrapes()
    past = lived(story, prompt=70, page_size=512)
    flags = {(each.flag, each.suggested) for row in ids(past) for each in advice_of(past, row)}
    assert ("--page-size", 1.0) in flags or ("--page-size", 16.0) in flags
    assert "--schedule-conservativeness" not in {flag for flag, _ in flags}
    [advice] = [each for row in ids(past) for each in advice_of(past, row) if each.arg == "page_size"]
    assert "86 % of the KV cache is empty space" in advice.gain


def test_large_pages_with_large_requests_are_well_filled() -> None:
    past = lived(FULL + scrapes(), prompt=6000, page_size=512)
    assert "--page-size" not in {each.flag for row in ids(past) for each in advice_of(past, row)}


@pytest.mark.parametrize("backend", ["flashmla", "cutlass_mla", "trtllm_mla"])
def test_pages_that_the_attention_backend_needs_are_not_named(backend: str) -> None:
    past = lived(FULL + scrapes(), prompt=70, page_size=128, attention_backend=backend)
    assert "--page-size" not in {each.flag for row in ids(past) for each in advice_of(past, row)}


def test_adapters_that_share_too_few_slots_hold_requests_back() -> None:
    story = decoding(0.0, END, running=20, queued=30)
    adapters = {f"a{number}": f"/adapters/{number}" for number in range(6)}
    past = lived(story, enable_lora=True, lora_paths=adapters, max_loras_per_batch=2)
    advised = {(each.flag, each.suggested) for row in ids(past) for each in advice_of(past, row)}
    assert ("--max-loras-per-batch", 7.0) in advised
    assert "--schedule-conservativeness" not in {flag for flag, _ in advised}


def test_graphs_without_padding_are_why_small_batches_have_none() -> None:
    past = lived(decoding(0.0, END, running=20, graph=False), disable_cuda_graph_padding=True)
    [advice] = advice_of(past, "cuda_graph_off")
    assert (advice.flag, advice.direction) == ("--disable-cuda-graph-padding", "drop")


def test_a_short_queue_limit_is_named_where_it_alone_rejects() -> None:
    story = decoding(0.0, END, running=20) + repeated(Rejection(None, NO_RANK), 15.0, end=END)
    advised = advice_of(lived(story, max_queued_requests=4), "requests_rejected")
    assert (advised[0].flag, advised[0].suggested) == ("--max-queued-requests", 16.0)


def test_where_only_bursts_are_refused_no_advice_is_to_send_fewer_or_more_requests() -> None:
    story = decoding(0.0, END, running=20) + repeated(Rejection(None, NO_RANK), 15.0, end=END)
    past = lived(story, "offline", max_queued_requests=4)
    assert [each.flag for each in advice_of(past, "requests_rejected")] == ["--max-queued-requests"]
    assert "client_too_slow" not in ids(past)


# Four of 32 requests run in an almost empty pool: one starts at a time, and the next one seventeen steps later.
SLOW_STARTS = decoding(0.0, END, running=4, queued=28, usage=0.02)


def test_a_flag_with_a_value_and_no_default_is_taken_off_the_command_line() -> None:
    past = lived(SLOW_STARTS + scrapes(first=3.0), prefill_max_requests=1, prefill_decode_interval=16)
    advised = advice_of(past, "latency_queue")
    assert [each.typed for each in advised] == ["remove --prefill-max-requests", "--prefill-decode-interval 0"]
    command = command_line(past.facts, judge(past).changes)
    assert command is not None
    assert "--prefill-max-requests" not in command.text
    assert command.text.endswith("--prefill-decode-interval 0")
    changes = {(change.flag, change.old, change.new) for change in command.changes}
    assert ("--prefill-max-requests", "1", "not set") in changes


@pytest.mark.parametrize(
    ("interval", "profile", "named"),
    [(17, "online", False), (18, "online", True), (17, "offline", True)],
)
def test_decode_steps_between_long_prompts_are_kept_where_the_objective_needs_them(
    interval: int, profile: str, *, named: bool
) -> None:
    past = lived(SLOW_STARTS + scrapes(), profile, prompt=3000, prefill_decode_interval=interval)
    flags = [each.flag for row in judge(past).findings for each in row.advice]
    assert ("--prefill-decode-interval" in flags) is named


def test_full_prefill_batches_that_decode_steps_delay_name_the_interval_and_no_larger_chunk() -> None:
    """On a real 0.5.23 a chunk twice as large left the median first token at 1.5 s; without the interval it took 0.07 s."""
    past = lived(prefilling(0.0, END) + scrapes(), prompt=300, prefill_decode_interval=200)
    advice = [(each.flag, each.suggested) for each in advice_of(past, "prefill_bound")]
    assert advice == [("--prefill-decode-interval", 0.0)]


def test_where_prefill_takes_most_of_the_time_the_interval_is_not_what_fills_prefill_batches() -> None:
    """Most gaps between tokens are short, and the mean is four times as long."""
    gaps = Histogram((0.05, 1.0, inf), (90.0, 100.0, 100.0), 20.0)
    more = Histogram((0.05, 1.0, inf), (1890.0, 2100.0, 2100.0), 420.0)
    seen: Story = [(5.0, Scrape([RankFigures()], progress=1.0, inter_token=gaps))]
    seen.append((END - 5.0, Scrape([RankFigures()], progress=2.0, inter_token=more)))
    past = lived(prefilling(0.0, END) + seen, prefill_decode_interval=20)
    assert first_flag(past, "prefill_bound") == "--chunked-prefill-size"


@pytest.mark.parametrize("profile", ["online", "offline"])
def test_requests_that_wait_although_the_kv_cache_has_room_are_not_healthy_and_not_put_down_to_conservativeness(
    profile: str,
) -> None:
    past = lived(SLOW_STARTS + scrapes(), profile, prefill_decode_interval=16)
    assert judge(past).verdict == "no_clear_bottleneck"
    assert [each.flag for each in advice_of(past, NAMED)] == ["--prefill-decode-interval"]
    assert "admission_too_conservative" not in ids(past)


@pytest.mark.parametrize(
    ("running", "usage", "more"),
    [(62, 0.5, {}), (4, 0.95, {}), (4, 0.02, {"enable_lora": True, "lora_paths": ["a"]})],
    ids=["at the running limit", "no room", "adapters as well"],
)
def test_how_requests_start_is_not_the_limit_where_something_else_may_be(
    running: int, usage: float, more: dict[str, Any]
) -> None:
    story = decoding(0.0, END, running=running, queued=28, usage=usage) + scrapes()
    assert not waits_beside_room(lived(story, "offline", prefill_max_requests=1, **more))


@pytest.mark.parametrize(
    ("requests", "tokens", "full"),
    [(1, 60, False), (8, 60, True), (1, 64, True), (None, 60, True)],
    ids=["its request has ended it", "its tokens have", "a prompt goes on", "no limit of requests"],
)
def test_a_prefill_batch_that_a_limit_of_requests_has_ended_is_not_full(
    requests: int | None,
    tokens: int,
    full: bool,  # noqa: FBT001 - a parameter
) -> None:
    args: dict[str, Any] = {
        "chunked_prefill_size": 64,
        **({} if requests is None else {"prefill_max_requests": requests}),
    }
    past = lived(prefilling(0.0, END, tokens=tokens), **args)
    assert ((past.recent.share("admission", "prefill_bound") or 0.0) > 0.5) is full


def test_a_short_queue_limit_is_not_named_while_the_running_limit_holds_requests_back() -> None:
    story = decoding(0.0, END, running=64, queued=4, usage=0.03) + repeated(Rejection(None, NO_RANK), 15.0, end=END)
    past = lived(story, max_queued_requests=4)
    assert "--max-queued-requests" not in {each.flag for each in advice_of(past, "requests_rejected")}


def test_where_nothing_explains_late_tokens_the_flags_that_were_set_are_named() -> None:
    story = decoding(0.0, END, running=6) + scrapes(between=0.3)
    args: dict[str, Any] = {
        "disable_overlap_schedule": True,
        "log_level": "debug",
        "stream_interval": 50,
    }
    advised = advice_of(lived(story, **args), NAMED)
    assert [each.flag for each in advised] == [
        "--disable-overlap-schedule",
        "--stream-interval",
        "--log-level",
    ]
    assert [each.suggestion for each in advised] == ["start without it", "1", "info"]


def test_they_are_named_beside_a_batch_that_is_too_large() -> None:
    story = decoding(0.0, END, running=40) + scrapes(between=0.3)
    past = lived(story, disable_overlap_schedule=True)
    assert {"latency_batch_too_large", NAMED} <= ids(past)


def test_three_at_most_are_named() -> None:
    story = decoding(0.0, END, running=6) + scrapes(between=0.3)
    args: dict[str, Any] = {
        suspect.arg: True for suspect in SUSPECTS if suspect.is_switch and "tokens" in suspect.troubles
    }
    assert len(advice_of(lived(story, **args), NAMED)) == 3


def test_a_chance_is_in_no_combined_command_line_and_has_no_alert() -> None:
    story = decoding(0.0, END, running=6) + scrapes(between=0.3)
    judgement = judge(lived(story, disable_overlap_schedule=True))
    assert NAMED in {finding.diagnosis.id for finding in judgement.findings}
    assert "disable_overlap_schedule" not in judgement.changes
    assert BY_ID[NAMED].is_chance
    assert BY_ID[NAMED].alert == ""


def test_a_healthy_server_gets_no_advice_about_its_flags() -> None:
    args: dict[str, Any] = {suspect.arg: True for suspect in SUSPECTS if suspect.is_switch and not suspect.proof}
    past = lived(decoding(0.0, END, running=6) + scrapes(), **args)
    assert NAMED not in ids(past)


def test_nothing_is_named_where_a_limit_with_a_flag_explains_the_wait() -> None:
    past = lived(decoding(0.0, END, running=64, queued=30), disable_overlap_schedule=True)
    assert "running_at_limit" in ids(past)
    assert NAMED not in ids(past)


def test_a_server_with_default_flags_gets_no_such_advice() -> None:
    past = lived(FULL + scrapes(), prompt=1200)
    assert suspects(past, troubles(past)) == ()


def test_a_value_that_sglang_sets_by_itself_is_not_named() -> None:
    story = decoding(0.0, END, running=6) + scrapes(between=0.3)
    past = lived(story, disable_overlap_schedule=True, speculative_algorithm="EAGLE")
    assert "--disable-overlap-schedule" not in {each.flag for each in advice_of(past, NAMED)}


WAITING = decoding(0.0, END, running=20, queued=6000, usage=0.5)


@pytest.mark.parametrize(
    ("usage", "flags"),
    [(0.8, ["--page-size"]), (0.3, ["--max-running-requests"])],
    ids=["no room for more", "room"],
)
def test_mostly_empty_pages_are_named_where_usage_prevents_a_higher_running_limit(
    usage: float, flags: list[str]
) -> None:
    story = decoding(0.0, END, running=23, queued=17, usage=usage) + scrapes()
    past = lived(story, "offline", prompt=300, max_running_requests=23, page_size=256)
    assert [each.flag for finding in judge(past).findings for each in finding.advice] == flags


def test_a_value_that_the_guide_advises_against_retractions_is_not_named() -> None:
    # Seen on a real engine: 1.3 for its retractions, 1.0 because requests waited, 1.3 again.
    assert "schedule_conservativeness" not in named(lived(WAITING, "offline", schedule_conservativeness=1.3))


def test_a_conservativeness_far_above_the_guides_is_named_where_nothing_is_retracted() -> None:
    assert "schedule_conservativeness" in named(lived(WAITING, "offline", schedule_conservativeness=3))
    retracted = WAITING + repeated(retraction(), 60.0, end=END)
    assert "schedule_conservativeness" not in named(lived(retracted, "offline", schedule_conservativeness=3))


@pytest.mark.parametrize(
    ("used", "conservativeness", "suggested"),
    [(400, 1.3, [2 * POOL]), (60, 1.3, []), (400, 3.0, [])],
    ids=["they use what they ask for", "they end early", "more is kept free than they use"],
)
def test_a_capped_pool_that_is_promised_to_those_that_run_is_named(
    used: float, conservativeness: float, suggested: list[float]
) -> None:
    past = balanced(asked=600, used=used, ratio=0.3, conservativeness=conservativeness)
    past.recent.seconds["admission", "held_back"] = MINUTE
    past.recent.counts["observations"] = 60
    printed = {**past.facts.args, "model_path": "m", "max_total_tokens": POOL}
    facts = replace(past.facts, version="0.5.23", args=printed)
    found = suspects(replace(past, facts=facts), troubles(past))
    assert [each.suggested for each in found if each.suspect.arg == "max_total_tokens" and each.rows] == suggested


def test_large_pages_are_blamed_for_retractions_before_conservativeness() -> None:
    story = decoding(0.0, END, running=20, usage=0.97) + scrapes() + repeated(retraction(), 15.0, end=END)
    assert first_flag(lived(story, prompt=70, page_size=512), "retracting_too_often") == "--page-size"


def test_each_suspect_is_a_flag_of_some_release_and_says_why_and_when_it_will_not_help() -> None:
    for suspect in SUSPECTS:
        assert any(flag_of(suspect.arg, release) for release in releases()), suspect.arg
        assert suspect.why.endswith(".")
        assert suspect.will_not_help_if
        assert suspect.source.startswith("srt/")
        assert suspect.troubles


def test_no_default_of_any_release_is_a_suspect() -> None:
    for suspect in SUSPECTS:
        for release in releases():
            flag = flag_of(suspect.arg, release)
            assert flag is None or not suspect.is_suspicious(flag.default), (suspect.arg, release)


def test_dropping_a_suspect_takes_its_flag_out_of_the_command_line() -> None:
    past = lived(FULL, disable_radix_cache=True)
    command = command_line(past.facts, {"disable_radix_cache": False})
    assert command is not None
    assert "--disable-radix-cache" not in command.text


@given(st.sampled_from([1, 16, 64, 512]), st.floats(1, 100_000))
def test_empty_space_in_pages_is_a_share_below_one_page(page: int, request: float) -> None:
    share = empty_page_share(page, request)
    assert 0.0 <= share < 1.0
    assert share * (request / (1 - share)) <= page + 1e-6


def test_a_past_with_too_little_load_names_nothing() -> None:
    past = lived(decoding(0.0, 15.0, running=6, queued=30), disable_overlap_schedule=True)
    assert judge(replace(past, watched_seconds=15.0)).findings == ()


def test_a_flag_is_named_as_a_chance_before_its_trouble_is_most_of_the_time() -> None:
    # Seen on a real engine: prompts of 2,000 tokens at --max-prefill-tokens 256, computed one by one for 39 % of the time.
    story = decoding(0.0, 120.0, running=16) + prefilling(120.0, END, tokens=2000, queued=7) + scrapes()
    past = lived(story, prompt=2000, max_prefill_tokens=256)
    assert judge(past).verdict == "no_clear_bottleneck"
    [advice] = advice_of(past, NAMED)
    assert (advice.flag, advice.suggested) == ("--max-prefill-tokens", 16384.0)


def test_a_limit_on_the_kv_cache_is_no_suspect_for_full_prefill_batches() -> None:
    story = decoding(0.0, 120.0, running=16) + prefilling(120.0, END, queued=7)
    assert advice_of(lived(story, max_total_tokens=400_000), NAMED) == []


def test_late_first_tokens_name_no_flag_before_there_is_load_enough_to_judge() -> None:
    past = lived(decoding(0.0, 15.0, running=16) + scrapes(first=9.0), prompt=2000, chunked_prefill_size=256)
    assert ids(past) == set()


def test_late_first_tokens_name_a_small_chunk() -> None:
    past = lived(decoding(0.0, END, running=16) + scrapes(first=9.0), prompt=2000, chunked_prefill_size=256)
    assert first_flag(past, "latency_long_prompts") == "--chunked-prefill-size"


def test_prompts_are_measured_in_the_log_alone() -> None:
    # 48 requests of 40 tokens in pages of 512, as the log alone has them.
    line = PrefillBatch(None, NO_RANK, 2, 80, 0, 30, 18, 0, 0.95)
    story = repeated(line, 10.0, end=END) + decoding(0.0, END, running=30, queued=18, usage=0.95, every=9.0)
    past = lived(story, page_size=512, max_running_requests=512)
    assert {each.flag for row in ids(past) for each in advice_of(past, row)} == {"--page-size"}


def test_a_larger_pool_is_not_advised_while_its_pages_are_empty() -> None:
    past = lived(FULL + scrapes(), prompt=70, page_size=512, max_total_tokens=400_000)
    assert "--max-total-tokens" not in {each.flag for row in ids(past) for each in advice_of(past, row)}


@pytest.mark.parametrize("profile", ["online", "offline"])
def test_a_capped_pool_is_raised_before_anybody_is_asked_for_fewer_requests(profile: str) -> None:
    # Three prompts of 1,100 tokens fit in --max-total-tokens 4200, and 21 wait.
    story = decoding(0.0, END, running=3, queued=2100, usage=0.95) + scrapes(first=9.0)
    advised = advice_of(lived(story, profile, max_total_tokens=400_000), "queue_too_long")
    assert [each.flag for each in advised] == ["--max-total-tokens", ""]
    assert advised[0].suggested == 800_000


@pytest.mark.parametrize(
    ("conservativeness", "every", "named"), [(3.0, 15.0, True), (1.3, 15.0, True), (3.0, inf, False)]
)
def test_a_capped_pool_is_named_where_requests_wait_and_are_retracted_with_the_flag_at_its_highest(
    conservativeness: float, every: float, *, named: bool
) -> None:
    # As on a real engine: --max-total-tokens 3000 and --schedule-conservativeness 3, 4 % of the requests retracted.
    story = decoding(0.0, END, running=12, queued=17, usage=0.74) + scrapes(first=3.0)
    story += repeated(retraction(), every, end=END) if every < END else []
    past = lived(story, prompt=90, max_total_tokens=400_000, schedule_conservativeness=conservativeness)
    assert (first_flag(past, "latency_queue") == "--max-total-tokens") is named


def test_a_pool_that_memory_limits_is_not_raised_by_its_cap() -> None:
    story = decoding(0.0, END, running=3, queued=2100, usage=0.95)
    advised = advice_of(lived(story, max_total_tokens=900_000), "queue_too_long")
    assert [each.flag for each in advised] == [""]


def test_late_tokens_between_small_chunks_are_not_put_down_to_the_batch() -> None:
    # Seen on a real engine: prompts of 2,000 tokens in chunks of 256, with first tokens and tokens late.
    story = decoding(0.0, END, running=12) + scrapes(first=9.0, between=0.3)
    advised = advice_of(lived(story, prompt=2000, chunked_prefill_size=256), "latency_batch_too_large")
    assert [(each.flag, each.suggested) for each in advised] == [("--chunked-prefill-size", 1024.0)]


@pytest.mark.parametrize(("chunk", "suggested"), [(64, [1024.0]), (512, []), (2048, [])])
def test_late_tokens_alone_name_a_chunk_only_where_a_larger_one_takes_no_longer(
    chunk: int, suggested: list[float]
) -> None:
    # Seen on a real engine: chunks of 64 tokens 469 tokens/s, of 1,024 764, decode steps between chunks of 64 only 305.
    story = decoding(0.0, END, running=10) + scrapes(between=0.3)
    past = lived(story, prompt=840, chunked_prefill_size=chunk)
    found = [each for each in suspects(past, troubles(past)) if "latency_prefill_between" in each.rows]
    assert [each.suggested for each in found] == suggested


def test_late_tokens_between_small_chunks_are_no_reason_for_more_decode_steps_between_them() -> None:
    # Seen on a real engine: chunks of 64 and 17 decode steps after each gave a first token after 2.8 s in place of 0.14 s,
    # chunks of 1,024 after 0.06 s.
    past = interrupted(gap=0.013, chunk=64)
    assert [(each.flag, each.suggested) for each in advice_of(past, "latency_prefill_between")] == [
        ("--chunked-prefill-size", 1024.0)
    ]


def test_decode_steps_between_chunks_are_advised_only_where_first_tokens_stay_in_time() -> None:
    assert first_flag(interrupted(gap=0.013, chunk=4096), "latency_prefill_between") == "--prefill-decode-interval"
    # Seen on a real engine: mixed chunks of 512 in place of 4,096 took the first token from 0.87 s to 2.63 s.
    assert first_flag(interrupted(gap=0.09, chunk=4096), "latency_prefill_between") == ""


def test_late_tokens_between_small_prefill_batches_are_not_put_down_to_the_batch() -> None:
    # Seen on a real engine: three prompts of 120 tokens in each prefill batch, and 30 waiting.
    story = decoding(0.0, END, running=60) + scrapes(between=0.3)
    advised = advice_of(lived(story, prompt=120, max_prefill_tokens=256), "latency_batch_too_large")
    assert [(each.flag, each.suggested) for each in advised] == [("--max-prefill-tokens", 16384.0)]


def test_late_tokens_beside_prefill_batches_of_many_prompts_are_put_down_to_the_batch() -> None:
    story = decoding(0.0, END, running=60) + scrapes(between=0.3)
    advised = advice_of(lived(story, prompt=120, max_prefill_tokens=4096), "latency_batch_too_large")
    assert [each.flag for each in advised] == ["--max-running-requests"]


def test_every_row_that_would_ask_for_fewer_requests_has_the_flag_that_cures() -> None:
    story = decoding(0.0, END, running=100, queued=2100, usage=0.95) + scrapes(first=9.0)
    past = lived(story, prompt=70, page_size=512, max_running_requests=512)
    assert {"queue_too_long", "latency_queue"} <= ids(past)
    assert first_flag(past, "queue_too_long") == first_flag(past, "latency_queue") == "--page-size"


def test_late_tokens_of_a_large_batch_are_put_down_to_the_batch() -> None:
    story = decoding(0.0, END, running=40) + scrapes(between=0.3)
    advised = advice_of(lived(story, prompt=2000), "latency_batch_too_large")
    assert [each.flag for each in advised] == ["--max-running-requests"]


def test_a_server_that_computes_prompts_all_the_time_is_not_called_slow_for_its_batch() -> None:
    past = lived(prefilling(0.0, END, queued=200) + scrapes(between=0.3))
    assert "prefill_bound" in ids(past)
    assert "latency_batch_too_large" not in ids(past)


@pytest.mark.parametrize(("args", "named"), [({}, True), ({"device": "npu"}, False), ({"nnodes": 2}, False)])
def test_sglangs_own_all_reduce_is_missed_only_where_it_exists(args: dict[str, Any], named: bool) -> None:  # noqa: FBT001 - a case
    story = decoding(0.0, END, running=4) + scrapes(between=0.5)
    past = lived(story, tp_size=8, disable_custom_all_reduce=True, **args)
    flags = {each.flag for row in ids(past) for each in advice_of(past, row)}
    assert ("--disable-custom-all-reduce" in flags) is named
