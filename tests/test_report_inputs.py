"""How a report reads its logs: which files, in which order, packed how, and what is said about unusable input.

The lines are those of 0.5.12 and 0.3.0 as the released wheels format them (tests/data/logs), with times of our own. The
recordings are real logs of 0.5.23 (tests/recordings).
"""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import sys
import tarfile
import threading
import zipfile
from math import inf
from pathlib import Path
from typing import Any

import pytest

from compressed import compressed
from sglang_tuning_exporter.collect.compression import OPENERS
from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.report.blocks import BLOCK, whole_lines
from sglang_tuning_exporter.report.clock import Clock
from sglang_tuning_exporter.report.inputs import Logs
from sglang_tuning_exporter.report.report import report
from sglang_tuning_exporter.sglang.events import DecodeBatch, Event, OutOfMemory
from sglang_tuning_exporter.sglang.log.fast_path import BatchRun
from sglang_tuning_exporter.sglang.log.terminal import LONGEST_LINE
from sglang_tuning_exporter.state.profiles import PROFILES

HERE = Path(__file__).parent
RECORDINGS = HERE / "recordings"
LOGS = HERE / "data" / "logs"


def decode(clock: str, running: int = 4, *, ranks: str = "", date: str = "2025-11-20 ") -> str:
    return (
        f"[{date}{clock}{ranks}] Decode batch, #running-req: {running}, #token: 925, token usage: 0.89, "
        "cuda graph: True, gen throughput (token/s): 4471.70, #queue-req: 4\n"
    )


def write(path: Path, *lines: str) -> str:
    path.write_text("".join(lines))
    return str(path)


def document(*logs: str, stdin: bytes | None = None) -> dict[str, Any]:
    return report(Logs(logs, None if stdin is None else io.BytesIO(stdin)), PROFILES["online"])


def lines_in_order(logs: Logs) -> list[Event]:
    """Give what was printed line by line, as it came; no line may come before its time."""
    lines: list[Event] = []
    before = -inf
    for moment, event in logs.events():
        assert moment >= before
        before = moment
        if isinstance(event, BatchRun):
            assert {line.time for line in event.events()} == {moment}
            lines.extend(event.events())
        elif event is not None:
            lines.append(event)
    return lines


def running(logs: Logs) -> list[int | None]:
    lines = lines_in_order(logs)
    decodes = [line for line in lines if isinstance(line, DecodeBatch)]
    assert len(decodes) == len(lines)
    return [line.running for line in decodes]


def running_in_order(*logs: str) -> list[int | None]:
    return running(Logs(logs))


def test_a_rotation_set_is_read_from_its_oldest_file_whatever_the_names_order(tmp_path: Path) -> None:
    newest = write(tmp_path / "server.log", decode("12:00:00", 3))
    middle = write(tmp_path / "server.log.1", decode("11:00:00", 2))
    oldest = write(tmp_path / "server.log.10", decode("10:00:00", 1))
    assert running_in_order(str(tmp_path / "server.log*")) == [1, 2, 3]
    assert document(newest, middle, oldest)["sources"] == [oldest, middle, newest]


def test_a_rotation_set_without_dates_is_read_by_its_numbers_across_midnight(tmp_path: Path) -> None:
    write(tmp_path / "server.log", decode("00:00:20", 3, date=""))
    write(tmp_path / "server.log.1", decode("23:59:50", 2, date=""))
    write(tmp_path / "server.log.2", decode("23:59:30", 1, date=""))
    assert running_in_order(str(tmp_path / "*")) == [1, 2, 3]
    assert document(str(tmp_path / "*"))["span"]["seconds"] == 50


def test_logs_of_several_nodes_are_merged_by_the_time_of_their_lines(tmp_path: Path) -> None:
    first = write(
        tmp_path / "node0.log", *(decode(f"10:00:{at}", n, ranks=" DP0") for at, n in (("00", 1), (20, 3), (40, 5)))
    )
    second = write(
        tmp_path / "node1.log", *(decode(f"10:00:{at}", n, ranks=" DP1") for at, n in ((10, 2), (30, 4), (50, 6)))
    )
    assert running_in_order(second, first) == [1, 2, 3, 4, 5, 6]


def test_lines_of_one_second_keep_each_logs_own_order(tmp_path: Path) -> None:
    first = write(tmp_path / "a.log", decode("10:00:00", 1), decode("10:00:00", 2))
    second = write(tmp_path / "b.log", decode("10:00:00", 3), decode("10:00:00", 4))
    assert running_in_order(first, second) == [1, 2, 3, 4]


def test_a_line_without_time_stays_behind_the_line_before_it(tmp_path: Path) -> None:
    raised = (
        "[2025-11-20 10:00:05] Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "/opt/venv/site-packages/sglang/srt/managers/scheduler.py", line 999, in run_batch\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    )
    first = write(tmp_path / "a.log", decode("10:00:00", 1), raised, decode("10:00:20", 3))
    second = write(tmp_path / "b.log", decode("10:00:10", 2))
    lines = [line for line in lines_in_order(Logs([first, second])) if isinstance(line, (DecodeBatch, OutOfMemory))]
    read = [line.running if isinstance(line, DecodeBatch) else type(line) for line in lines]
    assert read == [1, OutOfMemory, 2, 3]


def test_a_file_named_twice_or_by_a_link_is_read_once(tmp_path: Path) -> None:
    name = write(tmp_path / "server.log", decode("10:00:00"))
    (tmp_path / "current.log").symlink_to(tmp_path / "server.log")
    assert document(name, name, str(tmp_path / "current.log"), str(tmp_path / "*.log"))["counts"]["lines"] == 1


def test_a_packed_log_gives_what_the_log_itself_gives(tmp_path: Path) -> None:
    packed = RECORDINGS / "big_queue" / "server.log.gz"
    plain = tmp_path / "server.log"
    plain.write_bytes(gzip.decompress(packed.read_bytes()))
    one, other = document(str(packed)), document(str(plain))
    assert one["counts"]["decode_batches"] == 236
    assert {**one, "sources": []} == {**other, "sources": []}


@pytest.mark.parametrize("extension", [".bz2", ".xz", ".zst"])
def test_a_log_in_any_compression_gives_what_the_log_itself_gives(tmp_path: Path, extension: str) -> None:
    text = gzip.decompress((RECORDINGS / "big_queue" / "server.log.gz").read_bytes())
    half = text.index(b"\n", len(text) // 2) + 1
    path = tmp_path / f"server.log{extension}"
    path.write_bytes(compressed(text[:half], extension) + compressed(text[half:], extension))
    assert document(str(path))["counts"]["decode_batches"] == 236
    path.write_bytes(compressed(text[:half], extension) + compressed(text[half:], extension)[:100])
    logs = Logs([str(path)])
    assert 20 < report(logs, PROFILES["online"])["counts"]["decode_batches"] < 236
    assert logs.notes == [f"{path}: is damaged or ends early; only what comes before it was read"]


def test_a_log_that_python_cannot_unpack_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(OPENERS, ".zst")
    path = tmp_path / "server.log.zst"
    path.write_bytes(compressed(b"x\n", ".zst"))
    with pytest.raises(UsageError) as raised:
        Logs([str(path)])
    assert str(raised.value) == (
        f"{path}: is a .zst file, which cannot be read here; install sglang-tuning-exporter[zstd], or unpack it with zstd -d"
    )


def test_a_zip_archive_names_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "logs.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("server.log", "x\n")
    with pytest.raises(UsageError) as raised:
        Logs([str(path)])
    assert (
        str(raised.value) == f"{path}: is a .zip file, which cannot be read here; unpack it, or give its text: unzip -p"
    )


def test_members_of_a_gzip_file_are_read_one_after_the_other_and_padding_is_none(tmp_path: Path) -> None:
    members = [gzip.compress(decode(f"10:00:{second:02}", second).encode()) for second in range(20)]
    path = tmp_path / "server.log.gz"
    path.write_bytes(b"".join(members) + b"\0" * 700)
    logs = Logs([str(path)])
    assert running(logs) == list(range(20))
    assert logs.notes == []


def test_a_line_cut_by_the_end_of_a_gzip_member_is_put_together(tmp_path: Path) -> None:
    line = decode("10:00:00", 128).encode()
    path = tmp_path / "server.log.gz"
    path.write_bytes(gzip.compress(line[:50]) + gzip.compress(line[50:]))
    assert running_in_order(str(path)) == [128]


def test_a_gzip_file_that_ends_early_gives_its_whole_lines_and_a_note(tmp_path: Path) -> None:
    whole = (RECORDINGS / "big_queue" / "server.log.gz").read_bytes()
    path = tmp_path / "server.log.gz"
    path.write_bytes(whole[: len(whole) * 2 // 3])
    logs = Logs([str(path)])
    counts = report(logs, PROFILES["online"])["counts"]
    assert 20 < counts["decode_batches"] < 236
    assert counts["unrecognised"] == 0
    assert logs.notes == [f"{path}: ends in the middle of a gzip member; only what comes before it was read"]


def test_a_gzip_file_with_a_bad_byte_gives_what_stands_before_it(tmp_path: Path) -> None:
    whole = bytearray((RECORDINGS / "big_queue" / "server.log.gz").read_bytes())
    whole[len(whole) // 2 : len(whole) // 2 + 64] = b"\xff" * 64
    path = tmp_path / "server.log.gz"
    path.write_bytes(whole)
    logs = Logs([str(path)])
    assert report(logs, PROFILES["online"])["counts"]["lines"] > 50
    assert len(logs.notes) == 1
    assert "is damaged" in logs.notes[0]


def test_a_plain_log_named_gz_is_read_as_what_it_is(tmp_path: Path) -> None:
    assert running_in_order(write(tmp_path / "server.log.gz", decode("10:00:00", 7))) == [7]


def test_standard_input_may_be_plain_or_packed() -> None:
    packed = (RECORDINGS / "dp2" / "server.log.gz").read_bytes()
    plain = gzip.decompress(packed)
    assert document("-", stdin=packed) == document("-", stdin=plain)
    assert document("-", stdin=plain)["sources"] == ["-"]


def test_standard_input_and_a_file_are_merged(tmp_path: Path) -> None:
    name = write(tmp_path / "server.log", decode("10:00:10", 2))
    logs = Logs([name, "-"], io.BytesIO((decode("10:00:00", 1) + decode("10:00:20", 3)).encode()))
    assert running(logs) == [1, 2, 3]


def test_a_named_pipe_is_read_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(decode("10:00:00", 1) + decode("10:00:05", 2),))
    writer.start()
    assert running_in_order(str(pipe)) == [1, 2]
    writer.join()


def test_a_log_larger_than_a_block_is_read_whole(tmp_path: Path) -> None:
    lines = [decode(f"{n // 3600:02}:{n // 60 % 60:02}:{n % 60:02}", n) for n in range(9000)]
    name = write(tmp_path / "server.log", *lines)
    assert Path(name).stat().st_size > BLOCK
    assert running_in_order(name) == list(range(9000))


def test_a_line_without_end_is_cut_and_the_next_one_read() -> None:
    chunks = [b"x" * BLOCK] * 3 + [b"yy\n" + decode("10:00:00").encode()]
    blocks = list(whole_lines(chunks))
    assert max(len(block) for block in blocks) < 2 * LONGEST_LINE
    assert b"".join(blocks).split(b"\n")[1:] == [decode("10:00:00").encode().rstrip(), b""]


def test_nul_bytes_at_the_start_of_a_truncated_file_take_no_memory_and_no_line() -> None:
    chunks = [b"\0" * BLOCK] * 3 + [b"\0\0" + decode("10:00:00").encode()]
    assert b"".join(whole_lines(chunks)).lstrip(b"\0") == decode("10:00:00").encode()


def test_time_goes_on_when_the_clock_was_set_back() -> None:
    clock = Clock()
    assert [clock.read(time) for time in (7200.0, 7210.0, 3600.0, 3630.0)] == [7200.0, 7210.0, 7210.0, 7240.0]


def test_a_single_old_time_changes_nothing_after_it() -> None:
    clock = Clock()
    assert [clock.read(time) for time in (7200.0, 7210.0, 0.0, 7220.0)] == [7200.0, 7210.0, 7210.0, 7220.0]


def test_a_clock_that_was_set_back_gives_no_negative_time(tmp_path: Path) -> None:
    name = write(
        tmp_path / "server.log", decode("10:00:00"), decode("10:00:30"), decode("08:00:00"), decode("08:00:30")
    )
    span = document(name)["span"]
    assert span == {
        "start": "2025-11-20T08:00:30Z",
        "end": "2025-11-20T10:00:00Z",
        "seconds": 60,
        "serving_seconds": span["serving_seconds"],
    }


def test_a_log_without_dates_has_seconds_but_no_start(tmp_path: Path) -> None:
    lines = [decode(clock, date="") for clock in ("23:59:40", "23:59:58", "00:00:10")]
    span = document(write(tmp_path / "server.log", *lines))["span"]
    assert span == {"start": None, "end": None, "seconds": 30, "serving_seconds": span["serving_seconds"]}


def test_a_log_without_times_is_counted_all_the_same(tmp_path: Path) -> None:
    line = (
        "Decode batch, #running-req: 4, #token: 925, token usage: 0.89, gen throughput (token/s): 1.00, #queue-req: 4\n"
    )
    found = document(write(tmp_path / "server.log", *[line] * 3))
    assert found["span"] == {"start": None, "end": None, "seconds": 0, "serving_seconds": 0}
    assert found["counts"]["decode_batches"] == 3
    assert found["last"]["running_requests"] == 4
    assert found["verdict"] == "not_enough_data"


def test_the_span_reaches_from_the_first_to_the_last_printed_time_with_or_without_events(tmp_path: Path) -> None:
    access = '[2025-11-20 {}] INFO:     10.0.0.1:5 - "GET /health HTTP/1.1" 200 OK\n'
    name = write(tmp_path / "server.log", access.format("09:59:50"), decode("10:00:00"), access.format("10:00:20"))
    span = document(name)["span"]
    assert (span["start"], span["end"], span["seconds"]) == ("2025-11-20T09:59:50Z", "2025-11-20T10:00:20Z", 30)


@pytest.mark.parametrize("version", ["0.3.0", "0.4.9.post6", "0.5.23"])
def test_a_log_of_any_release_is_a_log(version: str) -> None:
    assert document(str(LOGS / f"{version}.log"))["counts"]["server_starts"] == 1


UNUSABLE = {
    "missing": "No such file or directory",
    "folder": "is a directory",
    "empty": "is empty",
    "*.nothing": "no file matches",
    "garbage": "no line of SGLang's",
    "other.log": "no line of SGLang's",
    "cut.gz": "ends in the middle",
    "logs.tar": "is a tar archive; unpack it",
    "logs.tar.gz": "is a tar archive; unpack it",
    "twice.gz": "was compressed twice; unpack it once",
    "returns": "carriage returns alone; convert it",
}


@pytest.mark.parametrize(("name", "reason"), UNUSABLE.items())
def test_unusable_input_is_one_sentence_that_names_the_file(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").touch()
    (tmp_path / "garbage").write_bytes(bytes(range(256)) * 5000)
    (tmp_path / "other.log").write_text('INFO:     127.0.0.1:1 - "GET / HTTP/1.1" 200 OK\nUser logged in\n' * 9)
    (tmp_path / "cut.gz").write_bytes(gzip.compress(os.urandom(3000))[:800])
    log = write(tmp_path / "server.log", *(decode(f"10:00:{second}") for second in range(10, 40)))
    for mode in ("w", "w:gz"):
        with tarfile.open(tmp_path / f"logs.tar{mode[1:].replace(':', '.')}", mode) as archive:
            archive.add(log, "server.log")
    (tmp_path / "twice.gz").write_bytes(gzip.compress(gzip.compress(Path(log).read_bytes())))
    (tmp_path / "returns").write_bytes(Path(log).read_bytes().replace(b"\n", b"\r"))
    with pytest.raises(UsageError, match=reason) as raised:
        document(str(tmp_path / name))
    assert str(tmp_path / name) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_empty_file_beside_a_log_is_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "server.log").touch()
    write(tmp_path / "server.log.1", decode("10:00:00"))
    assert document(str(tmp_path / "server.log*"))["counts"]["lines"] == 1


def test_a_name_with_a_line_end_stays_on_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as raised:
        document(str(tmp_path / "two\nlines"))
    assert "\n" not in str(raised.value)


def test_hostile_bytes_between_the_lines_change_no_figure(tmp_path: Path) -> None:
    plain = gzip.decompress((RECORDINGS / "client_limited" / "server.log.gz").read_bytes())
    lines = plain.splitlines(keepends=True)
    noise = [b"\xff\xfe\x00\x80\n", b'{"log": [\n', b"(" * 3000 + b"\n", b"\x1b[31m\n", b"[2025-99-99 99:99:99] x\n"]
    mixed = tmp_path / "mixed.log"
    mixed.write_bytes(b"".join(line + noise[n % len(noise)] for n, line in enumerate(lines)))
    clean = tmp_path / "clean.log"
    clean.write_bytes(plain)
    one, other = document(str(clean)), document(str(mixed))
    for key in ("span", "last", "shares", "verdict", "findings"):
        assert one[key] == other[key]
    assert one["counts"]["decode_batches"] == other["counts"]["decode_batches"]


def test_a_report_from_a_pipe_of_a_real_process() -> None:
    code = (
        "import sys; from sglang_tuning_exporter.report.report import run;"
        "sys.exit(run(['-'], format='json', output=None, profile='online'))"
    )
    packed = (RECORDINGS / "big_queue" / "server.log.gz").read_bytes()
    done = subprocess.run([sys.executable, "-c", code], input=packed, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (1, b"")
    assert b'"verdict": "running_at_limit"' in done.stdout


def test_a_lasting_change_of_the_clock_goes_on_from_where_it_was() -> None:
    clock = Clock()
    year = 365 * 86_400.0
    assert [clock.read(time) for time in (100.0, 110.0, year, year + 5)] == [100.0, 110.0, 110.0, 115.0]
    assert (clock.set_forward, clock.set_back, clock.strays) == (1, 0, 0)


def test_a_night_of_silence_is_no_other_clock() -> None:
    clock = Clock()
    assert [clock.read(time) for time in (100.0, 110.0, 40_000.0, 40_005.0)] == [100.0, 110.0, 40_000.0, 40_005.0]
    assert (clock.set_forward, clock.strays) == (0, 0)


@pytest.mark.parametrize("lines", [1, 2, 5])
def test_a_few_lines_of_another_clock_in_turn_are_strays(lines: int) -> None:
    clock = Clock()
    ten_years = 10 * 365 * 86_400.0
    strays = [clock.read(ten_years + n) for n in range(lines)]
    assert len(strays) == lines
    clock = Clock()
    clock.read(100.0)
    assert [clock.read(ten_years + 100 + n) for n in range(lines)] == [100.0 + n for n in range(lines)]
    assert clock.read(110.0) == 110.0
    assert (clock.strays, clock.set_forward, clock.set_back) == (lines, 0, 0)


STRAYS = {
    "year 2036": "2036-11-20 10:05:00",
    "year 1970": "1970-01-01 00:00:07",
    "a year too late": "2026-11-20 10:05:00",
    "a year too early": "2024-11-20 10:05:00",
    "a day too late": "2025-11-21 10:05:00",
    "three hours too late": "2025-11-20 13:05:00",
    "three hours too early": "2025-11-20 07:05:00",
}


@pytest.mark.parametrize("place", [0, 1, 60, 119, 120])
@pytest.mark.parametrize("stray", STRAYS)
def test_one_line_with_a_wrong_time_changes_no_other(tmp_path: Path, stray: str, place: int) -> None:
    lines = [decode(f"10:{second // 60:02}:{second % 60:02}", 3) for second in range(0, 600, 5)]
    plain_log = write(tmp_path / "plain.log", *lines)
    date, clock = STRAYS[stray].split(" ")
    with_stray = write(tmp_path / "stray.log", *lines[:place], decode(clock, 3, date=date + " "), *lines[place:])
    one, other = document(plain_log), document(with_stray)
    if place == 120 and "late" in stray and "year" not in stray:
        return  # a line alone after hours of silence is how a log may end
    if place == 0 and "early" in stray and "year" not in stray:
        return  # and how one may begin
    assert [note for note in other["notes"] if "1 line has a time far from" in note] == other["notes"]
    assert len(other["notes"]) == 1
    for key in ("verdict", "alerts", "last"):
        assert other[key] == one[key], key
    assert [(each["phase"], each["at"], each["seconds"]) for each in other["phases"]] == [
        (each["phase"], each["at"], each["seconds"]) for each in one["phases"]
    ]
    assert {**other["span"], "serving_seconds": 0} == {**one["span"], "serving_seconds": 0}
    assert other["span"]["serving_seconds"] == pytest.approx(one["span"]["serving_seconds"], abs=5)
    assert other["counts"]["decode_batches"] == one["counts"]["decode_batches"] + 1


def test_a_wrong_month_in_the_last_line_does_not_make_the_log_longer(tmp_path: Path) -> None:
    name = write(tmp_path / "a.log", decode("10:00:00"), decode("10:00:30"), decode("10:00:40", date="2026-01-20 "))
    assert document(name)["span"]["seconds"] == 30
