"""False alarms: healthy loads, one after the other, on one real server, and every alert that becomes pending or fires meanwhile.

Nothing is wrong at any time, so each alert is a false one, or is explained by what other programs of the machine did. The rules
run with true clocks unless told otherwise.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import requests

from closed_loop import engine, load
from closed_loop.situations import SITUATIONS
from sglang_tuning_exporter.stack import Stack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from closed_loop.chain import Lane
    from closed_loop.installation import Installation
    from closed_loop.situations import Situation

POLL_SECONDS = 5.0
POOL = "--max-total-tokens 32768"  # of the largest of the loads
HEALTHY: dict[str, Situation] = {
    situation.name.removeprefix("healthy-"): situation
    for situation in SITUATIONS
    if situation.name.startswith("healthy-") and situation.profile == "online"
}


@dataclass(slots=True)
class Course:
    """What was seen, in seconds since the first load began: the loads, what the exporter said, alerts with their states, messages."""

    loads: list[tuple[float, str]] = field(default_factory=list)
    verdicts: list[tuple[float, str]] = field(default_factory=list)
    alerts: list[tuple[float, str, str]] = field(default_factory=list)  # when, which, its new state; empty: it is over
    messages: list[float] = field(default_factory=list)
    seconds: float = 0.0
    requests: int = 0
    answered: int = 0

    @property
    def is_quiet(self) -> bool:
        """Whether no alert was ever pending or firing."""
        return not self.alerts

    def as_json(self) -> dict[str, Any]:
        """Give it as plain JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def load_at(self, moment: float) -> str:
        """Name the load of that moment."""
        return next((name for at, name in reversed(self.loads) if at <= moment), "")


def run(
    names: Iterable[str],
    seconds: float,
    installation: Installation,
    lane: Lane,
    *,
    time_scale: float = 1.0,
    say: Callable[[str], None] = lambda _: None,
) -> Course:
    """Send each load in turn, `seconds` in all. Raises `UsageError` where something does not come up."""
    with tempfile.TemporaryDirectory(prefix="quiet-") as scratch:
        log, course = Path(scratch) / "server.log", Course()
        arguments = engine.arguments(installation, lane.port, *POOL.split())
        server = engine.start(installation, arguments, port=lane.port, log=log, core=lane.any)
        begun: list[float] = []
        stack = Stack(
            Path(scratch),
            sglang_url=server.url,
            log_file=server.log,
            profile="online",
            time_scale=time_scale,
            on_message=lambda _: course.messages.append(time.time() - begun[0]) if begun else None,
        )
        try:
            server.wait_ready()
            stack.start()
            begun.append(time.time())
            done = threading.Event()
            watching = threading.Thread(target=_watch, args=(stack, course, begun[0], done, say), daemon=True)
            watching.start()
            wanted = list(names)
            for name in wanted:
                course.loads.append((round(time.time() - begun[0], 1), name))
                say(f"{course.loads[-1][0]:5.0f} s  {HEALTHY[name].what}")
                _send(HEALTHY[name], seconds / len(wanted), server.url, course)
            done.set()
            watching.join(2 * POLL_SECONDS)
            course.seconds = round(time.time() - begun[0], 1)
        finally:
            stack.stop()
            server.stop()
        return course


def _send(situation: Situation, seconds: float, url: str, course: Course) -> None:
    """Repeat the steps of one healthy load until its time is over."""
    begin = time.time()
    rounds = 0
    while (left := begin + seconds - time.time()) > 1.0:
        for step in situation.steps:
            length = min(max(each.seconds for each in step), left)
            kept: list[list[load.Record]] = [[] for _ in step]
            asyncio.run(_side_by_side([replace(e, seconds=length, seed=e.seed + rounds) for e in step], url, kept))
            course.requests += sum(len(each) for each in kept)
            course.answered += sum(record.is_answered for each in kept for record in each)
            left = begin + seconds - time.time()
            if left <= 1.0:
                break
        rounds += 1


async def _side_by_side(loads: list[load.Load], url: str, kept: list[list[load.Record]]) -> None:
    await asyncio.gather(*(load.drive(each, url, into) for each, into in zip(loads, kept, strict=True)))


def _watch(stack: Stack, course: Course, begun: float, done: threading.Event, say: Callable[[str], None]) -> None:
    known: dict[str, str] = {}
    while not done.wait(POLL_SECONDS):
        with suppress(requests.RequestException, ValueError, KeyError):
            now, alerts = round(time.time() - begun, 1), stack.alerts()
            verdict = stack.get(f"{stack.exporter_url}/api/v1/findings")["verdict"]
            if not course.verdicts or course.verdicts[-1][1] != verdict:
                course.verdicts.append((now, verdict))
            for name in sorted(known.keys() | alerts.keys()):
                state = alerts.get(name, "")
                if state != known.get(name, ""):
                    course.alerts.append((now, name, state))
                    say(f"{now:5.0f} s  {name} {state or 'is over'}, during {course.load_at(now)}")
            known = alerts


def written(course: Course, path: Path) -> None:
    """Keep what was seen as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(course.as_json(), indent=1) + "\n", encoding="utf-8")
