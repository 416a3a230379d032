"""Every setting of `serve`: one table for the flags, the environment variables and the keys of the config file.

Order: flag, environment (`SGLANG_TUNING_…`), config file, default. A wrong value is a `UsageError`: one line that names
the key of its source, the value and the remedy.

The standard library's `ChainMap` layers them. ConfigArgParse was tried: it passes values of variables and files on as
text of the command line, and to keep their keys and types all the same needed more code than this.
"""

from __future__ import annotations

import argparse
import re
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from sglang_tuning_exporter.config import files, values
from sglang_tuning_exporter.config.profiles import DEFAULT_PROFILE, PROFILES, THRESHOLDS
from sglang_tuning_exporter.config.values import UsageError

__all__ = [
    "API_KEY_VARIABLE",
    "ENVIRONMENT_PREFIX",
    "FAIL_ON",
    "OPTIONS",
    "REPORT_FORMAT",
    "Config",
    "Option",
    "add_arguments",
    "layered",
    "resolve",
    "unknown_variables",
]
ENVIRONMENT_PREFIX = "SGLANG_TUNING_"
API_KEY_VARIABLE = ENVIRONMENT_PREFIX + "API_KEY"


@dataclass(frozen=True, slots=True)
class Option:
    """One setting. `convert` checks the value of a source; `repeatable`: the flag may be given again."""

    name: str
    convert: Callable[[Any], Any]
    default: Any
    help: str
    metavar: str = ""
    repeatable: bool = False
    aliases: tuple[str, ...] = ()

    @property
    def is_switch(self) -> bool:
        """Whether the flag has no value."""
        return isinstance(self.default, bool)

    @property
    def flag(self) -> str:
        """The flag, as `--sglang-url`; a switch that is on by default has `--no-…`."""
        return ("--no-" if self.default is True else "--") + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable, as `SGLANG_TUNING_SGLANG_URL`."""
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def default_text(self) -> str:
        """The default as a user would write it, empty if there is none."""
        if self.is_switch or not self.default:
            return ""
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)


def _setting(convert: Callable[[Any], Any], default: Any, metavar: str, help: str, **more: Any) -> Any:  # noqa: A002 - argparse's name
    return field(
        default_factory=lambda: default,
        metadata={"convert": convert, "default": default, "metavar": metavar, "help": help, **more},
    )


@dataclass(frozen=True, slots=True)
class Config:
    """The effective settings, checked once; nothing reads the environment after this."""

    sglang_url: str | None = _setting(
        values.server_url,
        None,
        "URL",
        "the SGLang server, such as http://127.0.0.1:30000; without it only the log is read",
    )
    log_file: tuple[str, ...] = _setting(
        values.paths, (), "PATH|GLOB|-", "the server's log; may be given again; - is standard input", repeatable=True
    )
    profile: str = _setting(
        values.one_of(PROFILES),
        DEFAULT_PROFILE,
        "|".join(PROFILES),
        "what this server is for: the same figure means different things",
    )
    listen_address: str = _setting(
        values.address,
        values.joined("0.0.0.0", values.DEFAULT_PORT),  # noqa: S104 - as every exporter
        "HOST:PORT",
        "where to serve /metrics and the page",
        aliases=("--web.listen-address",),
    )
    scrape_timeout: float = _setting(
        values.seconds,
        10.0,
        "SECONDS",
        "longest wait for SGLang; a scraper that waits less gets a page without SGLang's own series",
    )
    metrics_path: str = _setting(
        values.path_of_metrics, "/metrics", "PATH", "where SGLang's exposition lies under its address"
    )
    passthrough: bool = _setting(values.switch, True, "", "leave SGLang's own series out of our /metrics")
    lean_passthrough: bool = _setting(
        values.switch,
        False,
        "",
        "pass on only those of SGLang's own series that the boards read: about a third of them",
    )
    from_start: bool = _setting(values.switch, False, "", "read existing logs from their start instead of their end")
    api_key_file: Path | None = _setting(
        files.setting("give a file that holds the key as one line of text and that this user may read", files.key_in),
        None,
        "FILE",
        "file with SGLang's --api-key, sent as a bearer token; the key itself may stand in SGLANG_TUNING_API_KEY",
    )
    state_file: Path | None = _setting(
        files.setting(
            "give a path for a file in a directory that exists",
            lambda path: path.name and not path.is_dir() and path.parent.is_dir(),
            is_tried_again=True,
        ),
        None,
        "PATH",
        "where positions in the log and counters outlive a restart of the exporter",
    )
    threshold: Mapping[str, float] = _setting(
        values.thresholds,
        {},
        "NAME=VALUE",
        f"a figure of your own in place of the profile's, may be given again: {', '.join(THRESHOLDS)}",
        repeatable=True,
    )
    accept: Mapping[str, str] = _setting(
        values.accepted,
        {},
        "NAME=REASON",
        "a diagnosis (docs/diagnoses.md) that is no trouble here, and why: not in verdict, status, alerts and boards;"
        " the page says so; may be given again",
        repeatable=True,
    )
    wait: Mapping[str, float] = _setting(
        values.waits,
        {},
        "NAME=DURATION",
        "how long a diagnosis must hold before its alert begins, such as queue_too_long=15m; may be given again",
        repeatable=True,
    )
    web_config: Path | None = _setting(
        files.setting(
            "give a web configuration file, such as Prometheus's exporters have", lambda path: files.read(path) or True
        ),
        None,
        "FILE",
        "TLS, passwords and client certificates, in the format of every exporter's --web.config.file; read again when"
        " it changes",
        aliases=("--web.config.file",),
    )
    external_url: str | None = _setting(
        values.url,
        None,
        "URL",
        "this exporter's address as people reach it, for the links of boards (default: the address that Prometheus"
        " scrapes)",
    )
    # From a file or the environment, never from a flag: any user can read the arguments of a process.
    api_key: str | None = field(default=None, repr=False)

    @property
    def metrics_url(self) -> str | None:
        """Where SGLang's exposition is, or None without `--sglang-url`."""
        return None if self.sglang_url is None else self.sglang_url + self.metrics_path


OPTIONS = tuple(Option(each.name, **each.metadata) for each in fields(Config) if each.metadata)
FAIL_ON = ("info", "warning", "critical", "never")  # severities from which on `report` ends with 1
REPORT_FORMAT = Option(
    "format",
    values.one_of(("text", "json", "html")),
    "text",
    "how findings are printed; html is one self-contained page",
    "text|json|html",
)


def add_arguments(parser: argparse.ArgumentParser, options: Iterable[Option]) -> None:
    """Add the flags of settings to `parser`, without defaults, so that environment and file apply."""
    for option in options:
        default = f" (default {option.default_text})" if option.default_text else ""
        words = f"{option.help}{default} [{option.variable}]".replace("%", "%%")
        kind: dict[str, Any] = {"action": "append" if option.repeatable else "store", "metavar": option.metavar}
        if option.is_switch:
            kind = {"action": "store_const", "const": not option.default}
        parser.add_argument(option.flag, *option.aliases, dest=option.name, help=words, **kind)


def layered(
    options: Collection[Option],
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    stored: dict[str, tuple[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return the checked value of each option, profile and threshold among them. Raise `UsageError`.

    `stored` has key and value of each setting in the config file.
    """
    sources = ChainMap(
        {each.name: (each.flag, flags[each.name]) for each in options if flags.get(each.name) is not None},
        {each.name: (each.variable, environment[each.variable]) for each in options if environment.get(each.variable)},
        stored or {},
        {each.name: ("", each.default) for each in options},
    )
    found = {}
    for option in options:
        key, value = sources[option.name]
        try:
            found[option.name] = values.check(option.convert, key, value) if key else value
        except (ValueError, OverflowError):  # Python neither prints an integer of 5,000 digits nor makes it a float
            raise UsageError(f"{key}: too large a figure; give a smaller one") from None
    if problem := PROFILES[found["profile"]].with_thresholds(found["threshold"]).contradiction:
        raise UsageError(f"{sources['threshold'][0]}={problem}")
    return found


def resolve(flags: Mapping[str, Any], environment: Mapping[str, str]) -> Config:
    """Return the settings from flags, environment and config file. Raise `UsageError`."""
    path = flags.get("config")
    if path is None:
        path = environment.get(ENVIRONMENT_PREFIX + "CONFIG") or None
    found = layered(OPTIONS, flags, environment, None if path is None else _read_file(path))
    config = Config(**found, api_key=_api_key(found["api_key_file"], environment.get(API_KEY_VARIABLE)))
    if config.sglang_url is None and not config.log_file:
        raise UsageError("nothing to watch: give --sglang-url http://HOST:PORT, --log-file PATH, or both")
    return config


def _api_key(path: Path | None, variable: str | None) -> str | None:
    if path is not None:
        with suppress(OSError):  # a moment ago it could be read; each request reads it again
            return files.key_in(path) or None
        return None
    key = (variable or "").strip()
    if key and not (key.isascii() and key.isprintable()):
        raise UsageError(f"{API_KEY_VARIABLE}=…: give SGLang's --api-key as one line of plain text")
    return key or None


def _read_file(path: str) -> dict[str, tuple[str, Any]]:
    """Return key and value of each setting in a YAML file."""
    known = {option.name for option in OPTIONS}
    keys = {str(key).replace("-", "_"): value for key, value in files.mapping_in(Path(path)).items()}
    for key in keys:
        if key not in known:
            raise UsageError(
                f"--config={path}: unknown key {key}; known are"
                f" {', '.join(sorted(known))}{values.suggestion(key, known)}"
            )
    return {key: (f"{path}: {key}", value) for key, value in keys.items() if value is not None}


# Kubernetes sets these in every pod if a service is called sglang-tuning.
_SERVICE_LINK = re.compile(ENVIRONMENT_PREFIX + r"(?:SERVICE_(?:HOST|PORT.*)|PORT(?:_.*)?)")


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Return a warning for each variable with our prefix that is unknown."""
    known = [
        *(option.variable for option in (*OPTIONS, REPORT_FORMAT)),
        API_KEY_VARIABLE,
        ENVIRONMENT_PREFIX + "CONFIG",
    ]
    return [
        f"{name}: unknown variable, ignored{values.suggestion(name, known)}"
        for name in sorted(environment)
        if name.startswith(ENVIRONMENT_PREFIX) and name not in known and not _SERVICE_LINK.fullmatch(name)
    ]
