"""Run the product with a clock moved by hand: the only file that imports it, and only its public start.

Each line of standard input is a job, each line of standard output its answer, as JSON. A job is a command (`argv`, `stdin`), or a live
server (`argv`, `log`, `chunks`, `pages`, `begin`, `end`, `step`, `every`): the log grows and a stand-in for SGLang on loopback answers as the
recording says, while the clock goes on by `step` seconds. Every job has a process of its own, forked after the product is imported.
"""

# ruff: noqa: E402 - the clock is replaced before anything takes it

from __future__ import annotations

import asyncio
import http.client
import importlib
import json
import os
import pkgutil
import queue
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from bisect import bisect_right
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

FASTER = 20.0  # sockets time out so many times earlier, and a hang takes that much less of our time
NOW: list[float | None] = [None]  # seconds on the moved clock; None: the real one
ASLEEP: dict[threading.Thread, float] = {}  # until when, on the moved clock
_real, _real_wait, _timeout = time.time, threading.Condition.wait, socket.socket.settimeout


def _now() -> float:
    return _real() if NOW[0] is None else NOW[0]


def _wait(self: Any, timeout: float | None = None) -> bool:
    if timeout is None or timeout <= 0 or NOW[0] is None:
        return _real_wait(self, timeout)
    until, me, waiter = _now() + timeout, threading.current_thread(), threading.Lock()
    waiter.acquire()
    self._waiters.append(waiter)  # as the standard library's, whose time-out is of the real clock
    held, ASLEEP[me], notified = self._release_save(), until, False
    try:
        while _now() < until and not notified:
            notified = waiter.acquire(timeout=0.001)
        return notified
    finally:
        ASLEEP.pop(me, None)
        self._acquire_restore(held)
        if not notified and waiter in self._waiters:
            self._waiters.remove(waiter)


asyncio.BaseEventLoop.time = lambda _self, steady=time.perf_counter: steady()  # type: ignore[method-assign,misc]
time.time = time.monotonic = _now
threading._time = queue.time = _now  # type: ignore[attr-defined] # noqa: SLF001 - taken from `time` before this file could replace it
threading.Condition.wait = _wait  # type: ignore[method-assign]
queue.SimpleQueue = queue._PySimpleQueue  # type: ignore[attr-defined,misc] # noqa: SLF001 - the one in C waits by the real clock
socket.socket.settimeout = lambda self, t: _timeout(self, t and t / FASTER)  # type: ignore[method-assign]

import sglang_tuning_exporter
from sglang_tuning_exporter.cli import main as product

for module in pkgutil.walk_packages(sglang_tuning_exporter.__path__, "sglang_tuning_exporter."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)


def move(to: float) -> None:
    """Set the clock, and wait until each thread that this wakes is done and sleeps again."""
    NOW[0] = to
    woken, begin = [thread for thread, until in list(ASLEEP.items()) if until <= to], time.perf_counter()
    while any(thread.is_alive() and ASLEEP.get(thread, to) <= to for thread in woken):
        if time.perf_counter() - begin > 1.0:
            return
        time.sleep(0.0005)


class StandIn:
    """SGLang as the recording has it, on a port of its own."""

    def __init__(self, pages: list[tuple[float, str, int | str, str]]) -> None:
        self.pages: dict[str, list[tuple[float, int | str, str]]] = {}
        for at, path, status, text in sorted(pages, key=lambda page: page[0]):
            self.pages.setdefault(path, []).append((at, status, text))
        self.server: ThreadingHTTPServer | None = None
        self.port = 0
        self.follow()

    def answer(self, path: str) -> tuple[int | str, str]:
        """Return status and text as of now."""
        rows = self.pages.get(path.partition("?")[0], [])
        place = bisect_right(rows, _now(), key=lambda row: row[0])
        return rows[place - 1][1:] if place else ("refuses" if path == "/metrics" else 404, "")

    def follow(self) -> None:
        """Listen, or not, as the server does now; the port is taken at the first call."""
        wanted = self.answer("/metrics")[0] != "refuses"
        if self.server is not None and not wanted:
            self.server.shutdown()
            self.server.server_close()
            self.server = None
        elif self.server is None and (wanted or not self.port):
            handler = type("Handler", (_Handler,), {"stand_in": self})
            self.server = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
            self.port = self.server.server_address[1]
            threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
            self.follow()


class _Handler(BaseHTTPRequestHandler):
    stand_in: StandIn

    def do_GET(self) -> None:
        status, text = self.stand_in.answer(self.path)
        if isinstance(status, str):  # it takes the connection and does not answer: the clock goes on until the client leaves
            while not select.select([self.connection], [], [], 0.1 / FASTER)[0]:
                NOW[0] = _now() + 0.1
            return
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; version=0.0.4" if self.path == "/metrics" else "application/json")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def get(port: int, path: str) -> str:
    """Ask the exporter."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60 * FASTER)
    connection.request("GET", path)
    return connection.getresponse().read().decode()


def live(job: dict[str, Any], port: int, stand_in: StandIn, seen: list[Any]) -> None:
    """Let time go by, and ask the exporter for each path when it is due."""
    while not socket.socket().connect_ex(("127.0.0.1", port)) == 0:
        time.sleep(0.01)
    due, written, chunks = dict.fromkeys(job["every"], job["begin"]), 0, job["chunks"]
    with Path(job["log"]).open("ab", buffering=0) as log:
        while _now() < job["end"]:
            to = min(_now() + job["step"], job["end"])
            until = bisect_right(chunks, to, lo=written, key=lambda chunk: chunk[0])
            log.write(b"".join(text.encode("latin-1") for _, text in chunks[written:until]))
            written = until
            move(to)
            stand_in.follow()
            asked = [path for path, seconds in job["every"].items() if to >= due[path] + seconds or to == job["end"]]
            if asked:
                seen.append([to, {path: get(port, path) for path in asked}])
                due.update(dict.fromkeys(asked, to))
    os.kill(os.getpid(), signal.SIGTERM)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Do one job in this process."""
    import faulthandler; faulthandler.dump_traceback_later(25, exit=True, file=open("/tmp/trace","w"))
    signal.alarm(job.get("limit", 300))  # a job that hangs is an answer too: its parent reports how it ended
    streams = [tempfile.TemporaryFile() for _ in range(3)]  # noqa: SIM115 - they are this process's own
    streams[0].write(job.get("stdin", "").encode("latin-1"))
    for number, stream in enumerate(streams):
        stream.seek(0)
        os.dup2(stream.fileno(), number)
    seen: list[Any] = []
    argv = job["argv"]
    if "chunks" in job:
        NOW[0] = job["begin"]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        stand_in = StandIn(job["pages"])
        argv = [each.format(port=port, sglang=stand_in.port) for each in argv]
        threading.Thread(target=live, args=(job, port, stand_in, seen), daemon=True).start()
    try:
        status = product(argv)
    except SystemExit as error:
        status = error.code
    sys.stdout.flush()
    sys.stderr.flush()
    texts = []
    for stream in streams[1:]:
        stream.seek(0)
        texts.append(stream.read().decode("utf-8", "replace"))
    return {"status": status, "out": texts[0], "err": texts[1], "seen": seen}


def main() -> None:
    """Answer each line."""
    for line in sys.stdin:
        if not (child := os.fork()):
            answers = os.fdopen(os.dup(1), "w")
            print(json.dumps(run(json.loads(line))), file=answers, flush=True)
            os._exit(0)
        if ended := os.waitpid(child, 0)[1]:
            print(json.dumps({"error": f"the process ended with wait status {ended}"}), flush=True)


if __name__ == "__main__":
    main()
