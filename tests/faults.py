"""Helpers of the fault tests: fake SGLangs with known counts, in this process or in one of their own, and the exporter's totals."""

from __future__ import annotations

import json
import re
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from conftest import Answer, Exporter, FakeSGLang, Page, reply, wait_for
from followed import slowdown

if TYPE_CHECKING:
    from collections.abc import Sequence


OK_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"
LIVENESS = frozenset({"server_down", "metrics_disabled", "restart_loop"})
RESET = b"\x01\x00\x00\x00\x00\x00\x00\x00"  # SO_LINGER: on, for 0 seconds


def serving(count: int, *, ranks: Sequence[int | None] = (None,), queued: int = 0) -> bytes:
    """A page as 0.5.23 writes it, of a server that has retracted, and run decode batches, `count` times on each rank."""
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
    """Seconds beyond a scrape's time: of the half second that the exporter keeps back, a machine that runs other tests has nothing."""
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
