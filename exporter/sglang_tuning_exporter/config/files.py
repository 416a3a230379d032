"""Files that somebody may replace, fill or hang while the exporter runs: opened and read within limits of kind, size
and time.

A path may lead to a FIFO, a device, or a file system that never answers. So a file is opened only if it is a regular
one, and in a thread that is left behind when its time is over. While that thread has not returned, nobody is sent after
it: the file does not answer.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswerError
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import IO, Any, TypeVar

from sglang_tuning_exporter.config.values import UsageError, as_word

MOST_BYTES = 1 << 20  # a bundle of all public authorities has a quarter of it
SECONDS = 2.0
# For so long the last content of a file that does not answer is good: a busy machine is late, and proves nothing about
# the file.
KEPT_SECONDS = 600.0

_T = TypeVar("_T")
_asked: dict[Hashable, tuple[float, Future[Any]]] = {}
_lock = threading.Lock()
_last: dict[Path, tuple[float, bytes]] = {}  # when a file was read last, and what was in it
late: set[Path] = set()  # the files whose last content is in use

logger = logging.getLogger("sglang_tuning_exporter")


class NoThreadError(OSError):
    """This process may not start the thread that would read a file: its own limit, which
    says nothing about the file.
    """

    def __init__(self) -> None:
        super().__init__(errno.EAGAIN, str(self))

    def __str__(self) -> str:
        return "the exporter can start no thread: raise its limit (pids limit, TasksMax=, ulimit -u)"


def read(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file of at most so many bytes.

    Raise `OSError`, with words for people in `strerror`.
    """
    return within(path, lambda: _content(path, most))


def within(file: Hashable, work: Callable[[], _T], seconds: float = SECONDS) -> _T:
    """Return the result of `work` on a file.

    Raise `OSError` where that takes longer, and at once while an earlier one has not returned.
    """
    begun, answer = begin(file, work)
    try:
        found: _T = answer.result(max(begun + seconds - time.monotonic(), 0.0))
    except NoAnswerError:
        raise OSError(errno.ETIMEDOUT, f"no answer for {max(time.monotonic() - begun, seconds):.0f} s") from None
    return found


def begin(file: Hashable, work: Callable[[], _T]) -> tuple[float, Future[_T]]:
    """Have `work` on a file done in a thread; return since when it is done, and its result to come.

    Raise `NoThreadError`.

    While an earlier one on the same file has not returned, it is that one. A file is noted as asked only once its
    thread runs.
    """
    with _lock:
        known = _asked.get(file)
        if known is None:
            known = time.monotonic(), Future()
            try:
                threading.Thread(target=_do, args=(file, work, known[1]), name="file", daemon=True).start()
            except RuntimeError:
                raise NoThreadError from None
            _asked[file] = known
    return known


def is_late(error: BaseException) -> bool:
    """Whether a file was not read because it, or this process, had no time or thread for it: that says nothing about
    its content.
    """
    return isinstance(error, NoThreadError) or getattr(error, "errno", None) == errno.ETIMEDOUT


def read_or_last(path: Path) -> bytes:
    """Return the content of a file that is read again and again; where it is late, its last content for at most
    `KEPT_SECONDS`. Raise `OSError`.
    """
    now = time.monotonic()
    try:
        _last[path] = now, read(path)
    except OSError as error:
        at, content = _last.get(path, (-inf, b""))
        if not is_late(error) or now - at > KEPT_SECONDS:
            late.discard(path)
            raise
        if path not in late:
            logger.warning("%s: %s; its last content is used, for at most %g s", path, error.strerror, KEPT_SECONDS)
        late.add(path)
        return content
    if path in late:
        late.discard(path)
        logger.info("%s: it answers again", path)
    return _last[path][1]


def _check_kind(found: os.stat_result) -> None:
    """Raise `OSError` for what is not a regular file."""
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, "a symbolic link")
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")


@contextmanager
def opened(
    name: str | Path,
    directory: int | None = None,
    *,
    follow: bool = True,
    check: Callable[[os.stat_result], None] = _check_kind,
) -> Iterator[IO[bytes]]:
    """Open a file for reading that passes the `check`, by default of a regular one.

    Raise `OSError` for anything else, such as a FIFO.
    """
    check(os.stat(name, dir_fd=directory, follow_symlinks=follow))  # before opening: opening a device may have effects
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    with os.fdopen(os.open(name, flags, dir_fd=directory), "rb") as file:
        check(os.fstat(file.fileno()))
        yield file


def key_in(path: Path, read: Callable[[Path], bytes] = read) -> str:
    """Return the key in a file with one line of text; empty if there is none: it is being replaced.

    Raise `OSError` if it cannot be read.
    """
    try:
        key = read(path).decode("ascii").strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return ""
    return key if key.isprintable() else ""


# Not UTF-8, or values that PyYAML cannot convert: 2025-13-01, !!int "", !!bool x, !!timestamp x, an escape beyond
# Unicode.
_UNREADABLE = (ValueError, LookupError, AttributeError, TypeError, OverflowError)


def mapping_in(path: Path) -> dict[Any, Any]:
    """Return the mapping in a YAML file of `--config`, empty for an empty file. Raise `UsageError`."""
    import yaml  # noqa: PLC0415 - a start without a config file need not pay for the YAML parser

    try:
        text = read(path).decode("utf-8")
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            # A few aliases can stand for more values than fit into memory, and an error message would quote all of
            # them.
            raise UsageError(f"--config={path}: *alias: not taken; write the value out")
        content = yaml.safe_load(text)
    except OSError as error:
        raise UsageError(f"--config={path}: {error.strerror or error}; give a readable YAML file") from None
    except (yaml.YAMLError, RecursionError, *_UNREADABLE) as error:
        reason = " ".join(str(error).split())[:160]
        raise UsageError(f"--config={path}: not YAML ({reason}); write one 'key: value' on each line") from None
    if not isinstance(content, dict | None):
        raise UsageError(f"--config={path}: give a mapping of keys to values, one 'key: value' on each line")
    return content or {}


def setting(remedy: str, is_right: Callable[[Path], object], *, is_tried_again: bool = False) -> Callable[[Any], Path]:
    """Return a check of a path, of a file that may not answer; one that `is_tried_again` may answer later."""

    def convert(value: Any) -> Path:
        found = Path(as_word(value))
        try:
            if within(("check", found), lambda: is_right(found)):
                return found
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            if is_tried_again and is_late(error):
                return found
            raise UsageError(f"{getattr(error, 'strerror', None) or 'not a path'}; {remedy}") from None
        raise UsageError(remedy)

    return convert


def _content(path: Path, most: int) -> bytes:
    try:
        with opened(path) as file:
            content = file.read(most + 1)
    except ValueError:  # a NUL in the name
        raise OSError(errno.EINVAL, "not a path") from None
    if len(content) > most:
        raise OSError(errno.EFBIG, f"larger than {most >> 10} KiB")
    return content


def _do(file: Hashable, work: Callable[[], Any], answer: Future[Any]) -> None:
    try:
        found, error = work(), None
    except BaseException as raised:  # noqa: BLE001 - whatever it is, the caller gets it
        found, error = None, raised
    with _lock:
        del _asked[file]
    if error is None:
        answer.set_result(found)
    else:
        answer.set_exception(error)
