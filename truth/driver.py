"""Run the product with a clock moved by hand: the only file that imports it, and only its public start.

Each line of standard input is a job, each line of standard output its answer, as JSON. A job is a command (`argv`,
`stdin`), or a live server (`argv`, `log`, `chunks`, `pages`, `begin`, `end`, `step`, `every`): the log grows and a
stand-in for SGLang on loopback answers as the recording says, while the clock goes on by `step` seconds. Every job has
a process of its own, forked after the product is imported.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import signal
import socket
import sys
import tempfile
import threading
import time
from bisect import bisect_right
from pathlib import Path
from typing import Any

from truth import clock  # first: the product takes its time from it

# isort: split
import sglang_tuning_exporter
from sglang_tuning_exporter.cli import main as product
from truth.recording import Page
from truth.stand_in import StandIn, get

for module in pkgutil.walk_packages(sglang_tuning_exporter.__path__, "sglang_tuning_exporter."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)


def live(job: dict[str, Any], port: int, stand_in: StandIn, seen: list[Any]) -> None:
    """Let time go by, and ask the exporter for each path when it is due."""
    threads = {name for name, flag in (("log", "--log-file"), ("self-scrape", "--sglang-url")) if flag in job["argv"]}
    for _ in range(500):  # until it has read what is there, and scraped
        if threads <= {thread.name for thread in list(clock.ASLEEP)}:
            break
        time.sleep(0.01)
    due, written, chunks = dict.fromkeys(job["every"], job["begin"]), 0, job["chunks"]
    with Path(job["log"]).open("ab", buffering=0) as log:
        while clock.now() < job["end"]:
            to = min(clock.now() + job["step"], job["end"])
            until = bisect_right(chunks, to, lo=written, key=lambda chunk: chunk[0])
            log.write(b"".join(text.encode("latin-1") for _, text in chunks[written:until]))
            written = until
            clock.move(to)
            stand_in.follow()
            asked = [path for path, seconds in job["every"].items() if to >= due[path] + seconds or to == job["end"]]
            if asked:
                seen.append([to, {path: get(port, path) for path in asked}])
                due.update(dict.fromkeys(asked, to))
    os.kill(os.getpid(), signal.SIGTERM)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Do one job in this process."""
    signal.alarm(job.get("limit", 300))  # a job that hangs is an answer too: its parent reports how it ended
    streams = [tempfile.TemporaryFile() for _ in range(3)]  # noqa: SIM115 - they are this process's own
    streams[0].write(job.get("stdin", "").encode("latin-1"))
    for number, stream in enumerate(streams):
        stream.seek(0)
        os.dup2(stream.fileno(), number)
    argv, seen = job["argv"], list[Any]()
    if "chunks" in job:
        clock.NOW[0] = job["begin"]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        stand_in = StandIn([Page(*page) for page in job["pages"]], clock.now, clock.hang)
        argv = [each.format(port=port, sglang=stand_in.port) for each in argv]
        threading.Thread(target=live, args=(job, port, stand_in, seen), daemon=True).start()
    try:
        status = product(argv)
    except SystemExit as error:
        status = int(error.code or 0)
    print(end="", flush=True)
    out, err = (
        os.pread(each.fileno(), os.fstat(each.fileno()).st_size, 0).decode("utf-8", "replace") for each in streams[1:]
    )
    return {"status": status, "out": out, "err": err, "seen": seen}


if __name__ == "__main__":
    for line in sys.stdin:
        if not (child := os.fork()):
            answers = os.fdopen(os.dup(1), "w")
            print(json.dumps(run(json.loads(line))), file=answers, flush=True)
            os._exit(0)
        if ended := os.waitpid(child, 0)[1]:
            print(json.dumps({"error": f"the process ended with wait status {ended}"}), flush=True)
