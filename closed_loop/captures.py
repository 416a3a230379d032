"""A situation on a real server, captured: its log, each scrape and its clients' requests, packed as one small archive.

The situation is a YAML file (fields of `Situation`; those of a load: `load.py`), whose name has its truth in
`truth/cases/situations.yaml`. What is kept is what `sglang_tuning_exporter.recordings.recording` reads, and
`scrapes.tsv` and `health.tsv` (unix seconds, status, milliseconds), `v1_loads-<unix ms>.json`, the situation, and
`NOTE.md` with the truth. Pages of `/metrics` hardly differ, so all of them in one archive are smaller than a few in
single ones.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import tarfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

import aiohttp
import yaml
from pydantic import TypeAdapter, ValidationError

from closed_loop import engine, load
from closed_loop.installation import RELEASES, install
from closed_loop.side import quantile
from sglang_tuning_exporter.config.values import UsageError
from truth.cases import data

ARCHIVES = Path(__file__).parent.parent / "tests" / "captures"
MOST_BYTES = 100_000
SCRAPE_SECONDS, HEALTH_SECONDS, LOADS_SECONDS = 1.5, 5.0, 15.0
_HANG_SECONDS = 5.0  # a stopped main process accepts connections and never answers
_TAIL_SECONDS = 6.0  # what it says once the load is over
Keep: TypeAlias = Callable[[float, str, float, bytes], object]
_DROPPED = (b"Ignore import error when loading", b"nanobind: ", b" - leaked ", b" - ... skipped")


@dataclass(frozen=True, slots=True)
class Act:
    """A signal to one of the server's processes, so many seconds after the load began."""

    at: float
    signal: Literal["STOP", "CONT", "TERM"]
    process: Literal["main", "scheduler", "detokenizer"]


@dataclass(frozen=True)
class Situation:
    """One server and what is sent to it.

    `steps` follow each other; the loads of a step are sent side by side. A load of 0 clients is a pause.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}
    name: str
    what: str
    steps: tuple[tuple[load.Load, ...], ...]
    flags: str = ""
    acts: tuple[Act, ...] = ()
    probes: bool = True
    env: dict[str, str] = field(default_factory=dict)
    version: str = RELEASES[0]


def truths() -> dict[str, dict[str, str]]:
    """Return what is true of each situation, by name."""
    found: dict[str, dict[str, str]] = data("situations.yaml")["captures"]
    return found


def read(path: Path) -> Situation:
    """Read a situation. Raises `UsageError` with the key that is wrong, and where its truth is missing."""
    try:
        found = TypeAdapter(Situation).validate_python(yaml.safe_load(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: {error}") from None
    if found.name not in truths():
        raise UsageError(f"name={found.name}: write down what is true of it in truth/cases/situations.yaml first")
    return found


@dataclass(slots=True)
class _Capture:
    situation: Situation
    folder: Path
    server: engine.Engine
    say: Callable[[str], None]
    records: list[list[load.Record]] = field(default_factory=list)
    health: Counter[str] = field(default_factory=Counter)

    def event(self, name: str, at: float | None = None) -> None:
        with (self.folder / "events.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"t": round(time.time() if at is None else at, 3), "event": name}) + "\n")

    async def look(self, path: str, every: float, patience: float, keep: Keep) -> None:
        """Ask for a page again and again, and hand over when, how it was answered, the
        seconds it took, and its text.
        """
        async with aiohttp.ClientSession(trust_env=False, timeout=aiohttp.ClientTimeout(total=patience)) as session:
            while True:
                begin, text = time.time(), b""
                try:
                    async with session.get(engine.URL + path) as answer:
                        text, status = await answer.read(), str(answer.status)
                except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
                    status = type(error).__name__
                took = time.time() - begin
                keep(begin, status, took, text)
                await asyncio.sleep(max(0.1, every - took))

    def _row(self, table: str, at: float, status: str, took: float) -> None:
        with (self.folder / table).open("a", encoding="utf-8") as file:
            file.write(f"{at:.3f}\t{status}\t{1000 * took:.0f}\n")

    def scraped(self, at: float, status: str, took: float, text: bytes) -> None:
        self._row("scrapes.tsv", at, status, took)
        if status == "200":
            number = len(list(self.folder.glob("metrics-*.prom")))
            (self.folder / f"metrics-{number:03d}-{1000 * at:.0f}.prom").write_bytes(text)

    def probed(self, at: float, status: str, took: float, _: bytes) -> None:
        self._row("health.tsv", at, status, took)
        self.health[status] += 1

    def answered(self, at: float, status: str, _: float, text: bytes) -> None:
        if status == "200":
            (self.folder / f"v1_loads-{1000 * at:.0f}.json").write_bytes(text)

    def informed(self, _: float, status: str, __: float, text: bytes) -> None:
        if status == "200":
            (self.folder / "server_info.json").write_bytes(text)

    async def act(self) -> None:
        """Send each signal when it is due."""
        begin = time.monotonic()
        for act in self.situation.acts:
            await asyncio.sleep(max(0.0, begin + act.at - time.monotonic()))
            named = [
                pid for pid, title in self.server.processes().items() if title.startswith(f"sglang::{act.process}")
            ]
            pids = [self.server.group] if act.process == "main" else named
            if not pids:
                raise UsageError(f"{act.process}: no such process in {self.server.processes()}")
            self.event(f"SIG{act.signal}_{act.process}")
            self.say(f"  SIG{act.signal} {act.process}")
            os.kill(pids[0], getattr(signal, f"SIG{act.signal}"))

    async def drive(self) -> None:
        """Send the steps, one after the other; prompts differ from step to step."""
        for number, step in enumerate(self.situation.steps):
            busy = any(each.clients for each in step)
            if busy:
                self.event("load_begin")
            kept: list[list[load.Record]] = [[] for _ in step]
            self.records += kept
            seeded = [replace(each, seed=each.seed + 100 * number + place) for place, each in enumerate(step)]
            await asyncio.gather(*(load.drive(each, engine.URL, into) for each, into in zip(seeded, kept, strict=True)))
            if busy:
                self.event("load_end")

    async def run(self) -> None:
        """Do all of it at once."""
        watching = [asyncio.create_task(self.look("/metrics", SCRAPE_SECONDS, _HANG_SECONDS, self.scraped))]
        try:
            self.say(f"  ready after {await asyncio.to_thread(self.server.wait_ready):.0f} s")
            self.event("ready")
            asked: list[tuple[str, float, float, Keep]] = [("/v1/loads", LOADS_SECONDS, _HANG_SECONDS, self.answered)]
            asked += [("/health", HEALTH_SECONDS, 30.0, self.probed)] if self.situation.probes else []
            asked += [(path, 3600.0, _HANG_SECONDS, self.informed) for path in ("/server_info", "/get_server_info")]
            await asyncio.sleep(engine.SETTLE_SECONDS)
            watching += [asyncio.create_task(self.look(*each)) for each in asked]
            await asyncio.gather(self.drive(), self.act())
            await asyncio.sleep(_TAIL_SECONDS)
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)

    def note(self) -> str:
        """Write the truth about the situation and what its clients saw."""
        every, truth = [record for each in self.records for record in each], truths()[self.situation.name]
        firsts = [record.first - record.sent for record in every if record.first is not None]
        ends = Counter(record.error.split("(")[0] or f"status {record.status}" for record in every)
        return (
            f"# {self.situation.name}\n\n{self.situation.what}; flags and load: situation.yaml\n\n- Truth:"
            f" {truth['truth']}\n- Right advice: {truth['right']}\n- Clients: {dict(ends)}; first token p50"
            f" {quantile(firsts, 0.5)} s, p99 {quantile(firsts, 0.99)} s\n- Health probes: {dict(self.health)}\n"
        )


def capture(situation: Situation, folder: Path, say: Callable[[str], None]) -> None:
    """Start a server, run the situation, stop the server.

    Raises `UsageError` if the server does not start, or the folder exists.
    """
    if folder.exists():
        raise UsageError(f"{folder}: exists; remove it to capture {situation.name} again")
    installation = install(situation.version, say=say)
    args = engine.arguments(installation, situation.flags, stream_interval=None)
    engine.prefer(0)  # clients that wait for a core are no truth
    server = engine.start(installation, args, folder / "server.log", situation.env)
    done = _Capture(situation, folder, server, say)
    try:
        done.event("start", server.started)
        asyncio.run(done.run())
    finally:
        ends_itself = any(act.signal == "TERM" for act in situation.acts)
        if ends_itself:
            done.event("exit")
        size = server.log.stat().st_size
        server.stop(10.0)
        if not ends_itself:  # that the server is ended here is no part of the situation
            os.truncate(server.log, size)
    (folder / "NOTE.md").write_text(done.note(), encoding="utf-8")
    (folder / "situation.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(asdict(situation)))), encoding="utf-8")
    about = {"sglang_version": situation.version, "log_utc_offset_seconds": 0, "note": f"{situation.what}."}
    (folder / "recording.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def keep(folder: Path, archive: Path) -> int:
    """Pack a capture, with every page of `/metrics` or with every second or fourth; return the bytes.

    Raises `UsageError` if it is too large.
    """
    files = {path.name: _without_paths(path.read_bytes()) for path in folder.iterdir()}
    lines = files["server.log"].splitlines(keepends=True)
    files["server.log"] = b"".join(line for line in lines if not any(words in line for words in _DROPPED))
    pages = sorted(name for name in files if name.startswith("metrics-"))
    for every in (1, 2, 4):
        left_out = set(pages) - set(pages[::every])
        packed = pack({name: text for name, text in files.items() if name not in left_out})
        if len(packed) <= MOST_BYTES:
            archive.write_bytes(packed)
            return len(packed)
    raise UsageError(f"{folder.name}: {len(packed):,} bytes packed; shorten its load until it takes {MOST_BYTES:,}")


def pack(files: dict[str, bytes]) -> bytes:
    """Pack files by name; the same files give the same bytes."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz", format=tarfile.USTAR_FORMAT, preset=9) as archive:
        for name in sorted(files):
            member = tarfile.TarInfo(name)
            member.size = len(files[name])
            archive.addfile(member, io.BytesIO(files[name]))
    return packed.getvalue()


def _without_paths(text: bytes) -> bytes:
    text = re.sub(rb"/[^\s'\",:()\[\]{}]*/model-[0-9a-z.]+", b"/srv/sglang/tiny-llama", text)
    text = re.sub(rb"/[^\s'\",:()\[\]{}]*/venv-[0-9a-z.]+/", b"/opt/venv/", text)
    return re.sub(rb'(?<=")/(?!opt/venv/)[^\s"]*(?=/lib/python3)', b"/usr", text)  # Python's own files
