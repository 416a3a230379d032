"""What the log and the server's own counters both show is counted once, whichever of them is away, late, or begins
again.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.events import NO_RANK, Event, Rank
from sglang_tuning_exporter.core.ledger import RETRACTED
from sglang_tuning_exporter.core.watch import READ_SECONDS, Watch
from sglang_tuning_exporter.sglang.metrics import RankFigures, Scrape

BEGIN = 1_763_632_800.0
COUNTERS = {"rejected": "refused_requests", "server_error": "server_errors", "transfer": "failed_transfers"}
COUNTED = {
    "retraction": "retraction_events",
    "rejected": "rejected_requests",
    "server_error": "server_errors",
    "transfer": "failed_transfers",
}
STARTS_SECONDS = 8.0
AWAY, SLOW = ("connection_refused", "unreachable"), ("timeout", "http_status", "invalid")


@dataclass
class Server:
    """A server that prints a line for all that it counts; each of its processes counts from 0."""

    ranks: tuple[int | None, ...]
    log: list[Event] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)  # in all processes
    progress: float = 1e9
    counters: Counter[Any] = field(default_factory=Counter)  # of this process
    serves_from: float = 0.0

    def do(self, kind: str, number: int, now: float) -> None:
        """Let something happen, and print it."""
        if now < self.serves_from:
            return
        place = len(self.log)
        dp = self.ranks[place % len(self.ranks)]
        rank = NO_RANK if dp is None else Rank(dp, None, None)
        figures: dict[str, float] = {"room": float(place)} if kind == "transfer" else {}
        if kind == "retraction":
            figures = {"requests": float(number), "gained": float(place), "usage": 0.9}
            self.counters[dp] += number
            self.happened[RETRACTED] += number
        else:
            self.counters[kind] += 1
        self.happened[COUNTED[kind]] += 1
        self.log.append(Event(kind, now, rank, figures))

    def restart(self, now: float) -> None:
        """End, and start again: it serves some seconds later."""
        if now < self.serves_from:
            return
        self.counters.clear()
        self.happened["server_starts"] += 1
        # Far behind: counters that are larger already on the next page show no start.
        self.progress, self.serves_from = 1e9 / 10 ** self.happened["server_starts"], now + STARTS_SECONDS
        self.log.append(Event("arguments", now, arguments={"tp_size": 1, "device": "cuda"}))

    def page(self) -> Scrape:
        """Give its counters, after some more work."""
        self.progress += 100.0
        ranks = [
            RankFigures(dp, running=8.0, queued=0.0, retracted_requests=float(self.counters[dp])) for dp in self.ranks
        ]
        counts: dict[str, Any] = {name: float(self.counters[kind]) for kind, name in COUNTERS.items()}
        return Scrape(ranks, progress=self.progress, sent=self.progress, **counts)


class Exporter:
    """A watch beside it with a state file, which is written after each read and before counters are shown."""

    def __init__(self, server: Server) -> None:
        self.server, self.now, self.read, self.is_past = server, 0.0, 0, False
        self.asked: tuple[Scrape, float] | None = None  # a page that is on its way, and when it was made
        self.watch = self.begin()
        self.shown: Counter[str] = Counter()
        self.starts_shown = 0
        self.poll()

    def begin(self) -> Watch:
        return Watch(PROFILES["online"], BEGIN + self.now, reads=True, scrapes=True)

    def saved(self) -> str:
        return json.dumps([self.watch.saved(BEGIN + self.now), self.read, self.now])

    def poll(self) -> None:
        """Read the log, as the thread that follows it does."""
        for event in self.server.log[self.read :]:
            printed = event.time or 0.0
            is_fresh = self.is_past or self.now - READ_SECONDS <= printed
            at = BEGIN + (printed if is_fresh else self.now)
            line = Event(event.kind, at, event.rank, dict(event.figures), arguments=event.arguments)
            self.watch.take_line(line, past=self.is_past)
        self.read, self.is_past, self.watch.read_to = len(self.server.log), False, BEGIN + self.now
        self.state = self.saved()

    def scrape(self, failure: str = "") -> None:
        failure = failure or ("" if self.now >= self.server.serves_from else "connection_refused")
        unshown = self.server.happened["server_starts"] - self.starts_shown
        if not failure and (unshown > 1 or self.watch.server.ledger.log_is_ahead):
            self.poll()  # of two starts between two pages the log shows the first in time
        page, made = self.asked or (self.server.page(), self.now)
        self.asked = None
        if failure:
            self.watch.lose(failure, failure, BEGIN + self.now)
        else:
            self.watch.take_page(page, BEGIN + self.now, BEGIN + made)
            if self.watch.server.counters.are_used:
                self.starts_shown = self.server.happened["server_starts"]

    def show(self) -> None:
        """Show the counters: none is ahead of the server, and none goes back."""
        self.watch.advance(BEGIN + self.now)
        self.state = self.saved()
        for name in (RETRACTED, *COUNTED.values(), "server_starts"):
            value = self.watch.server.counted[name]
            assert value <= self.server.happened[name], f"{name}: {value} of {self.server.happened[name]}"
            assert value >= self.shown[name], f"{name} went back from {self.shown[name]} to {value}"
            self.shown[name] = int(value)
        lives = self.watch.server.lives
        assert sum(life[RETRACTED] for life in lives.values()) == self.shown[RETRACTED]

    def kill(self, away: float) -> None:
        """Be killed, and start again after some seconds."""
        document, self.read, then = json.loads(self.state)
        self.now += away
        self.asked = None
        self.watch, self.is_past = self.begin(), True
        self.watch.restore(document, BEGIN + self.now, self.now - then)
        self.poll()  # before it scrapes

    def do(self, action: str, number: int) -> None:
        match action:
            case "read":
                self.poll()
            case "page":
                self.scrape()
            case "ask" if self.now >= self.server.serves_from:
                self.asked = self.server.page(), self.now
            case "ask":
                pass
            case "away" | "slow":
                reasons = AWAY if action == "away" else SLOW
                self.scrape(reasons[number % len(reasons)])
            case "kill":
                self.kill(number * 7.0)
            case "restart":
                self.server.restart(self.now)
                self.asked = None
            case kind:
                self.server.do(kind, number, self.now)


def settled(exporter: Exporter) -> None:
    """Let both sources be read for two minutes."""
    for _ in range(40):
        exporter.now += 3.0
        exporter.poll()
        exporter.scrape()
        exporter.show()


PAUSES = st.sampled_from([0.0, 0.4, 1.0, 2.5, 6.0, 12.0, 31.0, 100.0, 700.0])
SOURCES = ["read", "read", "page", "page", "ask", "slow", "away", "kill"]


def actions(*kinds: str) -> st.SearchStrategy[list[tuple[float, str, int]]]:
    return st.lists(st.tuples(PAUSES, st.sampled_from([*SOURCES, *kinds]), st.integers(1, 5)), min_size=1, max_size=30)


@settings(max_examples=300, deadline=None)
@given(actions("retraction", "retraction", "retraction", "restart"), st.sampled_from([(None,), (0, 1)]))
@example([(1.0, "page", 1), (6.0, "slow", 1), (1.0, "retraction", 3), (0.4, "read", 1), (1.0, "page", 1)], (None,))
def test_retractions_are_exact_once_log_and_pages_are_read(
    steps: list[tuple[float, str, int]], ranks: tuple[int | None, ...]
) -> None:
    exporter = Exporter(Server(ranks))
    for pause, action, number in steps:
        exporter.now += pause
        exporter.do(action, number)
        exporter.show()
    settled(exporter)
    server, counted = exporter.server, exporter.watch.server.counted
    names = (RETRACTED, "retraction_events", "server_starts")
    assert {name: counted[name] for name in names} == {name: server.happened[name] for name in names}
    assert not exporter.watch.doubtful
    assert "sources_disagree" not in exporter.watch.view(BEGIN + exporter.now).troubles


@settings(max_examples=300, deadline=None)
@given(actions("rejected", "rejected", "server_error", "transfer", "restart"))
@example([(0.0, "restart", 1), (12.0, "rejected", 1), (0.0, "read", 1), (0.0, "restart", 1), (0.0, "kill", 1),
    (31.0, "rejected", 1)])  # fmt: skip
def test_rejections_and_failures_are_exact_once_log_and_pages_are_read(steps: list[tuple[float, str, int]]) -> None:
    """From some seconds after the first page on: of a rejection before, no page shows whether it is in its counters."""
    exporter = Exporter(Server((None,)))
    exporter.scrape()
    exporter.now += 5.0
    exporter.poll()
    for pause, action, number in steps:
        exporter.now += pause
        exporter.do(action, number)
        exporter.show()
    settled(exporter)
    counted = exporter.watch.server.counted
    assert {name: counted[name] for name in COUNTED.values()} == {
        name: exporter.server.happened[name] for name in COUNTED.values()
    }


def test_what_ended_while_the_exporter_was_away_is_counted_over_two_kills() -> None:
    server = Server((None,))
    exporter = Exporter(server)
    for finished in (100.0, 234.0, 489.0):
        page = replace(server.page(), finished_requests=finished)
        exporter.watch.take_page(page, BEGIN + exporter.now)
        exporter.show()
        assert exporter.watch.server.counted["finished_requests"] == finished - 100.0
        assert not exporter.watch.view(BEGIN + exporter.now, 60.0).totals["finished_requests"]
        exporter.kill(600.0)
