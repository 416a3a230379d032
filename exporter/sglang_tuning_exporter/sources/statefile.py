"""What outlives the exporter: where the log was read to, and what had been counted by then, in one file written whole or not at all."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

SCHEMA = 1
MOST_BYTES = 8 << 20
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO must not hold up the start
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class StateFile:
    """A JSON document beside the log. Nothing here raises: what goes wrong is said in `problem` and the exporter goes on without.

    Positions and counters are saved together, before the counters are shown to anybody: after a crash the rest of the log is read again onto the counters
    of exactly that position, so that no event is lost and none is counted twice.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem = ""
        self._lock: int | None = None
        self._file = path  # behind symbolic links, so that they stay

    @property
    def held(self) -> bool:
        """Whether the file is this process's to read and write."""
        return self._lock is not None

    def acquire(self) -> bool:
        """Take the file for this process; False when another exporter has it, or nobody can."""
        try:
            self._file = Path(os.path.realpath(self.path))
            if self._file.exists() and not self._file.is_file():
                # A device would be replaced by a file.
                self.problem = "cannot be used: not a regular file"
                return False
            self._lock = os.open(f"{self._file}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.problem = "another exporter uses it; give each exporter a --state-file of its own"
            self.release()
        except OSError as error:
            self.problem = f"cannot be used: {_words(error)}"
            self.release()
        except ValueError:  # each Python has other words for it
            self.problem = "cannot be used: no file has a name with a NUL byte in it"
            self.release()
        return self.held

    def load(self) -> dict[str, Any]:
        """What was saved last; empty when there is nothing yet, it cannot be read or is not ours."""
        if not self.held:
            return {}
        try:
            with os.fdopen(os.open(self._file, _READ), "rb") as file:
                regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
                text = file.read(MOST_BYTES + 1) if regular else b""
        except FileNotFoundError:
            return {}
        except OSError as error:
            self.problem = f"cannot be read: {_words(error)}"
            return {}
        try:
            document = json.loads(text) if len(text) <= MOST_BYTES else None
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            self.problem = "is damaged or of another version: starting as if it were not there"
            return {}
        return document

    def save(self, document: dict[str, Any]) -> bool:
        """Replace the file. False when it is not ours or could not be written; the old one is then still whole.

        Not forced to the disk: it has to survive the end of this process, and after the machine's own end the log is read on from a little earlier.
        """
        if not self.held:
            return False
        text = json.dumps({"schema": SCHEMA, **document}, separators=(",", ":")).encode()
        if len(text) > MOST_BYTES:  # it would not be read again
            self.problem = f"cannot be written: more than {MOST_BYTES >> 20} MiB"
            return False
        beside = Path(f"{self._file}.new")
        try:
            with os.fdopen(os.open(beside, _WRITE, 0o600), "wb") as file:
                file.write(text)
            beside.replace(self._file)
        except OSError as error:
            self.problem = f"cannot be written: {_words(error)}"
            with suppress(OSError):
                beside.unlink()  # half of it takes the room that others need
            return False
        self.problem = ""
        return True

    def release(self) -> None:
        """Let another exporter have it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _words(error: OSError) -> str:
    return error.strerror or str(error)
