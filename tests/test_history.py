"""The last quarter of an hour of a server, a moment every five seconds: states in, points out."""

from __future__ import annotations

import pytest

from sglang_tuning_exporter.sglang.events import DecodeBatch, Rank, Retraction
from sglang_tuning_exporter.state.history import LENGTH_SECONDS, STEP_SECONDS, History
from sglang_tuning_exporter.state.profiles import PROFILES
from sglang_tuning_exporter.state.server import ServerState

STEPS = int(LENGTH_SECONDS / STEP_SECONDS)
Points = list[tuple[float, float | None]]


class Server:
    """A server's state and its history, on a simulated clock."""

    def __init__(self) -> None:
        self.state = ServerState(PROFILES["online"], 0.0)
        self.history = History()

    def prints(
        self,
        at: float,
        *,
        queued: int = 0,
        running: int = 8,
        usage: float = 0.5,
        graph: bool = True,
        dp: int | None = None,
    ) -> None:
        line = DecodeBatch(
            None,
            Rank(dp=dp),
            running,
            queued,
            1000,
            usage,
            graph=graph,
            graph_device="cuda",
            generation_throughput=100.0,
        )
        self.state.observe(line, at)

    def retracts(self, at: float, dp: int | None = None) -> None:
        self.state.observe(Retraction(None, Rank(dp=dp), requests=3), at)

    def last_poll_at(self, at: float) -> None:
        self.state.advance(at)
        self.history.offer(self.state, at)

    def queue(self) -> Points:
        return self.history.line(lambda moment: moment.queued)

    def replayed(self) -> Points:
        return self.history.line(lambda moment: moment.replayed)


@pytest.fixture
def server() -> Server:
    return Server()


def test_before_anything_was_looked_at_there_is_no_line(server: Server) -> None:
    assert server.queue() == []
    assert server.history.retractions() == []


def test_a_server_without_figures_has_moments_without_figures(server: Server) -> None:
    server.last_poll_at(0)
    assert server.queue() == [(0.0, None)]
    assert server.history.line(lambda moment: moment.usage) == [(0.0, None)]


def test_a_moment_is_kept_every_five_seconds_however_often_it_is_looked(server: Server) -> None:
    server.prints(0)
    for tenth in range(151):
        server.last_poll_at(tenth / 10)
    assert [at for at, _ in server.queue()] == [-15, -10, -5, 0]


def test_a_line_has_seconds_before_its_last_moment(server: Server) -> None:
    for at, queued in ((100, 7), (105, 9), (110, 4)):
        server.prints(at, queued=queued)
        server.last_poll_at(at)
    assert server.queue() == [(-10, 7), (-5, 9), (0, 4)]


def test_a_quarter_of_an_hour_is_kept_and_no_more(server: Server) -> None:
    for step in range(STEPS + 50):
        server.last_poll_at(STEP_SECONDS * step)
    line = server.queue()
    assert len(line) == STEPS + 1
    assert line[0][0] == -LENGTH_SECONDS


def test_the_schedulers_of_a_server_are_one_and_the_fullest_pool_counts(server: Server) -> None:
    server.prints(0, queued=3, running=10, usage=0.4, dp=0)
    server.prints(0, queued=5, running=20, usage=0.9, dp=1)
    server.last_poll_at(0)
    figures = (lambda m: m.queued, lambda m: m.running, lambda m: m.usage, lambda m: m.throughput)
    assert [server.history.line(figure)[0][1] for figure in figures] == [8, 30, 0.9, 200]


def test_the_replayed_share_is_that_of_each_step_and_not_of_all_time(server: Server) -> None:
    for at, graphs in ((0, (True, True)), (5, (True, False)), (10, (False, False))):
        for graph in graphs:
            server.prints(at, graph=graph)
        server.last_poll_at(at)
    assert server.replayed() == [(-10, 1.0), (-5, 0.5), (0, 0.0)]


def test_a_step_without_a_batch_has_no_replayed_share(server: Server) -> None:
    server.prints(0)
    server.last_poll_at(0)
    server.last_poll_at(5)
    assert server.replayed() == [(-5, 1.0), (0, None)]


def test_retractions_are_those_of_each_step_and_of_all_schedulers(server: Server) -> None:
    server.last_poll_at(0)
    server.retracts(1, dp=0)
    server.retracts(2, dp=1)
    server.last_poll_at(5)
    server.last_poll_at(10)
    server.retracts(11, dp=0)
    server.last_poll_at(15)
    assert server.history.retractions() == [(-10, 2), (-5, 0), (0, 1)]


def test_a_count_that_begins_anew_is_no_negative_retraction(server: Server) -> None:
    server.retracts(1)
    server.last_poll_at(5)
    server.state = ServerState(PROFILES["online"], 6.0)
    server.last_poll_at(10)
    assert server.history.retractions() == [(0, 0)]
