"""`python -m bench.soak [--lines N] [--scrapes N] [--seconds S]`: whether the memory of a real `serve` stays where it is.

A log of many releases' lines, spoiled ones among them, grows at speed and is rotated; SGLang's page, other figures each
time, is scraped meanwhile. What the process holds after a warm-up of a tenth and at the end may differ by two megabytes.
Exit status 1 when it grew by more.
"""

from __future__ import annotations

import argparse
import http.client
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from fuzz.lines import mutators, seeds

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "tests" / "data" / "metrics" / "0.5.23_tp8-retract.prom").read_bytes()
GROWTH_KIB = 2 << 10
BLOCK_LINES = 2000
ROTATE_LINES = 200_000
SPOILED_SHARE = 0.05
AHEAD_LINES = 400_000
HANG_SECONDS = 600.0


class _SGLang(BaseHTTPRequestHandler):
    """Answers with a page whose counters and labels move."""

    asked = 0
    disable_nagle_algorithm = True  # head and body are two packets

    def do_GET(self) -> None:
        _SGLang.asked += 1
        body = PAGE + b'sglang:soak{number="%d"} 1\n' % (_SGLang.asked % 100_000)
        self.send_response(200 if self.path == "/metrics" else 404)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class _Writer:
    """A server's log that is rotated by rename; an old file is deleted once another took its place."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.lines = 0
        self._dice = random.Random(seed)
        self._clean = [line[:4000] for line in seeds()]
        self._ways = mutators(self._dice, self._clean)
        self._file = path.open("ab", buffering=0)

    def block(self) -> None:
        """Write some thousand lines."""
        lines = self._dice.choices(self._clean, k=BLOCK_LINES)
        for at in range(0, BLOCK_LINES, int(1 / SPOILED_SHARE)):
            lines[at] = self._dice.choice(self._ways)(lines[at])
        lines[1] = b"nobody knows this line %d" % self._dice.randrange(1 << 60)
        lines[2] = b"[2025-11-20 11:40:10 DP%d TP%d] Decode batch. odd: %d" % tuple(
            self._dice.choices(range(99999), k=3)
        )
        self._file.write(b"\n".join(lines) + b"\n")
        before = self.lines
        self.lines += BLOCK_LINES
        if self.lines // ROTATE_LINES != before // ROTATE_LINES:
            self.path.rename(f"{self.path}.1")
            self._file.close()
            self._file = self.path.open("ab", buffering=0)


class _Exporter:
    """A real `serve`, asked over one connection that lives on, as Prometheus's does."""

    def __init__(self, log: Path, sglang: str) -> None:
        flags = ["--log-file", str(log), "--state-file", f"{log}.state", "--sglang-url", sglang]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sglang_tuning_exporter", "serve", "--listen-address", "127.0.0.1:0", *flags],
            stderr=subprocess.PIPE,
        )
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if found := re.search(rb"listening on http://([\d.]+):(\d+)", line):
                break
        threading.Thread(target=self.process.stderr.read, daemon=True).start()
        self._connection = http.client.HTTPConnection(found[1].decode(), int(found[2]), timeout=HANG_SECONDS)
        self.scrapes = 0

    def scrape(self) -> int:
        """Scrape it and give how many lines it has read."""
        self._connection.request("GET", "/metrics")
        text = self._connection.getresponse().read()
        self.scrapes += 1
        if self.scrapes % 50 == 0:
            for path in ("/", "/api/v1/findings"):
                self._connection.request("GET", path)
                self._connection.getresponse().read()
        return int(sum(float(value) for value in re.findall(rb"\nsglang_tuning_log_lines_total\{[^}]*\} (\S+)", text)))

    def memory_kib(self) -> int:
        """What it holds in memory now."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        return int(status.partition("VmRSS:")[2].split()[0])

    def files(self) -> int:
        """How many files and sockets it has open."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))  # noqa: PTH208


def soak(exporter: _Exporter, writer: _Writer, lines: int, scrapes: int, seconds: float) -> int:
    """Feed and scrape until both figures or `seconds` are reached. Returns the exit status."""
    begin = told = progressed = time.monotonic()
    warm: tuple[int, int] | None = None
    read = last = 0
    while (writer.lines < lines or exporter.scrapes < scrapes) and time.monotonic() - begin < seconds:
        share = max(writer.lines / lines, 0.001)
        if writer.lines < lines and writer.lines - read < AHEAD_LINES:
            writer.block()
        if exporter.scrapes < scrapes * share or writer.lines >= lines or writer.lines - read >= AHEAD_LINES:
            read = exporter.scrape()
        now = time.monotonic()
        progressed, last = (now, read) if read != last or writer.lines >= lines else (progressed, last)
        if now - progressed > HANG_SECONDS:
            print("failed: it reads no further", file=sys.stderr)
            return 1
        if warm is None and writer.lines >= lines / 10 and exporter.scrapes >= scrapes / 10:
            warm = exporter.memory_kib(), exporter.files()
        if now - told > 10:
            told = now
            words = f"{writer.lines:,} lines written, {read:,} read, {exporter.scrapes:,} scrapes"
            print(f"{words}, {exporter.memory_kib() / 1024:.1f} MiB", file=sys.stderr, flush=True)
    while (now_read := exporter.scrape()) != read:
        read = now_read
        time.sleep(0.5)
    if warm is None:
        print("failed: the time was over before the warm-up", file=sys.stderr)
        return 1
    memory, files = exporter.memory_kib(), exporter.files()
    grew = memory - warm[0]
    print(
        f"{writer.lines:,} lines, {exporter.scrapes:,} scrapes, {time.monotonic() - begin:.0f} s: "
        f"{warm[0] / 1024:.1f} MiB after the warm-up, {memory / 1024:.1f} MiB at the end ({grew:+d} KiB); "
        f"{warm[1]} and {files} files open"
    )
    return int(grew > GROWTH_KIB)


def main() -> int:
    """Read the flags."""
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--lines", type=int, default=10_000_000, help="default ten million")
    parser.add_argument("--scrapes", type=int, default=20_000, help="default twenty thousand")
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after this long (default an hour)")
    parser.add_argument("--seed", type=int, default=1, help="other lines")
    arguments = parser.parse_args()
    sglang = ThreadingHTTPServer(("127.0.0.1", 0), _SGLang)
    threading.Thread(target=sglang.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as directory:
        writer = _Writer(Path(directory) / "server.log", arguments.seed)
        exporter = _Exporter(writer.path, f"http://127.0.0.1:{sglang.server_port}")
        try:
            return soak(exporter, writer, arguments.lines, arguments.scrapes, arguments.seconds)
        finally:
            exporter.process.terminate()
            exporter.process.wait(timeout=HANG_SECONDS)
            sglang.shutdown()


if __name__ == "__main__":
    sys.exit(main())
