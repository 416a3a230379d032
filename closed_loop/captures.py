"""One situation on a real server as files: its log, each scrape, and its clients' requests.

A capture is a directory that `sglang_tuning_exporter.recordings.recording` reads. Beside what is said there it holds `cmd.txt`,
`client.jsonl` (each request), `scrapes.tsv` and `health.tsv` (unix seconds, status, milliseconds), `v1_loads-<unix ms>.json`, and
`NOTE.md` with the truth.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from closed_loop import engine, load
from closed_loop.installation import Installation
from closed_loop.situations import Act, Situation
from sglang_tuning_exporter.config.values import UsageError

SCRAPE_SECONDS = 1.5
HEALTH_SECONDS = 5.0
LOADS_SECONDS = 15.0
_HANG_SECONDS = 5.0  # a stopped main process accepts connections and never answers
_SETTLE_SECONDS = 3.0  # the server's own first request
_TAIL_SECONDS = 6.0  # what it says once the load is over
_NAMES = {"detokenizer": "sglang::detokenizer", "scheduler": "sglang::scheduler"}


@dataclass(slots=True)
class _Capture:
    situation: Situation
    folder: Path
    server: engine.Engine
    say: Callable[[str], None]
    records: list[list[load.Record]] = field(default_factory=list)
    scrapes: int = 0
    health_answers: dict[str, int] = field(default_factory=dict)

    def event(self, name: str, at: float | None = None, **more: Any) -> None:
        moment = {"t": round(time.time() if at is None else at, 3), "event": name, **more}
        with (self.folder / "events.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(moment) + "\n")

    async def look(self, session: aiohttp.ClientSession, path: str, seconds: float) -> tuple[str, bytes, float, float]:
        """Return one page: the outcome, its text, when it was requested, and how long it took."""
        begin = time.time()
        try:
            async with session.get(self.server.url + path, timeout=aiohttp.ClientTimeout(total=seconds)) as answer:
                text = await answer.read()
                return str(answer.status), text, begin, time.time() - begin
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            return type(error).__name__, b"", begin, time.time() - begin

    async def scrape(self) -> None:
        with (self.folder / "scrapes.tsv").open("a", encoding="utf-8", buffering=1) as table:
            async with aiohttp.ClientSession(trust_env=False) as session:
                while True:
                    status, text, at, took = await self.look(session, "/metrics", _HANG_SECONDS)
                    table.write(f"{at:.3f}\t{status}\t{1000 * took:.0f}\n")
                    if status == "200":
                        (self.folder / f"metrics-{self.scrapes:03d}-{1000 * at:.0f}.prom").write_bytes(text)
                        self.scrapes += 1
                    await asyncio.sleep(max(0.1, SCRAPE_SECONDS - took))

    async def poll_health(self) -> None:
        with (self.folder / "health.tsv").open("a", encoding="utf-8", buffering=1) as table:
            async with aiohttp.ClientSession(trust_env=False) as session:
                while True:
                    status, _, at, took = await self.look(session, "/health", 30.0)
                    table.write(f"{at:.3f}\t{status}\t{1000 * took:.0f}\n")
                    self.health_answers[status] = self.health_answers.get(status, 0) + 1
                    await asyncio.sleep(max(0.1, HEALTH_SECONDS - took))

    async def keep_info(self) -> None:
        async with aiohttp.ClientSession(trust_env=False) as session:
            for path in ("/server_info", "/get_server_info"):
                status, text, _, _ = await self.look(session, path, _HANG_SECONDS)
                if status == "200":
                    (self.folder / "server_info.json").write_bytes(text)
                    break
            while True:
                status, text, at, _ = await self.look(session, "/v1/loads", _HANG_SECONDS)
                if status == "200":
                    (self.folder / f"v1_loads-{1000 * at:.0f}.json").write_bytes(text)
                await asyncio.sleep(LOADS_SECONDS)

    def do(self, act: Act) -> None:
        """Send the signal to the process."""
        prefix = _NAMES.get(act.process)
        found = [p for p, called in self.server.processes().items() if prefix is not None and called.startswith(prefix)]
        pids = [self.server.group] if act.process == "main" else found
        if not pids:
            raise UsageError(f"{act.process}: no such process in {self.server.processes()}")
        self.event(f"SIG{act.signal}_{act.process}", pid=pids[0])
        self.say(f"  SIG{act.signal} {act.process}")
        os.kill(pids[0], getattr(signal, f"SIG{act.signal}"))

    async def act(self) -> None:
        begin = time.monotonic()
        for act in self.situation.acts:
            await asyncio.sleep(max(0.0, begin + act.at - time.monotonic()))
            self.do(act)

    async def drive(self) -> None:
        for number, step in enumerate(self.situation.steps):
            busy = any(each.clients for each in step)
            if busy:
                self.event("load_begin", clients=sum(each.clients for each in step))
            seeded = [replace(each, seed=each.seed + 100 * number + place) for place, each in enumerate(step)]
            kept: list[list[load.Record]] = [[] for _ in seeded]
            self.records += kept
            await asyncio.gather(
                *(load.drive(each, self.server.url, into) for each, into in zip(seeded, kept, strict=True))
            )
            if busy:
                self.event("load_end")

    async def run(self) -> None:
        watching = [asyncio.create_task(self.scrape())]
        try:
            ready = await asyncio.to_thread(self.server.wait_ready)
            self.event("ready")
            self.say(f"  ready after {ready:.0f} s")
            if self.situation.probes:
                watching.append(asyncio.create_task(self.poll_health()))
            await asyncio.sleep(_SETTLE_SECONDS)
            watching.append(asyncio.create_task(self.keep_info()))
            acting = asyncio.create_task(self.act())
            await self.drive()
            await acting
            await asyncio.sleep(_TAIL_SECONDS)
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)

    def note(self) -> str:
        """Write the truth about the situation and the figures that show it."""
        every = [record for each in self.records for record in each]
        with (self.folder / "client.jsonl").open("w", encoding="utf-8") as file:
            for place, each in enumerate(self.records):
                for record in each:
                    data = {**asdict(record), "load": place, "tokens": record.tokens}
                    data["arrivals"] = len(record.arrivals)
                    file.write(json.dumps(data) + "\n")
        firsts = sorted(r.first - r.sent for r in every if r.first is not None)
        statuses: dict[str, int] = {}
        for record in every:
            word = record.error.split("(")[0] or ("answered" if record.is_answered else "cut off at the end")
            if record.status not in {None, 200}:
                word = f"status {record.status}"
            statuses[word] = statuses.get(word, 0) + 1
        late = f"{median(firsts):.2f} s, p99 {firsts[int(0.99 * (len(firsts) - 1))]:.2f} s" if firsts else "none"
        tokens = sum(record.tokens for record in every)
        seconds = sum(
            max(each.seconds for each in step) for step in self.situation.steps if any(e.clients for e in step)
        )
        rate = f"{tokens / seconds:.0f} tokens a second" if seconds else "no load"
        return (
            f"# {self.situation.name}\n\n{self.situation.what}\n\n"
            f"- Flags: `{self.situation.flags or 'none'}`; {self.situation.words_of_load()}\n"
            f"- Truth: {self.situation.truth}\n- Right advice: {self.situation.right}\n"
            f"- Clients: {len(every)} requests {json.dumps(statuses)}; first token median {late}; {rate}\n"
            f"- Health probes: {json.dumps(self.health_answers)}; scrapes kept: {self.scrapes}\n"
        )


def capture(
    situation: Situation, installation: Installation, folder: Path, *, port: int, say: Callable[[str], None]
) -> Path:
    """Start a server, run the situation, stop the server, and return the folder. Raises `UsageError` if the server does not start."""
    with socket.socket() as tried:
        if tried.connect_ex((engine.LOOPBACK, port)) == 0:
            raise UsageError(f"port={port}: another server answers there; end it first")
    folder.mkdir(parents=True, exist_ok=False)
    args = engine.arguments(installation, port, *shlex.split(situation.flags), stream_interval=None)
    command = " ".join(f"{name}={value}" for name, value in situation.env) + " " + shlex.join([*engine.PROGRAM, *args])
    (folder / "cmd.txt").write_text(command.strip() + "\n", encoding="utf-8")
    engine.prefer(0)  # clients that wait for a core are no truth
    server = engine.start(installation, args, port=port, log=folder / "server.log", env=dict(situation.env))
    done = _Capture(situation, folder, server, say)
    try:
        done.event("start", server.started)
        asyncio.run(done.run())
    finally:
        _let_go(server)
        if any(each.signal == "TERM" for each in situation.acts):
            done.event("exit")
            server.stop(10.0)
        else:  # that the server is ended here is no part of the situation
            size = server.log.stat().st_size
            server.stop(10.0)
            os.truncate(server.log, size)
    (folder / "NOTE.md").write_text(done.note(), encoding="utf-8")
    about = {"sglang_version": installation.version, "log_utc_offset_seconds": 0, "note": situation.what}
    (folder / "recording.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return folder


def _let_go(server: engine.Engine) -> None:
    for pid in server.processes():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
