"""`python -m release.entered report|line LOG OUTPUT`: which functions the exporter enters, in a process of its own, for
`release.measure`.

report  one `report` of the log; what runs while a module is imported is not counted
line    the log up to the line before its last retraction is the history of a running `serve`, which has shown its page
once; counted
        is what happens from the moment that this line is appended until the page has been shown again

OUTPUT gets a list: the file, the first line and the name of each function.
"""

from __future__ import annotations

import gzip
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PROGRAM = "sglang_tuning_exporter"
MARK = b"Retract requests"
SECONDS = 120.0  # at most, until the exporter answers
QUIET_SECONDS = 2.0  # a log is polled at least once a second

Place = tuple[str, int, str]


class Entered:
    """The functions entered so far, in every thread."""

    def __init__(self) -> None:
        self.places: set[Place] = set()
        self._importing = threading.local()

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        """Note one event of the interpreter."""
        code = frame.f_code
        if code.co_name == "<module>":
            self._import(code, event)
        elif event == "call" and not getattr(self._importing, "depth", 0):
            self.places.add((code.co_filename, code.co_firstlineno, code.co_name))

    def _import(self, code: CodeType, event: str) -> None:
        if not code.co_filename.endswith("__main__.py") and event in {"call", "return"}:
            self._importing.depth = getattr(self._importing, "depth", 0) + (1 if event == "call" else -1)

    def start(self) -> None:
        """Note what this thread and those started from now on enter."""
        threading.setprofile(self.profile)
        sys.setprofile(self.profile)

    def settled(self) -> None:
        """Wait until nothing new has been entered for a while."""
        seen = -1
        while len(self.places) != seen:
            seen = len(self.places)
            time.sleep(QUIET_SECONDS)


def report(entered: Entered, log: Path) -> set[Place]:
    """Run one `report`."""
    run(entered, "report", str(log))
    return entered.places


def line(entered: Entered, log: Path) -> set[Place]:
    """Run `serve` and append one line to its log."""
    lines = gzip.decompress(log.read_bytes()).splitlines(keepends=True)
    last = max(number for number, each in enumerate(lines) if MARK in each)
    followed = Path("followed.log").absolute()
    followed.write_bytes(b"".join(lines[:last]))
    address = f"127.0.0.1:{_free_port()}"
    found: set[Place] = set()

    def client() -> None:
        try:
            _page(address)
            entered.settled()
            entered.places.clear()
            with followed.open("ab") as file:
                file.write(lines[last])
            entered.settled()
            _page(address)
            found.update(entered.places)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=client).start()
    run(entered, "serve", "--log-file", str(followed), "--listen-address", address)
    return found


def run(entered: Entered, *arguments: str) -> None:
    """Run the exporter's command line here. Raises `SystemExit` for a wrong command line."""
    sys.argv = [PROGRAM, *arguments]
    entered.start()
    try:
        runpy.run_module(PROGRAM, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code not in {None, 0, 1}:  # 1: something is to be changed
            raise
    finally:
        sys.setprofile(None)


def _page(address: str) -> None:
    deadline = time.monotonic() + SECONDS
    while True:
        with suppress(OSError), urllib.request.urlopen(f"http://{address}/", timeout=SECONDS) as answer:
            answer.read()
            return
        if time.monotonic() > deadline:
            raise SystemExit(f"no page within {SECONDS:.0f} s")
        time.sleep(0.1)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def main() -> int:
    """Run one of the two, and write what was entered."""
    kind, log, output = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    places = {"report": report, "line": line}[kind](Entered(), log)
    if places:
        output.write_text(json.dumps(sorted(places)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
