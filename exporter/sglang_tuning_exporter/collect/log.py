"""The log half of the sidecar: follows files, reads their lines into a `ServerState`, keeps positions across restarts."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from math import inf
from typing import Any, BinaryIO

from sglang_tuning_exporter.collect.compression import READABLE
from sglang_tuning_exporter.collect.log_clock import offset_of
from sglang_tuning_exporter.collect.positions import digest
from sglang_tuning_exporter.collect.state_file import StateFile
from sglang_tuning_exporter.collect.tail import Block, FileStatus, LogFollower
from sglang_tuning_exporter.config import Config
from sglang_tuning_exporter.sglang.args.flags import releases
from sglang_tuning_exporter.sglang.clean import clean
from sglang_tuning_exporter.sglang.event_json import is_figure
from sglang_tuning_exporter.sglang.events import Event
from sglang_tuning_exporter.sglang.log.fast_path import BatchRun
from sglang_tuning_exporter.sglang.log.reader import LogReader
from sglang_tuning_exporter.sglang.log.terminal import strip_terminal
from sglang_tuning_exporter.state.saved import counts
from sglang_tuning_exporter.state.server import ServerState

# A log that grows faster than one poll reads is polled again without a pause.
BEHIND_BYTES = 4 << 20
# While a long log is read, the lock is needed all the time. Python's locks are not fair: without a pause a request for a
# page could wait until the whole log has been read.
FULL_BLOCK_BYTES, YIELD_SECONDS = 128 << 10, 0.0005
# The counters are withheld while the existing log is read, but no longer than this.
FIRST_READ_SECONDS = 600.0
# A file that returns within this time continues: during a rotation the name does not exist for a moment.
FORGET_SECONDS = 600.0
STDIN = "-"  # its path; all of its lines are new
_NOT_FOLLOWED = FileStatus("", "not followed yet", 0, 0)

logger = logging.getLogger("sglang_tuning_exporter")


class Logbook:
    """Reads the new lines of the followed files into `state`, under `lock`, which its other users share. One thread polls.

    With a state file, positions and counters are saved together: after every block before the lock is released, and by
    `save_if_changed` before a counter that changed without a line is shown. So a crash never takes back a counter that was shown, and
    no line is counted twice. `clock` returns monotonic seconds, as for the state.
    """

    def __init__(
        self,
        config: Config,
        state: ServerState,
        lock: AbstractContextManager[Any],
        *,
        stdin: BinaryIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state, self._lock = state, lock
        releases()  # the table of arguments is read now: at the first start in the log all descriptors may be in use
        self.files: list[FileStatus] = []
        self.dropped_lines = self.files_lost = 0  # of the files followed now and before
        self.last_line_at: float | None = None  # unix seconds
        self._clock = clock
        self._readers: dict[str, LogReader] = {}
        self._gone: dict[str, float] = {}  # when the file of a reader was last followed
        self._state_file = None if config.state_file is None else StateFile(config.state_file)
        saved = self._state_file.load() if self._state_file is not None and self._state_file.acquire() else {}
        positions = saved.get("positions")
        self._follower = LogFollower(
            config.log_file,
            stdin=stdin,
            from_start=config.from_start,
            positions=positions if isinstance(positions, dict) else None,
            clock=clock,
        )
        self._counted_up_to = self._follower.positions()  # after the last counted block; `positions()` may be ahead
        self._logged_problem = ""
        self._logged_left_out = 0
        self.left_out = self._follower.left_out
        self._saved_counters: object = None  # counters of the last save; None: not saved yet
        self._catching_up = True  # until all lines that existed at the start have been read
        self._behind_since: float | None = None  # end of the first poll, if it did not read all of them
        self._held = _saved_digests(saved.get("held"))  # by path: digests of lines that were held when it was saved
        self._offsets: dict[str, float | None] = {}  # by path, while catching up: unix time minus printed time
        self._restore(saved)
        self._log_problem()

    @property
    def state_file_problem(self) -> str | None:
        """What is wrong with the state file, empty if nothing; None without one."""
        return None if self._state_file is None else self._state_file.problem

    def _restore(self, saved: dict[str, Any]) -> None:
        """Restore the counters that belong to the saved positions."""
        # Read, by kind; and lines and keys that no known release prints, by kind.
        self.lines = self._before = Counter(counts(saved.get("lines")))
        self.unrecognised = self._unrecognised_before = Counter(counts(saved.get("unrecognised")))
        state, at = saved.get("state"), saved.get("at")
        if isinstance(state, dict):
            self._state.restore(state, self._clock(), max(time.time() - at, 0.0) if is_figure(at) else 0.0)

    def poll(self, stopping: Callable[[], bool] = lambda: False) -> bool:
        """Read the new lines. Return True if there are so many that it should be called again at once.

        If `stopping()` is True, return after the current block.
        """
        size = 0
        for block in self._follower.poll():
            size += len(block.data)
            self._read(block)
            if stopping():
                return False
            if len(block.data) >= FULL_BLOCK_BYTES:
                time.sleep(YIELD_SECONDS)
        if size < BEHIND_BYTES:
            self._process_released(self._clock())
        self._forget_gone()
        statuses = [self._with_unread(status) for status in self._follower.status()]
        known = {status.path: status for status in self.files}
        changes = [(known.get(status.path, _NOT_FOLLOWED), status) for status in statuses]
        _log_changes(changes)
        self.left_out = self._follower.left_out
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
            self.files = statuses
            if self._is_changed():
                self._save(self._clock())
        if size < BEHIND_BYTES:
            if self._behind_since is not None:
                logger.info("log: finished reading the existing lines")
            self._catching_up, self._behind_since = False, None
            self._offsets.clear()
            self._held.clear()
        elif self._catching_up and self._behind_since is None:
            self._behind_since = self._clock()
            logger.info("log: reading the existing lines; counters appear when that is finished")
        return size >= BEHIND_BYTES

    def _with_unread(self, status: FileStatus) -> FileStatus:
        """Add the first line that looks like SGLang's if no such line could be parsed."""
        reader = self._readers.get(status.path)
        if reader is None or reader.unread is None or not reader.is_unreadable:
            return status
        return replace(status, unread=clean(reader.unread.decode("utf-8", "replace")))

    @property
    def is_catching_up(self) -> bool:
        """Whether lines from before the start are still being read, so that counters are incomplete; at most ten minutes."""
        return self._behind_since is not None and self._clock() - self._behind_since < FIRST_READ_SECONDS

    def save_if_changed(self, now: float) -> None:
        """Save counters that changed since the last block: call it under the lock before a counter is shown.

        Positions are those after the last counted block. The reading thread may have got another block already.
        """
        if self._is_changed():
            self._save(now, moved=False)

    def _is_changed(self) -> bool:
        return self._saved_counters is None or self._saved_counters != self._state.counted()

    def process_held(self) -> None:
        """Process lines that are still held back, as suspect: after a restart they would not be read again."""
        if self._state_file is not None and self._state_file.held:
            self._process_released(inf)

    def close(self) -> None:
        """Close the files."""
        self._follower.close()
        if self._state_file is not None:
            self._state_file.release()

    def _read(self, block: Block) -> None:
        reader = self._readers.setdefault(block.path, LogReader(strict=True))
        if block.historical:
            past, held = self._without_held(block)
            # The same reader: an open traceback, a raw message or the known ranks affect the lines that follow.
            events = self._with_process_times(block.path, _read_uncounted(reader, past))
            with self._lock:
                now = self._clock()
                for event in events:
                    self._state.recall(event, now if event.time is None else event.time)
            if held:
                lines = dict(reader.counts)
                events = reader.feed_runs(held, now)
                reader.counts.update(lines)  # counted when they were read first
                self._observe(block.path, events)
            return
        answered = reader.counts["access"]
        if block.begins:
            reader.wrapping.begin_file()
        try:
            # Lines from before the start all arrive at once, so their arrival time means nothing.
            events = reader.feed_runs(block.data, None if self._is_catching_up(block.path) else self._clock())
        except Exception:
            self._forget(block.path)  # it stopped inside a line: its state may be wrong
            raise
        self.last_line_at = time.time()
        self._observe(block.path, events, answered=reader.counts["access"] > answered)

    def _without_held(self, block: Block) -> tuple[bytes, bytes]:
        """Return the lines of a historical block that were processed before the restart, and those that were still held."""
        digests = self._held.get(block.path)
        if not digests:
            return block.data, b""
        lines = block.data.splitlines(keepends=True)
        held = [line for line in lines if _digest_of_line(line) in digests]
        digests.difference_update(map(_digest_of_line, held))
        return b"".join(line for line in lines if line not in held), b"".join(held)

    def _process_released(self, now: float) -> None:
        """Process lines that were held back too long at `now`."""
        for path, reader in self._readers.items():
            if events := reader.release_held(now):
                self._observe(path, events)

    def _is_catching_up(self, path: str) -> bool:
        return self._catching_up and path != STDIN

    def _observe(self, path: str, events: list[Event | BatchRun], *, answered: bool = False) -> None:
        """Update the state; `answered`: the server answered an HTTP request among these lines."""
        behind = self._is_catching_up(path)
        if behind:
            events = self._with_process_times(path, events)
        with self._lock:
            now = self._clock()
            if not behind and answered:
                self._state.unconfirmed.heard(now)
            self._state.observe_all(events, None if behind else now)
            if behind:
                # Counted at their own times; but the exporter did not run then, so they give no rate for the window.
                self._state.begin_window(now)
            self.lines = sum((Counter(r.counts) for r in self._readers.values()), self._before)
            self.unrecognised = sum(
                (Counter(r.unrecognised) for r in self._readers.values()), self._unrecognised_before
            )
            self._save(now)

    def _with_process_times(self, path: str, events: list[Event | BatchRun]) -> list[Event | BatchRun]:
        """Convert printed times to this process's clock, at most now; lines without a time happened now."""
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
        """Drop the readers of files that do not come back; keep their counts."""
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

    def _save(self, now: float, *, moved: bool = True) -> None:
        """Save; `moved`: with the present positions, as only the reading thread may, after it has counted all blocks."""
        if self._state_file is None or not self._state_file.held:
            return
        if moved:
            self._counted_up_to = self._follower.positions()
        saved = self._state_file.save(
            {
                "at": time.time(),
                "positions": self._counted_up_to,
                "lines": self.lines,
                "unrecognised": self.unrecognised,
                "held": self._digests_of_held(),
                "state": self._state.saved(now),
            }
        )
        self._saved_counters = self._state.counted() if saved else None
        self._log_problem()

    def _digests_of_held(self) -> dict[str, list[str]]:
        """Return digests of the lines that are read and not processed yet: after a crash they are read again."""
        held = {path: sorted(digests) for path, digests in self._held.items() if digests}
        for path, reader in self._readers.items():
            if lines := reader.wrapping.held:
                held[path] = held.get(path, []) + [digest(line) for line in lines]
        return held

    def _log_problem(self) -> None:
        file = self._state_file
        if file is not None and file.problem != self._logged_problem:
            self._logged_problem = file.problem
            without = "" if file.held else "; continuing without it"
            logger.warning("state file %s: %s%s", file.path, file.problem or "writable again", without)


def _log_changes(changes: list[tuple[FileStatus, FileStatus]]) -> None:
    for before, now in changes:
        if before.reason != now.reason:
            level = logging.INFO if now.reason in ("", "missing", "ended") else logging.WARNING
            logger.log(level, "log %s: %s", now.path, now.words)
        if now.unread and not before.unread:
            logger.warning("log %s: cannot parse lines that look like SGLang's; the first: %s", now.path, now.unread)
        if now.lost > before.lost:
            logger.warning(
                "log %s: %d rotated files were not read to their end, so their events are missing; the last: %s; "
                "keep rotated files beside the log or in a directory beside it, uncompressed for one rotation (delaycompress) "
                "or as %s",
                now.path,
                now.lost,
                clean(now.last_lost),
                ", ".join(READABLE),
            )


def _read_uncounted(reader: LogReader, text: bytes) -> list[Event | BatchRun]:
    tallies = (reader.counts, reader.unrecognised)
    before = [dict(tally) for tally in tallies]
    events = reader.feed_runs(text)
    events += reader.release_held(inf)  # else held lines would be counted later
    for tally, figures in zip(tallies, before, strict=True):
        tally.update(figures)
    return events


def _digest_of_line(line: bytes) -> str:
    return digest(strip_terminal(line.removesuffix(b"\n")))


def _saved_digests(saved: object) -> dict[str, set[str]]:
    """Return sets of texts by name from a state file, which may be damaged."""
    found = saved.items() if isinstance(saved, dict) else ()
    return {name: {each for each in texts if isinstance(each, str)} for name, texts in found if isinstance(texts, list)}
