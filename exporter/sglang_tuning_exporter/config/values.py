"""Checks of settings: each converts the value of a flag, a variable or a file.

A wrong value is a `UsageError`: one line that names the key, the value and the remedy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

from sglang_tuning_exporter.config.profiles import THRESHOLDS, threshold_problem
from sglang_tuning_exporter.sglang.clean import is_secret, without_secrets

DEFAULT_PORT = 9741
LONGEST_WAIT, MOST_OF_REASON, MOST_LISTED = 86400.0, 200, 20
_T = TypeVar("_T")


class UsageError(Exception):
    """A user's mistake in one line: key, value, remedy. The process ends with exit status 2.

    The check of a value gives the remedy, and whoever asked for it the keys around it (`under`). `shown` stands for the
    value where that must not be repeated, empty for none.
    """

    def __init__(self, remedy: str, shown: str | None = None, *place: str) -> None:
        super().__init__(remedy)
        self.remedy, self.place = remedy, place
        self.shown = f"={shown}" if shown else shown

    def under(self, key: str, value: Any) -> UsageError:
        """Add the key of a value, before the keys inside that value."""
        is_key = is_secret(key) and "/" not in str(value)  # the key itself, given in place of its file
        self.shown = f"={'…' if is_key else without_secrets(str(value))}" if self.shown is None else self.shown
        self.place = (key, *self.place)
        return self

    def __str__(self) -> str:
        """The whole line."""
        return f"{'.'.join(self.place)}{self.shown or ''}: {self.remedy}" if self.place else self.remedy


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean NAME?` for the known word nearest to a mistyped one, empty if none is near."""
    from difflib import get_close_matches  # noqa: PLC0415 - only a mistake needs it

    near = get_close_matches(word, list(known), n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""


def joined(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check(convert: Callable[[Any], _T], key: str, value: Any) -> _T:
    """Return the converted value of a source. Raise `UsageError`."""
    try:
        return convert(value)
    except UsageError as error:
        raise error.under(key, value) from None


def section(
    known: Mapping[str, Callable[[Any], Any]], empty: Collection[Any] = (None,)
) -> Callable[[Any], dict[str, Any]]:
    """Return the check of a mapping with these keys; a value that is `empty` counts as not set."""

    def convert(value: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, each in mapping(value).items():
            if key not in known:
                few = f"known are {', '.join(known)}" if len(known) <= MOST_LISTED else "docs/reference lists them"
                raise UsageError(f"unknown key{suggestion(key, known) or f'; {few}'}", "", key)
            try:
                found |= {} if each in empty else {key: known[key](each)}
            except UsageError as error:
                raise error.under(key, each) from None
        return found

    return convert


def mapping(value: Any) -> dict[str, Any]:
    """Check a mapping, whatever its keys."""
    if not isinstance(value, dict):
        raise UsageError("give a mapping of keys to values", "")
    return {str(key): each for key, each in value.items()}


# Each of the following converts a flag, a variable or a value of YAML, or raises `UsageError`.


def address(value: Any) -> str:
    """Check `host:port`, `:port` or `[v6]:port`, to listen on; port 0 asks the system for a free one."""
    match = re.fullmatch(r"(?:\[(?P<v6>[^\]\s]+)\]|(?P<host>[^:\s]*)):(?P<port>[0-9]{1,5})", as_word(value))
    if match is None or int(match["port"]) > 65535:
        raise UsageError(f"give HOST:PORT with a port from 0 to 65535, such as 0.0.0.0:{DEFAULT_PORT}")
    return joined(match["v6"] or match["host"] or "0.0.0.0", int(match["port"]))  # noqa: S104 - `:9741` means every interface, as in every exporter


def url(value: Any) -> str:
    """Check an HTTP address without a password."""
    text = as_word(value).rstrip("/")
    if "@" in text:
        shown = f"…@{text.rpartition('@')[2]}"
        raise UsageError("a password does not belong in an address; use --api-key-file", shown)
    if not is_address(text, without="?#"):
        raise UsageError("give an address, such as http://127.0.0.1:30000")
    return text


def is_address(text: str, without: str = "") -> bool:
    """Return whether a text is an HTTP address, of printable characters but these."""
    try:
        parts = urlsplit(text)
        is_right = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid IPv6 address or port
        return False
    return is_right and _is_plain(text, without)


def server_url(value: Any) -> str:
    """Check SGLang's address; a copied `/metrics` at its end is removed."""
    return url(value).removesuffix("/metrics")


def paths(value: Any) -> tuple[str, ...]:
    """Check the paths of logs."""
    found = tuple(map(as_word, _several(value)))
    if not found or "" in found:
        raise UsageError("give a path, a glob, or - for standard input")
    if found.count("-") > 1:
        raise UsageError("standard input can be read only once")
    return found


def one_of(known: Collection[str]) -> Callable[[Any], str]:
    """Return a check of a word that must be a known one."""

    def convert(value: Any) -> str:
        if (word := as_word(value)) not in known:
            raise UsageError(f"give one of {', '.join(known)}{suggestion(word, known)}")
        return word

    return convert


def seconds(value: Any) -> float:
    """Check seconds above 0, up to 300."""
    with suppress(ValueError):
        if 0 < (found := float(as_word(value))) <= 300:
            return found
    raise UsageError("give seconds above 0 and up to 300")


def switch(value: Any) -> bool:
    """Check true or false."""
    word = str(value).lower() if isinstance(value, bool) else as_word(value).lower()
    if word in {"true", "1", "yes", "on"}:
        return True
    if word in {"false", "0", "no", "off"}:
        return False
    raise UsageError("give true or false")


def path_of_metrics(value: Any) -> str:
    """Check the path of an exposition."""
    if not (text := as_word(value)).startswith("/") or not _is_plain(text, "?#@"):
        raise UsageError("give a path that starts with /, such as /metrics")
    return text


def thresholds(value: Any) -> dict[str, float]:
    """Return thresholds from one or more `NAME=VALUE`, or from a mapping."""
    found: dict[str, float] = {}
    for name, figure in _named(value, ","):
        shown = f"{name}={figure}"
        try:
            found[name] = float(figure)
        except ValueError:
            raise UsageError("give a number, such as queue_upper=500", shown) from None
        if problem := threshold_problem(name, found[name]):
            raise UsageError(problem + ("" if name in THRESHOLDS else suggestion(name, THRESHOLDS)), shown)
    return found


def accepted(value: Any) -> dict[str, str]:
    """Return diagnoses with the reasons for which they are accepted, from `NAME=REASON` or a mapping; several in a
    variable end with `;`.
    """
    found = {}
    for name, reason in _named(value, ";"):
        if not reason:
            raise UsageError("say why as well, such as queue_too_long=batch jobs may wait", name)
        found[name] = reason[:MOST_OF_REASON]
    return found


def waits(value: Any) -> dict[str, float]:
    """Return seconds by diagnosis, from `NAME=DURATION` or a mapping; a duration is 90, 90s, 15m or 1h."""
    found = {}
    for name, duration in _named(value, ","):
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(s|m|h|)", duration)
        seconds = float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]] if match else -1.0
        if not 0 <= seconds <= LONGEST_WAIT:
            raise UsageError("give a duration up to 24h, such as queue_too_long=15m", f"{name}={duration}")
        found[name] = seconds
    return found


def _named(value: Any, separator: str) -> list[tuple[str, str]]:
    """Return the pairs of a mapping, or of texts `NAME=VALUE`."""
    if isinstance(value, dict):
        return [(str(name), as_word(word)) for name, word in value.items()]
    parts = value if isinstance(value, (list, tuple)) else filter(None, map(str.strip, as_word(value).split(separator)))
    pairs: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, dict):
            pairs += _named(part, separator)
        else:
            name, _, word = as_word(part).partition("=")
            pairs.append((name.strip(), word.strip()))
    if not pairs or not all(name for name, _ in pairs):
        raise UsageError("give NAME=VALUE")
    return pairs


def as_word(value: Any) -> str:
    """Return a flag, a variable or a YAML scalar as text; empty for anything else."""
    return str(value).strip() if isinstance(value, (str, int, float)) and not isinstance(value, bool) else ""


def _several(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else as_word(value).split(",")


def _is_plain(text: str, without: str) -> bool:
    return not any(c in without or c.isspace() or not c.isprintable() for c in text)
