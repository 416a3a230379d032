"""The web configuration in force: read at the start, and again when one of its files changes.

Only a complete and valid file replaces it. While the present one cannot be read or applied, `sglang_tuning_web_config_up` is 0, and soon
nobody is let in any more: the file may be there to shut somebody out. Prometheus's own exporters answer every request with 500 then.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TypeAlias

from sglang_tuning_exporter.config import files
from sglang_tuning_exporter.config.values import UsageError
from sglang_tuning_exporter.serve.security import tls
from sglang_tuning_exporter.serve.security.web_config import WebConfig, WebConfigError, parse

LOOK_SECONDS = 1.0
# Since a file was first seen to be of no use: a file that is written piece by piece closes nothing, and a revoked password is gone.
CLOSE_SECONDS = 3.0
_Contents: TypeAlias = "dict[Path, bytes | OSError]"

logger = logging.getLogger("sglang_tuning_exporter")


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """The file's settings and the TLS context made of them (None without TLS)."""

    config: WebConfig
    context: ssl.SSLContext | None


def load(path: Path, contents: _Contents) -> LoadedConfig:
    """Make a configuration of a file and those that it names; what is not in `contents` yet is read. Raises `WebConfigError`."""
    try:
        text = _content(path, contents).decode("utf-8")
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
        return LoadedConfig(config, None)
    return LoadedConfig(config, tls.context(config.tls, lambda name: _content(path.parent / name, contents)))


def _content(path: Path, contents: _Contents) -> bytes:
    """Return the content of a file, remembered in `contents`. Raise `OSError`."""
    if path not in contents:
        try:
            contents[path] = files.read(path)
        except OSError as error:
            contents[path] = error
    found = contents[path]
    if isinstance(found, OSError):
        raise found
    return found


class ActiveConfig:
    """Holds the configuration in force, `loaded`; `watch` reloads it while the exporter runs."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises `UsageError`."""
        self._path = path
        self._judged: _Contents = {}  # what is in force, or was refused
        try:
            self.loaded = load(path, self._judged)
        except WebConfigError as error:
            raise UsageError(f"--web-config={path}: {error}") from None
        self._seen = self._judged  # at the last look
        self._problem = ""
        self._closes_at = inf

    @property
    def is_tls(self) -> bool:
        """Whether TLS is on, which is decided at the start."""
        return self.loaded.context is not None

    def listener_context(self) -> ssl.SSLContext | None:
        """Return the listener's context, which follows each change; None without TLS."""
        return tls.ReloadingContext(self._context) if self.is_tls else None

    @property
    def is_up(self) -> bool:
        """Whether the present file is in force."""
        return not self._problem

    @property
    def is_open(self) -> bool:
        """Whether anybody is let in: not where the present file has not been in force for some seconds."""
        return time.monotonic() < self._closes_at

    def watch(self, stopping: threading.Event, on_change: Callable[[], object]) -> None:
        """Look for changes until the end, so that no request reads or waits for a file; call `on_change` after one."""
        logger.info("%s: loaded: %s", self._path, _summary(self.loaded.config))
        while not stopping.wait(LOOK_SECONDS):
            if self.reload():
                on_change()

    def reload(self) -> bool:
        """Reload where files changed, and did not change since the last look; return whether a new configuration is in force."""
        before, self._seen = self._seen, {}
        for path in self._judged:
            with suppress(OSError):
                _content(path, self._seen)
        if not _are_same(self._seen, before) or _are_same(self._seen, self._judged):
            return False
        self._judged = self._seen
        try:
            loaded = load(self._path, self._judged)
            if (loaded.context is None) is self.is_tls:
                raise WebConfigError("tls_server_config: restart the exporter to turn TLS on or off")  # noqa: TRY301 - one place reports
        except WebConfigError as error:
            self._report(str(error))
            return False
        self.loaded, self._problem, self._closes_at = loaded, "", inf
        logger.info("%s: reloaded: %s", self._path, _summary(loaded.config))
        return True

    def _report(self, problem: str) -> None:
        if not self._problem:
            self._closes_at = time.monotonic() + CLOSE_SECONDS
        self._problem = problem
        logger.error("%s: not in force, and soon nobody is let in: %s", self._path, problem)

    def _context(self) -> ssl.SSLContext:
        assert self.loaded.context is not None
        return self.loaded.context


def _are_same(contents: _Contents, others: _Contents) -> bool:
    """Whether files have the same contents, or cannot be read for the same reason."""
    return [(path, each if isinstance(each, bytes) else each.errno) for path, each in contents.items()] == [
        (path, each if isinstance(each, bytes) else each.errno) for path, each in others.items()
    ]


def _summary(config: WebConfig) -> str:
    words = ["no TLS" if config.tls is None else f"TLS, client_auth_type {config.tls.client_auth_type}"]
    words.append(f"passwords for {len(config.users)}" if config.users else "no passwords")
    return ", ".join(words)
