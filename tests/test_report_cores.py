"""A log read by another process gives the same events as one read in this process, wherever it is cut."""

from __future__ import annotations

import errno
import gzip
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_tuning_exporter.cli import main
from sglang_tuning_exporter.report import files, inputs, read_ahead
from sglang_tuning_exporter.report.blocks import whole_lines
from sglang_tuning_exporter.report.read_ahead import LogPart, ReadAhead, read_here
from sglang_tuning_exporter.sglang.events import Event
from sglang_tuning_exporter.sglang.log.fast_path import BatchRun
from sglang_tuning_exporter.sglang.log.reader import LogReader

HERE = Path(__file__).parent
RECORDINGS = sorted(
    [
        *(HERE / "recordings").glob("*/server.log.gz"),
        *(HERE.parent / "exporter/sglang_tuning_exporter/recordings").glob("*/server.log.gz"),
    ]
)
STAMP = "2026-03-18T11:22:05.874000000Z"
# What depends on lines before it: tracebacks of several lines, words of a model, a line in two parts, a second start.
TROUBLE = b"""[2026-03-18 11:22:05] Scheduler hit an exception: Traceback (most recent call last):
  File "/sglang/srt/managers/scheduler.py", line 10, in run_scheduler_process
    scheduler.event_loop_overlap()
  File "/sglang/srt/managers/scheduler.py", line 20, in event_loop_overlap
    result = self.run_batch(batch)
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/sglang/srt/model_executor/forward.py", line 30, in forward_decode
RuntimeError: Decode out of memory. Try to lower your batch size.
[2026-03-18 11:22:06] Model attempted to call undefined function: a
[2026-03-18 11:22:06] KV cache pool is full. Retract requests. #retracted_reqs: 9, #new_token_ratio: 0.50 -> 0.60
[2026-03-18 11:22:09 TP0] Decode batch, #running-req: 3, #token: 9, token usage: 0.50, gen throughput (token/s): 1.00, #queue-req: 0
[2026-03-18 11:22:09 TP0] Decode batch, #wrong
[2026-03-18 11:22:10] INFO:     127.0.0.1:1 - "POST /generate HTTP/1.1" 503 Service Unavailable
"""


def wrapped(form: str, text: bytes) -> bytes:
    lines = text.decode("utf-8", "replace").splitlines()
    if form == "docker":
        return b"".join(
            json.dumps({"log": f"{line}\n", "stream": "stderr", "time": STAMP}).encode() + b"\n" for line in lines
        )
    if form == "kubernetes":
        halves = ((line[: len(line) // 2], line[len(line) // 2 :]) for line in lines)
        return "".join(
            f"{STAMP} stderr P {first}\n{STAMP} stderr F {last}\n"
            if n % 50 == 7
            else f"{STAMP} stderr F {first}{last}\n"
            for n, (first, last) in enumerate(halves)
        ).encode()
    return text


def printed(event: Event | BatchRun) -> object:
    return (*event[:16], list(event.events())) if isinstance(event, BatchRun) else event


def outcome(parts: Iterator[LogPart], reader: LogReader | ReadAhead) -> tuple[object, ...]:
    read = [(part.text, part.following, list(map(printed, part.events()))) for part in parts]
    return read, reader.counts, reader.unrecognised, reader.unread


def both(text: bytes, size: int, pace: float | None = None) -> tuple[object, object]:
    """The events of this process, and those of another one."""
    blocks = list(whole_lines(text[at : at + size] for at in range(0, len(text), size)))
    here = LogReader()
    with closing(ReadAhead(pace)) as ahead:
        return outcome(read_here(blocks, here, pace), here), outcome(ahead.parts(blocks), ahead)


@pytest.mark.parametrize("form", ["plain", "docker", "kubernetes"])
@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.parent.name)
def test_every_recording_is_read_the_same_by_another_process(path: Path, form: str) -> None:
    here, ahead = both(wrapped(form, gzip.decompress(path.read_bytes())), 9973)
    assert ahead == here


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(
    size=st.integers(200, 3000),
    form=st.sampled_from(["plain", "docker", "kubernetes"]),
    pace=st.sampled_from([None, 15.0]),
    places=st.lists(st.integers(0, 400), max_size=4),
)
def test_wherever_it_is_cut_trouble_is_read_the_same(
    size: int, form: str, pace: float | None, places: list[int]
) -> None:
    lines = gzip.decompress(RECORDINGS[-1].read_bytes()).splitlines(keepends=True)[-400:]
    for place in sorted(places, reverse=True):
        lines[place:place] = [TROUBLE]
    here, ahead = both(wrapped(form, b"".join(lines)), size, pace)
    assert ahead == here


@pytest.fixture
def odd_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks so small that a recording has many, and counts as a large log."""
    monkeypatch.setattr(files, "BLOCK", 7919)
    monkeypatch.setattr(inputs, "LARGE", 1)


@pytest.mark.usefixtures("odd_blocks")
@pytest.mark.parametrize("form", ["plain", "docker", "kubernetes"])
def test_backfill_writes_the_same_with_one_process_two_and_three(tmp_path: Path, form: str) -> None:
    log = tmp_path / "server.log"
    log.write_bytes(wrapped(form, gzip.decompress((HERE / "recordings/restart_append/server.log.gz").read_bytes())))
    written = set()
    for jobs in ("1", "2", "3"):
        out = tmp_path / jobs
        main(["backfill", str(log), "--jobs", jobs, "--output", str(out)])
        written.add(out.read_bytes())
    assert len(written) == 1


@pytest.mark.usefixtures("odd_blocks")
def test_a_reader_that_ends_in_the_middle_is_one_line_of_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(read_ahead, "_CHILD", "raise SystemExit({path!r} and {number} and {pace!r})")
    log = HERE / "recordings/restart_append/server.log.gz"
    assert main(["backfill", str(log), "--jobs", "2", "--output", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == (
        "sglang-tuning-exporter: a process that was reading the log has ended, perhaps for want of memory; give --jobs 1\n"
    )


@pytest.mark.usefixtures("odd_blocks")
@pytest.mark.parametrize("call", ["socket.socketpair", "os.memfd_create", "subprocess.Popen"])
def test_a_reader_that_cannot_be_started_is_one_line_of_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], call: str
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(call, refused)
    log = str(HERE / "recordings/restart_append/server.log.gz")
    assert main(["backfill", log, "--jobs", "2", "--output", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == (
        "sglang-tuning-exporter: cannot read the log in another process: Too many open files; give --jobs 1\n"
    )


@pytest.mark.parametrize("jobs", ["0", "-1", "65"])
def test_an_invalid_number_of_jobs_is_refused(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(RECORDINGS[0]), "--jobs", jobs]) == 2
    assert capsys.readouterr().err == f"sglang-tuning-exporter: --jobs={jobs}: give a number from 1 to 64\n"


def test_the_reader_ends_when_the_process_that_started_it_is_killed() -> None:
    program = (
        "import time; from sglang_tuning_exporter.report.read_ahead import ReadAhead\n"
        "ahead = ReadAhead(None); print(ahead._process.pid, flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        status = Path(f"/proc/{int(parent.stdout.readline())}/stat")
        parent.send_signal(signal.SIGKILL)
    while status.exists() and "Z" not in status.read_text().split()[2]:
        pass


def test_of_rotated_files_that_continue_each_other_one_process_reads_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[float | None] = []

    class Counted(ReadAhead):
        def __init__(self, pace: float | None) -> None:
            started.append(pace)
            super().__init__(pace)

    monkeypatch.setattr(inputs, "ReadAhead", Counted)
    monkeypatch.setattr(inputs, "LARGE", 1000)
    line = (
        "[2026-03-18 {:02}:00:{:02}] Decode batch, #running-req: 1, #token: 9, token usage: 0.10, cuda graph: True, "
        "gen throughput (token/s): 9.00, #queue-req: 0\n"
    )
    for number, hour in (("", 12), (".1", 11), (".2", 10)):
        (tmp_path / f"server.log{number}").write_text("".join(line.format(hour, second) for second in range(60)))
    logs = inputs.Logs([str(path) for path in tmp_path.iterdir()], jobs=4)
    assert sum(event is not None for _, event in logs.events()) == 180
    assert len(started) == 1
    assert sum(reader.counts["decode"] for reader in logs.readers) == 180
