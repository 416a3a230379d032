"""Which stage of a server hangs: pages and log lines in, the stage or nothing out."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timezone

import pytest

from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.lines import Reader
from sglang_tuning_exporter.core.scrapes import Stuck
from sglang_tuning_exporter.core.watch import Watch
from sglang_tuning_exporter.sglang.metrics.page_figures import RankFigures, Scrape
from sglang_tuning_exporter.sglang.server_info import ServerInfo
from test_core_course import BEGIN, decode, prefill, stamp

STEP = 5.0


@dataclass
class Server:
    """A server whose stages can be stopped; `new` releases count passes and open requests, old ones only generated tokens."""

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
                self.watch.take(event)

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
            rank.graph_passes, rank.eager_passes = self.passes, 0.0
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
    def stuck(self) -> Stuck | None:
        return self.watch.view(BEGIN + self.now).stuck

    def tick(self, times: int = 1) -> None:
        """Let time pass without anything being done."""
        for _ in range(times):
            self.now += STEP
            self.watch.scrape(self.page(), BEGIN + self.now)
            stuck = self.stuck
            self.stages.append((self.now, "" if stuck is None else stuck.stage))

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


def test_a_detokenizer_that_hangs_is_found_though_its_clients_give_up_again_and_again(server: Server) -> None:
    begin = server.now
    for number in range(24):
        if number % 6 == 0:
            server.aborted += 24.0
        if number % 6 in {1, 2, 3, 4}:
            server.computes()
        server.tick()
    at, stage = server.found
    assert (stage, at - begin <= 90) == ("detokenizer", True)


# Since when: SGLang's line of a failed health check says when the last token was sent


def failed_check(at: float, last_output: float) -> str:
    clocks = [f"{datetime.fromtimestamp(BEGIN + each, timezone.utc):%H:%M:%S}" for each in (at - 20, last_output)]
    return (
        f"{stamp(at)}Health check failed. Server couldn't get a response from detokenizer for last 20 seconds."
        " tic start time: {}. last_heartbeat time: {}".format(*clocks)
    )


def test_a_hang_begins_with_the_last_output_whenever_health_checks_fail() -> None:
    server = Server()
    server.serves()
    begin = server.now
    for _ in range(14):
        if (server.now - begin) % 20 == 5 and server.now - begin > 20:
            server.says(failed_check(server.now, begin))
        server.tick()
        found = [
            each for each in server.watch.judge(BEGIN + server.now).findings if each.diagnosis == "scheduler_stuck"
        ]
        assert {each.since for each in found} <= {BEGIN + begin}
        assert not any("health" in each.sentence for each in found)
    assert found


def test_checks_that_are_made_by_hand_do_not_date_a_hang_before_an_idle_hour() -> None:
    server = Server()
    server.running = server.open = 0.0
    server.tick(20)
    server.running = server.open = 24.0
    server.serves(60)
    server.sent += 1.0
    begin = server.now
    server.says(failed_check(begin + 80, begin - 3600), failed_check(begin + 100, begin - 3600))
    server.tick(20)
    (found,) = (each for each in server.watch.judge(BEGIN + server.now).findings if each.diagnosis == "scheduler_stuck")
    assert found.since is not None
    assert found.since >= BEGIN + begin - 30


# What is no hang


def test_a_long_prompt_in_prefill(server: Server) -> None:
    server.running, server.queued = 0.0, 1.0
    for _ in range(60):
        server.scheduled += 8192.0
        server.figures += 1.0
        server.says(prefill(server.now, 8192, running=0, queue=1))
        server.tick()
    assert server.found == (0.0, "")


def test_health_checks_of_an_idle_server(server: Server) -> None:
    server.running = server.open = 0.0
    for _ in range(120):
        server.scheduled += 3.0  # the counters of the scheduler move, and none of what is sent
        server.tick()
    assert server.found == (0.0, "")


def test_clients_that_give_up_before_the_first_tokens_are_due(server: Server) -> None:
    server.logs = False
    for _ in range(60):
        server.computes(steps=20)
        server.aborted += 24.0
        server.tick()
    assert server.found == (0.0, "")


def test_a_grammar_that_is_compiled(server: Server) -> None:
    server.running, server.open, server.grammar = 0.0, 2.0, 2.0
    server.tick(60)
    assert server.found == (0.0, "")


@pytest.mark.parametrize("queue", ["bootstrap", "prealloc", "transfer", "inflight"])
def test_requests_that_wait_for_the_other_server_of_a_pair(server: Server, queue: str) -> None:
    server.running, server.open, server.queues = 0.0, 8.0, {queue: 8.0}
    server.tick(60)
    assert server.found == (0.0, "")


# A pause that was asked for


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
                server.watch.check_health(now if answered else now + 10.0, answered=answered, lasted=10.0)
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


def test_an_idle_server_is_never_asked(server: Server) -> None:
    server.running = server.open = 0.0
    assert waits(server, 3600, answered=True) == 0


def test_requests_that_wait_outside_of_all_stages_are_no_hang() -> None:
    server = Server(logs=False)
    server.serves()
    server.running, server.open = 0.0, 1.0  # a tokenizer that fetches an image, and a token is generated on demand
    assert waits(server, 300, answered=True) > 3
    assert server.found == (0.0, "")


# What counts of other findings during a hang, and the setting that delays tokens


def test_a_stream_interval_of_a_thousand_steps_is_waited_for() -> None:
    server = Server()
    server.watch.inform(ServerInfo("0.5.23", {"stream_interval": 1000}))
    server.serves()
    for number in range(60):
        server.computes(steps=40)
        if number % 25 == 24:
            server.sent += 1000.0
        server.tick()
    assert server.found == (0.0, "")
