"""The command line. Each command imports what it needs when it runs, so that `--help` is quick."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from sglang_tuning_exporter import __version__
from sglang_tuning_exporter.config import (
    ENVIRONMENT_PREFIX,
    UsageError,
    add_arguments,
    agreeing,
    resolve,
    suggestion,
    thresholds,
    unknown_variables,
)
from sglang_tuning_exporter.sglang.clean import clean
from sglang_tuning_exporter.state.profiles import DEFAULT_PROFILE

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAM = "sglang-tuning-exporter"
USAGE_STATUS = 2
BROKEN_PIPE_STATUS = 141  # what a shell says of a program that SIGPIPE ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status. A user's mistake is one line on stderr and status 2."""
    _open_standard_streams()
    try:
        arguments = make_parser().parse_known(argv)
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except UsageError as error:
        with suppress(OSError):  # a full disk, a broken pipe: the status says it too
            sys.stderr.write(f"{PROGRAM}: {clean(' '.join(str(error).split()))}\n")
        return USAGE_STATUS
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has enough of it. The signal itself stays ignored, as Python has it: it would end a
        # server whose client hangs up.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE_STATUS
    return status


def _open_standard_streams() -> None:
    """Put `/dev/null` where a stream was closed: the next file or socket would get its number, and what is printed."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115 - for as long as we run


_Commands: TypeAlias = "argparse._SubParsersAction[_Parser]"  # noqa: SLF001 - argparse has no other name for it


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with the nearest known word."""

    def error(self, message: str) -> NoReturn:
        mistyped = re.search(r"(?:unrecognized arguments: |invalid choice: ')([^\s'=]+)", message)
        near = suggestion(mistyped[1], words(self)) if mistyped else ""
        raise UsageError(f"{message}{near}; see {self.prog} --help")

    def parse_known(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """Parse the command line; an unknown flag is an error of the command that it was given to."""
        arguments, unknown = self.parse_known_args(argv)
        if unknown:
            commands_of(self)[arguments.command].error(f"unrecognized arguments: {' '.join(unknown)}")
        return arguments


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of a parser's commands by name."""
    actions = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))  # noqa: SLF001 - argparse lists them nowhere else
    return next((dict(action.choices) for action in actions), {})


def words(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return what may be typed after a parser's program: its flags and commands, with the action of each."""
    flags = {flag: action for action in parser._actions for flag in action.option_strings}  # noqa: SLF001 - argparse lists them nowhere else
    return {**flags, **dict.fromkeys(commands_of(parser), argparse.Action([], "command"))}


def make_parser() -> _Parser:
    """Make the parser of the whole command line."""
    parser = _Parser(
        prog=PROGRAM, description="Watches an SGLang server, says what limits it, and names the flag to change."
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(required=True, dest="command", metavar="COMMAND")

    serve = commands.add_parser(
        "serve", help="watch a server and serve /metrics", description="Watch a server and serve /metrics and a page."
    )
    add_arguments(serve)
    serve.set_defaults(run=_serve)

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
        default=_variable("FORMAT", "text"),
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
    report.set_defaults(run=_report)

    _add_backfill(commands)

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
    replay.set_defaults(run=_replay)

    _add_record(commands)

    notify = commands.add_parser(
        "notify", help="print Alertmanager's notifications as text", description="A webhook receiver that prints."
    )
    notify.add_argument(
        "--listen-address",
        default="127.0.0.1:9742",
        metavar="HOST:PORT",
        help="where Alertmanager posts to (default 127.0.0.1:9742)",
    )
    notify.set_defaults(run=_notify)

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
    generate.set_defaults(run=_generate)

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
    demo.add_argument("--speed", type=float, default=15.0, metavar="TIMES", help="how many times as fast (default 15)")
    demo.add_argument(
        "--seconds", type=float, default=0.0, metavar="SECONDS", help="end after this long (default: on Ctrl-C)"
    )
    demo.set_defaults(run=_demo)

    completion = commands.add_parser(
        "completion",
        help="print a script that completes this command line in a shell",
        description="Print a completion script. bash: source <(sglang-tuning-exporter completion bash)",
    )
    completion.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell to write it for")
    completion.set_defaults(run=_completion)
    return parser


def _completion(arguments: argparse.Namespace) -> int:
    from sglang_tuning_exporter.completion import script

    flags = {name: words(command) for name, command in commands_of(make_parser()).items()}
    sys.stdout.write(script(PROGRAM, arguments.shell, flags))
    return 0


def _add_judging(parser: argparse.ArgumentParser) -> None:
    """Give a command over logs of the past the settings that figures are judged by."""
    parser.add_argument(
        "--profile",
        default=_variable("PROFILE", DEFAULT_PROFILE),
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
    backfill.add_argument("--date", metavar="YYYY-MM-DD", help="the day of the first line, of a log without dates")
    backfill.set_defaults(run=_backfill)


def _add_jobs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="processes that read a large log (default: one for each core; 1: this one)",
    )


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
    record.set_defaults(run=_record)


class _OneLine(logging.Formatter):
    """What is logged quotes file names and errors: no character of theirs may move a terminal's cursor or begin a line."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base class's name
        return clean(super().formatMessage(record))


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("urllib3").setLevel(logging.ERROR)


def _serve(arguments: argparse.Namespace) -> int:
    _log_to_stderr()
    for words_of_it in unknown_variables(os.environ):
        logging.getLogger("sglang_tuning_exporter").warning(words_of_it)
    config = resolve(arguments, os.environ)
    from sglang_tuning_exporter.serve.run import serve

    return serve(config)


def _variable(name: str, default: str) -> str:
    return os.environ.get(ENVIRONMENT_PREFIX + name) or default


def _own_thresholds(arguments: argparse.Namespace) -> dict[str, float]:
    own = arguments.threshold or _variable("THRESHOLD", "")
    return agreeing(thresholds("--threshold", own), arguments.profile) if own else {}


def _jobs(arguments: argparse.Namespace) -> int:
    from sglang_tuning_exporter.report.cores import MOST_JOBS, available

    if arguments.jobs is None:
        return available()
    if not 1 <= arguments.jobs <= MOST_JOBS:
        raise UsageError(f"--jobs={arguments.jobs}: give a number from 1 to {MOST_JOBS}")
    jobs: int = arguments.jobs
    return jobs


def _report(arguments: argparse.Namespace) -> int:
    from sglang_tuning_exporter import report

    return report.run(
        arguments.logs,
        format=arguments.format,
        output=arguments.output,
        profile=arguments.profile,
        own_thresholds=_own_thresholds(arguments),
        against=arguments.against,
        jobs=_jobs(arguments),
        most=_most(arguments),
    )


def _backfill(arguments: argparse.Namespace) -> int:
    from sglang_tuning_exporter.report import backfill

    return backfill.run(
        arguments.logs,
        output=arguments.output,
        profile=arguments.profile,
        job=arguments.job,
        instance=arguments.instance,
        date=arguments.date,
        own_thresholds=_own_thresholds(arguments),
        jobs=_jobs(arguments),
        most=_most(arguments),
    )


def _most(arguments: argparse.Namespace) -> int | None:
    """Bytes to read at most of what is piped or packed, where somebody said so."""
    gigabytes = arguments.max_gb
    if gigabytes is not None and not 0 < gigabytes <= 1_000_000:
        raise UsageError(f"--max-gb={gigabytes:g}: give a number above 0, up to 1000000")
    return None if gigabytes is None else int(gigabytes * (1 << 30)) or 1


def _replay(arguments: argparse.Namespace) -> int:
    from sglang_tuning_exporter.recordings import replay

    directory = replay.packaged(arguments.directory) if _is_name(arguments.directory) else Path(arguments.directory)
    return replay.run(
        directory,
        speed=arguments.speed,
        listen_address=arguments.listen_address,
        log_file=arguments.log_file,
        loop=arguments.loop,
    )


def _record(arguments: argparse.Namespace) -> int:
    seconds = arguments.seconds
    if seconds is not None and not 0 < seconds < float("inf"):
        raise UsageError(f"--seconds={seconds}: give a time above 0")
    watched = argparse.ArgumentParser()
    add_arguments(watched)
    given = ["--sglang-url", arguments.sglang_url, "--log-file", arguments.log_file]
    given += ["--api-key-file", arguments.api_key_file] if arguments.api_key_file is not None else []
    config = resolve(watched.parse_args(given), os.environ)
    from sglang_tuning_exporter.recordings import record as recorder

    assert config.sglang_url is not None
    assert config.metrics_url is not None
    recording = recorder.Recorder(
        config.sglang_url,
        config.metrics_url,
        arguments.log_file,
        arguments.output,
        api_key=config.api_key,
        keep_request_text=arguments.keep_request_text,
    )
    return recorder.run(recording, arguments.output, seconds)


def _is_name(directory: str) -> bool:
    return "/" not in directory and directory not in {".", ".."} and not Path(directory).is_dir()


def _notify(arguments: argparse.Namespace) -> int:
    from sglang_tuning_exporter.recordings.notifications import run

    return run(arguments.listen_address)


def _generate(arguments: argparse.Namespace) -> int:
    from sglang_tuning_exporter.mixin import run
    from sglang_tuning_exporter.mixin.annotations import GRAFANA_URL, RUNBOOK_URL, Links

    links = Links(arguments.runbook_url or RUNBOOK_URL, arguments.grafana_url or GRAFANA_URL)
    return run(arguments.output, check=arguments.check, time_scale=arguments.time_scale, links=links)


def _demo(arguments: argparse.Namespace) -> int:
    from sglang_tuning_exporter.recordings.demo import run

    _log_to_stderr()
    logging.getLogger().setLevel(logging.WARNING)
    return run(arguments.recording, profile=arguments.profile, speed=arguments.speed, seconds=arguments.seconds)
