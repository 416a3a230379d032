"""Checks of settings: each converts the value of a flag, a variable or a file.

A wrong value is a `UsageError`: one line that names the key, the value and the remedy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sglang_tuning_exporter.state.profiles import PROFILES, THRESHOLDS, threshold_problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

DEFAULT_PORT = 9741


class UsageError(Exception):
    """A user's mistake in one line: key, value, remedy. The process ends with exit status 2."""


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean NAME?` for the known word nearest to a mistyped one, empty if none is near."""
    near = get_close_matches(word, list(known), n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a TCP port to listen on; port 0 asks the system for a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        """`host:port`, with brackets around an IPv6 host."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(key: str, value: Any) -> Address:
    """`host:port`, `:port` or `[v6]:port` as an `Address`. Raise `UsageError`."""
    match = re.fullmatch(r"(?:\[(?P<v6>[^\]\s]+)\]|(?P<host>[^:\s]*)):(?P<port>[0-9]{1,5})", _word(value))
    if match is None or int(match["port"]) > 65535:
        raise UsageError(f"{key}={value}: give HOST:PORT with a port from 0 to 65535, such as 0.0.0.0:{DEFAULT_PORT}")
    return Address(match["v6"] or match["host"] or "0.0.0.0", int(match["port"]))  # noqa: S104 - `:9741` means every interface, as in every exporter


def url(key: str, value: Any) -> str:
    """Check an HTTP address without a password. Raise `UsageError`."""
    text = _word(value).rstrip("/")
    if "@" in text:
        raise UsageError(
            f"{key}=…@{text.rpartition('@')[2]}: a password does not belong in an address; use --api-key-file"
        )
    try:
        parts = urlsplit(text)
        is_right = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_right = False
    if not is_right or any(c in "?#" or c.isspace() or not c.isprintable() for c in text):
        raise UsageError(f"{key}={value}: give an address, such as http://127.0.0.1:30000")
    return text


def server_url(key: str, value: Any) -> str:
    """Check SGLang's address; a copied `/metrics` at its end is removed. Raise `UsageError`."""
    return url(key, value).removesuffix("/metrics")


def paths(key: str, value: Any) -> tuple[str, ...]:
    """Check the paths of logs. Raise `UsageError`."""
    values = value if isinstance(value, (list, tuple)) else _word(value).split(",")
    paths = tuple(_word(item) for item in values)
    if not paths or "" in paths:
        raise UsageError(f"{key}={value}: give a path, a glob, or - for standard input")
    if paths.count("-") > 1:
        raise UsageError(f"{key}={value}: standard input can be read only once")
    return paths


def profile_name(key: str, value: Any) -> str:
    """Check the name of a profile. Raise `UsageError`."""
    if _word(value) not in PROFILES:
        raise UsageError(f"{key}={value}: give one of {', '.join(PROFILES)}{suggestion(_word(value), PROFILES)}")
    return _word(value)


def seconds(key: str, value: Any) -> float:
    """Check seconds above 0, up to 300. Raise `UsageError`."""
    try:
        seconds = float(_word(value))
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= 300:
        raise UsageError(f"{key}={value}: give seconds above 0 and up to 300")
    return seconds


def switch(key: str, value: Any) -> bool:
    """Check true or false. Raise `UsageError`."""
    if isinstance(value, bool):
        return value
    known = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    try:
        return known[_word(value).lower()]
    except KeyError:
        raise UsageError(f"{key}={value}: give true or false") from None


def path_of_metrics(key: str, value: Any) -> str:
    """Check the path of an exposition. Raise `UsageError`."""
    text = _word(value)
    if not text.startswith("/") or any(c in "?#@" or c.isspace() or not c.isprintable() for c in text):
        raise UsageError(f"{key}={value}: give a path that starts with /, such as /metrics")
    return text


def key_in(path: Path) -> str:
    """Return the key in a file with one line of text; empty if there is none."""
    try:
        key = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):  # missing, being replaced, a directory, not text
        return ""
    return key if key.isprintable() else ""


def key_file(key: str, value: Any) -> Path:
    """Check a file that holds a key. Raise `UsageError`."""
    path = Path(_word(value))
    if not key_in(path):
        raise UsageError(
            f"{key}={value}: give a file that holds the key as one line of text and that this user may read"
        )
    return path


def _word(value: Any) -> str:
    """Return a flag, a variable or a YAML scalar as text; empty for anything else."""
    return str(value).strip() if isinstance(value, (str, int, float)) and not isinstance(value, bool) else ""


def state_file(key: str, value: Any) -> Path:
    """Check the path of a file that can be written. Raise `UsageError`."""
    path = Path(_word(value))
    if not path.name or path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"{key}={value}: give a path for a file in a directory that exists")
    return path


def web_config(key: str, value: Any) -> Path:
    """Check a web configuration file. Raise `UsageError`."""
    path = Path(_word(value))
    if not path.is_file():
        raise UsageError(f"{key}={value}: give a web configuration file, such as Prometheus's exporters have")
    return path


def thresholds(key: str, value: Any) -> dict[str, float]:
    """Return thresholds from one or more `NAME=VALUE`, or from a mapping of a file. Raise `UsageError`."""
    if isinstance(value, dict):
        pairs = [(str(name), figure) for name, figure in value.items()]
    else:
        items = value if isinstance(value, (list, tuple)) else _word(value).split(",")
        pairs = [(name.strip(), figure) for name, _, figure in (_word(item).partition("=") for item in items)]
    found: dict[str, float] = {}
    for name, figure in pairs:
        try:
            found[name] = float(_word(figure))
        except ValueError:
            raise UsageError(f"{key}={name}={figure}: give a number, such as queue_upper=500") from None
        problem = threshold_problem(name, found[name])
        if problem:
            near = "" if name in THRESHOLDS else suggestion(name, THRESHOLDS)
            raise UsageError(f"{key}={name}={figure}: {problem}{near}")
    return found


def agreeing(values: Mapping[str, float], profile: str) -> dict[str, float]:
    """Return the thresholds if they fit each other and the profile. Raise `UsageError`."""
    problem = PROFILES[profile].with_thresholds(values).contradiction
    if problem:
        raise UsageError(f"--threshold={problem}")
    return dict(values)
