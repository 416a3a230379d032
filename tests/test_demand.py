"""How many of the requested tokens requests use; a low conservativeness is advised only where they end early."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_tuning_exporter.diagnosis.advice import SizingInput, advise
from sglang_tuning_exporter.diagnosis.demand import could_not_reserve, demand, is_reserved_in_full, is_used_later
from sglang_tuning_exporter.diagnosis.evidence import Past, past_of
from sglang_tuning_exporter.sglang.events import DecodeBatch, KvPool, Limits, Rank
from sglang_tuning_exporter.state.facts import ServerFacts
from sglang_tuning_exporter.state.latency import RecentLatency
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.server import ServerState
from sglang_tuning_exporter.state.totals import Totals

MINUTE = 60.0
POOL, PROMPT = 10_000, 100.0
ROW = "admission_too_conservative"


def balanced(*, asked: float, used: float, ratio: float, conservativeness: float = 1.0) -> Past:
    """A minute of a server that admits until the next request does not fit."""
    free_beside = POOL - asked - PROMPT
    running = free_beside / (PROMPT + used + ratio * (asked - used))
    usage = running * (PROMPT + used) / POOL
    recent = Totals()
    for figure, value in (("running", running), ("queued", 20.0), ("usage", usage)):
        recent.integrals[figure], recent.integrals[figure + "_seconds"] = MINUTE * value, MINUTE
    recent.seconds["activity", "serving"] = MINUTE
    recent.counts.update(computed_tokens=200 * PROMPT, started_requests=200.0)
    facts = ServerFacts(version=None, args={"schedule_conservativeness": conservativeness})
    facts.kv_pool_tokens[None] = POOL
    waits = {
        "time_to_first_token": RecentLatency(200.0, None, None, 1.0, 1.0),
        "request": RecentLatency(200.0, None, None, 9.0, 20.0),
    }
    recent.counts["new_token_ratio"], recent.counts["new_token_ratio_samples"] = 4 * ratio, 4
    return Past(recent, {}, MINUTE, facts, PROFILES["offline"], latency=waits)  # type: ignore[arg-type]


@pytest.mark.parametrize(("asked", "used"), [(4000, 400), (600, 240), (512, 500)])
@pytest.mark.parametrize("ratio", [0.03, 0.13, 0.7])
def test_the_requested_tokens_follow_from_the_balance(asked: float, used: float, ratio: float) -> None:
    found = demand(balanced(asked=asked, used=used, ratio=ratio))
    assert found is not None
    assert (found.asked, found.used, found.share) == pytest.approx((asked, used, used / asked))


@pytest.mark.parametrize("missing", ["ratio", "pool", "prompts", "figures"])
def test_nothing_is_concluded_where_the_server_does_not_expose_it(missing: str) -> None:
    past = balanced(asked=600, used=240, ratio=0.1)
    if missing == "ratio":
        past.recent.counts["new_token_ratio_samples"] = 0
    elif missing == "pool":
        past.facts.kv_pool_tokens.clear()
    elif missing == "prompts":
        del past.recent.counts["started_requests"]
    else:
        past = replace(past, recent=Totals())
    assert demand(past) is None


def test_requests_that_end_early_lower_conservativeness() -> None:
    (advice,) = advise(ROW, SizingInput(balanced(asked=4000, used=400, ratio=0.1)))
    assert (advice.flag, advice.suggested) == ("--schedule-conservativeness", 0.3)


@pytest.mark.parametrize("conservativeness", [1.0, 1.3])
def test_requests_that_use_all_requested_tokens_leave_conservativeness_unchanged(conservativeness: float) -> None:
    # Seen on a real engine: 1.3 -> 0.3 because requests waited, and 0.3 -> 1.3 because of retractions, again and again.
    past = balanced(asked=600, used=240, ratio=0.13, conservativeness=conservativeness)
    assert advise(ROW, SizingInput(past)) == []


def test_clients_are_advised_how_many_tokens_are_enough_where_the_flag_is_low_already() -> None:
    past = replace(balanced(asked=3000, used=400, ratio=0.03, conservativeness=0.3), longest_answer=1700.0)
    (advice,) = advise(ROW, SizingInput(past))
    assert advice.flag == ""
    assert "at most 1,728 max_new_tokens (now about 3,008; 99 % of the answers end within 1,700)" in advice.suggestion


def test_for_clients_that_ask_for_as_much_as_is_ever_kept_free_the_rest_is_unknown() -> None:
    past = replace(balanced(asked=4096, used=400, ratio=0.03, conservativeness=0.3), longest_answer=1700.0)
    (advice,) = advise(ROW, SizingInput(past))
    assert "now about 4,096 or more;" in advice.suggestion


def test_clients_that_ask_for_little_more_than_they_use_get_no_advice() -> None:
    past = replace(balanced(asked=2000, used=400, ratio=0.03, conservativeness=0.3), longest_answer=1700.0)
    assert advise(ROW, SizingInput(past)) == []


def test_clients_get_no_figure_while_the_longest_answers_may_be_running() -> None:
    past = replace(balanced(asked=3000, used=400, ratio=0.03, conservativeness=0.3), longest_answer=1700.0)
    slow = {**past.latency, "request": RecentLatency(200.0, None, None, 9.0, 40.0)}
    (advice,) = advise(ROW, SizingInput(replace(past, latency=slow)))
    assert advice.suggestion.startswith("ask for fewer max_new_tokens:")


def test_clients_get_no_figure_without_answers() -> None:
    (advice,) = advise(ROW, SizingInput(balanced(asked=3000, used=400, ratio=0.03, conservativeness=0.3)))
    assert advice.suggestion.startswith("ask for fewer max_new_tokens:")


def test_a_balance_of_a_few_large_requests_gives_no_figure() -> None:
    # Three prompts of 1,100 tokens and a hundred of answer in a KV cache of 4,200: 600 tokens are left over, whatever is asked for.
    past = balanced(asked=3000, used=400, ratio=0.03, conservativeness=0.3)
    few = replace(past, longest_answer=100.0, recent=Totals())
    few.facts.kv_pool_tokens[None] = 4200
    for figure, value in (("running", 3.0), ("queued", 20.0), ("usage", 0.85)):
        few.recent.integrals[figure], few.recent.integrals[figure + "_seconds"] = MINUTE * value, MINUTE
    few.recent.seconds["activity", "serving"] = MINUTE
    few.recent.counts.update(computed_tokens=200 * 1100.0, started_requests=200.0)
    few.recent.counts["new_token_ratio"], few.recent.counts["new_token_ratio_samples"] = 0.1, 1
    assert "now about" not in str(advise(ROW, SizingInput(few)))


def test_requests_that_share_a_prefix_use_only_the_tokens_outside_it() -> None:
    past = balanced(asked=3000, used=2100, ratio=0.1)
    past.recent.counts.update(cached_tokens=200 * 2000.0)  # beside a hundred of their own
    found = demand(past)
    assert found is None or found.share > 0.21


def reserved(length: float, *, in_full: bool) -> Past:
    """A server whose answers all have that length; its requests keep all of it free, or a part by the token ratio."""
    past = balanced(asked=length, used=length / 2, ratio=1.0 if in_full else 0.1)
    past.recent.counts["new_token_ratio"] = 0.4
    return replace(past, fixed_answer_tokens=length)


@pytest.mark.parametrize("length", [100.0, 600.0, 2000.0])
def test_requests_that_ignore_the_end_of_sequence_are_distinguished_from_those_kept_free_for_by_the_ratio(
    length: float,
) -> None:
    assert is_reserved_in_full(reserved(length, in_full=True))
    assert not is_reserved_in_full(reserved(length, in_full=False))


def test_for_answers_of_different_lengths_not_all_requested_tokens_are_reserved() -> None:
    assert not is_reserved_in_full(replace(reserved(600.0, in_full=True), fixed_answer_tokens=None))


def test_a_flag_above_its_ceiling_goes_back_to_the_usual() -> None:
    past = balanced(asked=600, used=240, ratio=0.14, conservativeness=3.0)
    (advice,) = advise(ROW, SizingInput(past))
    assert (advice.current, advice.suggested) == (3.0, 1.0)


@pytest.mark.parametrize(("chunk", "larger"), [(4096, 0), (512, 1)])
def test_a_larger_chunk_is_no_advice_where_hardly_a_prompt_fills_the_present_one(chunk: int, larger: int) -> None:
    # Seen on a real engine: 4096 -> 8192 for prompts of 24 tokens, because first tokens came late behind the last of a queue.
    past = balanced(asked=600, used=240, ratio=0.1)
    past.facts.args["chunked_prefill_size"] = chunk
    assert len(advise("latency_long_prompts", SizingInput(past))) == larger


def with_quiet_time(past: Past, minutes: float) -> Past:
    """The same server after some quiet minutes: two requests ran in an almost empty KV cache, with the ratio of a fresh start."""
    recent = past.recent
    for figure, quiet in (("running", 2.0), ("usage", 0.02)):
        recent.integrals[f"held_back_{figure}"] = recent.integrals[figure]
        recent.integrals[f"held_back_{figure}_seconds"] = MINUTE
        recent.integrals[figure] += minutes * MINUTE * quiet
        recent.integrals[f"{figure}_seconds"] += minutes * MINUTE
    recent.seconds["activity", "serving"] += minutes * MINUTE
    counts = recent.counts
    for name in ("new_token_ratio", "new_token_ratio_samples"):
        counts[f"held_back_{name}"] = counts[name]
    counts["new_token_ratio"] += 0.7 * 4 * minutes
    counts["new_token_ratio_samples"] += 4 * minutes
    return past


@pytest.mark.parametrize("minutes", [0.5, 3.0, 9.0])
def test_quiet_minutes_in_the_window_do_not_change_the_requested_tokens(minutes: float) -> None:
    past = with_quiet_time(balanced(asked=4000, used=400, ratio=0.1), minutes)
    found = demand(past)
    assert found is not None
    assert (found.asked, found.used) == pytest.approx((4000, 400))
    assert not could_not_reserve(past)


def test_figures_of_the_time_held_back_are_counted_apart() -> None:
    state = ServerState(PROFILES["offline"], 0.0)
    state.observe(KvPool(0.0, Rank(), 10_000), 0.0)
    state.observe(Limits(0.0, Rank(), max_total_num_tokens=10_000, max_running_requests=48), 0.0)
    for second in range(120):
        running, queued, usage = (2, 0, 0.02) if second < 60 else (15, 30, 0.4)
        state.observe(DecodeBatch(float(second), Rank(), running, queued, 800, usage), float(second))
    state.advance(120.0)
    past = past_of(state, 120.0)
    assert past.recent.mean("usage") == pytest.approx(0.21, abs=0.01)
    assert (past.mean_while_held_back("running"), past.mean_while_held_back("usage")) == pytest.approx((15, 0.4))


@pytest.mark.parametrize(
    ("free_requests", "waits_for_another_reason"), [(0.5, False), (1.5, False), (1.9, False), (2.1, True), (4.0, True)]
)
def test_room_for_up_to_two_requests_is_free_while_others_wait_for_room(
    free_requests: float, *, waits_for_another_reason: bool
) -> None:
    """SGLang admits only when a running request ends: the next one that fits takes its place."""
    pool, running, ratio, most = 60_000.0, 10.0, 0.1, 4096.0
    past = balanced(asked=4000, used=400, ratio=ratio)
    past.facts.kv_pool_tokens[None] = int(pool)
    free = ratio * running * most + free_requests * (PROMPT + most)
    past.recent.integrals.update(running=MINUTE * running, usage=MINUTE * (1 - free / pool))
    assert could_not_reserve(past) is waits_for_another_reason


def logged(answer: float, *, speculative: str | None = None) -> Past:
    """A server of which only the log is read: ten requests of 100 tokens and their answers, and half of 3,000 tokens free."""
    recent = Totals()
    for figure, value in (("running", 10.0), ("usage", 0.5)):
        recent.integrals[figure], recent.integrals[figure + "_seconds"] = 60.0 * value, 60.0
    recent.counts.update(new_sequences=100.0, computed_tokens=10_000.0, eager=10.0 * answer)
    facts = ServerFacts(args={"speculative_algorithm": speculative}, kv_pool_tokens={None: 3000.0})
    return Past(recent, {}, 60.0, facts, PROFILES["online"])


@pytest.mark.parametrize(("answer", "later"), [(300.0, True), (200.0, True), (100.0, False), (20.0, False)])
def test_free_tokens_are_used_later_where_answers_are_long_enough(answer: float, later: bool) -> None:  # noqa: FBT001 - a case
    assert is_used_later(logged(answer)) is later


def test_the_tokens_of_speculative_steps_are_not_known_from_the_log() -> None:
    assert not is_used_later(logged(300.0, speculative="EAGLE"))
