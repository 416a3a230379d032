"""What a scheduler does and for how long: lines and pages in, seconds of each state, waits and counts out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.events import NO_RANK, Event, Rank
from sglang_tuning_exporter.core.server import Server
from sglang_tuning_exporter.core.sums import STATES
from sglang_tuning_exporter.sglang.metrics import RankFigures, Scrape

SIGNALS = STATES.keys()


class Beside:
    """A server whose lines and pages a test gives, at seconds of its own."""

    def __init__(self, profile: str = "online") -> None:
        self.server = Server(PROFILES[profile])

    def line(self, kind: str, at: float, *, dp: int | None = None, tp: int | None = None, **figures: float) -> None:
        self.server.take_line(
            Event(kind, at, Rank(dp, tp) if dp is not None or tp is not None else NO_RANK, dict(figures))
        )

    def decode(self, at: float, running: int = 8, queued: int = 0, usage: float = 0.5, **more: Any) -> None:
        figures = {"tokens": 1000, "graph": 1, "throughput": 100.0, **more}
        self.line("decode", at, running=running, queued=queued, usage=usage, **figures)

    def prefill(self, at: float, tokens: int = 100, running: int = 8, queued: int = 0, **more: Any) -> None:
        figures = {"sequences": 1, "cached": 0, "usage": 0.5, **more}
        self.line("prefill", at, running=running, queued=queued, tokens=tokens, **figures)

    def start(self, at: float, **arguments: object) -> None:
        self.server.take_line(Event("arguments", at, arguments=arguments))

    def limits(self, at: float, pool: float, running: float) -> None:
        self.line("limits", at, max_total_num_tokens=pool, max_running_requests=running)

    def page(
        self, at: float, running: float = 8, queued: float = 0, *, progress: float | None = None, **more: float
    ) -> None:
        rank = RankFigures(None, running, queued)
        for name, value in more.items():
            setattr(rank, name, value)
        self.server.take_page(Scrape([rank], progress=progress), at)

    def seconds(self, until: float, signal: str = "activity") -> dict[str, float]:
        self.server.advance(until)
        found = dict[str, float]()
        for dp in self.server.lives:
            for state, value in self.server.life(dp).under(signal).items():
                if value:
                    found[state] = found.get(state, 0.0) + value
        return found

    def activity(self, now: float, dp: int | None = None) -> str:
        self.server.advance(now)
        return self.server.schedulers[dp].moment(now).activity

    def admission(self, now: float) -> str:
        self.server.advance(now)
        return self.server.schedulers[None].moment(now).admission

    def wait(self) -> float | None:
        return self.server.schedulers[None].wait(self.server.window(60))


@pytest.fixture
def beside() -> Beside:
    return Beside()


# Seconds


EVENTS: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.builds(dict, kind=st.just("decode"), running=st.integers(0, 300), queued=st.integers(0, 3000),
        usage=st.floats(0, 1)),
    st.builds(dict, kind=st.just("prefill"), running=st.integers(0, 300), queued=st.integers(0, 3000),
        tokens=st.sampled_from([1, 100, 8192])),
    st.just({"kind": "retraction", "requests": 3}),
    st.just({"kind": "start"}),
    st.builds(dict, kind=st.just("page"), running=st.integers(0, 3), queued=st.integers(0, 3),
        progress=st.integers(0, 9) | st.none()),
)  # fmt: skip
STEPS = st.sampled_from([0.0, 0.0, 0.1, 5.0, 59.9, 60.0, 60.1, 3600.0, -0.5, -30.0, -100.0])


@settings(max_examples=150)
@given(st.lists(st.tuples(STEPS, EVENTS), min_size=1, max_size=30))
def test_the_seconds_of_every_signal_add_up_to_the_same_whatever_happens(
    steps: list[tuple[float, dict[str, Any]]],
) -> None:
    beside, now = Beside(), 1000.0
    begin = latest = now + steps[0][0]
    for step, given_event in steps:
        now += step
        begin, latest, event = min(now, begin), max(now, latest), dict(given_event)
        kind = event.pop("kind")
        if kind == "retraction":
            beside.line(kind, now, **event)
        else:
            getattr(beside, kind)(now, **event)
    sums = [sum(beside.seconds(latest + 1.0, signal).values()) for signal in SIGNALS]
    assert sums == pytest.approx([sums[0]] * len(sums))
    assert sums[0] <= latest + 1.0 - begin + 1e-6


def test_a_prefill_of_a_health_check_is_no_load(beside: Beside) -> None:
    beside.prefill(0.0, tokens=1, running=0)
    assert "serving" not in beside.seconds(30.0)


def test_a_prefill_of_one_token_beside_running_requests_is_load(beside: Beside) -> None:
    beside.prefill(0.0, tokens=1, running=3)
    assert beside.seconds(1.0) == {"serving": pytest.approx(1.0)}


def test_what_a_start_counted_goes_on_in_the_next_and_its_rate_of_admission_does_not(beside: Beside) -> None:
    beside.start(0.0, decode_log_interval=10)
    for now in range(0, 61, 10):
        beside.prefill(float(now), queued=100, sequences=20)
    assert beside.wait() == pytest.approx(100 / (140 / 60), rel=0.2)
    beside.decode(61.0, queued=100)
    beside.start(70.0)
    beside.decode(71.0, queued=5)
    assert beside.server.schedulers[None].moment(71.0).queue == "unknown"
    assert beside.server.life(None)["replayed_batches"] == 10 + 40


@pytest.mark.parametrize("throughput", [0.7, 0.0], ids=["by the throughput", "by the times of the lines"])
def test_the_pauses_between_single_requests_are_no_decoding(beside: Beside, throughput: float) -> None:
    for at in range(0, 600, 60):  # a minute of one request would be 40 steps at 0.7 tokens a second
        beside.prefill(float(at), running=0)
        beside.decode(at + 1.0, running=1, throughput=throughput)
    assert beside.seconds(600.0)["idle"] > 500.0


@pytest.mark.parametrize("queued", [0, 3])
def test_slow_steps_between_prompts_that_join_are_decoding(beside: Beside, queued: int) -> None:
    for at in range(5):
        beside.prefill(float(at), running=8 * (at > 0), queued=queued)
    for at in range(5, 305, 10):
        beside.prefill(at + 5.0, running=7, queued=queued)
        beside.decode(at + 10.0, queued=queued, throughput=32.0)
    assert beside.seconds(305.0)["serving"] > 295.0


def test_requests_that_log_and_metrics_show_start_once(beside: Beside) -> None:
    for now in range(0, 61, 10):
        beside.page(float(now), 8, 60, admitted_requests=10.0 * now)
        beside.prefill(now + 0.5, queued=60, sequences=100)
    assert beside.wait() == pytest.approx(6.0, rel=0.2)


def test_a_rank_that_decoded_between_two_pages_served(beside: Beside) -> None:
    for at in (0.0, 15.0):
        ranks = [RankFigures(0, 0, 0, replayed_batches=40 * at), RankFigures(1, 0, 0, replayed_batches=1)]
        beside.server.take_page(Scrape(ranks, progress=600 * at), at)
    assert [beside.server.life(dp)["activity/serving"] for dp in (0, 1)] == [15.0, 0.0]


def test_the_usage_of_an_idle_moment_is_not_that_of_the_load_between_two_pages(beside: Beside) -> None:
    for step in range(4):
        beside.page(
            15.0 * step,
            8 if step == 0 else 0,
            progress=600 * step,
            full_usage=0.5 if step == 0 else 0.0,
            replayed_batches=600.0 * step,
        )
    beside.server.advance(60.0)
    assert beside.server.window(600.0).mean("usage") == 0.5


def test_gauges_that_stand_still_hold_for_a_minute(beside: Beside) -> None:
    for now in range(0, 300, 15):
        beside.page(float(now), 8, progress=5, full_usage=0.5)
    assert beside.seconds(300.0) == {"serving": 60.0, "unknown": 240.0}


def test_equal_gauges_above_counters_that_move_are_new(beside: Beside) -> None:
    for now in range(0, 300, 15):
        beside.page(float(now), 8, progress=float(now), full_usage=0.5, decoded_tokens=float(now))
    assert beside.seconds(300.0) == {"serving": 300.0}


@pytest.mark.parametrize(("tokens", "activity"), [(9000, "serving"), (4, "idle")])
def test_a_long_prompt_between_two_scrapes_is_load_and_health_checks_are_none(
    beside: Beside, tokens: float, activity: str
) -> None:
    beside.page(0.0, 0, progress=0, computed_tokens=0.0)
    beside.page(15.0, 0, progress=tokens, computed_tokens=tokens)
    assert (activity in beside.seconds(15.0)) is True


# Why requests wait


@pytest.mark.parametrize(
    ("argument", "why"),
    [
        ({"disaggregation_mode": "decode"}, "unknown"),
        ({"enable_lora": True}, "unknown"),
        ({"lora_paths": ["a=/a"]}, "unknown"),
        ({"hicache_storage_backend": "file"}, "unknown"),
        ({"disaggregation_mode": "null", "enable_lora": False, "lora_paths": None}, "held_back"),
    ],
)
def test_a_server_that_admits_by_more_than_its_token_ratio_is_not_said_to_hold_back(
    beside: Beside, argument: dict[str, object], why: str
) -> None:
    beside.start(0.0, **argument)
    beside.decode(1.0, queued=5, usage=0.3)
    assert beside.admission(1.0) == why


def test_the_next_chunk_of_one_prompt_starts_no_request() -> None:
    # One prompt of 40,000 tokens at a time, in chunks of 4,096, a second each: a request in ten seconds.
    beside = Beside("long_context")
    beside.start(0.0, chunked_prefill_size=4096)
    for second in range(120):
        sequences = 2 if second % 10 == 9 else 1  # the last chunk takes in the next prompt
        beside.prefill(float(second), 4096, running=0, queued=20, sequences=sequences)
    assert beside.wait() == pytest.approx(200.0, rel=0.2)


@pytest.mark.parametrize(("pending", "why"), [(30_000, "pool_full"), (1_000, "held_back")])
def test_the_size_of_those_that_wait_decides_where_it_is_printed(beside: Beside, pending: int, why: str) -> None:
    beside.limits(0.0, 10_000, 64)
    beside.prefill(1.0, running=40, queued=10, pending=pending)
    beside.decode(2.0, running=40, queued=10, usage=0.65, tokens=6500)
    assert beside.admission(2.0) == why


@pytest.mark.parametrize(("began", "why"), [(40, "unknown"), (80, "held_back")])
def test_why_requests_wait_beside_free_cache_is_known_once_as_many_have_ended_as_run(
    beside: Beside, began: int, why: str
) -> None:
    beside.limits(0.0, 10_000, 64)
    beside.prefill(1.0, 100 * began, running=0, queued=10, sequences=began)
    beside.decode(2.0, running=40, queued=10, usage=0.5, tokens=5000)
    assert beside.admission(2.0) == why


def test_a_load_that_is_older_than_its_log_has_ends_that_nobody_counted(beside: Beside) -> None:
    beside.limits(0.0, 10_000, 64)
    beside.prefill(1.0, running=38, queued=10, sequences=2)
    beside.decode(2.0, running=40, queued=10, usage=0.5, tokens=5000)
    assert beside.admission(2.0) == "held_back"


def test_who_ended_before_a_pause_says_nothing_of_the_load_after_it(beside: Beside) -> None:
    beside.limits(0.0, 10_000, 64)
    beside.prefill(1.0, 8_000, running=0, sequences=80)
    beside.decode(2.0, running=0, usage=0.0, tokens=0)
    beside.prefill(60.0, 4_000, running=0, queued=10, sequences=40)
    beside.decode(61.0, running=40, queued=10, usage=0.5, tokens=5000)
    assert beside.admission(61.0) == "unknown"


def test_a_request_needs_whole_pages(beside: Beside) -> None:
    # Seven requests of 70 tokens hold a page of 512 each, in a KV cache of eight.
    beside.start(0.0, page_size=512)
    beside.limits(0.0, 4_096, 64)
    beside.prefill(1.0, 70, running=6, queued=10, pending=700)
    beside.decode(2.0, running=6, queued=10, usage=0.75, tokens=3072)
    assert beside.admission(2.0) == "pool_full"


def test_requests_of_one_prefix_need_little_more_than_they_do_not_share(beside: Beside) -> None:
    # Four requests hold one prefix of 6,000 tokens in a KV cache of 10,000, and 100 each.
    beside.limits(0.0, 10_000, 64)
    for at in range(1, 20, 2):
        beside.prefill(float(at), running=3, queued=5, cached=6000, pending=30_500)
        beside.decode(at + 1.0, running=4, queued=5, usage=0.64, tokens=6400)
    assert beside.admission(20.0) == "held_back"


def test_a_small_limit_is_reached_while_one_of_its_requests_is_being_replaced(beside: Beside) -> None:
    beside.start(0.0, max_running_requests=6)
    beside.page(1.0, 5, 18, full_usage=0.3)
    assert beside.admission(1.0) == "running_limit"


def test_full_prefill_batches_that_follow_each_other_are_the_limit_all_the_time(beside: Beside) -> None:
    beside.start(0.0, chunked_prefill_size=8192)
    for step in range(20):
        beside.prefill(3.0 * step, 8192, queued=5)
    assert beside.seconds(60.0, "admission")["prefill_bound"] >= 50.0
