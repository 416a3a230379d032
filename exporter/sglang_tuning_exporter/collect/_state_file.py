"""The state file: positions in the log and the counters that belong to them, replaced atomically.

Other users of the directory may put anything at the file's name, and a user may name a wrong file. So links are not
followed, and only a regular file of ours is opened for writing or replaced: an empty one, or one that begins like ours.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

from sglang_tuning_exporter.config import files

SCHEMA = 1
MOST_BYTES = 8 << 20
# For a step, done under the lock that every page needs: less than a scraper waits, more than a busy disk takes.
SECONDS = 5.0
_HEAD_BYTES = 4096
_PROGRAM = "sglang-tuning-exporter"
_OURS = re.compile(
    rb'\s*\{\s*"schema":\s*\d+,\s*"(?:program":\s*"%b"|(?:at|lines|positions|state|unrecognised)":)' % _PROGRAM.encode()
)
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
# None of them follows a link at the file's name; a FIFO must not block the start.
_SAFELY = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_LOCK = os.O_RDWR | os.O_CREAT | _SAFELY
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFELY

_T = TypeVar("_T")
_MAY_NOT = "let this user read and write it and its directory"
_REMEDIES = {
    errno.EACCES: _MAY_NOT,
    errno.EPERM: _MAY_NOT,
    errno.EROFS: "give a path on a file system that can be written",
    errno.ENOSPC: "free space on its disk",
    errno.EDQUOT: "free space on its disk",
    errno.ENOENT: "create its directory, or give another path",
    errno.ELOOP: "give the path of the file itself",
    errno.ETIMEDOUT: "it is tried again",
    errno.EAGAIN: "it is tried again",
}


class StateFile:
    """A JSON document beside the log.

    Nothing here raises: `problem` describes a failure, and the exporter continues without.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem = ""
        self._lock: int | None = None
        self._written = b""  # what was saved last
        self._is_late = False  # it did not answer when it was to be locked

    @property
    def held(self) -> bool:
        """Whether this process holds the lock of the file."""
        return self._lock is not None

    def acquire(self) -> bool:
        """Lock the file; False if another exporter holds it, it cannot be locked, or it is not ours."""
        try:
            self._is_late = False
            self._within("lock", self._take_lock)
        except BlockingIOError:  # of the lock; the want of a thread is a `NoThreadError`
            self.problem = "another exporter uses it; give each exporter a --state-file of its own"
        except OSError as error:
            self.problem = f"cannot be used: {_explained(error)}"
            self._is_late = files.is_late(error)
        except ValueError:  # its message differs between Python versions
            self.problem = "cannot be used: no file has a name with a NUL byte in it; give another path"
        return self.held

    def is_usable(self) -> bool:
        """Return whether it can be saved to; one that did not answer at the start is tried again."""
        return self.held or (self._is_late and self.acquire())

    def load(self) -> dict[str, Any]:
        """Return the saved document; empty if there is none, or it cannot be read or is not ours."""
        if not self.held:
            return {}
        try:
            text = self._within("read", self._read)
        except FileNotFoundError:
            return {}
        except OSError as error:
            self.problem = f"cannot be read: {_explained(error)}"
            return {}
        try:
            document = json.loads(text) if len(text) <= MOST_BYTES else None
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            self.problem = "is damaged or of another version: starting as if it were not there"
            return {}
        return {key: value for key, value in document.items() if key != "program"}

    def save(self, document: dict[str, Any]) -> bool:
        """Replace the file. Return False if it is not ours or cannot be written; the old one then stays intact.

        There is no fsync: the file must survive the end of this process; after a crash of the machine the log is read
        from an earlier position.
        """
        if not self.held:
            return False
        text = json.dumps({"schema": SCHEMA, "program": _PROGRAM, **document}, separators=(",", ":")).encode()
        if len(text) > MOST_BYTES:  # `load` would refuse it
            self.problem = f"cannot be written: more than {MOST_BYTES >> 20} MiB"
            return False
        try:
            while self._written is not text:  # the first wait may be for a document before it that was late
                self._within("replace", lambda directory: self._write(text, directory))
        except OSError as error:
            self.problem = f"cannot be written: {_explained(error)}"
            return False
        self.problem = ""
        return True

    def _write(self, text: bytes, directory: int) -> None:
        _replace(self.path.name, text, directory)
        self._written = text

    def release(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _within(self, name: str, step: Callable[[int], _T]) -> _T:
        """Do a step in the file's directory, opened once so that it is the same for all of it, unless that does not
        answer.
        """

        def work() -> _T:
            directory = os.open(self.path.parent, _DIRECTORY)
            try:
                return step(directory)
            finally:
                os.close(directory)

        return files.within((self.path, name), work, SECONDS)

    def _take_lock(self, directory: int) -> None:
        """Take the lock until `release`, also where the file system answers after the wait for it has ended."""
        with suppress(FileNotFoundError), _opened(self.path.name, directory):
            pass
        if self._lock is None:
            self._lock = _locked(f"{self.path.name}.lock", directory)

    def _read(self, directory: int) -> bytes:
        with _opened(self.path.name, directory) as file:
            return file.read(MOST_BYTES + 1)


@contextmanager
def _opened(name: str, directory: int) -> Iterator[IO[bytes]]:
    """Open our file for reading. Raise `OSError` for anything else."""
    with files.opened(name, directory, follow=False, check=lambda found: _check_kind(name, found)) as file:
        head = file.read(_HEAD_BYTES)
        if head.strip(b"\0 \r\n") and _OURS.match(head) is None:  # a crash of the machine may leave NUL bytes
            raise OSError(0, f"{name} is no state file of an exporter")
        file.seek(0)
        yield file


def _check_kind(name: str, found: os.stat_result, *, is_lock: bool = False) -> None:
    problems = {
        "is a symbolic link": stat.S_ISLNK(found.st_mode),
        "is not a regular file": not stat.S_ISREG(found.st_mode),
        "belongs to another user": found.st_uid != os.geteuid(),
        "is not empty, so it is no lock of an exporter": is_lock and found.st_size,
    }
    for words, is_there in problems.items():
        if is_there:
            raise OSError(errno.ELOOP if stat.S_ISLNK(found.st_mode) else 0, f"{name} {words}")


def _locked(name: str, directory: int) -> int:
    with suppress(FileNotFoundError):
        _check_kind(name, os.stat(name, dir_fd=directory, follow_symlinks=False))
    lock = os.open(name, _LOCK, 0o600, dir_fd=directory)
    try:
        _check_kind(name, os.fstat(lock), is_lock=True)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _replace(name: str, text: bytes, directory: int) -> None:
    """Write a new file and rename it over ours, or to a free name; a leftover of an earlier crash is removed first."""
    with suppress(FileNotFoundError), _opened(name, directory):
        pass
    beside = f"{name}.new"
    with suppress(FileNotFoundError), _opened(beside, directory):
        os.unlink(beside, dir_fd=directory)
    descriptor = os.open(beside, _NEW, 0o600, dir_fd=directory)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
        os.replace(beside, name, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        with suppress(OSError):
            os.unlink(beside, dir_fd=directory)  # a partial file would use up disk space
        raise


def _explained(error: OSError) -> str:
    """Return what is wrong and what to do."""
    if error.errno == errno.ETIMEDOUT:  # how long is said once, not at each try
        return f"its file system does not answer; {_REMEDIES[errno.ETIMEDOUT]}"
    return f"{error.strerror or error}; {_REMEDIES.get(error.errno or 0, 'give another path')}"
