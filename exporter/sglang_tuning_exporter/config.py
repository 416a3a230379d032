"""Every setting of `serve`: one table, from which the flags, the environment variables and the keys of the config file come.

Order: flag, environment (`SGLANG_TUNING_…`), config file, default. A wrong value is a `UsageError`: one line that names the key, the value and the remedy.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sglang_tuning_exporter.guide.profiles import DEFAULT_PROFILE, PROFILES

ENVIRONMENT_PREFIX = "SGLANG_TUNING_"
DEFAULT_PORT = 9741


class UsageError(Exception):
    """A user's mistake, as one line: the key, the value, what would be right. The process ends with exit status 2."""


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a TCP port to listen on; port 0 asks the system for a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        """`host:port`, with brackets around an IPv6 host."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Config:
    """The settings in force, checked once; nothing reads the environment after this."""

    sglang_url: str | None
    log_file: tuple[str, ...]
    profile: str
    listen_address: Address
    scrape_timeout: float
    metrics_path: str
    passthrough: bool
    from_start: bool
    api_key_file: Path | None

    @property
    def metrics_url(self) -> str | None:
        """Where SGLang's exposition is, or None without `--sglang-url`."""
        return None if self.sglang_url is None else self.sglang_url + self.metrics_path


def parse_address(key: str, value: str) -> Address:
    """`host:port`, `:port` or `[v6]:port` as an `Address`. Raises `UsageError`."""
    match = re.fullmatch(r"(?:\[(?P<v6>[^\]]*)\]|(?P<host>[^:]*)):(?P<port>\d{1,5})", value.strip())
    if match is None or int(match["port"]) > 65535:
        raise UsageError(f"{key}={value}: give HOST:PORT with a port from 0 to 65535, such as 0.0.0.0:{DEFAULT_PORT}")
    return Address(match["v6"] or match["host"] or "0.0.0.0", int(match["port"]))  # noqa: S104 - `:9741` means every interface, as in every exporter


def _url(key: str, value: Any) -> str:
    text = str(value).strip().rstrip("/")
    parts = urlsplit(text)
    try:
        port_is_right = parts.port is None or parts.port > 0
    except ValueError:
        port_is_right = False
    if parts.scheme not in {"http", "https"} or not parts.hostname or not port_is_right or parts.query or parts.fragment:
        raise UsageError(f"{key}={value}: give the server's address, such as http://127.0.0.1:30000")
    if parts.username or parts.password:
        raise UsageError(f"{key}=…@{parts.hostname}: a password does not belong in an address; use --api-key-file")
    return text


def _paths(key: str, value: Any) -> tuple[str, ...]:
    values = [str(item) for item in value] if isinstance(value, (list, tuple)) else str(value).split(",")
    paths = tuple(item.strip() for item in values if item.strip())
    if not paths:
        raise UsageError(f"{key}={value}: give a path, a glob, or - for standard input")
    if paths.count("-") > 1:
        raise UsageError(f"{key}={value}: standard input can be read only once")
    return paths


def _profile(key: str, value: Any) -> str:
    if value not in PROFILES:
        raise UsageError(f"{key}={value}: give one of {', '.join(PROFILES)}")
    return str(value)


def _seconds(key: str, value: Any) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 < seconds <= 300:
        raise UsageError(f"{key}={value}: give seconds above 0 and up to 300")
    return seconds


def _switch(key: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    known = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    try:
        return known[str(value).strip().lower()]
    except KeyError:
        raise UsageError(f"{key}={value}: give true or false") from None


def _path_of_metrics(key: str, value: Any) -> str:
    if not str(value).startswith("/") or any(c.isspace() for c in str(value)):
        raise UsageError(f"{key}={value}: give a path that starts with /, such as /metrics")
    return str(value)


def _readable(key: str, value: Any) -> Path:
    path = Path(str(value))
    if not os.access(path, os.R_OK) or path.is_dir():
        raise UsageError(f"{key}={value}: cannot be read; give a file that holds the key and that this user may read")
    return path


@dataclass(frozen=True, slots=True)
class Option:
    """One setting. `check(key, value)` turns a flag's, variable's or file's value into the field's, or raises `UsageError`."""

    name: str
    check: Callable[[str, Any], Any]
    default: Any
    metavar: str
    help: str
    repeatable: bool = False
    switch: bool = False

    @property
    def flag(self) -> str:
        """`--sglang-url`; a switch that is on by default is written `--no-…`."""
        return ("--no-" if self.switch and self.default else "--") + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """`SGLANG_TUNING_SGLANG_URL`."""
        return ENVIRONMENT_PREFIX + self.name.upper()


OPTIONS: tuple[Option, ...] = (
    Option("sglang_url", _url, None, "URL", "the SGLang server, such as http://127.0.0.1:30000; without it only the log is read"),
    Option("log_file", _paths, (), "PATH|GLOB|-", "the server's log; may be given again; - is standard input", repeatable=True),
    Option("profile", _profile, DEFAULT_PROFILE, "|".join(PROFILES), "what this server is for: the same figure means different things"),
    Option("listen_address", parse_address, Address("0.0.0.0", DEFAULT_PORT), "HOST:PORT", "where to serve /metrics and the page"),  # noqa: S104
    Option("scrape_timeout", _seconds, 10.0, "SECONDS", "longest wait for SGLang when the scraper announces no timeout of its own"),
    Option("metrics_path", _path_of_metrics, "/metrics", "PATH", "where SGLang's exposition lies under its address"),
    Option("passthrough", _switch, True, "", "leave SGLang's own series out of our /metrics", switch=True),
    Option("from_start", _switch, False, "", "read existing logs from their start instead of their end", switch=True),
    Option("api_key_file", _readable, None, "FILE", "file with SGLang's --api-key, sent as a bearer token"),
)  # fmt: skip
assert tuple(option.name for option in OPTIONS) == tuple(field.name for field in fields(Config))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` a flag for every option, and `--config`. Defaults stay out, so that environment and file can speak."""
    for option in OPTIONS:
        words = f"{option.help} [{option.variable}]"
        if option.switch:
            parser.add_argument(
                option.flag, dest=option.name, action="store_const", const=not option.default, default=None, help=words
            )
        elif option.repeatable:
            parser.add_argument(option.flag, dest=option.name, action="append", metavar=option.metavar, help=words)
        else:
            parser.add_argument(option.flag, dest=option.name, metavar=option.metavar, help=words)
    parser.add_argument("--config", metavar="FILE.yml", help=f"a YAML file with the same keys [{ENVIRONMENT_PREFIX}CONFIG]")


def resolve(arguments: argparse.Namespace, environment: Mapping[str, str]) -> Config:
    """The settings in force from parsed flags, the environment and the config file they name. Raises `UsageError`."""
    path = arguments.config or environment.get(ENVIRONMENT_PREFIX + "CONFIG")
    stored = _read_file(path) if path else {}
    values: dict[str, Any] = {}
    for option in OPTIONS:
        given = getattr(arguments, option.name)
        if given is not None:
            values[option.name] = option.check(option.flag, given)
        elif environment.get(option.variable, "") != "":
            values[option.name] = option.check(option.variable, environment[option.variable])
        elif stored.get(option.name) is not None:
            values[option.name] = option.check(f"{path}: {option.name}", stored[option.name])
        else:
            values[option.name] = option.default
    config = Config(**values)
    if config.sglang_url is None and not config.log_file:
        raise UsageError("nothing to watch: give --sglang-url http://HOST:PORT, --log-file PATH, or both")
    return config


def _read_file(path: str) -> dict[str, Any]:
    import yaml  # noqa: PLC0415 - a start without a config file need not pay for the YAML parser

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config={path}: {error.strerror or error}; give a readable YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())[:160]
        raise UsageError(f"--config={path}: not YAML ({reason})") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"--config={path}: give a mapping of keys to values, such as 'profile: offline'")
    known = {option.name for option in OPTIONS}
    keys = {str(key).replace("-", "_"): value for key, value in content.items()}
    for key in keys:
        if key not in known:
            raise UsageError(f"--config={path}: unknown key {key}; known are {', '.join(sorted(known))}")
    return keys


def environment_names() -> Sequence[str]:
    """Every environment variable that is read."""
    return [option.variable for option in OPTIONS] + [ENVIRONMENT_PREFIX + "CONFIG"]
