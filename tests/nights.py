"""Logs long enough for alerts: recordings repeated with later times, and a written night of failures."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from pathlib import Path

from scenes import recording
from watched import load_of

HERE = Path(__file__).parent
# The start-up lines of a server on eight GPUs, 0.5.23, from server_args to ready.
STARTED = b"".join((HERE / "data" / "logs" / "0.5.23.log").read_bytes().splitlines(keepends=True)[:18])
_STAMP = re.compile(rb"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)", re.MULTILINE)
_FORM = "%Y-%m-%d %H:%M:%S"


def printed(at: datetime) -> str:
    return at.strftime(_FORM)


def later(text: bytes, seconds: float) -> bytes:
    """The same lines with later times."""

    def shift(match: re.Match[bytes]) -> bytes:
        at = datetime.strptime(match[1].decode(), _FORM).replace(tzinfo=timezone.utc) + timedelta(seconds=seconds)
        return b"[" + printed(at).encode()

    return _STAMP.sub(shift, text)


def last_time(text: bytes) -> datetime:
    return datetime.strptime(_STAMP.findall(text)[-1].decode(), _FORM).replace(tzinfo=timezone.utc)


def quiet(text: bytes, minutes: float) -> bytes:
    """The log, and a health check so many minutes later: alerts end before it does."""
    at = last_time(text) + timedelta(minutes=minutes)
    return (
        text.removesuffix(b"\n")
        + b"\n"
        + f'[{printed(at)}] INFO:     127.0.0.1:50000 - "GET /health HTTP/1.1" 200 OK\n'.encode()
    )


def prolonged(name: str, minutes: float = 16, rest: float = 14) -> bytes:
    """A recording whose load goes on for so many minutes, and then a rest."""
    played = recording(name)
    texts = [line.text for line in played.lines]
    load = load_of(played)
    begin, end = map(played.count_lines_until, load)
    load_, seconds = b"".join(texts[begin:end]), round(load[1] - load[0]) + 1
    rounds = max(1, round(60 * minutes / seconds))
    return quiet(b"".join(texts[:begin]) + b"".join(later(load_, seconds * n) for n in range(rounds)), rest)


def _first_time(text: bytes) -> datetime:
    found = _STAMP.search(text)
    assert found is not None
    return datetime.strptime(found[1].decode(), _FORM).replace(tzinfo=timezone.utc)


_OUT_OF_MEMORY = """\
[{at} TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "/srv/sglang/scheduler.py", line 3012, in run_scheduler_process
    scheduler.event_loop_overlap()
  File "/srv/sglang/model_runner.py", line 2100, in {function}
    return self.model.forward(batch)
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.75 GiB. GPU 0 has a total capacity of 79.11 GiB.
"""


def failing(rest: float = 14) -> bytes:
    """A night on GPUs: batches beyond the captured graphs, rejected requests, unknown lines, out of memory at start-up
    and in decode.
    """
    text = STARTED
    at = last_time(text)
    for second in range(0, 21 * 60, 5):
        moment = at + timedelta(seconds=second)
        eager = second > 4 * 60
        running = 400 if eager else 120
        text += (
            f"[{printed(moment)} TP0] Decode batch, #running-req: {running}, #token: {running * 2000}, token usage:"
            f" 0.60, cuda graph: {not eager}, gen throughput (token/s): 4471.70, #queue-req:"
            f" {40 if second > 600 else 0}\n"
        ).encode()
        if second > 500:
            refused = 'INFO:     10.0.0.7:41000 - "POST /generate HTTP/1.1" 503 Service Unavailable'
            text += f"[{printed(moment)}] {refused}\n".encode()
        if second == 400:
            text += f"[{printed(moment)} TP0] Decode batch, #running-req: 3, #flux: 7, token usage: 0.60\n".encode()
    moment = at + timedelta(minutes=21, seconds=5)
    text += (
        f"[{printed(moment)} TP0] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)\n".encode()
    )
    text += _OUT_OF_MEMORY.format(at=printed(moment), function="forward_decode").encode()
    restart = later(STARTED, (moment - _first_time(STARTED)).total_seconds() + 40)
    text += restart.replace(b"available_gpu_mem=9.87 GB", b"available_gpu_mem=0.70 GB")
    moment = last_time(text) + timedelta(minutes=3)
    text += _OUT_OF_MEMORY.format(at=printed(moment), function="forward_extend").encode()
    return quiet(text, rest)
