"""Which log lines count as events: text and scrapes in, counters out. Times are seconds since the server started."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import pytest
import requests
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import FakeSGLang, Page, config, reply, wait_for, web
from sglang_tuning_exporter.collect.sidecar import Sidecar
from sglang_tuning_exporter.diagnosis.evidence import Past
from sglang_tuning_exporter.diagnosis.findings import judge
from sglang_tuning_exporter.recordings.recording import load
from sglang_tuning_exporter.recordings.replay import packaged
from sglang_tuning_exporter.sglang.events import RankFigures, Scrape
from sglang_tuning_exporter.sglang.log.reader import LogReader
from sglang_tuning_exporter.sglang.metrics import page_figures as facts
from sglang_tuning_exporter.state.cadence import DECODE_LOG_INTERVAL
from sglang_tuning_exporter.state.confirmation import DECIDE_SECONDS
from sglang_tuning_exporter.state.forgeries import MOST_PENDING
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.retraction_account import BASE_SECONDS
from sglang_tuning_exporter.state.server import ServerState

POOL = 1_040_384
TOOL = "Model attempted to call undefined function: get_weather"


def args(more: str = "", tp: int = 1, dp: int = 1) -> str:
    return f"server_args={{'tp_size': {tp}, 'dp_size': {dp}, 'max_running_requests': 400{more}}}"


def retraction(requests: int = 5, ratio: float = 0.3002) -> str:
    return (
        f"KV cache pool is full. Retract requests. #retracted_reqs: {requests}, #new_tokens_gained: 8950, "
        f"#new_token_ratio: {ratio:.4f} -> 0.5783"
    )


def decode(usage: float = 0.97, running: int = 237, tokens: int | None = None, more: str = "") -> str:
    tokens = round(usage * POOL) if tokens is None else tokens
    return (
        f"Decode batch, #running-req: {running}, #token: {tokens}, token usage: {usage:.2f}, {more}"
        "cuda graph: True, gen throughput (token/s): 4471.70, #queue-req: 4"
    )


def prefill(new_tokens: int = 24, running: int = 2, usage: float = 0.93, queued: int = 9) -> str:
    return (
        f"Prefill batch, #new-seq: 1, #new-token: {new_tokens}, #cached-token: 0, token usage: {usage:.2f}, "
        f"#running-req: {running}, #queue-req: {queued}, cuda graph: False, input throughput (token/s): 18.00"
    )


WHOLE = "".join(f", 'argument_{number}': {number}" for number in range(40))  # a real server prints hundreds
OUT_OF_MEMORY = "Decode out of memory. Try to lower your batch size."


class Server:
    """The exporter's state of one server, fed with log lines and scrapes; `ranks` is the rank part of the log prefix."""

    def __init__(self, *, tp: int = 1, dp: int = 1, more: str = "", ranks: str = "") -> None:
        self.state = ServerState(PROFILES["online"], 0.0)
        self.reader = LogReader()
        self.say(0.0, args(more, tp, dp))
        for rank in range(dp):
            prefix = f" DP{rank} TP0" if dp > 1 else ranks
            self.say(0.0, f"max_total_num_tokens={POOL}, chunked_prefill_size=8192, max_running_requests=400", prefix)

    def say(self, at: float, message: str, ranks: str = "") -> None:
        text = f"[2025-11-20 {11 + int(at) // 3600:02}:{int(at) // 60 % 60:02}:{int(at) % 60:02}{ranks}] {message}\n"
        for event in self.reader.feed(text.encode()):
            self.state.observe(event, at)

    def scrape(
        self, at: float, retracted: float | None = None, passes: float | None = 1.0, dp: int | None = None
    ) -> None:
        figures = RankFigures(dp, running=237, queued=4, graph_passes=passes, retracted_requests=retracted)
        self.state.observe_scrape(Scrape([figures], progress=100.0 + at), at)

    def wait(self, to: float) -> None:
        self.state.advance(to)

    @property
    def counted(self) -> int:
        return int(self.state.totals().counts["retraction_events"])

    @property
    def requests(self) -> int:
        return int(self.state.totals().counts["log_retracted_requests"])

    @property
    def doubted(self) -> Counter[str]:
        return +self.state.forgeries.suspicious


def busy(**layout: int) -> Server:
    """A server under load with a full KV cache."""
    server = Server(tp=layout.get("tp", 1), ranks=" TP0" if layout.get("tp", 1) > 1 else "")
    server.say(1, decode(), " TP0" if layout.get("tp", 1) > 1 else "")
    return server


def scraped(retracted: float | None, **layout: int) -> Server:
    server = busy(**layout)
    server.scrape(2, retracted)
    server.scrape(17, retracted)
    server.say(20, decode(), " TP0" if layout.get("tp", 1) > 1 else "")
    return server


# A forged line -------------------------------------------------------------------------------------------------------


def test_a_line_in_a_tools_name_is_no_retraction() -> None:
    server = busy()
    server.say(30, TOOL)
    server.say(30, retraction())
    server.wait(90)
    assert (server.counted, server.requests, server.doubted) == (0, 0, {"retraction": 1})


def test_a_retraction_that_no_other_rank_prints_does_not_count() -> None:
    server = busy(tp=8)
    server.say(30, TOOL)
    server.say(30, retraction(), " TP0")
    server.wait(39)
    assert server.doubted == {}
    server.wait(41)
    assert (server.counted, server.doubted) == (0, {"retraction": 1})


def test_a_retraction_in_the_name_of_a_rank_that_is_not_there_repeats_nothing() -> None:
    server = busy(tp=8)
    server.say(30, TOOL)
    server.say(30, retraction(), " TP0")
    server.say(30, retraction(), " TP8")
    server.wait(41)
    assert (server.counted, server.doubted) == (0, {"retraction": 1})


@pytest.mark.parametrize("counter", [7.0, None], ids=["a counter that stands", "no counter yet"])
@pytest.mark.parametrize("tp", [1, 8])
def test_a_retraction_that_the_servers_own_counter_lacks_does_not_count(counter: float | None, tp: int) -> None:
    server = scraped(counter, tp=tp)
    server.say(30, TOOL)
    server.say(30, retraction(), " TP0" if tp > 1 else "")
    server.scrape(32, counter)
    server.scrape(47, counter)
    server.wait(48)
    assert (server.counted, server.doubted) == (0, {"retraction": 1})


def test_a_retraction_without_raw_text_nearby_that_the_servers_own_counter_lacks_is_rejected_and_reported() -> None:
    server = scraped(7)
    server.say(30, retraction())
    assert (server.counted, server.doubted) == (0, {})
    for at in range(45, 120, 15):
        server.scrape(at, 7)
        server.wait(at)
    assert (server.counted, server.doubted) == (0, {"retraction": 1})
    assert server.state.forgeries.disagrees(120)


def test_a_hundred_forged_lines_drive_no_advice() -> None:
    server = busy()
    for at in range(30, 60):
        server.say(at, TOOL)
        for figure in range(4):
            server.say(at, retraction(ratio=0.1 + figure / 100))
        server.say(at, decode(0.95))
    server.wait(61)
    state = server.state
    past = Past(state.recent(61), state.recent_marks(61, 600), 61, state.facts, state.profile)
    assert "retracting_too_often" not in {found.diagnosis.id for found in judge(past).findings}
    assert (server.counted, server.doubted) == (0, {"retraction": 120})


def test_a_forged_line_adds_no_scheduler() -> None:
    server = busy()
    server.say(30, TOOL)
    for forged in (retraction(), decode(), prefill()):
        server.say(30, forged, " DP7 TP0")
    server.wait(41)
    assert list(server.state.ranks) == [None]
    assert server.doubted == {"retraction": 1, "batch": 2}


def test_a_scheduler_beyond_the_last_is_rejected() -> None:
    server = Server(dp=2)
    server.say(1, decode(), " DP0 TP0")
    server.say(30, TOOL)
    server.say(30, retraction(), " DP2 TP0")
    server.wait(41)
    assert list(server.state.ranks) == [0]
    assert (server.counted, server.doubted) == (0, {"retraction": 1})


def test_the_number_of_waiting_lines_is_bounded() -> None:
    server = scraped(7)
    server.say(30, TOOL)
    for ratio in range(MOST_PENDING + 50):
        server.say(30, retraction(ratio=ratio / 10_000))
    assert server.doubted == {"retraction": 50}
    server.scrape(32, 7)
    server.scrape(47, 7)
    server.wait(48)
    assert (server.counted, server.doubted) == (0, {"retraction": MOST_PENDING + 50})


def test_a_forged_line_does_not_use_up_the_increase_of_a_real_one() -> None:
    server = scraped(7)
    server.say(30, TOOL)
    server.say(30, retraction(1))
    for line in range(70):
        server.say(33, f"x {line}")
    server.say(34, retraction(3))
    server.scrape(35, 10)
    server.scrape(50, 10)
    server.wait(60)
    assert (server.counted, server.requests, server.doubted) == (1, 3, {"retraction": 1})


def test_an_increase_without_a_line_does_not_confirm_a_forged_line_much_later() -> None:
    server = scraped(7)
    server.scrape(30, 12)
    for at in range(45, 105, 15):
        server.scrape(at, 12)
    server.say(110, TOOL)
    server.say(110, retraction(5))
    server.scrape(112, 12)
    server.scrape(127, 12)
    server.wait(130)
    assert (server.counted, server.doubted) == (0, {"retraction": 1})


@pytest.mark.parametrize("suspect", [True, False])
def test_a_retraction_of_no_request_cannot_be_confirmed_by_the_counter(*, suspect: bool) -> None:
    server = scraped(7)
    if suspect:
        server.say(30, TOOL)
    server.say(30, retraction(0))
    server.scrape(32, 7)
    server.scrape(47, 7)
    server.wait(48)
    assert (server.counted, server.doubted) == ((0, {"retraction": 1}) if suspect else (1, {}))


# The pool ------------------------------------------------------------------------------------------------------------


def borne_out(server: Server, at: float) -> tuple[int, Counter[str]]:
    """Counts after a retraction that follows a raw message and that the server's counter confirms: it counts if the KV cache can have been full."""
    server.say(at, TOOL)
    server.say(at, retraction())
    server.scrape(at + 1, 12)
    return server.counted, server.doubted


def test_a_kv_cache_that_was_a_third_full_a_moment_ago_is_not_full() -> None:
    server = scraped(7)
    server.say(30, decode(0.30, running=40))
    assert borne_out(server, 31) == (0, {"retraction": 1})


def test_a_long_prompt_may_fill_it() -> None:
    server = scraped(7)
    server.say(30, decode(0.30, running=40))
    server.say(31, prefill(new_tokens=700_000))
    assert borne_out(server, 31) == (1, {})


def test_a_large_batch_may_fill_it_within_one_log_interval() -> None:
    server = scraped(7)
    server.say(30, decode(0.88, running=390))
    assert borne_out(server, 31) == (1, {})


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (", 'speculative_algorithm': 'EAGLE3'", ""),
        ("", "swa token usage: 0.20, "),
        ("", "mamba num: 3, mamba usage: 0.20, "),
        ("", "pre-allocated usage: 0.00, #prealloc-req: 0, #transfer-req: 0, #retracted-req: 0, "),
    ],
    ids=["speculative", "sliding window", "mamba", "disaggregated"],
)
def test_a_retraction_is_accepted_where_one_figure_does_not_describe_the_pool(arguments: str, keys: str) -> None:
    server = Server(more=arguments)
    line = decode(0.30, running=40, more=keys)
    if "swa" in keys:
        line = line.replace("#token:", "#full token:").replace(" token usage: 0.30", " full token usage: 0.30", 1)
    server.scrape(2, 7)
    server.scrape(17, 7)
    server.say(30, line)
    assert borne_out(server, 31) == (1, {})


def test_an_old_usage_is_no_evidence() -> None:
    server = scraped(7)
    server.say(30, decode(0.30, running=40))
    assert borne_out(server, 95) == (1, {})


def test_a_rejected_batch_line_leaves_the_pool_unknown() -> None:
    server = scraped(7)
    server.say(30, decode(0.30, running=40))
    server.say(31, TOOL)
    server.say(31, decode(0.99, running=401))
    assert borne_out(server, 32) == (1, {"batch": 1})


def test_a_kv_cache_of_another_size_than_in_the_line_is_no_evidence() -> None:
    server = scraped(7)
    server.say(30, decode(0.97, running=40, tokens=97_000))
    assert borne_out(server, 31) == (1, {})


# A real one ----------------------------------------------------------------------------------------------------------


def test_without_metrics_a_retraction_that_nothing_contradicts_counts_at_once() -> None:
    server = busy()
    server.say(30, retraction())
    assert (server.counted, server.requests) == (1, 5)


@pytest.mark.parametrize("log_first", [True, False])
def test_the_counter_confirms_a_retraction_at_once(*, log_first: bool) -> None:
    server = scraped(7)
    if log_first:
        server.say(30, TOOL)
        server.say(30, retraction())
        assert server.counted == 0
        server.scrape(30.1, 12)
    else:
        server.scrape(30.1, 12)
        server.say(30.2, TOOL)
        server.say(30.2, retraction())
    assert (server.counted, server.doubted) == (1, {})


@pytest.mark.parametrize("counter", [7.0, None])
def test_the_counter_confirms_a_retraction_between_raw_messages(counter: float | None) -> None:
    server, before = scraped(counter), counter or 0.0
    for event in range(20):
        server.say(30 + event, TOOL)
        server.say(30 + event, retraction(ratio=event / 100))
        server.scrape(30.5 + event, before + 5 * (event + 1))
    assert (server.counted, server.doubted) == (20, {})


def test_other_ranks_confirm_a_retraction_between_raw_messages() -> None:
    server = busy(tp=8)
    for event in range(20):
        server.say(30 + event, TOOL)
        for rank in range(8):
            server.say(30 + event, retraction(ratio=event / 100), f" TP{rank}")
    server.wait(61)
    assert (server.counted, server.doubted) == (20, {})


def test_other_ranks_confirm_it_where_the_arguments_are_unknown() -> None:
    server = Server(tp=8, ranks=" TP0")
    server.state = ServerState(PROFILES["online"], 0.0)
    server.say(30, TOOL)
    for rank in range(8):
        server.say(30, retraction(), f" TP{rank}")
    assert (server.counted, server.doubted) == (1, {})


def test_a_server_before_0_5_7_has_no_counter_to_be_asked() -> None:
    server = busy()
    server.scrape(2, 7, passes=None)
    server.scrape(17, 7, passes=None)
    server.say(30, retraction())
    server.scrape(32, 7, passes=None)
    server.scrape(60, 7, passes=None)
    server.wait(90)
    assert (server.counted, server.doubted, server.state.forgeries.disagrees(90)) == (1, {}, None)


def test_a_retraction_counts_when_the_server_dies_right_after_it() -> None:
    server = scraped(7)
    server.state.lost_scrape()
    server.say(30, retraction())
    assert (server.counted, server.doubted) == (1, {})


def test_a_server_that_does_not_answer_confirms_no_forged_line() -> None:
    server = scraped(7)
    server.say(30, TOOL)
    server.say(30, retraction())
    server.state.lost_scrape()
    server.wait(61)
    assert (server.counted, server.doubted) == (0, {"retraction": 1})


def test_when_it_answers_again_its_counter_is_not_counted_on_twice() -> None:
    server = scraped(7)
    server.say(30, retraction(ratio=0.1))
    server.state.lost_scrape()
    server.wait(45)
    server.scrape(46, 12)
    server.say(47, TOOL)
    server.say(47, retraction(ratio=0.2))
    server.scrape(48, 12)
    server.scrape(63, 12)
    server.wait(64)
    assert (server.counted, server.doubted) == (1, {"retraction": 1})


def test_a_restart_settles_waiting_lines_and_starts_with_the_new_counter() -> None:
    server = scraped(7)
    server.say(30, retraction(ratio=0.1))
    server.state.lost_scrape()
    server.say(40, args())
    assert (server.counted, server.doubted) == (1, {})
    server.scrape(70, None, passes=1)
    server.say(80, decode())
    server.say(81, retraction(ratio=0.1))
    server.say(81, retraction(ratio=0.2))
    server.scrape(85, 10, passes=90)
    server.say(90, retraction(ratio=0.3))
    server.scrape(91, 15, passes=99)
    assert (server.counted, server.requests, server.doubted) == (4, 20, {})


def test_a_restart_does_not_confirm_forged_lines() -> None:
    server = scraped(7)
    server.say(30, TOOL)
    server.say(30, retraction())
    for line in range(70):
        server.say(33, f"x {line}")
    server.state.lost_scrape()
    for _ in range(70):
        server.say(36, decode())
    server.say(40, args())
    assert (server.counted, server.doubted) == (0, {"retraction": 1})


def test_a_line_accepted_without_evidence_does_not_use_up_the_evidence_of_a_later_one() -> None:
    server = scraped(7)
    server.state.lost_scrape()
    server.say(30, retraction(9, ratio=0.1))
    for at in range(40, 110, 10):
        server.scrape(at, 7)
    server.say(110, decode())
    server.say(111, retraction(5, ratio=0.2))
    server.scrape(112, 12)
    assert server.counted == 2


def test_a_count_that_the_log_does_not_show_within_a_minute_is_reported_for_ten_minutes() -> None:
    server = scraped(7)
    server.scrape(40, 12)
    said = []
    for at in range(55, 760, 15):
        server.scrape(at, 12)
        said.append((at, server.state.forgeries.disagrees(at)))
    assert [at for at, disagrees in said if disagrees][::39] == [115, 700]


def test_counts_in_the_first_scrape_are_no_disagreement() -> None:
    server = busy()
    server.scrape(2, 7)
    server.say(3, retraction())
    for at in range(4, 200, 15):
        server.scrape(at, 12)
    assert (server.counted, server.state.forgeries.disagrees(200)) == (1, False)


# Every real one ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_metrics", [False, True])
def test_every_retraction_of_a_real_server_is_accepted(*, with_metrics: bool) -> None:
    recording = load(packaged("retract"))
    state, reader = ServerState(PROFILES["online"], 0.0), LogReader()
    moments = [(line.at, 0, line.text) for line in recording.lines]
    moments += [(scrape.at, 1, scrape.text) for scrape in recording.scrapes] if with_metrics else []
    for at, kind, text in sorted(moments, key=lambda moment: moment[:2]):
        if kind:
            state.observe_scrape(facts.read(text.decode()), at)
        else:
            for event in reader.feed(text):
                state.observe(event, at)
    state.settle(recording.length_seconds)
    assert (state.totals().counts["retraction_events"], +state.forgeries.suspicious) == (10, {})


@dataclass
class Storm:
    """Retractions at `at`: each line is read some time later, each scrape shows what had been counted when it was made."""

    at: list[float]
    requests: list[int]
    read_after: list[float]
    begun: float  # when the first scrape was made
    every: float
    sinks: bool


@st.composite
def storms(draw: st.DrawFn) -> Storm:
    steps = draw(st.lists(st.sampled_from([0.0, 0.001, 0.05, 0.3, 1.0, 4.0]), min_size=1, max_size=40))
    count = len(steps)
    return Storm(
        [21.0 + at for at in accumulate(steps)],
        draw(st.lists(st.integers(1, 9), min_size=count, max_size=count)),
        draw(st.lists(st.sampled_from([0.001, 0.05, 0.1, 0.9, 3.0]), min_size=count, max_size=count)),
        draw(st.floats(1.0, 60.0)),
        draw(st.sampled_from([0.5, 1.0, 5.0, 15.0])),
        draw(st.booleans()),
    )


@settings(max_examples=150)
@given(storms(), st.sampled_from([None, 0, 40]))
def test_in_a_storm_every_line_is_counted_however_it_meets_the_scrapes(storm: Storm, before: int | None) -> None:
    """With raw messages near, the first scrape lies before the retractions: nothing confirms a suspect line that only that scrape contains."""
    server = busy()
    begun = 2.0 if storm.sinks else storm.begun
    moments: list[tuple[float, int]] = []
    ready = 0.0
    for number, (at, after) in enumerate(zip(storm.at, storm.read_after, strict=True)):
        ready = max(ready, at + after)  # the file is read in order
        moments.append((ready, number))
    end = ready + 60
    scrapes = [(begun + number * storm.every, -1) for number in range(int((end - begun) / storm.every))]
    for now, number in sorted([*moments, *scrapes]):
        server.wait(now)
        if number < 0:
            counted = sum(n for at, n in zip(storm.at, storm.requests, strict=True) if at <= now)
            server.scrape(now, (before or 0) + counted if before is not None or counted else None, passes=now)
        else:
            server.say(now, decode())
            if storm.sinks:
                server.say(now, TOOL)
            server.say(now, retraction(storm.requests[number], ratio=number / 100))
    server.wait(end)
    assert (server.counted, server.requests, server.doubted) == (len(storm.at), sum(storm.requests), {})


def test_a_line_that_the_base_may_contain_is_accepted() -> None:
    server = busy()
    server.scrape(20, 12)
    server.say(20 + BASE_SECONDS - 1, retraction())
    assert (server.counted, server.doubted) == (1, {})


# Batch lines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "accepted"),
    [
        (decode(0.91), True),
        (decode(0.91, running=401), False),
        (decode(0.91, tokens=900_000), False),
        (decode(0.00), False),
        (decode(0.91).replace("#queue-req: 4", "#queue-req: 40000"), False),
        (prefill(), True),
        (prefill(running=401), False),
        (prefill(usage=0.10), False),
        (prefill(queued=40_000), False),
    ],
    ids=[
        "decode",
        "too many running",
        "tokens that are not that usage",
        "an empty pool",
        "a queue from nowhere",
        "prefill",
        "prefill of too many",
        "prefill into an empty pool",
        "prefill with a queue from nowhere",
    ],
)
def test_a_suspect_batch_line_is_accepted_when_its_figures_fit(line: str, *, accepted: bool) -> None:
    server = busy()
    server.say(30, TOOL)
    server.say(30, line)
    assert server.doubted == ({} if accepted else {"batch": 1})
    assert (server.state.ranks[None].usage == 0.97) is not accepted


@pytest.mark.parametrize(("line", "accepted"), [(decode(0.3), True), (prefill(), False)])
def test_a_suspect_batch_line_without_a_neighbour_has_to_fit_the_pool(line: str, *, accepted: bool) -> None:
    server = Server()
    server.say(1, TOOL)
    server.say(1, line)
    assert server.doubted == ({} if accepted else {"batch": 1})


def test_a_suspect_batch_line_in_a_log_without_its_start_is_compared_with_the_line_before() -> None:
    for line, accepted in ((decode(0.95), True), (decode(0.3), False)):
        state, reader = ServerState(PROFILES["online"], 0.0), LogReader()
        for message in (decode(), TOOL, line):
            for event in reader.feed(f"[2025-11-20 11:00:30] {message}\n".encode()):
                state.observe(event, 30.0)
        assert state.totals().counts["replayed"] == DECODE_LOG_INTERVAL * (1 + accepted)


def test_a_batch_line_that_nothing_made_suspect_is_not_checked() -> None:
    server = busy()
    server.say(30, decode(0.55, running=401))
    assert (server.state.ranks[None].running, server.doubted) == (401, {})


# Failures ------------------------------------------------------------------------------------------------------------


def test_a_failure_does_not_count_if_its_rank_goes_on_decoding() -> None:
    server = busy()
    server.say(30, TOOL)
    server.say(30, OUT_OF_MEMORY)
    server.say(33, decode())
    server.wait(60)
    assert (+server.state.out_of_memory, server.doubted) == ({}, {"out_of_memory": 1})


def test_decoding_of_another_scheduler_is_no_evidence_against_it() -> None:
    server = Server(dp=2)
    for rank in (0, 1):
        server.say(1, decode(), f" DP{rank} TP0")
    server.say(30, TOOL)
    server.say(30, OUT_OF_MEMORY, " DP0 TP0")
    server.say(33, decode(), " DP1 TP0")
    server.wait(31 + DECIDE_SECONDS)
    assert (+server.state.out_of_memory, server.doubted) == ({"decode": 1}, {})


def test_a_failure_followed_by_silence_counts_after_half_a_minute() -> None:
    server = busy()
    server.say(30, TOOL)
    server.say(30, OUT_OF_MEMORY)
    server.say(31, decode())  # what another thread still had to print
    server.wait(29.9 + DECIDE_SECONDS)
    assert +server.state.out_of_memory == {}
    server.wait(30.5 + DECIDE_SECONDS)
    assert (+server.state.out_of_memory, server.doubted) == ({"decode": 1}, {})


def test_a_failure_that_nothing_made_suspect_counts_at_once() -> None:
    server = busy()
    server.say(30, OUT_OF_MEMORY)
    assert +server.state.out_of_memory == {"decode": 1}


def test_a_forged_failure_is_recognised_in_a_backlog_that_is_read_in_one_moment() -> None:
    server = busy()
    for message, second in ((TOOL, 30), (OUT_OF_MEMORY, 30), (decode(), 40)):
        for event in server.reader.feed(f"[2025-11-20 11:00:{second}] {message}\n".encode()):
            server.state.observe(event, 100.0)
    server.wait(110)
    assert (+server.state.out_of_memory, server.doubted) == ({}, {"out_of_memory": 1})


def test_a_real_failure_in_a_backlog_is_not_denied_by_the_server_after_it() -> None:
    server = busy()
    limits = f"max_total_num_tokens={POOL}, chunked_prefill_size=8192, max_running_requests=400"
    for message, second in ((TOOL, 10), (OUT_OF_MEMORY, 10), (args(WHOLE), 20), (limits, 30), (decode(), 50)):
        for event in server.reader.feed(f"[2025-11-20 11:00:{second}] {message}\n".encode()):
            server.state.observe(event, 100.0)
    server.wait(110)
    assert (+server.state.out_of_memory, server.doubted) == ({"decode": 1}, {})


def test_a_forged_end_of_the_process_does_not_prove_a_forged_failure() -> None:
    server = busy()
    server.say(30, TOOL)
    server.say(30, OUT_OF_MEMORY)
    server.say(30, "Child process unexpectedly failed with an exit code 9. pid=77")
    server.say(33, decode())
    server.wait(60)
    assert (+server.state.out_of_memory, server.doubted) == ({}, {"out_of_memory": 1, "startup": 1})


# On the page ---------------------------------------------------------------------------------------------------------


def native(retracted: int, passes: int = 40) -> bytes:
    return (
        f"# TYPE sglang:num_running_reqs gauge\n"
        f'sglang:num_running_reqs{{model_name="m",tp_rank="0",pp_rank="0"}} 237.0\n'
        f'sglang:num_queue_reqs{{model_name="m",tp_rank="0",pp_rank="0"}} 4.0\n'
        f'sglang:token_usage{{model_name="m",tp_rank="0",pp_rank="0"}} 0.97\n'
        f'sglang:cuda_graph_passes_total{{model_name="m",tp_rank="0",pp_rank="0",mode="decode_cuda_graph"}} {passes}.0\n'
        f'sglang:num_retracted_requests_total{{model_name="m",tp_rank="0",pp_rank="0"}} {retracted}.0\n'
    ).encode()


def test_a_real_retraction_shows_on_the_page_whose_scrape_confirms_it_and_a_forged_one_does_not(
    tmp_path: Path, sglang: FakeSGLang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_tuning_exporter.state.retraction_account.BASE_SECONDS", 0.0)  # not to wait five seconds
    sglang.answers["/metrics"] = reply(native(7))
    log = tmp_path / "server.log"
    log.write_text("")
    sidecar = Sidecar(config(sglang_url=sglang.url, log_file=(str(log),)))
    sidecar.start()

    def write(*messages: str) -> None:
        with log.open("a") as file:
            file.writelines(f"[2025-11-20 11:40:10] {message}\n" for message in messages)
        read = sidecar.log.lines if sidecar.log else Counter()
        wait_for(lambda: bool(sidecar.log and sidecar.log.lines != read))

    with web(sidecar) as url:

        def page() -> Page:
            return Page(requests.get(f"{url}/metrics", timeout=5).text)

        assert page().value("sglang_tuning_retraction_events_total") == 0
        write(TOOL, decode(), retraction())
        assert page().value("sglang_tuning_retraction_events_total") == 0
        sglang.answers["/metrics"] = reply(native(12))
        assert page().value("sglang_tuning_retraction_events_total") == 1
        write(TOOL, retraction(ratio=0.5))
        assert page().value("sglang_tuning_retraction_events_total") == 1
        assert page().value("sglang_tuning_log_suspicious_total", kind="retraction") == 0
        with sidecar.view() as now:
            sidecar.state.advance(now + 16)
        assert page().value("sglang_tuning_retraction_events_total") == 1
        assert page().value("sglang_tuning_log_suspicious_total", kind="retraction") == 1


# A start ------------------------------------------------------------------------------------------------------------


def test_a_start_in_a_tools_name_changes_nothing() -> None:
    server = busy()
    server.say(5, "The server is fired up and ready to roll!")
    server.say(30, TOOL)
    server.say(30, args(", 'schedule_conservativeness': 9"))
    server.say(30, "max_total_num_tokens=17, chunked_prefill_size=1, max_running_requests=1")
    server.say(30, "The server is fired up and ready to roll!")
    assert (server.state.starts, server.state.facts.running_limit(None)) == (1, 400)
    assert server.state.facts.arg("schedule_conservativeness") is None
    assert server.doubted == {"startup": 3}


def test_a_start_soon_after_raw_words_is_one_if_it_prints_all_its_arguments() -> None:
    server = busy()
    server.say(30, TOOL)
    server.say(30, args(WHOLE))
    assert server.state.starts == 1
    server.say(33, "max_total_num_tokens=1700, chunked_prefill_size=512, max_running_requests=7")
    assert (server.state.starts, server.state.facts.running_limit(None), server.doubted) == (2, 7, {})
