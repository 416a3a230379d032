"""The parser of the command line: every command with its flags."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from sglang_tuning_exporter import __version__
from sglang_tuning_exporter.cli import commands as run
from sglang_tuning_exporter.config import UsageError, add_arguments, suggestion
from sglang_tuning_exporter.state.profiles import DEFAULT_PROFILE

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAM = "sglang-tuning-exporter"
_Commands: TypeAlias = "argparse._SubParsersAction[_Parser]"  # noqa: SLF001 - argparse has no other name for it


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with the nearest known word."""

    def error(self, message: str) -> NoReturn:
        mistyped = re.search(r"(?:unrecognized arguments: |invalid choice: ')([^\s'=]+)", message)
        near = suggestion(mistyped[1], words(self)) if mistyped else ""
        raise UsageError(f"{message}{near}; see {self.prog} --help")

    def parse_known(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """Parse the command line; an unknown flag is reported by the command it was given to."""
        arguments, unknown = self.parse_known_args(argv)
        if unknown:
            commands_of(self)[arguments.command].error(f"unrecognized arguments: {' '.join(unknown)}")
        return arguments


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of a parser's commands by name."""
    actions = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))  # noqa: SLF001 - argparse lists them nowhere else
    return next((dict(action.choices) for action in actions), {})


def words(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
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
    for add in (
        _add_serve,
        _add_report,
        _add_backfill,
        _add_plan,
        _add_replay,
        _add_record,
        _add_notify,
        _add_generate,
        _add_demo,
        _add_completion,
    ):
        add(commands)
    return parser


def _add_serve(commands: _Commands) -> None:
    serve = commands.add_parser(
        "serve", help="watch a server and serve /metrics", description="Watch a server and serve /metrics and a page."
    )
    add_arguments(serve)
    serve.set_defaults(run=run.serve)


def _add_report(commands: _Commands) -> None:
    report = commands.add_parser(
        "report",
        help="what limited a server, read from its log",
        description="Read a log; say what limited the server and which flag to change. Status 0: nothing to change;"
        " 1: findings; 2: not a log.",
    )
    report.add_argument(
        "logs", nargs="+", metavar="LOG", help="a log, a glob, a .gz file, or - for standard input; in any order"
    )
    report.add_argument(
        "--format",
        default=run.variable("FORMAT", "text"),
        metavar="text|json|html",
        help="default text; html is one self-contained page [SGLANG_TUNING_FORMAT]",
    )
    report.add_argument("--output", type=Path, metavar="FILE", help="where to write it (default: standard output)")
    report.add_argument(
        "--against",
        action="extend",
        nargs="+",
        default=[],
        metavar="LOG",
        help="logs from before: say what got better or worse since, and whether the change of arguments is the likely cause",
    )
    _add_jobs(report)
    _add_judging(report)
    report.set_defaults(run=run.report)


def _add_replay(commands: _Commands) -> None:
    replay = commands.add_parser("replay", help="serve a recorded SGLang as if it were live")
    replay.add_argument("directory", metavar="DIR", help="a recording, or the name of a packaged one: retract, steady")
    replay.add_argument("--speed", type=float, default=1.0, metavar="TIMES", help="how many times as fast (default 1)")
    replay.add_argument(
        "--listen-address",
        default="127.0.0.1:30001",
        metavar="HOST:PORT",
        help="where /metrics is served (default 127.0.0.1:30001)",
    )
    replay.add_argument(
        "--log-file", type=Path, metavar="PATH", help="where the log grows (default: a new temporary file)"
    )
    replay.add_argument("--loop", action="store_true", help="start over at the end, as a restarted server would")
    replay.set_defaults(run=run.replay)


def _add_notify(commands: _Commands) -> None:
    notify = commands.add_parser(
        "notify", help="print Alertmanager's notifications as text", description="A webhook receiver that prints."
    )
    notify.add_argument(
        "--listen-address",
        default="127.0.0.1:9742",
        metavar="HOST:PORT",
        help="where Alertmanager posts to (default 127.0.0.1:9742)",
    )
    notify.set_defaults(run=run.notify)


def _add_generate(commands: _Commands) -> None:
    generate = commands.add_parser("generate", help="write the rules and dashboards from the table of diagnoses")
    generate.add_argument(
        "--check", action="store_true", help="write nothing; fail when a file is not what would be written"
    )
    generate.add_argument(
        "--output", type=Path, default=Path(), metavar="DIR", help="where alerts/ and dashboards/ lie (default: here)"
    )
    generate.add_argument(
        "--time-scale",
        type=float,
        default=1.0,
        metavar="TIMES",
        help="divide every duration in the rules, for a replay at that speed",
    )
    generate.add_argument(
        "--runbook-url",
        metavar="BASE",
        help="where notifications find the runbooks: BASE/<Alert>, or BASE with {alert} in it (default: the exporter that saw it)",
    )
    generate.add_argument(
        "--grafana-url", metavar="BASE", help="where notifications find Grafana (default http://localhost:3000)"
    )
    generate.set_defaults(run=run.generate)


def _add_demo(commands: _Commands) -> None:
    demo = commands.add_parser(
        "demo", help="a recorded server, the exporter, Prometheus and Alertmanager, until a notification arrives"
    )
    demo.add_argument("--recording", default="retract", metavar="DIR", help="what to replay (default retract)")
    demo.add_argument(
        "--profile",
        default=DEFAULT_PROFILE,
        metavar="PROFILE",
        help=f"the exporter's profile (default {DEFAULT_PROFILE})",
    )
    demo.add_argument("--speed", type=float, default=25.0, metavar="TIMES", help="how many times as fast (default 25)")
    demo.add_argument(
        "--seconds", type=float, default=0.0, metavar="SECONDS", help="end after this long (default: on Ctrl-C)"
    )
    demo.set_defaults(run=run.demo)


def _add_completion(commands: _Commands) -> None:
    completion = commands.add_parser(
        "completion",
        help="print a script that completes this command line in a shell",
        description="Print a completion script. bash: source <(sglang-tuning-exporter completion bash)",
    )
    completion.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell to write it for")
    completion.set_defaults(run=_completion)


def _add_backfill(commands: _Commands) -> None:
    backfill = commands.add_parser(
        "backfill",
        help="a server's log as metrics, for a Prometheus that was not there",
        description="Write what the exporter would have exposed over a log as OpenMetrics with times, for"
        " `promtool tsdb create-blocks-from openmetrics`.",
    )
    backfill.add_argument(
        "logs", nargs="+", metavar="LOG", help="a log, a glob, a .gz file, or - for standard input; in any order"
    )
    backfill.add_argument("--output", type=Path, required=True, metavar="FILE", help="where to write it")
    _add_jobs(backfill)
    _add_judging(backfill)
    backfill.add_argument("--job", default="sglang", metavar="NAME", help="the series' job (default sglang)")
    backfill.add_argument(
        "--instance", default="backfill", metavar="NAME", help="the series' instance (default backfill)"
    )
    backfill.add_argument(
        "--grafana-url", metavar="BASE", help="Grafana's address in the printed link (default http://localhost:3000)"
    )
    backfill.add_argument("--date", metavar="YYYY-MM-DD", help="the day of the first line, of a log without dates")
    backfill.set_defaults(run=run.backfill)


def _add_plan(commands: _Commands) -> None:
    plan = commands.add_parser(
        "plan",
        help="what a server would do with more or fewer requests at once",
        description="Print throughput, inter-token latency, KV cache use and the wait for a first token at 1, 2, 4 … requests at once, by"
        " measured step times: of a live server (0.5.18 on), or of its log. Status 1: the step time is not known.",
    )
    plan.add_argument("logs", nargs="*", metavar="LOG", help="a log, a glob, a .gz file, or - for standard input")
    plan.add_argument("--sglang-url", metavar="URL", help="SGLang's address, in place of logs")
    plan.add_argument(
        "--seconds", type=float, default=120.0, metavar="SECONDS", help="how long to watch it (default 120)"
    )
    plan.add_argument(
        "--api-key-file", metavar="FILE", help="file with SGLang's --api-key [SGLANG_TUNING_API_KEY_FILE]"
    )
    plan.add_argument("--format", default="text", metavar="text|json", help="default text")
    _add_judging(plan)
    plan.set_defaults(run=run.plan)


def _add_record(commands: _Commands) -> None:
    record = commands.add_parser(
        "record",
        help="record a live server for a bug report",
        description="Write a live server's log and metrics into a directory that `replay` serves: without secrets, paths,"
        " hosts, addresses, models' names and requests.",
    )
    record.add_argument("--sglang-url", required=True, metavar="URL", help="SGLang's address")
    record.add_argument("--log-file", required=True, metavar="PATH", help="SGLang's log")
    record.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new directory")
    record.add_argument("--seconds", type=float, metavar="SECONDS", help="how long (default: until Ctrl-C)")
    record.add_argument(
        "--api-key-file", metavar="FILE", help="file with SGLang's --api-key [SGLANG_TUNING_API_KEY_FILE]"
    )
    record.add_argument(
        "--keep-request-text",
        action="store_true",
        help="keep lines that may hold the text of requests (--log-requests, exceptions), their secrets taken out",
    )
    record.set_defaults(run=run.record)


def _add_judging(parser: argparse.ArgumentParser) -> None:
    """Add the settings of profile and thresholds to a command that reads old logs."""
    parser.add_argument(
        "--profile",
        default=run.variable("PROFILE", DEFAULT_PROFILE),
        metavar="PROFILE",
        help=f"what the server was for (default {DEFAULT_PROFILE}) [SGLANG_TUNING_PROFILE]",
    )
    parser.add_argument(
        "--threshold",
        action="append",
        metavar="NAME=VALUE",
        help="a figure of your own in place of the profile's, as with serve [SGLANG_TUNING_THRESHOLD]",
    )
    parser.add_argument(
        "--max-gb",
        type=float,
        metavar="GB",
        help="read so much of each piped or packed log, whatever it looks like (default 8, and only what looks like a log)",
    )


def _add_jobs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="most processes: beside this one, one reads each large log (default: one for each core)",
    )


def _completion(arguments: argparse.Namespace) -> int:
    from sglang_tuning_exporter.cli.completion import script

    flags = {name: words(command) for name, command in commands_of(make_parser()).items()}
    sys.stdout.write(script(PROGRAM, arguments.shell, flags))
    return 0
