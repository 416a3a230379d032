"""Helpers of the fault tests: exporters that follow a log or watch a fake SGLang with known counts, and what they have
counted.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import socket
import subprocess
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from conftest import DECODED, RETRACTED, Answer, Exporter, FakeSGLang, Page, reply, running_exporter, wait_for
from sglang_tuning_exporter.core.facts import DECODE_LOG_INTERVAL

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

EVENTS = "sglang_tuning_retraction_events_total"
LINES = "sglang_tuning_log_lines_total"
UP = "sglang_tuning_log_up"
STATE_FILE_UP = "sglang_tuning_state_file_up"
# Root may read anything; without these two it is as any owner of a file.
AS_ANY_OWNER = ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if os.geteuid() == 0 else ()


def decode(stamp: str = "2025-11-20 11:40:13") -> bytes:
    return f"[{stamp}] {DECODED}\n".encode()


def retraction(number: int, stamp: str = "2025-11-20 11:40:10") -> bytes:
    """A retraction with figures of its own, so that each one is an event."""
    words = RETRACTED.replace("8950", str(8000 + number)).replace("0.3002", f"{number % 9000 / 10_000:.4f}")
    return f"[{stamp}] {words}\n".encode()


class Server:
    """Writes events and counts them: each is a retraction and the decode batch after it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events = 0
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def events_text(self, count: int, stamp: str = "2025-11-20 11:40:10") -> bytes:
        """The text of the next `count` events, which count as written."""
        first, self.events = self.events, self.events + count
        return b"".join(retraction(number, stamp) + decode(stamp) for number in range(first, self.events))

    def write(self, count: int = 1, stamp: str = "2025-11-20 11:40:10") -> None:
        self.raw(self.events_text(count, stamp))

    def raw(self, text: bytes) -> None:
        while text:
            text = text[os.write(self._fd, text) :]

    def reopen(self) -> None:
        """Open the log again, as a server does after the signal of a rotation or after a restart."""
        os.close(self._fd)
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def close(self) -> None:
        os.close(self._fd)


@contextmanager
def following(*flags: str, **how: Any) -> Iterator[Exporter]:
    """A running exporter; afterwards it ends in time, with status 0 and without a traceback."""
    with running_exporter(*flags, **how) as exporter:
        yield exporter
        if exporter.process.poll() is None:
            begin = time.monotonic()
            assert exporter.end() == 0
            assert time.monotonic() - begin < end_seconds()
    assert "Traceback" not in "".join(exporter.said), exporter.said


def slowdown() -> float:
    """How much longer than alone a process takes on a machine that is busy with others; 1 on one that is not."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def end_seconds() -> float:
    """Two seconds, and more on a machine that is busy with other processes."""
    return 2.5 * slowdown()


def of(log: Path | Server, *more: str) -> Sequence[str]:
    """The flags that name a log."""
    return ("--log-file", str(log.path if isinstance(log, Server) else log), *more)


def counted(exporter: Exporter, events: int, seconds: float = 20.0) -> None:
    """Check that every event was counted once: both kinds of line, the events and the batches agree."""
    wait_for(lambda: exporter.page().value(LINES, kind="decode") == events, seconds)
    page = exporter.page()
    assert page.value(EVENTS) == events
    assert page.value(LINES, kind="retraction") == events
    assert page.value("sglang_tuning_retracted_requests_total") == 5 * events
    assert page.value("sglang_tuning_decode_batches_total", graph="replayed") == DECODE_LOG_INTERVAL * events
    assert exporter.get("/api/v1/findings").json()["counts"]["retraction_events"] == events


def up(exporter: Exporter, log: Path | Server) -> float | None:
    return exporter.page().value(UP, file=str(log.path if isinstance(log, Server) else log))


def silent(exporter: Exporter) -> bool:
    """Whether the findings say that the log cannot be read."""
    findings = exporter.get("/api/v1/findings").json()["findings"]
    return any(finding["diagnosis"] == "log_silent" for finding in findings)


def check_log_status(exporter: Exporter, log: Path | Server, *, is_up: bool, words: str = "") -> None:
    """Check that page, findings and standard error show whether the log is read, and if not, why."""
    wait_for(lambda: up(exporter, log) == float(is_up), 10)
    assert silent(exporter) is not is_up
    if words:
        wait_for(lambda: words in "".join(exporter.said))


def open_files(exporter: Exporter) -> int:
    return len(list(Path(f"/proc/{exporter.process.pid}/fd").iterdir()))


def cpu_seconds(exporter: Exporter) -> float:
    fields = Path(f"/proc/{exporter.process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def mounted(directory: Path, size: str) -> bool:
    """Whether a small file system could be mounted there: `unmounted` takes it away."""
    directory.mkdir()
    if os.geteuid() != 0:
        return False
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0777", "tmpfs", str(directory)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def unmounted(directory: Path) -> None:
    subprocess.run(["umount", "-l", str(directory)], check=True)


@contextmanager
def hanging(directory: Path) -> Iterator[None]:
    """A file system over a directory that answers nothing while the block runs: one of FUSE whose program does not read
    what it is asked.
    """
    libc = ctypes.CDLL(None)
    try:
        program = os.open("/dev/fuse", os.O_RDWR)
    except OSError:
        pytest.skip("no FUSE here")
    try:
        options = b"fd=%d,rootmode=40000,user_id=0,group_id=0" % program
        if libc.mount(b"hang", os.fsencode(directory), b"fuse", 0, options):
            pytest.skip("no file system can be mounted here")
        yield
    finally:
        os.close(program)  # whoever waits gets an error
        libc.umount2(os.fsencode(directory), 2)  # MNT_DETACH


OK_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"
LIVENESS = frozenset({"server_down", "metrics_disabled", "restart_loop"})
RESET = b"\x01\x00\x00\x00\x00\x00\x00\x00"  # SO_LINGER: on, for 0 seconds


def serving(count: int, *, ranks: Sequence[int | None] = (None,), queued: int = 0) -> bytes:
    """A page as 0.5.23 writes it, of a server that has retracted, and run decode batches,
    `count` times on each rank.
    """
    families = (
        ("num_running_reqs", "gauge", "", 3),
        ("num_queue_reqs", "gauge", "", queued),
        ("full_token_usage", "gauge", "", 0.42),
        ("num_retracted_requests_total", "counter", "", count),
        ("cuda_graph_passes_total", "counter", ',mode="decode_cuda_graph"', count),
        ("realtime_tokens_total", "counter", ',mode="decode"', 100 * count),
    )
    lines = []
    for name, kind, more, value in families:
        lines.append(f"# TYPE sglang:{name} {kind}")
        for rank in ranks:
            dp = "" if rank is None else f',dp_rank="{rank}"'
            lines.append(f'sglang:{name}{{model_name="tiny",engine_type="unified",tp_rank="0"{dp}{more}}} {value}')
    return ("\n".join(lines) + "\n").encode()


def server_info(version: str = "0.5.23", **args: object) -> bytes:
    return json.dumps({"model_path": "tiny", "version": version, "internal_states": [{}], **args}).encode()


class Totals(NamedTuple):
    """The counts of an exporter, summed over all DP ranks."""

    retracted: float
    batches: float
    starts: float

    def more(self, count: int, starts: int = 0) -> Totals:
        return Totals(self.retracted + count, self.batches + count, self.starts + starts)


def totals(page: Page) -> Totals:
    def summed(name: str, **labels: str) -> float:
        return sum(s.value for s in page.samples if s.name == name and labels.items() <= s.labels.items())

    return Totals(
        summed("sglang_tuning_retracted_requests_total"),
        summed("sglang_tuning_decode_batches_total", graph="replayed"),
        summed("sglang_tuning_server_starts_total"),
    )


def found(exporter: Exporter) -> set[str]:
    """The findings about whether the server is up."""
    answer = exporter.get("/api/v1/findings")
    assert answer.status_code == 200
    return {finding["diagnosis"] for finding in answer.json()["findings"]} & LIVENESS


def complaints(exporter: Exporter) -> list[str]:
    """Tracebacks in the output of an exporter, which must not have any."""
    return [line for line in exporter.said if re.search(r"Traceback|Exception|Error:", line)]


def resident(exporter: Exporter, what: str = "VmRSS") -> float:
    """MiB of memory that it holds, or with `VmHWM` has held at most since `forget_peak`."""
    status = Path(f"/proc/{exporter.process.pid}/status").read_text()
    return int(status.split(f"{what}:")[1].split()[0]) / 1024


def forget_peak(exporter: Exporter) -> None:
    Path(f"/proc/{exporter.process.pid}/clear_refs").write_text("5")


def grace() -> float:
    """Seconds beyond a scrape's time: of the half second that the exporter keeps back, a machine that runs other tests
    has nothing.
    """
    return 1.5 * slowdown()


@dataclass
class Watched:
    """An exporter and the server that it watches, with its true counts."""

    exporter: Exporter
    sglang: FakeSGLang
    count: int = 1000
    before: Totals = field(default_factory=lambda: Totals(0, 0, 0))

    def answer(self, answer: Answer) -> None:
        self.sglang.answers["/metrics"] = answer

    def page(self, within: float = 10.0) -> Page:
        """Scrape it as a Prometheus does, which waits no longer than the timeout in its header."""
        begin = time.monotonic()
        answer = self.exporter.get("/metrics", {"X-Prometheus-Scrape-Timeout-Seconds": str(within)})
        assert time.monotonic() - begin < within + grace()
        assert answer.status_code == 200
        return Page(answer.text)

    def well(self, more: int = 3) -> Totals:
        """Let the server count this much more and answer normally; return what the exporter has counted then."""
        self.count += more
        self.answer(reply(serving(self.count)))
        wait_for(lambda: self.page().value("sglang_tuning_up") == 1, 30)  # a scrape that hangs may still be under way
        page = self.page()
        assert (page.value("sglang_tuning_up"), page.error) == (1, None)
        assert not found(self.exporter)
        return totals(page)


def endless(head: bytes, piece: bytes, most: int = 1 << 30) -> Answer:
    """This beginning, then this piece again and again, up to `most` bytes or until the client leaves."""

    def answer(connection: socket.socket) -> None:
        connection.sendall(head)
        sent = 0
        while sent < most:
            connection.sendall(piece)
            sent += len(piece)

    return answer


def torn(text: bytes) -> Answer:
    """These bytes, then the connection is reset."""

    def answer(connection: socket.socket) -> None:
        connection.sendall(text)
        time.sleep(0.1)  # a reset throws away what has not been read
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        connection.close()

    return answer
