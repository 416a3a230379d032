"""The log half of the sidecar: follows files, reads their lines into a `ServerState`, and remembers across restarts where it was."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import replace
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, BinaryIO

from sglang_tuning_exporter.collect.log_clock import offset_of
from sglang_tuning_exporter.collect.rotation import READABLE
from sglang_tuning_exporter.collect.state_file import StateFile
from sglang_tuning_exporter.collect.tail import Block, FileStatus, LogFollower
from sglang_tuning_exporter.sglang.clean import clean
from sglang_tuning_exporter.sglang.log.fast_path import BatchRun
from sglang_tuning_exporter.sglang.log.reader import LogReader
from sglang_tuning_exporter.state.saved import counts

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from sglang_tuning_exporter.config import Config
    from sglang_tuning_exporter.sglang.events import Event
    from sglang_tuning_exporter.state.server import ServerState

# A log that grows faster than one poll reads is read on at once.
BEHIND_BYTES = 4 << 20
# Of a log that is far behind, block follows upon block: without a pause whoever is asked for a page may wait for the lock
# until the log has been read, since Python's locks know no order.
FULL_BLOCK_BYTES, YIELD_SECONDS = 128 << 10, 0.0005
# For so long at most the counters wait for what the log held at the start.
FIRST_READ_SECONDS = 600.0
# A file that comes back within this time goes on where it was: a rotation leaves a name empty for a moment.
FORGET_SECONDS = 600.0
STDIN = "-"  # its path: what comes there is news

logger = logging.getLogger("sglang_tuning_exporter")
# What a user can do about a log that is not followed, by `FileStatus.reason`.
_REMEDIES = {
    "permission denied": "let this user read it (chmod, or a group of the exporter's) and enter its directories",
    "is a directory": "name the file in it, or a pattern such as DIR/*.log",
    "is a device": "give a regular file, or - for standard input",
    "is a socket": "give a regular file, or - for standard input",
}


class Logbook:
    """Reads what the followed files gained. One thread polls; what it learns goes into the state under the caller's lock.

    With a state file, positions and counters are saved together after every block and before the lock is let go, and again by `keep` before a counter
    that moved without a line is shown: nobody can have seen a counter that a crash would take back, and nothing is read twice onto the same counter.
    `clock` gives monotonic seconds, the state's own.
    """

    def __init__(
        self, config: Config, stdin: BinaryIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.files: list[FileStatus] = []
        self.last_line_at: float | None = None  # unix seconds
        self.lines: Counter[str] = Counter()  # read, by kind
        self.unrecognised: Counter[str] = Counter()  # lines and keys that no known release prints, by kind
        self._before: Counter[str] = Counter()
        self._unrecognised_before: Counter[str] = Counter()
        self._clock = clock
        self._readers: dict[str, LogReader] = {}
        self._gone: dict[str, float] = {}  # since when no file is followed under a reader's path
        self._state_file = _taken(config.state_file)
        self._saved = self._state_file.load() if self._state_file else {}
        positions = self._saved.get("positions")
        self._follower = LogFollower(
            config.log_file,
            stdin=stdin,
            from_start=config.from_start,
            positions=positions if isinstance(positions, dict) else None,
            clock=clock,
        )
        self._counted_up_to = self._follower.positions()  # what is saved; not `positions()` of this moment
        self._said = self._state_file.problem if self._state_file and not self._state_file.held else ""
        self._said_left_out = 0
        self._dropped_before = self._lost_before = 0  # by files that are not followed any more
        self._kept: object = None  # what had been counted when it was last saved; None: not saved yet
        self._catching_up = True  # until everything has been read that was written before
        self._behind_since: float | None = None  # the end of the first look, where it did not read all of that
        self._offsets: dict[str, float | None] = {}  # by path, while it catches up: unix time less printed time
        self._say_problem()

    @property
    def state_file_problem(self) -> str | None:
        """What is wrong with the state file, empty when nothing; None without one."""
        return None if self._state_file is None else self._state_file.problem

    def restore(self, state: ServerState, now: float) -> None:
        """Put back what had been counted when the positions were saved."""
        self.lines = self._before = _counter(self._saved.get("lines"))
        self.unrecognised = self._unrecognised_before = _counter(self._saved.get("unrecognised"))
        saved, at = self._saved.get("state"), self._saved.get("at")
        if isinstance(saved, dict):
            ago = time.time() - at if isinstance(at, (int, float)) else 0.0
            state.restore(saved, now, max(ago, 0.0) if isfinite(ago) else 0.0)
        self._saved = {}

    @property
    def left_out(self) -> int:
        """How many files the globs match beyond those that are followed at once."""
        return self._follower.left_out

    @property
    def dropped_lines(self) -> int:
        """How many lines were longer than a line may be, in the files followed now and before."""
        return self._dropped_before + sum(status.dropped for status in self.files)

    @property
    def files_lost(self) -> int:
        """How many files of the logs were gone before they had been read to their end, or may have been."""
        return self._lost_before + sum(status.lost for status in self.files)

    def poll(
        self, state: ServerState, lock: AbstractContextManager[Any], stopping: Callable[[], bool] = lambda: False
    ) -> bool:
        """Read what is there now. True when there is so much that it should be called again at once.

        Once `stopping` says so it returns after the block under way.
        """
        size = 0
        for block in self._follower.poll():
            size += len(block.data)
            self._read(block, state, lock)
            if stopping():
                return False
            if len(block.data) >= FULL_BLOCK_BYTES:
                time.sleep(YIELD_SECONDS)
        if size < BEHIND_BYTES:
            self._let_go(state, lock, self._clock())
        self._forget_gone()
        statuses = [self._with_unread(status) for status in self._follower.status()]
        self._say_changes(statuses)
        if self.left_out > 2 * self._said_left_out:
            self._said_left_out = self.left_out
            logger.warning(
                "log: --log-file matches %d files too many: following the %d written last; narrow the glob",
                self.left_out,
                len(statuses),
            )
        followed = {status.path for status in statuses}
        with lock:
            gone = [status for status in self.files if status.path not in followed]
            self._dropped_before += sum(status.dropped for status in gone)
            self._lost_before += sum(status.lost for status in gone)
            self.files = statuses
            if self._is_changed(state):
                self._save_here(state, self._clock())
        if size < BEHIND_BYTES:
            if self._behind_since is not None:
                logger.info("log: finished reading the existing lines")
            self._catching_up, self._behind_since = False, None
            self._offsets.clear()
        elif self._catching_up and self._behind_since is None:
            self._behind_since = self._clock()
            logger.info("log: reading the existing lines; counters appear when that is finished")
        return size >= BEHIND_BYTES

    def _say_changes(self, statuses: list[FileStatus]) -> None:
        before = {status.path: status for status in self.files}
        for status in statuses:
            known = before.get(status.path)
            if known is None or (known.up, known.reason) != (status.up, status.reason):
                level = logging.WARNING if status.reason in _REMEDIES else logging.INFO
                logger.log(level, "log %s: %s", status.path, _described(status))
            if status.unread and not (known is not None and known.unread):
                logger.warning(
                    "log %s: cannot parse lines that look like SGLang's; the first: %s",
                    status.path,
                    status.unread,
                )
            if status.lost > (known.lost if known is not None else 0):
                logger.warning(
                    "log %s: %d rotated files were not read to their end, so their events are missing; the last: %s; "
                    "keep rotated files beside the log (no olddir), uncompressed for one rotation (delaycompress) "
                    "or as %s",
                    status.path,
                    status.lost,
                    clean(status.lost_last),
                    ", ".join(READABLE),
                )

    def _with_unread(self, status: FileStatus) -> FileStatus:
        """Quote the first line of a file none of whose lines can be read."""
        reader = self._readers.get(status.path)
        if reader is None or reader.unread is None or not reader.is_unreadable:
            return status
        return replace(status, unread=clean(reader.unread.decode("utf-8", "replace")))

    @property
    def reads_the_past(self) -> bool:
        """Whether the counters are still those of half a log: what was written before the start is being read, for ten minutes at most."""
        return self._behind_since is not None and self._clock() - self._behind_since < FIRST_READ_SECONDS

    def keep(self, state: ServerState, now: float) -> None:
        """Save what was counted since the last block, if anything: call it under the lock before a counter is shown.

        Positions are those after the last block that was counted. The thread that reads may hold a later one already.
        """
        if self._is_changed(state):
            self._save(state, now)

    def _is_changed(self, state: ServerState) -> bool:
        return self._kept is None or self._kept != state.counted()

    def hand_over(self, state: ServerState, lock: AbstractContextManager[Any]) -> None:
        """Take what still waits for more lines like it, as suspect: the next process could not read those lines again."""
        if self._state_file is not None and self._state_file.held:
            self._let_go(state, lock, inf)

    def close(self) -> None:
        """Let go of the files."""
        self._follower.close()
        if self._state_file is not None:
            self._state_file.release()

    def _read(self, block: Block, state: ServerState, lock: AbstractContextManager[Any]) -> None:
        reader = self._readers.setdefault(block.path, LogReader(strict=True))
        if block.historical:
            # The same reader: a traceback begun, a raw message just printed or the ranks of this server bear on what follows.
            events = self._dated(block.path, _uncounted(reader, block.data))
            with lock:
                now = self._clock()
                for event in events:
                    state.recall(event, now if event.time is None else event.time)
            return
        answered = reader.counts["access"]
        if block.begins:
            reader.begin_file()
        try:
            # Of what was written before, all comes at one moment: that tells nothing.
            events = reader.feed_runs(block.data, None if self._is_past(block.path) else self._clock())
        except Exception:
            self._forget(block.path)  # it stopped amid a line: what it remembers may be wrong
            raise
        self.last_line_at = time.time()
        self._take(block.path, events, state, lock, answered=reader.counts["access"] > answered)

    def _let_go(self, state: ServerState, lock: AbstractContextManager[Any], now: float) -> None:
        """Take what waited for more lines like it, where none have come by `now`."""
        for path, reader in self._readers.items():
            if events := reader.let_go(now):
                self._take(path, events, state, lock, answered=False)

    def _is_past(self, path: str) -> bool:
        return self._catching_up and path != STDIN

    def _take(
        self,
        path: str,
        events: list[Event | BatchRun],
        state: ServerState,
        lock: AbstractContextManager[Any],
        *,
        answered: bool,
    ) -> None:
        behind = self._is_past(path)
        if behind:
            events = self._dated(path, events)
        with lock:
            now = self._clock()
            if not behind and answered:
                state.unconfirmed.heard(now)
            state.observe_all(events, None if behind else now)
            if behind:
                # Counted, and at its own time; but nobody watched, so no rate of the window is made of it.
                state.begin_window(now)
            self.lines = self._before + _sum(reader.counts for reader in self._readers.values())
            self.unrecognised = self._unrecognised_before + _sum(r.unrecognised for r in self._readers.values())
            self._save_here(state, now)

    def _dated(self, path: str, events: list[Event | BatchRun]) -> list[Event | BatchRun]:
        """Move the printed times onto this process's clock: none lies ahead of it, and what prints none happened just now."""
        now = self._clock()
        if path not in self._offsets:
            self._offsets[path] = offset_of(path)
        offset = self._offsets[path]
        ahead = None if offset is None else offset - time.time() + now
        for at, event in enumerate(events):
            moment = now if event.time is None or ahead is None else min(event.time + ahead, now)
            if isinstance(event, BatchRun):
                events[at] = event._replace(time=moment)
            else:
                event.time = moment
        return events

    def _forget_gone(self) -> None:
        """Let go of the readers of files that will not come back, but not of what they counted."""
        now, followed = self._clock(), self._follower.paths()
        for path in list(self._readers):
            if path in followed:
                self._gone.pop(path, None)
            elif now - self._gone.setdefault(path, now) >= FORGET_SECONDS:
                del self._gone[path]
                self._forget(path)

    def _forget(self, path: str) -> None:
        reader = self._readers.pop(path)
        self._before = self._before + Counter(reader.counts)
        self._unrecognised_before = self._unrecognised_before + Counter(reader.unrecognised)

    def _save_here(self, state: ServerState, now: float) -> None:
        """Save that all blocks so far have been counted; only the reading thread can say so."""
        if self._state_file is not None and self._state_file.held:
            self._counted_up_to = self._follower.positions()
            self._save(state, now)

    def _save(self, state: ServerState, now: float) -> None:
        if self._state_file is None or not self._state_file.held:
            return
        saved = self._state_file.save(
            {
                "at": time.time(),
                "positions": self._counted_up_to,
                "lines": self.lines,
                "unrecognised": self.unrecognised,
                "state": state.saved(now),
            }
        )
        self._kept = state.counted() if saved else None
        self._say_problem()

    def _say_problem(self) -> None:
        if self._state_file is not None and self._state_file.problem != self._said:
            self._said = self._state_file.problem
            logger.warning("state file %s: %s", self._state_file.path, self._said or "writable again")


def _described(status: FileStatus) -> str:
    """Say whether a file of the log is followed, why not, and what to do about it."""
    if status.up:
        return "following"
    remedy = _REMEDIES.get(status.reason, "waiting for it" if status.reason == "missing" else "")
    return f"{status.reason}; {remedy}" if remedy else status.reason


def _taken(path: Path | None) -> StateFile | None:
    if path is None:
        return None
    state_file = StateFile(path)
    if not state_file.acquire():
        logger.warning("state file %s: %s; continuing without it", path, state_file.problem)
    return state_file


def _uncounted(reader: LogReader, text: bytes) -> list[Event | BatchRun]:
    tallies = (reader.counts, reader.unrecognised, reader.suspicious)
    before = [dict(tally) for tally in tallies]
    events = reader.feed_runs(text)
    events += reader.let_go(inf)  # or what waits would be counted later
    for tally, figures in zip(tallies, before, strict=True):
        tally.update(figures)
    return events


def _sum(counters: Any) -> Counter[str]:
    total: Counter[str] = Counter()
    for counter in counters:
        total.update(counter)
    return total


def _counter(saved: object) -> Counter[str]:
    return Counter(counts(saved))
