"""What outlives the exporter: where the log was read to, and what had been counted by then, in one file written whole or not at all."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

SCHEMA = 1
MOST_BYTES = 8 << 20


class StateFile:
    """A JSON document beside the log. Nothing here raises: what goes wrong is said in `problem` and the exporter goes on without.

    Positions and counters are saved together, before the counters are shown to anybody: after a crash the rest of the log is read again onto the counters
    of exactly that position, so that no event is lost and none is counted twice.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem = ""
        self._lock: int | None = None
        self._last = b""

    def acquire(self) -> bool:
        """Take the file for this process; False when another exporter has it."""
        try:
            self._lock = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.problem = "another exporter uses it"
            self.release()
            return False
        except OSError as error:
            self.problem = f"cannot be used: {error.strerror or error}"
            self.release()
            return False
        return True

    def load(self) -> dict[str, Any]:
        """What was saved last; empty when there is nothing yet or it cannot be read."""
        try:
            with self.path.open("rb") as file:
                text = file.read(MOST_BYTES + 1)
        except FileNotFoundError:
            return {}
        except OSError as error:
            self.problem = f"cannot be read: {error.strerror or error}"
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
        """Replace the file. False when it could not be written; the old one is then still whole.

        Not forced to the disk: it has to survive the end of this process, and after the machine's own end the log is read on from a little earlier.
        """
        text = json.dumps({"schema": SCHEMA, **document}, separators=(",", ":")).encode()
        if text == self._last and not self.problem:
            return True
        beside = f"{self.path}.new"
        try:
            descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(text)
            Path(beside).replace(self.path)
        except OSError as error:
            self.problem = f"cannot be written: {error.strerror or error}"
            return False
        self.problem, self._last = "", text
        return True

    def release(self) -> None:
        """Let another exporter have it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
