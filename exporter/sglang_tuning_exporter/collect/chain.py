"""The files of one log, oldest first: the file with the log's name, and the rotated files before it.

Every file is read to its end before the next one. Each poll checks whether the name belongs to another file or the file
was rewritten. Then the files in between are looked for in the same directory: by inode, by text, and by order.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from sglang_tuning_exporter.collect import positions, rotation
from sglang_tuning_exporter.collect.compression import DAMAGE
from sglang_tuning_exporter.collect.lines import Dropped, Lines
from sglang_tuning_exporter.collect.positions import Mark
from sglang_tuning_exporter.collect.rotation import RotatedFile
from sglang_tuning_exporter.collect.stream import CompressedStream, Key, Stream, reason_of

LINGER_SECONDS = 10.0  # logrotate creates the new file before it signals the writer; some processes reopen it later
DELETED_SECONDS = 60.0  # then a quiet deleted file is closed: an open one keeps its disk space
_FAR_APART_SECONDS = 5.0  # between two polls: whole files may have been created and deleted
_REMEMBERED = 8  # files read to their end: a copy of one is not read again
_MOST_LINKS = 64  # open files of one log; more are opened when these have been read


@dataclass(slots=True)
class Chain:
    """A followed path and the files that have had this name."""

    path: str
    pattern: str
    limit: int  # of a line, in bytes
    existed_at_start: bool  # of the exporter
    links: list[Stream] = field(default_factory=list)  # open files, oldest first
    current: Stream | None = None  # the one with the name now
    finished_marks: list[Mark] = field(default_factory=list)  # of closed files
    reason: str = ""
    is_alias: bool = False  # the same file is followed under another path
    unopened_at_start: tuple[Key, int] | None = None  # file and size at the start, if it could not be opened
    resume_mark: Mark | None = None  # how far it was read before it was left out
    modified: int = 0  # nanoseconds
    dropped: Dropped = field(default_factory=Dropped)
    lost: int = 0  # files that were gone, or may have been, before they were read to their end
    last_lost: str = ""  # the last of them, and why
    last_poll_at: float = 0.0
    directories: positions.LogDirectories = field(init=False)
    owners: dict[Key, str] = field(default_factory=dict)  # of each file that is followed, the path under which it is

    def __post_init__(self) -> None:
        """Note the state of the directory."""
        self.directories = positions.LogDirectories(self.path)

    @property
    def is_glob_match(self) -> bool:
        """Whether the path was found by a glob."""
        return self.path != self.pattern

    def stream(self, fd: int, name: str = "") -> Stream:
        """Return a reader for an open file of this log."""
        lines = Lines(self.limit, self.dropped)
        is_packed = rotation.packing_of(fd, name) != ""
        return CompressedStream(self.path, fd, lines, name) if is_packed else Stream(self.path, fd, lines)

    def marks(self) -> Iterator[Mark]:
        """Yield the marks of its files, oldest first."""
        yield from self.finished_marks
        for at, link in enumerate(self.links):
            if link.joined and link.at_end and any(each.has_lines for each in self.links[at + 1 :]):
                link.count_all_as_read()
            if link is not self.current:  # the log itself may have been copied and truncated since the last poll
                link.note_start()
            if (mark := link.mark()) is not None:
                yield mark

    def leave(self, now: float) -> None:
        """Note that the name belongs to another file now, or to none."""
        if self.current is not None:
            self.current.gone_at = now
            self.current = None

    def open_rotated(self, now: float, following: Stream | None) -> bool:
        """Open the files that had the name since the last poll, before `following` got it.

        Return False if there are too many: the others are found when these have been read.
        """
        if not self.links and not self.finished_marks:
            return True
        marks = [*self.finished_marks, *(link.mark_of_text() for link in self.links if link.seekable)]
        beside = self._rotated_files(marks, following)
        found = positions.assign(marks, beside)
        self.finished_marks = [
            mark for at, mark in enumerate(self.finished_marks) if at in found or mark is self.finished_marks[-1]
        ]
        fresh = self._unread(marks, found, beside)
        far = now - self.last_poll_at >= _FAR_APART_SECONDS
        newest = self.links[-1] if self.links else None
        unfound = len(marks) - 1 not in found and (newest is None or newest.is_deleted())
        if far and unfound:
            self._count_lost("the file that was read last, and perhaps later ones, are gone")
        for number in _missing(beside, found, fresh):
            self._count_lost(f"{self.path}.{number} is gone")
        return self._open(fresh, now)

    def check_rewritten(self, link: Stream) -> None:
        """Mark a file of which little was read as rewritten if its directory has changed.

        It may have been written, copied and truncated meanwhile, and its start may be the same again.
        """
        if link is not self.current or not link.seekable or link.position >= positions.SURE_BYTES:
            return
        if not self.directories.changed():
            return
        link.rewritten = True
        if link.position:
            marks = [*self.finished_marks, link.mark_of_text()]
            beside = self._rotated_files(marks)
            copy = positions.assign(marks, beside).get(len(marks) - 1)
            link.rewritten = (
                copy is not None and beside[copy].inode != link.key[1] and beside[copy].modified > link.modified
            )

    def reread(self, now: float) -> None:
        """Continue a rewritten file: first in the copies of its earlier text, then at its start."""
        link = next(each for each in self.links if each.rewritten)
        far = now - self.last_poll_at >= _FAR_APART_SECONDS
        copy, fresh = self._find_earlier_text(link, by_time=far or not link.position)
        if copy is None and (known := link.known_text()):
            link.restart()
            link.continue_at(known)
            link.look_back_from = 0
            return
        if copy is None and link.position:
            if far or link.size > link.position:
                self._count_lost("the log was emptied or rewritten, and its earlier text is in no file beside it")
            if link.position < link.size:
                link.lines = Lines(self.limit, self.dropped)  # the rest of the incomplete line is gone
        held = len(self.links)
        self._open([*([copy] if copy is not None else []), *fresh], now, before=link, joined=True)
        if copy is not None and len(self.links) > held:
            self.links[self.links.index(link) - (len(self.links) - held)].take_over(link)
        link.restart()

    def _find_earlier_text(self, link: Stream, *, by_time: bool) -> tuple[RotatedFile | None, list[RotatedFile]]:
        """Return the copy of what was read of a rewritten file, and the files written between it and the present text.

        `by_time`: return such files also without a copy, those that are younger than the last read.
        """
        before, after = self.links[: self.links.index(link) + 1], self.links[self.links.index(link) + 1 :]
        marks = [*self.finished_marks, *(each.mark_of_text() for each in before if each.seekable)]
        present = [positions.mark_of_all(self.path, each.fd) for each in [link, *after] if each.is_deleted()]
        beside = self._rotated_files(marks)
        everywhere = positions.assign([*marks, *present], beside)
        found = {at: to for at, to in everywhere.items() if at < len(marks)}
        copy = found.get(len(marks) - 1) if link.position else None
        if copy is None and not by_time:
            return None, []
        # The present text of this file or a later one may be compressed already; it is read here, not there.
        open_now = [beside[to] for at, to in everywhere.items() if at >= len(marks)]
        fresh = [file for file in self._unread(marks, found, beside) if file not in open_now]
        return None if copy is None else beside[copy], fresh

    def resume_after(self, marks: Sequence[Mark], following: Stream | None, now: float) -> None:
        """Continue after `marks`, which an earlier process made of this log, newest last."""
        if following is not None and len(marks) == 1 and marks[0].is_surely(following.fd):
            following.continue_at(marks[0].position)  # nothing was written elsewhere since
            self._continue_lines(following)
            return
        beside = self._rotated_files(marks)
        files = list(beside)
        if following is not None:
            device, inode = following.key
            files.append(RotatedFile(self.path, inode, device, following.size, following.modified, ""))
        found = positions.assign_saved(marks, files)
        here, last = len(beside), len(marks) - 1
        sure = found.get(last) == here and marks[last].head_bytes >= positions.SURE_BYTES
        mark_of = {to: marks[at] for at, to in found.items()}
        # The same file without its text was copied and truncated: a line may begin in the copy and end here.
        copied = following is not None and marks[last].is_same_file(following.fd) and not sure
        cut = 0  # where the text of the newest mark ends in a file without a mark
        if following is not None:
            cut = 0 if here in mark_of or last in found else marks[last].known_text(following.fd)
            if here in mark_of or cut:
                following.continue_at(cut or mark_of[here].position)
        elsewhere = {at: to for at, to in found.items() if to != here}
        unread = [] if sure or cut else self._unread_since(marks, elsewhere, beside)
        self._count_unfound(marks[:last] if cut else marks, found)
        for at, file in enumerate(beside):
            if (known := mark_of.get(at)) is not None:
                self._reopen(files[at:], known, now, is_newest=known is marks[last], copied=copied)
            elif file in unread:
                self._open([file], now, joined=copied or (bool(self.links) and self.links[-1].joined))
        self._continue_lines(following)

    def _reopen(self, files: Sequence[RotatedFile], mark: Mark, now: float, *, is_newest: bool, copied: bool) -> None:
        """Open the first of `files` at its mark, or note it as read if that was its end and a later one has text."""
        was_read = files[0].size == mark.position and not mark.joined
        if is_newest or self.links or not (was_read and any(later.size for later in files[1:])):
            self._open(files[:1], now, mark=mark, joined=mark.joined or (copied and is_newest))
        else:
            self.finished_marks.append(mark)

    def _count_unfound(self, marks: Sequence[Mark], found: dict[int, int]) -> None:
        """Count the marked files that are gone, except those that were complete and read to their end."""
        for at, mark in enumerate(marks):
            unread = mark.size > mark.position or mark.joined or not any(later.size for later in marks[at + 1 :])
            if at not in found and unread:
                self._count_lost(f"a file that was read to byte {mark.position} is gone or was changed")

    def _unread_since(
        self, marks: Sequence[Mark], found: dict[int, int], beside: Sequence[RotatedFile]
    ) -> list[RotatedFile]:
        """Return the files written since `marks` were made, also those between two marked ones."""
        fresh = self._unread(marks, found, beside)
        known = found.values()
        between = [file for at, file in enumerate(beside) if known and min(known) < at < max(known) and at not in known]
        return [file for file in between if rotation.is_readable(file.path)] + fresh

    def read(self, link: Stream, now: float) -> Iterator[bytes]:
        """Yield the new text of a file, and its last incomplete line once the writer uses a later file."""
        later = self.links[self.links.index(link) + 1 :]
        # Checked before reading: all that the writer wrote here before it changed files is then read below.
        moved_on = any(each.has_text() for each in later)
        yield from link.read(now)
        if link.reason and isinstance(link, CompressedStream) and link.size > link.position:
            self._count_lost(f"{link.name}: {link.reason}")
            link.size = link.position
        if link.at_end and not link.rewritten and not link.joined and moved_on:
            yield link.flush()

    def close_quiet(self, link: Stream, now: float, *, crowded: bool) -> bytes | None:
        """Close a file that was read and is quiet, and return its last incomplete line; None to keep it open."""
        later = self.links[self.links.index(link) + 1 :]
        if link.joined:
            if link is not self.links[0] or (not link.is_complete and not any(each.has_lines for each in later)):
                return None  # a restart would have to read its incomplete line again, or that of an earlier copy
        elif link.gone_at is None:
            return None
        else:
            deleted = link.is_deleted()
            if link is self.current:
                if not deleted and not self.is_glob_match:
                    return None  # renamed without a successor: the writer still uses it
                quiet_seconds = DELETED_SECONDS
            elif later and not deleted and not any(each.has_text() for each in later):
                return None  # the new file exists, but nobody has written to it yet
            else:
                quiet_seconds = LINGER_SECONDS
            if now - max(link.gone_at, link.grown_at) < quiet_seconds and not (crowded and link is not self.current):
                return None
        if link is self.current:
            self.leave(now)
        self.links.remove(link)
        rest = b"" if link.joined else link.flush()
        if (mark := link.mark()) is not None:
            self.finished_marks = [*self.finished_marks, mark][-_REMEMBERED:]
        return rest + link.close()

    def _count_lost(self, what: str) -> None:
        self.lost += 1
        self.last_lost = what

    def _rotated_files(self, marks: Sequence[Mark], following: Stream | None = None) -> list[RotatedFile]:
        taken = following.key if following is not None else None
        return [file for file in self.directories.rotated_files(marks) if (file.device, file.inode) != taken]

    def _unread(self, marks: Sequence[Mark], found: dict[int, int], beside: Sequence[RotatedFile]) -> list[RotatedFile]:
        """Return the files written after the marked ones; `found` maps marks to files in `beside`."""
        held = {link.key for link in self.links}
        if found:
            newest = max(found.values())
            inside = beside[newest].inside
            fresh = [file for file in beside[newest + 1 :] if file.inside == inside]
        else:
            fresh = [file for file in beside if file.modified > marks[-1].modified and not file.inside]
        # A compressed file without text has nothing to read, and no line continues after it.
        return [file for file in fresh if (file.device, file.inode) not in held and not file.is_compressed_and_empty]

    def _open(
        self,
        fresh: Sequence[RotatedFile],
        now: float,
        *,
        before: Stream | None = None,
        mark: Mark | None = None,
        joined: bool = False,
    ) -> bool:
        for file in fresh:
            if self.owners.get((file.device, file.inode), self.path) != self.path:
                continue  # followed under its own name
            if len(self.links) >= _MOST_LINKS and mark is None:
                return False
            try:
                fd = os.open(file.path, rotation.OPEN)
            except OSError as error:  # deleted at this moment, or not readable
                self._count_lost(f"{file.path}: {reason_of(error)}")
                continue
            try:
                link = self.stream(fd, file.path)
                if mark is not None:
                    link.continue_at(mark.position)
            except DAMAGE as error:
                os.close(fd)
                self._count_lost(f"{file.path}: {error}")
                continue
            link.gone_at = link.grown_at = now
            link.joined = joined
            if before is not None:
                link.lines = before.lines
                self.links.insert(self.links.index(before), link)
            else:
                self.links.append(link)
        return True

    def _continue_lines(self, following: Stream | None) -> None:
        """Continue the incomplete line at the end of a copy in the next file."""
        chain = [*self.links, *([following] if following is not None else [])]
        for link, after in itertools.pairwise(chain):
            if link.joined:
                after.lines = link.lines


def _missing(beside: Sequence[RotatedFile], found: dict[int, int], fresh: Sequence[RotatedFile]) -> list[int]:
    """Return the missing numbers between the last known file (server.log.5) and the log."""
    if not found:
        return []
    last = beside[max(found.values())].count
    counts = [file.count for file in fresh]
    if last is None or not counts or any(count is None or count > last for count in counts):
        return []
    there = {file.count for file in beside}
    lowest = min(1, *(count for count in counts if count is not None))
    return [number for number in range(lowest, last) if number not in there]
