"""What a scheduler does and for how long: lines and pages in, seconds of each state, waits and counts out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.course import Course
from sglang_tuning_exporter.core.events import NO_RANK, Event, Rank
from sglang_tuning_exporter.core.lines import Reader
from sglang_tuning_exporter.core.server import STATES, Server
from sglang_tuning_exporter.sglang.metrics.page_figures import RankFigures, Scrape

SIGNALS = STATES.keys()


class Beside:
    """A server whose lines and pages a test gives, at seconds of its own."""

    def __init__(self, profile: str = "online") -> None:
        self.server = Server(PROFILES[profile])

    def line(self, kind: str, at: float, *, dp: int | None = None, tp: int | None = None, **figures: float) -> None:
        self.server.take(Event(kind, at, Rank(dp, tp) if dp is not None or tp is not None else NO_RANK, dict(figures)))

    def decode(self, at: float, running: int = 8, queued: int = 0, usage: float = 0.5, **more: Any) -> None:
        figures = {"tokens": 1000, "graph": 1, "throughput": 100.0, **more}
        self.line("decode", at, running=running, queued=queued, usage=usage, **figures)

    def prefill(self, at: float, tokens: int = 100, running: int = 8, queued: int = 0, **more: Any) -> None:
        figures = {"sequences": 1, "cached": 0, "usage": 0.5, **more}
        self.line("prefill", at, running=running, queued=queued, tokens=tokens, **figures)

    def start(self, at: float, **arguments: object) -> None:
        self.server.take(Event("arguments", at, arguments=arguments))

    def limits(self, at: float, pool: float, running: float) -> None:
        self.line("limits", at, max_total_num_tokens=pool, max_running_requests=running)

    def page(
        self, at: float, running: float = 8, queued: float = 0, *, progress: float | None = None, **more: float
    ) -> None:
        rank = RankFigures(None, running, queued)
        for name, value in more.items():
            setattr(rank, name, value)
        self.server.scrape(Scrape([rank], progress=progress), at)

    def seconds(self, until: float, signal: str = "activity") -> dict[str, float]:
        self.server.advance(until)
        found = dict[str, float]()
        for dp in self.server.lifetimes:
            for state, value in self.server.lifetime(dp).totals().under(signal).items():
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
        return self.server.schedulers[None].wait_seconds()


@pytest.fixture
def beside() -> Beside:
    return Beside()


# Seconds


EVENTS: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.builds(dict, kind=st.just("decode"), running=st.integers(0, 300), queued=st.integers(0, 3000), usage=st.floats(0, 1)),
    st.builds(dict, kind=st.just("prefill"), running=st.integers(0, 300), queued=st.integers(0, 3000), tokens=st.sampled_from([1, 100, 8192])),
    st.just({"kind": "retraction", "requests": 3}),
    st.just({"kind": "start"}),
    st.builds(dict, kind=st.just("page"), running=st.integers(0, 3), queued=st.integers(0, 3), progress=st.integers(0, 9) | st.none()),
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


def test_a_page_holds_for_a_minute(beside: Beside) -> None:
    beside.page(0.0, progress=0)
    beside.page(1.0, 9, progress=5)
    for now in range(2, 101):
        beside.server.advance(float(now))
    found = beside.seconds(100.0)
    assert [found["serving"], found["unknown"]] == pytest.approx([61.0, 39.0], abs=1.0)
    assert beside.activity(100.0) == "unknown"


def test_a_server_that_falls_silent_while_requests_wait_is_not_idle(beside: Beside) -> None:
    for now in (0.0, 4.0):
        beside.decode(now, queued=3)
    assert "idle" not in beside.seconds(100.0)


def test_a_prefill_of_a_health_check_is_no_load(beside: Beside) -> None:
    beside.prefill(0.0, tokens=1, running=0)
    assert "serving" not in beside.seconds(30.0)


def test_a_prefill_of_one_token_beside_running_requests_is_load(beside: Beside) -> None:
    beside.prefill(0.0, tokens=1, running=3)
    assert beside.seconds(1.0) == {"serving": pytest.approx(1.0)}


def test_gauges_that_stand_still_hold_for_a_minute(beside: Beside) -> None:
    for now in range(0, 300, 15):
        beside.page(float(now), 8, progress=5, full_usage=0.5)
    assert beside.seconds(300.0) == {"serving": 60.0, "unknown": 240.0}


def test_equal_gauges_above_counters_that_move_are_new(beside: Beside) -> None:
    for now in range(0, 300, 15):
        beside.page(float(now), 8, progress=float(now), full_usage=0.5, decoded_tokens=float(now))
    assert beside.seconds(300.0) == {"serving": 300.0}


@pytest.mark.parametrize(("tokens", "activity"), [(9000, "serving"), (4, "idle")])
def test_a_long_prompt_that_the_gauges_do_not_show_is_load_and_health_checks_are_none(
    beside: Beside, tokens: float, activity: str
) -> None:
    beside.page(0.0, 0, progress=0, computed_tokens=0.0)
    beside.page(15.0, 0, progress=tokens, computed_tokens=tokens)
    assert (activity in beside.seconds(15.0)) is True


def test_a_rank_that_decoded_between_two_pages_served(beside: Beside) -> None:
    for at in (0.0, 15.0):
        ranks = [RankFigures(0, 0, 0, graph_passes=40 * at), RankFigures(1, 0, 0, graph_passes=1)]
        beside.server.scrape(Scrape(ranks, progress=600 * at), at)
    served = [beside.server.lifetime(dp).totals()["activity/serving"] for dp in (0, 1)]
    assert served == [15.0, 0.0]


# Counts


def test_a_decode_line_stands_for_as_many_batches_as_the_log_interval_says(beside: Beside) -> None:
    beside.start(0.0, decode_log_interval=10)
    beside.decode(1.0)
    assert beside.server.rank_counts(None)["replayed"] == 10


def test_a_server_that_fails_again_right_after_its_restart_failed_twice(beside: Beside) -> None:
    for at in (0.0, 5.0):
        beside.start(at)
        beside.server.take(Event("out_of_memory", at + 1.0, word="startup"))
    assert beside.server.counted["out_of_memory.startup"] == 2


@pytest.mark.parametrize("ranks", [(None, 0), (0, None), (0, 1)])
def test_what_one_start_counted_is_not_lost_in_the_next_with_other_ranks(
    beside: Beside, ranks: tuple[int | None, ...]
) -> None:
    for number, dp in enumerate(ranks):
        beside.start(100.0 * number)
        beside.decode(100.0 * number + 10, dp=dp)
        beside.line("retraction", 100.0 * number + 11, dp=dp, requests=5)
    counts = [beside.server.rank_counts(dp)["retraction_events"] for dp in set(ranks)]
    assert (sum(counts), list(beside.server.schedulers)) == (2, [ranks[-1]])


def test_pages_without_ranks_after_pages_with_ranks_are_of_a_new_start(beside: Beside) -> None:
    for at, number in ((0.0, 90), (15.0, 95)):
        ranks = [RankFigures(dp, 3, 0, graph_passes=number) for dp in range(4)]
        beside.server.scrape(Scrape(ranks, progress=4.0 * number), at)
    for at, number in ((30.0, 3), (45.0, 10), (60.0, 20)):
        beside.page(at, 3, progress=number, graph_passes=number)
    assert (beside.server.starts, list(beside.server.schedulers)) == (1, [None])


# Waits


def test_the_wait_is_the_queue_over_the_rate_of_admission(beside: Beside) -> None:
    for now in range(0, 61, 10):
        beside.prefill(float(now), queued=100, sequences=20)
    assert beside.wait() == pytest.approx(100 / (140 / 60), rel=0.2)


def test_requests_that_log_and_metrics_show_start_once(beside: Beside) -> None:
    for now in range(0, 61, 10):
        beside.page(float(now), 8, 60, admitted_requests=10.0 * now)
        beside.prefill(now + 0.5, queued=60, sequences=100)
    assert beside.wait() == pytest.approx(6.0, rel=0.2)


def test_a_restarted_server_is_not_judged_by_the_admissions_of_the_last(beside: Beside) -> None:
    for now in range(0, 61, 10):
        beside.prefill(float(now), queued=100, sequences=20)
    beside.start(61.0)
    beside.decode(62.0, queued=5)
    assert beside.wait() is None


def test_the_next_chunk_of_one_prompt_starts_no_request() -> None:
    # One prompt of 40,000 tokens at a time, in chunks of 4,096, a second each: a request in ten seconds.
    beside = Beside("long_context")
    beside.start(0.0, chunked_prefill_size=4096)
    for second in range(120):
        sequences = 2 if second % 10 == 9 else 1  # the last chunk takes in the next prompt
        beside.prefill(float(second), 4096, running=0, queued=20, sequences=sequences)
    assert beside.wait() == pytest.approx(200.0, rel=0.2)


# Why requests wait


def test_a_request_is_not_held_back_where_the_next_would_not_fit(beside: Beside) -> None:
    # Three of 1,150 tokens run in a KV cache of 4,200, and the size of the waiting ones is unknown.
    beside.decode(0.0, running=3, queued=20, usage=0.82, tokens=3450)
    assert beside.admission(0.0) == "pool_full"


@pytest.mark.parametrize(("pending", "why"), [(30_000, "pool_full"), (1_000, "held_back")])
def test_the_size_of_those_that_wait_decides_where_it_is_printed(beside: Beside, pending: int, why: str) -> None:
    beside.limits(0.0, 10_000, 64)
    beside.prefill(1.0, running=40, queued=10, pending=pending)
    beside.decode(2.0, running=40, queued=10, usage=0.65, tokens=6500)
    assert beside.admission(2.0) == why


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


def test_a_small_limit_is_reached_while_one_of_its_requests_is_being_replaced(beside: Beside) -> None:
    beside.start(0.0, max_running_requests=6)
    beside.page(1.0, 5, 18, full_usage=0.3)
    assert beside.admission(1.0) == "running_limit"


def test_full_prefill_batches_that_follow_each_other_are_the_limit_all_the_time(beside: Beside) -> None:
    beside.start(0.0, chunked_prefill_size=8192)
    for step in range(20):
        beside.prefill(3.0 * step, 8192, queued=5)
    assert beside.seconds(60.0, "admission")["prefill_bound"] >= 50.0


# Step times: a decode line shows one where the batch hardly changed since the decode line before it


@pytest.mark.parametrize(
    ("lines", "batches"),
    [
        ([(1, "decode", 8), (2, "decode", 8), (3, "decode", 9), (4, "decode", 9)], [8, 9]),
        ([(1, "decode", 40), (2, "decode", 37), (3, "decode", 33)], [38.5]),  # nearly the same: at the mean batch
        ([(1, "decode", 8), (2, "prefill", 8), (2, "decode", 8), (3, "decode", 8)], [8]),
        ([(1, "decode", 1), (2, "decode", 8), (2, "decode", 8), (2, "decode", 1)], []),  # of one second only the first
        ([(1, "decode", 8), (2, "decode", 9), (2, "decode", 8)], []),
        ([(1, "decode", 8), (2, "decode", 8), (2, "decode", 9)], [8]),
    ],
)
def test_a_decode_line_shows_a_step_time_where_the_batch_hardly_changed(
    beside: Beside, lines: list[tuple[float, str, int]], batches: list[float]
) -> None:
    for at, kind, running in lines:
        if kind == "decode":
            beside.decode(at, running, usage=0.2, throughput=running * 11 + 0.5)
        else:
            beside.prefill(at, 0, running)
    assert [step.batch for _, step in beside.server.schedulers[None].steps] == batches


def test_decode_lines_far_apart_without_a_prefill_between_are_one_load() -> None:
    course = Course(PROFILES["online"])
    reader = Reader()
    for number in range(10):
        stamp = f"[2026-01-01 00:{number * 24 // 60:02}:{number * 24 % 60:02}] "
        line = (
            stamp
            + "Decode batch, #running-req: 8, #token: 4000, token usage: 0.10, cuda graph: False, gen throughput (token/s): 13.30, #queue-req: 0"
        )
        for event in reader.read(line.encode()):
            course.take(event)
    judged = course.end()
    assert judged.serving_seconds > 0.8 * 9 * 24


def test_pauses_between_bursts_are_no_wait() -> None:
    course = Course(PROFILES["online"])
    reader = Reader()
    for burst in range(5):
        for second in range(30):
            at = burst * 120 + second
            stamp = f"[2026-01-01 00:{at // 60:02}:{at % 60:02}] "
            for text in (
                "Prefill batch, #new-seq: 10, #new-token: 1000, #cached-token: 0, token usage: 0.30, #running-req: 40, #queue-req: 20",
                "Decode batch, #running-req: 40, #token: 4000, token usage: 0.30, cuda graph: True, gen throughput (token/s): 900.00, #queue-req: 20",
            ):
                for event in reader.read((stamp + text).encode()):
                    course.take(event)
    assert course.end().shares["queue"].get("above_range", 0.0) < 0.05
