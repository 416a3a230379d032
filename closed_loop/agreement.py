"""A storm of retractions on a real server, with clients that leave and clients that abort, and whether all counts agree.

The exporter follows the server from its first line. Before the load and after it, when nothing runs any more, the server's
own page of metrics and the exporter's are kept; then the exporter's `report` reads the same log.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import requests

from closed_loop import accounts
from closed_loop.accounts import Asked, Manner, Pages
from closed_loop.host import STORM, STORM_ARGS, STORM_ENV, Host
from closed_loop.installation import Installation
from closed_loop.load import Load
from sglang_tuning_exporter.recordings.stack import LOOPBACK, Process, free_port

PORT = 32100
MOST_QUEUED = 24
CLIENTS = 48
LEAVING_TOKENS = 24
SETTLE_SECONDS = 6.0  # SGLang aborts what was left two seconds later (managers/tokenizer_manager.py, create_abort_task)
_TIMEOUT = aiohttp.ClientTimeout(total=600)


@dataclass(frozen=True, slots=True)
class Storm:
    """The storm's requests: how many of a hundred have a client that leaves, and how many are aborted by a call."""

    seconds: float = 600.0
    clients: int = CLIENTS
    leave: int = 8
    abort: int = 8
    whole: int = 20  # answered in one piece, not streamed
    seed: int = 1

    def manner(self, number: int) -> tuple[Manner, bool, float]:
        """Draw the client's behaviour, whether it streams, and the seconds before an abort."""
        drawn = random.Random(f"{self.seed}/{number}/manner")
        lot, streams, after = drawn.randrange(100), drawn.randrange(100) >= self.whole, drawn.uniform(0.2, 6.0)
        if lot < self.leave:
            return "leaves", True, after
        if lot < self.leave + self.abort:
            return "asks to abort", streams, after
        return "stays", streams, after


async def drive(storm: Storm, url: str) -> list[Asked]:
    """Send the storm and wait for every answer, except where the client leaves."""
    load = Load(clients=storm.clients, seed=storm.seed, most_new_tokens=STORM.most_new_tokens)
    asked: list[Asked] = []
    until = time.monotonic() + storm.seconds
    unlimited = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=unlimited, read_bufsize=1 << 20, trust_env=False) as session:

        async def client() -> None:
            while time.monotonic() < until:
                number = len(asked)
                manner, streams, after = storm.manner(number)
                # Of one length: SGLang aborts every request whose id begins with the one that is given.
                body = {**load.request(number), "stream": streams, "rid": f"storm-{number:08d}"}
                if manner == "leaves":
                    # It must have much left to do, or it would end before it is aborted.
                    body["sampling_params"] = {**body["sampling_params"], "ignore_eos": True}
                each = Asked(number, manner, len(body["input_ids"]), streams)
                asked.append(each)
                aborting = asyncio.create_task(_abort(session, url, body["rid"], after, manner))
                try:
                    await (_stream if streams else _whole)(session, url, body, each)
                except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
                    each.outcome, each.words = "failed", repr(error)[:100]
                finally:
                    aborting.cancel()
                if each.outcome in {"rejected", "failed"}:
                    await asyncio.sleep(1.0)

        await asyncio.gather(*(client() for _ in range(storm.clients)))
    return asked


async def _stream(session: aiohttp.ClientSession, url: str, body: dict[str, Any], each: Asked) -> None:
    last: dict[str, Any] = {}
    async with session.post(f"{url}/generate", json=body, timeout=_TIMEOUT) as answer:
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            last = json.loads(line[6:])
            each.tokens = int(last.get("meta_info", {}).get("completion_tokens") or each.tokens)
            if each.manner == "leaves" and each.tokens >= LEAVING_TOKENS:
                each.outcome = "left"
                return
        each.end(answer.status, _meta(last))


async def _whole(session: aiohttp.ClientSession, url: str, body: dict[str, Any], each: Asked) -> None:
    async with session.post(f"{url}/generate", json=body, timeout=_TIMEOUT) as answer:
        each.end(answer.status, _meta(await answer.json(content_type=None)))


def _meta(summary: dict[str, Any]) -> dict[str, Any]:
    """Return an answer's meta information; an error has it in another place."""
    error = summary.get("error")
    if isinstance(error, dict):
        return {"finish_reason": {"type": "error", "status_code": error.get("code"), "message": error.get("message")}}
    return dict(summary.get("meta_info") or {"finish_reason": {"type": "error", "message": json.dumps(summary)[:80]}})


async def _abort(session: aiohttp.ClientSession, url: str, rid: str, after: float, manner: Manner) -> None:
    if manner == "asks to abort":
        await asyncio.sleep(after)
        async with session.post(f"{url}/abort_request", json={"rid": rid}, timeout=_TIMEOUT) as answer:
            await answer.read()


def run(
    installation: Installation,
    results: Path,
    *,
    seconds: float = 600.0,
    port: int = PORT,
    core: int | None = None,
    again: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Send the storm, compare the counts, and write them as JSON. Raises `UsageError` if something does not start."""
    path = results / "agreement" / f"{installation.version}-{seconds:g}s.json"
    if path.exists() and not again:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    with tempfile.TemporaryDirectory(prefix="closed-loop-") as scratch:
        more = ("--max-queued-requests", str(MOST_QUEUED), "--enable-cache-report")
        host = Host(installation, port=port, core=core, folder=Path(scratch), storm=True, more=more)
        exporter_url = f"http://{LOOPBACK}:{free_port()}"
        command = [sys.executable, "-m", "sglang_tuning_exporter", "serve", "--sglang-url", host.url]
        command += ["--log-file", str(host.log), "--listen-address", exporter_url.removeprefix("http://")]
        exporter = Process("exporter", command, Path(scratch) / "exporter.log")
        try:
            host.start()
            time.sleep(SETTLE_SECONDS)
            storm = Storm(seconds)
            before = _pages(host.url, exporter_url)
            begin = host.witness.stat().st_size
            say(f"{storm.clients} clients for {seconds:.0f} s")
            asked = asyncio.run(drive(storm, host.url))
            _settle(host.url)
            after = _pages(host.url, exporter_url)
            end = host.witness.stat().st_size
            host.clear()
            lines = host.witness.read_bytes()
            asking = [sys.executable, "-m", "sglang_tuning_exporter", "report", str(host.log), "--format", "json"]
            report = json.loads(subprocess.run(asking, capture_output=True, check=False).stdout)
        finally:
            exporter.stop()
            host.close()
            if keep := os.environ.get("CLOSED_LOOP_KEEP_LOG"):
                shutil.copytree(scratch, Path(keep) / f"agreement-{time.time():.0f}", dirs_exist_ok=True)
    during = accounts.of_log(lines[begin:end].decode("utf-8", "replace").splitlines())
    whole = accounts.of_log(lines.decode("utf-8", "replace").splitlines())
    pages = Pages((before[0], after[0]), (before[1], after[1]))
    rows = accounts.compare(asked, during, whole, pages, report)
    summary = {
        "version": installation.version,
        "storm": asdict(storm),
        "args": [*STORM_ARGS, *more],
        "env": dict(STORM_ENV),
        "clients": accounts.clients_say(asked),
        "rows": [row.as_json() for row in rows],
        "problems": accounts.problems(rows, asked),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    request_lines = "".join(json.dumps(asdict(each)) + "\n" for each in asked)
    path.with_suffix(".requests.jsonl").write_text(request_lines, encoding="utf-8")
    for row in rows:
        say(f"{row.what}: {dict(row.counts)}{'' if row.agrees else '  ' + (row.why if row.differs else 'DIFFERS')}")
    return summary


def _settle(url: str) -> None:
    """Wait until no request runs or waits, and until SGLang has aborted the rest."""
    deadline = time.monotonic() + 120
    quiet = 0
    while quiet < SETTLE_SECONDS and time.monotonic() < deadline:
        time.sleep(1.0)
        busy = accounts.of_page(_pages(url)[0], "sglang:num_running_reqs", "sglang:num_queue_reqs")
        quiet = 0 if busy else quiet + 1


def _pages(*urls: str) -> tuple[str, ...]:
    """Read the pages of metrics at these addresses, one after the other."""
    with requests.Session() as session:
        session.trust_env = False
        return tuple(session.get(f"{url}/metrics", timeout=30).text for url in urls)


def table(summary: Mapping[str, Any]) -> list[str]:
    """Write a result as a Markdown table."""
    who = ("clients", "log", "server", "exporter", "report")
    shown = [
        "| what | clients | SGLang's log | SGLang's counters | exporter | `report` |  |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for row in summary["rows"]:
        figures = " | ".join(f"{row['counts'][name]:,}" if name in row["counts"] else "" for name in who)
        shown.append(f"| {row['what']} | {figures} | {'equal' if row['agrees'] else row['why'] or 'differs'} |")
    return shown
