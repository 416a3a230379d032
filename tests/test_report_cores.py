"""A log that several processes read: the same as one alone reads, to the last figure, wherever it is cut."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_tuning_exporter.cli import main
from sglang_tuning_exporter.report import ahead, cores, files
from sglang_tuning_exporter.report.ahead import Ahead, alone
from sglang_tuning_exporter.report.batches import Answer, answered, read, written
from sglang_tuning_exporter.report.blocks import whole_lines
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


def now(remembered: bytes, block: bytes, pace: float | None) -> Future[bytes]:
    """Read as another process would, at once and from nothing but what it is given."""
    done: Future[bytes] = Future()
    done.set_result(written(read(LogReader(), remembered, block, pace)))
    return done


def ended(future: Future[bytes]) -> Answer:
    return answered(future.result())


def told(event: Event | BatchRun) -> object:
    return (*event[:16], list(event.events())) if isinstance(event, BatchRun) else event


def outcome(pieces: list[tuple[bytes, bytes, list[object]]], reader: LogReader) -> tuple[object, ...]:
    return pieces, reader.counts, reader.unrecognised, reader.suspicious, reader.unread


def both(text: bytes, size: int, pace: float | None = None, depth: int = 3) -> tuple[object, object, int]:
    """What one reader finds, and what it finds with help; how many blocks the help has read."""
    blocks = list(whole_lines(text[at : at + size] for at in range(0, len(text), size)))
    lone, helped, answers = LogReader(), LogReader(), []

    def wait(future: Future[bytes]) -> Answer:
        answers.append(ended(future))
        return answers[-1]

    first = [(p.text, p.following, list(map(told, p.events()))) for p in alone(blocks, lone, pace)]
    by_others = Ahead(helped, pace, now, wait, depth=depth, first=1).pieces(blocks)
    second = [(p.text, p.following, list(map(told, p.events()))) for p in by_others]
    return outcome(first, lone), outcome(second, helped), sum(1 for answer in answers if answer.parts)


@pytest.mark.parametrize("form", ["plain", "docker", "kubernetes"])
@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.parent.name)
def test_every_recording_is_read_the_same_with_help(path: Path, form: str) -> None:
    text = wrapped(form, gzip.decompress(path.read_bytes()))
    lone, helped, read_by_others = both(text, 9973)
    assert helped == lone
    assert read_by_others > len(text) // 9973 // 4


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    size=st.integers(200, 3000),
    depth=st.integers(1, 4),
    form=st.sampled_from(["plain", "docker", "kubernetes"]),
    pace=st.sampled_from([None, 15.0]),
    places=st.lists(st.integers(0, 400), max_size=4),
)
def test_wherever_it_is_cut_trouble_is_read_the_same(
    size: int, depth: int, form: str, pace: float | None, places: list[int]
) -> None:
    lines = gzip.decompress(RECORDINGS[-1].read_bytes()).splitlines(keepends=True)[-400:]
    for place in sorted(places, reverse=True):
        lines[place:place] = [TROUBLE]
    lone, helped, _ = both(wrapped(form, b"".join(lines)), size, pace, depth)
    assert helped == lone


@pytest.fixture
def odd_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that a recording has many; the first one is read alone."""
    monkeypatch.setattr(files, "BLOCK", 7919)
    monkeypatch.setattr(ahead, "FIRST", 1)
    monkeypatch.setattr(Ahead.__init__, "__kwdefaults__", {"first": 1})


@pytest.mark.usefixtures("odd_blocks")
@pytest.mark.parametrize("form", ["plain", "docker", "kubernetes"])
def test_report_and_backfill_write_the_same_with_one_process_two_and_three(tmp_path: Path, form: str) -> None:
    log = tmp_path / "server.log"
    log.write_bytes(wrapped(form, gzip.decompress((HERE / "recordings/restart_append/server.log.gz").read_bytes())))
    written_by: dict[str, set[bytes]] = {"report": set(), "backfill": set()}
    for jobs in ("1", "2", "3"):
        for command, flags in (("report", ["--format", "json"]), ("backfill", [])):
            out = tmp_path / f"{command}{jobs}"
            main([command, str(log), "--jobs", jobs, "--output", str(out), *flags])
            written_by[command].add(out.read_bytes())
    assert {command: len(different) for command, different in written_by.items()} == {"report": 1, "backfill": 1}


@pytest.mark.usefixtures("odd_blocks")
def test_a_process_that_ends_in_the_middle_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cores, "_CHILD", "raise SystemExit({path!r} and {number})")
    log = HERE / "recordings/restart_append/server.log.gz"
    assert main(["report", str(log), "--jobs", "2", "--output", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == (
        "sglang-tuning-exporter: a process that was reading the log has ended, perhaps for want of memory; give --jobs 1\n"
    )


@pytest.mark.parametrize("jobs", ["0", "-1", "65"])
def test_a_number_of_jobs_that_is_none_is_refused(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(RECORDINGS[0]), "--jobs", jobs]) == 2
    assert capsys.readouterr().err == f"sglang-tuning-exporter: --jobs={jobs}: give a number from 1 to 64\n"


def test_readers_end_when_the_one_that_started_them_is_killed() -> None:
    program = (
        "import time; from sglang_tuning_exporter.report.cores import Cores; from sglang_tuning_exporter.sglang.log.reader_state import packed\n"
        "from sglang_tuning_exporter.sglang.log.reader import LogReader\n"
        "cores = Cores(2); cores.submit(packed(LogReader()), b'', None).result()\n"
        "print(*(child._process.pid for child in cores._children), flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.send_signal(signal.SIGKILL)
    assert len(pids) == 2
    for pid in pids:
        while Path(f"/proc/{pid}/stat").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
            pass
