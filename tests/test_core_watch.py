"""A server as it is watched: lines of its log and pages of its metrics in, judgements, counts and alerts out."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.answer import counted
from sglang_tuning_exporter.core.counters import Counters
from sglang_tuning_exporter.core.events import Event
from sglang_tuning_exporter.core.findings import Judgement
from sglang_tuning_exporter.core.lines import Reader
from sglang_tuning_exporter.core.sums import Totals
from sglang_tuning_exporter.core.watch import Watch
from sglang_tuning_exporter.recordings.recording import load
from sglang_tuning_exporter.recordings.replay import packaged
from sglang_tuning_exporter.sglang.metrics import Histogram, RankFigures, Scrape
from sglang_tuning_exporter.sglang.server_info import ServerInfo
from test_core_course import ARGUMENTS, BEGIN, decode, judged, prefill, retraction, stamp, start
from watched import end_of, watched

CRASH = "Subprocess scheduler_0 (pid=77) crashed with exit code -9. Triggering SIGQUIT for cleanup..."


class Beside:
    """A watch beside a server whose figures a test sets; `now` is in seconds since its beginning."""

    def __init__(self, profile: str = "online", *, reads: bool = True, scrapes: bool = True) -> None:
        self.watch = Watch(PROFILES[profile], BEGIN, reads=reads, scrapes=scrapes)
        self.page = Scrape(
            [RankFigures(running=0.0, queued=0.0, full_usage=0.0, retracted_requests=0.0)],
            progress=0.0,
            sent=0.0,
            finished_requests=0.0,
            aborted_requests=0.0,
        )
        self._reader = Reader()

    def lines(self, *lines: str) -> None:
        for line in lines:
            for event in self._reader.read(line.encode()):
                self.watch.take_line(event)

    def scrape(self, at: float, *, work: float = 100.0, **figures: Any) -> None:
        """Scrape a page with these figures of its scheduler, or of the whole server, after so much more work."""
        rank = {name: figures.pop(name) for name in [*figures] if hasattr(self.page.ranks[0], name)}
        moved = {"progress": (self.page.progress or 0.0) + work, "sent": (self.page.sent or 0.0) + work}
        self.page = replace(self.page, ranks=[replace(self.page.ranks[0], **rank)], **{**moved, **figures})
        self.watch.take_page(self.page, BEGIN + at)

    def judge(self, at: float) -> Judgement:
        return self.watch.judge(BEGIN + at)

    def count(self, name: str) -> float:
        return self.watch.server.counted[name]


def served(seconds: int = 60, **figures: Any) -> Beside:
    """A watch beside a server that ran 60 requests for so long, with log and metrics."""
    beside = Beside()
    beside.lines(*start())
    beside.scrape(11, work=0.0, **figures)
    for at in range(12, 12 + seconds, 2):
        beside.lines(decode(at))
        if at % 4 == 0:
            beside.scrape(at, running=60.0, full_usage=0.5, finished_requests=float(at), **figures)
    return beside


# Retractions


@given(
    st.lists(st.tuples(st.floats(0.1, 6.0), st.integers(1, 4)), min_size=1, max_size=40),
    st.floats(1.0, 15.0),
    st.floats(0.0, 2.0),
    st.sampled_from([0.0, 5.0, 20.0, 90.0]),
)
def test_no_real_retraction_is_lost_or_doubled_by_any_scraper(
    happened: list[tuple[float, int]], pause: float, age: float, late: float
) -> None:
    """`age`: how old a page is when it comes; `late`: how old lines are, which a busy machine reads late."""
    beside, at, times = served(), 73.0, list[tuple[float, int]]()
    for after, requests in happened:
        at += after
        times.append((at, requests))
    now, left = 72.0, list(times)
    while now < at + 60 + late:
        now += pause
        beside.watch.read_to = BEGIN + now - late
        while left and left[0][0] <= now - late:
            taken(beside, "retraction", now, requests=left[0][1], gained=left.pop(0)[0])
        beside.scrape(now, retracted_requests=float(sum(number for when, number in times if when <= now - age)))
    assert beside.count("retraction_events") == len(times)
    assert beside.count("retracted_requests") == sum(number for _, number in times)
    assert not beside.watch.doubtful


@given(st.lists(st.tuples(st.floats(0.1, 3.0), st.booleans()), min_size=1, max_size=40), st.floats(1.0, 6.0))
def test_beside_the_counter_forged_lines_add_nothing(lines: list[tuple[float, bool]], pause: float) -> None:
    beside, now, real, due = served(), 73.0, 0, 73.0
    for after, is_real in lines:
        now += after
        real += is_real
        beside.lines(retraction(now))
        if now >= due:
            beside.scrape(now, retracted_requests=float(real))
            due = now + pause
    for step in range(20):
        beside.scrape(now + 3 * (step + 1), retracted_requests=float(real))
    assert beside.count("retraction_events") == real
    assert sum(beside.watch.doubtful.values()) == len(lines) - real


def test_of_contradicting_lines_the_smallest_and_unmarked_ones_count() -> None:
    beside = served()
    for requests, marked in ((3, False), (1, False), (1, True), (1, False), (1, False)):
        beside.watch.take_line(Event("retraction", BEGIN + 73, figures={"requests": requests}, marked=marked))
    beside.scrape(76, retracted_requests=3.0)
    assert (beside.count("retraction_events"), beside.watch.server.window(60)["marked.retraction_events"]) == (3, 0)


def taken(beside: Beside, kind: str, at: float, *, past: bool = False, **figures: float) -> None:
    beside.watch.take_line(Event(kind, BEGIN + at, figures=figures), past=past)


def test_a_retraction_before_the_first_page_is_not_counted_twice() -> None:
    beside = Beside()
    beside.scrape(12, retracted_requests=0.0)
    beside.scrape(18, retracted_requests=1.0)
    taken(beside, "retraction", 15, past=True, requests=1)
    beside.scrape(20)
    beside.watch.advance(BEGIN + 60)
    assert (beside.count("retraction_events"), beside.count("retracted_requests")) == (1, 1)


# Requests that are too long or refused, and health checks


@pytest.mark.parametrize("kind", ["too_long", "refused"])
def test_of_lines_about_requests_not_more_count_than_requests_came(kind: str) -> None:
    beside = served(generation_posts=10.0)
    for _ in range(50):
        taken(beside, kind, 73, tokens=9000, most=8000)
    beside.scrape(76, generation_posts=13.0)
    for at in range(80, 120, 4):
        beside.scrape(at)
    assert (beside.count(kind), dict(beside.watch.doubtful)) == (3, {(kind, "counter"): 47})


def test_no_line_about_a_request_is_paid_by_requests_of_minutes_before() -> None:
    beside = served(generation_posts=10.0)
    beside.scrape(76, generation_posts=500.0)
    for at in range(80, 200, 4):
        beside.scrape(at)
    taken(beside, "refused", 200)
    for at in range(204, 260, 4):
        beside.scrape(at)
    assert (beside.count("refused"), dict(beside.watch.doubtful)) == (0, {("refused", "counter"): 1})


def test_a_flood_of_such_lines_crowds_out_no_retraction() -> None:
    beside = served(generation_posts=10.0)
    for _ in range(3000):
        taken(beside, "refused", 73)
    beside.lines(retraction(73))
    beside.scrape(76, retracted_requests=1.0)
    assert beside.count("retraction_events") == 1


def test_a_failed_health_check_of_a_server_that_sends_tokens_is_no_hang() -> None:
    beside = served()
    taken(beside, "health", 73, silent=23)
    for at in range(76, 150, 4):
        beside.scrape(at, finished_requests=float(at))
        assert "scheduler_stuck" not in {each.diagnosis for each in beside.judge(at).findings}
    assert beside.watch.doubtful == {("health", "works_on"): 1}


# What a scheduler does now


def test_a_server_that_is_away_shows_no_present_figures_and_keeps_its_counts() -> None:
    beside = served()
    beside.watch.lose("connection_refused", "nothing listens", BEGIN + 75)
    scheduler = beside.watch.server.schedulers[None]
    shown = scheduler.shown
    assert (shown.running, shown.queued, shown.usages) == (None, None, {})
    assert scheduler.moment(BEGIN + 76).activity == "unknown"
    assert beside.watch.server.life(None)["replayed_batches"] == 30 * 40


# Ends and starts


def test_a_crash_of_a_server_that_works_on_is_doubtful() -> None:
    beside = served()
    beside.lines(stamp(73) + CRASH)
    beside.scrape(76)
    assert dict(beside.watch.doubtful) == {}, "its page may have been made before"
    beside.scrape(78)
    assert (beside.count("ends"), beside.watch.doubtful) == (0, {("end", "works_on"): 1})


def test_a_forged_start_changes_no_verdict_and_no_limit() -> None:
    plain, forged, alone = served(), served(), served()
    forged.lines(*start(73, limit=1, pool=10))
    alone.lines(start(73, limit=1, pool=10)[2])
    for beside in (plain, forged, alone):
        for at in range(74, 100, 3):
            beside.lines(decode(at))
            beside.scrape(at, finished_requests=float(at))
    assert forged.judge(101) == alone.judge(101) == plain.judge(101)
    assert alone.watch.server.facts.limits == plain.watch.server.facts.limits
    assert forged.watch.doubtful == {("arguments", "works_on"): 1}


def test_of_a_burst_behind_a_forged_start_nothing_is_lost() -> None:
    beside = served()
    beside.lines(stamp(73) + "server_args=ServerArgs(model_path='x')")
    beside.lines(*(decode(73 + step / 1000) for step in range(5000)))
    beside.scrape(77)
    beside.scrape(80)
    beside.scrape(83)
    assert beside.count("decode_lines") == 5030


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=30))
def test_single_spoiled_pages_change_no_count(pages: list[tuple[int, bool]]) -> None:
    """Each page after so many more requests; one that is spoiled has lost most of its counters."""
    beside, finished, spoiled = Beside(reads=False), 100.0, False
    beside.scrape(0, finished_requests=finished, progress=1000.0)
    for place, (more, is_spoiled) in enumerate([*pages, (0, False)]):
        finished, spoiled = finished + more, is_spoiled and not spoiled
        lost = 0.1 if spoiled else 1.0
        beside.scrape(4.0 * place + 4, finished_requests=finished * lost, progress=(900 + finished + place) * lost)
    assert (beside.count("finished_requests"), beside.watch.server.starts) == (finished - 100, 0)


@pytest.mark.parametrize(
    "spoiled", [{"progress": 3.0}, {"finished_requests": 2.0}, {"counters_invalid": True, "finished_requests": None}]
)
def test_one_spoiled_page_is_no_start_and_counts_nothing(spoiled: dict[str, Any]) -> None:
    beside = served()
    before = beside.count("finished_requests")
    good = beside.page
    beside.scrape(76, **spoiled)
    beside.page = good
    beside.scrape(80, finished_requests=80.0)
    assert beside.watch.server.starts == 1
    assert beside.count("finished_requests") - before == 80.0 - (good.finished_requests or 0.0)


IMPOSSIBLE: list[dict[str, Any]] = [
    {"counters_invalid": True, "finished_requests": None},
    {"progress": 1e15},
    {"finished_requests": 1e15},
    {"retracted_requests": 1e15},
    {"progress": 3.0},
]


@pytest.mark.parametrize("impossible", IMPOSSIBLE)
def test_one_page_that_no_server_can_have_is_set_aside_with_its_gauges(impossible: dict[str, Any]) -> None:
    beside = served(available_gpu_memory_gb=20.0)
    good, before = beside.page, Totals(beside.watch.server.counted)
    beside.scrape(76, running=999.0, available_gpu_memory_gb=-1.0, **impossible)
    server = beside.watch.server
    assert server.schedulers[None].shown.running == 60.0
    assert server.facts.page[None].available_gpu_memory_gb == 20.0
    beside.page = good
    beside.scrape(80, finished_requests=80.0)
    assert (server.starts, server.capped["pages"]) == (1, 1)
    assert server.counted["finished_requests"] - before["finished_requests"] == 80.0 - (good.finished_requests or 0.0)
    assert server.counted["retracted_requests"] == before["retracted_requests"]


def test_of_pages_whose_counters_are_no_figures_all_the_time_the_gauges_are_used() -> None:
    beside = served()
    for at in (76, 80, 84):
        beside.scrape(at, running=5.0, counters_invalid=True)
    server = beside.watch.server
    assert (server.schedulers[None].shown.running, server.capped["pages"]) == (5.0, 1)


def test_counters_that_leapt_and_stay_there_are_those_of_the_server() -> None:
    beside = served()
    beside.scrape(76, finished_requests=2e9)
    beside.scrape(80, finished_requests=2e9 + 5)
    assert beside.count("finished_requests") > 1.9e9


@pytest.mark.parametrize("others", [0.5, 2.0], ids=["a server with fewer", "a server with more"])
def test_of_two_servers_whose_pages_come_in_turn_one_is_followed_and_that_is_said(others: float) -> None:
    beside, counters = Beside(reads=False), {"finished_requests": 1000.0, "progress": 9000.0}
    other = {name: value * others for name, value in counters.items()}
    seen = []
    for turn in range(12):
        for running, figures in ((10.0, counters), (90.0, other)):
            figures["finished_requests"] += 1.0
            figures["progress"] += 9.0
            beside.scrape(8.0 * turn + running / 20, running=running, **figures)
        seen.append(beside.watch.server.counters.alternate)
    server = beside.watch.server
    assert seen == [*seen[:4], *[True] * 8]
    assert not seen[0]
    assert server.schedulers[None].shown.running == (10.0 if others < 1 else 90.0)
    assert server.starts == 0
    assert server.counted["finished_requests"] <= 12.0 + 1000.0  # of the first change to a server with more


def test_a_server_that_starts_anew_beside_no_other_is_not_taken_for_two() -> None:
    beside = served()
    for turn in range(4):
        for step in range(3):
            beside.scrape(80 + 12 * turn + 4 * step, finished_requests=step + 1.0, progress=9.0 * step + 1)
    assert not beside.watch.server.counters.alternate


SIGTERM = "SIGTERM received. signum=None frame=None. Draining requests and shutting down..."
REMAINING = "Gracefully exiting... Remaining number of requests 3. Remaining requests remaining_rids=['a', 'b', 'c']."


def test_after_an_ordered_end_the_verdict_is_stopped_and_nothing_else_is_found() -> None:
    beside = served()
    beside.lines(*(decode(74 + at, queue=3000, usage=0.97) for at in range(0, 100, 2)))
    beside.scrape(173)
    before = beside.judge(174).verdict
    beside.lines(stamp(174) + SIGTERM)
    beside.watch.lose("connection_refused", "nothing listens", BEGIN + 176)
    assert (before, beside.judge(177).verdict, beside.judge(177).findings) == ("queue_too_long", "stopped", ())


def test_a_server_that_works_on_long_after_it_was_asked_to_end_was_not_stopped() -> None:
    beside = served()
    beside.lines(stamp(73) + SIGTERM, *(decode(74 + at) for at in range(0, 40, 2)))
    beside.watch.lose("connection_refused", "nothing listens", BEGIN + 115)
    assert beside.judge(116).verdict == "server_down"


def test_with_the_log_alone_a_server_that_was_asked_to_end_and_is_silent_has_stopped() -> None:
    beside = Beside(scrapes=False)
    beside.lines(*start(), *(decode(12 + at) for at in range(0, 60, 2)), stamp(73) + SIGTERM, stamp(78) + REMAINING)
    before = beside.judge(100).verdict
    assert (before, beside.judge(120).verdict) == ("no_limit_in_log", "stopped")
    beside.lines(decode(125))
    assert beside.judge(126).verdict == "no_limit_in_log"


def test_often_down_is_reported_after_an_hour_of_watching() -> None:
    beside = Beside(reads=False)
    found = {}
    for at in range(0, 3700, 60):
        if at % 1200 < 900:
            beside.scrape(at, running=4.0)
        else:
            beside.watch.lose("unreachable", "it does not answer", BEGIN + at)
        found[at] = "often_down" in {each.diagnosis for each in beside.judge(at).findings}
    assert [at for at, said in found.items() if said] == [3600, 3660]


# Requests


def timed_out(after: float, share: float = 0.6) -> Beside:
    """A server whose requests end by a share at one age, the others sooner."""
    beside = served()
    bounds = (0.2, 1.0, 2.0, 4.0, 8.0, inf)
    ended = tuple(100.0 * (bound >= after) + 5.0 * (bound >= 0.2) for bound in bounds)
    histogram = Histogram(bounds, ended, 300.0)
    empty = Histogram(bounds, (0.0,) * 6, 0.0)
    beside.scrape(73, request_latency=empty)
    beside.scrape(75, request_latency=histogram, finished_requests=173.0, aborted_requests=173.0 * share)
    return beside


def test_clients_that_give_up_at_one_age_have_a_time_out() -> None:
    found = timed_out(4.0).judge(76)
    assert found.verdict == "clients_time_out"
    assert "after 2 to 4 s" in found.findings[0].sentence


def test_requests_that_are_cancelled_within_a_second_are_no_time_out() -> None:
    assert timed_out(1.0, share=0.4).judge(76).verdict == "healthy"


# What is over


def burst(until: int = 500, *, queue: int = 0) -> Beside:
    """A watch beside the log of a server that retracted every six seconds until 200 s, and then served on."""
    beside = Beside(scrapes=False)
    beside.lines(*start(limit=400))
    for at in range(12, until, 2):
        beside.lines(decode(at, running=60, queue=queue, usage=0.95 if at < 200 else 0.5))
        if at % 6 == 0 and at < 200:
            beside.lines(retraction(at))
        if at % 20 == 0:
            beside.judge(at)
    return beside


def test_a_watchdogs_hang_is_over_only_after_work() -> None:
    beside = Beside(scrapes=False)
    beside.lines(*start(), *(decode(at) for at in range(12, 80, 2)))
    beside.lines(f"{stamp(380)}Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)")
    assert beside.judge(560).sentence.startswith("SGLang hangs")


def test_a_start_that_log_and_counters_show_is_one_whatever_lies_between() -> None:
    beside = served(800)
    beside.lines(*start(900))
    beside.scrape(911, progress=1.0)
    beside.scrape(915)
    assert beside.watch.server.starts == 2


def test_by_metrics_alone_a_queue_that_the_next_batch_takes_is_not_held_back() -> None:
    beside = Beside(reads=False)
    beside.watch.take_facts(ServerInfo("0.5.23", ARGUMENTS))
    for step in range(20):
        beside.scrape(
            4.0 * step, finished_requests=40.0 * step, running=12.0, queued=2.0, full_usage=0.3,
            admitted_requests=40.0 * step,
            prefill_passes=30.0 * step, eager_batches=90.0 * step, computed_tokens=60_000.0 * step,
        )  # fmt: skip
    assert "admission_too_conservative" not in {each.diagnosis for each in beside.judge(80).findings}


def test_what_a_log_says_live_does_not_hang_on_when_its_lines_are_read() -> None:
    whole, bit_by_bit = Beside(scrapes=False), Beside(scrapes=False)
    for at in range(12, 60, 3):
        lines = [prefill(at, running=number, usage=number / 100) for number in range(0, 40, 4)]
        whole.lines(*lines)
        for number, line in enumerate(lines):
            bit_by_bit.lines(line)
            bit_by_bit.watch.advance(BEGIN + at + number / 10)
    assert bit_by_bit.watch.view(BEGIN + 65).mean("usage") == whole.watch.view(BEGIN + 65).mean("usage")


# What counters gained between two pages


def gained(*pages: dict[str, Any]) -> dict[str, float]:
    """Return what the pages gained together, the first of them aside."""
    counters, whole = Counters(), dict[str, float]()
    for figures in pages:
        counters.take(Scrape([RankFigures()], **figures), is_new=True)
        for name, more in counters.counts.items():
            whole[name] = whole.get(name, 0.0) + more
    return whole


@pytest.mark.parametrize(
    ("answered", "opened", "failed"),
    [(8.0, 0.0, 2.0), (10.0, 0.0, 0.0), (8.0, 2.0, 0.0)],  # the last two are still open
)
def test_requests_that_end_without_an_answer_failed(answered: float, opened: float, failed: float) -> None:
    pages = [
        {"generation_posts": 10.0 * n, "generation_responses": answered * n, "open_requests": opened * n}
        for n in (0, 1, 1)
    ]
    assert gained(*pages)["server_errors"] == failed


def test_a_request_that_one_page_has_before_it_is_open_has_not_failed() -> None:
    pages = [{"generation_posts": 10.0, "generation_responses": 0.0, "open_requests": open_} for open_ in (10, 9, 10)]
    assert gained(*pages)["server_errors"] == 0


@pytest.mark.parametrize(
    ("running", "refused"),
    [([0.0, 0.0, 0.0], 16.0), ([8.0, 8.0, 0.0], 16.0), ([8.0, 8.0, 8.0], 8.0)],  # those that ran may be eight of them
)
def test_requests_that_finish_without_a_first_token_were_refused(running: list[float], refused: float) -> None:
    """Each page 8 are refused and 2 answered; those that run at first finish later, and
    had their first token before.
    """
    pages = [
        {
            "finished_requests": 10.0 * n + running[0] - runs,
            "started_requests": 2.0 * n + running[0],
            "open_requests": runs,
        }
        for n, runs in enumerate(running)
    ]
    assert gained(*pages)["tokenless_requests"] == refused


def test_a_server_that_refuses_every_request_is_not_healthy() -> None:
    beside = Beside(reads=False)
    for step in range(20):
        beside.scrape(
            4.0 * step, finished_requests=40.0 * step, started_requests=1.0, running=1.0 * (step % 2), queued=0.0,
            full_usage=0.0,
            prefill_passes=30.0 * step, computed_tokens=60_000.0 * step,
        )  # fmt: skip
    assert beside.judge(80).verdict == "requests_refused"


# What is shown beside the judgement


@pytest.mark.parametrize(("aborted", "rejected"), [(0.0, 5), (5.0, 0)])
def test_streams_that_leave_the_queue_unstarted_were_rejected_unless_given_up(aborted: float, rejected: int) -> None:
    beside = Beside(reads=False)
    beside.scrape(0, queued_requests=5.0, admitted_requests=0.0, open_requests=5.0, answered_requests=0.0)
    beside.scrape(4, open_requests=0.0, answered_requests=5.0, aborted_requests=aborted)
    assert beside.count("rejected_requests") == rejected


def test_a_start_from_before_the_exporter_is_not_shown_beside_a_count_of_no_starts() -> None:
    watch, reader = Watch(PROFILES["online"], BEGIN, reads=True, scrapes=False), Reader()
    watch.recall([event for line in [*start(), decode(12)] for event in reader.read(line.encode())], BEGIN + 15)
    shown = watch.report(watch.judge(BEGIN + 20), BEGIN + 20)
    assert shown.starts[0].time == BEGIN
    assert "starts" not in counted(shown)


def test_lines_that_nobody_counted_are_not_shown_as_none() -> None:
    watch = Watch(PROFILES["online"], BEGIN, reads=True, scrapes=False)
    assert "lines" not in counted(watch.report(watch.judge(BEGIN + 20), BEGIN + 20))


def test_tokens_a_second_are_over_the_prefill_between_the_decode_lines_too() -> None:
    lines = []
    for begin in range(20, 140, 20):  # ten seconds of each
        lines += [decode(begin + second, throughput=1200) for second in range(0, 10, 2)]
        lines += [prefill(begin + second, 8192, 0, queue=4) for second in range(10, 20)]
    [began] = judged([*start(), *lines]).starts
    assert began.figures["generated_tokens_per_second"] == pytest.approx(600, rel=0.1)


def test_once_a_server_has_no_metrics_any_more_its_log_counts_the_batches() -> None:
    beside = Beside()
    for at in (0, 4):
        beside.scrape(at, replayed_batches=10.0 * at)
    beside.watch.lose("metrics_disabled", "it answers 404", BEGIN + 5)
    beside.lines(decode(6))
    assert beside.watch.server.life(None)["replayed_batches"] == 40 + 40


def test_a_line_of_a_server_that_is_gone_counts() -> None:
    beside = served()
    beside.lines(retraction(73))
    beside.watch.lose("connection_refused", "nothing listens", BEGIN + 75)
    assert beside.count("retraction_events") == 1


def test_while_scrapes_fail_a_line_counts_at_once() -> None:
    beside = served()
    beside.watch.lose("timeout", "no answer", BEGIN + 74)
    beside.lines(retraction(75), stamp(76) + CRASH)
    assert (beside.count("retraction_events"), beside.count("ends")) == (1, 1)


def test_a_retraction_from_before_the_first_page_counts_as_with_the_log_alone() -> None:
    beside = Beside()
    beside.scrape(12, retracted_requests=1.0)
    taken(beside, "retraction", 8, past=True, requests=1)
    beside.scrape(60)
    assert (beside.count("retraction_events"), beside.count("retracted_requests"), dict(beside.watch.doubtful)) == (
        1,
        1,
        {},
    )


def test_a_retraction_that_the_first_page_may_have_counted_is_not_doubtful() -> None:
    beside = Beside()
    beside.scrape(12, retracted_requests=1.0)
    taken(beside, "retraction", 12.5, requests=1)
    for at in range(16, 60, 4):
        beside.scrape(at)
    assert (beside.count("retraction_events"), dict(beside.watch.doubtful)) == (1, {})


def test_a_burst_that_is_over_is_said_in_the_past_tense() -> None:
    judgement = burst().judge(500)
    assert judgement.verdict == "retracting_too_often"
    assert judgement.sentence == "SGLang retracted running requests 32 times until 10:03: the KV cache was full."


def test_what_goes_on_comes_before_what_is_over() -> None:
    judgement = burst(queue=3000).judge(500)
    assert judgement.verdict == "queue_too_long"
    assert [each.diagnosis for each in judgement.findings if each.over] == ["retracting_too_often"]


@pytest.mark.parametrize("begin", range(0, 150, 30))
def test_while_the_log_cannot_be_read_the_servers_counter_goes_on(begin: int) -> None:
    """With a real server that retracts: its log ends after so many seconds."""
    retracting = load(packaged("retract"))
    retracting = replace(retracting, lines=tuple(line for line in retracting.lines if line.at < begin))
    watch = watched(retracting)
    watch.advance(end_of(retracting) + 60)
    assert (watch.server.counted["retracted_requests"], dict(watch.doubtful)) == (10, {})


# What log and metrics decide together


def test_a_crash_counts_when_the_server_is_gone_or_stands_still_or_no_page_comes() -> None:
    gone, still, unasked = served(), served(), served()
    for beside in (gone, still, unasked):
        beside.lines(stamp(73) + CRASH)
        assert beside.count("ends") == 0
    gone.watch.lose("connection_refused", "nothing listens", BEGIN + 74)
    for at in range(74, 110, 3):
        still.scrape(at, work=0.0)
    unasked.watch.advance(BEGIN + 104)
    assert [beside.count("ends") for beside in (gone, still, unasked)] == [1, 1, 1]


def test_a_crash_in_the_text_of_a_client_is_none_when_all_clients_have_left() -> None:
    beside = served()
    beside.lines(stamp(73) + CRASH)
    for at in range(74, 120, 3):
        beside.scrape(at, work=0.0, running=0.0)
    assert (beside.count("ends"), dict(beside.watch.doubtful)) == (0, {("end", "works_on"): 1})


def test_a_failed_health_check_of_a_server_that_sends_none_counts() -> None:
    beside = served()
    taken(beside, "health", 73, silent=23)
    for at in range(74, 120, 4):
        beside.scrape(at, sent=beside.page.sent)
    assert beside.count("health_failures") == 1


def test_ten_seconds_without_a_token_beside_running_requests_are_no_health() -> None:
    beside = served()  # whose last page with new tokens is of 68
    beside.scrape(76, sent=beside.page.sent)
    assert [beside.judge(at).verdict for at in (77, 79)] == ["healthy", "not_enough_data"]


def test_a_server_that_nobody_asks_is_healthy_though_it_sends_nothing() -> None:
    beside = served()
    beside.scrape(76, sent=beside.page.sent, running=0.0)
    assert beside.judge(90).verdict == "healthy"


def test_every_start_that_only_the_counters_show_counts_also_one_behind_an_outage() -> None:
    beside = Beside(reads=False)
    for begin in (0, 100, 200):
        for step in range(20):
            beside.scrape(begin + 4 * step, progress=100.0 * (step + 1))
    assert beside.watch.server.starts == 2
    beside.watch.lose("connection_refused", "nothing listens", BEGIN + 285)
    beside.scrape(300, progress=1.0)
    assert beside.watch.server.starts == 3


def test_what_the_page_counts_is_not_counted_by_the_log_and_what_the_log_lacks_is() -> None:
    beside = served(answered_requests=5.0)
    refused = f'{stamp(73)}INFO:     10.0.0.1:1 - "POST /generate HTTP/1.1" 503 Service Unavailable'
    beside.lines(refused, refused, refused)
    beside.scrape(75, answered_requests=5.0, refused_requests=2.0, retracted_requests=4.0)
    beside.watch.advance(BEGIN + 90)
    assert [beside.count(name) for name in ("rejected_requests", "retraction_events", "retracted_requests")] == [
        2,
        0,
        4,
    ]
    first = served()  # the counter of a status that never came is not there yet
    first.lines(refused, refused, refused)
    for at in range(75, 90, 3):
        first.scrape(at, refused_requests=2.0)
    assert first.count("rejected_requests") == 2


def test_retractions_of_the_counters_are_paid_by_the_rank_that_logged_them() -> None:
    beside = Beside()
    for at, counts in ((1, (0, 0)), (6, (1, 0)), (9, (1, 1))):
        ranks = [RankFigures(dp, 3.0, 0.0, 0.5, retracted_requests=float(count)) for dp, count in enumerate(counts)]
        beside.watch.take_page(Scrape(ranks, progress=100.0 * at), BEGIN + at)
        if at == 1:
            beside.lines(retraction(3, ranks=" DP1 TP0"))
    beside.watch.advance(BEGIN + 30)
    lives = [beside.watch.server.life(dp) for dp in (0, 1)]
    assert [(life["retraction_events"], life["retracted_requests"]) for life in lives] == [(0, 1), (1, 1)]


def test_the_log_of_another_server_disagrees_and_one_that_stays_silent_is_said() -> None:
    beside = served()
    beside.scrape(73, kv_pool_tokens=5_000.0)
    assert "sources_disagree" in {each.diagnosis for each in beside.judge(74).findings}
    for at in range(74, 260, 5):
        beside.scrape(at, running=60.0)
    assert "log_silent" in {each.diagnosis for each in beside.judge(260).findings}


def test_a_server_that_works_on_by_its_metrics_has_not_ended() -> None:
    beside = served()
    beside.lines(stamp(72) + SIGTERM)
    text = "ValueError: increase --mem-fraction-static"
    beside.watch.take_line(Event("words", BEGIN + 73, word="memory", text=text, figures={"chain": 1}))
    for at in range(76, 140, 4):
        beside.lines(decode(at))
        beside.scrape(at)
    beside.watch.lose("connection_refused", "nothing listens", BEGIN + 141)
    judgement = beside.judge(142)
    assert judgement.verdict == "server_down"
    assert [change.flag for change in judgement.findings[0].changes] == [""]


def test_late_answers_are_counted_from_zero() -> None:
    beside, bounds = Beside(reads=False), (0.5, 2.0, inf)
    names = (
        "latency_observations.time_to_first_token",
        "latency_breaches.time_to_first_token",
        "finished_requests",
    )
    for at, counts, expected in ((0, (4.0, 4.0, 4.0), [0, 0, 0]), (4, (6.0, 6.0, 9.0), [5, 3, 0])):
        beside.scrape(at, time_to_first_token=Histogram(bounds, counts, 1.0))
        assert [beside.count(name) for name in names] == expected
