"""A fleet of servers under the scaling signal, without a cluster: seeded arrivals, admission by the KV cache, cold starts, a scaler like Kubernetes's.

`python tests/fleet.py` writes docs/scaling.svg. Each server's figures go through the exporter's own watch, so the signal is the real one.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from random import Random

from sglang_tuning_exporter.capacity.estimate import Estimate
from sglang_tuning_exporter.capacity.ranks import RankCapacity
from sglang_tuning_exporter.capacity.step_time import StepLine, StepTime
from sglang_tuning_exporter.config.profiles import PROFILES
from sglang_tuning_exporter.core.scaling import DEMAND_SECONDS, capacity_ratio, scale_out_helps
from sglang_tuning_exporter.core.watch import Watch
from sglang_tuning_exporter.sglang.metrics.figures import RankFigures, Scrape
from sglang_tuning_exporter.sglang.server_info import ServerInfo

# Target load of a replica, and the largest demand of one server: as in the rules.
TARGET_RATIO, MAX_RATIO = 0.8, 1.6
STEP = 5  # seconds
COLD_START = 180
POOL, HELD = 64_000, 1_000  # tokens, and those of a running request: 64 fit
FIXED, PER_REQUEST, ANSWER = 0.02, 0.0005, 400  # seconds of a step, tokens of an answer
MOST_REPLICAS = 8
SCALER_SECONDS, CALM_SECONDS, GROWTH_SECONDS = 15, 300, 180  # deploy/keda.yml
TOLERANCE = 0.1
SHARED_SHARE = 0.1  # of the difference, in each step


_EXACT = [Estimate(figure, 0.99 * figure, 1.01 * figure) for figure in (FIXED + 32 * PER_REQUEST, FIXED, PER_REQUEST)]
STEP_TIME = StepTime(10_000, 32.0, 16.0, _EXACT[0], 1.0, StepLine(_EXACT[1], _EXACT[2]))


@dataclass
class Server:
    """One replica: what it runs, what waits for it, and the exporter's watch beside it."""

    since: int
    limit: int
    watch: Watch
    running: float = 0.0
    queued: float = 0.0
    worked: float = 0.0
    admitted: float = 0.0
    finished: float = 0.0
    dead: bool = False

    def is_ready(self, now: int) -> bool:
        return not self.dead and now >= self.since + COLD_START

    def work(self, now: int, arrived: float) -> None:
        """Serve for one step of the simulation, and answer a scrape."""
        if not self.is_ready(now):
            self.watch.lose("connection_refused", "nothing listens", float(now))
            return
        self.queued += arrived
        fits = min(POOL / HELD, self.limit)
        finished = 0.0
        if self.running:
            finished = STEP * self.running / (ANSWER * (FIXED + PER_REQUEST * self.running))
            finished = min(finished, self.running)
            self.running -= finished
        admitted = min(self.queued, max(fits - self.running, 0.0))
        self.running, self.queued = self.running + admitted, self.queued - admitted
        self.admitted += admitted
        if self.running < 0.5:
            self.running = 0.0
        self.finished += finished
        self.worked += arrived + self.running
        figures = RankFigures(
            running=float(round(self.running)),
            queued=float(round(self.queued)),
            full_usage=min(self.running * HELD / POOL, 1.0),
            kv_pool_tokens=float(POOL),
            decoded_tokens=self.worked,
            admitted_requests=float(round(self.admitted)),
        )
        page = Scrape(
            [figures],
            progress=self.worked,
            started_requests=float(round(self.admitted)),
            finished_requests=float(round(self.finished)),
            aborted_requests=0.0,
        )
        self.watch.scrape(page, float(now))

    def demand(self, now: int) -> float | None:
        """The value of `instance:sglang_tuning_demand:last5m` for it; None where that is absent."""
        fits = min(POOL // HELD, self.limit)
        known = RankCapacity(None, STEP_TIME, running=self.running, most_requests=fits)
        ratio = capacity_ratio(self.watch.view(float(now), DEMAND_SECONDS), [known])
        helps = scale_out_helps(self.watch.judge(float(now)))
        if ratio is None or helps is None:
            return None
        return min(ratio, MAX_RATIO if helps else TARGET_RATIO)


def wanted(demands: list[float | None]) -> float:
    """The value of `job:sglang_tuning_demand:sum5m` for these servers."""
    known = [each for each in demands if each is not None]
    least = TARGET_RATIO * len(demands) if len(known) < len(demands) else 0.0
    return max(sum(known), least)


@dataclass(frozen=True)
class Scene:
    """What happens: requests a second by the minute, what a server is limited to, and which server dies when."""

    name: str
    what: str
    rates: tuple[tuple[int, float], ...]  # from this minute on
    replicas: int = 1
    limit: int = 512
    deaths: tuple[tuple[int, int, int], ...] = ()  # minute, which, and the minute of its restart (0: never)
    minutes: int = 60


SCENES = (
    Scene("burst", "three times the load for twenty minutes", ((0, 4.0), (10, 12.0), (30, 4.0)), replicas=2),
    Scene("idle", "nobody asks for half an hour", ((0, 5.0), (15, 0.0), (45, 5.0)), replicas=2),
    Scene("restart", "one of two servers is restarted", ((0, 4.0),), replicas=2, deaths=((20, 0, 21),)),
    Scene("dead", "one of two servers dies and stays dead", ((0, 4.0),), replicas=2, deaths=((20, 0, 0),)),
    Scene("flag", "a queue that --max-running-requests would end", ((0, 4.0),), replicas=2, limit=8),
    Scene("steady", "a load that fits", ((0, 2.0),), replicas=2),
)


@dataclass
class Course:
    """The result: replicas and demand at each second in which the scaler looks."""

    replicas: list[tuple[int, int]] = field(default_factory=list)
    demand: list[tuple[int, float]] = field(default_factory=list)
    queued: list[tuple[int, float]] = field(default_factory=list)

    @property
    def changes(self) -> int:
        """How often the direction of scaling turned."""
        counts = [count for _, count in self.replicas]
        moves = [later - earlier for earlier, later in itertools.pairwise(counts) if later != earlier]
        return sum((a > 0) != (b > 0) for a, b in itertools.pairwise(moves))

    def at(self, minute: float) -> int:
        return [count for at, count in self.replicas if at <= 60 * minute][-1]


def play(scene: Scene, seed: int = 7) -> Course:
    """Play a scene to its end."""
    random, course = Random(f"{scene.name} {seed}"), Course()
    servers = [_server(-COLD_START, scene.limit) for _ in range(scene.replicas)]
    wishes: list[tuple[int, int]] = []
    for now in range(0, 60 * scene.minutes, STEP):
        for minute, which, back in scene.deaths:
            if now == 60 * minute:
                servers[which].dead = True
            if back and now == 60 * back:
                servers[which] = _server(now, scene.limit)
        rate = [each for minute, each in scene.rates if now >= 60 * minute][-1]
        ready = [server for server in servers if server.is_ready(now)]
        arrived = sum(random.random() < rate / 20 for _ in range(20 * STEP))
        for server in servers:
            server.work(now, arrived / len(ready) if ready else 0.0)
        _share(ready)
        if now % SCALER_SECONDS == 0:
            demand = wanted([server.demand(now) for server in servers])
            wishes.append((now, _wish(demand, len(servers))))
            _scale(servers, [wish for at, wish in wishes if at > now - CALM_SECONDS], now, scene.limit)
            course.replicas.append((now, len(servers)))
            course.demand.append((now, demand / TARGET_RATIO))
            course.queued.append((now, sum(server.queued for server in servers)))
    return course


def _server(since: int, limit: int) -> Server:
    watch = Watch(PROFILES["online"], float(since), reads=False, scrapes=True)
    watch.inform(ServerInfo("0.5.23", {"model_path": "m", "max_running_requests": limit}))
    return Server(since, limit, watch)


def _share(ready: list[Server]) -> None:
    """Move waiting requests to other servers: clients of a busy server cancel and retry, and the router picks another."""
    waiting = sum(server.queued for server in ready)
    for server in ready:
        server.queued += (waiting / len(ready) - server.queued) * SHARED_SHARE


def _wish(demand: float, replicas: int) -> int:
    """Replicas that an HPA computes for an average of `TARGET_RATIO`."""
    if abs(demand / (TARGET_RATIO * replicas) - 1) <= TOLERANCE:
        return replicas
    return max(1, min(MOST_REPLICAS, ceil(demand / TARGET_RATIO - 1e-9)))


def _scale(servers: list[Server], lately: list[int], now: int, limit: int) -> None:
    """Scale up to at most twice the servers of one cold start ago, and down to the largest number that was computed in the last minutes."""
    before = sum(server.since <= now - GROWTH_SECONDS for server in servers)
    up = min(lately[-1], 2 * max(before, 1))
    while len(servers) < up:
        servers.append(_server(now, limit))
    while len(servers) > max(lately):
        servers.pop()


COLOURS = ("#1f77b4", "#999999")


def picture() -> str:
    """Draw replicas and demand over the hour of each scene, as SVG."""
    width, height, left, top = 760, 110, 180, 34
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 20} {top + len(SCENES) * height + 30}"'
            ' font-family="sans-serif" font-size="12">'
        ),
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{left}" y="18" fill="{COLOURS[0]}">replicas</text>',
        f'<text x="{left + 70}" y="18" fill="{COLOURS[1]}">wanted by demand</text>',
    ]
    for row, scene in enumerate(SCENES):
        course, base = play(scene), top + (row + 1) * height - 24
        parts.append(f'<text x="8" y="{base - 50}" font-weight="bold">{scene.name}</text>')
        words = scene.what.split()
        for line, text in enumerate((" ".join(words[:4]), " ".join(words[4:]))):
            parts.append(f'<text x="8" y="{base - 34 + 14 * line}" fill="#555">{text}</text>')
        parts.append(f'<line x1="{left}" x2="{left + width}" y1="{base}" y2="{base}" stroke="#ccc"/>')
        for series, colour, thick in ((course.demand, COLOURS[1], 1), (course.replicas, COLOURS[0], 2)):
            points = " ".join(
                f"{left + width * at / (60 * scene.minutes):.0f},{base - 9 * min(value, MOST_REPLICAS):.0f}"
                for at, value in series
            )
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{thick}"/>')
        parts += [
            f'<text x="{left - 8}" y="{base - 9 * count + 4}" text-anchor="end" fill="#999">{count}</text>'
            for count in (0, 4, MOST_REPLICAS)
        ]
    base = top + len(SCENES) * height
    parts += [
        f'<text x="{left + width * minute / 60:.0f}" y="{base}" text-anchor="middle" fill="#555">{minute} min</text>'
        for minute in range(0, 61, 10)
    ]
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    (Path(__file__).parents[1] / "docs" / "scaling.svg").write_text(picture(), encoding="utf-8")
    for each in SCENES:
        seen = play(each)
        sys.stdout.write(f"{each.name}: {[seen.at(minute) for minute in range(0, 60, 3)]}, {seen.changes} turns\n")
