"""The parser of the command line: every command with its flags."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from sglang_tuning_exporter import __version__
from sglang_tuning_exporter.cli import commands as run
from sglang_tuning_exporter.config import FAIL_ON, REPORT_FORMATS, add_arguments
from sglang_tuning_exporter.config.profiles import DEFAULT_PROFILE
from sglang_tuning_exporter.config.values import UsageError, suggestion

PROGRAM = "sglang-tuning-exporter"


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with the nearest known word."""

    def error(self, message: str) -> NoReturn:
        mistyped = re.search(r"(?:unrecognized arguments: |invalid choice: ')([^\s'=]+)", message)
        near = suggestion(mistyped[1], known_words(self)) if mistyped else ""
        raise UsageError(f"{message}{near}; see {self.prog} --help")

    def parse_known(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """Parse the command line; an unknown flag is reported by the command it was given to."""
        arguments, unknown = self.parse_known_args(argv)
        if unknown:
            commands_of(self)[arguments.command].error(f"unrecognized arguments: {' '.join(unknown)}")
        return arguments

    def flag(self, flag_and_metavar: str, help: str, **more: Any) -> None:  # noqa: A002 - argparse's name
        """Add a flag such as `--output FILE`, a switch such as `--loop`, or a positional argument such as `log LOG`."""
        name, _, metavar = flag_and_metavar.partition(" ")
        if metavar:
            more["metavar"] = metavar
        elif name.startswith("-"):
            more["action"] = "store_true"
        self.add_argument(name, help=help, **more)


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of a parser's commands by name."""
    actions = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))  # noqa: SLF001 - argparse lists them nowhere else
    return next((dict(action.choices) for action in actions), {})


def known_words(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return the flags and commands of a parser, with the action of each."""
    flags = {flag: action for action in parser._actions for flag in action.option_strings}  # noqa: SLF001 - argparse lists them nowhere else
    return {**flags, **dict.fromkeys(commands_of(parser), argparse.Action([], "command"))}


def make_parser() -> _Parser:
    """Return the parser of the whole command line."""
    parser = _Parser(
        prog=PROGRAM, description="Watches an SGLang server, says what limits it, and names the flag to change."
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(required=True, dest="command", metavar="COMMAND")

    def add(run: Callable[..., int], help: str, description: str | None = None) -> _Parser:  # noqa: A002 - argparse's name
        command: _Parser = commands.add_parser(run.__name__, help=help, description=description)
        command.set_defaults(run=run)
        return command

    add_arguments(add(run.serve, "watch a server and serve /metrics", "Watch a server and serve /metrics and a page."))
    _add_of_old_logs(add)
    _add_recordings(add)
    generate = add(run.generate, "write the rules and dashboards from the table of diagnoses")
    generate.flag("--check", "write nothing; fail when a file is not what would be written")
    generate.flag("--output DIR", "where alerts/ and dashboards/ lie (default: here)", type=Path, default=Path())
    generate.flag(
        "--time-scale TIMES", "divide every duration in the rules, for a replay at that speed", type=float, default=1.0
    )
    generate.flag(
        "--config RULES.yml",
        "severity and labels of alerts, alerts that are off, pools that must exist, links (docs/prometheus.md)",
        type=Path,
    )
    generate.flag(
        "--format prometheus|prometheusrule|mimir",
        "of the rules: Prometheus' files (default), manifests of the Prometheus operator, or what mimirtool loads",
        default="prometheus",
    )
    generate.flag(
        "--runbook-url BASE",
        "where notifications find the runbooks: BASE/<Alert>, or BASE with {alert} in it (default: no link)",
    )
    generate.flag("--grafana-url BASE", "where notifications find Grafana (default: no link)")
    return parser


def _add_of_old_logs(add: Callable[..., _Parser]) -> None:
    report = add(
        run.report,
        "what limited a server, read from its log",
        "Read a log; say what limited the server and which flag to change. Status 0: nothing urgent; 1: a warning"
        " or worse (--fail-on); 2: not a log.",
    )
    _add_logs(report, nargs="+")
    report.flag(
        f"--format {'|'.join(REPORT_FORMATS)}",
        "default text; html is one self-contained page [SGLANG_TUNING_FORMAT]",
    )
    report.flag("--output FILE", "where to write it (default: standard output)", type=Path)
    report.flag(
        "--against LOG",
        "logs from before: say what got better or worse since, beside the changed arguments",
        action="extend",
        nargs="+",
        default=[],
    )
    report.flag(
        f"--fail-on {'|'.join(FAIL_ON)}", "from which severity on the status is 1 (default warning)", default="warning"
    )
    backfill = add(
        run.backfill,
        "a server's log as metrics, for a Prometheus that was not there",
        "Write what the exporter would have exposed over a log as OpenMetrics with times, for"
        " `promtool tsdb create-blocks-from openmetrics`.",
    )
    _add_logs(backfill, nargs="+")
    backfill.flag("--output FILE", "where to write it", type=Path, required=True)
    backfill.flag("--job NAME", "the series' job (default sglang)", default="sglang")
    backfill.flag("--instance NAME", "the series' instance (default backfill)", default="backfill")
    backfill.flag("--grafana-url BASE", "Grafana's address in the printed link (default http://localhost:3000)")
    backfill.flag("--date YYYY-MM-DD", "the day of the first line, of a log without dates")
    explain = add(
        run.explain,
        "what a line of a log was read as, and why",
        "Print what a line was read as, whether it counts, and whether text of a client could have printed it; without a"
        " line, how many lines of the log were read as what.",
    )
    explain.flag("log FILE[:LINE]", "a log, also packed, or - for standard input, and the number of a line from 1 on")
    plan = add(
        run.plan,
        "what a server would do with more or fewer requests at once",
        "Print throughput, inter-token latency, KV cache use and the wait for a first token at 1, 2, 4 … requests at once, by"
        " measured step times: of a live server (0.5.18 on), or of its log. Status 1: the step time is not known.",
    )
    _add_logs(plan, nargs="*")
    plan.flag("--sglang-url URL", "SGLang's address, in place of logs")
    plan.flag("--seconds SECONDS", "how long to watch it (default 120)", type=float, default=120.0)
    _add_key(plan)
    plan.flag("--format text|json", "default text", default="text")


def _add_recordings(add: Callable[..., _Parser]) -> None:
    replay = add(run.replay, "serve a recorded SGLang as if it were live")
    replay.flag("directory DIR", "a recording, or the name of a packaged one: retract, steady")
    replay.flag("--speed TIMES", "how many times as fast (default 1)", type=float, default=1.0)
    replay.flag(
        "--listen-address HOST:PORT", "where /metrics is served (default 127.0.0.1:30001)", default="127.0.0.1:30001"
    )
    replay.flag("--log-file PATH", "where the log grows (default: a new temporary file)", type=Path)
    replay.flag("--loop", "start over at the end, as a restarted server would")
    record = add(
        run.record,
        "record a live server for a bug report",
        "Write a live server's log and metrics into a directory that `replay` serves: without secrets, paths,"
        " hosts, addresses, models' names and requests.",
    )
    record.flag("--sglang-url URL", "SGLang's address", required=True)
    record.flag("--log-file PATH", "SGLang's log", required=True)
    record.flag("--output DIR", "a new directory", type=Path, required=True)
    record.flag("--seconds SECONDS", "how long (default: until Ctrl-C)", type=float)
    _add_key(record)
    record.flag(
        "--keep-request-text",
        "keep lines that may hold the text of requests (--log-requests, exceptions), their secrets taken out",
    )
    notify = add(run.notify, "print Alertmanager's notifications as text", "A webhook receiver that prints.")
    notify.flag(
        "--listen-address HOST:PORT", "where Alertmanager posts to (default 127.0.0.1:9742)", default="127.0.0.1:9742"
    )
    demo = add(run.demo, "a recorded server, the exporter, Prometheus and Alertmanager, until a notification arrives")
    demo.flag("--recording DIR", "what to replay (default retract)", default="retract")
    demo.flag("--profile PROFILE", f"the exporter's profile (default {DEFAULT_PROFILE})", default=DEFAULT_PROFILE)
    demo.flag("--speed TIMES", "how many times as fast (default 12)", type=float, default=12.0)
    demo.flag("--seconds SECONDS", "end after this long (default: on Ctrl-C)", type=float, default=0.0)


def _add_key(command: _Parser) -> None:
    command.flag("--api-key-file FILE", "file with SGLang's --api-key [SGLANG_TUNING_API_KEY_FILE]")


def _add_logs(command: _Parser, nargs: str) -> None:
    """Add the logs, and the settings by which they are read and judged."""
    command.flag("logs LOG", "a log, a glob, a .gz file, or - for standard input; in any order", nargs=nargs)
    command.flag(
        "--profile PROFILE",
        f"what the server was for (default {DEFAULT_PROFILE}) [SGLANG_TUNING_PROFILE]",
    )
    command.flag(
        "--threshold NAME=VALUE",
        "a figure of your own in place of the profile's, as with serve [SGLANG_TUNING_THRESHOLD]",
        action="append",
    )
    if nargs == "+":
        command.flag(
            "--accept NAME=REASON",
            "a diagnosis that is no trouble here, and why, as with serve [SGLANG_TUNING_ACCEPT]",
            action="append",
        )
        command.flag(
            "--wait NAME=DURATION",
            "how long a diagnosis must hold before its alert begins, as with serve [SGLANG_TUNING_WAIT]",
            action="append",
        )
    command.flag(
        "--max-gb GB",
        "read so much of each piped or packed log, whatever it looks like (default 8, and only what looks like a log)",
        type=float,
    )
