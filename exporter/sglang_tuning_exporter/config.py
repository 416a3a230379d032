"""Every setting of `serve`: one table for the flags, the environment variables and the keys of the config file.

Order: flag, environment (`SGLANG_TUNING_…`), config file, default. A wrong value is a `UsageError`: one line that names
the key, the value and the remedy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sglang_tuning_exporter.state.profiles import DEFAULT_PROFILE, PROFILES, THRESHOLDS, threshold_problem

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Mapping, Sequence

ENVIRONMENT_PREFIX = "SGLANG_TUNING_"
API_KEY_VARIABLE = ENVIRONMENT_PREFIX + "API_KEY"
DEFAULT_PORT = 9741


class UsageError(Exception):
    """A user's mistake, as one line: the key, the value, what would be right. The process ends with exit status 2."""


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean NAME?` for the known word nearest to a mistyped one, empty where none is near."""
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
    state_file: Path | None
    threshold: Mapping[str, float] = field(default_factory=dict)
    web_config: Path | None = None
    external_url: str | None = None
    # From that file or from the environment, never from a flag: arguments of a process can be read by anybody.
    api_key: str | None = field(default=None, repr=False)

    @property
    def metrics_url(self) -> str | None:
        """Where SGLang's exposition is, or None without `--sglang-url`."""
        return None if self.sglang_url is None else self.sglang_url + self.metrics_path


def parse_address(key: str, value: Any) -> Address:
    """`host:port`, `:port` or `[v6]:port` as an `Address`. Raises `UsageError`."""
    match = re.fullmatch(r"(?:\[(?P<v6>[^\]\s]+)\]|(?P<host>[^:\s]*)):(?P<port>[0-9]{1,5})", _word(value))
    if match is None or int(match["port"]) > 65535:
        raise UsageError(f"{key}={value}: give HOST:PORT with a port from 0 to 65535, such as 0.0.0.0:{DEFAULT_PORT}")
    return Address(match["v6"] or match["host"] or "0.0.0.0", int(match["port"]))  # noqa: S104 - `:9741` means every interface, as in every exporter


def _url(key: str, value: Any) -> str:
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


def _server_url(key: str, value: Any) -> str:
    """Read SGLang's address; one that is copied with its `/metrics` is taken without it."""
    return _url(key, value).removesuffix("/metrics")


def _paths(key: str, value: Any) -> tuple[str, ...]:
    values = value if isinstance(value, (list, tuple)) else _word(value).split(",")
    paths = tuple(_word(item) for item in values)
    if not paths or "" in paths:
        raise UsageError(f"{key}={value}: give a path, a glob, or - for standard input")
    if paths.count("-") > 1:
        raise UsageError(f"{key}={value}: standard input can be read only once")
    return paths


def _profile(key: str, value: Any) -> str:
    if _word(value) not in PROFILES:
        raise UsageError(f"{key}={value}: give one of {', '.join(PROFILES)}{suggestion(_word(value), PROFILES)}")
    return _word(value)


def _seconds(key: str, value: Any) -> float:
    try:
        seconds = float(_word(value))
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= 300:
        raise UsageError(f"{key}={value}: give seconds above 0 and up to 300")
    return seconds


def _switch(key: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    known = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    try:
        return known[_word(value).lower()]
    except KeyError:
        raise UsageError(f"{key}={value}: give true or false") from None


def _path_of_metrics(key: str, value: Any) -> str:
    text = _word(value)
    if not text.startswith("/") or any(c in "?#@" or c.isspace() or not c.isprintable() for c in text):
        raise UsageError(f"{key}={value}: give a path that starts with /, such as /metrics")
    return text


def key_in(path: Path) -> str:
    """Read the key that a file holds as one line of text; empty where it holds none."""
    try:
        key = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):  # missing, being replaced, a directory, not text
        return ""
    return key if key.isprintable() else ""


def _key_file(key: str, value: Any) -> Path:
    path = Path(_word(value))
    if not key_in(path):
        raise UsageError(
            f"{key}={value}: give a file that holds the key as one line of text and that this user may read"
        )
    return path


def _word(value: Any) -> str:
    """Take a flag's or variable's text, or a scalar of YAML, as text; empty for what is neither."""
    return str(value).strip() if isinstance(value, (str, int, float)) and not isinstance(value, bool) else ""


def _state_file(key: str, value: Any) -> Path:
    path = Path(_word(value))
    if not path.name or path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"{key}={value}: give a path for a file in a directory that exists")
    return path


def _web_config(key: str, value: Any) -> Path:
    path = Path(_word(value))
    if not path.is_file():
        raise UsageError(f"{key}={value}: give a web configuration file, such as Prometheus's exporters have")
    return path


def thresholds(key: str, value: Any) -> dict[str, float]:
    """`NAME=VALUE`, several of them, or a mapping as a file has it, as thresholds. Raises `UsageError`."""
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
    """Give the thresholds back where they agree with each other and with the profile's. Raises `UsageError`."""
    problem = PROFILES[profile].with_thresholds(values).contradiction
    if problem:
        raise UsageError(f"--threshold={problem}")
    return dict(values)


@dataclass(frozen=True, slots=True)
class Option:
    """One setting. `check(key, value)` turns what a source says into the field's value, or raises `UsageError`."""

    name: str
    check: Callable[[str, Any], Any]
    default: Any
    help: str
    metavar: str = ""
    repeatable: bool = False
    switch: bool = False
    aliases: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """`--sglang-url`; a switch that is on by default is written `--no-…`."""
        return ("--no-" if self.switch and self.default else "--") + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """`SGLANG_TUNING_SGLANG_URL`."""
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def default_text(self) -> str:
        """The default as a user would write it, empty where there is none."""
        return (
            ""
            if self.switch or not self.default
            else f"{self.default:g}"
            if isinstance(self.default, float)
            else str(self.default)
        )


OPTIONS: tuple[Option, ...] = (
    Option(
        "sglang_url",
        _server_url,
        default=None,
        metavar="URL",
        help="the SGLang server, such as http://127.0.0.1:30000; without it only the log is read",
    ),
    Option(
        "log_file",
        _paths,
        default=(),
        metavar="PATH|GLOB|-",
        help="the server's log; may be given again; - is standard input",
        repeatable=True,
    ),
    Option(
        "profile",
        _profile,
        default=DEFAULT_PROFILE,
        metavar="|".join(PROFILES),
        help="what this server is for: the same figure means different things",
    ),
    Option(
        "listen_address",
        parse_address,
        default=Address("0.0.0.0", DEFAULT_PORT),  # noqa: S104 - as every exporter
        metavar="HOST:PORT",
        help="where to serve /metrics and the page",
        aliases=("--web.listen-address",),
    ),
    Option(
        "scrape_timeout",
        _seconds,
        default=10.0,
        metavar="SECONDS",
        help="longest wait for SGLang; the timeout that the scraper announces shortens it",
    ),
    Option(
        "metrics_path",
        _path_of_metrics,
        default="/metrics",
        metavar="PATH",
        help="where SGLang's exposition lies under its address",
    ),
    Option("passthrough", _switch, default=True, help="leave SGLang's own series out of our /metrics", switch=True),
    Option(
        "from_start",
        _switch,
        default=False,
        help="read existing logs from their start instead of their end",
        switch=True,
    ),
    Option(
        "api_key_file",
        _key_file,
        default=None,
        metavar="FILE",
        help="file with SGLang's --api-key, sent as a bearer token; the key itself may stand in SGLANG_TUNING_API_KEY",
    ),
    Option(
        "state_file",
        _state_file,
        default=None,
        metavar="PATH",
        help="where positions in the log and counters outlive a restart of the exporter",
    ),
    Option(
        "threshold",
        thresholds,
        default=MappingProxyType({}),
        metavar="NAME=VALUE",
        help=f"a figure of your own in place of the profile's, may be given again: {', '.join(THRESHOLDS)}",
        repeatable=True,
    ),
    Option(
        "web_config",
        _web_config,
        default=None,
        metavar="FILE",
        help="TLS, passwords and headers, in the format of every exporter's --web.config.file; read again when it changes",
        aliases=("--web.config.file",),
    ),
    Option(
        "external_url",
        _url,
        default=None,
        metavar="URL",
        help="this exporter's address as people reach it, for the links in notifications (default: the address that Prometheus scrapes)",
    ),
)
assert (*(option.name for option in OPTIONS), "api_key") == tuple(each.name for each in fields(Config))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` every flag, and `--config`; no defaults, so that environment and file can speak."""
    for option in OPTIONS:
        default = f" (default {option.default_text})" if option.default_text else ""
        words = f"{option.help}{default} [{option.variable}]".replace("%", "%%")
        if option.switch:
            parser.add_argument(
                option.flag, dest=option.name, action="store_const", const=not option.default, default=None, help=words
            )
        elif option.repeatable:
            parser.add_argument(option.flag, dest=option.name, action="append", metavar=option.metavar, help=words)
        else:
            parser.add_argument(option.flag, *option.aliases, dest=option.name, metavar=option.metavar, help=words)
    parser.add_argument(
        "--config", metavar="FILE.yml", help=f"a YAML file with the same keys [{ENVIRONMENT_PREFIX}CONFIG]"
    )


def resolve(arguments: argparse.Namespace, environment: Mapping[str, str]) -> Config:
    """Give the settings in force from parsed flags, environment and the config file they name. Raises `UsageError`."""
    path = arguments.config if arguments.config is not None else environment.get(ENVIRONMENT_PREFIX + "CONFIG")
    stored = _read_file(path or "") if path or arguments.config is not None else {}
    values: dict[str, Any] = {}
    for option in OPTIONS:
        given = getattr(arguments, option.name)
        if given is not None:
            values[option.name] = option.check(option.flag, given)
        elif environment.get(option.variable, "") != "":
            values[option.name] = option.check(option.variable, environment[option.variable])
        elif stored.get(option.name) is not None:
            try:
                values[option.name] = option.check(f"{path}: {option.name}", stored[option.name])
            except (
                ValueError,
                OverflowError,
            ):  # Python neither writes an integer of 5,000 digits nor makes a float of it
                raise UsageError(f"{path}: {option.name}: too large a figure; give a smaller one") from None
        else:
            values[option.name] = option.default
    config = Config(**values, api_key=_api_key(values["api_key_file"], environment.get(API_KEY_VARIABLE)))
    if config.sglang_url is None and not config.log_file:
        raise UsageError("nothing to watch: give --sglang-url http://HOST:PORT, --log-file PATH, or both")
    agreeing(config.threshold, config.profile)
    return config


def _api_key(path: Path | None, variable: str | None) -> str | None:
    if path is not None:
        return key_in(path) or None
    key = (variable or "").strip()
    if key and not (key.isascii() and key.isprintable()):
        raise UsageError(f"{API_KEY_VARIABLE}=…: give SGLang's --api-key as one line of plain text")
    return key or None


# What is not UTF-8, and what PyYAML's conversions come upon: 2025-13-01, !!int "", !!bool x, !!timestamp x, an escape beyond Unicode.
_UNREADABLE = (ValueError, LookupError, AttributeError, TypeError, OverflowError)


def _read_file(path: str) -> dict[str, Any]:
    import yaml  # noqa: PLC0415 - a start without a config file need not pay for the YAML parser

    try:
        text = Path(path).read_text(encoding="utf-8")
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            # A page of them stands for more values than there is memory, and a message that repeats one never ends.
            raise UsageError(f"--config={path}: *alias: not taken; write the value out")
        content = yaml.safe_load(text)
    except OSError as error:
        raise UsageError(f"--config={path}: {error.strerror or error}; give a readable YAML file") from None
    except (yaml.YAMLError, RecursionError, *_UNREADABLE) as error:
        reason = " ".join(str(error).split())[:160]
        raise UsageError(f"--config={path}: not YAML ({reason}); write one 'key: value' on each line") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"--config={path}: give a mapping of keys to values, such as 'profile: offline'")
    known = {option.name for option in OPTIONS}
    keys = {str(key).replace("-", "_"): value for key, value in content.items()}
    for key in keys:
        if key not in known:
            raise UsageError(
                f"--config={path}: unknown key {key}; known are {', '.join(sorted(known))}{suggestion(key, known)}"
            )
    return keys


def environment_names() -> Sequence[str]:
    """Every environment variable that is read."""
    return [option.variable for option in OPTIONS] + [ENVIRONMENT_PREFIX + "CONFIG", API_KEY_VARIABLE]


# What Kubernetes sets in every pod for a service called sglang-tuning.
_SERVICE_LINK = re.compile(ENVIRONMENT_PREFIX + r"(?:SERVICE_(?:HOST|PORT.*)|PORT(?:_.*)?)")


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable with our prefix that nothing reads."""
    known = [*environment_names(), ENVIRONMENT_PREFIX + "FORMAT"]  # the last one is for `report`
    return [
        f"{name}: unknown variable, ignored{suggestion(name, known)}"
        for name in sorted(environment)
        if name.startswith(ENVIRONMENT_PREFIX) and name not in known and not _SERVICE_LINK.fullmatch(name)
    ]
