"""False alarms: healthy loads in turn on one real server, and every alert that is pending or firing.

Nothing is wrong at any time, so each alert is false, or caused by other programs of the machine. Some
loads run with the rules' true clocks, the others with clocks `time_scale` times as fast. Neither the loads nor thresholds in
seconds are changed for that. A stall of one second is then `time_scale` seconds to the rules, which makes false alarms
likelier; a rule about a rate per minute looks at a fraction of a minute, which makes its own less likely.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import requests

from closed_loop import advice, chain, engine, load
from closed_loop.captures import HEALTH_SECONDS
from closed_loop.situations import SITUATIONS
from sglang_tuning_exporter.recordings.stack import Stack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from closed_loop.installation import Installation
    from closed_loop.situations import Situation

POLL_SECONDS = 2.0
SCRAPE_SECONDS = 15.0  # as Prometheus's own example has it, which is also how long the exporter may take to answer
# The KV cache of the largest of the loads; and a scheduler that waits for requests does not take a core for that.
FLAGS = "--max-total-tokens 32768 --sleep-on-idle"
HEALTHY: dict[str, Situation] = {
    situation.name.removeprefix("healthy-"): situation
    for situation in SITUATIONS
    if situation.name.startswith("healthy-")
}


@dataclass(slots=True)
class Course:
    """The alerts and messages under one load, in seconds since it began.

    `alerts` are (when, which, its new state, the diagnoses found at that time); an empty state: it is over. `messages` are
    the notifications. `others` is the share of all cores that other programs took.
    """

    load: str
    profile: str
    time_scale: float
    seconds: float = 0.0
    requests: int = 0
    answered: int = 0
    stopped: int = 0
    probes: int = 0  # health probes that were answered, each with a token
    others: float = 0.0
    verdicts: list[tuple[float, str]] = field(default_factory=list)
    alerts: list[tuple[float, str, str, list[str]]] = field(default_factory=list)
    messages: list[tuple[float, list[str]]] = field(default_factory=list)

    @property
    def is_quiet(self) -> bool:
        """Whether no alert was ever pending or firing."""
        return not self.alerts

    @property
    def rule_seconds(self) -> float:
        """The length to the rules' clocks."""
        return self.seconds * self.time_scale

    def as_json(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, slots=True)
class _Watched:
    """One server and its monitoring; `messages` are the notifications so far, with their times."""

    server: engine.Engine
    stack: Stack
    messages: list[tuple[float, Any]]


@dataclass(frozen=True, slots=True)
class Plan:
    """One load of a series: its name, and how fast the rules' clocks run meanwhile."""

    name: str
    time_scale: float

    @property
    def profile(self) -> str:
        """The profile under which it is healthy."""
        return HEALTHY[self.name].profile


def plans(names: Iterable[str], time_scale: float, true: Iterable[str] = ()) -> list[Plan]:
    """Order loads so that those of one profile and one pace of clocks follow each other; those in `true` have true clocks."""
    exact = set(true)
    made = [Plan(name, 1.0 if name in exact else time_scale) for name in names]
    return sorted(made, key=lambda plan: (plan.time_scale != 1.0, plan.profile != "online", plan.profile))


def run(
    series: Sequence[Plan],
    rule_seconds: float,
    installation: Installation,
    lane: chain.Lane,
    results: Path,
    *,
    say: Callable[[str], None] = lambda _: None,
) -> list[Course]:
    """Send each load for `rule_seconds` by the rules' clocks and write the results. Raises `UsageError` if something does not start.

    One server serves all. Its monitoring restarts only where the profile or the clocks change, so that each load also
    follows another one.
    """
    with tempfile.TemporaryDirectory(prefix="quiet-") as scratch:
        arguments = engine.arguments(installation, lane.port, *FLAGS.split())
        server = engine.start(installation, arguments, port=lane.port, log=Path(scratch) / "server.log", core=lane.any)
        courses = []
        try:
            server.wait_ready()
            for number, ((profile, scale), group) in enumerate(
                groupby(series, key=lambda plan: (plan.profile, plan.time_scale))
            ):
                folder = Path(scratch) / str(number)
                folder.mkdir()
                messages: list[tuple[float, Any]] = []
                stack = Stack(
                    folder,
                    sglang_url=server.url,
                    log_file=server.log,
                    profile=profile,
                    time_scale=scale,
                    scrape_interval=f"{1000 * SCRAPE_SECONDS / scale:.0f}ms",
                    on_message=lambda message, into=messages: into.append((time.time(), message)),  # type: ignore[misc]
                )
                try:
                    stack.start()
                    for plan in group:
                        say(f"{plan.name}: {HEALTHY[plan.name].what}, clocks times {plan.time_scale:g}")
                        course = _one(plan, rule_seconds / scale, _Watched(server, stack, messages), say)
                        courses.append(course)
                        written(course, results)
                        say(
                            f"{plan.name}: {course.requests} requests, {course.answered} answered, "
                            f"{[verdict for _, verdict in course.verdicts]}"
                        )
                finally:
                    stack.stop()
        finally:
            server.stop()
        return courses


def _one(plan: Plan, seconds: float, watched: _Watched, say: Callable[[str], None]) -> Course:
    course, done, begun = Course(plan.name, plan.profile, plan.time_scale), threading.Event(), time.time()
    machine = chain.machine(watched.server)
    watching = threading.Thread(target=_watch, args=(watched.stack, course, begun, done, say), daemon=True)
    watching.start()
    probing = threading.Thread(target=_probe, args=(watched.server.url, course, done), daemon=True)
    probing.start()
    _send(HEALTHY[plan.name], seconds, watched.server.url, course)
    done.set()
    watching.join(2 * POLL_SECONDS)
    probing.join(2 * HEALTH_SECONDS)
    course.seconds = round(time.time() - begun, 1)
    course.others = round(chain.others(machine, chain.machine(watched.server)), 3)
    course.messages = [
        (round(at - begun, 1), [alert["labels"]["alertname"] for alert in message["alerts"]])
        for at, message in watched.messages
        if at >= begun
    ]
    return course


def _probe(url: str, course: Course, done: threading.Event) -> None:
    """Check its health as an orchestrator does."""
    with requests.Session() as session:
        session.trust_env = False
        while not done.wait(HEALTH_SECONDS):
            with suppress(requests.RequestException):
                course.probes += (
                    session.get(f"{url}/health_generate", timeout=HEALTH_SECONDS).status_code == HTTPStatus.OK
                )


def _send(situation: Situation, seconds: float, url: str, course: Course) -> None:
    """Repeat the steps of one healthy load until its time is over."""
    begin = time.time()
    rounds = 0
    while (left := begin + seconds - time.time()) > 1.0:
        for step in situation.steps:
            length = min(max(each.seconds for each in step), left)
            kept: list[list[load.Record]] = [[] for _ in step]
            asyncio.run(_side_by_side([replace(e, seconds=length, seed=e.seed + rounds) for e in step], url, kept))
            records = [record for each in kept for record in each]
            course.requests += len(records)
            course.answered += sum(record.is_answered for record in records)
            course.stopped += sum(record.error == load.STOPPED for record in records)
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
            document = stack.get(f"{stack.exporter_url}/api/v1/findings")
            verdict = document["verdict"]
            if not course.verdicts or course.verdicts[-1][1] != verdict:
                course.verdicts.append((now, verdict))
            for name in sorted(known.keys() | alerts.keys()):
                state = alerts.get(name, "")
                if state != known.get(name, ""):
                    found = [f"{each['diagnosis']} {each['value']}" for each in advice.in_short(document)]
                    course.alerts.append((now, name, state, found))
                    say(f"{now:5.0f} s  {name} {state or 'is over'}: {verdict}, {found}")
            known = alerts


def written(course: Course, results: Path) -> None:
    """Write the results as JSON; only the last one of a load is kept."""
    path = results / "quiet" / f"{course.load}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(course.as_json(), indent=1) + "\n", encoding="utf-8")


def table(data: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write results as a Markdown table."""
    shown = [
        "| load | profile | clocks | minutes of the rules | requests | answered | stopped by clients | health probes | verdicts | pending | firing |",
        "|---|---|---|---:|---:|---:|---:|---:|---|---|---|",
    ]
    for each in data:
        scale = each["time_scale"]
        pending, firing = (_named(each, state) for state in ("pending", "firing"))
        verdicts = ", ".join(f"`{name}`" for name in dict.fromkeys(verdict for _, verdict in each["verdicts"]))
        clocks = "true" if scale == 1 else f"{scale:g} times as fast"
        shown.append(
            f"| {HEALTHY[each['load']].what} | `{each['profile']}` | {clocks} | {each['seconds'] * scale / 60:.0f} |"
            f" {each['requests']:,} | {each['answered']:,} | {each['stopped']:,} | {each.get('probes', 0):,} | {verdicts} | {pending} | {firing} |"
        )
    return shown


def _named(data: Mapping[str, Any], state: str) -> str:
    names = dict.fromkeys(name for _, name, became, _ in data["alerts"] if became == state)
    return ", ".join(names) or "none"
