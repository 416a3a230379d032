"""Every setting of `serve`: one table for the flags, the environment variables and the keys of the config file.

Order: flag, environment (`SGLANG_TUNING_…`), config file, default. A wrong value is a `UsageError`: one line that names
the key, the value and the remedy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sglang_tuning_exporter.config import values
from sglang_tuning_exporter.config.values import (
    DEFAULT_PORT,
    Address,
    UsageError,
    agreeing,
    key_in,
    parse_address,
    suggestion,
    thresholds,
)
from sglang_tuning_exporter.state.profiles import DEFAULT_PROFILE, PROFILES, THRESHOLDS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "DEFAULT_PORT",
    "Address",
    "Config",
    "Option",
    "UsageError",
    "add_arguments",
    "agreeing",
    "key_in",
    "parse_address",
    "resolve",
    "suggestion",
    "thresholds",
]

ENVIRONMENT_PREFIX = "SGLANG_TUNING_"
API_KEY_VARIABLE = ENVIRONMENT_PREFIX + "API_KEY"


@dataclass(frozen=True, slots=True)
class Config:
    """The effective settings, checked once; nothing reads the environment after this."""

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
    # From a file or the environment, never from a flag: any user can read the arguments of a process.
    api_key: str | None = field(default=None, repr=False)

    @property
    def metrics_url(self) -> str | None:
        """Where SGLang's exposition is, or None without `--sglang-url`."""
        return None if self.sglang_url is None else self.sglang_url + self.metrics_path


@dataclass(frozen=True, slots=True)
class Option:
    """One setting. `check(key, value)` converts the value of a source, or raises `UsageError`."""

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
        """The flag, as `--sglang-url`; a switch that is on by default has `--no-…`."""
        return ("--no-" if self.switch and self.default else "--") + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable, as `SGLANG_TUNING_SGLANG_URL`."""
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def default_text(self) -> str:
        """The default as a user would write it, empty if there is none."""
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
        values.server_url,
        default=None,
        metavar="URL",
        help="the SGLang server, such as http://127.0.0.1:30000; without it only the log is read",
    ),
    Option(
        "log_file",
        values.paths,
        default=(),
        metavar="PATH|GLOB|-",
        help="the server's log; may be given again; - is standard input",
        repeatable=True,
    ),
    Option(
        "profile",
        values.profile_name,
        default=DEFAULT_PROFILE,
        metavar="|".join(PROFILES),
        help="what this server is for: the same figure means different things",
    ),
    Option(
        "listen_address",
        values.parse_address,
        default=Address("0.0.0.0", DEFAULT_PORT),  # noqa: S104 - as every exporter
        metavar="HOST:PORT",
        help="where to serve /metrics and the page",
        aliases=("--web.listen-address",),
    ),
    Option(
        "scrape_timeout",
        values.seconds,
        default=10.0,
        metavar="SECONDS",
        help="longest wait for SGLang; the timeout that the scraper announces shortens it",
    ),
    Option(
        "metrics_path",
        values.path_of_metrics,
        default="/metrics",
        metavar="PATH",
        help="where SGLang's exposition lies under its address",
    ),
    Option(
        "passthrough", values.switch, default=True, help="leave SGLang's own series out of our /metrics", switch=True
    ),
    Option(
        "from_start",
        values.switch,
        default=False,
        help="read existing logs from their start instead of their end",
        switch=True,
    ),
    Option(
        "api_key_file",
        values.key_file,
        default=None,
        metavar="FILE",
        help="file with SGLang's --api-key, sent as a bearer token; the key itself may stand in SGLANG_TUNING_API_KEY",
    ),
    Option(
        "state_file",
        values.state_file,
        default=None,
        metavar="PATH",
        help="where positions in the log and counters outlive a restart of the exporter",
    ),
    Option(
        "threshold",
        values.thresholds,
        default=MappingProxyType({}),
        metavar="NAME=VALUE",
        help=f"a figure of your own in place of the profile's, may be given again: {', '.join(THRESHOLDS)}",
        repeatable=True,
    ),
    Option(
        "web_config",
        values.web_config,
        default=None,
        metavar="FILE",
        help="TLS, passwords and headers, in the format of every exporter's --web.config.file; read again when it changes",
        aliases=("--web.config.file",),
    ),
    Option(
        "external_url",
        values.url,
        default=None,
        metavar="URL",
        help="this exporter's address as people reach it, for the links in notifications (default: the address that Prometheus scrapes)",
    ),
)
assert (*(option.name for option in OPTIONS), "api_key") == tuple(each.name for each in fields(Config))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every flag and `--config` to `parser`, without defaults, so that environment and file apply."""
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
    """Return the settings from flags, environment and config file. Raise `UsageError`."""
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
            ):  # Python neither prints an integer of 5,000 digits nor converts it to a float
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


# Not UTF-8, or values that PyYAML cannot convert: 2025-13-01, !!int "", !!bool x, !!timestamp x, an escape beyond Unicode.
_UNREADABLE = (ValueError, LookupError, AttributeError, TypeError, OverflowError)


def _read_file(path: str) -> dict[str, Any]:
    import yaml  # noqa: PLC0415 - a start without a config file need not pay for the YAML parser

    try:
        text = Path(path).read_text(encoding="utf-8")
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            # A few aliases can stand for more values than fit into memory, and an error message would quote all of them.
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


# Kubernetes sets these in every pod if a service is called sglang-tuning.
_SERVICE_LINK = re.compile(ENVIRONMENT_PREFIX + r"(?:SERVICE_(?:HOST|PORT.*)|PORT(?:_.*)?)")


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Return a warning for each variable with our prefix that is unknown."""
    known = [*environment_names(), ENVIRONMENT_PREFIX + "FORMAT"]  # the last one is for `report`
    return [
        f"{name}: unknown variable, ignored{suggestion(name, known)}"
        for name in sorted(environment)
        if name.startswith(ENVIRONMENT_PREFIX) and name not in known and not _SERVICE_LINK.fullmatch(name)
    ]
