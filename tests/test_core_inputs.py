"""How a report reads its logs: which files, in which order, packed how, and what is said about unusable input.

The lines are those of 0.5.12 and 0.5.23 as the released wheels format them, with times of our own; the recordings are
real logs.
"""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import zipfile
from collections import Counter
from pathlib import Path
from threading import Thread

import pytest

from compressed import compressed
from replicas import TWO_SOURCES, files, load, mixed, start, together
from sglang_tuning_exporter.collect.log import last_printed, offset_of
from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.core import inputs as layouts
from sglang_tuning_exporter.core.events import Event
from sglang_tuning_exporter.core.inputs import CHUNK, LONGEST_LINE, OPENERS, Lane, Logs, first_of, whole_lines
from store_answers import DOCUMENTS
from wrappings import recorded, wrapped

HERE = Path(__file__).parent
BIG_QUEUE = HERE / "recordings" / "big_queue" / "server.log.gz"


def decode(clock: str, running: int = 4, *, ranks: str = "", date: str = "2025-11-20 ") -> str:
    return (
        f"[{date}{clock}{ranks}] Decode batch, #running-req: {running}, #token: 925, token usage: 0.89, "
        "cuda graph: True, gen throughput (token/s): 4471.70, #queue-req: 4\n"
    )


def write(path: Path, *lines: str) -> str:
    path.write_text("".join(lines))
    return str(path)


def events(*names: str, stdin: bytes | None = None) -> list[Event]:
    """Read logs to their end; no event comes before the one before it."""
    found = list(Logs(names, None if stdin is None else io.BytesIO(stdin)).events())
    times = [event.time for event in found if event.time is not None]
    assert times == sorted(times)
    return found


def running(*names: str, stdin: bytes | None = None) -> list[float]:
    return [event.figures["running"] for event in events(*names, stdin=stdin) if event.kind == "decode"]


def kinds(*names: str, stdin: bytes | None = None) -> Counter[str]:
    return Counter(event.kind for event in events(*names, stdin=stdin))


def read(*names: str) -> Logs:
    logs = Logs(names)
    for _ in logs.events():
        pass
    return logs


# Files and their order


def test_a_file_without_dates_goes_on_with_the_one_whose_name_sorts_before_it(tmp_path: Path) -> None:
    begun = (
        f"{decode('10:00:00')}[2025-11-20 10:00:01] Scheduler hit an exception: Traceback (most recent call last):\n"
    )
    rest = '  File "/x/sglang/srt/a.py", line 7, in f\nKeyError: 1\n'
    found = events(*files(tmp_path, begun, rest, decode("11:00:00")))
    said = [(each.text, each.time, Path(each.file).name) for each in found if each.word == "check"]
    assert said == [("KeyError: 1", found[0].time and found[0].time + 1, "b.log")]


def test_a_rotation_set_is_read_from_its_oldest_file_whatever_the_names_order(tmp_path: Path) -> None:
    newest = write(tmp_path / "server.log", decode("12:00:00", 3))
    middle = write(tmp_path / "server.log.1", decode("11:00:00", 2))
    oldest = write(tmp_path / "server.log.10", decode("10:00:00", 1))
    assert running(str(tmp_path / "server.log*")) == [1, 2, 3]
    assert Logs([newest, middle, oldest]).names == (oldest, middle, newest)


def test_logs_of_several_nodes_are_merged_by_the_time_of_their_lines(tmp_path: Path) -> None:
    names = ("00", 1), (20, 3), (40, 5)
    first = write(tmp_path / "node0.log", *(decode(f"10:00:{at}", n, ranks=" DP0") for at, n in names))
    second = write(tmp_path / "node1.log", *(decode(f"10:00:{n}0", n + 1, ranks=" DP1") for n in (1, 3, 5)))
    assert running(second, first) == [1, 2, 3, 4, 5, 6]


# Bytes


@pytest.mark.parametrize("extension", [".gz", ".bz2", ".xz", ".zst"])
def test_a_packed_log_gives_what_the_log_itself_gives(tmp_path: Path, extension: str) -> None:
    text = gzip.decompress(BIG_QUEUE.read_bytes())
    half = text.index(b"\n", len(text) // 2) - 50  # in the middle of a line
    one, other = (compressed(part, extension) for part in (text[:half], text[half:]))
    path = tmp_path / f"server.log{extension}"
    path.write_bytes(one + other)
    assert kinds(str(path)) == kinds("-", stdin=text) == kinds("-", stdin=path.read_bytes())
    path.write_bytes(one + other[: len(other) // 2])
    logs = read(str(path))
    assert 20 < sum(logs._lanes[0].reader.lines.values()) < 819
    assert logs.tally[1].total() == 0
    reason = "ends in the middle of a gzip member" if extension == ".gz" else "is damaged or ends early"
    assert logs.damage == [f"{path}: {reason}; only what comes before it was read"]


def test_a_line_without_end_is_cut_and_nul_bytes_before_a_line_are_left_out() -> None:
    line = decode("10:00:00").encode()
    chunks = list(whole_lines([*[b"x" * CHUNK] * 3, b"yy\n" + line]))
    assert max(map(len, chunks)) < 2 * LONGEST_LINE + CHUNK
    assert b"".join(chunks).split(b"\n")[1:] == [line.rstrip(), b""]
    assert b"".join(whole_lines([*[b"\0" * CHUNK] * 3, b"\0\0" + line])).lstrip(b"\0") == line


# Times


def seconds(*times: float) -> tuple[list[float | None], Lane]:
    lane = Lane(0, first_of(times) or 0.0)
    return [event.time for event in lane.steady(Event("decode", time) for time in times)], lane


@pytest.mark.parametrize(
    ("printed", "taken", "counts"),
    [
        ((7200, 7210, 3600, 3630), (7200, 7210, 7210, 7240), (1, 0, 0)),
        ((7200, 7210, 0, 7220), (7200, 7210, 7210, 7220), (0, 0, 1)),
        ((100, 110, 4e7, 4e7 + 5), (100, 110, 110, 115), (0, 1, 0)),
        ((100, 110, 40_000, 40_005), (100, 110, 40_000, 40_005), (0, 0, 0)),
        ((100, 110, 4e7), (100, 110, 110), (0, 0, 1)),
        ((100, 110, 40_000), (100, 110, 40_000), (0, 0, 0)),
        ((4e7, 100, 110), (100, 100, 110), (0, 0, 1)),
        ((100, 40_000, 110, 115), (100, 100, 110, 115), (0, 0, 1)),
        ((100, 90, 110), (100, 100, 110), (0, 0, 0)),
    ],
    ids=["set back", "an old line", "set forward", "silence", "a last line far ahead", "a last line after hours",
         "a stray first line", "a line of another clock", "out of order"],
)  # fmt: skip
def test_time_never_runs_backwards_and_a_line_of_another_clock_changes_nothing(
    printed: tuple[float, ...], taken: tuple[float, ...], counts: tuple[int, int, int]
) -> None:
    found, lane = seconds(*printed)
    assert found == list(taken)
    assert (lane.odd["back"], lane.odd["forward"], lane.odd["stray"]) == counts


# Layouts


@pytest.mark.parametrize("name", DOCUMENTS)
def test_an_answer_of_a_log_store_gives_the_events_of_its_log(name: str) -> None:
    lines = recorded()[:500]
    plain = "\n".join(line for line, _, _ in lines).encode() + b"\n"
    document = DOCUMENTS[name](lines).encode("utf-16" if name == "UTF-16" else "utf-8")
    assert running("-", stdin=document) == running("-", stdin=plain)
    assert kinds("-", stdin=document) == kinds("-", stdin=plain)


@pytest.mark.parametrize("name", ["nothing", "Loki JSONL", "CloudWatch get-log-events", "GCP", "Loki text", "CSV"])
def test_lines_with_the_newest_first_give_the_events_of_their_log(name: str) -> None:
    text = wrapped(name, recorded()[:500])
    turned = b"\n".join(text.rstrip(b"\n").split(b"\n")[::-1]) + b"\n"
    assert running("-", stdin=turned) == running("-", stdin=text)


def test_a_reversed_log_that_is_too_large_to_reverse_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "LONGEST_DOCUMENT", 1 << 16)
    text = wrapped("nothing", recorded()[:500])
    with pytest.raises(UsageError, match=r"newest line comes first.*oldest line first"):
        events("-", stdin=b"\n".join(text.rstrip(b"\n").split(b"\n")[::-1]))


# One server


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        ((load(0, 120), load(3, 120)), "both print batches of the same rank"),
        ((start(0) + load(40, 100), start(0) + load(40, 100)), "the same lines twice"),
        ((together(start(0, port=31001), start(1, port=31002), ready=2),),
            r"into this log together \(--port 31001, 31002\)"),
        *(((mixed(*frames),), "holds the lines of two servers") for frames in TWO_SOURCES.values()),
    ],
)  # fmt: skip
def test_logs_of_several_servers_are_refused(tmp_path: Path, texts: tuple[str, ...], reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as raised:
        events(*files(tmp_path, *texts))
    assert "a.log" in str(raised.value)


@pytest.mark.parametrize(
    ("texts", "starts"),
    [
        ((start(0, dp_size=2) + load(40, 400, ranks=" DP0"), load(41, 400, ranks=" DP1")), 1),
        ((start(420) + load(460, 800), start(0) + load(40, 400)), 2),
        ((load(0, 60), load(53, 120)), 0),
        ((together(start(0, port=31001), start(30, port=31002), ready=1),), 2),
        ((together(start(0, port=31001), start(30, port=31001, tokenizer_worker_num=4), ready=4),), 2),
        ((mixed("[rank0]: {}", "[rank1]: {}", starts=1, ranks=(" TP0", " TP1")),), 1),
        ((mixed("sglang-1  | {}", "sglang-1  | sglang-2  | {}", starts=1),), 1),
        (("".join(f"{number}: {load(number // 2, number // 2 + 1)}" for number in range(200)),), 0),
    ],
    ids=["ranks", "restart", "overlap", "killed", "tokenizers", "torchrun", "a prompt", "counted lines"],
)  # fmt: skip
def test_logs_of_one_server_are_put_together(tmp_path: Path, texts: tuple[str, ...], starts: int) -> None:
    assert kinds(*files(tmp_path, *texts))["arguments"] == starts


@pytest.mark.parametrize("source", TWO_SOURCES)
def test_without_their_starts_a_note_warns_that_the_lines_may_be_of_two_servers(tmp_path: Path, source: str) -> None:
    note = read(*files(tmp_path, mixed(*TWO_SOURCES[source], starts=0))).notes[0]
    assert "may hold the lines of two servers" in note


# Unusable input

UNUSABLE = {
    "missing": "No such file or directory; give a log that can be read",
    "folder": "is a directory; give its files",
    "empty": "is empty",
    "*.nothing": "no file matches",
    "garbage": "no line of SGLang's",
    "other.log": "no line of SGLang's",
    "cut.gz": "ends in the middle",
    "logs.tar": "is a tar archive; unpack it",
    "logs.tar.gz": "is a tar archive; unpack it",
    "twice.gz": "was compressed twice; unpack it once",
    "returns": "carriage returns alone; convert it",
    "logs.zip": "is a .zip file, which cannot be read here; unpack it, or give its text: unzip -p",
    "form.log": "holds words of SGLang's, in lines whose form cannot be read; the first: ",
    "/dev/null": "is a device",
    "two\nlines": r"two\\nlines: No such file",
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
    (tmp_path / "form.log").write_text('he said "Decode batch, #running-req: 4" is what I see\n')
    with zipfile.ZipFile(tmp_path / "logs.zip", "w") as zipped:
        zipped.writestr("server.log", "x\n")
    with pytest.raises(UsageError, match=reason) as raised:
        events(str(tmp_path / name))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("ImportError: libcudart.so.12: cannot open shared object file", "; a library or a kernel is missing"),
        ("(WorkerDict pid=7) [torch_memory_saver.cpp] CUresult error: 2 (out of memory)", "“[torch_memory_saver.cpp]"),
        ("ValueError: No bucket >= 4096", "“ValueError: No bucket >= 4096”; give a server's log"),
        ("ValueError: api_key='abcdef' is wrong", "<redacted>"),
        (
            '>   File "/usr/lib/python3.11/site-packages/sglang/srt/a.py", line 7, in load_model',
            "line 7, in load_model”",
        ),
        ("0 errors, as exceptions are rare", "in it; give a server's log"),
    ],
)
def test_an_error_without_a_line_of_sglangs_is_quoted_and_judged_no_server(
    line: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as raised:
        events(write(tmp_path / "pasted.log", "a line\n", f"{line}\n"))
    assert said in str(raised.value)


def test_a_log_that_python_cannot_unpack_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(OPENERS, ".zst")
    path = tmp_path / "server.log.zst"
    path.write_bytes(compressed(b"x\n", ".zst"))
    with pytest.raises(UsageError, match=r"install sglang-tuning-exporter\[zstd\], or unpack it with zstd -d"):
        events(str(path))


# The clock of a log


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        (b"[2025-11-20 11:40:10] Decode batch\n", 1763638810.0),
        (b"[2025-11-20 11:40:10 DP1 TP0] Decode batch\nTraceback (most recent call last):\n  File x\n", 1763638810.0),
        (b'[2025-11-20 11:40:10] INFO:     127.0.0.1:1 - "GET /health HTTP/1.1" 200 OK\n', 1763638810.0),
        (b"2025-11-20T11:40:10.5Z stdout F words without a stamp\n", 1763638810.5),
        (b"[11:40:10] Decode batch\n", None),
        (b"no time at all\n", None),
        (b"", None),
    ],
)
def test_the_last_dated_line_gives_when_a_log_was_written_last(text: bytes, printed: float | None) -> None:
    assert last_printed(text) == printed


def test_sglangs_own_stamps_count_where_a_runtime_prints_times_of_another_zone() -> None:
    stamped = b"2025-11-20T09:40:10.5Z stdout F [2025-11-20 11:40:10] Load weight begin. avail mem=1 GB\n"
    unstamped = b"2025-11-20T09:40:11.5Z stdout F a line without a stamp\n"
    assert last_printed(stamped + unstamped) == 1763638810.0


@pytest.mark.parametrize("hour", ["09", "11", "13"])
def test_a_log_begins_with_sglangs_own_stamps_not_with_a_runtimes(tmp_path: Path, hour: str) -> None:
    around = f"2025-11-20T{hour}:40:10.5Z stderr F "
    log = write(
        tmp_path / "0.log", f"{around}a warning of Python's\n", *(around + decode("11:40:10") for _ in range(2))
    )
    found = Logs([log])
    assert (found.first, {event.time for event in found.events()}, found.notes) == (1763638810.0, {1763638810.0}, [])


def test_a_log_begins_with_its_first_stamp_however_much_stands_before_it(
    tmp_path: Path,
) -> None:
    lines = ["a warning of Python's\n"] * 1900 + [decode("11:40:10"), decode("11:40:12")]
    reading, writing = os.pipe()
    os.write(writing, lines[0].encode())

    def go_on() -> None:
        for line in lines[1:]:
            os.write(writing, line.encode())
        os.close(writing)

    writer = Thread(target=go_on)
    writer.start()
    with os.fdopen(reading, "rb") as stdin:
        piped = Logs(["-"], stdin)
        writer.join()
        for found in (piped, Logs([write(tmp_path / "server.log", *lines)])):
            assert [event.kind for event in found.events()] == ["decode"] * 2
            assert (found.first, found.notes, found.lines) == (1763638810.0, [], len(lines))


def test_a_log_begins_with_the_first_line_of_a_form_that_later_ones_prove(tmp_path: Path) -> None:
    clocks = ("11:40:10", "11:40:11", "11:40:12")
    log = write(tmp_path / "server.log", *(f"a task of rank 0 says: {decode(clock)}" for clock in clocks))
    assert [event.kind for event in Logs([log]).events()] == ["decode"] * 3
    assert Logs([log]).first == 1763638810.0


def test_a_log_printed_in_another_zone_has_that_zones_offset(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_bytes(b"[2025-11-20 11:40:10] Load weight begin. avail mem=1 GB\n")
    os.utime(log, (1763638810.0 - 7200, 1763638810.0 - 7200))
    assert offset_of(str(log)) == -7200
