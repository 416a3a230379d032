"""The driver proven: the command line as a process of its own says the same, of twenty logs by `report` and of a dozen
servers in real time.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from truth import ways
from truth.cases import Answer, Case, Checks
from truth.recording import ROOT, Recording, read
from truth.stand_in import StandIn, get

CAPTURES = ROOT / "tests" / "captures"
LOGS = 20
REAL_TIME = (
    "limit-6-chunks-128", "long-answers-tiny-pool", "healthy-chat", "healthy-probes", "retry-storm", "page-512",
    "prefixes-cache-off",
    "prompts-beyond-the-pool", "refused-503", "one-token-answers", "early-chunks", "late-by-prefill",
)  # fmt: skip
SIDE_BY_SIDE = 6  # more of them would keep each other waiting
READ_SECONDS = 0.3  # by then the last lines are read
PROGRAM = (sys.executable, "-m", "sglang_tuning_exporter")


def cases() -> Iterator[Case]:
    """Give twenty logs, then the dozen servers."""
    for path in sorted(CAPTURES.glob("*.tar.xz"))[: LOGS * 4 : 4]:
        yield Case(path.name.removesuffix(".tar.xz"), partial(read, path), check, ("process",), ask=_as_process)
    for name in REAL_TIME:
        yield Case(name, partial(_until_the_load_ends, name), check, ("real time",), ask=_in_real_time)


def check(_way: str, answers: Sequence[Answer]) -> Checks:
    """Compare the driver's answer with the process's."""
    said: dict[str, list[Any]] = {
        "status": [answer.status for answer in answers],
        "findings": [[answer.verdict, *(each.diagnosis for each in answer.findings)] for answer in answers],
        "first change": [answer.changes[:1] for answer in answers],
        "counts": [{name: value for name, value in answer.counts.items() if name != "lines"} for answer in answers],
    }
    return {name: "" if both[0] == both[1] else f"{both[1]}, not {both[0]}" for name, both in said.items()}


def _until_the_load_ends(name: str) -> Recording:
    """Return the server until the end of its load."""
    whole = read(CAPTURES / f"{name}.tar.xz")
    return replace(whole, end=whole.loads[-1][1] if whole.loads else whole.end)


def _as_process(case: Case) -> list[Answer]:
    with tempfile.TemporaryDirectory(prefix="truth-") as folder:
        log = Path(folder) / "server.log"
        log.write_bytes(case.recording().text)
        driven = ways.report(log, [])
        argv = [*PROGRAM, "report", "--format", "json", str(log)]
        done = subprocess.run(argv, env=ways.ENVIRONMENT, capture_output=True, text=True, check=False)
    return [driven, ways.answer_of(json.loads(done.stdout), 0.0, done.returncode, done.stderr)]


def _in_real_time(case: Case) -> list[Answer]:
    return [ways.ask(replace(case, ask=None), "both")[-1], all_at_once()[case.name]]


@lru_cache(maxsize=1)
def all_at_once() -> dict[str, Answer]:
    """Watch the dozen, a few side by side."""
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        return dict(zip(REAL_TIME, pool.map(watch, map(_until_the_load_ends, REAL_TIME)), strict=True))


def watch(recording: Recording) -> Answer:
    """Run the exporter beside the server, as it was; return what it says at the end, with the exit status after
    SIGTERM.
    """
    shift = [time.time() - recording.begin]
    stand_in = StandIn(recording.pages, lambda: time.time() - shift[0])
    with socket.socket() as free, tempfile.TemporaryDirectory(prefix="truth-") as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        path = Path(folder) / "server.log"
        path.touch()
        argv = [*PROGRAM, "serve", "--listen-address", f"127.0.0.1:{port}", "--no-passthrough", "--log-file", str(path)]
        argv += ["--sglang-url", f"http://127.0.0.1:{stand_in.port}"]
        with (
            subprocess.Popen(argv, env=ways.ENVIRONMENT, stderr=subprocess.DEVNULL) as process,
            path.open("ab", buffering=0) as log,
        ):
            while socket.socket().connect_ex(("127.0.0.1", port)):
                time.sleep(0.1)
            shift[0] = time.time() - recording.begin
            written, scraped = 0, recording.begin
            while (now := time.time() - shift[0]) < recording.end:
                until = bisect_right(recording.log, now, lo=written, key=lambda line: line[0])
                log.write(b"".join(text for _, text in recording.log[written:until]))
                written = until
                stand_in.follow()
                if now - scraped >= ways.SCRAPE_SECONDS:
                    scraped = now
                    get(port, "/metrics")
                time.sleep(0.1)
            log.write(b"".join(text for at, text in recording.log[written:] if at <= recording.end))
            time.sleep(READ_SECONDS)
            series = ways.series_of(get(port, "/metrics"))
            document = json.loads(get(port, "/api/v1/findings"))
            process.send_signal(signal.SIGTERM)
            ended = process.wait()
    return ways.answer_of(document, recording.end, 200 if ended == 0 else ended, "", series)
