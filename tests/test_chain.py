"""All rotated files of a log are read, the oldest first; files that were lost unread are reported."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from compressed import compressed
from fuzz import files
from sglang_tuning_exporter.collect import _log_file as log_file
from sglang_tuning_exporter.collect.follower import LogFollower, rotated_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Log:
    """A log with numbered lines, and its rotated files; each event moves the files' times by a second."""

    def __init__(self, folder: Path, name: str = "server.log") -> None:
        self.path = folder / name
        self.count = 0
        self.seconds = 1_773_832_925
        self.write(0)

    def write(self, count: int) -> None:
        with self.path.open("ab") as file:
            for _ in range(count):
                self.count += 1
                file.write(b"[2026-03-18 11:22:05] line %06d of a server that says the same again\n" % self.count)
        self.touch(self.path)

    def touch(self, path: Path) -> None:
        self.seconds += 1
        os.utime(path, (self.seconds, self.seconds))

    def rename(self, suffix: str, *, packed: bool = False) -> Path:
        to = Path(f"{self.path}{suffix}")
        self.path.rename(to)
        self.write(0)
        return self.pack(to) if packed else to

    def shift(self) -> None:
        """Rename server.log.1 to server.log.2, and so on, and the log to server.log.1."""
        for number in range(40, 0, -1):
            if (path := Path(f"{self.path}.{number}")).exists():
                path.rename(f"{self.path}.{number + 1}")
        self.rename(".1")

    def pack(self, path: Path) -> Path:
        packed, modified = Path(f"{path}.gz"), path.stat().st_mtime_ns
        packed.write_bytes(gzip.compress(path.read_bytes()))
        os.utime(packed, ns=(modified, modified))
        path.unlink()
        return packed

    def numbers(self, low: int, high: int) -> list[int]:
        return list(range(low, high + 1))


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path)


@pytest.fixture(autouse=True)
def _closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close every follower that a test makes."""
    made: list[LogFollower] = []
    begin = LogFollower.__init__

    def remembered(self: LogFollower, *given: Any, **named: Any) -> None:
        made.append(self)
        begin(self, *given, **named)

    monkeypatch.setattr(LogFollower, "__init__", remembered)
    yield
    for follower in made:
        follower.close()


def read(follower: LogFollower) -> list[int]:
    text = b"".join(block.data for _ in range(3) for block in follower.poll() if not block.historical)
    return [int(line.split()[3]) for line in text.splitlines()]


def lost(follower: LogFollower) -> int:
    return sum(status.lost for status in follower.status())


def saved(follower: LogFollower) -> dict[str, object]:
    positions: dict[str, object] = json.loads(json.dumps(follower.positions()))
    follower.close()
    return positions


def test_files_of_another_server_in_a_directory_beside_this_one_are_left_alone(log: Log, tmp_path: Path) -> None:
    log.write(3)
    follower = LogFollower([str(log.path)], from_start=True)
    assert read(follower) == [1, 2, 3]
    other = tmp_path / "gpu1"
    other.mkdir()
    shutil.copy(log.path, other / "server.log.2")
    (other / "server.log.1").write_bytes(b"[2026-03-18 11:22:05] line 999999 of a server\n")
    (other / "server.log").touch()
    positions = saved(follower)
    log.path.unlink()
    log.write(1)
    follower = LogFollower([str(log.path)], positions=positions)
    assert (read(follower), lost(follower)) == ([4], 1)


def test_a_glob_reads_rotated_files_of_a_directory_beside_the_log_once(log: Log, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    follower = LogFollower([str(tmp_path / "**" / "server.log*")], from_start=True)
    log.write(2)
    assert read(follower) == [1, 2]
    for number in (1, 2):
        log.write(1)
        log.path.rename(tmp_path / "old" / f"server.log-2026031{number}")
    log.write(1)
    follower._next_glob = 0.0
    assert sorted(read(follower)) == [3, 4, 5]


def test_a_file_that_was_rotated_to_another_place_while_nobody_read_is_reported(log: Log, tmp_path: Path) -> None:
    log.write(3)
    follower = LogFollower([str(log.path)], from_start=True)
    assert read(follower) == [1, 2, 3]
    positions = saved(follower)
    log.write(1)
    (tmp_path / "a" / "old").mkdir(parents=True)
    log.path.rename(tmp_path / "a" / "old" / "server.log.1")
    log.write(2)
    follower = LogFollower([str(log.path)], positions=positions)
    assert (read(follower), lost(follower)) == ([5, 6], 1)
    assert "is gone or was changed" in follower.status()[0].last_lost


def test_a_compressed_file_that_is_damaged_or_of_an_unknown_packing_is_reported(log: Log) -> None:
    log.write(1)
    follower = LogFollower([str(log.path)], from_start=True)
    assert read(follower) == [1]
    positions = saved(follower)
    log.rename("-20260318")
    log.write(200)
    packed = log.rename("-20260319", packed=True)
    packed.write_bytes(packed.read_bytes()[:-200])
    log.write(1)
    log.rename("-20260320").rename(f"{log.path}-20260320.lz4")
    log.write(1)
    follower = LogFollower([str(log.path)], positions=positions)
    names = {follower.status()[0].last_lost}
    assert read(follower)[-1] == log.count
    assert lost(follower) == 2
    names.add(follower.status()[0].last_lost)
    assert names == {
        f"{log.path}-20260320.lz4: .lz4 files cannot be read",
        f"{packed}: unreadable: Compressed file ended before the end-of-stream marker was reached",
    }
    follower.close()


def test_a_file_compressed_by_zstd_is_read(log: Log) -> None:
    log.write(1)
    follower = LogFollower([str(log.path)], from_start=True)
    assert read(follower) == [1]
    positions = saved(follower)
    log.write(2)
    rotated = log.rename("-20260318")
    Path(f"{rotated}.zst").write_bytes(compressed(rotated.read_bytes(), ".zst"))
    rotated.unlink()
    log.write(1)
    follower = LogFollower([str(log.path)], positions=positions)
    assert (read(follower), lost(follower)) == ([2, 3, 4], 0)


@pytest.mark.parametrize("processor", [bytes, gzip.compress], ids=["as it is", "gzip"])
def test_files_of_svlogd_and_multilog_are_read_in_order_of_their_names(
    tmp_path: Path, processor: Callable[[bytes], bytes]
) -> None:
    log = Log(tmp_path, "current")
    log.write(1)
    follower = LogFollower([str(log.path)], from_start=True)
    assert read(follower) == [1]
    positions = saved(follower)
    # Without their letters these numbers are in another order.
    for label in ("6b04380806274b64", "6b043808271e84cc", "6b0438092d7e994c", "6b04380a12de96dc", "6b04380b00000000"):
        log.write(2)
        rotated = log.path.rename(tmp_path / f"@40000000{label}.s")
        rotated.write_bytes(processor(rotated.read_bytes()))
        log.touch(rotated)
        log.write(0)
    log.write(1)
    follower = LogFollower([str(log.path)], positions=positions)
    assert (read(follower), lost(follower)) == (log.numbers(2, 12), 0)


NAMED = {
    "extension .log": ("server.{}.log", bytes),
    "extension .log, compressed": ("server.{}.log.gz", gzip.compress),
    "addextension .old": ("server.log.{}.old", bytes),
    "dateformat _%s": ("server.log_177383293{}", bytes),
    "addextension .bak with dateext": ("server.log-2026032{}.bak", bytes),
    "compressext .packed": ("server.log.{}.packed", gzip.compress),
}


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize(("names", "packed"), NAMED.values(), ids=NAMED)
def test_rotated_files_of_other_names_are_recognised_by_one_that_was_read(
    log: Log, names: str, packed: Callable[[bytes], bytes], *, stopped: bool
) -> None:
    """As real logrotate 3.21 names them with these options; numbers rise with age, dates fall."""
    log.write(1)
    follower = LogFollower([str(log.path)], from_start=True)
    assert read(follower) == [1]
    positions = saved(follower) if stopped else None
    for round_ in range(1, 4):
        log.write(2)
        number = round_ if "2026" in names or "177" in names else 4 - round_
        rotated = log.path.with_name(names.format(number))
        log.path.rename(rotated)
        text, modified = rotated.read_bytes(), rotated.stat().st_mtime_ns
        if packed is not bytes:
            rotated.unlink()
            rotated.write_bytes(packed(text))
            os.utime(rotated, ns=(modified, modified))
        log.write(0)
    log.write(1)
    follower = LogFollower([str(log.path)], positions=positions) if stopped else follower
    assert (read(follower), lost(follower)) == (log.numbers(2, 8), 0)


LINKED = {
    "date": "server.2026112{}.log",
    "date behind the name": "server.log.2026112{}",
    "glog": "sglang.host.user.log.INFO.20261123-13020{0}.230{0}",
    "number": "server-{}.log",
    "directory": "run-2026112{}/server.log",
}


def lead(path: Path, file: Path, link: Callable[[Path, Path], None]) -> None:
    """Point a symbolic link at a file that may be new, as rotatelogs, cronolog and glog do."""
    file.parent.mkdir(exist_ok=True)
    file.touch()
    link(path.with_name("new-link"), file)
    path.with_name("new-link").replace(path)


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize(
    ("link", "names"),
    [*((Path.symlink_to, name) for name in LINKED.values()), (Path.hardlink_to, LINKED["date"])],
    ids=[*LINKED, "hard link"],
)
def test_the_files_that_a_link_led_to_are_read_to_their_ends(
    tmp_path: Path, link: Callable[[Path, Path], None], names: str, *, stopped: bool
) -> None:
    path, log = tmp_path / "log", Log(tmp_path, "elsewhere")
    lead(path, tmp_path / names.format(1), link)
    log.path = tmp_path / names.format(1)
    log.write(1)
    follower = LogFollower([str(path)], from_start=True)
    assert read(follower) == [1]
    positions = saved(follower) if stopped else None
    for number in range(2, 6):
        log.write(2)
        log.path = tmp_path / names.format(number)
        lead(path, log.path, link)
    log.write(1)
    follower = LogFollower([str(path)], positions=positions) if stopped else follower
    assert (read(follower), lost(follower)) == (log.numbers(2, 10), 0)


def test_a_link_that_leads_back_to_a_file_goes_on_where_that_was_left(tmp_path: Path) -> None:
    path, first, second = tmp_path / "log", Log(tmp_path, "first"), Log(tmp_path, "second")
    second.count = 100
    lead(path, first.path, Path.symlink_to)
    follower, found = LogFollower([str(path)], from_start=True), []
    for log in (first, second, first):
        lead(path, log.path, Path.symlink_to)
        log.write(2)
        found += read(follower)
    assert (found, lost(follower)) == ([1, 2, 101, 102, 3, 4], 0)


@pytest.mark.parametrize("patterns", [["log", "server*"], ["server*", "log"], ["*"]])
def test_the_files_of_a_link_are_read_once_where_they_are_followed_themselves(
    tmp_path: Path, patterns: list[str]
) -> None:
    path, log = tmp_path / "log", Log(tmp_path, "server.20261121.log")
    lead(path, log.path, Path.symlink_to)
    log.write(1)
    followed = [str(tmp_path / pattern) for pattern in patterns]
    follower = LogFollower(followed, from_start=True)
    assert read(follower) == [1]
    positions = saved(follower)
    for number in range(2, 5):
        log.write(2)
        log.path = tmp_path / f"server.2026112{number}.log"
        lead(path, log.path, Path.symlink_to)
    log.write(1)
    follower = LogFollower(followed, positions=positions)
    assert (sorted(read(follower)), lost(follower)) == (log.numbers(2, 8), 0)


@pytest.mark.parametrize("name", ["server.{}.log", "server.log.{}.old", "server-2026112{}.log"])
def test_a_renamed_file_that_a_glob_matches_is_read_once_and_not_lost(tmp_path: Path, name: str) -> None:
    log = Log(tmp_path)
    log.write(1)
    follower = LogFollower([str(tmp_path / "server*")], from_start=True)
    assert read(follower) == [1]
    positions = saved(follower)
    for number in range(1, 4):
        log.write(2)
        log.path.rename(tmp_path / name.format(number))
        log.write(0)
    log.write(1)
    follower = LogFollower([str(tmp_path / "server*")], positions=positions)
    assert (sorted(read(follower)), lost(follower)) == (log.numbers(2, 8), 0)


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("name", ["server.log.{}", "server.{}.log", "server-2026112{}.log", "server{}.log"])
def test_a_copy_that_a_glob_matches_is_not_read_again(tmp_path: Path, name: str, *, stopped: bool) -> None:
    seconds = itertools.count(step=0.6)
    pattern, log = str(tmp_path / "server*"), Log(tmp_path)
    log.write(100)
    follower = LogFollower([pattern], from_start=True, clock=lambda: next(seconds))
    found = read(follower)
    positions = saved(follower) if stopped else None
    for number in range(1, 4):
        log.write(70)
        shutil.copy2(log.path, tmp_path / name.format(number))
        os.truncate(log.path, 0)
        found += [] if stopped else read(follower) + read(follower)
    log.write(20)
    follower = LogFollower([pattern], positions=positions, clock=lambda: next(seconds)) if stopped else follower
    found += read(follower) + read(follower)
    assert (sorted(found), lost(follower)) == (log.numbers(1, 330), 0)


def test_servers_with_the_same_first_lines_are_all_read(tmp_path: Path) -> None:
    seconds = itertools.count(step=0.6)
    first, second = Log(tmp_path, "server1.log"), Log(tmp_path, "server2.log")
    first.write(20)
    second.path.unlink()
    follower = LogFollower([str(tmp_path / "server*")], from_start=True, clock=lambda: next(seconds))
    assert read(follower) == first.numbers(1, 20)
    second.write(30)
    assert read(follower) == second.numbers(1, 30)


def test_the_log_of_another_server_does_not_replace_a_file_that_is_gone(tmp_path: Path) -> None:
    log, other = Log(tmp_path, "server-2.log"), Log(tmp_path, "server-1.log")
    log.write(1)
    follower = LogFollower([str(log.path)], from_start=True)
    assert read(follower) == [1]
    positions = saved(follower)
    other.count = 100
    other.write(5)
    log.path.rename(tmp_path.parent / f"{tmp_path.name}-elsewhere")
    log.write(1)
    assert read(LogFollower([str(log.path)], positions=positions)) == [2]


def test_a_file_that_got_the_inode_of_a_deleted_one_is_another_file(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on ext4 and xfs: the new log has the number of the empty one that was followed, and another generation."""
    generation = 7
    monkeypatch.setattr(log_file, "generation", lambda _: generation)
    follower = LogFollower([str(log.path)], from_start=True)
    assert read(follower) == []
    before = saved(follower)
    follower.close()
    log.write(2)  # while nobody reads, and then it is removed
    log.path.write_bytes(b"")
    generation = 8
    log.write(1)
    follower = LogFollower([str(log.path)], positions=before)
    assert (read(follower), lost(follower)) == ([3], 1)
    generation = 0  # a file system that has none any more: the number must do
    again = LogFollower([str(log.path)], positions=before)
    assert (read(again), lost(again)) == ([3], 0)


def test_numbered_files_are_in_the_order_of_most_of_their_times(log: Log) -> None:
    """As after three rotations with a slow writer: server.log.4 and .2 were written to after .3 and .1 were made."""
    names = {number: Path(f"{log.path}.{number}") for number in range(1, 5)}
    for number in (3, 4, 1, 2):
        names[number].write_bytes(b"a line\n")
        log.touch(names[number])
    assert [place.count for place in rotated_files(str(log.path), [])] == [4, 3, 2, 1]
    for number in (1, 2, 3, 4):
        log.touch(names[number])
    assert [place.count for place in rotated_files(str(log.path), [])] == [1, 2, 3, 4]


def test_files_rotated_before_the_log_was_followed_are_not_read(log: Log) -> None:
    log.write(3)
    log.shift()
    log.write(1)
    log.shift()
    follower = LogFollower([str(log.path)])
    log.write(1)
    assert read(follower) == [5]
    log.pack(Path(f"{log.path}.2"))
    log.shift()
    log.write(1)
    assert read(follower) == [6]
    assert lost(follower) == 0


def test_the_log_of_another_server_is_not_a_rotated_file(tmp_path: Path, log: Log) -> None:
    for name in ("server-1.log", "server.log.old", "server.log.bak.1", "other.log.1", "server.logs.1", "server.log.1x"):
        (tmp_path / name).write_bytes(b"another\n")
    assert rotated_files(str(log.path), []) == []


def test_no_order_of_events_loses_or_doubles_a_line() -> None:
    """Ten thousand orders: `python -m fuzz --target files --runs 10000`."""
    assert files.run(100, seed=17, steps=20) == 0
