"""The files of a log under random events, compared with a reference that tracks every line.

A writer writes whole lines and halves. Its log is rotated by rename or by copytruncate, compressed, deleted, truncated
or removed. The follower polls often or seldom, stops, is killed within a poll, and continues from its last save. It
must return each written line once and in order. Lines may be missing only if their file was gone before it was read,
and the follower must count that file as lost.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sglang_tuning_exporter.collect import _log_file as log_file
from sglang_tuning_exporter.collect.follower import LogFollower

SECOND = 1_000_000_000


class Files(RuleBasedStateMachine):
    """One log, its writer, its rotation, its follower."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="log-files-"))
        self.log = self.path = self.folder / "server.log"  # the file that has the name now, and the followed path
        self.now = 1_773_832_925  # seconds; the files' times follow it
        self.files: dict[Path, set[int]] = {}  # by where they are now, the numbers of the lines with a part in it
        self.lines: list[bytes] = []  # complete lines; an incomplete one counts when its writer leaves the file
        self.half = b""  # the incomplete line
        self.risky: set[int] = set()  # lines with a part that was gone before it was read
        self.unknowable: set[int] = set()  # those of them whose loss cannot be seen in any file
        self.seen_lines: list[bytes] = []
        self.lost = self.gone = 0
        self.empty = False  # a file had no text when it was compressed or last saved, so nothing identifies it
        self.follower: LogFollower | None = None
        self.saved: tuple[dict[str, Any] | None, int] = (None, 0)
        self.older: tuple[dict[str, Any] | None, int] = (None, 0)
        self.sizes = (log_file.CHUNK, log_file.BUDGET)
        self.writer: Any = None

    @initialize(
        names=st.sampled_from(["number", "date", "kubelet", "svlogd"]),
        regime=st.sampled_from(["rename", "copytruncate", "link"]),
        keeps_times=st.booleans(),
        olddir=st.booleans(),
        budget=st.sampled_from([(256 << 10, 8 << 20), (97, 300), (300, 300)]),
    )
    def begin(self, names: str, regime: str, *, keeps_times: bool, olddir: bool, budget: tuple[int, int]) -> None:
        """An empty log, a writer that has it open, and a follower; `olddir`: rotated files
        go to a directory beside it.
        """
        self.packed: set[Path] = set()
        self.rotated_to = self.folder / "old" if olddir and regime != "link" and names != "svlogd" else self.folder
        self.rotated_to.mkdir(exist_ok=True)
        self.names, self.regime = names, regime
        if self.names == "svlogd":
            self.regime = "rename"
            self.log = self.path = self.folder / "current"
        if self.regime == "link":
            self.names = "date"
            self._lead_to(self._dated())
        # Numbered files are compressed by logrotate or gzip, which keep times.
        self.keeps_times = keeps_times or names == "number"
        log_file.CHUNK, log_file.BUDGET = budget
        self._open()
        self._touched_folders()
        self.start()
        self.older = self.saved  # before the first save there is no past

    # The writer

    def _open(self) -> None:
        if self.writer is not None:
            self.writer.close()
        self.at = self.log
        self.writer = self.log.open("ab", buffering=0)
        self.files.setdefault(self.log, set())
        self._touched(self.log)

    def _touched(self, path: Path) -> None:
        os.utime(path, ns=(self.now * SECOND, self.now * SECOND))

    def _touched_folders(self) -> None:
        for folder in {self.folder, self.rotated_to}:
            self._touched(folder)

    def _put(self, text: bytes) -> None:
        self.writer.write(text)
        self._touched(self.at)

    def _passes(self, seconds: int = 1) -> None:
        self.now += seconds

    def _number(self) -> int:
        return len(self.lines)

    @rule(count=st.integers(1, 12), length=st.sampled_from([0, 5, 60, 300]))
    def write(self, count: int, length: int) -> None:
        """Write whole lines; the first one completes a half line."""
        self._passes()
        for _ in range(count):
            self.files[self.at].add(self._number())
            rest = b"x" * length + b"]\n"
            begun, self.half = self.half or self._begun(), b""
            self._put((rest if begun.endswith(b"~") else begun + rest) if begun else rest)
            self.lines.append(begun.removesuffix(b"~") + rest)

    def _begun(self) -> bytes:
        return b"[2026-03-18 11:22:05] line %08d [" % self._number()

    @precondition(lambda self: not self.half)
    @rule(length=st.sampled_from([0, 40, 300]))
    def write_half(self, length: int) -> None:
        """Write the beginning of a line."""
        self._passes()
        text = self._begun() + b"h" * length
        self.files[self.at].add(self._number())
        self._put(text)
        self.half = text + b"~"  # written already

    def _left(self) -> None:
        """The writer leaves the file: its incomplete line counts as a line."""
        if self.half:
            self.lines.append(self.half.removesuffix(b"~") + b"\n")
            self.half = b""

    # The rotation

    def _rotated(self) -> list[Path]:
        """The rotated files, the oldest first."""
        found = [path for path in self.files if path != self.log]
        if self.names == "number":
            return sorted(found, key=lambda path: -int(path.name.split(".")[2]))
        return sorted(found)

    def _move(self, path: Path, to: Path) -> None:
        path.rename(to)
        self.files[to] = self.files.pop(path)
        if path in self.packed:
            self.packed = self.packed - {path} | {to}
        if self.at == path:
            self.at = to

    def _dated(self) -> Path:
        return self.folder / f"server.{self.now}.log"

    def _lead_to(self, file: Path) -> None:
        """Let the link lead to another file, as rotatelogs and cronolog do."""
        self.log = file
        temporary = self.folder / "link"
        temporary.symlink_to(file)
        temporary.replace(self.path)

    def _next_name(self) -> Path:
        stamp = str(self.now)
        if self.names == "svlogd":
            return self.folder / f"@40000000{self.now:08x}{self.now * 2654435761 % (1 << 32):08x}.s"
        if self.names == "number":
            for path in self._rotated():
                _, _, number, *packed = path.name.split(".")
                self._move(path, path.with_name(".".join(["server.log", str(int(number) + 1), *packed])))
            return self.rotated_to / "server.log.1"
        return self.rotated_to / (f"server.log-{stamp}" if self.names == "date" else f"server.log.20260318-{stamp}")

    @rule(compress=st.sampled_from(["no", "no", "others", "now"]), at_once=st.booleans())
    def rotate(self, compress: str, *, at_once: bool) -> None:
        """Rotate as logrotate, Docker and the kubelet do; with delaycompress the older files are compressed."""
        if not self.log.exists():
            return
        self._passes()
        if self.rotated_to != self.folder and not min(self.saved[1], self.older[1]):
            self.empty = True  # nothing was read that could be found again
        if compress == "others":
            self._pack([path for path in self._rotated() if path != self.at])
        if self.regime == "copytruncate":
            self._copy_and_truncate(self._next_name())
        else:
            self._begin_file()
            if at_once:
                self._reopen()
        if compress == "now":
            self._pack([path for path in self._rotated() if path != self.at])

    def _begin_file(self) -> None:
        """Rename the log, or move the link that leads to it, and make an empty one."""
        if self.regime == "link":
            self._lead_to(self._dated())
        else:
            self._move(self.log, self._next_name())
            self._passes()
        self.files[self.log] = set()
        self.log.touch()
        self._touched(self.log)

    def _copy_and_truncate(self, copy: Path) -> None:
        shutil.copyfile(self.log, copy)
        self._touched(copy)
        os.truncate(self.log, 0)
        self._touched(self.log)
        self.files[copy], self.files[self.log] = self.files[self.log], set()
        if self.half:  # it goes on in the truncated file
            self.files[self.log].add(self._number())

    def _reopen(self) -> None:
        self._left()
        self._open()

    @precondition(lambda self: self.at != self.log and self.log.exists())
    @rule()
    def reopens_late(self) -> None:
        """The writer gets the signal of the rotation late."""
        self._passes()
        self._reopen()

    def _pack(self, paths: list[Path]) -> None:
        for path in paths:
            if path in self.packed:
                continue
            # A processor of svlogd leaves the name as it is.
            packed = path if self.names == "svlogd" else path.with_name(path.name + ".gz")
            modified, empty = path.stat().st_mtime_ns, not path.stat().st_size
            text = gzip.compress(path.read_bytes())
            path.unlink()
            packed.write_bytes(text)
            if self.keeps_times:
                os.utime(packed, ns=(modified, modified))
            else:
                self._passes()
                self._touched(packed)
            self.empty |= empty
            self.files[packed] = self.files.pop(path)
            self.packed.add(packed)

    @rule(count=st.integers(1, 3))
    def delete_oldest(self, count: int) -> None:
        """As `rotate 3` and `max-file` do."""
        for path in self._rotated()[:count]:
            if path != self.at:
                self._passes()
                self._gone(path)
                # The rest of a line that began in a copy may be joined to the first line of a later file.
                later = [
                    self.files[each] for each in [*self._rotated(), self.log] if each != path and each in self.files
                ]
                glued = {min(parts, default=self._number()) for parts in later if self.regime == "copytruncate"}
                self.risky |= glued
                self.unknowable |= glued
                path.unlink()
                del self.files[path]

    @precondition(lambda self: self.at == self.log)
    @rule(cut=st.sampled_from(["remove", "truncate"]))
    def gone_by_hand(self, cut: str) -> None:
        """An operator removes the log and starts the server again, or empties it."""
        if self.regime == "copytruncate":
            cut = "truncate"  # if such a log is removed, nothing connects the copies to the new one
        self._passes()
        self.unknowable |= self._gone(self.log)
        if cut == "remove":
            self.log.unlink()
            del self.files[self.log]
            self._reopen()
        else:
            os.truncate(self.log, 0)
            self._touched(self.log)
            self.files[self.log] = set()
            # Nothing shows whether the writer continues inside a line: the next line may be joined to the rest of it.
            self.risky |= {self._number(), self._number() + bool(self.half)}
            self.unknowable |= self.risky
            if self.half:
                self.files[self.log].add(self._number())

    def _gone(self, path: Path) -> set[int]:
        self.gone += 1
        known = {*self.seen_lines[: min(self.saved[1], self.older[1])]}
        lines = self.files[path]
        gone = {number for number in lines if number >= len(self.lines) or self.lines[number] not in known}
        self.risky |= gone
        return gone

    # The follower

    def start(self) -> None:
        """Start a follower from the last save."""
        positions, count = self.saved
        del self.seen_lines[count:]
        self.follower = LogFollower(
            [str(self.path)], positions=None if positions is None else json.loads(json.dumps(positions)),
            from_start=True,
            clock=lambda: float(self.now),
        )  # fmt: skip
        self._save()

    def _save(self) -> None:
        assert self.follower is not None
        self.older, self.saved = self.saved, (self.follower.positions(), len(self.seen_lines))

    @precondition(lambda self: self.follower is not None)
    @rule(seconds=st.sampled_from([0, 1, 4, 20, 100]), blocks=st.sampled_from([1, 2, 1000]))
    def look(self, seconds: int, blocks: int) -> None:
        """Poll, perhaps not to the end; blocks and positions are saved together."""
        self._passes(seconds)
        assert self.follower is not None
        self._touched_folders()
        for number, block in enumerate(self.follower.poll()):
            if not block.historical:
                self.seen_lines += block.data.splitlines(keepends=True)
            self._save()
            if number + 1 >= blocks:
                return
        self._save()

    @precondition(lambda self: self.follower is not None)
    @rule(how=st.sampled_from(["stop", "kill", "kill, and the last save is missing"]))
    def end(self, how: str) -> None:
        """End the follower; only the last save remains."""
        assert self.follower is not None
        self.lost += sum(status.lost for status in self.follower.status())
        self.follower.close()
        self.follower = None
        if how.endswith("missing"):
            self.saved = self.older
        marks = self.saved[0]["files"] if self.saved[0] is not None else []
        self.empty |= any(not mark["head_bytes"] for mark in marks)

    @precondition(lambda self: self.follower is None)
    @rule(seconds=st.sampled_from([0, 60]))
    def restart(self, seconds: int) -> None:
        """The exporter is started again."""
        self._passes(seconds)
        self.start()

    @invariant()
    def nothing_is_read_twice(self) -> None:
        """No complete line is returned twice."""
        twice = [line for line, times in Counter(self.seen_lines).items() if times > 1 and line.startswith(b"[2026")]
        assert not twice, twice

    def teardown(self) -> None:
        """Read all that is left and compare."""
        try:
            if self.writer is not None:
                self._finish()
        finally:
            log_file.CHUNK, log_file.BUDGET = self.sizes
            if self.follower is not None:
                self.follower.close()
            if self.writer is not None:
                self.writer.close()
            shutil.rmtree(self.folder)

    def _finish(self) -> None:
        if self.at != self.log and self.log.exists():
            self._reopen()
        self.write(1, 0)
        if self.follower is None:
            self.restart(1)
        quiet = 0
        while quiet < 3:
            before = len(self.seen_lines)
            self.look(1, 1000)
            quiet = quiet + 1 if len(self.seen_lines) == before else 0
        assert self.follower is not None
        lost = self.lost + sum(status.lost for status in self.follower.status())
        seen_lines, written = set(self.seen_lines), set(self.lines)
        missing = [number for number, line in enumerate(self.lines) if line not in seen_lines]
        if (self.rotated_to != self.folder or self.regime == "link") and (self.gone or self.empty):
            # A directory beside the log, or the files of a link, are recognised by a file that was read before, with
            # text.
            self.risky |= set(missing)
            self.unknowable |= set(missing)
        assert set(missing) <= self.risky, ("missing", [self.lines[n] for n in missing if n not in self.risky])
        # If a copy was deleted before the next poll, nothing shows that it existed.
        known = self.regime == "rename"
        unsaid = [self.lines[number] for number in missing if known and number not in self.unknowable]
        assert lost or not unsaid, ("not said", unsaid)
        assert self.gone or self.empty or not lost, "said to be lost, and all of it is there"
        strange = [line for line in self.seen_lines if line not in written]
        assert not strange or self.risky, ("never written", strange)
        order = [line for line in self.seen_lines if line in written]
        assert order == [line for line in self.lines if line in seen_lines], "out of order"
        self.nothing_is_read_twice()


def run(runs: int, seed: int, steps: int = 30) -> int:
    """Try this many sequences of events. Return 0, or 1 if one fails."""
    every = hypothesis.settings(
        max_examples=runs, stateful_step_count=steps, deadline=None, database=None, report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    try:
        hypothesis.seed(seed)(run_state_machine_as_test)(Files, settings=every)
    except Exception as error:  # noqa: BLE001 - any exception is what is looked for
        print(f"files: found something, seed {seed}\n{error!r}", *getattr(error, "__notes__", ()), sep="\n")
        return 1
    print(f"files: {runs} runs of {steps} steps, nothing found, seed {seed}", flush=True)
    return 0
