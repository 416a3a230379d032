"""The web configuration in force: read at the start, and again when one of its files changes.

Only a complete and valid file replaces it. Otherwise the last valid one stays in force; the log and
`sglang_tuning_web_config_up` show that.
"""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.serve.security import tls
from sglang_tuning_exporter.serve.security.web_config import WebConfig, WebConfigError, parse

LOOK_SECONDS = 1.0
_Status: TypeAlias = "tuple[tuple[int, ...] | None, ...]"

logger = logging.getLogger("sglang_tuning_exporter")


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """The file's settings and the TLS context made of them (None without TLS), at one moment."""

    config: WebConfig
    context: ssl.SSLContext | None
    files: tuple[Path, ...]
    status: _Status  # the files' status before they were read


def read(path: Path) -> LoadedConfig:
    """Read a web configuration file and the files that it names. Raises `WebConfigError`."""
    status = _status((path,))
    try:
        with path.open("rb") as file:
            text = file.read(tls.MOST_BYTES).decode("utf-8")
    except OSError as error:
        raise WebConfigError(f"{error.strerror or error}; give a file that this user may read") from None
    except ValueError:  # not UTF-8
        raise WebConfigError("not text; give YAML") from None
    config = parse(text)
    if config.users:
        try:
            import bcrypt  # noqa: F401, PLC0415 - only where passwords are set
        except ImportError:
            raise WebConfigError("basic_auth_users: needs the package bcrypt; pip install bcrypt") from None
    if config.tls is None:
        return LoadedConfig(config, None, (path,), status)
    others = tls.files(config.tls, path.parent)
    status += _status(others)
    return LoadedConfig(config, tls.context(config.tls, path.parent), (path, *others), status)


def _status(files: tuple[Path, ...]) -> _Status:
    """Return the status of each file, which changes when it is written; None for a missing one."""
    found: list[tuple[int, ...] | None] = []
    for file in files:
        try:
            status = file.stat()
            found.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
        except (OSError, ValueError):
            found.append(None)
    return tuple(found)


class ActiveConfig:
    """Holds the configuration in force, `loaded`. `start` looks for changes once a second, and calls `on_change` after one."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises `UsageError`."""
        self._path = path
        try:
            self.loaded = read(path)
        except WebConfigError as error:
            raise UsageError(f"--web-config={path}: {error}") from None
        self._seen = self.loaded.status
        self._problem = ""
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_tls(self) -> bool:
        """Whether TLS is on, which is decided at the start."""
        return self.loaded.context is not None

    def listener_context(self) -> ssl.SSLContext | None:
        """Return the listener's context, which follows each change; None without TLS."""
        return tls.ReloadingContext(self._context) if self.is_tls else None

    def start(self, on_change: Callable[[], object]) -> None:
        """Look for changes in a thread, so that no request reads or waits for a file."""
        config = self.loaded.config
        if config.http.http2:
            logger.info(
                "%s: http_server_config.http2 is accepted and ignored: the exporter speaks HTTP/1.1", self._path
            )
        logger.info("%s: loaded: %s", self._path, _summary(config))
        self._thread = threading.Thread(target=self._watch, args=(on_change,), name="web-config", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout=2.0)

    @property
    def is_up(self) -> bool:
        """Whether the present file is in force."""
        return not self._problem

    def reload(self) -> bool:
        """Reload where files changed, and did not change since the last look; return whether a new configuration is in force.

        After a problem it is tried at every look, since a missing file may have appeared.
        """
        status = _status(self.loaded.files)
        is_still, self._seen = status == self._seen, status
        if not is_still or (status == self.loaded.status and not self._problem):
            return False
        try:
            loaded = read(self._path)
        except WebConfigError as error:
            self._report_problem(str(error))
            return False
        if (loaded.context is None) is self.is_tls:
            self._report_problem("tls_server_config: restart the exporter to turn TLS on or off")
            return False
        self.loaded, self._seen, self._problem = loaded, loaded.status, ""
        logger.info("%s: reloaded: %s", self._path, _summary(loaded.config))
        return True

    def _watch(self, on_change: Callable[[], object]) -> None:
        while not self._stopping.wait(LOOK_SECONDS):
            if self.reload():
                on_change()

    def _report_problem(self, problem: str) -> None:
        if problem != self._problem:
            logger.error("%s: invalid, keeping the previous configuration: %s", self._path, problem)
        self._problem = problem

    def _context(self) -> ssl.SSLContext:
        assert self.loaded.context is not None
        return self.loaded.context


def _summary(config: WebConfig) -> str:
    words = ["no TLS" if config.tls is None else f"TLS, client_auth_type {config.tls.client_auth_type}"]
    words.append(f"passwords for {len(config.users)}" if config.users else "no passwords")
    return ", ".join(words)
