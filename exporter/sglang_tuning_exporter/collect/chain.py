"""The files that one log has been, the oldest first: the one that bears its name now, and those that a rotation has moved aside.

Every file is read to its end before the next one. What bears the name is compared at every look. When it is another file,
or is written anew, the files in between are looked for beside it: by identity, by text, and by their order.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang_tuning_exporter.collect import positions as places
from sglang_tuning_exporter.collect import rotation
from sglang_tuning_exporter.collect.lines import Dropped, Lines
from sglang_tuning_exporter.collect.stream import Key, Packed, Stream, why

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sglang_tuning_exporter.collect.positions import Mark
    from sglang_tuning_exporter.collect.rotation import Place

LINGER_SECONDS = 10.0  # logrotate creates the new file before the writer is told; some of its processes come later
DELETED_SECONDS = 60.0  # a quiet deleted file is let go, since holding it keeps its disk space
_FAR_APART_SECONDS = 5.0  # between two looks: whole files may have come and gone
_REMEMBERED = 8  # files that were read to their end, so that a copy of one is not read again
_MOST_LINKS = 64  # files of one log that are open at once: the others are opened after these


@dataclass(slots=True)
class Chain:
    """A path that is looked at every poll, and the files that have been there."""

    path: str
    pattern: str
    limit: int  # of a line, in bytes
    first: bool  # there when the exporter started
    links: list[Stream] = field(default_factory=list)  # open files, the oldest first
    current: Stream | None = None  # the one that has the name now
    done: list[Mark] = field(default_factory=list)  # of files that have been let go
    reason: str = ""
    other_name: bool = False  # what is here is followed under another path
    closed: tuple[Key, int] | None = None  # a file and its size, there at the start, that could not be opened
    resume: Mark | None = None  # up to where it was read before it was left out
    modified: int = 0  # nanoseconds
    dropped: Dropped = field(default_factory=Dropped)
    lost: int = 0  # files that were gone before they had been read to their end, or may have been
    lost_last: str = ""  # which file that was last, and why
    looked_at: float = 0.0
    folder: int = 0  # when a file was last made, renamed or deleted beside it, in nanoseconds

    def __post_init__(self) -> None:
        """Remember what is beside it from now on."""
        self.folder = rotation.folder_modified(self.path)

    @property
    def is_glob_match(self) -> bool:
        """Whether a glob found it."""
        return self.path != self.pattern

    def stream(self, fd: int, name: str = "") -> Stream:
        """Return the reader of an open file of this log."""
        lines = Lines(self.limit, self.dropped)
        return Packed(self.path, fd, lines, name) if rotation.packing(name) else Stream(self.path, fd, lines)

    def marks(self) -> Iterator[Mark]:
        """Give the marks of its files, the oldest first."""
        yield from self.done
        for at, link in enumerate(self.links):
            if link.joined and link.at_end and any(each.has_told for each in self.links[at + 1 :]):
                link.settle()
            if link is not self.current:  # the log itself may have been copied and truncated since the last look
                link.look_at_start()
            if (mark := link.mark()) is not None:
                yield mark

    def leave(self, now: float) -> None:
        """Note that the name leads elsewhere now, or nowhere."""
        if self.current is not None:
            self.current.gone_at = now
            self.current = None

    def has_room(self, taken: int, most: int) -> bool:
        """Say whether more of its files may be opened."""
        return len(self.links) < min(_MOST_LINKS, most - taken + len(self.links))

    def find_between(self, now: float, following: Stream | None) -> bool:
        """Open the files that have had the name since the last look, before `following` takes it.

        Says whether these are all of them: where there are too many the others are found after these have been read.
        """
        if not self.links and not self.done:
            return True
        marks = [*self.done, *(link.mark_of_text() for link in self.links if link.seekable)]
        beside = self._beside(following)
        found = rotation.assign(marks, beside)
        self.done = [mark for at, mark in enumerate(self.done) if at in found or mark is self.done[-1]]
        fresh = self._unread(marks, found, beside)
        far = now - self.looked_at >= _FAR_APART_SECONDS
        newest = self.links[-1] if self.links else None
        unfound = len(marks) - 1 not in found and (newest is None or newest.is_deleted())
        if far and unfound:
            self._lose("the file that was read last, and perhaps later ones, are gone")
        for number in _missing(beside, found, fresh):
            self._lose(f"{self.path}.{number} is gone")
        return self._open(fresh, now)

    def doubt(self, link: Stream) -> None:
        """Mark a file of which next to nothing was read as rewritten, once something has happened beside it.

        It may have been full and copied meanwhile; its start may be the same again.
        """
        if link is not self.current or not link.seekable or link.position >= places.SURE_BYTES:
            return
        before, self.folder = self.folder, rotation.folder_modified(self.path)
        if before == self.folder:
            return
        link.rewritten = True
        if link.position:
            marks = [*self.done, link.mark_of_text()]
            beside = self._beside(None)
            copy = rotation.assign(marks, beside).get(len(marks) - 1)
            link.rewritten = (
                copy is not None and beside[copy].inode != link.key[1] and beside[copy].modified > link.modified
            )

    def rewind(self, now: float) -> None:
        """Go on where the text of the present file goes on that was written anew: in its copies, and then here."""
        link = next(each for each in self.links if each.rewritten)
        before = self.links[: self.links.index(link) + 1]
        marks = [*self.done, *(each.mark_of_text() for each in before if each.seekable)]
        present = [
            places.mark_of_all(self.path, each.fd) for each in [link, *self.links[len(before) :]] if each.is_deleted()
        ]
        beside = self._beside(None)
        everywhere = rotation.assign([*marks, *present], beside)
        found = {at: to for at, to in everywhere.items() if at < len(marks)}
        copy = found.get(len(marks) - 1) if link.position else None
        far = now - self.looked_at >= _FAR_APART_SECONDS
        fresh = self._unread(marks, found, beside) if copy is not None or far or not link.position else []
        # What this file or a later one holds now may have been packed already; it is read here.
        open_now = [beside[to] for at, to in everywhere.items() if at >= len(marks)]
        fresh = [place for place in fresh if place not in open_now]
        if copy is not None:
            fresh = [beside[copy], *fresh]
        elif known := link.known_text():
            link.restart()
            link.go_on_at(known)
            link.look_back_from = 0
            return
        elif link.position and (far or link.size > link.position):
            self._lose("the log was emptied or rewritten, and its earlier text is in no file beside it")
        if copy is None and 0 < link.position < link.size:
            link.lines = Lines(self.limit, self.dropped)  # the rest of the line under way is gone
        held = len(self.links)
        self._open(fresh, now, before=link, joined=True)
        if copy is not None and len(self.links) > held:
            self.links[self.links.index(link) - (len(self.links) - held)].take_over(link)
        link.restart()

    def resume_after(self, marks: Sequence[Mark], following: Stream | None, now: float) -> None:
        """Continue after `marks`, which an earlier follower made of this log, the newest last."""
        beside = self._beside(None)
        files = beside + ([self._place_of(following)] if following is not None else [])
        found = rotation.assign_saved(marks, files)
        here = len(beside)
        last = len(marks) - 1
        sure = found.get(last) == here and marks[last].head_bytes >= places.SURE_BYTES
        fresh = [] if sure else self._unread_since(marks, {at: to for at, to in found.items() if to != here}, beside)
        # The same file without its text: it was copied and truncated, and a line may begin in the copy and end here.
        joined = following is not None and marks[last].is_of(following.fd) and not sure
        is_new = following is not None and last not in found and here not in found.values()
        cut = following.known_at(marks[last]) if is_new and following is not None else 0
        self._lose_unfound(marks[:last] if cut else marks, found)
        mark_of = {to: marks[at] for at, to in found.items()}
        for at, place in enumerate(files):
            known = mark_of.get(at)
            if known is None:
                self._open([place] if place in fresh and not cut else [], now, joined=joined or self._goes_on)
            elif at == here and following is not None:
                following.go_on_at(known.position)
            elif known is marks[last] or self.links or not _is_left(known, files[at:]):
                self._open([place], now, mark=known, joined=known.joined or (joined and known is marks[last]))
            else:
                self.done.append(known)
        if cut and following is not None:
            following.go_on_at(cut)
        self._join(following)

    def _lose_unfound(self, marks: Sequence[Mark], found: dict[int, int]) -> None:
        """Count the marked files that are gone, unless they had been read to their end and their writer had left them."""
        for at, mark in enumerate(marks):
            unread = mark.size > mark.position or mark.joined or not any(later.size for later in marks[at + 1 :])
            if at not in found and unread:
                self._lose(f"a file that was read to byte {mark.position} is gone or was changed")

    @property
    def _goes_on(self) -> bool:
        return bool(self.links) and self.links[-1].joined

    def _unread_since(self, marks: Sequence[Mark], found: dict[int, int], beside: Sequence[Place]) -> list[Place]:
        """Choose the files written since `marks` were made; a copy of a later file may be among the found ones already."""
        fresh = self._unread(marks, found, beside)
        known = found.values()
        between = [
            place for at, place in enumerate(beside) if known and min(known) < at < max(known) and at not in known
        ]
        return [place for place in between if rotation.is_readable(place.path)] + fresh

    def read(self, link: Stream, now: float) -> Iterator[bytes]:
        """Yield what is new in a file, and its last, unended line once its writer has gone on."""
        later = self.links[self.links.index(link) + 1 :]
        # Asked before reading: whatever a writer put here before it went on is then read below.
        moved_on = any(each.has_text() for each in later)
        yield from link.read(now)
        if link.reason and isinstance(link, Packed) and link.size > link.position:
            self._lose(f"{link.name}: {link.reason}")
            link.size = link.position
        if link.at_end and not link.rewritten and not link.joined and moved_on:
            yield link.rest()

    def let_go(self, link: Stream, now: float, *, crowded: bool) -> bytes | None:
        """Let a file go that has been read and is quiet, and return its last, unended line; None to keep it."""
        later = self.links[self.links.index(link) + 1 :]
        if link.joined:
            if link is not self.links[0] or (not link.is_told and not any(each.has_told for each in later)):
                return None  # the next reader has to begin its line again, or that of a copy before it
        elif link.gone_at is None:
            return None
        else:
            deleted = link.is_deleted()
            if link is self.current:
                if not deleted and not self.is_glob_match:
                    return None  # renamed, and nothing has taken its place: its writer is still at it
                patience = DELETED_SECONDS
            elif later and not deleted and not any(each.has_text() for each in later):
                return None  # the new file is there, but nobody writes to it yet
            else:
                patience = LINGER_SECONDS
            if now - max(link.gone_at, link.grown_at) < patience and not (crowded and link is not self.current):
                return None
        if link is self.current:
            self.leave(now)
        self.links.remove(link)
        rest = b"" if link.joined else link.rest()
        if (mark := link.mark()) is not None:
            self.done = [*self.done, mark][-_REMEMBERED:]
        return rest + link.close()

    def _lose(self, what: str) -> None:
        self.lost += 1
        self.lost_last = what

    def _beside(self, following: Stream | None) -> list[Place]:
        taken = following.key if following is not None else None
        return [place for place in rotation.beside(self.path) if (place.device, place.inode) != taken]

    def _place_of(self, link: Stream) -> Place:
        return rotation.Place(self.path, link.key[1], link.key[0], link.size, link.modified, "")

    def _unread(self, marks: Sequence[Mark], found: dict[int, int], beside: Sequence[Place]) -> list[Place]:
        """Choose the files written after those that are known; `found` says where these lie."""
        held = {link.key for link in self.links}
        if found:
            newest = max(found.values())
            inside = beside[newest].inside
            fresh = [place for place in beside[newest + 1 :] if place.inside == inside]
        else:
            fresh = [place for place in beside if place.modified > marks[-1].modified and not place.inside]
        return [place for place in fresh if (place.device, place.inode) not in held]

    def _open(
        self,
        fresh: Sequence[Place],
        now: float,
        *,
        before: Stream | None = None,
        mark: Mark | None = None,
        joined: bool = False,
    ) -> bool:
        for place in fresh:
            if len(self.links) >= _MOST_LINKS and mark is None:
                return False
            try:
                fd = os.open(place.path, rotation.OPEN)
            except OSError as error:  # deleted this very moment, or not for us to read
                self._lose(f"{place.path}: {why(error)}")
                continue
            try:
                link = self.stream(fd, place.path)
                if mark is not None:
                    link.go_on_at(mark.position)
            except rotation.DAMAGE as error:
                os.close(fd)
                self._lose(f"{place.path}: {error}")
                continue
            link.gone_at = link.grown_at = now
            link.joined = joined
            if before is not None:
                link.lines = before.lines
                self.links.insert(self.links.index(before), link)
            else:
                self.links.append(link)
        return True

    def _join(self, following: Stream | None) -> None:
        """Have the line that a copy ends in go on in the next file."""
        chain = [*self.links, *([following] if following is not None else [])]
        for link, after in itertools.pairwise(chain):
            if link.joined:
                after.lines = link.lines


def _is_left(mark: Mark, files: Sequence[Place]) -> bool:
    """Whether the first of `files` has been read to its end, as `mark` says, and its writer has gone on to a later one."""
    return files[0].size == mark.position and not mark.joined and any(later.size for later in files[1:])


def _missing(beside: Sequence[Place], found: dict[int, int], fresh: Sequence[Place]) -> list[int]:
    """Return the numbers that are missing between the last known file, server.log.5, and the log itself."""
    if not found:
        return []
    last = beside[max(found.values())].count
    counts = [place.count for place in fresh]
    if last is None or not counts or any(count is None or count > last for count in counts):
        return []
    there = {place.count for place in beside}
    lowest = min(1, *(count for count in counts if count is not None))
    return [number for number in range(lowest, last) if number not in there]
