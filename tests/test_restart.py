"""Exporters that are killed and started again while a server's log goes on: real processes, real files, real signals."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from conftest import Exporter, running_exporter, wait_for
from sglang_tuning_exporter.core.facts import DECODE_LOG_INTERVAL

EVENTS = "sglang_tuning_retraction_events_total"
REQUESTS = "sglang_tuning_retracted_requests_total"
AT = "[2025-11-20 11:40:10{ranks}] "
POOL = 1_040_384
DECODE = (
    "Decode batch, #running-req: 237, #token: 1009172, token usage: 0.97, cuda graph: True, "
    "gen throughput (token/s): 4471.70, #queue-req: 4"
)
TOOL = "Model attempted to call undefined function: get_weather"
LIMITS = f"max_total_num_tokens={POOL}, chunked_prefill_size=8192, max_running_requests=400"


def retraction(number: int, requests: int = 5) -> str:
    return (
        f"KV cache pool is full. Retract requests. #retracted_reqs: {requests}, #new_tokens_gained: {8000 + number}, "
        f"#new_token_ratio: {number % 9000 / 10_000:.4f} -> 0.5783"
    )


class Log:
    """The log of a server that writes whether anybody reads or not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("ab", buffering=0)

    def write(self, *messages: str, ranks: str = "") -> None:
        for message in messages:
            self.write_raw(AT.format(ranks=ranks) + message + "\n")

    def write_raw(self, text: str) -> None:
        self._file.write(text.encode())

    def start(self, tp: int = 1) -> None:
        more = "".join(f", 'argument_{number}': {number}" for number in range(40))  # a real server prints hundreds
        self.write(f"server_args={{'tp_size': {tp}, 'dp_size': 1{more}}}")
        self.write(LIMITS, ranks=" TP0" if tp > 1 else "")

    def rename(self) -> None:
        """As logrotate does it: a new file under the old name."""
        self.path.rename(f"{self.path}.1")
        self._file.close()
        self._file = self.path.open("ab", buffering=0)

    def copy_and_truncate(self) -> None:
        """As logrotate's `copytruncate` does it."""
        shutil.copyfile(self.path, f"{self.path}.1")
        os.truncate(self.path, 0)

    def close(self) -> None:
        self._file.close()


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    log = Log(tmp_path / "server.log")
    yield log
    log.close()


@contextmanager
def exporter(log: Log, state: Path | None = None, *flags: str) -> Iterator[Exporter]:
    """An exporter that follows the log, with a state file if `state` is given."""
    with running_exporter("--log-file", str(log.path), *(["--state-file", str(state)] if state else []), *flags) as one:
        yield one


def kill(exporter: Exporter) -> None:
    """As the kernel does it to a process that took too much memory."""
    exporter.process.kill()
    exporter.process.wait()


def shows(exporter: Exporter, name: str, value: float, **labels: str) -> None:
    wait_for(lambda: exporter.page().value(name, **labels) == value, 20)


@pytest.mark.parametrize("rotate", [Log.rename, Log.copy_and_truncate])
def test_no_event_is_lost_or_counted_twice_over_kills_and_a_rotation(
    log: Log, tmp_path: Path, rotate: object, request: pytest.FixtureRequest
) -> None:
    dice = random.Random(request.node.name)
    pause, paused, done = threading.Event(), threading.Event(), threading.Event()
    written = 0

    def serve() -> None:
        nonlocal written
        while not done.is_set():
            if pause.is_set():
                paused.set()
                time.sleep(0.001)
                continue
            paused.clear()
            log.write(DECODE, retraction(written))
            written += 1
            if written % 7 == 0:
                time.sleep(dice.random() / 50)

    server = threading.Thread(target=serve)
    seen = [0.0]
    starts = 3
    for number in range(starts):
        with exporter(log, tmp_path / "state.json") as one:
            if number == 0:
                log.start()
                server.start()
            until = time.monotonic() + 0.2 + dice.random() / 3
            while time.monotonic() < until:
                shown = one.page().value(EVENTS)  # absent while older lines are read
                seen += [] if shown is None else [shown]
            if number == starts - 1:
                done.set()
                server.join()
                shows(one, EVENTS, written)
                page = one.page()
            kill(one)
        if number == 1:
            pause.set()  # what is written between copying and truncating is lost to everybody
            assert paused.wait(5)
            assert callable(rotate)
            rotate(log)
            pause.clear()
        time.sleep(dice.random() / 5)
    assert written > 100
    assert seen == sorted(seen)
    assert page.value(REQUESTS) == 5 * written
    assert page.value("sglang_tuning_log_lines_total", kind="retraction") == written
    assert page.value("sglang_tuning_log_lines_total", kind="decode") == written
    assert page.value("sglang_tuning_decode_batches_total", graph="replayed") == DECODE_LOG_INTERVAL * written
    assert page.value("sglang_tuning_server_starts_total") == 1


@pytest.mark.parametrize("before", [(), (TOOL,)], ids=["plain", "after a raw message"])
def test_the_other_ranks_lines_after_a_kill_are_the_same_event(
    log: Log, tmp_path: Path, before: tuple[str, ...]
) -> None:
    with exporter(log, tmp_path / "state.json") as one:
        log.start(tp=8)
        log.write(DECODE, ranks=" TP0")
        log.write(*before)
        for rank in range(4):
            log.write(retraction(1), ranks=f" TP{rank}")
        shows(one, EVENTS, 1)
        kill(one)
    for rank in range(4, 8):
        log.write(retraction(1), ranks=f" TP{rank}")
    with exporter(log, tmp_path / "state.json") as one:
        shows(one, "sglang_tuning_log_lines_total", 8, kind="retraction")
        assert one.page().value(EVENTS) == 1
        for rank in range(8):
            log.write(retraction(2), ranks=f" TP{rank}")
        shows(one, "sglang_tuning_log_lines_total", 16, kind="retraction")
        assert one.page().value(EVENTS) == 2
