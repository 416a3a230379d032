"""Other processes that read blocks of a log, one for each core: plain children, each on a socket of its own.

A child reads block after block until its socket closes, so it ends with us, however we end.
"""

from __future__ import annotations

import os
import pickle  # nosec B403 # what our own processes tell each other
import signal
import socket
import subprocess  # nosec B404 # starts this program, once for each core
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from sglang_tuning_exporter.config import UsageError
from sglang_tuning_exporter.report.batches import Answer, answered, read, written
from sglang_tuning_exporter.sglang.log.reader import LogReader

if TYPE_CHECKING:
    from concurrent.futures import Future

MOST_JOBS = 64
_LENGTH = 8  # bytes that say how long a message is
_CHILD = "import sys; sys.path[:] = {path!r}; from sglang_tuning_exporter.report.cores import work; work({number})"
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def available() -> int:
    """Say how many cores this process may use: by its affinity, and by its container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = _QUOTA.read_text(encoding="ascii").split()
        cores = min(cores, max(1, int(quota) // int(period)))  # "max" is no number: no quota
    return min(cores, MOST_JOBS)


class Died(Exception):  # noqa: N818 - it is told as a mistake of the surroundings
    """A child ended in the middle of its work."""


class _Child:
    """One process that reads."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._socket = ours
        self._process = subprocess.Popen(  # noqa: S603 # nosec B603 # this program, with a text of ours
            [sys.executable, "-c", _CHILD.format(path=sys.path, number=theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        theirs.close()

    def ask(self, question: bytes) -> bytes:
        """Send a question and wait for the answer. Raises `Died`."""
        try:
            _send(self._socket, question)
            return _receive(self._socket)
        except OSError:
            raise Died from None

    def end(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        self._process.wait()
        self._socket.close()


class Cores:
    """So many processes that read blocks, each one block at a time; the first block starts them."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self._children: list[_Child] = []
        self._idle: SimpleQueue[_Child] = SimpleQueue()
        self._threads = ThreadPoolExecutor(jobs, "reading")

    def close(self) -> None:
        """End them all, at once."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for child in self._children:
            child.end()
        self._threads.shutdown()

    def submit(self, remembered: bytes, block: bytes, pace: float | None) -> Future[bytes]:
        """Have a block read by the next process that is free."""
        if not self._children:
            self._children = [_Child() for _ in range(self.jobs)]
            for child in self._children:
                self._idle.put(child)
        return self._threads.submit(self._ask, pickle.dumps((remembered, block, pace), pickle.HIGHEST_PROTOCOL))

    def _ask(self, question: bytes) -> bytes:
        child = self._idle.get()
        try:
            return child.ask(question)
        finally:
            self._idle.put(child)


def wait(future: Future[bytes]) -> Answer:
    """Wait for the answer. Raises `UsageError` where the process that was to give it has ended."""
    try:
        return answered(future.result())
    except Died:
        raise UsageError(
            "a process that was reading the log has ended, perhaps for want of memory; give --jobs 1"
        ) from None


def work(number: int) -> None:
    """Read what is asked for on the socket with this number, until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches us all: who has started us ends us
    reader = LogReader()
    with socket.socket(fileno=number) as asked, suppress(OSError):
        while True:
            remembered, block, pace = pickle.loads(_receive(asked))  # noqa: S301 # nosec B301 # from a process of ours, over a socket pair that nobody else has
            _send(asked, written(read(reader, remembered, block, pace)))


def _send(to: socket.socket, data: bytes) -> None:
    to.sendall(len(data).to_bytes(_LENGTH, "big") + data)


def _receive(of: socket.socket) -> bytes:
    """Give the next message. Raises `ConnectionError` when the other end has closed."""
    return bytes(_bytes(of, int.from_bytes(_bytes(of, _LENGTH), "big")))


def _bytes(of: socket.socket, number: int) -> bytearray:
    data = bytearray(number)
    view, done = memoryview(data), 0
    while done < number:
        got = of.recv_into(view[done:], number - done, socket.MSG_WAITALL)
        if not got:
            raise ConnectionError("closed")
        done += got
    return data
