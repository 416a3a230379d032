"""Every command of the command line: its flags, and the function that it runs.

A function imports other rooms when it runs, so that `--help` is fast.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from sglang_tuning_exporter import __version__, config
from sglang_tuning_exporter.sglang.clean import clean, is_secret, without_secrets

PROGRAM = "sglang-tuning-exporter"
_Run: TypeAlias = "Callable[..., int]"
_Flag: TypeAlias = "Callable[[argparse.ArgumentParser], object]"
_COMMANDS: list[tuple[_Run, str, str | None, tuple[_Flag, ...]]] = []


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line that names the nearest known word."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given, allow_abbrev=False)  # `--api-key KEY`, SGLang's, is not `--api-key-file`

    def error(self, message: str) -> NoReturn:
        mistyped = re.search(r"(?:unrecognized arguments: |invalid choice: ')([^\s'=]+)", message)
        near = config.values.suggestion(mistyped[1], known_words(self)) if mistyped else ""
        raise config.values.UsageError(f"{without_secrets(message)}{near}; see {self.prog} --help")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Raise the error about unknown arguments: their names, and no value, which may be a secret."""
        flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        if flags[:1] == ["--api-key"]:
            remedy = "put the key into a file and give --api-key-file FILE, or set SGLANG_TUNING_API_KEY"
            raise config.values.UsageError(f"--api-key is SGLang's own flag: {remedy}")
        if not flags:
            words = "1 word belongs" if len(unknown) == 1 else f"{len(unknown)} words belong"
            self.error(f"{words} to no flag")
        from sglang_tuning_exporter.sglang.flags import argument_names

        name = flags[0].removeprefix("--").replace("-", "_")
        if is_secret(name) or name in argument_names():
            raise config.values.UsageError(f"{flags[0]} is SGLang's own flag: give it to the server, not here")
        self.error(f"unrecognized arguments: {' '.join(flags)}")


def commands_of(parser: argparse.ArgumentParser) -> dict[str, _Parser]:
    """Return the parsers of a parser's commands by name."""
    kind = argparse._SubParsersAction  # noqa: SLF001 - argparse lists the commands nowhere else
    actions = (action for action in parser._actions if isinstance(action, kind))  # noqa: SLF001 - the same
    return next((dict(action.choices) for action in actions), {})


def known_words(parser: argparse.ArgumentParser) -> list[str]:
    """Return the flags and commands of a parser."""
    actions = parser._actions  # noqa: SLF001 - argparse lists the flags nowhere else
    flags = [flag for action in actions for flag in action.option_strings]
    return [*flags, *commands_of(parser)]


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = _Parser(
        prog=PROGRAM, description="Watches an SGLang server, says what limits it, and names the flag to change."
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(required=True, dest="command", metavar="COMMAND")
    for run, words, description, flags in _COMMANDS:
        command = commands.add_parser(run.__name__, help=words, description=description)
        command.set_defaults(run=run)
        for flag in flags:
            flag(command)
    return parser


def run(argv: Sequence[str]) -> int:
    """Run one command and return its exit status. Raise `UsageError`."""
    parser = make_parser()
    arguments, unknown = parser.parse_known_args(argv)
    given = vars(arguments)
    command = given.pop("command")
    if unknown:  # the error names the command that they were given to
        commands_of(parser)[command].refuse(unknown)
    status: int = given.pop("run")(**given)
    return status


def _command(words: str, description: str | None, *flags: _Flag) -> Callable[[_Run], _Run]:
    """Return a decorator that makes a function the command of its name, with these flags."""

    def decorate(run: _Run) -> _Run:
        _COMMANDS.append((run, words, description, flags))
        return run

    return decorate


def _flag(flag_and_metavar: str, words: str, **more: Any) -> _Flag:
    """Describe a flag such as `--output FILE`, a switch such as `--loop`, or an argument such as `logs LOG`."""
    name, _, metavar = flag_and_metavar.partition(" ")
    kind: dict[str, Any] = {"metavar": metavar} if metavar else {"action": "store_true"}
    return lambda parser: parser.add_argument(name, help=words, **kind, **more)


def _settings(*names: str) -> _Flag:
    """Describe flags that are settings of `serve` as well, with the same environment variables."""
    return lambda parser: config.add_arguments(parser, [option for option in config.OPTIONS if option.name in names])


def _logs(nargs: str, *settings: str) -> tuple[_Flag, ...]:
    """Describe logs as arguments, and the settings by which they are read and judged."""
    words = (
        "read so much of each piped or packed log, whatever it looks like (default 8, and only what looks like a log)"
    )
    return (
        _flag("logs LOG", "a log, a glob, a .gz file, or - for standard input; in any order", nargs=nargs),
        _settings("profile", "threshold", *settings),
        _flag("--max-gb GB", words, type=float),
    )


def _config_file(parser: argparse.ArgumentParser) -> None:
    config.add_arguments(parser, config.OPTIONS)
    parser.add_argument("--config", metavar="FILE.yml", help="a YAML file with the same keys [SGLANG_TUNING_CONFIG]")


@_command("watch a server and serve /metrics", "Watch a server and serve /metrics and a page.", _config_file)
def serve(**given: Any) -> int:
    """Watch a server until a signal ends it."""
    _log_to_stderr()
    for problem in config.unknown_variables(os.environ):
        logging.getLogger("sglang_tuning_exporter").warning(problem)
    settings = config.resolve(given, os.environ)
    from sglang_tuning_exporter.serve.run import serve

    return serve(settings)


@_command(
    "what limited a server, read from its log",
    "Read a log; say what limited the server and which flag to change. Status 0: nothing urgent; 1: a warning"
    " or worse (--fail-on); 2: not a log.",
    *_logs("+", "accept", "wait"),
    lambda parser: config.add_arguments(parser, [config.REPORT_FORMAT]),
    _flag("--output FILE", "where to write it (default: standard output)", type=Path),
    _flag(
        "--against LOG",
        "logs from before: say what got better or worse since, beside the changed arguments",
        action="extend",
        nargs="+",
        default=[],
    ),
    _flag(
        f"--fail-on {'|'.join(config.FAIL_ON)}",
        "from which severity on the status is 1 (default warning)",
        default="warning",
    ),
)
def report(*, max_gb: float | None, **given: Any) -> int:
    """Print what limited a server, read from its logs."""
    from sglang_tuning_exporter.core import report

    return report.run(most=_byte_limit(max_gb), **_layered(given, config.REPORT_FORMAT))


@_command(
    "what a line of a log was read as, and why",
    "Print what a line was read as, whether it counts, and whether text of a client could have printed it; without a"
    " line, how many lines of the log were read as what.",
    _flag("log FILE[:LINE]", "a log, also packed, or - for standard input, and the number of a line from 1 on"),
)
def explain(*, log: str) -> int:
    """Print how a log, or one line of it, was read."""
    from sglang_tuning_exporter.core import inputs
    from sglang_tuning_exporter.core.explain import explain
    from sglang_tuning_exporter.core.report import write

    name, _, number = log.rpartition(":")
    is_line = bool(name) and number.isdecimal() and not Path(log).exists()
    lines = (line for source in inputs.find([name if is_line else log], sys.stdin.buffer) for line in source.lines())
    write(explain(lines, int(number) if is_line else None))
    return 0


@_command(
    "what a server would do with more or fewer requests at once",
    "Print throughput, inter-token latency and KV cache use at 1, 2, 4 … requests at once, by the step times in a log."
    " Status 1: the step times at other batches are not known.",
    *_logs("+"),
    _flag("--format text|json", "default text", default="text"),
)
def plan(*, max_gb: float | None, **given: Any) -> int:
    """Print what a server would do with more or fewer concurrent requests."""
    from sglang_tuning_exporter.core.plan import run

    return run(most=_byte_limit(max_gb), **_layered(given))


@_command(
    "serve a recorded SGLang as if it were live",
    None,
    _flag("directory DIR", "a recording, or the name of a packaged one: retract, steady"),
    _flag("--speed TIMES", "how many times as fast (default 1)", type=float, default=1.0),
    _flag(
        "--listen-address HOST:PORT", "where /metrics is served (default 127.0.0.1:30001)", default="127.0.0.1:30001"
    ),
    _flag("--log-file PATH", "where the log grows (default: a new temporary file)", type=Path),
    _flag("--loop", "start over at the end, as a restarted server would"),
)
def replay(**given: Any) -> int:
    """Serve a recorded server as if it were live."""
    from sglang_tuning_exporter.recordings.replay import run

    return run(**given)


@_command(
    "record a live server for a bug report",
    "Write a live server's log and metrics into a directory that `replay` serves: without secrets, paths,"
    " hosts, addresses, models' names and requests.",
    _flag("--sglang-url URL", "SGLang's address", required=True),
    _flag("--log-file PATH", "SGLang's log", required=True),
    _flag("--output DIR", "a new directory", type=Path, required=True),
    _flag("--seconds SECONDS", "how long (default: until Ctrl-C)", type=float),
    _settings("api_key_file"),
    _flag(
        "--keep-request-text",
        "keep lines that may hold the text of requests (--log-requests, exceptions), their secrets taken out",
    ),
)
def record(*, output: Path, seconds: float | None, keep_request_text: bool, **given: Any) -> int:
    """Record a live server into a new directory."""
    if seconds is not None and not 0 < seconds < float("inf"):
        raise config.values.UsageError(f"--seconds={seconds}: give a time above 0")
    settings = config.resolve({**given, "log_file": [given["log_file"]]}, os.environ)
    from sglang_tuning_exporter.recordings.record import Recorder, run

    return run(Recorder(settings, output, keep_request_text=keep_request_text), seconds)


@_command(
    "print Alertmanager's notifications as text",
    "A webhook receiver that prints.",
    _flag(
        "--listen-address HOST:PORT", "where Alertmanager posts to (default 127.0.0.1:9742)", default="127.0.0.1:9742"
    ),
)
def notify(*, listen_address: str) -> int:
    """Print Alertmanager's notifications."""
    from sglang_tuning_exporter.recordings.notifications import run

    return run(listen_address)


@_command(
    "a recorded server, the exporter, Prometheus and Alertmanager, until a notification arrives",
    None,
    _flag("--recording DIR", "what to replay (default retract)", default="retract"),
    _flag("--profile PROFILE", "the exporter's profile (default online)", default="online"),
    _flag("--speed TIMES", "how many times as fast (default 12)", type=float, default=12.0),
    _flag("--seconds SECONDS", "end after this long (default: on Ctrl-C)", type=float, default=0.0),
)
def demo(*, recording: str, **given: Any) -> int:
    """Run the whole chain over a recording."""
    from sglang_tuning_exporter.recordings.demo import run

    _log_to_stderr()
    logging.getLogger().setLevel(logging.WARNING)
    return run(recording, **given)


@_command(
    "write the rules and dashboards from the table of diagnoses",
    None,
    _flag("--check", "write nothing; fail when a file is not what would be written"),
    _flag("--output DIR", "where alerts/ and dashboards/ lie (default: here)", type=Path, default=Path()),
    _flag(
        "--time-scale TIMES", "divide every duration in the rules, for a replay at that speed", type=float, default=1.0
    ),
    _flag(
        "--config RULES.yml",
        "severity and labels of alerts, alerts that are off, pools that must exist, links (docs/prometheus.md)",
        type=Path,
    ),
    _flag(
        "--format prometheus|prometheusrule|mimir",
        "of the rules: Prometheus' files (default), manifests of the Prometheus operator, or what mimirtool loads",
        default="prometheus",
    ),
    _flag(
        "--runbook-url BASE",
        "where notifications find the runbooks: BASE/<Alert>, or BASE with {alert} in it (default: no link)",
    ),
    _flag("--grafana-url BASE", "where notifications find Grafana (default: no link)"),
)
def generate(**given: Any) -> int:
    """Write the rules and dashboards, or check them."""
    from sglang_tuning_exporter.mixin import run

    return run(**given)


def _layered(given: dict[str, Any], *more: config.Option) -> dict[str, Any]:
    """Return the given values; a setting among them that was not given comes from its variable or its default."""
    options = [option for option in (*config.OPTIONS, *more) if option.name in given]
    return {**given, **config.layered(options, given, os.environ)}


def _byte_limit(gigabytes: float | None) -> int | None:
    """Return the limit of `--max-gb` in bytes; None where none was given."""
    if gigabytes is not None and not 0 < gigabytes <= 1_000_000:
        raise config.values.UsageError(f"--max-gb={gigabytes:g}: give a number above 0, up to 1000000")
    return None if gigabytes is None else int(gigabytes * (1 << 30)) or 1


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(on_one_line)
    logging.basicConfig(level=logging.INFO, handlers=[handler], format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("urllib3").setLevel(logging.ERROR)


def on_one_line(record: logging.LogRecord) -> bool:
    """Escape the control characters of a record, so that no file name or error controls the terminal; keep it."""
    record.msg, record.args = clean(record.getMessage()), ()
    return True
