"""Which stage of a server hangs: scrapes and log lines in, the stage or nothing out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest

from sglang_tuning_exporter.diagnosis.evidence import past_of
from sglang_tuning_exporter.diagnosis.findings import judge
from sglang_tuning_exporter.sglang.events import (
    NO_RANK,
    DecodeBatch,
    Liveness,
    Pause,
    PrefillBatch,
    RankFigures,
    Scrape,
    ServerArgs,
)
from sglang_tuning_exporter.sglang.log.reader import LogReader
from sglang_tuning_exporter.sglang.metrics import page_figures as facts
from sglang_tuning_exporter.state.latency import RecentLatency
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.server import ServerState

STEP = 5.0
CHECK_FAILED = (
    b"[2026-11-22 10:12:02] Health check failed. Server couldn't get a response from detokenizer for last 20 seconds."
    b" tic start time: 10:11:42. last_heartbeat time: 10:11:41\n"
)
RETRACTION = (
    b"[2026-11-22 10:12:02] KV cache pool is full. Retract requests. #retracted_reqs: 5, #new_tokens_gained: 8950,"
    b" #new_token_ratio: 0.3002 -> 0.5783\n"
)


@dataclass
class Server:
    """A server whose stages can be stopped; `new` releases count passes and open requests, old ones only generated tokens."""

    new: bool = True
    has_metrics: bool = True
    logs: bool = True
    now: float = 0.0
    running: float = 24.0
    queued: float = 0.0
    open: float = 24.0
    sent: float = 1000.0
    scheduled: float = 5000.0
    passes: float = 100.0
    aborted: float = 0.0
    decoded: float = 0.0
    admitted: float = 0.0
    grammar: float = 0.0
    pauses: float = 0.0
    resumptions: float = 0.0
    queues: dict[str, float] = field(default_factory=dict)
    figures: float = 0.0  # what makes the gauges differ from scrape to scrape
    args: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.state = ServerState(PROFILES["online"], 0.0)
        self.state.facts.args = dict(self.args)
        self.stages: list[tuple[float, str]] = []

    def scrape(self) -> Scrape:
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
            rank.decoded_tokens, rank.admitted_requests = self.decoded, self.admitted
        scheduled = self.scheduled if self.new else None
        return Scrape(
            [rank],
            progress=self.sent + (scheduled or 0.0),
            sent=self.sent,
            scheduled=scheduled,
            aborted_requests=self.aborted,
            open_requests=self.open if self.new else None,
            posted_requests=100.0 + self.pauses + self.resumptions,
            pauses=self.pauses,
            resumptions=self.resumptions,
        )

    def tick(self) -> None:
        self.now += STEP
        if self.has_metrics:
            self.state.observe_scrape(self.scrape(), self.now)
        self.state.advance(self.now)
        hang = self.state.hang(self.now)
        self.stages.append((self.now, "" if hang is None else hang.stage))

    def computes(self, tokens: float = 200.0, steps: float = 40.0) -> None:
        """The scheduler decodes."""
        self.scheduled += tokens
        self.passes += steps
        self.figures += 1.0
        if self.logs:
            line = DecodeBatch(
                None, NO_RANK, int(self.running), int(self.queued), 500, 0.5, graph=True, graph_device="cuda"
            )
            self.state.observe(line, self.now)

    def prefills(self) -> None:
        """The scheduler computes the next chunk of a prompt."""
        self.scheduled += 8192.0
        self.figures += 1.0
        if self.logs:
            self.state.observe(PrefillBatch(None, NO_RANK, 1, 8192, 0, int(self.running), int(self.queued)), self.now)

    def serves(self, seconds: float) -> None:
        for _ in range(int(seconds / STEP)):
            self.computes()
            self.sent += 150.0
            self.tick()

    def check_fails(self) -> None:
        for event in LogReader().feed(CHECK_FAILED):
            self.state.observe(event, self.now)

    def found(self) -> tuple[float, str] | None:
        """The stage that hangs, and since when."""
        return next(((at, stage) for at, stage in self.stages if stage), None)


@pytest.fixture(params=["new", "old"])
def server(request: pytest.FixtureRequest) -> Server:
    return Server(new=request.param == "new")


def test_a_server_that_serves_hangs_nowhere(server: Server) -> None:
    server.serves(600)
    assert server.found() is None


def test_a_detokenizer_that_hangs_while_the_scheduler_decodes_on_is_found_within_ninety_seconds(server: Server) -> None:
    server.serves(60)
    for _ in range(20):
        server.computes()
        server.tick()
    at, stage = server.found() or (0.0, "")
    assert stage == "detokenizer"
    assert 60 <= at - 60 <= 90


def test_a_detokenizer_is_found_though_its_clients_give_up_again_and_again(server: Server) -> None:
    server.serves(60)
    for number in range(24):
        if number % 6 == 0:
            server.aborted += 24.0
        if number % 6 in {1, 2, 3, 4}:
            server.computes()
        server.tick()
    at, stage = server.found() or (0.0, "")
    assert stage == "detokenizer"
    assert at - 60 <= 90


def test_a_detokenizer_is_found_after_the_scheduler_has_done_all_there_was_to_do() -> None:
    server = Server(logs=False)
    server.serves(60)
    server.computes(steps=20)
    server.tick()
    server.running = 0.0
    for _ in range(20):
        server.tick()
    at, stage = server.found() or (0.0, "")
    assert (stage, at - 60 <= 90) == ("detokenizer", True)


def test_a_scheduler_that_hangs_under_load_is_found_within_ninety_seconds(server: Server) -> None:
    server.serves(60)
    for _ in range(20):
        server.tick()
    at, stage = server.found() or (0.0, "")
    assert stage == "scheduler"
    assert 60 <= at - 60 <= 90


def test_a_paused_server_hangs_nowhere_for_ten_minutes(server: Server) -> None:
    """New weights are loaded meanwhile. Its health checks fail, and the first tokens come some time after it continues."""
    server.serves(60)
    server.pauses += 1.0
    for _ in range(60):
        server.check_fails()
        server.tick()
    server.resumptions += 1.0
    for _ in range(10):
        server.tick()
    server.serves(300)
    assert server.found() is None


def test_a_pause_that_nobody_ends_is_a_hang_after_ten_minutes(server: Server) -> None:
    server.serves(60)
    server.pauses += 1.0
    for _ in range(150):
        server.tick()
    at, stage = server.found() or (0.0, "")
    assert (stage, at - 60) == ("scheduler", 605)
    hang = server.state.hang(server.now)
    assert hang is not None
    assert hang.sentence == "the server has been paused by /pause_generation for 745 s (24 requests)"


def test_a_server_that_hangs_after_a_pause_is_found(server: Server) -> None:
    server.serves(60)
    server.pauses += 1.0
    server.tick()
    server.resumptions += 1.0
    for _ in range(20):
        server.tick()
    assert (server.found() or (0.0, ""))[1] == "scheduler"


def test_a_pause_is_known_at_the_first_look_and_from_the_access_log() -> None:
    paused, logged = Server(pauses=3.0, resumptions=2.0), Server(has_metrics=False)
    for _ in range(20):
        paused.tick()
    assert paused.found() is None
    access = b'[2026-11-22 10:12:02] INFO:     127.0.0.1:48044 - "POST /pause_generation HTTP/1.1" 200 OK\n'
    for event in LogReader().feed(access):
        logged.state.observe(event, logged.now)
    for _ in range(20):
        logged.check_fails()
        logged.tick()
    assert logged.found() is None
    for event in LogReader().feed(access.replace(b"pause", b"continue")):
        logged.state.observe(event, logged.now)
    logged.tick()
    assert logged.found() is None


def test_a_forged_pause_hides_no_hang_from_a_server_that_counts_its_requests() -> None:
    server = Server()
    server.serves(60)
    server.state.observe(Pause(None, NO_RANK, ends=False), server.now)
    for _ in range(20):
        server.tick()
    assert (server.found() or (0.0, ""))[1] == "scheduler"


def test_while_the_scheduler_hangs_the_queue_wait_is_unbounded() -> None:
    server = Server(queued=3.0)
    server.serves(60)
    for _ in range(20):
        server.tick()
    assert [rank.queue_wait_seconds(server.now) for rank in server.state.schedulers] == [math.inf]


def test_the_verdict_names_stage_seconds_and_requests() -> None:
    server = Server()
    server.serves(60)
    for _ in range(15):
        server.computes()
        server.tick()
    judgement = judge(past_of(server.state, server.now))
    found = judgement.findings[0]
    assert judgement.verdict == "scheduler_stuck"
    assert found.headline == "The detokenizer hangs: tokens are generated and not sent for 75 s (24 requests)."
    assert found.sentence == "the detokenizer hangs: tokens are generated and not sent for 75 s (24 requests)"


def test_a_hang_ends_with_the_first_token(server: Server) -> None:
    server.serves(60)
    for _ in range(20):
        server.computes()
        server.tick()
    assert server.stages[-1][1] == "detokenizer"
    server.serves(STEP)
    assert server.stages[-1][1] == ""


def test_a_restart_ends_a_hang(server: Server) -> None:
    server.serves(60)
    for _ in range(20):
        server.computes()
        server.tick()
    assert server.state.hang(server.now) is not None
    server.state.lost_scrape(server.now)
    server.state.observe(ServerArgs(None, NO_RANK, {"tp_size": 1}), server.now)
    assert server.state.hang(server.now) is None


def test_a_long_prompt_in_prefill_is_no_hang(server: Server) -> None:
    server.serves(60)
    server.running, server.queued = 0.0, 1.0
    for _ in range(60):
        server.prefills()
        server.tick()
    assert server.found() is None


def test_an_idle_server_that_is_probed_hangs_nowhere(server: Server) -> None:
    server.serves(60)
    server.running = server.open = 0.0
    for _ in range(120):
        server.scheduled += 3.0  # a check's prefill moves the scheduler's counters, and none of what comes out
        server.tick()
    assert server.found() is None


def test_counters_that_the_scheduler_updates_late_are_no_hang() -> None:
    """Its counters are written every forty steps: those of a load that is over may come with the next check."""
    server = Server()
    server.serves(60)
    server.running = server.open = 0.0
    server.computes(steps=39)
    for _ in range(120):
        server.tick()
    assert server.found() is None


def test_a_line_of_a_slow_server_stands_for_forty_steps_once() -> None:
    # A step takes 1.5 s, so fifty steps without output take 75 s; this release counts no decode batches itself.
    state = ServerState(PROFILES["online"], 0.0)
    for now in range(0, 75, 5):
        if now == 30:
            state.observe(DecodeBatch(None, NO_RANK, 4, 0, 100, 0.5, graph=True), 30.0)
        figures = RankFigures(running=4.0, queued=0.0, used_tokens=float(now))
        state.observe_scrape(Scrape([figures], sent=10.0, progress=float(now)), float(now))
        assert state.hang(float(now)) is None


def test_answers_that_are_not_streamed_come_out_now_and_then(server: Server) -> None:
    """Every request gives its tokens out after fifty steps, streamed or not."""
    server.serves(60)
    for number in range(60):
        server.computes(steps=10)
        if number % 5 == 4:
            server.sent += 50.0
        server.tick()
    assert server.found() is None


def test_a_stream_interval_of_a_thousand_steps_is_waited_for() -> None:
    server = Server(args={"stream_interval": 1000.0})
    server.serves(60)
    for number in range(60):
        server.computes(steps=40)
        if number % 25 == 24:
            server.sent += 1000.0
        server.tick()
    assert server.found() is None


def test_clients_that_all_left_are_no_hang(server: Server) -> None:
    server.serves(60)
    server.aborted += 24.0
    server.running = server.open = 0.0
    for _ in range(60):
        server.tick()
    assert server.found() is None


def test_clients_that_give_up_before_the_first_tokens_are_due_are_no_hang(server: Server) -> None:
    """A slow server: each of them is gone after twenty steps."""
    server.logs = False
    server.serves(60)
    for _ in range(60):
        server.computes(steps=20)
        server.aborted += 24.0
        server.tick()
    assert server.found() is None


def test_tokens_of_more_than_all_requests_may_have_prove_a_hang_however_many_give_up() -> None:
    """Each burst is given up and made again within one interval between scrapes."""
    server = Server()
    server.serves(60)
    for number in range(24):
        if number % 6 == 0:
            server.aborted += 24.0
            server.decoded += 4800.0
            server.admitted += 24.0
        server.tick()
    at, stage = server.found() or (0.0, "")
    assert (stage, at - 60 <= 90) == ("detokenizer", True)


def test_tokens_that_all_requests_may_have_had_prove_no_hang() -> None:
    """A slow server whose clients all give up after twenty tokens."""
    server = Server()
    server.serves(60)
    for _ in range(60):
        server.aborted += 24.0
        server.decoded += 480.0
        server.admitted += 24.0
        server.computes(steps=0)
        server.tick()
    assert server.found() is None


def test_a_grammar_that_is_compiled_is_no_hang(server: Server) -> None:
    server.serves(60)
    server.running, server.open, server.grammar = 0.0, 2.0, 2.0
    for _ in range(60):
        server.tick()
    assert server.found() is None


@pytest.mark.parametrize("queue", ["bootstrap", "prealloc", "transfer", "inflight"])
def test_waiting_for_the_other_server_of_a_prefill_decode_pair_is_no_hang(server: Server, queue: str) -> None:
    server.serves(60)
    server.running, server.open, server.queues = 0.0, 8.0, {queue: 8.0}
    for _ in range(60):
        server.tick()
    assert server.found() is None


def test_a_release_whose_tokens_come_out_at_the_end_is_not_judged_by_them() -> None:
    """Before 0.4.3 no metric counts the tokens of a request without streaming until it ends."""
    page = "sglang:generation_tokens_total 10\nsglang:num_running_reqs 3\n"
    assert facts.read(page).sent is None
    later = page + "sglang:inter_token_latency_seconds_count 5\n"
    assert facts.read(later).sent == 15


def test_only_requests_that_generate_are_open() -> None:
    page = "".join(
        f'sglang:http_requests_active{{endpoint="{endpoint}",method="{method}"}} {count}\n'
        for endpoint, method, count in (
            ("/generate", "POST", 3),
            ("/v1/chat/completions", "POST", 4),
            ("/metrics", "GET", 1),
            ("/update_weights_from_disk", "POST", 1),
            ("/health_generate", "GET", 2),
        )
    )
    assert facts.read(page).open_requests == 7


class TestFromTheLogAlone:
    """Health checks are the only requests: SGLang prints each one that fails, twenty seconds after its begin."""

    @pytest.fixture
    def server(self) -> Server:
        server = Server(has_metrics=False)
        server.serves(60)
        server.now += 25.0
        return server

    def fails(self, server: Server, times: int, every: float = 20.0, *, batch: bool = False) -> list[str]:
        """Give the hanging stage after each check."""
        stages: list[str] = []
        for _ in range(times):
            server.check_fails()
            if batch:
                server.state.observe(PrefillBatch(None, NO_RANK, 1, 1, 0, 0, 0), server.now + 1)
            hang = server.state.hang(server.now)
            stages.append("" if hang is None else hang.stage)
            server.now += every
        return stages

    def test_failed_checks_for_a_minute_mean_a_hang(self, server: Server) -> None:
        assert self.fails(server, 4) == ["", "", "scheduler", "scheduler"]

    def test_batch_lines_between_them_show_that_the_scheduler_works(self, server: Server) -> None:
        assert self.fails(server, 4, batch=True) == ["", "", "detokenizer", "detokenizer"]

    def test_checks_every_minute_show_as_much(self, server: Server) -> None:
        assert self.fails(server, 3, every=60.0)[1:] == ["scheduler", "scheduler"]

    def test_several_routers_that_check_at_once_prove_nothing_earlier(self, server: Server) -> None:
        assert set(self.fails(server, 4, every=5.0)) == {""}

    def test_one_failed_check_is_no_hang(self, server: Server) -> None:
        assert self.fails(server, 1) == [""]
        server.now += 300.0
        assert self.fails(server, 1) == [""]

    def test_a_hang_ends_when_no_check_has_failed_for_long_and_the_scheduler_works(self, server: Server) -> None:
        self.fails(server, 4)
        server.state.observe(PrefillBatch(None, NO_RANK, 1, 1, 0, 0, 0), server.now)
        assert server.state.hang(server.now + 100.0) is None

    def test_a_hang_does_not_end_because_the_checks_end(self, server: Server) -> None:
        self.fails(server, 4)
        hang = server.state.hang(server.now + 5000.0)
        assert hang is not None
        assert hang.stage == "scheduler"

    def test_a_new_start_ends_it(self, server: Server) -> None:
        self.fails(server, 4)
        server.state.observe(ServerArgs(None, NO_RANK, {"tp_size": 1}), server.now)
        assert server.state.hang(server.now) is None


@pytest.mark.parametrize(
    ("line", "stage"),
    [
        (b"Watchdog timeout (self.watchdog_timeout=300)", "scheduler"),
        (b"Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)", "scheduler"),
        (b"DetokenizerManager watchdog timeout (self.watchdog_timeout=300, self.soft=True)", "detokenizer"),
        (b"TokenizerManager watchdog timeout (self.watchdog_timeout=300, self.soft=True)", "tokenizer"),
    ],
)
def test_a_watchdog_names_its_stage(line: bytes, stage: str) -> None:
    (event,) = LogReader().feed(b"[2026-11-22 10:12:02] " + line + b"\n")
    assert isinstance(event, Liveness)
    assert (event.what, event.stage) == ("watchdog_timeout", stage)
    state = ServerState(PROFILES["online"], 0.0)
    state.observe(event, 1.0)
    (found,) = judge(past_of(state, 2.0)).findings
    assert found.sentence == f"the watchdog of the {stage} saw no progress for --watchdog-timeout seconds"


class TestASilentLog:
    """How long the server was still under load after its last batch line."""

    @staticmethod
    def silent(server: Server) -> float:
        return server.state.log_silent_seconds

    def test_while_lines_come_it_is_not_silent(self, server: Server) -> None:
        server.serves(600)
        assert self.silent(server) <= STEP

    def test_it_grows_while_tokens_come_without_a_line(self, server: Server) -> None:
        server.serves(60)
        server.logs = False
        server.serves(600)
        assert self.silent(server) >= 590

    def test_it_is_not_silent_until_the_next_line_is_overdue(self, server: Server) -> None:
        """As with --decode-log-interval 4000, or on a slow CPU."""
        gaps = []
        for _ in range(6):
            server.logs = True
            server.serves(STEP)
            server.logs = False
            server.serves(190)
            gaps.append(self.silent(server))
        assert gaps[2:] == [0] * 4
        server.serves(200)
        assert self.silent(server) > 300

    def test_bursts_make_it_grow_as_well(self, server: Server) -> None:
        server.serves(60)
        server.logs = False
        for _ in range(6):
            server.serves(10)
            for _ in range(22):
                server.tick()
        assert self.silent(server) > 300

    def test_it_stays_while_the_server_is_idle_and_ends_with_a_line(self, server: Server) -> None:
        server.serves(60)
        server.logs = False
        server.serves(300)
        for _ in range(100):
            server.tick()
        assert self.silent(server) > 200
        server.logs = True
        server.computes()
        assert self.silent(server) == 0

    def test_a_night_without_load_after_the_last_line_is_not_silence(self, server: Server) -> None:
        server.serves(60)
        server.logs = False
        server.serves(STEP)  # the last steps of a load print no line
        for _ in range(1000):
            server.tick()
        assert self.silent(server) <= 2 * STEP

    def test_health_checks_do_not_count_as_work(self, server: Server) -> None:
        server.serves(60)
        server.running = server.open = 0.0
        for _ in range(1000):
            server.scheduled += 3.0
            server.tick()
        assert self.silent(server) <= STEP

    def test_retractions_are_no_batch_lines(self, server: Server) -> None:
        """With --log-level warning SGLang prints nothing else."""
        server.logs = False
        for _ in range(60):
            for event in LogReader().feed(RETRACTION):
                server.state.observe(event, server.now)
            server.serves(STEP)
        assert self.silent(server) > 200


class TestHealthChecksOfItsOwn:
    """The exporter checks only where requests are open and no figure changes; each check takes ten seconds when it fails."""

    @staticmethod
    def waits(server: Server, seconds: float, *, answered: bool | None) -> int:
        """Let time pass, and checks be made as the sidecar makes them; gives how many there were."""
        asked, last = 0, -100.0
        for _ in range(int(seconds / STEP)):
            server.tick()
            if server.now - last >= 25.0 and server.state.stages.suspicious(server.now):
                asked, last = asked + 1, server.now
                if answered:
                    server.state.stages.answer_health_check()
                elif answered is False:
                    server.state.stages.fail_health_check(server.now + 10.0, 10.0)
        return asked

    @pytest.fixture
    def idle(self) -> Server:
        """An old release without a log: its clients give up, and no figure shows why."""
        server = Server(new=False, logs=False)
        server.serves(60)
        server.running = 0.0
        return server

    def test_a_scheduler_that_stopped_while_it_was_idle_is_found(self, idle: Server) -> None:
        idle.tick()
        idle.aborted += 3.0
        assert self.waits(idle, 120, answered=False) >= 3
        assert (idle.found() or (0, ""))[1] == "scheduler"

    def test_a_hung_detokenizer_is_recognised_by_gauges_that_moved_on(self, idle: Server) -> None:
        idle.running = 10.0
        idle.figures += 1.0
        idle.tick()
        idle.running = 0.0
        idle.aborted += 3.0
        self.waits(idle, 120, answered=False)
        assert (idle.found() or (0, ""))[1] == "detokenizer"

    def test_a_check_that_is_answered_ends_the_suspicion(self, idle: Server) -> None:
        idle.aborted += 3.0
        assert self.waits(idle, 3600, answered=True) == 1
        assert idle.found() is None

    def test_an_idle_server_is_never_asked(self, server: Server) -> None:
        server.serves(60)
        server.running = server.open = 0.0
        assert self.waits(server, 3600, answered=True) == 0

    def test_a_server_that_serves_is_never_asked(self, server: Server) -> None:
        asked = 0
        for _ in range(100):
            server.serves(STEP)
            asked += server.state.stages.suspicious(server.now)
        assert asked == 0

    def test_requests_that_wait_outside_of_all_stages_are_no_hang(self) -> None:
        """A tokenizer that fetches an image: the request is open, and a token is generated on demand."""
        server = Server(logs=False)
        server.serves(60)
        server.running, server.open = 0.0, 1.0
        assert self.waits(server, 300, answered=True) > 3
        assert server.found() is None

    def test_a_server_without_such_a_check_is_not_judged_by_it(self, idle: Server) -> None:
        idle.aborted += 3.0
        self.waits(idle, 600, answered=None)
        assert idle.found() is None


def test_requests_cancelled_during_a_hang_are_no_rejections() -> None:
    server = Server()
    server.serves(300)
    for _ in range(30):
        server.computes()
        server.aborted += 4.0
        server.decoded += 4000.0
        server.tick()
    server.queued = 300.0
    for _ in range(20):
        server.computes()
        server.sent += 100.0
        server.tick()
    assert "requests_rejected" not in found_by(server)


def test_requests_cancelled_during_a_hang_count_as_rejected_only_when_tokens_come_again() -> None:
    server = Server()
    server.queued = 300.0
    server.serves(300)
    for _ in range(4):
        server.computes()
        server.aborted += 30.0
        server.tick()
    assert "requests_rejected" not in found_by(server)
    server.serves(5)
    assert "requests_rejected" in found_by(server)


def test_first_tokens_delayed_by_a_hang_are_not_put_down_to_slow_prompts() -> None:
    late = RecentLatency(observations=100.0, breaches=90.0, mean_seconds=30.0, p50_seconds=30.0, p99_seconds=60.0)
    for hangs, expected in ((0, True), (30, False)):
        server = Server()
        server.serves(200)
        for _ in range(hangs):
            server.computes()
            server.tick()
        server.serves(200)
        past = replace(past_of(server.state, server.now), latency={"time_to_first_token": late})
        assert ("latency_long_prompts" in {found.diagnosis.id for found in judge(past).findings}) is expected


def found_by(server: Server) -> set[str]:
    return {found.diagnosis.id for found in judge(past_of(server.state, server.now)).findings}
