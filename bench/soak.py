"""`python -m bench.soak [--lines N] [--scrapes N] [--kills N]`: whether a real `serve` counts every line once, and its
memory does not grow.

An imitated server counts every line that it writes: batches, retractions, requests, lines of other programs, and
forgeries after messages with raw text. Its log is rotated and compressed. In the first half the exporter is killed
(SIGKILL) repeatedly while the server goes on writing; in the second half, where forgeries are, one process may grow by
at most two megabytes after its warm-up. At each scrape no counter may be ahead of the server or fall; at the end all
are equal to the server's. Exit status 1 otherwise.

Strangers are there all the time (`bench/attackers`): they guess the password that the scraper has, read slowly, never
finish a request, and announce odd timeouts; and one page of the server in fifty is hostile: ranks that it does not
have, series without end. At the end it prints the scrape times, of which 99 % are below 0.3 s on a machine with nothing
else to do.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import bcrypt

from bench.attackers import NAME, PASSWORD, credentials
from bench.processes import Exporter, end
from bench.reference import Server
from bench.server import answering
from sglang_tuning_exporter.core.ledger import SETTLED_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HOSTILE_EVERY = 50  # pages of the server
QUIET_P99_SECONDS = 0.3
GROWTH_KIB = 2 << 10
AHEAD_LINES = 400_000
HANG_SECONDS = 600.0
END_SECONDS = 300.0  # at most, until the last lines are read and confirmed
KILLED_SHARE, WARM_SHARE = 0.5, 0.6  # of the lines: kills until then; memory is measured from then on


class Scraped:
    """A real `serve`, scraped over one persistent connection as Prometheus does; it can be killed and started again."""

    def __init__(self, log: Path, sglang: str) -> None:
        self.scrapes = self.kills = 0
        self.seconds: list[float] = []  # of each scrape
        self.port = log.parent / "port"
        web_config = log.parent / "web.yml"
        hashed = bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(10)).decode()
        web_config.write_text(f"basic_auth_users: {{{NAME}: '{hashed}'}}\n")
        self._flags = ["--log-file", str(log), "--state-file", f"{log}.state", "--sglang-url", sglang]
        self._flags += ["--web-config", str(web_config)]
        self.start()

    def start(self) -> None:
        """Start it, and wait until it listens."""
        self.scrapes_since = 0
        self.held: deque[int] = deque(maxlen=2 * HOSTILE_EVERY)  # memory at the last scrapes
        self.exporter = Exporter(*self._flags)
        place = self.exporter.url.removeprefix("http://")
        self._connection = http.client.HTTPConnection(place, timeout=HANG_SECONDS)
        self.port.write_text(place.partition(":")[2])

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self.exporter.process.kill()
        self.exporter.process.wait()
        self.kills += 1

    def _get(self, path: str) -> str:
        """Return a page.

        A password that is not remembered yet may find all places taken by guesses, as after a start.
        """
        header, _, value = credentials(NAME, PASSWORD).partition(": ")
        while True:
            self._connection.request("GET", path, headers={header: value})
            answer = self._connection.getresponse()
            text = answer.read().decode()
            if answer.status == 200:
                return text
            assert answer.status == 429, f"{path} was answered {answer.status}"
            time.sleep(0.05)

    def scrape(self) -> dict[str, float]:
        """Scrape it and return its counters, summed over all labels but the kind of a line."""
        begin = time.monotonic()
        text = self._get("/metrics")
        self.seconds.append(time.monotonic() - begin)
        self.scrapes += 1
        self.scrapes_since += 1
        self.held.append(self.exporter.memory_kib())
        if self.scrapes % 50 == 0:
            for path in ("/", "/api/v1/findings"):
                self._get(path)
        found: dict[str, float] = {}
        for name, labels, value in re.findall(r"^sglang_tuning_(\w+_total)(?:\{([^}]*)\})? (\S+)", text, re.MULTILINE):
            if name == "log_lines_total":
                found[f"lines {labels[6:-1]}"] = float(value)
            found[name] = found.get(name, 0.0) + float(value)
        return found

    def files(self) -> int:
        """The number of its open files and sockets."""
        return len(list(Path(f"/proc/{self.exporter.pid}/fd").iterdir()))


def hostile(page: Callable[[], bytes]) -> Callable[[str], bytes]:
    """Return the server's page, now and then with what no server has: ranks of nobody, far too many series, lines that
    are none.
    """
    phantoms = "".join(f'sglang:num_queue_reqs{{model_name="m",dp_rank="{dp}"}} 5000\n' for dp in range(384))
    endless = "".join(f'sglang:odd{{number="{number}"}} 1\n' for number in range(60_000))
    garbage = f'sglang:odd{{a="{"x" * 100_000}"}} 1\n\x00\x1b[2J{{}}}} NaN\nsglang:num_queue_reqs{{}} 1e999\n'
    kinds: Iterator[str] = itertools.cycle((phantoms, endless, garbage))
    asked = itertools.count(1)

    def answer(path: str) -> bytes:
        if path != "/metrics":
            return b""
        return page() + (next(kinds).encode() if next(asked) % HOSTILE_EVERY == 0 else b"")

    return answer


def expected(server: Server) -> dict[str, float]:
    """Return the counters that are due when everything that `server` has written is read."""
    return {
        "log_lines_total": server.lines,
        **{f"lines {kind}": server.written[kind] for kind in ("decode", "prefill", "access")},
        "retraction_events_total": server.written["retraction"],
        "retracted_requests_total": server.retracted,
        "out_of_memory_total": 0,
        "server_starts_total": 0,
        "log_files_lost_total": 0,
        "log_dropped_lines_total": 0,
    }


class Soak:
    """One run."""

    def __init__(self, exporter: Scraped, server: Server, arguments: argparse.Namespace) -> None:
        self._exporter, self._server = exporter, server
        self._lines, self._scrapes, self._kills = arguments.lines, arguments.scrapes, arguments.kills
        self._dice = random.Random(arguments.seed)
        self._last: dict[str, float] = {}
        self._warm: tuple[int, int] | None = None
        self.wrong: list[str] = []

    def look(self) -> float:
        """Scrape, compare with the server and with the last scrape, and return how many lines have been read."""
        shown = self._exporter.scrape()
        for name, most in expected(self._server).items():
            value = shown.get(name)  # absent while the past is being read
            if value is not None and value > most:
                self._note(f"{name} is {value:.0f}, the server's {most:.0f}")
            if value is not None and value < self._last.get(name, 0.0):
                self._note(f"{name} went back from {self._last[name]:.0f} to {value:.0f}")
        self._last |= {name: value for name, value in shown.items() if name in expected(self._server)}
        return self._last.get("log_lines_total", 0.0)

    def _note(self, words: str) -> None:
        if words not in self.wrong:
            self.wrong.append(words)
            print(f"wrong: {words}, after {self._exporter.kills} kills", file=sys.stderr, flush=True)

    def _kill(self) -> None:
        """Kill it at any moment, let the server write on, and start it again."""
        self._server.block()
        time.sleep(self._dice.uniform(0, 0.05))
        self._exporter.kill()
        for _ in range(self._dice.randrange(4)):
            self._server.block()
        if self._exporter.kills % 10 == 0:
            self._server.rotate()
            self._server.block()
        self._exporter.start()

    def run(self, seconds: float) -> bool:
        """Write, kill and scrape until all is done or `seconds` are over; False where it reads no further."""
        exporter, server = self._exporter, self._server
        begin = printed_at = progressed = time.monotonic()
        read = last = 0.0
        self.look()
        time.sleep(SETTLED_SECONDS + 1)  # no scrape can confirm a retraction just before the first scrape
        while (server.lines < self._lines or exporter.scrapes < self._scrapes) and time.monotonic() - begin < seconds:
            share = max(server.lines / self._lines, 0.001)
            # What was written before a first scrape counts as with the log alone (SECURITY.md), so nothing is forged
            # then.
            server.forges = exporter.kills >= self._kills and exporter.scrapes_since > 10
            if exporter.kills < min(self._kills, self._kills * share / KILLED_SHARE - 0.5):
                self._kill()
            behind = server.lines - read >= AHEAD_LINES
            if server.lines < self._lines and not behind:
                server.block()
            if exporter.scrapes < self._scrapes * share or server.lines >= self._lines or behind:
                read = self.look()
            now = time.monotonic()
            progressed, last = (now, read) if read != last or server.lines >= self._lines else (progressed, last)
            if now - progressed > HANG_SECONDS or len(self.wrong) > 20:
                return False
            is_warm = (
                share >= WARM_SHARE and exporter.kills >= self._kills and exporter.scrapes_since >= 3 * HOSTILE_EVERY
            )
            if self._warm is None and is_warm:
                self._warm = min(exporter.held), exporter.files()  # answers that slow readers have not read come and go
            if now - printed_at > 10:
                printed_at = now
                words = (
                    f"{server.lines:,} lines written, {read:,.0f} read, {exporter.scrapes:,} scrapes, {exporter.kills}"
                    " kills"
                )
                print(f"{words}, {exporter.exporter.memory_kib() / 1024:.1f} MiB", file=sys.stderr, flush=True)
        return True

    def end(self) -> int:
        """Wait until everything is read, print the result, and return the exit status."""
        begin, due = time.monotonic(), expected(self._server)
        while (
            any(self._last.get(name) != value for name, value in due.items()) and time.monotonic() - begin < END_SECONDS
        ):
            self.look()
            time.sleep(0.5)
        for name, value in expected(self._server).items():
            if self._last.get(name) != value:
                self.wrong.append(f"{name} is {self._last.get(name)} at the end, the server's {value}")
        if self._warm is None:
            self.wrong.append("the time was over before the warm-up")
        warm, files = self._warm or (0, 0)
        memory = min(self._exporter.held)
        if memory - warm > GROWTH_KIB:
            self.wrong.append(f"it holds {memory - warm} KiB more than after the warm-up")
        print(
            f"{warm / 1024:.1f} MiB after the warm-up, {memory / 1024:.1f} MiB at the end ({memory - warm:+d} KiB); "
            f"{files} and {self._exporter.files()} files open"
        )
        times = sorted(self._exporter.seconds)
        p99 = times[int(0.99 * (len(times) - 1))]
        print(
            f"scrapes: half within {times[len(times) // 2]:.3f} s, 99 % within {p99:.3f} s, the longest"
            f" {times[-1]:.3f} s"
        )
        if p99 > QUIET_P99_SECONDS:
            print(f"99 % within more than {QUIET_P99_SECONDS} s: on a machine with nothing else to do that is wrong")
        print("\n".join(f"wrong: {words}" for words in self.wrong) or f"every counter as the server's: {self._last}")
        return int(bool(self.wrong))


def main() -> int:
    """Read the flags."""
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--lines", type=int, default=10_000_000, help="default ten million")
    parser.add_argument("--scrapes", type=int, default=20_000, help="default twenty thousand")
    parser.add_argument("--kills", type=int, default=200, help="default two hundred")
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after this long (default an hour)")
    parser.add_argument("--seed", type=int, default=1, help="other lines")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        server = Server(Path(directory) / "server.log", arguments.seed)
        exporter = Scraped(server.path, stack.enter_context(answering(hostile(server.page))))
        attackers = subprocess.Popen(
            [sys.executable, "-m", "bench.attackers", str(exporter.port)], stdout=subprocess.PIPE, text=True
        )
        begin = time.monotonic()
        try:
            soak = Soak(exporter, server, arguments)
            if not soak.run(arguments.seconds):
                soak.wrong.append("it reads no further, or too much is wrong")
            status = soak.end()
            print(
                f"{server.lines:,} lines, {server.written['forged']:,} forgeries, {server.rotations} rotations,"
                f" {exporter.scrapes:,} scrapes, {exporter.kills} kills, {time.monotonic() - begin:.0f} s"
            )
            attackers.terminate()
            print(f"strangers were answered: {json.loads(attackers.communicate(timeout=60)[0])}")
        finally:
            attackers.kill()
            attackers.communicate()
            end(exporter.exporter.process)
            warnings = [line for line in exporter.exporter.said if " INFO " not in line and ": INFO:" not in line]
            print("\n".join(f"exporter: {line}" for line in warnings), file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
