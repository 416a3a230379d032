"""What rules and boards read: conditions, advice that stands, the verdict, burn rates, and what survives a restart of
the exporter.
"""

from __future__ import annotations

import json

import pytest

from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core import runbooks
from sglang_tuning_exporter.core.alerts import Clock, State, Words, conditions, turned
from sglang_tuning_exporter.core.course import Course
from sglang_tuning_exporter.core.diagnoses import BY_ID
from sglang_tuning_exporter.core.findings import Alert, Change, Figure, Finding, Judgement
from sglang_tuning_exporter.core.lines import Reader
from sglang_tuning_exporter.core.sums import Totals
from sglang_tuning_exporter.core.view import view_of
from sglang_tuning_exporter.core.watch import BurnRates, Watch
from sglang_tuning_exporter.sglang.metrics import RankFigures, Scrape
from sglang_tuning_exporter.sglang.server_info import ServerInfo
from test_core_course import BEGIN, decode, load, retraction, stamp, start
from test_core_watch import CRASH, Beside, served

# Conditions


@pytest.mark.parametrize(
    ("figure", "right"),
    [
        (Figure("", 0.7, "share", 0.5, "above"), (0.7, 0.5)),
        (Figure("", 0.3, "share", 0.5, "below"), (0.7, 0.5)),
        (Figure("", 3.0, "GB", 5.0, "below"), (2.0, 0.0)),
        (Figure("", 8.0, "GB", 5.0, "below"), (-3.0, 0.0)),
    ],
)
def test_above_the_limit_is_bad(figure: Figure, right: tuple[float, float]) -> None:
    assert turned(figure) == pytest.approx(right)


def test_a_condition_is_above_its_limit_where_the_row_holds() -> None:
    beside = served()
    beside.lines(*(decode(74 + at, queue=500, usage=0.97) for at in range(0, 200, 2)))
    beside.judge(280)
    assert beside.watch.measured is not None
    above = {name for name, value, limit in conditions(beside.watch.measured) if value > limit}
    assert above == {name for name in beside.watch.measured.holding if BY_ID[name].alert}


# Words


def finding(name: str, *changes: Change) -> Finding:
    row = BY_ID[name]
    return Finding(name, row.alert, row.severity, True, row.summary, "", "", "high", (), changes)  # noqa: FBT003 - a finding's own order


def judgement(name: str, *changes: Change) -> Judgement:
    return Judgement(name, "", "warning", (finding(name, *changes),), {})


def limit(to: float, now: float = 8.0) -> Change:
    return Change(
        arg="max_running_requests",
        direction="raise",
        why="It is the limit.",
        not_if="the cache is full",
        cost="Slower tokens.",
        flag="--max-running-requests",
        now=now,
        to=to,
    )


VIEW = view_of(Watch(PROFILES["online"], BEGIN, reads=True, scrapes=True).server, 600.0)


def words_over(*taken: tuple[float, Change], firing: dict[str, float] | None = None) -> Words:
    words = Words()
    for at, change in taken:
        words.take_judgement(judgement("running_at_limit", change), VIEW, at, firing or {})
    return words


def test_advice_keeps_its_words_for_ten_minutes() -> None:
    words = words_over((0.0, limit(16)), (60.0, limit(24)), (599.0, limit(32)))
    told = ("--max-running-requests", "8", "16", "It is the limit.", "the cache is full", "Slower tokens.")
    assert words.advice["running_at_limit"] == (told, 0.0)


def test_when_the_flag_was_set_the_advice_changes_at_once() -> None:
    advice, since = words_over((0.0, limit(16)), (60.0, limit(32, now=16.0))).advice["running_at_limit"]
    assert (advice[1:3], since) == (("16", "32"), 60.0)


@pytest.mark.parametrize(("begins", "suggested"), [(250.0, "32"), (None, "16"), (-90.0, "16")])
def test_the_advice_of_an_alert_is_that_of_the_moment_when_it_begins(begins: float | None, suggested: str) -> None:
    firing = {} if begins is None else {"running_at_limit": begins}
    words = words_over((0.0, limit(16)), firing={})
    for at, change in ((255.0, limit(32)), (270.0, limit(24))):
        words.take_judgement(judgement("running_at_limit", change), VIEW, at, firing)
    assert words.advice["running_at_limit"][0][2] == suggested


def test_advice_goes_ten_minutes_after_its_diagnosis() -> None:
    words = words_over((0.0, limit(16)))
    words.take_judgement(Judgement("healthy", "", "none", (), {}), VIEW, 590.0, {})
    kept = dict(words.advice)
    words.take_judgement(Judgement("healthy", "", "none", (), {}), VIEW, 620.0, {})
    assert (list(kept), words.advice) == (["running_at_limit"], {})


def test_a_saved_verdict_whose_age_is_no_number_is_left_out() -> None:
    words = Words()
    words.restore({"verdict": ["idle", "none", "The server is idle.", float("inf")]}, 600.0)
    assert (words.verdict, words.since) == ("", 0.0)


def test_an_hour_of_a_storm_makes_few_label_sets() -> None:
    beside, seen = served(), set[tuple[str, ...]]()
    for at in range(73, 3673, 5):
        swing = (at * 7919) % 100 / 100
        beside.lines(decode(at, running=40 + int(40 * swing), queue=int(900 * swing), usage=0.8 + 0.19 * swing))
        if at % 3 == 0:
            beside.lines(retraction(at, ratio=swing))
        beside.scrape(at + 1, retracted_requests=float((at - 70) // 15 + 1), finished_requests=float(at))
        beside.judge(at + 2)
        seen |= {(name, *advice[:4]) for name, (advice, _) in beside.watch.words.advice.items()}
        stands = beside.watch.words
        seen.add((stands.verdict, stands.level, stands.sentence))
    by_row = {name: [each for each in seen if each[0] == name] for name in {each[0] for each in seen}}
    assert max(map(len, by_row.values())) <= 10
    assert sum(map(len, by_row.values())) <= 40


# Burn rates


class Budget:
    """Burn rates beside what is counted, and when each minute's requests ended."""

    def __init__(self, minutes: int, late: float) -> None:
        self.rates, self.counted, self.minute = BurnRates(), Totals(), 0
        self.pass_minutes(minutes, late)

    def pass_minutes(self, minutes: int, late: float, requests: float = 10.0) -> None:
        for _ in range(minutes):
            self.rates.begin_minute(self.counted, 60.0 * self.minute + 30)
            self.counted["latency_observations.time_to_first_token"] += requests
            self.counted["latency_breaches.time_to_first_token"] += requests * late
            self.minute += 1

    def burning(self, rate: str, begun: float = 0.0) -> float | None:
        return self.rates.burning(self.counted, "time_to_first_token", rate, 60.0 * self.minute, begun)


def test_an_hour_that_was_bad_and_five_minutes_that_are_well_burn_no_more() -> None:
    budget = Budget(55, 0.4)
    budget.pass_minutes(5, 0.0)
    assert budget.burning("fast") == 0.0


def test_nothing_is_said_for_as_long_as_the_short_window_after_a_start() -> None:
    budget = Budget(60, 0.4)
    assert budget.burning("fast", begun=3400.0) is None
    assert budget.burning("slow", begun=2000.0) is None


# A restart of the exporter


def restarted(beside: Beside, at: float, age: float = 20.0) -> Watch:
    saved = json.loads(json.dumps(beside.watch.saved(BEGIN + at)))
    again = Watch(PROFILES["online"], BEGIN + at + age, reads=True, scrapes=True)
    again.restore(saved, BEGIN + at + age, age)
    return again


def troubled() -> Beside:
    beside = served()
    for at in range(73, 700, 5):
        beside.lines(decode(at, queue=3000, usage=0.97))
        beside.scrape(at + 1, running=60.0, queued=3000.0, full_usage=0.97, finished_requests=float(at))
        beside.judge(at + 2)
    return beside


def test_counts_ledger_words_and_alerts_go_on() -> None:
    beside = troubled()
    again = restarted(beside, 700)
    assert again.burn_rates.saved(BEGIN + 720) == beside.watch.burn_rates.saved(BEGIN + 720)
    assert again.server.counted == {name: value for name, value in beside.watch.server.counted.items() if value}
    assert {name for name, clock in again.clocks.by_diagnosis.items() if clock.value} == {
        name for name, clock in beside.watch.clocks.by_diagnosis.items() if clock.value
    }
    assert {name: words for name, (words, _) in again.words.advice.items()} == {
        name: words for name, (words, _) in beside.watch.words.advice.items()
    }


def test_no_present_figure_comes_back() -> None:
    again = restarted(troubled(), 700)
    assert (again.server.schedulers, again.server.facts.pools, again.judge(BEGIN + 721).verdict) == (
        {},
        {},
        "not_enough_data",
    )


def test_a_forged_line_that_waited_is_doubtful_after_a_restart_too() -> None:
    beside = served()
    beside.lines(retraction(73))
    again = Beside()
    again.watch, again.page = restarted(beside, 74, age=3.0), beside.page
    for at in range(78, 120, 4):
        again.scrape(at)
    assert (again.count("retraction_events"), dict(again.watch.doubtful)) == (0, {("retraction", "counter"): 1})


# Alerts over a log

HOUR = 3600.0


def alerts(*lines: str, end: float, profile: str = "online") -> list[Alert]:
    """The alerts of a log whose last line, with or without an event, is of `end`."""
    reader, course = Reader(), Course(PROFILES[profile])
    for line in lines:
        for event in reader.read(line.encode()):
            course.take_line(event)
    return list(course.end(BEGIN + end).alerts)


@pytest.mark.parametrize("later", [0, 120])
def test_for_a_cause_and_what_follows_from_it_somebody_is_called_once(later: int) -> None:
    """`later`: so many seconds after the queue has become long the batch is at its limit."""
    before = load(20, later, every=5, running=50, queue=3000, usage=0.4)
    at_limit = load(20 + later, 1400, every=5, running=60, queue=3000, usage=0.4)
    found = alerts(*start(limit=60), *before, *at_limit, end=1420 + later)
    assert [each.alert for each in found] == ["SGLangRunningAtLimit"]


@pytest.mark.parametrize(("starts", "fires"), [((0, 600), False), ((0, 600, 1100), True), ((0, 1500, 3000), False)])
def test_three_starts_in_half_an_hour_are_a_loop(starts: tuple[float, ...], *, fires: bool) -> None:
    lines = [line for at in starts for line in start(at)]
    assert ("SGLangRestartLoop" in [each.alert for each in alerts(*lines, end=HOUR)]) is fires


STOP = "SIGTERM received. signum=None frame=None. Draining requests and shutting down..."


def loops(*begins: tuple[float, int], stops: tuple[float, ...] = ()) -> bool:
    """Whether starts with these limits, and stops that were asked for, are a loop."""
    begun = [(at, line) for at, limit in begins for line in start(at, max_running_requests=limit)]
    asked = [(at, f"{stamp(at)}{STOP}") for at in stops]
    lines = [line for _, line in sorted(begun + asked, key=lambda timed: timed[0])]
    return "SGLangRestartLoop" in [each.alert for each in alerts(*lines, end=HOUR)]


def test_starts_with_changed_arguments_are_no_loop() -> None:
    assert not loops((0, 20), (300, 80), (600, 400))
    assert not loops((0, 20), (300, 80), (600, 400), stops=(270, 570))
    assert not loops((0, 20), (200, 20), (400, 80), (600, 80))


def test_a_changed_start_begins_a_count_that_the_third_alike_fills() -> None:
    assert loops((0, 20), (200, 80), (400, 80), (600, 80))


def test_one_stop_that_was_asked_for_is_left_out_of_the_count() -> None:
    assert not loops((0, 20), (300, 20), (600, 20), stops=(270,))
    assert loops((0, 20), (300, 20), (600, 20), (900, 20), stops=(270,))


def test_the_same_arguments_stopped_and_started_again_and_again_are_a_loop() -> None:
    assert loops((0, 20), (300, 20), (600, 20), stops=(270, 570))


def test_a_loop_of_starts_is_a_warning() -> None:
    lines = [line for at in (0, 600, 1100) for line in start(at)]
    assert [each.severity for each in alerts(*lines, end=HOUR) if each.alert == "SGLangRestartLoop"] == ["warning"]


@pytest.mark.parametrize(
    ("limits", "counted"), [((20, 20, 20, 20), 3.0), ((20, 40, 80, 400), 1.0), ((20, 40, 80, 80), 2.0)]
)
def test_starts_that_only_pages_show_are_compared_by_the_answered_arguments(
    limits: tuple[int, ...], counted: float
) -> None:
    """The first start is from before the exporter."""
    watch = Watch(PROFILES["online"], BEGIN, reads=False, scrapes=True)
    for number, limit in enumerate(limits):
        for at, progress in ((0, 5.0), (5, 6.0), (10, 2000.0)):
            watch.take_page(Scrape([RankFigures(None, running=0.0)], progress=progress), BEGIN + 200 * number + at)
            watch.take_facts(ServerInfo("0.5.23", {"tp_size": 1, "max_running_requests": limit}))
    assert watch.view(BEGIN + 700).totals["starts_recently"] == counted


def fires(beside: Beside, name: str, at: float) -> bool | None:
    beside.judge(at)
    return beside.watch.clocks.by_diagnosis[name].value


# A server that ends: what is called, and until when

OUT_OF_MEMORY = (
    "Scheduler hit an exception: Traceback (most recent call last):",
    '  File "/srv/sglang/scheduler.py", line 3012, in run_scheduler_process',
    '  File "/srv/sglang/model_runner.py", line 2100, in {function}',
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.75 GiB. GPU 0 has a total capacity of 79.11 GiB.",
)
DIED = "Scheduler hit an exception: Traceback (most recent call last):"
DEATHS = {
    "SGLangCrashed": (CRASH,),
    "SGLangOutOfMemoryDecode": tuple(line.format(function="forward_decode") for line in OUT_OF_MEMORY),
    "SGLangOutOfMemoryPrefill": tuple(line.format(function="forward_extend") for line in OUT_OF_MEMORY),
}
DEAD, STEP, LOADING = 300, 15, 90  # seconds: when it dies, between two scrapes, of a start


class Mortal:
    """A server that dies when it is told to, and what fires at each scrape of the exporter beside it."""

    def __init__(self, *, scrapes: bool) -> None:
        self.beside, self.now, self.fires = Beside(scrapes=scrapes), 0, dict[int, dict[str, str]]()
        self._scrapes = scrapes
        self.start(at_once=True)

    def _judge(self) -> None:
        self.beside.judge(self.now)
        self.fires[self.now] = {each.alert: each.severity for each in self.beside.watch.clocks.firing}

    def start(self, *, at_once: bool = False) -> None:
        """Print a start, and be ready after the time of loading."""
        lines = start(self.now)
        self.beside.lines(*lines[:-1])
        if not at_once:
            self.away(LOADING, starts=True)
        self.beside.lines(f"{stamp(self.now)}{lines[-1].partition('] ')[2]}")

    def serve(self, seconds: int) -> None:
        for _ in range(0, seconds, STEP):
            self.now += STEP
            self.beside.lines(decode(self.now))
            if self._scrapes:
                self.beside.scrape(self.now, running=60.0, finished_requests=float(self.now))
            self._judge()

    def die(self, alert: str) -> None:
        self.beside.lines(f"{stamp(self.now)}{DEATHS[alert][0]}", *DEATHS[alert][1:])
        if alert != "SGLangCrashed":
            self.beside.lines(
                f"{stamp(self.now)}SIGQUIT received. signum=None, frame=None. It usually means one child failed."
            )

    def away(self, seconds: int, *, starts: bool = False) -> None:
        for _ in range(0, seconds, STEP):
            self.now += STEP
            if self._scrapes:
                self.beside.watch.lose("connection_refused", "connection refused", BEGIN + self.now)
            elif not starts:
                self.beside.watch.advance(BEGIN + self.now)
            self._judge()

    def spans(self, severity: str = "critical") -> list[tuple[set[str], int, int]]:
        """The times in which alerts of this severity fire without a break: which, and from when to when."""
        found = list[tuple[set[str], int, int]]()
        for at, firing in self.fires.items():
            names = {alert for alert, of in firing.items() if of == severity}
            if names and found and found[-1][2] == at - STEP:
                found[-1] = (found[-1][0] | names, found[-1][1], at)
            elif names:
                found.append((names, at, at))
        return found


@pytest.mark.parametrize("scrapes", [True, False])
@pytest.mark.parametrize("alert", DEATHS)
def test_a_server_that_never_comes_back_stays_critical(alert: str, *, scrapes: bool) -> None:
    mortal = Mortal(scrapes=scrapes)
    mortal.serve(DEAD)
    mortal.die(alert)
    mortal.away(4 * 3600)
    ((names, begin, end),) = mortal.spans()
    assert (begin - DEAD <= 2 * STEP, end) == (True, mortal.now)
    assert names == {alert}
    assert mortal.spans("warning") == []


@pytest.mark.parametrize("scrapes", [True, False])
@pytest.mark.parametrize("away", [0, 40 * 60])
@pytest.mark.parametrize("alert", DEATHS)
def test_the_alert_of_an_end_lasts_exactly_until_the_server_is_ready(alert: str, away: int, *, scrapes: bool) -> None:
    mortal = Mortal(scrapes=scrapes)
    mortal.serve(DEAD)
    mortal.die(alert)
    mortal.away(away)
    mortal.start()
    ready = mortal.now
    mortal.serve(3600)
    ((_, begin, end),) = mortal.spans()
    assert begin - DEAD <= 2 * STEP
    assert abs(end - ready) <= STEP
    assert mortal.spans("warning") == []


@pytest.mark.parametrize("scrapes", [True, False])
def test_two_deaths_are_two_alerts_and_the_first_is_not_told_again(*, scrapes: bool) -> None:
    mortal = Mortal(scrapes=scrapes)
    for alert in ("SGLangOutOfMemoryDecode", "SGLangOutOfMemoryPrefill"):
        mortal.serve(DEAD)
        mortal.die(alert)
        mortal.away(60)
        mortal.start()
    mortal.serve(1200)
    assert [names for names, *_ in mortal.spans()] == [{"SGLangOutOfMemoryDecode"}, {"SGLangOutOfMemoryPrefill"}]


def test_a_server_that_is_stopped_or_serves_calls_nobody() -> None:
    mortal = Mortal(scrapes=True)
    mortal.serve(DEAD)
    mortal.beside.lines(f"{stamp(mortal.now)}{STOP}")
    mortal.away(1800)
    mortal.start()
    mortal.serve(1800)
    assert mortal.spans() == []


def test_a_failure_that_the_server_survives_is_no_end_of_it() -> None:
    mortal = Mortal(scrapes=False)
    mortal.serve(DEAD)
    mortal.die("SGLangOutOfMemoryDecode")
    mortal.serve(3600)
    assert mortal.fires[mortal.now] == {}


@pytest.mark.parametrize("scrapes", [True, False])
def test_one_incident_has_one_flag_as_long_as_it_lasts(*, scrapes: bool) -> None:
    mortal = Mortal(scrapes=scrapes)
    mortal.serve(DEAD)
    mortal.die("SGLangOutOfMemoryDecode")
    flags = set[str]()
    for _ in range(120):
        mortal.away(STEP)
        answer = mortal.beside.judge(mortal.now)
        flags |= {each.changes[0].flag for each in answer.findings if each.changes and each.severity == "critical"}
    assert flags - {""} == {"--max-running-requests"}


def test_a_milder_cause_holds_back_no_alert() -> None:
    beside = Beside()
    for at in range(0, 3600, 15):  # four starts: a loop, which is a warning
        if at in {0, 300, 600, 900}:
            beside.watch.lose("connection_refused", "connection refused", BEGIN + at)
            beside.lines(*start(at))
        if at < 930:
            beside.scrape(at + 1, running=4.0)
        else:
            beside.watch.lose("connection_refused", "connection refused", BEGIN + at)
        beside.judge(at + 1)
        if at == 1395:
            names = {each.alert for each in beside.watch.clocks.firing}
    assert {"SGLangServerDown", "SGLangRestartLoop"} <= names


def clock_of(name: str) -> Clock:
    return Clock(BY_ID[name])


def test_what_follows_begins_at_once_when_the_alert_of_its_cause_ends() -> None:
    clock = clock_of("queue_too_long")
    for at in range(0, 1200, 15):
        clock.pass_on(at, at, state=State(holds=True, hindered=True, held_back=True))
    assert clock.firing is None
    clock.pass_on(1200, 1200, state=State(holds=True))
    assert clock.alert(None).at == 1185


def test_what_follows_stays_silent_where_it_ended_before_the_alert_of_its_cause() -> None:
    clock = clock_of("queue_too_long")
    for at in range(0, 1200, 15):
        clock.pass_on(at, at, state=State(holds=at < 900, held_back=True))
    clock.pass_on(1200, 1200, state=State(holds=False))
    clock.pass_on(1215, 1215, state=State(holds=True))
    assert clock.firing is None


def test_the_end_of_an_alert_about_an_end_says_that_the_server_answers() -> None:
    assert runbooks.past(BY_ID["out_of_memory_decode"]).endswith("The server answers again.")
    assert runbooks.past(BY_ID["crashed"]) == "SGLang crashed. The server answers again."
    assert "answers again" not in runbooks.past(BY_ID["graph_memory_short"])
    assert "answers again" not in runbooks.past(BY_ID["retracting_too_often"])
