"""The log half of the sidecar: follows files, reads their lines into a `Watch`, keeps positions across restarts."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import TimeoutError as NoAnswerError
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, BinaryIO

from sglang_tuning_exporter.collect._log_file import STDIN
from sglang_tuning_exporter.collect._rotation import opened
from sglang_tuning_exporter.collect._state_file import StateFile
from sglang_tuning_exporter.collect.follower import NO_ANSWER, Block, FileStatus, LogFollower
from sglang_tuning_exporter.config import Config, files
from sglang_tuning_exporter.core import inputs, lines
from sglang_tuning_exporter.core.events import Event, is_count, public
from sglang_tuning_exporter.core.watch import READ_SECONDS, UNKNOWN_AGE, Watch
from sglang_tuning_exporter.sglang import flags
from sglang_tuning_exporter.sglang.clean import clean

# A log that grows faster than one poll reads is polled again without a pause.
BEHIND_BYTES = 4 << 20
# While a long log is read, the lock is needed all the time. Python's locks are not fair: without a pause a request for
# a page could wait until the whole log has been read.
FULL_BLOCK_BYTES, YIELD_SECONDS = 128 << 10, 0.0005
# The counters are withheld while the existing log is read, but no longer than this.
FIRST_READ_SECONDS = 600.0
# A file that returns within this time continues: during a rotation the name does not exist for a moment.
FORGET_SECONDS = 600.0
# A look that gets no answer from its file system for so long: the log is not followed any more, whatever it was at the
# last look.
LATE_SECONDS = 30.0
UNFINISHED_SECONDS = 2.0  # after which arguments that may go on in the next line are taken as they are
# A server prints local time, mostly without a zone: the last lines of its file say what to add.
LOOK_BACK_BYTES = 64 << 10
LINES_TRIED = 256  # the lines of a traceback have no time
_NOT_FOLLOWED = FileStatus("", "not followed yet", 0, 0)

logger = logging.getLogger("sglang_tuning_exporter")


class Logbook:
    """Reads the new lines of the followed files into `watch`, under `lock`, which its other users share.

    One thread polls.

    With a state file, positions and counters are saved together: after every block before the lock is released, and by
    `save_if_changed` before a counter that changed without a line is shown. So a crash never takes back a counter that
    was shown, and no line is counted twice. `clock` returns unix seconds that never go back, as for the watch.
    """

    def __init__(
        self,
        config: Config,
        watch: Watch,
        lock: AbstractContextManager[Any],
        *,
        clock: Callable[[], float],
        stdin: BinaryIO | None = None,
    ) -> None:
        self._watch, self._lock, self._clock = watch, lock, clock
        # the table of arguments is read now: at the first start in the log all descriptors may be in use
        flags.releases()
        self._files: list[FileStatus] = []  # at the last look
        # When the present look began, or last read a block; None between two looks.
        self._looks_since: float | None = None
        self.dropped_lines = self.files_lost = 0  # of the files followed now and before
        self.last_line_at: float | None = None  # unix seconds
        self._readers: dict[str, lines.Reader] = {}
        self._gone: dict[str, float] = {}  # when the file of a reader was last followed
        self._read_at: dict[str, float] = {}  # when a reader last got a line
        self._state_file = None if config.state_file is None else StateFile(config.state_file)
        saved = self._state_file.load() if self._state_file is not None and self._state_file.acquire() else {}
        positions = saved.get("positions")
        self._patterns = config.log_file
        # What was read and counted; the follower's own `positions()` may be a block ahead.
        self._counted_up_to: dict[str, object] = positions if isinstance(positions, dict) else {}
        self._follower: LogFollower | None = None
        self._opening = files.begin(
            ("log", id(self)),
            partial(
                LogFollower,
                config.log_file,
                stdin=stdin,
                from_start=config.from_start,
                positions=self._counted_up_to,
                clock=clock,
            ),
        )[1]
        self._logged_problem = ""
        self._logged_left_out = 0
        self.left_out = 0
        self._saved_counters: object = None  # counters of the last save; None: not saved yet
        self._catching_up = True  # until all lines that existed at the start have been read
        self._behind_since: float | None = None  # when the first full block of them was read
        self._says_behind = False  # in the exporter's own log
        self._offsets: dict[str, float | None] = {}  # by path: unix time minus printed time
        # Read, by kind; and lines and keys that no known release prints, by kind.
        self.lines, self.unrecognised = _counts(saved.get("lines")), _counts(saved.get("unrecognised"))
        self._understood: set[str] = set()  # the files of which a line could be read
        if "watch" in saved:
            watch.restore(saved["watch"], clock(), _age(saved.get("at")))
        self._log_problem()
        with suppress(NoAnswerError):  # then the first look waits for it
            self._opened(files.SECONDS)

    def _opened(self, seconds: float | None = None) -> LogFollower:
        """Return the follower, which has opened its files.

        Raise `NoAnswerError` where their file system takes longer than so many seconds.
        """
        if self._follower is None:
            self._follower = self._opening.result(seconds)
            self._counted_up_to = self._follower.positions()
            self.left_out = self._follower.left_out
        return self._follower

    @property
    def files(self) -> list[FileStatus]:
        """What is followed, as at the last look; where the present one gets no answer, each file says so."""
        if not self.is_late(LATE_SECONDS):
            return self._files
        known = self._files or [FileStatus(pattern, "", 0, 0) for pattern in self._patterns]
        return [replace(status, reason=NO_ANSWER) for status in known]

    def is_late(self, seconds: float) -> bool:
        """Whether the present look has got no answer from a file system for so long."""
        since = self._looks_since
        return since is not None and self._clock() - since >= seconds

    @property
    def state_file_problem(self) -> str | None:
        """What is wrong with the state file, empty if nothing; None without one."""
        return None if self._state_file is None else self._state_file.problem

    def poll(self, stopping: Callable[[], bool] = lambda: False) -> bool:
        """Read the new lines. Return True if there are so many that it should be called again at once.

        If `stopping()` is True, return after the current block.
        """
        self._looks_since = self._clock()
        try:
            return self._look(stopping)
        finally:
            self._looks_since = None

    def _look(self, stopping: Callable[[], bool]) -> bool:
        size, begun = 0, self._clock()
        for block in self._opened().poll():
            size += len(block.data)
            if self._catching_up and self._behind_since is None and len(block.data) >= FULL_BLOCK_BYTES:
                self._behind_since = self._clock()  # before its lines count: more are to come
            self._read(block)
            self._looks_since = self._clock()
            if stopping():
                return False
            if len(block.data) >= FULL_BLOCK_BYTES:
                time.sleep(YIELD_SECONDS)
        if size < BEHIND_BYTES:
            self._end_lines(self._clock() - UNFINISHED_SECONDS)
        self._forget_gone()
        self._take_status()
        if size < BEHIND_BYTES:
            self._watch.read_to = begun
            if self._says_behind:
                logger.info("log: finished reading the existing lines")
            self._catching_up, self._behind_since, self._says_behind = False, None, False
        elif self._catching_up and not self._says_behind:
            self._says_behind = True
            logger.info("log: reading the existing lines; counters appear when that is finished")
        return size >= BEHIND_BYTES

    def _take_status(self) -> None:
        """Note what the files are now, and log what has changed."""
        follower = self._opened()
        statuses = [self._with_unread(status) for status in follower.status()]
        known = {status.path: status for status in self._files}
        changes = [(known.get(status.path, _NOT_FOLLOWED), status) for status in statuses]
        _log_changes(changes)
        self.left_out = follower.left_out
        if self.left_out > 2 * self._logged_left_out:
            self._logged_left_out = self.left_out
            logger.warning(
                "log: --log-file matches %d files too many: following the %d written last; narrow the glob",
                self.left_out,
                len(statuses),
            )
        with self._lock:
            self.dropped_lines += sum(now.dropped - before.dropped for before, now in changes)
            self.files_lost += sum(now.lost - before.lost for before, now in changes)
            self._files = statuses
            if self._saved_counters is None:  # so that what is written from now on is read after a crash
                self._save(self._clock())

    def _with_unread(self, status: FileStatus) -> FileStatus:
        """Add the first line that looks like SGLang's if no such line could be read."""
        reader = self._readers.get(status.path)
        unread = b"" if reader is None or status.path in self._understood else reader.unread
        return replace(status, unread=clean(unread.decode("utf-8", "replace"))) if unread else status

    @property
    def is_catching_up(self) -> bool:
        """Whether lines from before the start are still being read, so that counters are incomplete; at most ten
        minutes.
        """
        return self._behind_since is not None and self._clock() - self._behind_since < FIRST_READ_SECONDS

    def save_if_changed(self, now: float) -> None:
        """Save counters that changed since the last block: call it under the lock before a counter is shown.

        Positions are those after the last counted block. The reading thread may have got another block already.
        """
        if self._is_changed():
            self._save(now, moved=False)

    def _is_changed(self) -> bool:
        return self._saved_counters is None or self._saved_counters != self._watch.counts()

    def end_lines(self) -> None:
        """Take arguments that may go on in the next line as they are: after a restart the
        line would not be read again.
        """
        self._end_lines(self._clock())

    def close(self) -> None:
        """Close the files."""
        if self._follower is not None and self._looks_since is None:  # else a file system that hangs is not waited for
            self._follower.close()
        if self._state_file is not None:
            self._state_file.release()

    def _read(self, block: Block) -> None:
        reader = self._readers.setdefault(block.path, lines.Reader())
        if block.historical:
            events = self._at_their_times(
                block.path, (e for line in block.data.splitlines() for e in reader.read(line))
            )
            reader.lines.clear()  # counted before the restart, or not of this exporter's time
            reader.unreadable.clear()
            with self._lock:
                self._watch.recall(events, self._clock())
            return
        if block.begins:
            reader.wrapping.cut.clear()  # the rest of a line that a runtime cut was in a file that is gone
        try:
            events = [event for line in block.data.splitlines() for event in reader.read(line)]
        except Exception:
            self._forget(block.path)  # it stopped inside a line: its state may be wrong
            raise
        self.last_line_at = time.time()
        self._read_at[block.path] = self._clock()
        with self._lock:
            self._take(block.path, events)
            if unreadable := reader.unreadable.total():
                self._watch.drift(unreadable, self._clock())
            self._count(block.path)
            self._save(self._clock())

    def _count(self, path: str) -> None:
        """Count what a reader has read since the last time."""
        reader = self._readers[path]
        if reader.lines.keys() - {"other", "cut"}:
            self._understood.add(path)
        for counted, tally in ((self.lines, reader.lines), (self.unrecognised, reader.unreadable)):
            counted.update(tally)
            tally.clear()

    def _take(self, path: str, events: list[Event]) -> None:
        """Let the watch take events, under the lock: those of a log that existed at the start at their own times,
        others as they come.
        """
        for event in map(public, events):
            if event.kind == "words":  # where in the file it stands is not known
                event.file = path
                del event.figures["line"]
        behind, now = self._catching_up and path != STDIN, self._clock()  # all lines of standard input are new
        for event in self._at_their_times(path, events) if behind else events:
            if not behind:
                event.time = self._live(path, event.time, now)
            self._watch.take_line(event, past=behind)

    def _live(self, path: str, printed: float | None, now: float) -> float:
        """Return when a line that is read now was printed, by this clock: the line that waited least shows what to add
        to printed times.
        """
        if printed is None:
            return now
        offset = self._offsets.get(path)
        at = now if offset is None else printed + offset
        if not now - READ_SECONDS <= at <= now:  # a clock was set, the line is read late, or it is text of others
            at = now
        self._offsets[path] = at - printed
        return at

    def _at_their_times(self, path: str, events: Iterable[Event]) -> list[Event]:
        """Convert printed times to the clock's, at most now; lines without a time happened now."""
        if path not in self._offsets:
            self._offsets[path] = offset_of(path)
        offset, now = self._offsets[path], self._clock()
        found = [*map(public, events)]
        for event in found:
            event.time = now if event.time is None or offset is None else min(event.time + offset, now)
        return found

    def _end_lines(self, before: float) -> None:
        """Take what waits for a further line, of readers that had none since `before`."""
        for path, reader in self._readers.items():
            if self._read_at.get(path, before) <= before and (events := list(reader.end())):
                with self._lock:
                    self._take(path, events)

    def _forget_gone(self) -> None:
        """Drop the readers of files that do not come back; keep their counts."""
        now, followed = self._clock(), self._opened().paths()
        for path in list(self._readers):
            if path in followed:
                self._gone.pop(path, None)
            elif now - self._gone.setdefault(path, now) >= FORGET_SECONDS:
                del self._gone[path]
                self._forget(path)

    def _forget(self, path: str) -> None:
        with self._lock:
            self._count(path)
        del self._readers[path]
        self._read_at.pop(path, None)
        self._understood.discard(path)
        self._offsets.pop(path, None)

    def _save(self, now: float, *, moved: bool = True) -> None:
        """Save; `moved`: with the present positions, as only the reading thread may, after
        it has counted all blocks.
        """
        if self._state_file is None or not self._state_file.is_usable():
            self._log_problem()
            return
        if moved:
            self._counted_up_to = self._opened().positions()
        is_saved = self._state_file.save(
            {
                "at": time.time(),
                "positions": self._counted_up_to,
                "lines": self.lines,
                "unrecognised": self.unrecognised,
                "watch": self._watch.saved(now),
            }
        )
        self._saved_counters = self._watch.counts() if is_saved else None
        self._log_problem()

    def _log_problem(self) -> None:
        file = self._state_file
        if file is not None and file.problem != self._logged_problem:
            self._logged_problem = file.problem
            without = "" if file.held else "; continuing without it"
            logger.warning("state file %s: %s%s", clean(str(file.path)), file.problem or "writable again", without)


def _log_changes(changes: list[tuple[FileStatus, FileStatus]]) -> None:
    for before, now in changes:
        path = clean(now.path)
        if before.reason != now.reason:
            level = logging.INFO if now.reason in ("", "missing", "ended") else logging.WARNING
            logger.log(level, "log %s: %s", path, now.words)
        if now.unread and not before.unread:
            logger.warning("log %s: cannot parse lines that look like SGLang's; the first: %s", path, now.unread)
        if now.lost > before.lost:
            logger.warning(
                "log %s: %d rotated files were not read to their end, so their events are missing; the last: %s; keep"
                " rotated files beside the log or in a directory beside it, uncompressed for one rotation"
                " (delaycompress) or as %s",
                path,
                now.lost,
                clean(now.last_lost),
                ", ".join(inputs.OPENERS),
            )


def _age(at: object) -> float:
    """Return how many seconds ago a state file was saved; longer than decisions are kept where that is not known, as of
    one from the future.
    """
    age = time.time() - float(at) if isinstance(at, int | float) and is_count(at) else -inf
    return age if age >= 0 else UNKNOWN_AGE + 1.0


def _counts(saved: object) -> Counter[str]:
    """Return counts by name from a state file, which may be damaged."""
    found = saved.items() if isinstance(saved, dict) else ()
    return Counter({str(name): int(count) for name, count in found if is_count(count)})


def offset_of(path: str) -> float | None:
    """Return the seconds to add to printed times of this file; None if its last lines have none.

    The last line was printed at the time of the last modification.
    """
    with suppress(OSError), opened(path) as fd:
        status = os.fstat(fd)
        printed = last_printed(os.pread(fd, LOOK_BACK_BYTES, max(status.st_size - LOOK_BACK_BYTES, 0)))
        return None if printed is None else status.st_mtime - printed
    return None


def last_printed(text: bytes) -> float | None:
    """Return the time of the last line of `text` that has one; None where it has no date."""
    reader = lines.Reader()
    for line in text.splitlines()[-LINES_TRIED:]:
        reader.read(line)
    return reader.time if reader.time is not None and reader.time >= lines.FIRST_DATED else None
