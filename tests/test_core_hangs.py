"""Which stage of a server hangs: pages and log lines in, the stage or nothing out."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.lines import Reader
from sglang_tuning_exporter.core.progress import Hang
from sglang_tuning_exporter.core.watch import Watch
from sglang_tuning_exporter.sglang.metrics import RankFigures, Scrape
from sglang_tuning_exporter.sglang.server_info import ServerInfo
from test_core_course import BEGIN, decode, stamp, start

STEP = 5.0


@dataclass
class Server:
    """A server whose stages can be stopped; `new` releases count passes and open requests, old ones only generated
    tokens.
    """

    new: bool = True
    logs: bool = True
    now: float = 20.0
    running: float = 24.0
    queued: float = 0.0
    open: float = 24.0
    sent: float = 1000.0
    scheduled: float = 5000.0
    passes: float = 100.0
    aborted: float = 0.0
    grammar: float = 0.0
    pauses: float = 0.0
    resumptions: float = 0.0
    queues: dict[str, float] = field(default_factory=dict)
    figures: float = 0.0  # what makes the gauges differ from page to page

    def __post_init__(self) -> None:
        self.watch, self.reader = Watch(PROFILES["online"], BEGIN, reads=True, scrapes=True), Reader()
        self.stages: list[tuple[float, str]] = []

    def says(self, *lines: str) -> None:
        for line in lines:
            for event in self.reader.read(line.encode()):
                self.watch.take_line(event)

    def page(self) -> Scrape:
        rank = RankFigures(
            None,
            running=self.running,
            queued=self.queued,
            grammar_queued=self.grammar,
            full_usage=0.5,
            used_tokens=self.figures,
            generation_throughput=100.0 + self.figures if self.running else 0.0,
            queues=dict(self.queues),
        )
        if self.new:
            rank.replayed_batches, rank.eager_batches = self.passes, 0.0
        return Scrape(
            [rank],
            progress=self.sent + (self.scheduled if self.new else 0.0),
            sent=self.sent,
            scheduled=self.scheduled if self.new else None,
            aborted_requests=self.aborted,
            open_requests=self.open if self.new else None,
            posted_requests=100.0 + self.pauses + self.resumptions,
            pauses=self.pauses,
            resumptions=self.resumptions,
        )

    @property
    def stuck(self) -> Hang | None:
        return self.watch.view(BEGIN + self.now).stuck

    def tick(self, times: int = 1) -> None:
        """Let time pass without anything being done."""
        for _ in range(times):
            self.now += STEP
            self.watch.take_page(self.page(), BEGIN + self.now)
            stuck = self.stuck
            self.stages.append((self.now, "" if stuck is None else stuck.stage or ""))

    def computes(self, steps: float = 40.0) -> None:
        """The scheduler decodes."""
        self.scheduled += 200.0
        self.passes += steps
        self.figures += 1.0
        if self.logs:
            self.says(decode(self.now, int(self.running), int(self.queued)))

    def serves(self, seconds: float = 60.0) -> None:
        for _ in range(int(seconds / STEP)):
            self.computes()
            self.sent += 150.0
            self.tick()

    @property
    def found(self) -> tuple[float, str]:
        """When a hang was found first, and its stage."""
        return next(((at, stage) for at, stage in self.stages if stage), (0.0, ""))


@pytest.fixture(params=["new", "old"])
def server(request: pytest.FixtureRequest) -> Server:
    made = Server(new=request.param == "new")
    made.serves()
    return made


# What is no hang


def test_a_grammar_that_is_compiled(server: Server) -> None:
    server.running, server.open, server.grammar = 0.0, 2.0, 2.0
    server.tick(60)
    assert server.found == (0.0, "")


@pytest.mark.parametrize("queue", ["bootstrap", "prealloc", "transfer", "inflight"])
def test_requests_that_wait_for_the_other_server_of_a_pair(server: Server, queue: str) -> None:
    server.running, server.open, server.queues = 0.0, 8.0, {queue: 8.0}
    server.tick(60)
    assert server.found == (0.0, "")


def test_what_moves_slowly_hangs_nowhere(server: Server) -> None:
    server.running, server.queued = 0.0, 1.0  # a long prompt in prefill
    for _ in range(30):
        server.scheduled, server.figures = server.scheduled + 8192.0, server.figures + 1.0
        server.tick()
    server.running, server.queued = 24.0, 0.0
    server.serves()
    for number in range(30):  # every request sends its tokens after fifty steps
        server.computes(steps=10)
        server.sent += 50.0 * (number % 5 == 4)
        server.tick()
    server.logs = False
    for _ in range(30):  # clients give up before their first tokens are due
        server.computes(steps=20)
        server.aborted += 24.0
        server.tick()
    server.running = server.open = 0.0  # all left, and the server is idle
    server.tick(30)
    assert server.found == (0.0, "")


def test_a_server_whose_clients_have_all_left_hangs_nowhere(server: Server) -> None:
    server.computes(steps=50)
    server.tick()
    server.computes(steps=60)
    server.running = server.open = 0.0  # before their tokens were due
    server.tick(30)
    assert server.found == (0.0, "")


def test_a_long_prompt_whose_first_token_is_on_its_way() -> None:
    server = Server()
    server.serves()
    server.open = 1.0
    for _ in range(14):
        server.scheduled, server.figures = server.scheduled + 8192.0, server.figures + 1.0
        server.tick()
    server.running = 0.0
    server.tick()
    assert server.found == (0.0, "")


@pytest.mark.parametrize(
    ("argument", "steps", "pages"), [({"stream_interval": 1000}, 40, 25), ({"speculative_algorithm": "EAGLE3"}, 30, 9)]
)
def test_where_tokens_are_sent_after_many_steps_they_are_waited_for(
    argument: dict[str, object], steps: float, pages: int
) -> None:
    server = Server()
    server.watch.take_facts(ServerInfo("0.5.23", argument))
    server.serves()
    for number in range(60):
        server.computes(steps)
        server.sent += 1000.0 * (number % pages == pages - 1)
        server.tick()
    assert server.found == (0.0, "")


# What is one


@pytest.mark.parametrize("stage", ["detokenizer", "scheduler"])
def test_a_stage_that_stops_is_found_within_ninety_seconds_and_until_the_first_token(
    server: Server, stage: str
) -> None:
    begin = server.now
    for _ in range(20):
        if stage == "detokenizer":
            server.computes()
        server.tick()
    at, found = server.found
    assert (found, at - begin <= 90) == (stage, True)
    server.serves(STEP)
    assert server.stages[-1][1] == ""


def test_a_tokenizer_that_passes_nothing_on_is_found() -> None:
    server = Server()
    server.serves()
    server.running, server.open = 0.0, 8.0
    server.tick(30)
    assert server.found[1] == "tokenizer"


def test_a_hang_that_only_the_log_shows_begins_with_the_last_output() -> None:
    watch, reader = Watch(PROFILES["online"], BEGIN, reads=True, scrapes=False), Reader()
    checks = [
        f"{stamp(at)}Health check failed. Server couldn't get a response from detokenizer for last 20 seconds."
        f" tic start time: {stamp(at - 20)[12:20]}. last_heartbeat time: {stamp(71)[12:20]}"
        for at in (95, 115, 135, 155)
    ]
    for line in (*start(), *(decode(12 + at) for at in range(0, 60, 2)), *checks):
        for event in reader.read(line.encode()):
            watch.take_line(event)
    (found,) = (each for each in watch.judge(BEGIN + 156).findings if each.diagnosis == "scheduler_stuck")
    assert (found.since, found.sentence) == (BEGIN + 71, "84 s in which nothing moved while requests were there")


# A pause that was asked for


def test_a_pause_is_no_hang_and_one_after_it_is_found(server: Server) -> None:
    server.pauses += 1.0  # new weights are loaded
    server.tick(60)
    server.resumptions += 1.0
    server.tick(10)  # the first tokens come some time after it continues
    server.serves()
    assert server.found == (0.0, "")
    server.tick(20)
    assert server.found[1] == "scheduler"


def test_a_pause_that_nobody_ends_is_a_hang_after_ten_minutes(server: Server) -> None:
    begin = server.now
    server.pauses += 1.0
    server.tick(150)
    at, stage = server.found
    assert (stage, at - begin) == ("scheduler", 605)
    assert server.stuck is not None
    assert server.stuck.sentence == "the server has been paused by /pause_generation for 745 s (24 requests)"


def test_a_forged_pause_hides_no_hang() -> None:
    server = Server()
    server.serves()
    server.says(f'{stamp(server.now)}INFO:     127.0.0.1:48044 - "POST /pause_generation HTTP/1.1" 200 OK')
    server.tick(20)
    assert server.found[1] == "scheduler"


# Health checks of the exporter's own: where requests are open and no figure changes


def waits(server: Server, seconds: float, *, answered: bool | None) -> int:
    """Let time pass, and checks be made as the sidecar makes them, each ten seconds long; return how many."""
    asked, last = 0, -100.0
    for _ in range(int(seconds / STEP)):
        server.tick()
        now = BEGIN + server.now
        if server.now - last >= 25.0 and server.watch.server.progress.is_suspicious(now):
            asked, last = asked + 1, server.now
            if answered is not None:
                server.watch.server.progress.check(now if answered else now + 10.0, answered=answered, lasted=10.0)
    return asked


def idle() -> Server:
    """An old release without a log: its clients give up, and no figure shows why."""
    server = Server(new=False, logs=False)
    server.serves()
    server.running = 0.0
    server.tick()
    server.aborted += 3.0
    return server


def test_a_scheduler_that_stopped_while_it_was_idle_is_found_by_health_checks() -> None:
    server = idle()
    assert waits(server, 120, answered=False) >= 3
    assert server.found[1] == "scheduler"


def test_a_check_that_is_answered_ends_the_suspicion() -> None:
    server = idle()
    assert (waits(server, 3600, answered=True), server.found[1]) == (1, "")


def test_an_idle_server_is_never_asked(server: Server) -> None:
    server.running = server.open = 0.0
    assert waits(server, 3600, answered=True) == 0


def test_requests_that_wait_outside_of_all_stages_are_no_hang() -> None:
    server = Server(logs=False)
    server.serves()
    server.running, server.open = 0.0, 1.0  # a tokenizer that fetches an image, and a token is generated on demand
    assert waits(server, 300, answered=True) > 3
    assert server.found == (0.0, "")


def test_a_log_is_silent_if_tokens_come_without_lines_not_in_an_idle_night(server: Server) -> None:
    server.logs = False
    server.serves(300)
    server.running = server.open = 0.0
    server.tick(200)
    assert 200 < (server.watch.silent_log_seconds(BEGIN + server.now) or 0.0) <= 300 + 2 * STEP
    server.logs, server.running = True, 24.0
    server.computes()
    assert server.watch.silent_log_seconds(BEGIN + server.now) == 0.0
